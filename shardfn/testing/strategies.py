"""Hypothesis strategies for tensors, pytrees, meshes and specs.

Tensors are drawn by seed: an example costs one integer, and shrinks as fast.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardfn.mesh.spec import P

Family = Literal["float", "integer", "bool"]

FAMILIES: dict[Family, tuple[torch.dtype, ...]] = {
    "float": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "integer": (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    "bool": (torch.bool,),
}
AXES = ("replica", "shard", "tensor")

Pair = namedtuple("Pair", ["first", "second"])


def shapes(
    min_ndim: int = 0, max_ndim: int = 3, min_size: int = 0, max_size: int = 5
) -> SearchStrategy[tuple[int, ...]]:
    """Shapes; scalars and empty tensors unless the bounds forbid them."""
    size = st.integers(min_size, max_size)
    return st.lists(size, min_size=min_ndim, max_size=max_ndim).map(tuple)


def dtypes(*families: Family) -> SearchStrategy[torch.dtype]:
    """Dtypes of these families, or of all if none is named."""
    return st.sampled_from([dtype for family in families or tuple(FAMILIES) for dtype in FAMILIES[family]])


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: tuple[int, ...] | SearchStrategy[tuple[int, ...]] | None = None,
    dtype: torch.dtype | SearchStrategy[torch.dtype] = torch.float32,
) -> torch.Tensor:
    """Tensors of a given or drawn shape and dtype: normal floats, integers from -9 to 9 (unsigned from 0)."""
    size = draw(_as_strategy(shapes() if shape is None else shape))
    kind = draw(_as_strategy(dtype))
    return tensor_of(size, kind, seed=draw(st.integers(0, 2**16)))


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The tensor that `tensors` makes from a seed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        exact = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=exact, device="cpu").to(dtype)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator, device="cpu").bool()
    low = -9 if dtype.is_signed else 0
    return torch.randint(low, 10, shape, generator=generator, device="cpu").to(dtype)


def pytrees(leaves: SearchStrategy[Any], max_leaves: int = 8) -> SearchStrategy[Any]:
    """Dicts, lists, tuples, namedtuples and None, nested and possibly empty, around `leaves`."""

    def containers(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
        lists = st.lists(inner, max_size=3)
        dicts = st.dictionaries(st.sampled_from(["w", "b", "scale", "0"]), inner, max_size=3)
        return st.one_of(lists, lists.map(tuple), dicts, st.builds(Pair, inner, inner))

    return st.recursive(leaves | st.none(), containers, max_leaves=max_leaves)


def mesh_sizes(max_world: int = 4, max_axes: int = 2, *, world: int | None = None) -> SearchStrategy[dict[str, int]]:
    """Meshes as axis name to size, outermost first; their product is `world`, or anything up to `max_world`."""
    fits: Callable[[int], bool] = (lambda n: n == world) if world is not None else (lambda n: n <= max_world)
    names = [("shard",), ("replica", "shard"), AXES]
    meshes = [
        dict(zip(axes, sizes, strict=True))
        for axes in names[:max_axes]
        for sizes in _tuples(world or max_world, len(axes))
        if fits(math.prod(sizes))
    ]
    return st.sampled_from(meshes).map(dict)


def specs(ndim: int, axes: Sequence[str]) -> SearchStrategy[P]:
    """Specs for a tensor of `ndim` dimensions; an axis cuts one dimension, together with others, or none."""

    def spec(order: list[str], dims: list[int | None]) -> P:
        cuts = [tuple(axis for axis, dim in zip(order, dims, strict=True) if dim == d) for d in range(ndim)]
        return P(*(cut[0] if len(cut) == 1 else cut or None for cut in cuts))

    place = st.sampled_from([None, *range(ndim)])
    return st.builds(spec, st.permutations(list(axes)), st.lists(place, min_size=len(axes), max_size=len(axes)))


@st.composite
def global_shapes(
    draw: st.DrawFn, spec: P, mesh: Mapping[str, int], *, ndim: int | None = None, min_size: int = 0, max_size: int = 3
) -> tuple[int, ...]:
    """Shapes that `spec` cuts evenly on a mesh of these sizes; a local dimension is `min_size` to `max_size` long."""
    entries = tuple(spec)
    if ndim is not None and ndim < len(entries):
        raise ValueError(f"{spec} has {len(entries)} entries, which is more than ndim={ndim}")
    padded = entries + (None,) * ((len(entries) if ndim is None else ndim) - len(entries))
    return tuple(draw(st.integers(min_size, max_size)) * cut(entry, mesh) for entry in padded)


def cut(entry: str | Sequence[str] | None, mesh: Mapping[str, int]) -> int:
    """The number of pieces into which an entry of a spec cuts its dimension."""
    names = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(mesh[name] for name in names)


def _as_strategy(value: Any) -> SearchStrategy[Any]:
    return value if isinstance(value, SearchStrategy) else st.just(value)


def _tuples(limit: int, length: int) -> list[tuple[int, ...]]:
    """All tuples of positive integers whose product is at most `limit`, small ones first."""
    if length == 0:
        return [()]
    return [(first, *rest) for first in range(1, limit + 1) for rest in _tuples(limit // first, length - 1)]
