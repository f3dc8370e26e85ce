"""Bytes to and from files, whole or with an error; and what `torch.save` made, inside of a file.

That is a zip archive without compression, whose records have checksums. torch.load compares none of them, so that a
changed bit would be loaded without an error; here they are compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint.team import CheckpointError
from shardfn.quoting import listed

STEP = 2**22  # bytes that are read at a time
BLOCKS, BLOCK = 16, 2**14  # of a file that is sampled, and the bytes of one


class Flaw(Exception):
    """What is wrong with part of a file, without saying with which."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file's descriptor while the block runs.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_at(descriptor: int, target: memoryview, offset: int) -> int:
    """Fills memory with what a file has there; how many bytes that is, less only where the file ends.

    Raises:
        Flaw: the disk does not give them.
    """
    done = 0
    while done < len(target):
        try:
            more = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise Flaw(f"byte {offset + done} cannot be read: {error.strerror}") from error
        if more == 0:
            break
        done += more
    return done


def sampled(path: Path) -> int:
    """A checksum of a file's length and of blocks all over it: of every byte, if it is small.

    Raises:
        CheckpointError: it cannot be opened.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        crc = zlib.crc32(str(size).encode())
        for i in range(BLOCKS if size > BLOCKS * BLOCK else -(-size // BLOCK)):
            start = i * (size - BLOCK) // (BLOCKS - 1) if size > BLOCKS * BLOCK else i * BLOCK
            crc = zlib.crc32(os.pread(descriptor, BLOCK, start), crc)
    return crc


def write_at(descriptor: int, content: memoryview, offset: int) -> None:
    """Writes all of it there."""
    while content:
        done = os.pwrite(descriptor, content, offset)
        content, offset = content[done:], offset + done


def write_whole(path: Path, content: bytes) -> None:
    """A file that is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- what torch.save made ---


class Item(io.RawIOBase):
    """Bytes of a file as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """To a place in it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError(f"{self._at} is before the beginning")
        return self._at

    def tell(self) -> int:
        """The place in it."""
        return self._at

    def readinto(self, target: bytearray | memoryview) -> int:  # type: ignore[override]
        """Up to as many bytes as there is room for."""
        room = memoryview(target)[: max(0, self._length - self._at)]
        more = os.preadv(self._descriptor, [room], self._offset + self._at) if room else 0
        self._at += more
        return more


def unpickled(descriptor: int, offset: int, length: int, *, values: bool = True) -> Any:
    """What was saved, of which only tensors, numbers, strings and containers are unpickled.

    Args:
        descriptor: of the file.
        offset: where it begins.
        length: in bytes.
        values: whether tensors have theirs; if not, they are on the device `meta`, and are not compared either.

    Raises:
        Flaw: it cannot be read, or does not fit its checksums.
    """
    if values:
        checked(descriptor, offset, length)
    try:
        item = io.BufferedReader(Item(descriptor, offset, length))
        return torch.load(item, map_location="cpu" if values else "meta", weights_only=True)
    except Exception as error:  # a damaged item raises almost anything
        raise Flaw(f"it cannot be read: {str(error).partition(chr(10))[0] or type(error).__name__}") from error


def checked(
    descriptor: int, offset: int, length: int, *, values: bool = True, share: tuple[int, int] = (0, 1)
) -> dict[str, int]:
    """Compares the records with their checksums; those of tensors' elements if `values`.

    Of `share=(i, n)`, one of n that compare together, records i, i + n and so on of elements are.

    Returns:
        The checksums of the elements of tensors by record; none if `torch.save` was configured to make none.

    Raises:
        Flaw: the records that do not fit.
    """
    wrong, others = [], 0
    try:
        with zipfile.ZipFile(io.BufferedReader(Item(descriptor, offset, length))) as archive:
            records = archive.infolist()
            elements = [info for info in records if "/data/" in info.filename]
            mine = {info.filename for info in elements[share[0] :: share[1]]} if values else set()
            for info in records:
                if "/data/" in info.filename and info.filename not in mine:
                    continue
                others += "/data/" not in info.filename
                try:
                    with archive.open(info) as record:
                        while record.read(STEP):
                            pass
                except zipfile.BadZipFile:
                    wrong.append(info.filename)
    except Exception as error:  # a damaged archive raises almost anything
        raise Flaw(f"it cannot be read: {error}") from error
    if sum("/data/" not in name for name in wrong) == others:
        return {}
    if wrong:
        raise Flaw(f"its own checksum does not fit, in {listed(wrong)}")
    return {info.filename: info.CRC for info in records if "/data/" in info.filename}
