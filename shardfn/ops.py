"""The ops under the collectives: a kernel and a transpose each, which decide what every gradient is."""

from __future__ import annotations

from shardfn import transport
from shardfn.primitive import Op, primitive

psum: Op = primitive(
    "psum",
    "str group",
    kernel=lambda x, group: transport.all_reduce(x, "sum", group),
    transpose=lambda ct, group: pvary(ct, group),
)
pvary: Op = primitive(
    "pvary",
    "str group",
    kernel=lambda x, group: transport.copy(x),
    transpose=lambda ct, group: psum(ct, group),
)
pmax: Op = primitive("pmax", "str group", kernel=lambda x, group: transport.all_reduce(x, "max", group), transpose=None)
pmin: Op = primitive("pmin", "str group", kernel=lambda x, group: transport.all_reduce(x, "min", group), transpose=None)
all_gather: Op = primitive(
    "all_gather",
    "int dim, int size, str group",
    kernel=transport.all_gather,
    transpose=lambda ct, dim, size, group: reduce_scatter(ct, dim, size, group),
)
reduce_scatter: Op = primitive(
    "reduce_scatter",
    "int dim, int size, str group",
    kernel=transport.reduce_scatter,
    transpose=lambda ct, dim, size, group: all_gather(ct, dim, size, group),
)
all_gather_invariant: Op = primitive(
    "all_gather_invariant",
    "int dim, int index, int size, str group",
    kernel=lambda x, dim, index, size, group: transport.all_gather(x, dim, size, group),
    transpose=lambda ct, dim, index, size, group: local_slice(ct, dim, index, size, group),
)
local_slice: Op = primitive(
    "local_slice",
    "int dim, int index, int size, str group",
    kernel=lambda x, dim, index, size, group: transport.piece(x, dim, index, size),
    transpose=lambda ct, dim, index, size, group: all_gather_invariant(ct, dim, index, size, group),
)
ppermute: Op = primitive(
    "ppermute",
    "int[] source, int index, str group",
    kernel=transport.permute,
    transpose=lambda ct, source, index, group: ppermute(ct, transport.inverse(source), index, group),
)
all_to_all: Op = primitive(
    "all_to_all",
    "int split_dim, int concat_dim, int size, str group",
    kernel=transport.all_to_all,
    transpose=lambda ct, split, concat, size, group: all_to_all(ct, concat, split, size, group),
)
ragged_all_to_all: Op = primitive(
    "ragged_all_to_all",
    "int dim, int[] send, int[] receive, int index, str group",
    kernel=transport.ragged_all_to_all,
    transpose=lambda ct, dim, send, receive, index, group: ragged_all_to_all(ct, dim, receive, send, index, group),
)
