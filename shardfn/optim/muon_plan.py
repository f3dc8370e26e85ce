"""Matrices that no rank has whole: each comes together on the one rank that owns it, and results go back.

Matrices are assigned to ranks by cost, the costliest first to the rank with the least to do. One all-to-all brings the
pieces there, another brings the results back; replicas share the work too. So no rank does another's, and a rank
holds whole only what it works on. An optimizer of matrices needs `on_owner`, and where it is to be differentiated
`on_everyone`; Muon is the example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives import functional
from shardfn.collectives.ledger import record
from shardfn.compat import process_groups
from shardfn.mesh.axes import axis_of
from shardfn.mesh.grid import Grid
from shardfn.mesh.scope import mesh_of, scope
from shardfn.optim.differentiable import filled, tied
from shardfn.shards.layout import Layout, Range
from shardfn.shards.pieces import Unit

Fn = Callable[[Tensor], Tensor]  # of a whole matrix, into one of the same shape
Cost = Callable[[tuple[int, int]], int]  # of that, by the shape; a function of a module, as plans are kept by it


def on_owner(
    units: Sequence[Unit], tensors: Sequence[Tensor], fn: Fn, cost: Cost, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """`fn` of whole matrices of which ranks hold parts: each matrix by one rank, its owner.

    All ranks of the mesh call it together. It moves each element once to the owner and once back, in one exchange each
    way for all matrices that lie on the same axes.

    Args:
        units: what holds the matrices.
        tensors: for each unit, values for the elements that this rank holds.
        fn: of one matrix, `[rows, columns]`, in `dtype`.
        cost: by which matrices are assigned.
        dtype: in which elements move; None for that of `tensors`.

    Returns:
        For each unit, this rank's elements of the results, in a new tensor like that of `tensors`; zero where the unit
        has something else.
    """
    made = [torch.zeros_like(x) for x in tensors]
    groups: dict[tuple[Any, ...], list[tuple[Matrix, int]]] = {}
    for i, unit in enumerate(units):
        for matrix in _matrices(unit):
            kind = (matrix.layout and matrix.layout.grid, matrix.axes, dtype or tensors[i].dtype, tensors[i].device)
            groups.setdefault(kind, []).append((matrix, i))
    here = {one.path: (i, one.start, one.stop) for i, unit in enumerate(units) for one in unit.segments}
    for (grid, axes, kind, _), members in groups.items():
        if not axes:
            for matrix, i in members:
                made[i].copy_(fn(tensors[i].view(matrix.shape)).view(made[i].shape))
            continue
        matrices, like = tuple(matrix for matrix, _ in members), tensors[members[0][1]].to(kind)
        places = [here.get(matrix.path) for matrix in matrices]
        peers = _peers(grid, axes)
        _moved_and_back(planned(matrices, peers.ranks, peers.rank, cost), peers, places, like, tensors, made, fn)
    return made


def _moved_and_back(
    plan: Plan,
    peers: _Peers,
    places: Sequence[tuple[int, int, int] | None],
    like: Tensor,
    tensors: Sequence[Tensor],
    made: list[Tensor],
    fn: Fn,
) -> None:
    def local(of: Sequence[Tensor], number: int) -> Tensor:
        place = places[number]
        assert place is not None, "what is sent or wanted lies here"
        i, start, stop = place
        return of[i].reshape(-1)[start:stop]

    out = [[local(tensors, n).to(like.dtype) for n, _ in to] for to in plan.sent]
    arrived = _exchanged(out, plan.received, like, peers)
    whole = {}
    for number in plan.owned:
        whole[number] = fn(_assembled(plan.matrices[number], [(r, x) for m, r, x in arrived if m == number], like))
    out = [[_block(whole[n], part).reshape(-1)[part.start : part.stop] for n, part in to] for to in plan.returned]
    for number, _, x in _exchanged(out, plan.wanted, like, peers):
        local(made, number).copy_(x)


def on_everyone(
    units: Sequence[Unit], tensors: Sequence[Tensor], fn: Fn, cost: Cost, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """As `on_owner`, by collectives that can be differentiated: every rank has every matrix, and works on all of them.

    `fn` gets them as they are; `cost` and `dtype` do not matter.
    """
    del cost, dtype
    made = []
    for unit, tensor in zip(units, tensors, strict=True):
        here = {one.path: one for one in unit.segments}
        rows: dict[str, Tensor] = {}
        every = [tensor]
        for matrix in _matrices(unit):
            whole = tensor.reshape(matrix.shape) if matrix.layout is None else _whole(matrix, here, tensor)
            result = fn(whole).to(tensor.dtype)
            every.append(result)
            if matrix.path in here:
                one = here[matrix.path]
                part = None if matrix.layout is None else matrix.part(process_groups.global_rank())
                mine = result if part is None else _block(result, part)
                rows[matrix.path] = mine.reshape(-1)[one.first : one.first + one.stop - one.start]
        made.append(filled(torch.zeros_like(tensor), unit, (rows[one.path] for one in unit.filled), every))
    return made


# --- who owns what ---


@dataclass(frozen=True)
class Matrix:
    """A whole matrix, of which ranks hold parts.

    Attributes:
        path: its name.
        shape: rows and columns.
        layout: of the flat shard that it is in; None for one that every rank has.
        entry: its number in the layout.
    """

    path: str
    shape: tuple[int, int]
    layout: Layout | None = None
    entry: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh along which ranks hold parts or copies of it."""
        if self.layout is None:
            return ()
        used = {*self.layout.placement.replicas, *self.layout.cut_axes(self.entry)}
        return tuple(name for name, _ in self.layout.grid.sizes if name in used)

    def copy(self, rank: int) -> int:
        """Which of the copies a rank has part of."""
        assert self.layout is not None, "what travels lies in a layout"
        names = self.layout.placement.replicas
        return self.layout.grid.index(rank, names) if names else 0

    def part(self, rank: int) -> Range | None:
        """What a rank holds of it."""
        assert self.layout is not None, "only a part has a place"
        return next((one for one in self.layout.ranges(rank) if one.path == self.path), None)


@functools.lru_cache(maxsize=4096)
def _of_layout(layout: Layout, entries: tuple[int, ...]) -> tuple[Matrix, ...]:
    found = []
    for number in entries:
        rows, columns = layout.whole_shape(number)
        if rows * columns:  # or else there is nothing to do, and nobody has a part
            found.append(Matrix(layout.entries[number].path, (rows, columns), layout, number))
    return tuple(found)


def _matrices(unit: Unit) -> tuple[Matrix, ...]:
    if unit.layout is None:
        return tuple(Matrix(one.path, (one.shape[0], one.shape[1])) for one in unit.filled)
    return _of_layout(unit.layout, unit.entries)


Share = tuple[int, Range]  # number of a matrix, and which of its elements


@dataclass(frozen=True)
class Plan:
    """Who works on what, and what travels for it.

    Attributes:
        matrices: all of them.
        owned: numbers of those that this rank works on.
        sent: to each peer, the shares of matrices that it needs from this rank.
        received: from each peer, likewise; results travel the other way, to all copies.
        returned: to each peer, the shares of this rank's results that it holds.
        wanted: from each peer, the shares of its results that this rank holds.
    """

    matrices: tuple[Matrix, ...]
    owned: tuple[int, ...]
    sent: tuple[tuple[Share, ...], ...]
    received: tuple[tuple[Share, ...], ...]
    returned: tuple[tuple[Share, ...], ...]
    wanted: tuple[tuple[Share, ...], ...]


@functools.lru_cache(maxsize=256)
def planned(matrices: tuple[Matrix, ...], peers: tuple[int, ...], rank: int, cost: Cost) -> Plan:
    """The plan for matrices that the same axes spread; the same on all peers but for whose view it is."""
    owners = [peers[i] for i in assigned([cost(one.shape) for one in matrices], len(peers))]

    def shares(holder: int, owner: int, same_copy: bool) -> tuple[Share, ...]:
        found = []
        for number, matrix in enumerate(matrices):
            if owners[number] == owner and (not same_copy or matrix.copy(holder) == matrix.copy(owner)):
                part = matrix.part(holder)
                if part is not None:
                    found.append((number, part))
        return tuple(found)

    return Plan(
        matrices,
        tuple(number for number, owner in enumerate(owners) if owner == rank),
        tuple(shares(rank, peer, True) for peer in peers),
        tuple(shares(peer, rank, True) for peer in peers),
        tuple(shares(peer, rank, False) for peer in peers),
        tuple(shares(rank, peer, False) for peer in peers),
    )


def assigned(costs: Sequence[int], workers: int) -> list[int]:
    """A worker for each job: the costliest first, to whom has the least to do (Graham's rule)."""
    load, found = [0] * workers, [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        found[job] = min(range(workers), key=lambda w: (load[w], w))
        load[found[job]] += costs[job]
    return found


# --- what travels ---


@dataclass(frozen=True)
class _Peers:
    """The ranks that share the work along some axes, of which this is one; `group` is None where it is alone."""

    axes: tuple[str, ...]
    name: str
    group: Any
    ranks: tuple[int, ...]
    rank: int


def _peers(grid: Grid, axes: tuple[str, ...]) -> _Peers:
    axis, rank = axis_of(mesh_of(grid, "muon: a tree"), axes), process_groups.global_rank()
    group = process_groups.group_of(axis.group) if axis.size > 1 else None
    return _Peers(axes, axis.group, group, tuple(dist.get_process_group_ranks(group)) if group else (rank,), rank)


def _exchanged(
    out: list[list[Tensor]], coming: Sequence[Sequence[Share]], like: Tensor, peers: _Peers
) -> list[tuple[int, Range, Tensor]]:
    """What the peers sent: the number of a matrix, which elements, and the elements."""
    sizes = [sum(x.numel() for x in to) for to in out]
    expected = [sum(part.stop - part.start for _, part in each) for each in coming]
    flat = torch.cat([like[:0].reshape(-1), *(x for to in out for x in to)])
    received = torch.empty(sum(expected), dtype=like.dtype, device=like.device)
    if peers.group is None:
        received = flat
    else:
        away = flat.numel() - sizes[peers.ranks.index(peers.rank)]
        record("all_to_all", peers.name, like.dtype, away * like.element_size(), "native", peers.axes)
        dist.all_to_all_single(received, flat, expected, sizes, group=peers.group)
    parts = [part for each in coming for part in each]
    lengths = [part.stop - part.start for _, part in parts]
    return [(n, part, x) for (n, part), x in zip(parts, received.split(lengths), strict=True)]


def _assembled(matrix: Matrix, parts: list[tuple[Range, Tensor]], like: Tensor) -> Tensor:
    whole = torch.empty(matrix.shape, dtype=like.dtype, device=like.device)
    blocks: dict[tuple[int, ...], list[tuple[Range, Tensor]]] = {}
    for part, x in parts:
        blocks.setdefault(part.corner, []).append((part, x))
    for held in blocks.values():
        held.sort(key=lambda one: one[0].start)
        _block(whole, held[0][0]).copy_(torch.cat([x for _, x in held]).view(held[0][0].shape))
    return whole


def _block(whole: Tensor, part: Range) -> Tensor:
    """The value that a rank computes with, of which `part` is a part."""
    (row, column), (rows, columns) = part.corner, part.shape
    return whole[row : row + rows, column : column + columns]


def _whole(matrix: Matrix, here: dict[str, Any], update: Tensor) -> Tensor:
    assert matrix.layout is not None, "what is gathered lies in a layout"
    whole = update.new_zeros(matrix.shape)
    part = matrix.part(process_groups.global_rank())
    if part is not None and matrix.path in here:
        one = here[matrix.path]
        block = torch.nn.functional.pad(
            update.reshape(-1)[one.start : one.stop], (part.start, part.shape[0] * part.shape[1] - part.stop)
        ).view(part.shape)
        (row, column), (rows, columns) = part.corner, part.shape
        whole = torch.nn.functional.pad(
            block, (column, matrix.shape[1] - column - columns, row, matrix.shape[0] - row - rows)
        )
    cut = matrix.layout.cut_axes(matrix.entry)
    if not cut:
        return whole
    with scope(mesh_of(matrix.layout.grid, "muon: a tree")):
        return functional.pvary(functional.psum(tied(whole, [update]), cut), cut)
