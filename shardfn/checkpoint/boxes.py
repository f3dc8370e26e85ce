"""Stretches of an array in row-major order as boxes of it, and what boxes have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Part of an array: where it begins along each dimension, and how long it is."""

    offsets: Ints
    sizes: Ints

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)

    def moved(self, corner: Sequence[int]) -> Box:
        """The same in an array that holds this one at `corner`."""
        return Box(tuple(a + b for a, b in zip(self.offsets, corner, strict=True)), self.sizes)

    def common(self, other: Box) -> Box | None:
        """What both have; None where that is nothing."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(min(a + m, b + n) for a, m, b, n in zip(*self._pair(), *other._pair(), strict=True))
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        return None if any(n <= 0 for n in sizes) else Box(low, sizes)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The indices of this box in the array that `outer` cuts out."""
        starts = (a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.sizes, strict=True))

    def _pair(self) -> tuple[Ints, Ints]:
        return self.offsets, self.sizes


def whole(shape: Sequence[int]) -> Box:
    """All of an array."""
    return Box((0,) * len(shape), tuple(shape))


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements `start` to `stop` of an array of this shape, in row-major order, as the fewest boxes, in this order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(first, shape, head, tail)
        return
    if head:
        yield from _in_row(first, shape, head, row)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if tail:
        yield from _in_row(last, shape, 0, tail)


def _in_row(number: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    for box in boxes(shape[1:], start, stop):
        yield Box((number, *box.offsets), (1, *box.sizes))
