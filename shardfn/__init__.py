"""shardfn: functional, JAX-style sharded training on PyTorch.

Models are pure functions over pytrees of parameters; sharding is a property of the parameter values, never of the
model code. `shard_map` runs such a function on a mesh of processes, and collectives by axis name carry the
gradient that calculus gives them, under the transforms of torch.func.
"""

from typing import TYPE_CHECKING, Any

from shardfn import (
    check,
    checkpoint,
    collectives,
    interop,
    lora,
    optim,
    parallel,
    quant,
    run,
    shards,
    strategies,
    translate,
)
from shardfn.collectives.functional import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    pvary,
    reduce_scatter,
)
from shardfn.compiled.graphed import cuda_graph
from shardfn.debugging import debug
from shardfn.forward_mode.jacobian import hessian, jacfwd, jacrev
from shardfn.forward_mode.jvp import jvp
from shardfn.mesh.make import make_mesh
from shardfn.mesh.spec import P, by_path
from shardfn.shards.init import init, init_sharded
from shardfn.shards.placement import Placement, Strategy, ddp, full_shard, hybrid_shard, zero2
from shardfn.shards.random import fold_in
from shardfn.shards.sharding import shard
from shardfn.shards.unsharding import unshard
from shardfn.stages.stage import layers, skip, stage
from shardfn.tiers.activations import offload
from shardfn.transforms.accumulate import accumulate
from shardfn.transforms.autodiff import grad, value_and_grad
from shardfn.transforms.shard_map import shard_map

if TYPE_CHECKING:
    from shardfn import curvature, plan
    from shardfn.compiled.compile import compile
    from shardfn.plan.showing import show

__version__ = "0.1.0"

# Names for planning, showing, curvature and compiling, which a step needs not.
_WHEN_USED = {"show": "plan.showing", "curvature": "curvature", "compile": "compiled.compile", "plan": "plan"}


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"shardfn.{_WHEN_USED[name]}")
    return module if name == _WHEN_USED[name] else getattr(module, name)


__all__ = [
    "P",
    "Placement",
    "Strategy",
    "accumulate",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "by_path",
    "check",
    "checkpoint",
    "collectives",
    "compile",
    "cuda_graph",
    "curvature",
    "ddp",
    "debug",
    "fold_in",
    "full_shard",
    "grad",
    "hessian",
    "hybrid_shard",
    "init",
    "init_sharded",
    "interop",
    "jacfwd",
    "jacrev",
    "jvp",
    "layers",
    "lora",
    "make_mesh",
    "offload",
    "optim",
    "parallel",
    "plan",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "pvary",
    "quant",
    "reduce_scatter",
    "run",
    "shard",
    "shard_map",
    "shards",
    "show",
    "skip",
    "stage",
    "strategies",
    "translate",
    "unshard",
    "value_and_grad",
    "zero2",
]
