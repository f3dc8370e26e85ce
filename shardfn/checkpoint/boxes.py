"""Boxes of arrays: what two have in common, how one lies in row-major order, whether some make up a whole."""

from __future__ import annotations

import itertools
import math
import operator
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

    @property
    def ends(self) -> Ints:
        """Where it ends along each dimension."""
        return tuple(at + n for at, n in zip(self.offsets, self.sizes, strict=True))

    def moved(self, corner: Sequence[int]) -> Box:
        """The same in an array that holds this one at `corner`."""
        return Box(tuple(a + b for a, b in zip(self.offsets, corner, strict=True)), self.sizes)

    def common(self, other: Box) -> Box | None:
        """What both have; None where that is nothing."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = map(min, self.ends, other.ends)
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        return None if any(n <= 0 for n in sizes) else Box(low, sizes)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The indices of this box in the array that `outer` cuts out."""
        starts = (a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.sizes, strict=True))


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


def steps(box: Box, most: int, start: int = 0, stop: int | None = None) -> Iterator[Box]:
    """Elements `start` to `stop` of a box as boxes of at most `most` elements; an empty box as itself."""
    if box.numel == 0:
        yield box
    for low in range(start, box.numel if stop is None else stop, max(1, most)):
        for part in boxes(box.sizes, low, min(low + max(1, most), box.numel if stop is None else stop)):
            yield part.moved(box.offsets)


def runs(box: Box, shape: Sequence[int]) -> tuple[int, Iterator[int]]:
    """How a box lies in an array of this shape, in row-major order: in runs of one length, and where each begins."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    cut = len(shape)
    while cut > 0:
        cut -= 1
        if box.sizes[cut] != shape[cut]:
            break
    first = sum(at * stride for at, stride in zip(box.offsets, strides, strict=True))
    starts = ([i * stride for i in range(n)] for n, stride in zip(box.sizes[:cut], strides[:cut], strict=True))
    return math.prod(box.sizes[cut:]), (first + sum(some) for some in itertools.product(*starts))


def span(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """From which element of an array to which, in row-major order, a box that is not empty reaches."""
    first = last = 0
    for at, n, of in zip(box.offsets, box.sizes, shape, strict=True):
        first, last = first * of + at, last * of + at + n - 1
    return first, last + 1


def flaw(shape: Ints, parts: Sequence[Box]) -> str:
    """Why boxes do not make up an array of this shape, each element once; "" if they do."""
    if not parts:
        return "it has no parts"
    for box in parts:
        negative = min((0, *box.offsets, *box.sizes)) < 0
        if len(box.sizes) != len(shape) or negative or any(map(operator.gt, box.ends, shape)):
            return f"a part at {list(box.offsets)} of sizes {list(box.sizes)} is not inside {list(shape)}"
    live: list[tuple[int, Box]] = []  # boxes that reach this far
    for (start, stop), i in sorted((span(box, shape), i) for i, box in enumerate(parts) if box.numel):
        live = [(end, one) for end, one in live if end > start]
        twice = next((one for _, one in live if one.common(parts[i])), None)
        if twice is not None:
            return f"the parts at {list(twice.offsets)} and {list(parts[i].offsets)} have some elements both"
        live.append((stop, parts[i]))
    numel = math.prod(shape)
    missing = numel - sum(box.numel for box in parts)
    return f"{missing} of {numel} elements are in no part" if missing else ""
