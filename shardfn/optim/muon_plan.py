"""Assembles each matrix, cut over several ranks, on one rank that owns it, and returns the results.

Matrices are assigned to ranks by cost, the costliest first to the rank with the least load. One all-to-all brings the
pieces there, another returns the results; replicas share the work too. So no work is done twice, and a rank holds
whole only the matrices it works on. An optimizer of matrices needs `on_owner`, and `on_everyone` where its step is to
be differentiated; `muon` is the example.
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
from shardfn.mesh.scope import mesh_of, scope_of
from shardfn.optim.differentiable import filled, tied
from shardfn.shards.layout import Layout, Range
from shardfn.shards.pieces import Unit

Fn = Callable[[Tensor], Tensor]  # from a whole matrix to one of the same shape
Cost = Callable[[tuple[int, int]], int]  # of a matrix, by its shape; not a closure, as it is a key of cached plans


def on_owner(
    units: Sequence[Unit], tensors: Sequence[Tensor], fn: Fn, cost: Cost, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Applies `fn` to whole matrices of which ranks hold parts: one rank, the owner, computes each matrix.

    All ranks of the mesh call it together. Each element moves once to the owner and once back, in one exchange each way
    for all matrices that lie on the same axes.

    Args:
        units: the units that hold the matrices.
        tensors: for each unit, values for the elements that this rank holds.
        fn: function of one matrix, `[rows, columns]`, in `dtype`.
        cost: cost of a matrix by its shape; balances the work.
        dtype: dtype in which elements move; None for that of `tensors`.

    Returns:
        For each unit, this rank's elements of the results, in a new tensor like that of `tensors`; zero outside of the
        matrices.
    """
    results = [torch.zeros_like(x) for x in tensors]
    groups: dict[tuple[Any, ...], list[tuple[Matrix, int]]] = {}
    for i, unit in enumerate(units):
        for matrix in _matrices(unit):
            kind = (matrix.layout and matrix.layout.grid, matrix.axes, dtype or tensors[i].dtype, tensors[i].device)
            groups.setdefault(kind, []).append((matrix, i))
    local = {seg.path: (i, seg.start, seg.stop) for i, unit in enumerate(units) for seg in unit.segments}
    for (grid, axes, kind, _), members in groups.items():
        if not axes:
            for matrix, i in members:
                results[i].copy_(fn(tensors[i].view(matrix.shape)).view(results[i].shape))
            continue
        matrices, like = tuple(matrix for matrix, _ in members), tensors[members[0][1]].to(kind)
        places = [local.get(matrix.path) for matrix in matrices]
        peers = _peers(grid, axes)
        _moved_and_back(planned(matrices, peers.ranks, peers.rank, cost), peers, places, like, tensors, results, fn)
    return results


def _moved_and_back(
    plan: Plan,
    peers: _Peers,
    places: Sequence[tuple[int, int, int] | None],
    like: Tensor,
    tensors: Sequence[Tensor],
    results: list[Tensor],
    fn: Fn,
) -> None:
    """Runs a plan: sends parts to their owners, computes there, and writes the returned parts into `results`."""

    def local(of: Sequence[Tensor], number: int) -> Tensor:
        place = places[number]
        assert place is not None, "what is sent or wanted lies here"
        i, start, stop = place
        return of[i].reshape(-1)[start:stop]

    outgoing = [[local(tensors, n).to(like.dtype) for n, _ in to] for to in plan.sent]
    arrived = _exchanged(outgoing, plan.received, like, peers)
    whole = {}
    for number in plan.owned:
        whole[number] = fn(_assembled(plan.matrices[number], [(r, x) for m, r, x in arrived if m == number], like))
    outgoing = [[_block(whole[n], part).reshape(-1)[part.start : part.stop] for n, part in to] for to in plan.returned]
    for number, _, x in _exchanged(outgoing, plan.wanted, like, peers):
        local(results, number).copy_(x)


def on_everyone(
    units: Sequence[Unit], tensors: Sequence[Tensor], fn: Fn, cost: Cost, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """As `on_owner`, by differentiable collectives: every rank has every matrix, and computes all of them.

    `fn` gets them as they are; `cost` and `dtype` are ignored.
    """
    del cost, dtype
    results = []
    for unit, tensor in zip(units, tensors, strict=True):
        segments = {segment.path: segment for segment in unit.segments}
        rows: dict[str, Tensor] = {}
        ties = [tensor]
        for matrix in _matrices(unit):
            whole = tensor.reshape(matrix.shape) if matrix.layout is None else _whole(matrix, segments, tensor)
            result = fn(whole).to(tensor.dtype)
            ties.append(result)
            if matrix.path in segments:
                segment = segments[matrix.path]
                part = None if matrix.layout is None else matrix.part(process_groups.global_rank())
                own = result if part is None else _block(result, part)
                rows[matrix.path] = own.reshape(-1)[segment.first : segment.first + segment.stop - segment.start]
        results.append(filled(torch.zeros_like(tensor), unit, (rows[segment.path] for segment in unit.filled), ties))
    return results


# --- who owns what ---


@dataclass(frozen=True)
class Matrix:
    """A whole matrix, of which ranks hold parts.

    Attributes:
        path: path of the parameter in the tree.
        shape: rows and columns.
        layout: layout of its flat shard; None for a plain tensor, which every rank holds.
        entry: its index in the layout.
    """

    path: str
    shape: tuple[int, int]
    layout: Layout | None = None
    entry: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes along which ranks hold parts or copies of it."""
        if self.layout is None:
            return ()
        used = {*self.layout.placement.replicas, *self.layout.cut_axes(self.entry)}
        return tuple(name for name, _ in self.layout.grid.sizes if name in used)

    def copy(self, rank: int) -> int:
        """Index of the copy of which a rank holds a part."""
        assert self.layout is not None, "what travels lies in a layout"
        names = self.layout.placement.replicas
        return self.layout.grid.index(rank, names) if names else 0

    def part(self, rank: int) -> Range | None:
        """The range of elements that a rank holds; None if it holds none."""
        assert self.layout is not None, "only a part has a place"
        own = self.layout.entries[self.entry].path
        return next((held for held in self.layout.ranges(rank) if held.path == own), None)


def _listed(layout: Layout, entries: tuple[int, ...], paths: tuple[str, ...]) -> tuple[Matrix, ...]:
    matrices = []
    for number, path in zip(entries, paths, strict=True):
        rows, columns = layout.whole_shape(number)
        if rows * columns:  # an empty matrix needs no work, and no rank has a part of it
            matrices.append(Matrix(path, (rows, columns), layout, number))
    return tuple(matrices)


_of_layout = functools.lru_cache(maxsize=4096)(_listed)


def _matrices(unit: Unit) -> tuple[Matrix, ...]:
    if unit.layout is None:
        return tuple(Matrix(segment.path, (segment.shape[0], segment.shape[1])) for segment in unit.filled)
    listed = _listed if torch.compiler.is_compiling() else _of_layout  # a graph cannot look into a cache
    return listed(unit.layout, unit.entries, tuple(map(unit.path, unit.entries)))


Share = tuple[int, Range]  # index of a matrix, and a range of its elements


@dataclass(frozen=True)
class Plan:
    """Which rank works on which matrix, and what ranks exchange.

    Attributes:
        matrices: all matrices of the exchange.
        owned: indices of the matrices that this rank works on.
        sent: for each peer, the shares that this rank sends to it as owner.
        received: for each peer, the shares of this rank's matrices that come from it.
        returned: for each peer, the shares of this rank's results that the peer holds, on all copies.
        wanted: for each peer, the shares of its results that this rank holds.
    """

    matrices: tuple[Matrix, ...]
    owned: tuple[int, ...]
    sent: tuple[tuple[Share, ...], ...]
    received: tuple[tuple[Share, ...], ...]
    returned: tuple[tuple[Share, ...], ...]
    wanted: tuple[tuple[Share, ...], ...]


@functools.lru_cache(maxsize=256)
def planned(matrices: tuple[Matrix, ...], peers: tuple[int, ...], rank: int, cost: Cost) -> Plan:
    """The plan for matrices on the same axes, as `rank` sees it; all peers make the same assignment."""
    owners = [peers[i] for i in assigned([cost(m.shape) for m in matrices], len(peers))]

    def shares(holder: int, owner: int, same_copy: bool) -> tuple[Share, ...]:
        held = []
        for number, matrix in enumerate(matrices):
            if owners[number] == owner and (not same_copy or matrix.copy(holder) == matrix.copy(owner)):
                part = matrix.part(holder)
                if part is not None:
                    held.append((number, part))
        return tuple(held)

    return Plan(
        matrices,
        tuple(number for number, owner in enumerate(owners) if owner == rank),
        tuple(shares(rank, peer, True) for peer in peers),
        tuple(shares(peer, rank, True) for peer in peers),
        tuple(shares(peer, rank, False) for peer in peers),
        tuple(shares(rank, peer, False) for peer in peers),
    )


def assigned(costs: Sequence[int], workers: int) -> list[int]:
    """A worker for each job: the costliest job first, to the worker with the least load (Graham's rule)."""
    load, worker_of = [0] * workers, [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        worker_of[job] = min(range(workers), key=lambda w: (load[w], w))
        load[worker_of[job]] += costs[job]
    return worker_of


# --- what travels ---


@dataclass(frozen=True)
class _Peers:
    """The ranks along some axes that share the work, and this one; `group` is None if it is alone."""

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
    outgoing: list[list[Tensor]], incoming: Sequence[Sequence[Share]], like: Tensor, peers: _Peers
) -> list[tuple[int, Range, Tensor]]:
    """Exchanges elements; returns what the peers sent: index of a matrix, range, and elements."""
    sizes = [sum(x.numel() for x in to) for to in outgoing]
    expected = [sum(part.stop - part.start for _, part in shares) for shares in incoming]
    flat = torch.cat([like[:0].reshape(-1), *(x for to in outgoing for x in to)])
    received = torch.empty(sum(expected), dtype=like.dtype, device=like.device)
    if peers.group is None:
        received = flat
    else:
        remote = flat.numel() - sizes[peers.ranks.index(peers.rank)]
        record("all_to_all", peers.name, like.dtype, remote * like.element_size(), "native", peers.axes)
        dist.all_to_all_single(received, flat, expected, sizes, group=peers.group)
    parts = [part for shares in incoming for part in shares]
    lengths = [part.stop - part.start for _, part in parts]
    return [(n, part, x) for (n, part), x in zip(parts, received.split(lengths), strict=True)]


def _assembled(matrix: Matrix, parts: list[tuple[Range, Tensor]], like: Tensor) -> Tensor:
    """A whole matrix from its parts."""
    whole = torch.empty(matrix.shape, dtype=like.dtype, device=like.device)
    blocks: dict[tuple[int, ...], list[tuple[Range, Tensor]]] = {}
    for part, x in parts:
        blocks.setdefault(part.corner, []).append((part, x))
    for ranges in blocks.values():
        ranges.sort(key=lambda pair: pair[0].start)
        _block(whole, ranges[0][0]).copy_(torch.cat([x for _, x in ranges]).view(ranges[0][0].shape))
    return whole


def _block(whole: Tensor, part: Range) -> Tensor:
    """The block of a matrix in which the range `part` lies: the value that a rank computes with."""
    (row, column), (rows, columns) = part.corner, part.shape
    return whole[row : row + rows, column : column + columns]


def _whole(matrix: Matrix, segments: dict[str, Any], update: Tensor) -> Tensor:
    """Gathers a matrix on every rank, by a sum of zero-padded parts, which can be differentiated."""
    assert matrix.layout is not None, "what is gathered lies in a layout"
    whole = update.new_zeros(matrix.shape)
    part = matrix.part(process_groups.global_rank())
    if part is not None and matrix.path in segments:
        segment = segments[matrix.path]
        block = torch.nn.functional.pad(
            update.reshape(-1)[segment.start : segment.stop], (part.start, part.shape[0] * part.shape[1] - part.stop)
        ).view(part.shape)
        (row, column), (rows, columns) = part.corner, part.shape
        whole = torch.nn.functional.pad(
            block, (column, matrix.shape[1] - column - columns, row, matrix.shape[0] - row - rows)
        )
    cut = matrix.layout.cut_axes(matrix.entry)
    if not cut:
        return whole
    with scope_of(matrix.layout.grid, "muon: a tree"):
        return functional.pvary(functional.psum(tied(whole, [update]), cut), cut)
