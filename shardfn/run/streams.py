"""Files of rows that are read from their beginnings, in an order that neither ranks nor their number decide.

The files are dealt to lanes, anew for each epoch. A lane reads its files one after the other, a block of rows at a
time, and shuffles each block. Each step takes equally many rows of every lane. So which rows a step has depends on
the seed, the lanes and the block alone; and a rank reads no lanes but those whose rows are its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardfn.quoting import listed
from shardfn.run.order import permuted
from shardfn.run.owning import owned
from shardfn.run.seeding import seed_all
from shardfn.shards.random import mixed

Read = Callable[[Any], Iterable[Any]]


@dataclass(frozen=True)
class Stream:
    """A source for `batches`: files whose rows are found only by reading.

    Args:
        files: paths or whatever else `read` takes; all ranks name them alike, in the same order.
        read: `file -> iterable of its rows`, the same at every call.
        lanes: files that are read side by side. They divide `batch`, and are no more than there are files. A rank reads
            only its own rows if they are a multiple of the ranks along the axes, so choose a multiple of the most
            ranks there will be; where they are fewer, the ranks that share a lane all read it, and keep their part.
        block: rows of a lane that are shuffled among themselves, and are in memory for that. With 1, or without
            `shuffle`, only the files change their order.
        lengths: rows of each file. With them whole files are skipped where a run goes on; without, its rows are read
            again up to there, and dropped.

    Raises:
        ValueError: no files, more lanes than files, or other numbers that make no sense.

    Example:
        >>> stream = sf.run.Stream(sorted(Path("shards").glob("*.jsonl")), read_lines, lanes=8, block=1000)
    """

    files: Sequence[Any]
    read: Read
    lanes: int
    block: int = 1
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.files, (str, Path)):
            raise TypeError(f"Stream: files={str(self.files)!r}; it is a list of files")
        object.__setattr__(self, "files", list(self.files))
        if not self.files:
            raise ValueError("Stream: there are no files")
        if not callable(self.read):
            raise TypeError(f"Stream: read={self.read!r}; it is a function of a file, which gives its rows")
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


@dataclass(frozen=True)
class Lane:
    """One lane of a stream.

    Attributes:
        stream: whose.
        number: which of its lanes.
        seed: of the order.
        shuffle: whether files and rows change their order.
    """

    stream: Stream
    number: int
    seed: int
    shuffle: bool

    def rows(self, skip: int, end: int | None) -> Iterator[tuple[Any, int]]:
        """Row after row, each with its epoch, until epoch `end`, but for the first `skip`.

        Raises:
            ValueError: the lane's files have no rows, or others than `lengths` says.
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
        """Numbers of the lane's files in an epoch."""
        count = len(self.stream.files)
        order = np.arange(count)
        if self.shuffle:
            order = permuted(order, count, mixed(self.seed, "files", epoch))
        return order[self.number :: self.stream.lanes].tolist()

    def _epoch(self, epoch: int, files: list[int], skip: int, skips: bool) -> Iterator[Any]:
        """An epoch's rows; but for the first `skip`, if they can be skipped."""
        block = self.stream.block if self.shuffle else 1
        first = skip // block if skips else 0
        within = skip % block if skips else 0
        rows = self._plain(epoch, files, first * block)
        if block == 1:
            yield from rows
            return
        for number in itertools.count(first):
            some = list(itertools.islice(rows, block))
            if not some:
                return
            order = permuted(np.arange(len(some)), len(some), mixed(self.seed, "block", epoch, self.number, number))
            yield from (some[place] for place in order[within:].tolist())
            within = 0

    def _plain(self, epoch: int, files: list[int], skip: int) -> Iterator[Any]:
        """The files' rows in their order, but for the first `skip`, if lengths are known.

        Several are in memory at a time, so they are copied: `read` may fill the same memory again.
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
        """All rows of one file, each read with random numbers of its own."""
        name, lengths, count = self.stream.files[file], self.stream.lengths, 0
        try:
            seed_all(mixed(self.seed, "row", epoch, file, 0))
            for row in self.stream.read(name):
                count += 1
                yield row
                seed_all(mixed(self.seed, "row", epoch, file, count))
        except Exception as error:
            error.add_note(f"sf.run.Stream: row {count} of {name} was read")
            raise
        if lengths is not None and count != lengths[file]:
            raise ValueError(f"Stream: {name} has {count} rows, and lengths says {lengths[file]}: correct it")
