"""What the ranks of a mesh hold of a tree: asked of its layouts, not of other ranks, and without touching a number."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardfn.compat import process_groups
from shardfn.mesh.axes import grid_of
from shardfn.mesh.grid import Grid
from shardfn.mesh.scope import current_mesh
from shardfn.mesh.spec import dotted, is_dtensor
from shardfn.quant.packed import is_packed
from shardfn.quoting import listed
from shardfn.shards.blocks import Blocks
from shardfn.shards.layout import FlatShard, Layout, Range, is_stage, stage_shards
from shardfn.shards.pieces import is_unit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Flat:
    """One flat shard of a tree.

    Attributes:
        layout: of it.
        dtype: of its values, which need not be the parameters'.
        itemsize: bytes for each element of a piece; 0 where there are no values.
        shared: where in the tree the same tensor stood before; empty, if nowhere.
    """

    layout: Layout
    dtype: torch.dtype
    itemsize: int
    shared: str

    @property
    def piece(self) -> int:
        """Bytes on each rank where the parameters live."""
        return 0 if self.shared else self.layout.piece * self.itemsize

    @property
    def whole(self) -> int:
        """Bytes of the whole parameters, each once, without padding."""
        if self.shared:
            return 0
        return self.itemsize * sum(math.prod(self.layout.whole_shape(i)) for i in range(len(self.layout.entries)))

    @property
    def numbers(self) -> int:
        """Elements of the whole parameters, as a function meets them."""
        layout = self.layout
        return 0 if self.shared else sum(math.prod(layout.meant_shape(i)) for i in range(len(layout.entries)))

    def name(self, number: int) -> str:
        """Of a parameter, within its stage."""
        path, stage = self.layout.entries[number].path, self.layout.stage
        return path.removeprefix(f"{stage}.") if stage and path != stage else "" if path == stage else path

    @property
    def kind(self) -> Any:
        """The same for flat shards that differ only in their stage."""
        layout = self.layout
        entries = [(self.name(i), e.leaves, e.shape, e.spec, e.offset) for i, e in enumerate(layout.entries)]
        packed = [str(layout.packed_at(i)) for i in range(len(entries))]
        facts = layout.dtype, layout.trainable, layout.placement, layout.grid, layout.room
        return entries, packed, facts, self.dtype, self.itemsize, bool(self.shared)


@dataclass(frozen=True)
class Plain:
    """A tensor of a tree that is not in a flat shard.

    Attributes:
        path: in its stage.
        shape: of the whole.
        dtype: as a word.
        nbytes: that this rank has.
        whole: bytes of the whole.
        numel: elements of the whole.
        note: what else is to be said of it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    whole: int
    numel: int
    note: str = ""


@dataclass(frozen=True)
class Stage:
    """What a tree has at the place of one stage: its flat shards, or the plain tensors that would make up one."""

    name: str
    flats: tuple[Flat, ...] = ()
    plain: tuple[Plain, ...] = ()

    @property
    def kind(self) -> Any:
        """The same for stages that differ only in their names."""
        return [flat.kind for flat in self.flats], self.plain

    @property
    def whole(self) -> int:
        """Bytes of the whole, each parameter once."""
        return sum(flat.whole for flat in self.flats) + sum(tensor.whole for tensor in self.plain)


class Held(NamedTuple):
    """Bytes of one rank, by kind."""

    trained: int
    frozen: int
    plain: int


@dataclass(frozen=True)
class Section:
    """What of a tree is on one mesh; on this process alone, if there is none."""

    grid: Grid | None
    stages: tuple[Stage, ...]

    @property
    def flats(self) -> Iterator[Flat]:
        """Of all stages."""
        return itertools.chain.from_iterable(stage.flats for stage in self.stages)

    @property
    def runs(self) -> list[list[Stage]]:
        """Stages one after another that differ only in their names, together."""
        return [list(some) for _, some in itertools.groupby(self.stages, lambda stage: stage.kind)]

    @cached_property
    def held(self) -> dict[int, Held]:
        """By rank."""
        pieces: Counter[tuple[Layout, bool]] = Counter()  # of all that lives at the same places, by one of its layouts
        first: dict[Any, Layout] = {}
        for flat in self.flats:
            layout = first.setdefault(flat.layout.placement.only_at, flat.layout)
            pieces[layout, flat.layout.trainable] += flat.piece
        plain = sum(tensor.nbytes for stage in self.stages for tensor in stage.plain)
        held = {}
        for rank, where in self.places.items():
            here = {True: 0, False: 0}
            for (layout, trained), nbytes in pieces.items():
                here[trained] += nbytes * lives(layout, where)
            held[rank] = Held(here[True], here[False], plain)
        return held

    @cached_property
    def places(self) -> dict[int, dict[str, int]]:
        """Where each rank stands along each axis."""
        return {process_groups.global_rank(): {}} if self.grid is None else places(self.grid)


def places(grid: Grid) -> dict[int, dict[str, int]]:
    """Where each rank stands along each axis."""
    names = [name for name, _ in grid.sizes]
    every = itertools.product(*(range(size) for _, size in grid.sizes))
    return {rank: dict(zip(names, at, strict=True)) for rank, at in zip(grid.ranks, every, strict=True)}


def along(grid: Grid, where: dict[str, int], names: Sequence[str]) -> int:
    """A position along the product of some axes, major to minor."""
    have, index = dict(grid.sizes), 0
    for name in names:
        index = index * have[name] + where[name]
    return index


def lives(layout: Layout, where: dict[str, int]) -> bool:
    """Whether a rank that stands there holds anything of a buffer."""
    return all(where[name] == position for name, position in layout.placement.only_at)


def owners(layout: Layout) -> dict[str, dict[Range, list[int]]]:
    """Of each parameter its parts, and the ranks that hold each."""
    ranks_of: dict[str, dict[Range, list[int]]] = {entry.path: {} for entry in layout.entries}
    for rank in sorted(layout.grid.ranks):
        for part in layout.ranges(rank):
            ranks_of[part.path].setdefault(part, []).append(rank)
    return ranks_of


def pieces_of(layout: Layout, number: int) -> range:
    """The pieces of the buffer that have elements of a parameter."""
    entry = layout.entries[number]
    return range(entry.offset // layout.piece, (entry.offset + max(entry.numel, 1) - 1) // layout.piece + 1)


# --- reading a tree ---


def sections(tree: Any, mesh: DeviceMesh | None) -> tuple[Section, ...]:
    """What a tree has, by mesh, and what it has on none.

    Raises:
        ValueError: nothing to show; a flat shard of another mesh than was passed.
        TypeError: a module.
    """
    if isinstance(tree, torch.nn.Module):
        raise TypeError(
            "show: a module is no tree of parameters: shardfn.interop.functional(module).tree is one; pass that, what "
            "shard(...) makes of it, or dict(module.named_parameters())"
        )
    stages = list(_stages(tree))
    if not stages:
        raise ValueError(f"show: there is nothing to show, {_instead(tree)}")
    grids = list({flat.layout.grid: None for stage in stages for flat in stage.flats})
    given = _given(mesh, grids, stages)
    own = tuple(stage for stage in stages if not stage.flats)
    if given is not None or len(grids) == 1:
        return (Section(given or grids[0], tuple(stages)),)
    on = [Section(grid, tuple(s for s in stages if s.flats and s.flats[0].layout.grid == grid)) for grid in grids]
    return (*on, Section(None, own)) if own else tuple(on)


def _given(mesh: DeviceMesh | None, grids: list[Grid], stages: list[Stage]) -> Grid | None:
    """The grid of the mesh that was passed, or of the one in scope where nothing else says which."""
    if mesh is None:
        mesh = None if grids else current_mesh()
    grid = None if mesh is None else grid_of(mesh)
    other = [stage.name for stage in stages for flat in stage.flats if grid is not None and flat.layout.grid != grid]
    if other:
        where = next(grid_of_stage for grid_of_stage in grids if grid_of_stage != grid)
        raise ValueError(
            f"show: mesh=({grid}), but {other[0] or 'the tree'} is on a mesh ({where}): leave mesh= out, and each mesh "
            f"is shown with what it has"
        )
    return grid


def _instead(tree: Any) -> str:
    leaves = optree.tree_leaves(tree)
    makers = sum(map(callable, leaves))
    if makers:
        return f"but {makers} makers, whose tensors are not there yet: pass what init or init_sharded returned"
    kinds = sorted({type(leaf).__name__ for leaf in leaves})
    return f"neither flat shards nor tensors: the tree has {listed(kinds) if kinds else 'no leaves'}"


def _stages(tree: Any) -> Iterator[Stage]:
    accessors, leaves, _ = optree.tree_flatten_with_accessor(
        tree, is_leaf=lambda node: is_stage(node) or is_unit(node) or is_packed(node) or type(node) is Blocks
    )
    first_at: dict[int, str] = {}
    waiting: list[Plain] = []
    name = ""
    for accessor, leaf in zip(accessors, leaves, strict=True):
        at, path = _stage_of(accessor), dotted(accessor)
        if waiting and (at != name or is_stage(leaf)):
            yield Stage(name, plain=tuple(waiting))
            waiting = []
        name = at
        if is_stage(leaf):
            flats = tuple(_flat(flat, path, first_at) for flat in stage_shards(leaf))
            yield Stage(path or flats[0].layout.stage, flats)
        elif (plain := _plain(leaf, path, name, first_at)) is not None:
            waiting.append(plain)
    if waiting:
        yield Stage(name, plain=tuple(waiting))


def _stage_of(accessor: Any) -> str:
    """What stage `shard` would put a tensor in by default."""
    depth = 2 if len(accessor) > 2 and accessor[1].type in (list, tuple) else 1
    return dotted(accessor[:depth]) if len(accessor) > 1 else ""


def _flat(flat: FlatShard, path: str, first_at: dict[int, str]) -> Flat:
    x, layout = flat.values, flat.layout
    if not isinstance(x, Tensor):
        return Flat(layout, layout.dtype, 0, "")
    before = first_at.setdefault(id(x), path)
    return Flat(layout, x.dtype, x.dtype.itemsize * math.prod(x.shape[:-1]), "" if before == path else before)


def _plain(leaf: Any, path: str, stage: str, first_at: dict[int, str]) -> Plain | None:
    """A tensor, or what of a flat shard an optimizer has apart; None of what is neither."""
    values: Any = leaf if isinstance(leaf, Tensor) else getattr(leaf, "values", None)
    if not isinstance(values, Tensor):
        return None
    name = path.removeprefix(stage).removeprefix(".")
    before = first_at.setdefault(id(values), path)
    if is_packed(leaf):
        plain = Plain(name, leaf.shape, str(leaf.format), values.nbytes, values.nbytes, leaf.numel)
    else:
        plain = Plain(name, tuple(values.shape), word(values.dtype), values.nbytes, values.nbytes, values.numel())
    if before != path:
        return replace(plain, nbytes=0, whole=0, numel=0, note=f"the same as {before}")
    here = values.to_local().nbytes if is_dtensor(values) else values.nbytes  # type: ignore[attr-defined]
    if is_dtensor(leaf):
        note = f"DTensor, {', '.join(map(str, leaf.placements))}"
    else:
        whole = isinstance(leaf, Tensor) or is_packed(leaf)
        note = "" if whole else f"this rank's, of {leaf.layout.stage or 'the tree'}"
    return replace(plain, nbytes=here, note=note)


def word(dtype: torch.dtype) -> str:
    """A dtype without its module."""
    return str(dtype).removeprefix("torch.")
