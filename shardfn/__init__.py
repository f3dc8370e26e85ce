"""shardfn: functional, JAX-style sharded training on PyTorch.

Models are pure functions over pytrees of parameters; sharding is a property of the parameter values, never of the
model code. `shard_map` runs such a function on a mesh of processes, and collectives by axis name carry the
gradient that calculus gives them, under every torch.func transform.
"""

from shardfn.autodiff import grad, value_and_grad
from shardfn.collectives import (
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
    reduce_scatter,
)
from shardfn.mesh import make_mesh
from shardfn.pattern import redistribute
from shardfn.random import fold_in
from shardfn.shard_map import shard_map
from shardfn.spec import P, by_path, global_shape, local_shape

__version__ = "0.1.0"

__all__ = [
    "P",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "by_path",
    "fold_in",
    "global_shape",
    "grad",
    "local_shape",
    "local_slice",
    "make_mesh",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "redistribute",
    "reduce_scatter",
    "shard_map",
    "value_and_grad",
]
