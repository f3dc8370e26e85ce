"""Boxes (hyperrectangles) of arrays: intersections, positions in row-major order, and partitions."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Part of an array: its offset and its size along each dimension."""

    offsets: Ints
    sizes: Ints

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> Ints:
        """The end along each dimension, exclusive."""
        return tuple(offset + n for offset, n in zip(self.offsets, self.sizes, strict=True))

    def translated(self, corner: Sequence[int]) -> Box:
        """The box in the coordinates of an array that contains this one's array at `corner`."""
        return Box(tuple(a + b for a, b in zip(self.offsets, corner, strict=True)), self.sizes)

    def common(self, other: Box) -> Box | None:
        """The intersection of two boxes; None if it is empty."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = map(min, self.ends, other.ends)
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        return None if any(n <= 0 for n in sizes) else Box(low, sizes)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """The slices that select this box from the part of the array that is `outer`."""
        starts = (a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.sizes, strict=True))


def full_box(shape: Sequence[int]) -> Box:
    """The box of a full array."""
    return Box((0,) * len(shape), tuple(shape))


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements `start` to `stop` of an array in row-major order, as the fewest boxes, in that order."""
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


def steps(box: Box, max_elements: int, start: int = 0, stop: int | None = None) -> Iterator[Box]:
    """Elements `start` to `stop` of a box as boxes of at most `max_elements`; an empty box is yielded unchanged."""
    if box.numel == 0:
        yield box
    for low in range(start, box.numel if stop is None else stop, max(1, max_elements)):
        for part in boxes(box.sizes, low, min(low + max(1, max_elements), box.numel if stop is None else stop)):
            yield part.translated(box.offsets)


def box_runs(box: Box, shape: Sequence[int]) -> tuple[int, Iterator[int]]:
    """A box as contiguous runs in row-major order: the length of each, and the index at which each begins."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    cut = len(shape)
    while cut > 0:
        cut -= 1
        if box.sizes[cut] != shape[cut]:
            break
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    starts = ([i * stride for i in range(n)] for n, stride in zip(box.sizes[:cut], strides[:cut], strict=True))
    return math.prod(box.sizes[cut:]), (first + sum(offsets) for offsets in itertools.product(*starts))


def span(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """The first and the last-plus-one element, in row-major order, of a box that is not empty."""
    first = last = 0
    for offset, n, size in zip(box.offsets, box.sizes, shape, strict=True):
        first, last = first * size + offset, last * size + offset + n - 1
    return first, last + 1


def flaw(shape: Ints, parts: Sequence[Box]) -> str:
    """A message for boxes that are not a partition of an array; "" if they are."""
    if not parts:
        return "it has no parts"
    for box in parts:
        negative = min((0, *box.offsets, *box.sizes)) < 0
        if len(box.sizes) != len(shape) or negative or any(map(operator.gt, box.ends, shape)):
            return f"a part at {list(box.offsets)} of sizes {list(box.sizes)} is not inside {list(shape)}"
    live: list[tuple[int, Box]] = []  # boxes that end after the present start, with their ends
    for (start, stop), i in sorted((span(box, shape), i) for i, box in enumerate(parts) if box.numel):
        live = [(end, other) for end, other in live if end > start]
        overlap = next((other for _, other in live if other.common(parts[i])), None)
        if overlap is not None:
            return f"the parts at {list(overlap.offsets)} and {list(parts[i].offsets)} overlap"
        live.append((stop, parts[i]))
    numel = math.prod(shape)
    missing = numel - sum(box.numel for box in parts)
    return f"{missing} of {numel} elements are in no part" if missing else ""
