"""Computes which rows are read at which step, from the seed and the step alone.

No order is stored: a row's position is computed from its number. So any step is found at once, and the order is the
same on any number of ranks, each of which reads its part.
"""

from __future__ import annotations

import functools
import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardfn.shards.random import mixed

Remainder = Literal["drop", "pad", "wrap"]
Numbers = NDArray[np.int64]
Sampler = Callable[[int], Iterable[int]]
ROUNDS = 16  # half-rounds: with 8, the orders of a few rows are not equally likely


class StepRows(NamedTuple):
    """The rows of one or more steps, or a part of them.

    Attributes:
        rows: numbers of rows in the source, int64 `[rows]`.
        epochs: the epoch of each, int64 `[rows]`.
        real: False for a row that only fills the batch, bool `[rows]`.
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
        shuffle: whether each epoch has its own random order instead of the source's.
        remainder: what happens if the rows of an epoch do not fill its last batch.
        epochs: how often every row is read; None is for ever.
    """

    count: int
    batch: int
    seed: int
    shuffle: bool = True
    remainder: Remainder = "drop"
    epochs: int | None = None

    @property
    def masked(self) -> bool:
        """Whether some rows only fill a batch, so that it says which are real."""
        return self.remainder == "pad"

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; rounded up with `remainder="wrap"`, where batches span epochs, and `remainder="pad"`."""
        return self.count // self.batch if self.remainder == "drop" else -(-self.count // self.batch)

    @property
    def steps(self) -> int | None:
        """Number of batches in all epochs; None is for ever."""
        if self.epochs is None:
            return None
        if self.remainder == "wrap":
            return -(-self.count * self.epochs // self.batch)
        return self.steps_per_epoch * self.epochs

    def part(self, step: int, first: int, stop: int, steps: int = 1) -> StepRows:
        """Rows `first` to `stop` of the batches of `steps` steps from `step` on, one after the other."""
        row_offsets = np.arange(first, stop, dtype=np.int64)
        step_offsets = np.arange(steps, dtype=np.int64)
        if self.remainder == "wrap":
            places = ((step + step_offsets)[:, None] * self.batch + row_offsets).ravel()
            epochs, offsets = places // self.count, places % self.count
            return StepRows(self._rows(epochs, offsets), epochs, np.ones(len(offsets), bool))
        per_epoch = self.steps_per_epoch
        offsets = ((step + step_offsets)[:, None] % per_epoch * self.batch + row_offsets).ravel()
        epochs = ((step + step_offsets) // per_epoch).repeat(len(row_offsets))
        real = offsets < self.count
        return StepRows(self._rows(epochs, offsets % self.count), epochs, real)

    def _rows(self, epochs: Numbers, offsets: Numbers) -> Numbers:
        if not self.shuffle:
            return offsets
        rows = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            rows[in_epoch] = permuted(offsets[in_epoch], self.count, mixed(self.seed, "order", epoch))
        return rows


@dataclass(frozen=True)
class Sampled(Order):
    """The order that a function gives for each epoch; `count` rows of an epoch are drawn from a source of `of` rows.

    Attributes:
        sampler: the numbers of an epoch's rows, by the epoch's number.
        of: rows of the source.
    """

    sampler: Sampler = lambda epoch: ()
    of: int = 0

    def _rows(self, epochs: Numbers, offsets: Numbers) -> Numbers:
        rows = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            rows[in_epoch] = chosen_rows(self.sampler, epoch, self.of, self.count)[offsets[in_epoch]]
        return rows


@functools.lru_cache(maxsize=2)
def chosen_rows(sampler: Sampler, epoch: int, num_rows: int, count: int | None) -> Numbers:
    """The rows that a sampler gives for an epoch.

    Raises:
        ValueError: they are no numbers of rows, or not as many as in the first epoch.
    """
    rows = np.asarray(list(sampler(epoch)))
    if rows.ndim != 1 or not len(rows) or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= num_rows:
        raise ValueError(f"sf.run.batches: sampler must give numbers of the source's {num_rows} rows, got others")
    if count is not None and len(rows) != count:
        raise ValueError(
            f"sf.run.batches: sampler must give {count} rows in each epoch, as in the first, got {len(rows)} in epoch "
            f"{epoch}"
        )
    return rows.astype(np.int64)


def permuted(places: Numbers, count: int, key: int) -> Numbers:
    """Maps places by a pseudo-random permutation of `range(count)`; int64, without memory for all of it.

    A Feistel network permutes the numbers with as many bits as `count`; it is applied again to results outside of
    `range(count)` (cycle walking).
    """
    bits = (count - 1).bit_length()
    keys = [np.uint64(mixed(key, number)) for number in range(ROUNDS)]
    results = _network(places.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(results >= count)
    while len(outside):
        results[outside] = _network(results[outside], bits, keys)
        outside = outside[results[outside] >= count]
    return results.astype(np.int64)


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
    """Mixes each number so that every output bit depends on all input bits (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --- Poisson sampling ---


BITS = 53
AT_A_TIME = 2**20  # rows for which numbers are drawn together
RARE = 1e-9  # a step's sample is larger than its batch with at most this probability


@dataclass(frozen=True)
class Sample:
    """Poisson sampling: the rows of each step, drawn independently, in batches of one size that are filled up.

    Attributes:
        count: rows of the source.
        batch: rows of a step with those that fill it, on all ranks together.
        seed: of the sampling.
        sample_rate: the probability of each row, at each step.
    """

    count: int
    batch: int
    seed: int
    sample_rate: float

    masked = True
    steps = None
    steps_per_epoch = None

    def rows(self, step: int) -> Numbers:
        """The numbers of the rows that a step has, ascending, int64."""
        hashed = hashlib.blake2b(repr((self.seed, "sample", step)).encode(), digest_size=16).digest()
        stream = np.random.Philox(key=np.frombuffer(hashed, np.dtype("<u8")).astype(np.uint64))
        below = np.uint64(math.floor(self.sample_rate * 2**BITS))
        chunks = []
        for first in range(0, self.count, AT_A_TIME):
            random_bits = stream.random_raw(min(AT_A_TIME, self.count - first)) >> np.uint64(64 - BITS)
            chunks.append(first + np.flatnonzero(random_bits < below))
        return np.concatenate(chunks).astype(np.int64)

    def part(self, step: int, first: int, stop: int) -> StepRows:
        """Rows `first` to `stop` of the batch of a step.

        Rows of the sample are spread evenly over a batch, so that every rank has about as many. Between them it is
        filled with row 0, which is not real there. All rows of a step count as of an epoch of their own.

        Raises:
            ValueError: the sample has more rows than a batch.
        """
        sample = self.rows(step)
        if len(sample) > self.batch:
            raise ValueError(
                f"sf.run.batches: step {step} samples {len(sample)} rows, more than batch={self.batch} has room for, "
                f"and none may be left out. With a larger batch all steps have the same samples"
            )
        rows, real = np.zeros(self.batch, np.int64), np.zeros(self.batch, bool)
        places = np.arange(len(sample)) * self.batch // max(1, len(sample))
        rows[places], real[places] = sample, True
        return StepRows(rows[first:stop], np.full(stop - first, step, np.int64), real[first:stop])


def sample_bound(count: int, rate: float) -> int:
    """A size that a sample exceeds with a probability of at most `RARE`, by Chernoff's bound; at most `count`."""
    mean = math.floor(count * rate)
    return mean + bisect_left(range(mean, count), True, key=lambda size: _exceeds(size, count, rate) <= RARE)


def _exceeds(size: int, count: int, rate: float) -> float:
    """A bound of the probability that more than `size` of `count` rows are sampled."""
    if size >= count:
        return 0.0
    share = (size + 1) / count
    if share <= rate:
        return 1.0
    divergence = share * math.log(share / rate)
    divergence += (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
    return math.exp(-count * divergence)
