"""A rank's part of a stream: the lanes whose rows are its own, put together to batches."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardfn.run.collating import Collate, joined, masked
from shardfn.run.feeding import ahead, locked
from shardfn.run.fingerprints import digest
from shardfn.run.order import Last
from shardfn.run.reading import by_workers, made
from shardfn.run.seeding import lent_generators, seed_all
from shardfn.run.streams import Lane, Stream
from shardfn.run.together import Read, State
from shardfn.shards.random import mixed

NAME = "sf.run.batches"


def stream_fingerprint(stream: Stream) -> str:
    """Of the names of the files, of lanes, block and lengths; rows are not read for it."""
    names = [Path(str(file)).name for file in stream.files]
    lengths = None if stream.lengths is None else list(stream.lengths)
    return f"{digest([names, stream.lanes, stream.block, lengths]):014x}"


@dataclass
class _Taken:
    """What a lane gave for one step: rows, and which of them count; `ended` if it had to give too few."""

    rows: list[Any] = field(default_factory=list)
    real: list[bool] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Streamed:
    """A stream in batches, of which one place along the axes has rows `first` to `stop`."""

    stream: Stream
    seed: int
    shuffle: bool
    last: Last
    epochs: int | None
    batch: int
    first: int
    stop: int
    collate: Collate | None

    def __post_init__(self) -> None:
        if self.batch % self.stream.lanes:
            raise ValueError(
                f"{NAME}: batch={self.batch} rows a step do not come in equal parts from lanes={self.stream.lanes} of "
                f"the stream: let lanes divide batch"
            )

    def opened(self, workers: int, prefetch: int, device: torch.device, start: int) -> Generator[Read]:
        """Batches from a step on, by so many workers."""
        found: Generator[tuple[State, Any]] = self.steps(start, self.lanes)
        if workers:
            found = ahead(partial(self._by_workers, start, workers, prefetch), max(1, prefetch), device)
        with contextlib.closing(found):
            for state, batch in found:
                yield Read(state, locked(batch, device))

    def check(self, workers: int) -> None:
        """Raises ValueError if there are more workers than lanes to read."""
        lanes = len(self.lanes)
        if workers > lanes:
            raise ValueError(
                f"{NAME}: workers={workers}, and this rank reads {lanes} of the {self.stream.lanes} lanes of the "
                f"stream, of which each worker needs one: say workers={lanes}, or let the stream have more lanes"
            )

    @property
    def lanes(self) -> range:
        """Those that have rows of this rank."""
        each = self.batch // self.stream.lanes
        return range(self.first // each, -(-self.stop // each))

    def _by_workers(self, start: int, workers: int, prefetch: int) -> Iterator[tuple[State, Any]]:
        """Each worker has some of the lanes, and what they give for a step comes one after the other."""
        parts = by_workers(_Parts(self, start), None, workers, prefetch)
        for some in zip(*[parts] * workers, strict=True):
            states = [state for state, _ in some]
            if State.END in states:
                yield State.END, None
                return
            full = State.BATCH if State.BATCH in states else State.FILLED
            yield full, joined([batch for _, batch in some])

    def steps(self, start: int, lanes: range) -> Generator[tuple[State, Any]]:
        """The rows that come from these lanes, collated."""
        each = self.batch // self.stream.lanes
        open_ = [
            (
                Lane(self.stream, lane, self.seed, self.shuffle),
                max(0, self.first - lane * each),
                self.stop - lane * each,
            )
            for lane in lanes
        ]
        rows = [_Lane(self, lane, each, slice(low, min(each, high)), start) for lane, low, high in open_]
        step = start
        while True:
            with lent_generators():
                taken = [lane.take() for lane in rows]
                ended = any(one.ended for one in taken)
                batch = None if ended else self._collated([row for one in taken for row in one.rows], step, lanes)
            if ended:
                yield State.END, None
                return
            real = [one for part in taken for one in part.real]
            whole = masked(batch, np.array(real)) if self.last == "pad" else batch
            yield State.BATCH if any(real) else State.FILLED, whole
            step += 1

    def _collated(self, rows: list[Any], step: int, lanes: range) -> Any:
        seed_all(mixed(self.seed, "collate", step, lanes.start, self.first))
        return made(rows, range(len(rows)), self.collate)


class _Lane:
    """One open lane, and how it ends."""

    def __init__(self, whole: Streamed, lane: Lane, each: int, part: slice, start: int) -> None:
        self.whole, self.lane, self.each, self.part = whole, lane, each, part
        end = None if whole.last == "wrap" else whole.epochs
        self._rows = lane.rows(start * each, end)
        self._filler: tuple[Any, int] | None = None

    def take(self) -> _Taken:
        """The rows of a step that are of this rank; where an end comes before, what `last` says."""
        found, epochs = _Taken(), self.whole.epochs
        for _ in range(self.each):
            one = next(self._rows, None)
            if one is None and self.whole.last == "drop":
                return _Taken(ended=True)
            row, epoch = one or self._filled()
            found.rows.append(row)
            found.real.append(epochs is None or epoch < epochs)
        return _Taken(found.rows[self.part], found.real[self.part])

    def _filled(self) -> tuple[Any, int]:
        """The lane's first row, in no epoch that counts."""
        if self._filler is None:
            self._filler = next(self.lane.rows(0, None))[0], self.whole.epochs or 0
        return self._filler


class _Parts(IterableDataset[Any]):
    """What one worker reads: its share of a rank's lanes. It never ends by itself, so that workers stay in turn."""

    def __init__(self, whole: Streamed, start: int) -> None:
        self.whole, self.start = whole, start

    def __iter__(self) -> Iterator[tuple[State, Any]]:
        worker, lanes = cast(Any, get_worker_info()), self.whole.lanes
        low, high = (len(lanes) * (worker.id + more) // worker.num_workers for more in (0, 1))
        yield from self.whole.steps(self.start, lanes[low:high])
        while True:
            yield State.END, None
