"""Streams of rows from files that are read from the start, in an order that does not depend on the ranks.

Each epoch deals the files to lanes again. A lane reads its files one after the other, a block of rows at a time, and
shuffles each block. Each step takes equally many rows of every lane. So the rows of a step depend only on the seed, the
lanes and the block; and a rank reads only the lanes that hold its rows.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardfn.quoting import listed, short
from shardfn.run.batch_consistency import Read, State
from shardfn.run.collating import Collate, digest, join_batches, masked
from shardfn.run.feeding import ahead, locked, owned
from shardfn.run.order import Remainder, permuted
from shardfn.run.randomness import lent_generators, seed_host
from shardfn.run.sources import NAME, by_workers, collated_copy
from shardfn.shards.random import mixed

ReadRows = Callable[[Any], Iterable[Any]]


@dataclass(frozen=True)
class Stream:
    """A source for `batches`: files whose rows are found only by reading.

    Args:
        files: paths or whatever else `read` takes, the same on all ranks and in the same order.
        read: `file -> iterable of its rows`, the same at every call.
        lanes: files that are read side by side. They must divide `batch`, and be no more than the files. A rank reads
            only its own rows if the lanes are a multiple of the ranks along the axes, so choose a multiple of the most
            ranks there will be; with fewer lanes than ranks, the ranks that share a lane all read it, and keep their
            part.
        block: rows of a lane that are held in memory and shuffled together. With 1, or without `shuffle`, only the
            order of files changes.
        lengths: rows of each file. With them, resuming skips whole files; without, all rows up to the step are read
            again and dropped.

    Raises:
        TypeError: `files` is a single path, or `read` is not callable.
        ValueError: there are no files, more lanes than files, or `block` or `lengths` are wrong.

    Example:
        >>> stream = Stream(["a.txt", "b.txt"], lambda path: iter([f"first of {path}", "second"]), lanes=2)
        >>> len(stream.files)
        2

    """

    files: Sequence[Any]
    read: ReadRows
    lanes: int
    block: int = 1
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.files, (str, Path)):
            raise TypeError(f"Stream: files must be a list of files, got {str(self.files)!r}")
        object.__setattr__(self, "files", list(self.files))
        if not self.files:
            raise ValueError("Stream: there are no files")
        if not callable(self.read):
            raise TypeError(f"Stream: read must be a function of a file, which gives its rows, got {self.read!r}")
        if not 1 <= self.lanes <= len(self.files):
            raise ValueError(
                f"Stream: lanes={self.lanes}, and there are {len(self.files)} files: each lane needs one, so lanes are "
                f"1 to {len(self.files)}"
            )
        if self.block < 1:
            raise ValueError(f"Stream: block={self.block}; at least 1 row is shuffled")
        if self.lengths is not None:
            object.__setattr__(self, "lengths", [int(n) for n in self.lengths])
            if len(self.lengths) != len(self.files) or min(self.lengths) < 0:
                raise ValueError(
                    f"Stream: lengths has {len(self.lengths)} numbers, and there are {len(self.files)} files: name the "
                    f"rows of each, 0 or more"
                )


def stream_facts(stream: Stream) -> tuple[str, list[str]]:
    """A digest of file names, lanes, block and lengths, and a line for each; no rows are read."""
    names = [Path(str(file)).name for file in stream.files]
    lengths = None if stream.lengths is None else list(stream.lengths)
    facts = [
        f"files: {len(names)}, from {short(names[0], 80)!r} to {short(names[-1], 80)!r}, names with checksum "
        f"{digest(names):014x}",
        f"lanes={stream.lanes}",
        f"block={stream.block}",
        f"lengths: {None if lengths is None else sum(lengths)}, each with checksum {digest(lengths):014x}",
    ]
    return f"{digest([names, stream.lanes, stream.block, lengths]):014x}", facts


@dataclass(frozen=True)
class Streamed:
    """A stream split into batches, for the place along the axes that has rows `first` to `stop`."""

    stream: Stream
    seed: int
    shuffle: bool
    remainder: Remainder
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

    def open_batches(self, workers: int, prefetch: int, device: torch.device, start: int) -> Generator[Read]:
        """Yields batches from a step on, read by workers if there are any."""
        batches: Generator[tuple[State, Any]] = self.steps(start, self.lanes)
        if workers:
            batches = ahead(partial(self._by_workers, start, workers, prefetch), max(1, prefetch), device)
        with contextlib.closing(batches):
            for state, batch in batches:
                yield Read(state, locked(batch, device))

    def check(self, workers: int) -> None:
        """Raises ValueError if there are more workers than lanes to read."""
        lanes = len(self.lanes)
        if workers > lanes:
            raise ValueError(
                f"{NAME}: workers={workers}, and this rank reads {lanes} of the {self.stream.lanes} lanes of the "
                f"stream, and each worker needs a lane: pass workers={lanes}, or use more lanes"
            )

    @property
    def lanes(self) -> range:
        """The lanes that hold rows of this rank."""
        lane_rows = self.batch // self.stream.lanes
        return range(self.first // lane_rows, -(-self.stop // lane_rows))

    def _by_workers(self, start: int, workers: int, prefetch: int) -> Iterator[tuple[State, Any]]:
        """Joins the batches of the workers, each of which reads a share of the lanes, in lane order."""
        parts = by_workers(_WorkerShare(self, start), None, workers, prefetch)
        for turn in zip(*[parts] * workers, strict=True):
            states = [state for state, _ in turn]
            if State.END in states:
                yield State.END, None
                return
            full = State.BATCH if State.BATCH in states else State.FILLED
            yield full, join_batches([batch for _, batch in turn])

    def steps(self, start: int, lanes: range) -> Generator[tuple[State, Any]]:
        """Yields the batches of the rows that come from these lanes."""
        lane_rows = self.batch // self.stream.lanes
        open_lanes = []
        for number in lanes:
            part = slice(max(0, self.first - number * lane_rows), min(lane_rows, self.stop - number * lane_rows))
            open_lanes.append(Lane(self, number, lane_rows, part, start))
        for step in itertools.count(start):
            with lent_generators():
                parts = [lane.next_rows() for lane in open_lanes]
                pairs = [pair for part in parts for pair in part or ()]
                ended = None in parts
                batch = None if ended else self._collated([row for row, _ in pairs], step, lanes)
            if ended:
                yield State.END, None
                return
            real = [is_real for _, is_real in pairs]
            masked_batch = masked(batch, np.array(real)) if self.remainder == "pad" else batch
            yield State.BATCH if any(real) else State.FILLED, masked_batch

    def _collated(self, rows: list[Any], step: int, lanes: range) -> Any:
        seed_host(mixed(self.seed, "collate", step, lanes.start, self.first))
        return collated_copy(rows, range(len(rows)), self.collate)


class Lane:
    """One lane of a stream that is being read, and how its end is handled.

    Args:
        streamed: the stream, split into batches.
        number: of the lane, from 0.
        rows_per_step: rows that a step takes of it.
        part: those of them that this rank keeps.
        start: the first step that is read.
    """

    def __init__(self, streamed: Streamed, number: int, rows_per_step: int, part: slice, start: int) -> None:
        self.whole, self.stream, self.number = streamed, streamed.stream, number
        self.each, self.part = rows_per_step, part
        self._rows = self.rows(start * rows_per_step, None if streamed.remainder == "wrap" else streamed.epochs)
        self._filler: tuple[Any, int] | None = None

    def next_rows(self) -> list[tuple[Any, bool]] | None:
        """This rank's rows of the next step, and whether each is real; fills up after the end as `remainder` says.

        None if the step has no batch.
        """
        rows, epochs = [], self.whole.epochs
        for _ in range(self.each):
            next_row = next(self._rows, None)
            if next_row is None and self.whole.remainder == "drop":
                return None
            row, epoch = next_row or self._filled()
            rows.append((row, epochs is None or epoch < epochs))
        return rows[self.part]

    def _filled(self) -> tuple[Any, int]:
        """The lane's first row as a filler, in an epoch that does not count."""
        if self._filler is None:
            self._filler = next(self.rows(0, None))[0], self.whole.epochs or 0
        return self._filler

    def rows(self, skip: int, end: int | None) -> Iterator[tuple[Any, int]]:
        """Yields rows with their epochs, up to but not including epoch `end`, after the first `skip` rows.

        Raises:
            ValueError: the lane's files have no rows, or not as many as `lengths` says.
        """
        for epoch in itertools.count() if end is None else range(end):
            files = self._files(epoch)
            total = None if self.stream.lengths is None else sum(self.stream.lengths[file] for file in files)
            if total and skip >= total:
                skip -= total
                continue
            number = 0
            for number, row in enumerate(self._epoch(epoch, files, skip, total is not None), 1):
                if total is not None or number > skip:
                    yield row, epoch
            skip = 0 if total is not None else max(0, skip - number)
            if number == 0:
                names = [str(self.stream.files[file]) for file in files[:4]]
                raise ValueError(f"Stream: the files of lane {self.number} have no rows: {listed(names)}")

    def _files(self, epoch: int) -> list[int]:
        """Indices of the lane's files in an epoch."""
        count = len(self.stream.files)
        order = np.arange(count)
        if self.whole.shuffle:
            order = permuted(order, count, mixed(self.whole.seed, "files", epoch))
        return order[self.number :: self.stream.lanes].tolist()

    def _epoch(self, epoch: int, files: list[int], skip: int, skips: bool) -> Iterator[Any]:
        """Yields the rows of an epoch; without the first `skip` if lengths are known, so that `skips` is True."""
        block = self.stream.block if self.whole.shuffle else 1
        first = skip // block if skips else 0
        block_offset = skip % block if skips else 0
        rows = self._plain(epoch, files, first * block)
        if block == 1:
            yield from rows
            return
        for number in itertools.count(first):
            block_rows = list(itertools.islice(rows, block))
            if not block_rows:
                return
            key = mixed(self.whole.seed, "block", epoch, self.number, number)
            order = permuted(np.arange(len(block_rows)), len(block_rows), key)
            yield from (block_rows[place] for place in order[block_offset:].tolist())
            block_offset = 0

    def _plain(self, epoch: int, files: list[int], skip: int) -> Iterator[Any]:
        """Yields the files' rows in order, without the first `skip` if lengths are known.

        Rows are copied, since several are in memory at a time and `read` may reuse its memory.
        """
        lengths = self.stream.lengths
        for file in files:
            if lengths is not None and skip >= lengths[file]:
                skip -= lengths[file]
                continue
            for number, row in enumerate(self._read(epoch, file)):
                if number >= skip:
                    yield owned(row)
            skip = 0

    def _read(self, epoch: int, file: int) -> Iterator[Any]:
        """Yields all rows of one file, reading each with its own seed."""
        name, lengths, count = self.stream.files[file], self.stream.lengths, 0
        try:
            seed_host(mixed(self.whole.seed, "row", epoch, file, 0))
            for row in self.stream.read(name):
                count += 1
                yield row
                seed_host(mixed(self.whole.seed, "row", epoch, file, count))
        except Exception as error:
            error.add_note(f"sf.run.Stream: row {count} of {name} was read")
            raise
        if lengths is not None and count != lengths[file]:
            raise ValueError(f"Stream: {name} has {count} rows, and lengths says {lengths[file]}: correct it")


class _WorkerShare(IterableDataset[Any]):
    """A worker's share of a rank's lanes. It never ends by itself, so that the workers keep taking turns."""

    def __init__(self, streamed: Streamed, start: int) -> None:
        self.whole, self.start = streamed, start

    def __iter__(self) -> Iterator[tuple[State, Any]]:
        worker, lanes = cast(Any, get_worker_info()), self.whole.lanes
        low, high = (len(lanes) * (worker.id + offset) // worker.num_workers for offset in (0, 1))
        yield from self.whole.steps(self.start, lanes[low:high])
        while True:
            yield State.END, None
