"""Blocks of 256 elements, of which each has one number: a parameter's own, wherever ranks cut it.

They begin where the parameter does, so they are the same however many ranks there are. What of a block lies on another
rank has the same number there: `agreed` sees to that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.compat import dynamo, process_groups
from shardfn.mesh.scope import mesh_of, scope
from shardfn.mesh.spec import P
from shardfn.shards.layout import Layout
from shardfn.shards.pieces import Piece, Unit, Units, cuts_within, home, is_unit, node

BLOCK = 256
CHUNK = 2**16  # elements that are worked on at a time, so that they stay in a cache


class Run(NamedTuple):
    """Whole blocks of a unit, one after another, or what this rank has of a single one.

    Attributes:
        start: first element in the unit.
        stop: behind the last.
        at: number of the first block among the unit's blocks here.
        blocks: how many.
        shared: number among the blocks that several ranks have some of; -1 if it is whole here.
    """

    start: int
    stop: int
    at: int
    blocks: int
    shared: int

    @property
    def full(self) -> bool:
        """Whether all blocks have as many elements as a block may have."""
        return self.stop - self.start == self.blocks * BLOCK


Runs = tuple[Run, ...]


class Blocks(Piece):
    """The numbers of the blocks of which this rank has elements: a pytree node with one leaf.

    A checkpoint keeps them under the parameter's name, `[blocks]`, or where tensor-parallel axes cut the parameter,
    each part of which has its own blocks, `[*parts, blocks]`.

    Attributes:
        values: the numbers, `[blocks]`; the other attributes say of which elements they are.
    """

    __slots__ = ()

    @property
    def spec(self) -> P:
        """As `shard_map` sees them: ranks along these axes have others."""
        return P(self.layout.placement.axes)

    def __repr__(self) -> str:
        return f"Blocks({self.values!r}, of {self.layout})"


node(Blocks)


def like(unit: Unit, values: Any) -> Any:
    """A node for numbers of a unit's blocks; of a plain tensor, the numbers themselves; of a frozen one, none."""
    if unit.layout is None or values is None:
        return unit.like(values)
    return Blocks(values, unit.layout, unit.entries, unit.start, unit.stop)


def beside(known: Units, tree: Any) -> list[Any]:
    """The numbers of each unit's blocks; None for what is not there."""
    leaves = known.tree.flatten_up_to(tree)
    return [leaf.values if type(leaf) is Blocks or is_unit(leaf) else leaf for leaf in leaves]


# --- where blocks are ---


def runs(unit: Unit) -> Runs:
    """The blocks of a unit, in order; behind parameters there may be elements of none."""
    return tuple([Run(*row) for row in _rows(unit.layout, unit.entries, unit.start, unit.stop)])


def count(unit: Unit) -> int:
    """How many blocks of a unit are here."""
    every = runs(unit)
    return every[-1].at + every[-1].blocks if every else 0


@dynamo.constant_when_traced
def _rows(layout: Layout | None, entries: tuple[int, ...], start: int, stop: int) -> tuple[tuple[int, ...], ...]:
    if layout is None:
        return _plain(stop)
    return _in_layout(layout, entries, start, stop, process_groups.global_rank())


@functools.lru_cache(maxsize=4096)
def _plain(numel: int) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, _cut_up([(0, 0, numel, 0)], {})))


@functools.lru_cache(maxsize=4096)
def _in_layout(
    layout: Layout, entries: tuple[int, ...], start: int, stop: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    cuts = cuts_within(layout, rank, entries, start, stop)
    return tuple(map(tuple, _cut_up(cuts, _shared(layout, entries))))


def _cut_up(stretches: Iterable[tuple[int, int, int, int]], shared: dict[tuple[int, int], int]) -> list[Run]:
    """Elements `low` to `high` of parameters, which stand at `at`."""
    found: list[Run] = []
    blocks = 0
    for number, low, high, at in stretches:
        while low < high:
            n = (high - low) // BLOCK if low % BLOCK == 0 else 0
            length = n * BLOCK or min(high - low, BLOCK - low % BLOCK)
            run = Run(at, at + length, blocks, n or 1, shared.get((number, low // BLOCK), -1))
            if n and found and found[-1].full and found[-1].stop == at:
                run = Run(found[-1].start, run.stop, found[-1].at, found[-1].blocks + n, -1)
                found.pop()
            found.append(run)
            low, at, blocks = low + length, at + length, blocks + (n or 1)
    return found


@functools.lru_cache(maxsize=4096)
def _shared(layout: Layout, entries: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """The blocks that pieces cut, `(parameter, block)`, numbered in the same way on all ranks."""
    found: dict[tuple[int, int], int] = {}
    for index in range(layout.size):
        for number, low, _, _ in layout.cuts[index]:
            if number in entries and low % BLOCK:
                found.setdefault((number, low // BLOCK), len(found))
    return found


@dynamo.constant_when_traced
def _shared_count(layout: Layout, entries: tuple[int, ...]) -> int:
    return len(_shared(layout, entries))


def chunks(unit: Unit, start: int, stop: int) -> list[Runs]:
    """The blocks between two elements of a unit, a few at a time; shared ones by themselves."""
    key = unit.layout, unit.entries, unit.start, unit.stop
    return _chunks(*key, process_groups.global_rank(), start, stop)


@functools.lru_cache(maxsize=4096)
def _chunks(layout: Layout | None, entries: Any, first: int, last: int, rank: int, start: int, stop: int) -> list[Runs]:
    every = _plain(last) if layout is None else _in_layout(layout, entries, first, last, rank)
    found: list[list[Run]] = []
    room = 0
    for whole in map(Run._make, every):
        run = _between(whole, start, stop)
        if run is None:
            continue
        for part in _parts(run):
            length = part.stop - part.start
            if part.shared >= 0 or room < length:
                found.append([])
                room = CHUNK
            found[-1].append(part)
            room = 0 if part.shared >= 0 else room - length
    return [tuple(parts) for parts in found]


def _between(run: Run, start: int, stop: int) -> Run | None:
    """What of a run is between two elements, where parameters begin: whole blocks of several may be one run."""
    low, high = max(run.start, start), min(run.stop, stop)
    if low >= high:
        return None
    if (low, high) == (run.start, run.stop):
        return run
    return Run(low, high, run.at + (low - run.start) // BLOCK, (high - low) // BLOCK, run.shared)


def _parts(run: Run) -> Iterator[Run]:
    """A run in parts that are no longer than a chunk."""
    most = CHUNK // BLOCK
    for n in range(0, run.blocks, most):
        stop = min(run.start + (n + most) * BLOCK, run.stop)
        yield Run(run.start + n * BLOCK, stop, run.at + n, min(most, run.blocks - n), run.shared)


# --- numbers of blocks, and of elements ---


def largest(x: Tensor, parts: Runs) -> Tensor:
    """The largest magnitude in each block, of elements from the first run's first on; `[blocks]`, float32."""
    first = parts[0].start if parts else 0
    rows = [x[one.start - first : one.stop - first].view(one.blocks, -1).abs().amax(1) for one in parts]
    return (torch.cat(rows) if len(rows) != 1 else rows[0]).float() if rows else x.new_zeros(0, dtype=torch.float32)


def times(x: Tensor, numbers: Tensor, parts: Runs) -> Tensor:
    """Elements, from the first run's first on, times the numbers of their blocks; 0 where there is no block."""
    if len(parts) == 1:
        return (x.view(parts[0].blocks, -1) * numbers[:, None]).view(-1)
    return x * spread(numbers, parts, x)


def spread(numbers: Tensor, parts: Runs, like: Tensor) -> Tensor:
    """The number of each element's block, for elements from the first run's first on."""
    rows: list[Tensor] = []
    last, at = parts[0].start if parts else 0, parts[0].at if parts else 0
    first = last
    for one in parts:
        if last < one.start:
            rows.append(numbers.new_zeros(one.start - last))
        own = numbers[one.at - at : one.at - at + one.blocks]
        rows.append(own[:, None].expand(one.blocks, (one.stop - one.start) // one.blocks).reshape(-1))
        last = one.stop
    return torch.cat([*rows, numbers.new_zeros(len(like) - (last - first))])


class Said(NamedTuple):
    """What this rank says of a block that it shares: the unit, the slot, the block's number, and `[1]`."""

    unit: int
    slot: int
    number: int
    value: Tensor


def agreed(known: Units, slots: int, said: list[Said]) -> list[Tensor]:
    """The largest of what ranks say of each block that they share; what is not finite is infinite.

    All ranks call it together, also those that have nothing of a unit.
    """
    groups: dict[Any, list[int]] = {}
    for i, unit in enumerate(known.each):
        if unit.trainable and unit.layout is not None and _shared_count(unit.layout, unit.entries):
            kind = unit.layout.grid, unit.layout.placement.axes, home(unit)
            groups.setdefault(kind, []).append(i)
    mine: dict[tuple[int, int], list[Said]] = {}
    for one in said:
        mine.setdefault((one.unit, one.slot), []).append(one)
    every: dict[tuple[int, int], Tensor] = {}
    for (grid, axes, device), numbers in groups.items():
        keys, rows, lengths = [], [], []
        for i in numbers:
            unit = known.each[i]
            assert unit.layout is not None, "plain tensors share nothing"
            for slot in range(slots):
                keys.append((i, slot))
                lengths.append(_shared_count(unit.layout, unit.entries))
                rows += _row(mine.get((i, slot), []), lengths[-1], device)
        with scope(mesh_of(grid, "a tree")):
            most = functional.pmax(torch.cat(rows).nan_to_num(nan=math.inf, posinf=math.inf), axes)
        every |= dict(zip(keys, most.split(lengths), strict=True))
    return [every[one.unit, one.slot][one.number : one.number + 1] for one in said]


def _row(said: list[Said], n: int, device: torch.device) -> list[Tensor]:
    """Numbers of all blocks that are shared of a unit, in order; zeros where this rank says nothing."""
    found, at = [], 0
    for one in said:
        found += [torch.zeros(one.number - at, dtype=torch.float32, device=device), one.value.to(device)]
        at = one.number + 1
    return [*found, torch.zeros(n - at, dtype=torch.float32, device=device)]


# --- in checkpoints ---


class Part(NamedTuple):
    """What a checkpoint has of a parameter's blocks.

    Attributes:
        number: of the parameter in the layout.
        offsets: where in the tensor of all blocks those here begin.
        start: which of the node's numbers are here, from
        stop: to.
    """

    number: int
    offsets: tuple[int, ...]
    start: int
    stop: int


def whole_shape(layout: Layout, number: int) -> tuple[int, ...]:
    """Of all numbers of a parameter's blocks."""
    parts = layout.parts(number)
    return (*(parts if math.prod(parts) > 1 else ()), -(-layout.entries[number].numel // BLOCK))


def parts(node: Blocks, rank: int, mine: bool) -> list[Part]:
    """What a rank has of each parameter's blocks; if `mine`, without those that another rank has the first element of.

    Parameters without elements have a part where their place is.
    """
    layout, found, at = node.layout, [], 0
    for number, start, stop, place in layout.cuts_of(rank):
        if number not in node.entries or not node.start <= place <= node.stop:
            continue
        low, high = start // BLOCK, -(-stop // BLOCK)
        skipped = int(mine and start % BLOCK > 0)
        corner = layout.part(number, rank) if len(whole_shape(layout, number)) > 1 else ()
        found.append(Part(number, (*corner, low + skipped), at + skipped, at + high - low))
        at += high - low
    return found
