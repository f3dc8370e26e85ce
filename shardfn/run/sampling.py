"""Poisson sampling: each row is in a step's batch independently of all others, as differential privacy asks for.

Which rows a step has is computed from the seed and the step alone, like the order of rows of other batches.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from shardfn.run.order import Numbers, Part

BITS = 53
AT_A_TIME = 2**20  # rows for which numbers are drawn together
RARE = 1e-9  # a step's sample is larger than its batch with at most this probability


@dataclass(frozen=True)
class Sample:
    """The rows of each step, drawn with a probability, in batches of one size that are filled up.

    Attributes:
        count: rows of the source.
        batch: rows of a step with those that fill it, on all ranks together.
        seed: of the sampling.
        rate: the probability of each row, at each step.
    """

    count: int
    batch: int
    seed: int
    rate: float

    masked = True
    steps = None
    steps_per_epoch = None

    def rows(self, step: int) -> Numbers:
        """The numbers of the rows that a step has, ascending, int64."""
        hashed = hashlib.blake2b(repr((self.seed, "sample", step)).encode(), digest_size=16).digest()
        stream = np.random.Philox(key=np.frombuffer(hashed, np.dtype("<u8")).astype(np.uint64))
        below = np.uint64(math.floor(self.rate * 2**BITS))
        found = []
        for first in range(0, self.count, AT_A_TIME):
            drawn = stream.random_raw(min(AT_A_TIME, self.count - first)) >> np.uint64(64 - BITS)
            found.append(first + np.flatnonzero(drawn < below))
        return np.concatenate(found).astype(np.int64)

    def part(self, step: int, first: int, stop: int) -> Part:
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
        return Part(rows[first:stop], np.full(stop - first, step, np.int64), real[first:stop])


def room(count: int, rate: float) -> int:
    """A size that a sample exceeds with a probability of at most `RARE`, by Chernoff's bound; at most `count`."""
    low, high = math.floor(count * rate), count
    while low < high:
        middle = (low + high) // 2
        if _exceeds(middle, count, rate) <= RARE:
            high = middle
        else:
            low = middle + 1
    return low


def _exceeds(size: int, count: int, rate: float) -> float:
    """A bound of the probability that more than `size` of `count` rows are sampled."""
    if size >= count:
        return 0.0
    share = (size + 1) / count
    if share <= rate:
        return 1.0
    apart = share * math.log(share / rate) + ((1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0)
    return math.exp(-count * apart)
