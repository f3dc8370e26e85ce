"""Assembles each sharded matrix on the rank that owns it, and returns the results.

Matrices, or blocks of large parameters, are assigned to ranks by cost, the costliest first to the rank with the least
load. One all-to-all brings the pieces there, another returns the results; replicas share the work too. So no work is
done twice, and a rank holds whole only the blocks it works on. An optimizer of matrices needs `on_owner`, and
`on_everyone` where its step is to be differentiated; `muon` is the example. One that remembers something of each
matrix keeps it where `owners` says; `shampoo` is the example.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives import functional
from shardfn.collectives.ledger import record
from shardfn.collectives.scheduled import Scheduled, run_in_graph
from shardfn.compat import dispatch, process_groups
from shardfn.mesh.axes import axis_of
from shardfn.mesh.grid import Grid
from shardfn.mesh.scope import mesh_of, scope_of
from shardfn.mesh.spec import P, dotted, joined
from shardfn.optim.differentiable import filled, numbered, tied
from shardfn.optim.norms import wide
from shardfn.optim.optimizer import of_rule
from shardfn.shards.boxes import Box, Ints, boxes, full_box
from shardfn.shards.layout import FlatShard, Layout, Range, is_flat, lay
from shardfn.shards.pieces import Unit, slot
from shardfn.shards.placement import Placement

Cost = Callable[[Ints], int]  # of a block, by its shape; not a closure, as it is a key of cached plans
Fn = Callable[["OwnedBlock", Tensor], Tensor]  # from the elements of a block to as many


def on_owner(
    units: Sequence[Unit],
    tensors: Sequence[Tensor | None],
    fn: Fn,
    cost: Cost,
    dtype: torch.dtype | None = None,
    max_size: int | None = None,
) -> list[Tensor]:
    """Applies `fn` to whole blocks of which ranks hold parts: one rank, the owner, computes each block.

    All ranks of the mesh call it together. Each element moves once to the owner and once back, in one exchange each way
    for all blocks that lie on the same axes.

    Args:
        units: the units that hold the parameters, whose `owners` do the work.
        tensors: for each unit, values for the elements that this rank holds; None for a unit that is left out.
        fn: function of a block and its elements, in `dtype` and the block's shape.
        cost: cost of a block by its shape; balances the work.
        dtype: dtype in which elements move; None for that of `tensors`.
        max_size: maximum length of each dimension of a block; None for unsplit parameters.

    Returns:
        For each unit with values, this rank's elements of the results, in a new contiguous tensor of the same shape and
        dtype; zero outside of the parameters.
    """
    results = [None if x is None else x.new_zeros(x.shape) for x in tensors]
    groups: dict[tuple[Any, ...], list[tuple[OwnedBlock, int]]] = {}
    local: dict[str, tuple[Tensor, Tensor]] = {}
    owner = owners(units, cost, max_size)
    for unit, x, result in zip(units, tensors, results, strict=True):
        if x is None or result is None:
            continue
        local |= {s.path: (x.reshape(-1)[s.start : s.stop], result.view(-1)[s.start : s.stop]) for s in unit.segments}
        for block in blocks(unit, max_size):
            groups.setdefault((*block.sharing_axes, dtype or x.dtype, x.device), []).append((block, owner[block]))
    for (grid, axes, kind, device), members in groups.items():
        peers, local_pairs = _sharing_ranks(grid, axes), [local.get(block.path) for block, _ in members]
        plan = exchange_plan(tuple(members), peers.ranks, peers.rank)
        _moved_and_back(plan, peers, local_pairs, torch.empty(0, dtype=kind, device=device), fn)
    return [result for result in results if result is not None]


def _moved_and_back(
    plan: OwnersPlan,
    peers: _SharingRanks,
    local_pairs: Sequence[tuple[Tensor, Tensor] | None],
    template: Tensor,
    fn: Fn,
) -> None:
    """Sends parts to their owners, computes there, and writes the returned parts into the results.

    `local_pairs` has the local elements of each block's parameter, and of its results.
    """

    def local(index: int, part: BlockSlice, which: int) -> Tensor:
        pair = local_pairs[index]
        assert pair is not None, "what is sent or wanted lies here"
        return part.view_in(pair[which])

    if peers.group is None:  # nothing moves
        for index, block in enumerate(plan.blocks):
            for part in block.parts(peers.rank):
                # Memory of its own, as where it has moved: products of views may round otherwise.
                copied = local(index, part, 0).to(template.dtype, copy=True, memory_format=torch.contiguous_format)
                local(index, part, 1).copy_(fn(block, copied))
        return
    outgoing = [[local(n, part, 0).to(template.dtype) for n, part in parts] for parts in plan.sent]
    arrived = _exchanged(outgoing, plan.received, template, peers)
    results = {}
    for index in plan.owned:
        x = template.new_empty(plan.blocks[index].box.sizes)
        for part, elements in ((part, values) for n, part, values in arrived if n == index):
            x[part.inside].copy_(elements)
        results[index] = fn(plan.blocks[index], x)
    outgoing = [[results[n][part.inside].to(template.dtype) for n, part in parts] for parts in plan.returned]
    for index, part, x in _exchanged(outgoing, plan.wanted, template, peers):
        local(index, part, 1).copy_(x)


def on_everyone(
    units: Sequence[Unit], tensors: Sequence[Tensor], fn: Fn, cost: Cost, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """As `on_owner` for matrices, by differentiable collectives: every rank computes all of them.

    `fn` gets them unchanged; `cost` and `dtype` are ignored.
    """
    del cost, dtype
    results = []
    for unit, tensor in zip(units, tensors, strict=True):
        segments = {segment.path: segment for segment in unit.segments}
        rows: dict[str, Tensor] = {}
        ties = [tensor]
        for matrix in blocks(unit):
            if matrix.layout is None:
                full = tensor.reshape(matrix.box.sizes)
            else:
                full = _gathered_matrix(matrix, segments, tensor)
            result = fn(matrix, full).to(tensor.dtype)
            ties.append(result)
            if matrix.path in segments:
                segment = segments[matrix.path]
                part = None if matrix.layout is None else matrix.local_range(process_groups.global_rank())
                local = result if part is None else result[Box(part.corner, part.shape).slices_in(matrix.box)]
                rows[matrix.path] = local.reshape(-1)[segment.first : segment.first + segment.stop - segment.start]
        results.append(filled(torch.zeros_like(tensor), unit, (rows[segment.path] for segment in unit.filled), ties))
    return results


# --- who owns what ---


@dataclass(frozen=True)
class BlockSlice:
    """Elements of a block that a rank holds.

    Attributes:
        first: how many elements of the parameter the rank holds before those of `box`.
        box: elements that follow each other in the rank's memory, some of which are the part.
        common: the part.
        block: the whole block; all three boxes are in the coordinates of the parameter.
    """

    first: int
    box: Box
    common: Box
    block: Box

    def view_in(self, local: Tensor) -> Tensor:
        """A view of the part in all elements of the parameter that the rank holds."""
        return local[self.first : self.first + self.box.numel].view(self.box.sizes)[self.common.slices_in(self.box)]

    @property
    def inside(self) -> tuple[slice, ...]:
        """The slices that select it from its block."""
        return self.common.slices_in(self.block)


@dataclass(frozen=True)
class OwnedBlock:
    """A full parameter of which ranks hold parts, or a box of it.

    Attributes:
        path: path of the parameter in the tree.
        whole: shape of the parameter.
        box: the elements.
        layout: layout of its flat shard; None for a plain tensor, which every rank holds.
        entry: its index in the layout.
    """

    path: str
    whole: Ints
    box: Box
    layout: Layout | None = None
    entry: int = 0

    @property
    def name(self) -> str:
        """Path of the parameter, with the block's offsets if the parameter is split."""
        return self.path if self.box.sizes == self.whole else f"{self.path}{list(self.box.offsets)}"

    @property
    def sharing_axes(self) -> tuple[Grid | None, tuple[str, ...]]:
        """The mesh, and its axes along which ranks hold parts or copies of the parameter."""
        if self.layout is None:
            return None, ()
        used = {*self.layout.placement.replicas, *self.layout.cut_axes(self.entry)}
        return self.layout.grid, tuple(name for name, _ in self.layout.grid.sizes if name in used)

    def copy(self, rank: int) -> int:
        """Index of the copy of which a rank holds a part."""
        if self.layout is None or not self.layout.placement.replicas:
            return 0
        return self.layout.grid.index(rank, self.layout.placement.replicas)

    def local_range(self, rank: int) -> Range | None:
        """The range of elements of the parameter that a rank holds; None if it holds none."""
        if self.layout is None:
            return Range(self.path, 0, math.prod(self.whole), self.whole, (0,) * len(self.whole))
        entry_path = self.layout.entries[self.entry].path
        return next((rank_range for rank_range in self.layout.ranges(rank) if rank_range.path == entry_path), None)

    def parts(self, rank: int) -> Iterator[BlockSlice]:
        """The elements of the block that a rank holds."""
        rank_range, first = self.local_range(rank), 0
        if rank_range is None:
            return
        for box in boxes(rank_range.shape, rank_range.start, rank_range.stop):
            shifted = box.translated(rank_range.corner)
            common = shifted.common(self.box)
            if common is not None:
                yield BlockSlice(first, shifted, common, self.box)
            first += box.numel


@functools.lru_cache(maxsize=4096)
def _listed(
    layout: Layout, entries: tuple[int, ...], paths: tuple[str, ...], max_size: int | None = None
) -> tuple[OwnedBlock, ...]:
    rows = [(path, layout.whole_shape(entry), entry) for entry, path in zip(entries, paths, strict=True)]
    return tuple(
        [OwnedBlock(path, shape, box, layout, n) for path, shape, n in rows for box in _split_boxes(shape, max_size)]
    )


def blocks(unit: Unit, max_size: int | None = None) -> tuple[OwnedBlock, ...]:
    """The nonempty parameters of a unit, split into blocks of at most `max_size` along each dimension."""
    if unit.layout is None:
        return tuple([OwnedBlock(s.path, s.whole, box) for s in unit.filled for box in _split_boxes(s.whole, max_size)])
    return _listed(unit.layout, unit.entries, tuple(map(unit.path, unit.entries)), max_size)


def _split_boxes(shape: Ints, max_size: int | None) -> list[Box]:
    """The boxes into which a tensor is split; none if it is empty and so needs no work."""
    if not math.prod(shape):
        return []
    if max_size is None:
        return [full_box(shape)]
    ranges = [[(start, min(max_size, n - start)) for start in range(0, n, max_size)] for n in shape]
    return [
        Box(tuple(start for start, _ in box_ranges), tuple(n for _, n in box_ranges))
        for box_ranges in itertools.product(*ranges)
    ]


def owners(units: Sequence[Unit], cost: Cost, max_size: int | None = None) -> dict[OwnedBlock, int]:
    """The rank that works on each block of these units: the same on all ranks that share the work."""
    groups: dict[tuple[Grid | None, tuple[str, ...]], list[OwnedBlock]] = {}
    for unit in units:
        for block in blocks(unit, max_size):
            groups.setdefault(block.sharing_axes, []).append(block)
    owner_of: dict[OwnedBlock, int] = {}
    for (grid, axes), members in groups.items():
        ranks = _sharing_ranks(grid, axes).ranks
        owner_of |= zip(members, [ranks[i] for i in _assigned(tuple(members), len(ranks), cost)], strict=True)
    return owner_of


def work(shape: Ints) -> int:
    """Operations for a parameter as a matrix: products with each dimension's matrix, and its eigenvectors."""
    numel = math.prod(shape)
    return numel + sum(4 * numel * n + 10 * n**3 for n in (shape[0], numel // shape[0])) if len(shape) > 1 else numel


def as_matrix(shape: Ints) -> Ints:
    """The shape of a parameter as a matrix; with more dimensions, the first one and all others."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape


def all_remembered(
    units: Sequence[Unit], shapes: Callable[[OwnedBlock], Any], cost: Cost, max_size: int | None = None
) -> dict[str, Any]:
    """Returns the zeros of `remembered` for each block of these units, by its name."""
    owner = owners(units, cost, max_size)
    return {b.name: remembered(unit, b, owner[b], shapes(b)) for unit in units for b in blocks(unit, max_size)}


def remembered(unit: Unit, block: OwnedBlock, owner: int, shapes: Any) -> Any:
    """Returns zeros that only the owner of a block holds: a flat shard, float32 or wider.

    `shapes` is a tree of tuples. With a block of a plain tensor, the result is a tree of tensors on every rank.
    """
    dtype = wide(unit.values)
    if block.layout is None:
        return optree.tree_map(lambda shape: unit.values.new_zeros(shape, dtype=dtype), shapes, is_leaf=_ints)
    accessors, sizes, tree = optree.tree_flatten_with_accessor(shapes, is_leaf=_ints)
    layout = _on_owner(block, owner, tuple(map(dotted, accessors)), tuple(sizes), tree, dtype)
    return FlatShard(slot(unit, (layout.num_elements_on(process_groups.global_rank()),), layout.dtype), layout)


def as_owner(state: Any) -> Any:
    """Returns the tree of tensors in a result of `remembered`, for its owner."""
    return optree.tree_unflatten(state.layout.tree, state.layout.views(state.values)) if is_flat(state) else state


def owned(state: Any) -> bool:
    """Whether this rank holds a result of `remembered`; of plain tensors, every rank does."""
    return not is_flat(state) or state.values.numel() > 0


def handed(pairs: Sequence[tuple[Any, Any]]) -> list[Tensor | None]:
    """Each tensor on the rank that owns something else, in one exchange for all that lie on the same axes.

    Args:
        pairs: what `remembered` gave for one shape, with its values; and what it gave for the same block, perhaps with
            another owner.

    Returns:
        For each pair the tensor on the second owner, None on other ranks.
    """
    received: list[Tensor | None] = [None if is_flat(moment) else moment for moment, _ in pairs]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, (moment, target) in enumerate(pairs):
        if is_flat(moment):
            axes = target.layout.placement.only_at_axes
            groups.setdefault((target.layout.grid, axes, moment.values.dtype, moment.values.device), []).append(index)
    for (grid, axes, dtype, device), members in groups.items():
        peers = _sharing_ranks(grid, axes)
        routes = {n: tuple([_holder_rank(peers, grid, side.layout) for side in pairs[n]]) for n in members}
        outgoing = [[as_owner(pairs[n][0]) for n in members if routes[n] == (peers.rank, to)] for to in peers.ranks]
        if peers.group is None:
            for n, x in zip(members, outgoing[0], strict=True):
                received[n] = x
            continue
        boxes_of = {n: full_box(pairs[n][0].layout.whole_shape(0)) for n in members}
        shares = {n: (n, BlockSlice(0, box, box, box)) for n, box in boxes_of.items()}
        incoming = [[shares[n] for n in members if routes[n] == (source, peers.rank)] for source in peers.ranks]
        for n, _, x in _exchanged(outgoing, incoming, torch.empty(0, dtype=dtype, device=device), peers):
            received[n] = x
    return received


def _holder_rank(peers: _SharingRanks, grid: Grid, layout: Layout) -> int:
    """The rank among peers that holds a flat shard of one rank alone."""
    coordinates = layout.placement.only_at
    return next(rank for rank in peers.ranks if all(grid.index(rank, axis) == i for axis, i in coordinates))


def _ints(x: Any) -> bool:
    return isinstance(x, tuple)


@functools.lru_cache(maxsize=4096)
def _on_owner(
    block: OwnedBlock, owner: int, paths: tuple[str, ...], shapes: tuple[Ints, ...], tree: Any, dtype: torch.dtype
) -> Layout:
    (grid, axes), layout = block.sharing_axes, block.layout
    assert grid is not None, "what has an owner lies on a mesh"
    assert layout is not None, "what has an owner lies on a mesh"
    rows = enumerate(zip(paths, shapes, strict=True))
    parts = [(joined(block.name, path), (i,), shape, P()) for i, (path, shape) in rows]
    coordinates = tuple((axis, grid.index(owner, axis)) for axis in axes)
    return lay(block.name, tree, parts, dtype, True, Placement(only_at=coordinates, tiers=layout.placement.tiers), grid)


Share = tuple[int, BlockSlice]  # index of a block, and elements of it


@dataclass(frozen=True)
class OwnersPlan:
    """Which rank works on which block, and the parts that ranks exchange.

    Attributes:
        blocks: all blocks of the exchange.
        owned: indices of the blocks that this rank works on.
        sent: for each peer, the shares that this rank sends to it as owner.
        received: for each peer, the shares of this rank's blocks that come from it.
        returned: for each peer, the shares of this rank's results that the peer holds, on all copies.
        wanted: for each peer, the shares of its results that this rank holds.
    """

    blocks: tuple[OwnedBlock, ...]
    owned: tuple[int, ...]
    sent: tuple[tuple[Share, ...], ...]
    received: tuple[tuple[Share, ...], ...]
    returned: tuple[tuple[Share, ...], ...]
    wanted: tuple[tuple[Share, ...], ...]


@functools.lru_cache(maxsize=256)
def exchange_plan(owned: tuple[tuple[OwnedBlock, int], ...], peers: tuple[int, ...], rank: int) -> OwnersPlan:
    """The plan for blocks on the same axes and their owners, as `rank` sees it."""

    def shares(holder: int, owner: int, same_copy: bool) -> tuple[Share, ...]:
        selected: list[Share] = []
        for index, (block, block_owner) in enumerate(owned):
            if block_owner == owner and (not same_copy or block.copy(holder) == block.copy(owner)):
                selected += [(index, part) for part in block.parts(holder)]
        return tuple(selected)

    return OwnersPlan(
        tuple(block for block, _ in owned),
        tuple(number for number, (_, owner) in enumerate(owned) if owner == rank),
        tuple(shares(rank, peer, True) for peer in peers),
        tuple(shares(peer, rank, True) for peer in peers),
        tuple(shares(peer, rank, False) for peer in peers),
        tuple(shares(rank, peer, False) for peer in peers),
    )


@functools.lru_cache(maxsize=256)
def _assigned(blocks: tuple[OwnedBlock, ...], workers: int, cost: Cost) -> list[int]:
    return assigned([cost(block.box.sizes) for block in blocks], workers)


def assigned(costs: Sequence[int], workers: int) -> list[int]:
    """A worker for each job: the costliest job first, to the worker with the least load (Graham's rule)."""
    load, worker_of = [0] * workers, [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        worker_of[job] = min(range(workers), key=lambda w: (load[w], w))
        load[worker_of[job]] += costs[job]
    return worker_of


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """A context in which products of float32 are not rounded to TF32 or bfloat16, which hides small eigenvalues."""
    backends: Any = torch.backends
    libraries = backends.cuda.matmul, backends.mkldnn.matmul
    coarse = [
        (backend, precision) for backend in libraries if (precision := backend.fp32_precision) in ("tf32", "bf16")
    ]
    for backend, _ in coarse:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in coarse:
            backend.fp32_precision = precision


def eigh(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `torch.linalg.eigh`; nan, on which that fails, gives nan, as one rank alone must not raise."""
    clean, nan = torch.nan_to_num(x, 0.0, 0.0, 0.0), 0 * x.sum()
    try:
        values, vectors = torch.linalg.eigh(clean)
        is_finite = bool((values.sum() + vectors.sum()).isfinite())
    except RuntimeError:
        is_finite = False
    if not is_finite:  # in float32 it may not converge, and not say so
        values, vectors = torch.linalg.eigh(clean.double())
    return values.to(x.dtype) + nan, vectors.to(x.dtype) + nan


# --- what travels ---


@dataclass(frozen=True)
class _SharingRanks:
    """The ranks along some axes that share the work, and this one; `group` is None if it is alone."""

    axes: tuple[str, ...]
    name: str
    group: Any
    ranks: tuple[int, ...]
    rank: int


def _sharing_ranks(grid: Grid | None, axes: tuple[str, ...]) -> _SharingRanks:
    rank = process_groups.global_rank()
    if grid is None or not axes:
        return _SharingRanks((), "", None, (rank,), rank)
    axis = axis_of(mesh_of(grid, "a tree"), axes)
    group = process_groups.group_of(axis.group) if axis.size > 1 else None
    return _SharingRanks(
        axes, axis.group, group, tuple(dist.get_process_group_ranks(group)) if group else (rank,), rank
    )


class _ElementExchange(Scheduled):
    """An exchange of elements: `[sum(sent)] -> [sum(received)]`."""

    def __init__(self, sent: list[int], received: list[int], peers: _SharingRanks) -> None:
        super().__init__()
        self.sent, self.received, self.peers = sent, received, peers

    def __str__(self) -> str:
        return f"exchange of optimizers' work along {self.peers.axes}"

    def empty_results(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        (flat,) = inputs
        assert flat is not None
        return [flat.new_empty(sum(self.received))]

    def start(self, inputs: Sequence[Tensor | None]) -> Any:
        (flat,), (received,), peers = inputs, self.empty_results(inputs), self.peers
        assert flat is not None
        remote = flat.numel() - self.sent[peers.ranks.index(peers.rank)]
        record("all_to_all", peers.name, flat.dtype, remote * flat.element_size(), "native", peers.axes)
        sizes = self.received, self.sent
        return received, dist.all_to_all_single(received, flat, *sizes, group=peers.group, async_op=True), flat

    def finish(self, started: Any) -> list[Tensor]:
        received, work, _ = started
        if work is not None:
            work.wait()
        return [received]


def _exchanged(
    outgoing: list[list[Tensor]], incoming: Sequence[Sequence[Share]], template: Tensor, peers: _SharingRanks
) -> list[tuple[int, BlockSlice, Tensor]]:
    """Exchanges elements; returns what the peers sent: index of a block, part, and its elements in their shape."""
    sizes = [sum(x.numel() for x in to) for to in outgoing]
    expected = [sum(part.common.numel for _, part in shares) for shares in incoming]
    flat = torch.cat([template, *(x.reshape(-1) for to in outgoing for x in to)])
    exchange = _ElementExchange(sizes, expected, peers)
    (received,) = run_in_graph(exchange, [flat]) if dispatch.in_graph() else exchange.finish(exchange.start([flat]))
    parts = [share for shares in incoming for share in shares]
    pieces = received.split([part.common.numel for _, part in parts])
    return [(n, part, x.view(part.common.sizes)) for (n, part), x in zip(parts, pieces, strict=True)]


def _gathered_matrix(matrix: OwnedBlock, segments: dict[str, Any], update: Tensor) -> Tensor:
    """Gathers a matrix on every rank, by a sum of zero-padded parts, which can be differentiated."""
    assert matrix.layout is not None, "what is gathered lies in a layout"
    full = update.new_zeros(matrix.whole)
    part = matrix.local_range(process_groups.global_rank())
    if part is not None and matrix.path in segments:
        segment = segments[matrix.path]
        local_values, rest = update.reshape(-1)[segment.start : segment.stop], math.prod(part.shape) - part.stop
        block = torch.nn.functional.pad(local_values, (part.start, rest)).view(part.shape)
        (row, column), (rows, columns) = part.corner, part.shape
        rows_after, columns_after = matrix.whole[0] - row - rows, matrix.whole[1] - column - columns
        full = torch.nn.functional.pad(block, (column, columns_after, row, rows_after))
    cut = matrix.layout.cut_axes(matrix.entry)
    if not cut:
        return full
    with scope_of(matrix.layout.grid, "a tree"):
        return functional.pvary(functional.psum(tied(full, [update]), cut), cut)


def updated_values(
    unit: Unit, direction: Tensor, hparams: dict[str, Any], donate: bool, scale: Callable[[Ints], float] = lambda _: 1.0
) -> Tensor:
    """A unit's values after a step along a direction, times `scale` of each parameter's shape, with weight decay."""
    flat = unit.values.reshape(-1)
    parts: list[Tensor] = []
    rates, ties = numbered(hparams["lr"], unit)
    for segment in unit.filled:
        rate = rates[segment.path] * scale(segment.whole)
        keep = 1 - rates[segment.path] * of_rule(hparams["weight_decay"], segment)
        p, local_direction = (x.reshape(-1)[segment.start : segment.stop] for x in (flat, direction))
        local_direction = local_direction.to(flat.dtype)
        if donate:
            p.mul_(keep)
            # As `alpha` a tensor would be read by the host, which waits for the device.
            p.sub_(local_direction * rate) if isinstance(rate, Tensor) else p.add_(local_direction, alpha=-rate)
        else:
            parts.append(p * keep - rate * local_direction)
    if donate:
        return unit.values if unit.values.is_contiguous() else unit.values.copy_(flat.view(unit.values.shape))
    return filled(unit.values, unit, parts, [direction, *ties])
