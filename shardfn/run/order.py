"""Which rows are read at which step: a function of the seed and the step, and of nothing else.

Nobody keeps an order: where a row stands is computed from its number, so that any step is found at once, and the order
is the same on any number of ranks, which read parts of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardfn.shards.random import mixed

Last = Literal["drop", "pad", "wrap"]
Numbers = NDArray[np.int64]
ROUNDS = 16  # of half a network each: with 8, few rows do not come in all orders equally often


class Part(NamedTuple):
    """The rows of one step, or of a part of it: int64 `[rows]` each, and bool `[rows]`.

    Attributes:
        rows: numbers of rows in the source.
        epochs: in which epoch each is read.
        real: False for a row that only fills the batch.
    """

    rows: Numbers
    epochs: Numbers
    real: NDArray[np.bool_]


@dataclass(frozen=True)
class Order:
    """The order of all rows in all epochs, in batches.

    Attributes:
        count: rows of the source.
        batch: rows of a step, on all ranks together.
        seed: of the shuffling.
        shuffle: whether each epoch has an order of its own, and not the source's.
        last: what happens where an epoch's rows do not fill its last batch.
        epochs: how often every row is read; None is for ever.
    """

    count: int
    batch: int
    seed: int
    shuffle: bool = True
    last: Last = "drop"
    epochs: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Batches in which an epoch's rows begin; where epochs run on into each other, rounded up."""
        return self.count // self.batch if self.last == "drop" else -(-self.count // self.batch)

    @property
    def steps(self) -> int | None:
        """Batches in all; None is for ever."""
        if self.epochs is None:
            return None
        if self.last == "wrap":
            return -(-self.count * self.epochs // self.batch)
        return self.steps_per_epoch * self.epochs

    def part(self, step: int, first: int, stop: int, steps: int = 1) -> Part:
        """Rows `first` to `stop` of the batch of a step, and of the `steps - 1` after it, one after the other."""
        within = np.arange(first, stop, dtype=np.int64)
        each = np.arange(steps, dtype=np.int64)
        if self.last == "wrap":
            places = ((step + each)[:, None] * self.batch + within).ravel()
            epochs, offsets = places // self.count, places % self.count
            return Part(self._rows(epochs, offsets), epochs, np.ones(len(offsets), bool))
        per_epoch = self.steps_per_epoch
        offsets = ((step + each)[:, None] % per_epoch * self.batch + within).ravel()
        epochs = ((step + each) // per_epoch).repeat(len(within))
        real = offsets < self.count
        return Part(self._rows(epochs, offsets % self.count), epochs, real)

    def _rows(self, epochs: Numbers, offsets: Numbers) -> Numbers:
        if not self.shuffle:
            return offsets
        rows = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            rows[here] = permuted(offsets[here], self.count, mixed(self.seed, "order", epoch))
        return rows


def permuted(places: Numbers, count: int, key: int) -> Numbers:
    """Where a pseudo-random permutation of `range(count)` takes these places; int64, in memory for them alone.

    A Feistel network permutes the numbers of as many bits as `count` has, and is walked until it is back below `count`.
    """
    bits = (count - 1).bit_length()
    keys = [np.uint64(mixed(key, number)) for number in range(ROUNDS)]
    found = _network(places.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(found >= count)
    while len(outside):
        found[outside] = _network(found[outside], bits, keys)
        outside = outside[found[outside] >= count]
    return found.astype(np.int64)


def _network(x: NDArray[np.uint64], bits: int, keys: list[Any]) -> NDArray[np.uint64]:
    low = np.uint64(bits - bits // 2)
    right, left = (np.uint64((1 << n) - 1) for n in (int(low), bits // 2))
    high, x = x >> low, x & right
    for number, key in enumerate(keys):
        if number % 2:
            high = high ^ (_scrambled(x ^ key) & left)
        else:
            x = x ^ (_scrambled(high ^ key) & right)
    return (high << low) | x


def _scrambled(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number as another one, any bit of which depends on all of its bits (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
