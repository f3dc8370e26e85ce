"""Contents of the ranks of a mesh, computed from layouts alone, without other ranks or reading data."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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


@dataclass(frozen=True)
class Flat:
    """One flat shard of a tree.

    Attributes:
        layout: its layout.
        dtype: dtype of its values, which may differ from the parameters'.
        itemsize: bytes per element of a piece; 0 if it has no values.
        shared: path at which the same tensor occurred before; empty if it did not.
    """

    layout: Layout
    dtype: torch.dtype
    itemsize: int
    shared: str

    @property
    def piece(self) -> int:
        """Bytes on each rank that holds the parameters."""
        return 0 if self.shared else self.layout.piece * self.itemsize

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole parameters, each counted once, without padding."""
        if self.shared:
            return 0
        return self.itemsize * sum(math.prod(self.layout.whole_shape(i)) for i in range(len(self.layout.entries)))

    @property
    def numbers(self) -> int:
        """Elements of the whole parameters, in the shapes that functions see."""
        layout = self.layout
        return 0 if self.shared else sum(math.prod(layout.meant_shape(i)) for i in range(len(layout.entries)))

    def name(self, index: int) -> str:
        """Returns a parameter's path within its stage."""
        path, stage = self.layout.entries[index].path, self.layout.stage
        return path.removeprefix(f"{stage}.") if stage and path != stage else "" if path == stage else path

    @property
    def kind(self) -> Any:
        """Equal for flat shards that differ only in their stage."""
        layout = self.layout
        entries = [(self.name(i), e.leaves, e.shape, e.spec, e.offset) for i, e in enumerate(layout.entries)]
        packed = [str(layout.packed_at(i)) for i in range(len(entries))]
        facts = layout.dtype, layout.trainable, layout.placement, layout.grid, layout.room
        return entries, packed, facts, self.dtype, self.itemsize, bool(self.shared)


@dataclass(frozen=True)
class Plain:
    """A tensor of a tree that is in no flat shard.

    Attributes:
        path: within its stage.
        shape: of the whole tensor.
        dtype: as a word.
        nbytes: bytes on this rank.
        whole: bytes of the whole tensor.
        numel: elements of the whole tensor.
        note: a remark to show with it.
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
    """The contents of a tree at one stage: its flat shards, or the plain tensors that would form a stage."""

    name: str
    flats: tuple[Flat, ...] = ()
    plain: tuple[Plain, ...] = ()

    @property
    def kind(self) -> Any:
        """Equal for stages that differ only in their names."""
        return [flat.kind for flat in self.flats], self.plain

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole stage, each parameter counted once."""
        return sum(flat.full_bytes for flat in self.flats) + sum(tensor.whole for tensor in self.plain)


class BytesByKind(NamedTuple):
    """Bytes on one rank, by kind."""

    trained: int
    frozen: int
    plain: int


@dataclass(frozen=True)
class MeshSection:
    """The part of a tree on one mesh, or on this process alone if `grid` is None."""

    grid: Grid | None
    stages: tuple[Stage, ...]

    @property
    def flats(self) -> Iterator[Flat]:
        """The flat shards of all stages."""
        return itertools.chain.from_iterable(stage.flats for stage in self.stages)

    @property
    def runs(self) -> list[list[Stage]]:
        """Groups of consecutive stages that differ only in their names."""
        return [list(stages) for _, stages in itertools.groupby(self.stages, lambda stage: stage.kind)]

    @cached_property
    def bytes_by_rank(self) -> dict[int, BytesByKind]:
        """Rank -> bytes that it holds."""
        pieces: Counter[tuple[Layout, bool]] = Counter()  # by one layout for each set of places
        layout_at: dict[Any, Layout] = {}
        for flat in self.flats:
            layout = layout_at.setdefault(flat.layout.placement.only_at, flat.layout)
            pieces[layout, flat.layout.trainable] += flat.piece
        plain = sum(tensor.nbytes for stage in self.stages for tensor in stage.plain)
        bytes_by_rank = {}
        for rank in self.ranks:
            totals = {True: 0, False: 0}
            for (layout, trained), nbytes in pieces.items():
                totals[trained] += nbytes * layout.lives_on(rank)
            bytes_by_rank[rank] = BytesByKind(totals[True], totals[False], plain)
        return bytes_by_rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold it."""
        return (process_groups.global_rank(),) if self.grid is None else self.grid.ranks


def owners(layout: Layout) -> dict[str, dict[Range, list[int]]]:
    """Returns, for each parameter, the ranks that hold each of its parts."""
    ranks_of: dict[str, dict[Range, list[int]]] = {entry.path: {} for entry in layout.entries}
    for rank in sorted(layout.grid.ranks):
        for part in layout.ranges(rank):
            ranks_of[part.path].setdefault(part, []).append(rank)
    return ranks_of


def pieces_of(layout: Layout, index: int) -> range:
    """Returns the indices of the buffer's pieces that hold elements of a parameter."""
    entry = layout.entries[index]
    return range(entry.offset // layout.piece, (entry.offset + max(entry.numel, 1) - 1) // layout.piece + 1)


# --- reading a tree ---


def sections(tree: Any, mesh: DeviceMesh | None) -> tuple[MeshSection, ...]:
    """Returns the sections of a tree: one for each mesh, and one for what is on no mesh.

    Raises:
        ValueError: there is nothing to show, or a flat shard is on another mesh than the one passed.
        TypeError: the tree is a module.
    """
    if isinstance(tree, torch.nn.Module):
        raise TypeError(
            "show: the tree must hold parameters, got a module. Pass shardfn.interop.functional(module).tree, the "
            "result of shard(...), or dict(module.named_parameters())"
        )
    stages = list(_stages(tree))
    if not stages:
        leaves = optree.tree_leaves(tree)
        if makers := sum(map(callable, leaves)):
            problem = f"but {makers} makers, whose tensors are not there yet: pass what init or init_sharded returned"
        else:
            kinds = listed(sorted({type(leaf).__name__ for leaf in leaves}))
            problem = f"neither flat shards nor tensors: the tree has {kinds or 'no leaves'}"
        raise ValueError(f"show: there is nothing to show, {problem}")
    grids = list({flat.layout.grid: None for stage in stages for flat in stage.flats})
    if mesh is None and not grids:
        mesh = current_mesh()
    mesh_grid = None if mesh is None else grid_of(mesh)
    named_grids = [(stage.name, flat.layout.grid) for stage in stages for flat in stage.flats]
    conflicts = [(name, grid) for name, grid in named_grids if grid != mesh_grid]
    if mesh_grid is not None and conflicts:
        name, where = conflicts[0]
        raise ValueError(
            f"show: mesh=({mesh_grid}), but {name or 'the tree'} is on a mesh ({where}): leave mesh= out to show each "
            f"mesh with its parameters"
        )
    without_mesh = tuple(stage for stage in stages if not stage.flats)
    if mesh_grid is not None or len(grids) == 1:
        return (MeshSection(mesh_grid or grids[0], tuple(stages)),)
    by_grid = [
        MeshSection(grid, tuple(s for s in stages if s.flats and s.flats[0].layout.grid == grid)) for grid in grids
    ]
    return (*by_grid, MeshSection(None, without_mesh)) if without_mesh else tuple(by_grid)


def _stages(tree: Any) -> Iterator[Stage]:
    accessors, leaves, _ = optree.tree_flatten_with_accessor(
        tree, is_leaf=lambda node: is_stage(node) or is_unit(node) or is_packed(node) or type(node) is Blocks
    )
    first_at: dict[int, str] = {}
    waiting: list[Plain] = []
    name = ""
    for accessor, leaf in zip(accessors, leaves, strict=True):
        path, depth = dotted(accessor), 2 if len(accessor) > 2 and accessor[1].type in (list, tuple) else 1
        stage_name = dotted(accessor[:depth]) if len(accessor) > 1 else ""  # as `shard` groups tensors by default
        if waiting and (stage_name != name or is_stage(leaf)):
            yield Stage(name, plain=tuple(waiting))
            waiting = []
        name = stage_name
        if is_stage(leaf):
            flats = tuple(_describe_flat(flat, path, first_at) for flat in stage_shards(leaf))
            yield Stage(path or flats[0].layout.stage, flats)
        elif (plain := _describe_plain(leaf, path, name, first_at)) is not None:
            waiting.append(plain)
    if waiting:
        yield Stage(name, plain=tuple(waiting))


def _describe_flat(flat: FlatShard, path: str, first_at: dict[int, str]) -> Flat:
    x, layout = flat.values, flat.layout
    if not isinstance(x, Tensor):
        return Flat(layout, layout.dtype, 0, "")
    first_path = first_at.setdefault(id(x), path)
    return Flat(layout, x.dtype, x.dtype.itemsize * math.prod(x.shape[:-1]), "" if first_path == path else first_path)


def _describe_plain(leaf: Any, path: str, stage: str, first_at: dict[int, str]) -> Plain | None:
    """Describes a tensor, or an optimizer's separate state of a flat shard; None for other leaves."""
    values: Any = leaf if isinstance(leaf, Tensor) else getattr(leaf, "values", None)
    if not isinstance(values, Tensor):
        return None
    name = path.removeprefix(stage).removeprefix(".")
    first_path = first_at.setdefault(id(values), path)
    if is_packed(leaf):
        plain = Plain(name, leaf.shape, str(leaf.format), values.nbytes, values.nbytes, leaf.numel)
    else:
        plain = Plain(name, tuple(values.shape), dtype_name(values.dtype), values.nbytes, values.nbytes, values.numel())
    if first_path != path:
        return replace(plain, nbytes=0, whole=0, numel=0, note=f"the same as {first_path}")
    nbytes = values.to_local().nbytes if is_dtensor(values) else values.nbytes  # type: ignore[attr-defined]
    if is_dtensor(leaf):
        note = f"DTensor, {', '.join(map(str, leaf.placements))}"
    else:
        is_full = isinstance(leaf, Tensor) or is_packed(leaf)
        note = "" if is_full else f"this rank's, of {leaf.layout.stage or 'the tree'}"
    return replace(plain, nbytes=nbytes, note=note)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")
