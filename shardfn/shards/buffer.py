"""Positions of parameters of one dtype in one buffer, which is cut into equal pieces: integers only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardfn.mesh.spec import P

ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Entry:
    """One parameter in the buffer.

    Attributes:
        path: the keys from the root of the whole tree, joined by dots; an empty key adds nothing: `blocks.0.attn.q`.
        leaves: indices of the leaves of the stage's tree; several, if one tensor is at several places.
        shape: shape of this rank's value.
        spec: how other axes than the buffer's cut that value from the whole parameter.
        offset: position of its first element in the buffer.
    """

    path: str
    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    spec: P
    offset: int

    @property
    def numel(self) -> int:
        """Elements of this rank's value."""
        return math.prod(self.shape)


def aligned(numel: int, dtype: torch.dtype) -> int:
    """The least multiple of the alignment that is `numel` or more, in elements."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    return -(-numel // step) * step


def _unused(taken: Iterable[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """First element and length of each gap between the taken ranges, `(start, stop)` in order."""
    gaps, at = [], 0
    for start, stop in (*taken, (length, length)):
        if start > at:
            gaps.append((at, start - at))
        at = stop
    return tuple(gaps)


class Buffer:
    """Positions of parameters in a buffer of `size` pieces with `piece` elements each."""

    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Number of pieces."""
        raise NotImplementedError

    @property
    def piece(self) -> int:
        """Elements of one piece. The last one ends in at least 64 unused bytes."""
        raise NotImplementedError

    @cached_property
    def total(self) -> int:
        """Elements in use, up to the end of the last parameter."""
        return max((entry.offset + entry.numel for entry in self.entries), default=0)

    @property
    def padded(self) -> int:
        """Elements of the whole buffer."""
        return self.piece * self.size

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """First element and length of each range that no parameter uses."""
        return _unused(((entry.offset, entry.offset + entry.numel) for entry in self.entries), self.padded)

    def within(self, number: int, index: int) -> tuple[int, int, int]:
        """Elements `low` to `high` of a parameter that a piece holds, and their position in it; none if equal."""
        entry, start = self.entries[number], index * self.piece
        low = min(max(start - entry.offset, 0), entry.numel)
        high = min(max(start + self.piece - entry.offset, 0), entry.numel)
        return low, high, entry.offset + low - start

    @cached_property
    def cuts(self) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
        """The contents of each piece: `(entry, start, stop, at)`, elements of an entry at position `at`."""
        numbers = range(len(self.entries))
        pieces = ([(number, *self.within(number, index)) for number in numbers] for index in range(self.size))
        return tuple(tuple(cut for cut in piece if cut[1] < cut[2]) for piece in pieces)

    @cached_property
    def holes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """First element and length of each range that no parameter uses, for each piece."""
        return tuple(
            _unused(((at, at + stop - start) for _, start, stop, at in cuts), self.piece) for cuts in self.cuts
        )

    @cached_property
    def splits(self) -> tuple[list[int], list[int]]:
        """The lengths into which the whole buffer is split, and the indices of those parts that are entries."""
        lengths, chosen, at = [], [], 0
        for entry in self.entries:
            if entry.offset > at:
                lengths.append(entry.offset - at)
            chosen.append(len(lengths))
            lengths.append(entry.numel)
            at = entry.offset + entry.numel
        return [*lengths, self.padded - at], chosen

    def views(self, whole: Tensor) -> list[Tensor]:
        """Each parameter as a view of the whole buffer `[padded]`, in the order of the entries."""
        lengths, chosen = self.splits
        parts = whole.split(lengths)
        return [parts[i].view(entry.shape) for i, entry in zip(chosen, self.entries, strict=True)]
