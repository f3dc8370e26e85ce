"""Blocks of 256 elements of a parameter, each with one value, such as the scale of an 8-bit optimizer state.

Blocks begin where the parameter begins, so they are the same for any number of ranks. A block may be on several ranks:
`agreed` gives it the same value on all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.compat import process_groups
from shardfn.mesh.scope import mesh_of, scope
from shardfn.shards.layout import Layout
from shardfn.shards.pieces import Piece, Unit, Units, cuts_within, home, is_unit, node

BLOCK = 256
CHUNK = 2**16  # elements processed at a time on a CPU, so that they stay in a cache


class BlockRun(NamedTuple):
    """Consecutive blocks that this rank holds in full, or its part of a single block.

    Attributes:
        start: first element in the unit.
        stop: one past the last element.
        at: index of the first block among the unit's blocks on this rank.
        blocks: number of blocks.
        shared: index among the blocks that several ranks share; -1 if this rank holds the full block.
    """

    start: int
    stop: int
    at: int
    blocks: int
    shared: int

    @property
    def full(self) -> bool:
        """Whether all blocks have 256 elements."""
        return self.stop - self.start == self.blocks * BLOCK


Runs = tuple[BlockRun, ...]


class Blocks(Piece):
    """One value for each block of which this rank has elements: a pytree node with one leaf.

    A checkpoint stores them under the parameter's name, as `[blocks]`, or under tensor parallelism as
    `[*parts, blocks]`, as each part has its own blocks.

    Attributes:
        values: the numbers, `[blocks]`; the other attributes say which elements they belong to.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Blocks({self.values!r}, of {self.layout})"


node(Blocks)


def blocks_node(unit: Unit, values: Any) -> Any:
    """A node for the numbers of a unit's blocks; for a plain tensor, the numbers themselves."""
    if unit.layout is None or values is None:
        return unit.with_values(values)
    return Blocks(values, unit.layout, unit.entries, unit.start, unit.stop)


def blocks_of(units: Units, tree: Any) -> list[Any]:
    """The numbers of each unit's blocks; None where there are none."""
    leaves = units.tree.flatten_up_to(tree)
    return [leaf.values if type(leaf) is Blocks or is_unit(leaf) else leaf for leaf in leaves]


# --- where blocks are ---


def runs(unit: Unit) -> Runs:
    """The blocks of a unit, in order; padding between parameters belongs to no block."""
    return _runs(unit.layout, unit.entries, unit.start, unit.stop, process_groups.global_rank())


def num_blocks(unit: Unit) -> int:
    """Number of blocks of a unit on this rank."""
    all_runs = runs(unit)
    return all_runs[-1].at + all_runs[-1].blocks if all_runs else 0


@functools.lru_cache(maxsize=4096)
def _runs(layout: Layout | None, entries: tuple[int, ...], start: int, stop: int, rank: int) -> Runs:
    cuts = [(0, 0, stop, 0)] if layout is None else cuts_within(layout, rank, entries, start, stop)
    shared = {} if layout is None else _shared(layout, entries)
    runs: list[BlockRun] = []
    blocks = 0
    for number, low, high, position in cuts:
        while low < high:
            n = (high - low) // BLOCK if low % BLOCK == 0 else 0
            length = n * BLOCK or min(high - low, BLOCK - low % BLOCK)
            run = BlockRun(position, position + length, blocks, n or 1, shared.get((number, low // BLOCK), -1))
            if n and runs and runs[-1].full and runs[-1].stop == position:
                run = BlockRun(runs[-1].start, run.stop, runs[-1].at, runs[-1].blocks + n, -1)
                runs.pop()
            runs.append(run)
            low, position, blocks = low + length, position + length, blocks + (n or 1)
    return tuple(runs)


@functools.lru_cache(maxsize=4096)
def _shared(layout: Layout, entries: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """The blocks that are on several ranks, as `(parameter, block)`, with the same numbers on all ranks."""
    numbers: dict[tuple[int, int], int] = {}
    for index in range(layout.size):
        for number, low, _, _ in layout.cuts[index]:
            if number in entries and low % BLOCK:
                numbers.setdefault((number, low // BLOCK), len(numbers))
    return numbers


def chunks(unit: Unit, start: int, stop: int, max_elements: int) -> list[Runs]:
    """The blocks between two elements of a unit, in chunks of `max_elements`; each shared block is one chunk."""
    key = unit.layout, unit.entries, unit.start, unit.stop
    return _chunks(*key, process_groups.global_rank(), start, stop, max_elements)


@functools.lru_cache(maxsize=4096)
def _chunks(
    layout: Layout | None, entries: Any, first: int, last: int, rank: int, start: int, stop: int, max_elements: int
) -> list[Runs]:
    chunks: list[list[BlockRun]] = []
    remaining = 0
    for full_run in _runs(layout, entries, first, last, rank):
        low, high = max(full_run.start, start), min(full_run.stop, stop)
        if low >= high:
            continue
        run = full_run
        if (low, high) != (full_run.start, full_run.stop):  # blocks of several parameters may be one run
            first_block = full_run.at + (low - full_run.start) // BLOCK
            run = BlockRun(low, high, first_block, (high - low) // BLOCK, full_run.shared)
        for part in _parts(run, max_elements):
            length = part.stop - part.start
            if part.shared >= 0 or remaining < length:
                chunks.append([])
                remaining = max_elements
            chunks[-1].append(part)
            remaining = 0 if part.shared >= 0 else remaining - length
    return [tuple(parts) for parts in chunks]


def _parts(run: BlockRun, max_elements: int) -> Iterator[BlockRun]:
    """Splits a run into parts of at most this many elements, or of one block."""
    rows = max(1, max_elements // BLOCK)
    for n in range(0, run.blocks, rows):
        stop = min(run.start + (n + rows) * BLOCK, run.stop)
        yield BlockRun(run.start + n * BLOCK, stop, run.at + n, min(rows, run.blocks - n), run.shared)


# --- numbers of blocks, and of elements ---


def largest(x: Tensor, parts: Runs) -> Tensor:
    """The largest magnitude in each block, `[blocks]` in float32; `x` begins at the first run's first element."""
    first = parts[0].start if parts else 0
    rows = [x[run.start - first : run.stop - first].view(run.blocks, -1).abs().amax(1) for run in parts]
    return (torch.cat(rows) if len(rows) != 1 else rows[0]).float() if rows else x.new_zeros(0, dtype=torch.float32)


def times(x: Tensor, numbers: Tensor, parts: Runs) -> Tensor:
    """Elements times the numbers of their blocks, 0 outside of blocks; `x` begins at the first run's first element."""
    if len(parts) == 1:
        return (x.view(parts[0].blocks, -1) * numbers[:, None]).view(-1)
    return x * spread(numbers, parts, x)


def spread(numbers: Tensor, parts: Runs, elements: Tensor) -> Tensor:
    """Each element's block value, for `len(elements)` elements from the first run's first element."""
    rows: list[Tensor] = []
    last, first_block = parts[0].start if parts else 0, parts[0].at if parts else 0
    first = last
    for run in parts:
        if last < run.start:
            rows.append(numbers.new_zeros(run.start - last))
        of_run = numbers[run.at - first_block : run.at - first_block + run.blocks]
        rows.append(of_run[:, None].expand(run.blocks, (run.stop - run.start) // run.blocks).reshape(-1))
        last = run.stop
    return torch.cat([*rows, numbers.new_zeros(len(elements) - (last - first))])


class Said(NamedTuple):
    """This rank's value for a shared block: unit, slot, index among the unit's shared blocks, and a tensor `[1]`."""

    unit: int
    slot: int
    number: int
    value: Tensor


def agreed(units: Units, slots: int, values: list[Said]) -> list[Tensor]:
    """The maximum over ranks of each shared block's value; NaN counts as infinite.

    All ranks call it together, also those that hold nothing of a unit.
    """
    groups: dict[Any, list[int]] = {}
    for i, unit in enumerate(units.each):
        if unit.trainable and unit.layout is not None and _shared(unit.layout, unit.entries):
            kind = unit.layout.grid, unit.layout.placement.axes, home(unit)
            groups.setdefault(kind, []).append(i)
    local: dict[tuple[int, int], list[Said]] = {}
    for value in values:
        local.setdefault((value.unit, value.slot), []).append(value)
    maxima: dict[tuple[int, int], Tensor] = {}
    for (grid, axes, device), numbers in groups.items():
        keys, rows, lengths = [], [], []
        for i in numbers:
            unit = units.each[i]
            assert unit.layout is not None, "plain tensors share nothing"
            for slot in range(slots):
                keys.append((i, slot))
                lengths.append(len(_shared(unit.layout, unit.entries)))
                rows += _row(local.get((i, slot), []), lengths[-1], device)
        with scope(mesh_of(grid, "a tree")):
            maximum = functional.pmax(torch.cat(rows).nan_to_num(nan=math.inf, posinf=math.inf), axes)
        maxima |= dict(zip(keys, maximum.split(lengths), strict=True))
    return [maxima[value.unit, value.slot][value.number : value.number + 1] for value in values]


def _row(values: list[Said], n: int, device: torch.device) -> list[Tensor]:
    """The values of all shared blocks of a unit, in order; zeros where this rank has none."""
    row, next_index = [], 0
    for value in values:
        row += [torch.zeros(value.number - next_index, dtype=torch.float32, device=device), value.value.to(device)]
        next_index = value.number + 1
    return [*row, torch.zeros(n - next_index, dtype=torch.float32, device=device)]


# --- in checkpoints ---


class BlockShare(NamedTuple):
    """A rank's part of a parameter's blocks in a checkpoint.

    Attributes:
        number: index of the parameter in the layout.
        offsets: where the part begins in the tensor of all blocks.
        start: first of the node's numbers in the part.
        stop: one past the last.
    """

    number: int
    offsets: tuple[int, ...]
    start: int
    stop: int


def whole_shape(layout: Layout, number: int) -> tuple[int, ...]:
    """Shape of the tensor of all blocks of a parameter."""
    parts = layout.parts(number)
    return (*(parts if math.prod(parts) > 1 else ()), -(-layout.entries[number].numel // BLOCK))


def parts(node: Blocks, rank: int, is_owner: bool) -> list[BlockShare]:
    """A rank's part of each parameter's blocks; with `is_owner`, only blocks whose first element it holds.

    Parameters without elements have a part at their position.
    """
    layout, parts, first_block = node.layout, [], 0
    for number, start, stop, place in layout.cuts_of(rank):
        if number not in node.entries or not node.start <= place <= node.stop:
            continue
        low, high = start // BLOCK, -(-stop // BLOCK)
        skipped = int(is_owner and start % BLOCK > 0)
        corner = layout.part(number, rank) if len(whole_shape(layout, number)) > 1 else ()
        parts.append(BlockShare(number, (*corner, low + skipped), first_block + skipped, first_block + high - low))
        first_block += high - low
    return parts
