"""Boxes of a checkpoint's tensors, in memory that does not grow with the parts which they are cut from."""

from __future__ import annotations

import bisect
import io
import itertools
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint.boxes import Box, boxes
from shardfn.checkpoint.contents import BUFFER, Kind, as_bytes
from shardfn.checkpoint.files import Chunk
from shardfn.checkpoint.sources import Ours, Source, opened, read_bytes
from shardfn.checkpoint.team import CheckpointError

STEP = 2**22  # bytes that are read at a time where only a checksum is wanted

Report = Callable[[int, int], None]  # of how many bytes are done, and of how many


def silent(done: int, total: int) -> None:
    """Reports nothing."""


def meter(report: Report, total: int) -> Callable[[int], None]:
    """A function that counts bytes, and reports the sum."""
    sums = [0]

    def count(more: int) -> None:
        sums[0] += more
        report(sums[0], total)

    report(0, total)
    return count


def bytes_of(kind: Kind) -> int:
    """Of all elements of a tensor."""
    return math.prod(kind.shape) * kind.dtype.itemsize


def parts(box: Box, start: int, stop: int, width: int) -> Iterator[Box]:
    """Elements `start` to `stop` of a box, each of `width` bytes, as boxes that fit the buffer."""
    step = max(1, BUFFER // width)
    for low in range(start, stop, step):
        for part in boxes(box.sizes, low, min(low + step, stop)):
            yield part.moved(box.offsets)


def runs(box: Box, shape: Sequence[int]) -> tuple[int, Iterator[int]]:
    """How a box lies in an array of this shape, in row-major order: in stretches of one length, that begin there."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    cut = len(shape)
    while cut > 0:
        cut -= 1
        if box.sizes[cut] != shape[cut]:
            break
    first = sum(at * stride for at, stride in zip(box.offsets, strides, strict=True))
    steps = ([i * stride for i in range(n)] for n, stride in zip(box.sizes[:cut], strides[:cut], strict=True))
    return math.prod(box.sizes[cut:]), (first + sum(some) for some in itertools.product(*steps))


def span(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """From which element of an array to which, in row-major order, a box reaches, that is not empty."""
    first = last = 0
    for at, n, of in zip(box.offsets, box.sizes, shape, strict=True):
        first, last = first * of + at, last * of + at + n - 1
    return first, last + 1


def memory(values: Tensor) -> memoryview:
    """A tensor's bytes, as they are in memory; it is contiguous, on the CPU."""
    found: Any = as_bytes(values).numpy()
    return memoryview(found)


class Reader:
    """Reads boxes of a source's tensors: of large parts only what a box needs, each part's checksum once before."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._begins: dict[tuple[str, int], int | None] = {}
        self._order: tuple[str, list[Chunk], list[int], list[int]] = "", [], [], []

    def read(self, name: str, box: Box) -> Tensor:
        """The elements of a box.

        Raises:
            CheckpointError: a file is gone or damaged, or no part has some of the elements.
        """
        near = self._near(name, box)
        if len(near) == 1 and box.common(near[0].box) == box:
            return self._common(name, near[0], box)
        values, found = torch.empty(box.sizes, dtype=self.source.tensors[name].dtype), 0
        for chunk in near:
            both = box.common(chunk.box)
            if both is not None:
                values[both.within(box)].copy_(self._common(name, chunk, both))
                found += both.numel
        if found < box.numel:
            raise CheckpointError(
                f"{self.source.folder}: {box.numel - found} elements of {name} are in none of its parts"
            )
        return values

    def _near(self, name: str, box: Box) -> list[Chunk]:
        """The parts that reach over the same elements, in row-major order, so that not all have to be looked at."""
        if box.numel == 0:
            return []
        shape = self.source.tensors[name].shape
        if self._order[0] != name:
            known = [(*span(one.box, shape), one) for one in self.source.chunks.get(name, ()) if one.box.numel]
            known.sort(key=lambda one: one[0])
            stops = list(itertools.accumulate((stop for _, stop, _ in known), max))
            self._order = name, [one for *_, one in known], [start for start, *_ in known], stops
        _, chunks, starts, stops = self._order
        start, stop = span(box, shape)
        return chunks[bisect.bisect_right(stops, start) : bisect.bisect_left(starts, stop)]

    def _common(self, name: str, chunk: Chunk, both: Box) -> Tensor:
        dtype, path = self.source.tensors[name].dtype, self.source.folder / chunk.file
        with opened(path) as descriptor:
            small = both == chunk.box and both.numel * dtype.itemsize <= BUFFER
            begin = None if small else self._begin(name, chunk, descriptor)
            if begin is None:
                content = read_bytes(descriptor, chunk.offset, chunk.length)
                found = self.source.values(chunk, name, content)[both.within(chunk.box)]
                return found.to(dtype).contiguous()
            values, done = torch.empty(both.sizes, dtype=dtype), 0
            target, width = memory(values), dtype.itemsize
            inside = Box(tuple(a - b for a, b in zip(both.offsets, chunk.box.offsets, strict=True)), both.sizes)
            length, starts = runs(inside, chunk.box.sizes)
            for start in starts:
                fill(descriptor, target[done : done + length * width], begin + start * width, path)
                done += length * width
            return values

    def _begin(self, name: str, chunk: Chunk, descriptor: int) -> int | None:
        """Where a part's elements begin in the file; None if they lie in no order that is known."""
        key = (chunk.file, chunk.offset)
        if key not in self._begins:
            path = self.source.folder / chunk.file
            if isinstance(self.source, Ours):
                if checksum(descriptor, chunk.offset, chunk.offset + chunk.length, chunk.before) != chunk.after:
                    raise CheckpointError(
                        f"{path} is damaged between bytes {chunk.offset} and {chunk.offset + chunk.length}, in {name}: "
                        f"its checksum does not fit"
                    )
                self._begins[key] = chunk.offset + chunk.data
            else:
                self._begins[key] = _located(descriptor, chunk, self.source.tensors[name], path, name)
        return self._begins[key]


def fill(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    """Reads as many bytes as there is room for.

    Raises:
        CheckpointError: the file ends before.
    """
    while target:
        more = os.preadv(descriptor, [target], offset)
        if more == 0:
            raise CheckpointError(f"{path} ends at byte {offset}, before something that is in it")
        target, offset = target[more:], offset + more


def checksum(descriptor: int, start: int, stop: int, before: int, count: Callable[[int], None] | None = None) -> int:
    """The CRC-32 of these bytes of a file behind what has `before`, or -1 where the file ends before them."""
    while start < stop:
        content = read_bytes(descriptor, start, min(STEP, stop - start))
        if not content:
            return -1
        before = zlib.crc32(content, before)
        start += len(content)
        if count:
            count(len(content))
    return before


class Item(io.RawIOBase):
    """A stretch of a file as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """To a place in the stretch."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError(f"{self._at} is before the beginning")
        return self._at

    def tell(self) -> int:
        """The place in the stretch."""
        return self._at

    def readinto(self, target: bytearray | memoryview) -> int:  # type: ignore[override]
        """Up to as many bytes as there is room for."""
        room = memoryview(target)[: max(0, self._length - self._at)]
        more = os.preadv(self._descriptor, [room], self._offset + self._at) if room else 0
        self._at += more
        return more


def described(descriptor: int, offset: int, length: int) -> object:
    """What `torch.save` made of an object, with tensors that have no memory."""
    return torch.load(io.BufferedReader(Item(descriptor, offset, length)), map_location="meta", weights_only=True)


def misfits(descriptor: int, offset: int, length: int) -> list[str]:
    """The records in what `torch.save` made that do not fit their checksums; none if it was told to make none."""
    wrong = []
    with zipfile.ZipFile(io.BufferedReader(Item(descriptor, offset, length))) as archive:
        for info in archive.infolist():
            try:
                with archive.open(info) as record:
                    while record.read(STEP):
                        pass
            except zipfile.BadZipFile:
                wrong.append(info.filename)
        return wrong if len(wrong) < len(archive.infolist()) else []


def _located(descriptor: int, chunk: Chunk, kind: Kind, path: Path, name: str) -> int | None:
    try:
        found = described(descriptor, chunk.offset, chunk.length)
    except Exception as error:  # a damaged item raises almost anything
        raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
    if not isinstance(found, Tensor) or tuple(found.shape) != chunk.box.sizes:
        raise CheckpointError(f"{path}: {name} is not what the checkpoint says it is")
    at = getattr(found.untyped_storage(), "_checkpoint_offset", None)
    plain = found.dtype == kind.dtype and found.is_contiguous() and not found.is_conj() and not found.is_neg()
    if at is None or not plain:
        return None
    return chunk.offset + int(at) + int(found.storage_offset()) * kind.dtype.itemsize
