"""shardfn: functional, JAX-style sharded training on PyTorch.

Models are pure functions over pytrees of parameters; sharding is a property of the parameter values, never of the
model code. `shard_map` runs such a function on a mesh of processes, and collectives by axis name carry the
gradient that calculus gives them, under the transforms of torch.func.
"""

from typing import TYPE_CHECKING, Any

from shardfn import checkpoint, interop, lora, optim, parallel, quant, run, translate
from shardfn.check.findings import Finding, VaryingError, VaryingWarning
from shardfn.check.varying import typeof
from shardfn.collectives.functional import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    local_slice,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
    ragged_all_to_all,
    reduce_scatter,
)
from shardfn.collectives.into_buffers import transports
from shardfn.collectives.ledger import Ledger, Record, ledger
from shardfn.collectives.redistribute import redistribute
from shardfn.compiled.graphed import cuda_graph
from shardfn.debugging import debug
from shardfn.forward_mode.jacobian import hessian, jacfwd, jacrev
from shardfn.forward_mode.jvp import jvp
from shardfn.mesh.grid import AxisName
from shardfn.mesh.make import make_mesh
from shardfn.mesh.spec import P, by_path, global_shape, local_shape
from shardfn.optim.norms import vdot
from shardfn.plans.memory import MemoryEstimate, estimate_memory
from shardfn.shards.init import init, init_sharded
from shardfn.shards.layout import FlatShard, Layout, local_parameters
from shardfn.shards.partition import combine, flatten_by_path, partition
from shardfn.shards.placement import (
    Placement,
    Strategy,
    ddp,
    full_shard,
    hfsdp,
    hpz,
    hybrid_shard,
    hybrid_shard_zero2,
    mics,
    replicate_small,
    shard_grad_op,
    strategy,
    zero1,
    zero2,
    zeropp,
)
from shardfn.shards.putting import to_tier
from shardfn.shards.random import fold_in
from shardfn.shards.replicated import assert_replicated
from shardfn.shards.sharding import shard, shard_named
from shardfn.shards.unsharding import unshard
from shardfn.stages.stage import layers, skip, stage
from shardfn.tiers.activations import offload
from shardfn.transforms.accumulate import accumulate
from shardfn.transforms.autodiff import grad, value_and_grad
from shardfn.transforms.shard_map import shard_map

if TYPE_CHECKING:
    from shardfn import curvature
    from shardfn.compiled.compile import compile
    from shardfn.plans.machines import Chip, Links
    from shardfn.plans.measuring import measure_chip, measure_links
    from shardfn.plans.plan import StepPlan
    from shardfn.plans.planning import plan_mode, plan_step
    from shardfn.plans.profiling import Profile, profile_step
    from shardfn.plans.showing import show

__version__ = "0.1.0"

_WHEN_USED = {  # names for planning, showing, curvature and compiling, which a step needs not
    "Chip": "plans.machines", "Links": "plans.machines", "measure_chip": "plans.measuring", "StepPlan": "plans.plan",
    "measure_links": "plans.measuring", "plan_step": "plans.planning", "plan_mode": "plans.planning",
    "Profile": "plans.profiling", "profile_step": "plans.profiling", "show": "plans.showing", "curvature": "curvature",
    "compile": "compiled.compile",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"shardfn.{_WHEN_USED[name]}")
    return module if name == "curvature" else getattr(module, name)


__all__ = [
    "AxisName",
    "Chip",
    "Finding",
    "FlatShard",
    "Layout",
    "Ledger",
    "Links",
    "MemoryEstimate",
    "P",
    "Placement",
    "Profile",
    "Record",
    "StepPlan",
    "Strategy",
    "VaryingError",
    "VaryingWarning",
    "accumulate",
    "all_gather",
    "all_to_all",
    "assert_replicated",
    "axis_index",
    "axis_size",
    "by_path",
    "checkpoint",
    "combine",
    "compile",
    "cuda_graph",
    "curvature",
    "ddp",
    "debug",
    "estimate_memory",
    "flatten_by_path",
    "fold_in",
    "full_shard",
    "global_shape",
    "grad",
    "hessian",
    "hfsdp",
    "hpz",
    "hybrid_shard",
    "hybrid_shard_zero2",
    "init",
    "init_sharded",
    "interop",
    "jacfwd",
    "jacrev",
    "jvp",
    "layers",
    "ledger",
    "local_parameters",
    "local_shape",
    "local_slice",
    "lora",
    "make_mesh",
    "measure_chip",
    "measure_links",
    "mics",
    "offload",
    "optim",
    "parallel",
    "partition",
    "plan_mode",
    "plan_step",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "profile_step",
    "psum",
    "psum_scatter",
    "pvary",
    "quant",
    "ragged_all_to_all",
    "redistribute",
    "reduce_scatter",
    "replicate_small",
    "run",
    "shard",
    "shard_grad_op",
    "shard_map",
    "shard_named",
    "show",
    "skip",
    "stage",
    "strategy",
    "to_tier",
    "translate",
    "transports",
    "typeof",
    "unshard",
    "value_and_grad",
    "vdot",
    "zero1",
    "zero2",
    "zeropp",
]
