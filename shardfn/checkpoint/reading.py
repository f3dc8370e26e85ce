"""Boxes of a checkpoint's tensors, in memory that does not grow with the parts that they are read from.

A part goes through one buffer from its first byte to its last, and its checksum with it: for loading, where elements
are copied to where they belong; for verifying, where none are; and for the command line.
"""

from __future__ import annotations

import abc
import bisect
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint.boxes import Box, boxes, runs, span
from shardfn.checkpoint.contents import BUFFER, Kind, LocalBox, memory
from shardfn.checkpoint.disk import Flaw, checked, opened, read_at, unpickled
from shardfn.checkpoint.manifest import Chunk, Entries, Source
from shardfn.checkpoint.team import CheckpointError
from shardfn.quoting import listed
from shardfn.tiers.tensors import on_disk

STEP = 2**22  # bytes of the buffer, about; a multiple of every element's
REST = 2**12  # bytes that are read with those before them
OTHER = "its checksum does not fit"

Report = Callable[[int, int], None]  # of how many bytes are done, and of how many
Wanted = dict[str, list[tuple[Chunk, str, list[LocalBox]]]]  # by file, in order: a part, of what, and what it fills
Elements = tuple[Box, Tensor]  # of a tensor: where they stand in it, and their values


def silent(done: int, total: int) -> None:
    """Reports nothing."""


def meter(report: Report, total: int) -> Callable[[int], None]:
    """A function that counts bytes, and reports the sum."""
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        report(done, total)

    report(0, total)
    return count


class Buffer:
    """Memory that is used again and again."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def first(self, length: int) -> memoryview:
        """So many bytes of it."""
        if len(self._memory) < length:
            self._memory = bytearray(length)
        return memoryview(self._memory)[:length]


def blocks(descriptor: int, start: int, stop: int, data: int, buffer: Buffer) -> Iterator[tuple[int, memoryview]]:
    """These bytes of a file through the buffer, and where each block begins; from `data` on cut at multiples of STEP.

    Raises:
        Flaw: the file ends before.
    """
    end = data + STEP
    while start < stop:
        end = stop if stop - end < REST else end
        content = buffer.first(end - start)
        done = read_at(descriptor, content, start)
        if done < len(content):
            raise Flaw(f"the file ends at byte {start + done}")
        yield start, content
        start, end = end, end + STEP


def located(descriptor: int, chunk: Chunk, kind: Kind, torchs: bool) -> Chunk | None:
    """Where a part's elements are, in row-major order; None if they are in no order that is known.

    Raises:
        Flaw: there is something else.
    """
    if not torchs:
        return chunk
    checksums = checked(descriptor, chunk.offset, chunk.length, values=False)
    found = unpickled(descriptor, chunk.offset, chunk.length, values=False)
    if not isinstance(found, Tensor) or tuple(found.shape) != chunk.box.sizes:
        raise Flaw(f"it is not a tensor of sizes {list(chunk.box.sizes)}")
    storage = found.untyped_storage()
    at = getattr(storage, "_checkpoint_offset", None)
    plain = found.dtype == kind.dtype and found.is_contiguous() and not found.is_conj() and not found.is_neg()
    if at is None or not plain or len(checksums) > 1:
        return None
    data = int(found.storage_offset()) * kind.dtype.itemsize
    after = next(iter(checksums.values()), None)
    return Chunk(chunk.box, chunk.file, chunk.offset + int(at), storage.nbytes(), data, after=after)


def elements(descriptor: int, chunk: Chunk, kind: Kind, where: Chunk | None, buffer: Buffer) -> Iterator[Elements]:
    """A part in row-major order, as boxes of the tensor with their values. The checksum comes last.

    They go through the buffer: what is yielded is gone with the next.

    Raises:
        Flaw: what is there is not as it was written.
    """
    if where is None:
        yield chunk.box, unpickled(descriptor, chunk.offset, chunk.length)
        return
    crc, width, begin = where.before, kind.dtype.itemsize, where.offset + where.data
    stop = begin + chunk.box.numel * width
    for at, content in blocks(descriptor, where.offset, where.stop, begin, buffer):
        crc = zlib.crc32(content, crc)
        low, high = max(at, begin), min(at + len(content), stop)
        if low < high:
            values = torch.frombuffer(content, dtype=kind.dtype, offset=low - at, count=(high - low) // width)
            for box in boxes(chunk.box.sizes, (low - begin) // width, (high - begin) // width):
                yield box.moved(chunk.box.offsets), values[: box.numel].view(box.sizes)
                values = values[box.numel :]
    if where.after not in (None, crc):
        raise Flaw(OTHER)


class Reader(abc.ABC):
    """Reads boxes of named tensors from files, into tensors of whatever dtype.

    Attributes:
        source: what there is.
    """

    source: Entries

    @abc.abstractmethod
    def identity(self) -> str:
        """The same for the same files, and for copies of them, wherever they are."""

    @abc.abstractmethod
    def wanted(self, targets: Iterable[LocalBox]) -> Any:
        """What is to be read to fill boxes of tensors, under the names in the files.

        Raises:
            CheckpointError: it is not all there.
        """

    @abc.abstractmethod
    def check(self, wanted: Any) -> None:
        """Raises CheckpointError for damage to files that shows before anything is written to."""

    @abc.abstractmethod
    def fill(self, wanted: Any) -> None:
        """Fills each box's values from the tensor of its name.

        Raises:
            CheckpointError: a file is gone or damaged.
        """

    def read(self, name: str, box: Box) -> Tensor:
        """The elements of a box. Raises as `wanted` and `fill` do."""
        values = torch.empty(box.sizes, dtype=self.source.tensors[name].dtype)
        self.fill(self.wanted([LocalBox(name, box, values)]))
        return values


class CheckpointReader(Reader):
    """Reads tensors that are in parts in a checkpoint, each part's checksum once.

    It has one buffer, so nothing else is read by it while `parts` of a tensor come.
    """

    source: Source

    def __init__(self, source: Source) -> None:
        self.source = source
        self._buffer = Buffer()
        self._seen: dict[tuple[str, int], Chunk | None] = {}
        self._orders: dict[str, tuple[list[Chunk], list[int], list[int]]] = {}

    def identity(self) -> str:
        """The same where the checkpoint is: by the checksums of its files, or what torch's description says."""
        return self.source.identity()

    def wanted(self, targets: Iterable[LocalBox]) -> Wanted:
        """The parts from which boxes of tensors, under the checkpoint's names, are filled.

        Raises:
            CheckpointError: the parts of one of these tensors do not make it up.
        """
        found: dict[str, dict[int, tuple[Chunk, str, list[LocalBox]]]] = {}
        for target in targets:
            chunks, starts, stops = self._order(target.name)
            if target.box.numel == 0:
                continue
            start, stop = span(target.box, self.source.tensors[target.name].shape)
            for chunk in chunks[bisect.bisect_right(stops, start) : bisect.bisect_left(starts, stop)]:
                if target.box.common(chunk.box):
                    known = found.setdefault(chunk.file, {}).setdefault(chunk.offset, (chunk, target.name, []))
                    known[2].append(target)
        return {file: [some[offset] for offset in sorted(some)] for file, some in found.items()}

    def check(self, wanted: Wanted) -> None:
        """Raises CheckpointError where a file is gone, or too short for what is wanted of it."""
        for file, chunks in wanted.items():
            path = self.source.folder / file
            with opened(path) as descriptor:
                has, needed = os.fstat(descriptor).st_size, max(chunk.stop for chunk, *_ in chunks)
            if has < needed:
                names = dict.fromkeys(name for chunk, name, _ in chunks if chunk.stop > has)
                raise CheckpointError(f"{path} is damaged: it ends after {has} of {needed} bytes, in {listed(names)}")

    def fill(self, wanted: Wanted) -> None:
        """Fills each box's values, of whatever dtype, from the tensor of its name.

        Raises:
            CheckpointError: a file is gone or damaged.
        """
        for file, chunks in wanted.items():
            with opened(self.source.folder / file) as descriptor:
                for chunk, name, targets in chunks:
                    for box, values in self._elements(descriptor, chunk, name, targets):
                        for target in targets:
                            target.take(box, values)

    def parts(self, name: str) -> Iterator[Elements]:
        """All elements of a tensor, in the order of its parts, through the buffer; raises as `wanted` and `fill` do."""
        for chunk in self._order(name)[0]:
            with opened(self.source.folder / chunk.file) as descriptor:
                yield from self._elements(descriptor, chunk, name, None)

    def _elements(self, descriptor: int, chunk: Chunk, name: str, targets: list[LocalBox] | None) -> Iterator[Elements]:
        """Of a part; of one whose checksum was compared before, only what is wanted."""
        kind, key = self.source.tensors[name], (chunk.file, chunk.offset)
        try:
            where = self._seen.get(key)
            if targets is None or where is None:
                self._seen[key] = where = located(descriptor, chunk, kind, self.source.torchs)
                if targets is None or not _straight(descriptor, chunk, kind, where, targets, self._buffer):
                    yield from elements(descriptor, chunk, kind, where, self._buffer)
            else:
                for target in targets:
                    both = target.box.common(chunk.box)
                    assert both is not None, "only targets that overlap are asked for"
                    yield both, _picked(descriptor, chunk, kind, where, both)
        except Flaw as error:
            raise CheckpointError(
                f"{self.source.folder / chunk.file} is damaged between bytes {chunk.offset} and {chunk.stop}, in "
                f"{name}: {error}"
            ) from error

    def _order(self, name: str) -> tuple[list[Chunk], list[int], list[int]]:
        """A tensor's parts in row-major order of where they begin; these places, and up to where any so far reaches."""
        if name not in self._orders:
            kind, chunks = self.source.tensors[name], self.source.chunks.get(name, [])
            flaw = self.source.flaw(name)
            if flaw:
                raise CheckpointError(f"{self.source.folder} is damaged, in {name}: {flaw}")
            known = sorted(
                ((*span(one.box, kind.shape), one) for one in chunks if one.box.numel), key=lambda one: one[0]
            )
            stops = list(itertools.accumulate((stop for _, stop, _ in known), max))
            self._orders[name] = [one for *_, one in known], [start for start, *_ in known], stops
        return self._orders[name]


def _straight(
    descriptor: int, chunk: Chunk, kind: Kind, where: Chunk | None, targets: list[LocalBox], buffer: Buffer
) -> bool:
    """Reads a part that fits the buffer right to where it belongs, if that is one place like it; whether it did."""
    x = targets[0].values
    if where is None or len(targets) > 1 or targets[0].box != chunk.box or where.length > BUFFER:
        return False
    if x.dtype != kind.dtype or x.device.type != "cpu" or not x.is_contiguous() or x.is_conj() or x.is_neg():
        return False
    if on_disk(x):
        return False
    target = memory(x)
    around = buffer.first(where.length - len(target))
    views = [around[: where.data], target, around[where.data :]]
    try:
        if os.preadv(descriptor, views, where.offset) < where.length:
            return False
    except OSError:  # which is told where each byte is read by itself
        return False
    crc = where.before
    for view in views:
        crc = zlib.crc32(view, crc)
    if where.after not in (None, crc):
        raise Flaw(OTHER)
    return True


def _picked(descriptor: int, chunk: Chunk, kind: Kind, where: Chunk, box: Box) -> Tensor:
    """A box of a part, of which nothing else is read."""
    values, done, width = torch.empty(box.sizes, dtype=kind.dtype), 0, kind.dtype.itemsize
    target = memory(values)
    length, starts = runs(box.moved(tuple(-at for at in chunk.box.offsets)), chunk.box.sizes)
    for start in starts:
        some = target[done : done + length * width]
        if read_at(descriptor, some, where.offset + where.data + start * width) < len(some):
            raise Flaw("the file has become shorter")
        done += len(some)
    return values
