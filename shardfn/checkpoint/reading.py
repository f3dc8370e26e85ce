"""Reads boxes of a checkpoint's tensors, in memory that does not grow with the size of the parts.

Each part passes through one buffer from first byte to last, while its checksum is computed. Loading copies elements
from there to their places; verifying and the command line use the same code.
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

from shardfn.checkpoint.contents import LocalBox, TensorType
from shardfn.checkpoint.disk import Flaw, checked_records, open_readonly, read_at, unpickled
from shardfn.checkpoint.manifest import Chunk, Entries, TensorSource
from shardfn.checkpoint.team import CheckpointError
from shardfn.checkpoint.tensor_bytes import BUFFER, as_memoryview
from shardfn.quoting import listed
from shardfn.shards.boxes import Box, box_runs, boxes, span
from shardfn.tiers.tensors import on_disk

STEP = 2**22  # approximate size of the buffer in bytes; a multiple of every element size
REST = 2**12  # a remainder of fewer bytes is read with the block before it
OTHER = "its checksum does not fit"

Report = Callable[[int, int], None]  # called with bytes done and bytes in all
Wanted = dict[str, list[tuple[Chunk, str, list[LocalBox]]]]  # by file, in order: part, tensor, boxes to fill
Elements = tuple[Box, Tensor]  # a box of a tensor, and its values


def silent(done: int, total: int) -> None:
    """A report that does nothing."""


def meter(report: Report, total: int) -> Callable[[int], None]:
    """A function that is called with further bytes done, and reports the sum."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report(done, total)

    report(0, total)
    return count


class ReusedMemory:
    """Memory that is reused."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def first(self, length: int) -> memoryview:
        """The first `length` bytes; it grows if necessary."""
        if len(self._memory) < length:
            self._memory = bytearray(length)
        return memoryview(self._memory)[:length]


def blocks(descriptor: int, start: int, stop: int, data: int, buffer: ReusedMemory) -> Iterator[tuple[int, memoryview]]:
    """Yields bytes `start` to `stop` of a file in blocks that reuse the buffer, with the offset of each.

    From `data` on, blocks end at multiples of STEP, so that no element is split.

    Raises:
        Flaw: the file ends before `stop`.
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


def located(descriptor: int, chunk: Chunk, kind: TensorType, torchs: bool) -> Chunk | None:
    """The location of a part's elements in the file; None unless stored in row-major order.

    Raises:
        Flaw: there is something else than this part.
    """
    if not torchs:
        return chunk
    checksums = checked_records(descriptor, chunk.offset, chunk.length, values=False)
    tensor = unpickled(descriptor, chunk.offset, chunk.length, values=False)
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.box.sizes:
        raise Flaw(f"it is not a tensor of sizes {list(chunk.box.sizes)}")
    storage = tensor.untyped_storage()
    storage_offset = getattr(storage, "_checkpoint_offset", None)
    is_plain = tensor.dtype == kind.dtype and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if storage_offset is None or not is_plain or len(checksums) > 1:
        return None
    data = int(tensor.storage_offset()) * kind.dtype.itemsize
    after = next(iter(checksums.values()), None)
    return Chunk(chunk.box, chunk.file, chunk.offset + int(storage_offset), storage.nbytes(), data, after=after)


def elements(
    descriptor: int, chunk: Chunk, kind: TensorType, where: Chunk | None, buffer: ReusedMemory
) -> Iterator[Elements]:
    """Yields a part in row-major order, as boxes of the tensor with their values; the checksum is compared at the end.

    Values are views of the buffer, valid until the next are yielded.

    Raises:
        Flaw: the content is not what was written.
    """
    if where is None:
        yield chunk.box, unpickled(descriptor, chunk.offset, chunk.length)
        return
    crc, width, begin = where.before, kind.dtype.itemsize, where.offset + where.data
    stop = begin + chunk.box.numel * width
    for offset, content in blocks(descriptor, where.offset, where.stop, begin, buffer):
        crc = zlib.crc32(content, crc)
        low, high = max(offset, begin), min(offset + len(content), stop)
        if low < high:
            values = torch.frombuffer(content, dtype=kind.dtype, offset=low - offset, count=(high - low) // width)
            for box in boxes(chunk.box.sizes, (low - begin) // width, (high - begin) // width):
                yield box.translated(chunk.box.offsets), values[: box.numel].view(box.sizes)
                values = values[box.numel :]
    if where.after not in (None, crc):
        raise Flaw(OTHER)


class BoxReader(abc.ABC):
    """Reads boxes of named tensors from files, into tensors of any dtype.

    Attributes:
        source: the entries.
    """

    source: Entries

    @abc.abstractmethod
    def identity(self) -> str:
        """A text that is equal for equal files, wherever they are."""

    @abc.abstractmethod
    def plan_reads(self, targets: Iterable[LocalBox]) -> Any:
        """Plans what to read, to fill boxes of tensors under the names in the files.

        Raises:
            CheckpointError: part of it is missing.
        """

    @abc.abstractmethod
    def check(self, plan: Any) -> None:
        """Raises CheckpointError for damage that can be found before anything is overwritten."""

    @abc.abstractmethod
    def fill(self, plan: Any) -> None:
        """Fills each box from the tensor of its name.

        Raises:
            CheckpointError: a file is gone or damaged.
        """

    def read(self, name: str, box: Box) -> Tensor:
        """Reads the elements of a box. Raises as `plan_reads` and `fill` do."""
        values = torch.empty(box.sizes, dtype=self.source.tensors[name].dtype, device="cpu")
        self.fill(self.plan_reads([LocalBox(name, box, values)]))
        return values


class CheckpointReader(BoxReader):
    """Reads tensors of a checkpoint, comparing each part's checksum once.

    It has only one buffer, so no other call may be made during an iteration over `parts`.
    """

    source: TensorSource

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self._buffer = ReusedMemory()
        self._seen: dict[tuple[str, int], Chunk | None] = {}
        self._orders: dict[str, tuple[list[Chunk], list[int], list[int]]] = {}

    def identity(self) -> str:
        """A text that is equal for equal checkpoints: file checksums, or the metadata of torch's."""
        return self.source.identity()

    def plan_reads(self, targets: Iterable[LocalBox]) -> Wanted:
        """Finds the parts from which to fill boxes of tensors, under the checkpoint's names.

        Raises:
            CheckpointError: the parts of one of these tensors do not make it up.
        """
        by_file: dict[str, dict[int, tuple[Chunk, str, list[LocalBox]]]] = {}
        for target in targets:
            chunks, starts, stops = self._order(target.name)
            if target.box.numel == 0:
                continue
            start, stop = span(target.box, self.source.tensors[target.name].shape)
            for chunk in chunks[bisect.bisect_right(stops, start) : bisect.bisect_left(starts, stop)]:
                if target.box.common(chunk.box):
                    entry = by_file.setdefault(chunk.file, {}).setdefault(chunk.offset, (chunk, target.name, []))
                    entry[2].append(target)
        return {file: [by_offset[offset] for offset in sorted(by_offset)] for file, by_offset in by_file.items()}

    def check(self, plan: Wanted) -> None:
        """Raises CheckpointError if a file is gone, or too short for the parts that are wanted."""
        for file, chunks in plan.items():
            path = self.source.folder / file
            with open_readonly(path) as descriptor:
                has, needed = os.fstat(descriptor).st_size, max(chunk.stop for chunk, *_ in chunks)
            if has < needed:
                names = dict.fromkeys(name for chunk, name, _ in chunks if chunk.stop > has)
                raise CheckpointError(f"{path} is damaged: it ends after {has} of {needed} bytes, in {listed(names)}")

    def fill(self, plan: Wanted) -> None:
        """Fills each box from the tensor of its name, converting the dtype.

        Raises:
            CheckpointError: a file is gone or damaged.
        """
        for file, chunks in plan.items():
            with open_readonly(self.source.folder / file) as descriptor:
                for chunk, name, targets in chunks:
                    for box, values in self._elements(descriptor, chunk, name, targets):
                        for target in targets:
                            target.copy_from(box, values)

    def parts(self, name: str) -> Iterator[Elements]:
        """Yields all elements of a tensor part by part, as views of the buffer; raises as `fill` does."""
        for chunk in self._order(name)[0]:
            with open_readonly(self.source.folder / chunk.file) as descriptor:
                yield from self._elements(descriptor, chunk, name, None)

    def _elements(self, descriptor: int, chunk: Chunk, name: str, targets: list[LocalBox] | None) -> Iterator[Elements]:
        """Yields the elements of a part; only those wanted if its checksum was compared before."""
        kind, key = self.source.tensors[name], (chunk.file, chunk.offset)
        try:
            where = self._seen.get(key)
            if targets is None or where is None:
                self._seen[key] = where = located(descriptor, chunk, kind, self.source.torchs)
                if targets is None or not _read_directly(descriptor, chunk, kind, where, targets, self._buffer):
                    yield from elements(descriptor, chunk, kind, where, self._buffer)
            else:
                for target in targets:
                    both = target.box.common(chunk.box)
                    assert both is not None, "only targets that overlap are asked for"
                    yield both, _read_box(descriptor, chunk, kind, where, both)
        except Flaw as error:
            raise CheckpointError(
                f"{self.source.folder / chunk.file} is damaged between bytes {chunk.offset} and {chunk.stop}, in "
                f"{name}: {error}"
            ) from error

    def _order(self, name: str) -> tuple[list[Chunk], list[int], list[int]]:
        """A tensor's parts in row-major order of their starts; these starts, and the running maximum of the ends."""
        if name not in self._orders:
            kind, chunks = self.source.tensors[name], self.source.chunks.get(name, [])
            flaw = self.source.flaw(name)
            if flaw:
                raise CheckpointError(f"{self.source.folder} is damaged, in {name}: {flaw}")
            spans = sorted(
                ((*span(part.box, kind.shape), part) for part in chunks if part.box.numel), key=lambda entry: entry[0]
            )
            stops = list(itertools.accumulate((stop for _, stop, _ in spans), max))
            self._orders[name] = [part for *_, part in spans], [start for start, *_ in spans], stops
        return self._orders[name]


def _read_directly(
    descriptor: int, chunk: Chunk, kind: TensorType, where: Chunk | None, targets: list[LocalBox], buffer: ReusedMemory
) -> bool:
    """Reads a small part right into its one target, if dtype, device and box match; returns whether it did."""
    x = targets[0].values
    if where is None or len(targets) > 1 or targets[0].box != chunk.box or where.length > BUFFER:
        return False
    if x.dtype != kind.dtype or x.device.type != "cpu" or not x.is_contiguous() or x.is_conj() or x.is_neg():
        return False
    if on_disk(x):
        return False
    target = as_memoryview(x)
    around = buffer.first(where.length - len(target))
    views = [around[: where.data], target, around[where.data :]]
    try:
        if os.preadv(descriptor, views, where.offset) < where.length:
            return False
    except OSError:  # the slow path reads again and reports it
        return False
    crc = where.before
    for view in views:
        crc = zlib.crc32(view, crc)
    if where.after not in (None, crc):
        raise Flaw(OTHER)
    return True


def _read_box(descriptor: int, chunk: Chunk, kind: TensorType, where: Chunk, box: Box) -> Tensor:
    """Reads one box of a part, and no other bytes."""
    values, done, width = torch.empty(box.sizes, dtype=kind.dtype, device="cpu"), 0, kind.dtype.itemsize
    target = as_memoryview(values)
    length, starts = box_runs(box.translated(tuple(-offset for offset in chunk.box.offsets)), chunk.box.sizes)
    for start in starts:
        run = target[done : done + length * width]
        if read_at(descriptor, run, where.offset + where.data + start * width) < len(run):
            raise Flaw("the file has become shorter")
        done += len(run)
    return values
