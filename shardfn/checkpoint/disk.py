"""Reads and writes bytes of files completely or raises; and reads `torch.save` items inside of a file.

Such an item is a zip archive without compression, whose records have checksums. torch.load does not compare them, and
would load a flipped bit without an error; here they are compared.
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
BLOCKS, BLOCK = 16, 2**14  # number of blocks of a file that are sampled, and their length in bytes


class Flaw(Exception):
    """A fault in a part of a file; the caller adds the file and the part."""


@contextlib.contextmanager
def open_readonly(path: Path) -> Iterator[int]:
    """A context with a file's read-only descriptor.

    Raises:
        CheckpointError: the file cannot be opened.
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
    """Reads from `offset` until `target` is full or the file ends; returns the number of bytes read.

    Raises:
        Flaw: the file cannot be read.
    """
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise Flaw(f"byte {offset + done} cannot be read: {error.strerror}") from error
        if count == 0:
            break
        done += count
    return done


def sampled(path: Path) -> int:
    """A CRC-32 of a file's length and of blocks spread over it, or of all bytes if it is small.

    Raises:
        CheckpointError: it cannot be opened.
    """
    with open_readonly(path) as descriptor:
        size = os.fstat(descriptor).st_size
        crc = zlib.crc32(str(size).encode())
        for i in range(BLOCKS if size > BLOCKS * BLOCK else -(-size // BLOCK)):
            start = i * (size - BLOCK) // (BLOCKS - 1) if size > BLOCKS * BLOCK else i * BLOCK
            crc = zlib.crc32(os.pread(descriptor, BLOCK, start), crc)
    return crc


def write_at(descriptor: int, content: memoryview, offset: int) -> None:
    """Writes all of `content` at `offset`."""
    while content:
        done = os.pwrite(descriptor, content, offset)
        content, offset = content[done:], offset + done


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file; it is on disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Waits until a file's bytes, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- what torch.save made ---


class Item(io.RawIOBase):
    """A range of a file as a file object."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a position; returns it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError(f"{self._at} is before the beginning")
        return self._at

    def readinto(self, target: bytearray | memoryview) -> int:  # type: ignore[override]
        """Reads up to `len(target)` bytes; returns how many."""
        buffer = memoryview(target)[: max(0, self._length - self._at)]
        count = os.preadv(self._descriptor, [buffer], self._offset + self._at) if buffer else 0
        self._at += count
        return count


def unpickled(descriptor: int, offset: int, length: int, *, values: bool = True) -> Any:
    """Loads a `torch.save` item with `weights_only=True`.

    Args:
        descriptor: of the file.
        offset: at which the item begins.
        length: of the item in bytes.
        values: whether tensors get their values; if not, they are on the device `meta`, and checksums are not compared.

    Raises:
        Flaw: it cannot be read, or a checksum does not match.
    """
    if values:
        checked_records(descriptor, offset, length)
    try:
        item = io.BufferedReader(Item(descriptor, offset, length))
        return torch.load(item, map_location="cpu" if values else "meta", weights_only=True)
    except Exception as error:  # a damaged item raises almost anything
        raise Flaw(f"it cannot be read: {str(error).partition(chr(10))[0] or type(error).__name__}") from error


def checked_records(
    descriptor: int, offset: int, length: int, *, values: bool = True, share: tuple[int, int] = (0, 1)
) -> dict[str, int]:
    """Compares the records of a `torch.save` item with their checksums; records of tensor elements only if `values`.

    With `share=(i, n)`, process i of n that compare together reads records i, i + n and so on of tensor elements.

    Returns:
        The checksums of tensor elements by record; empty if `torch.save` was configured to write none.

    Raises:
        Flaw: it cannot be read, or records do not match their checksums.
    """
    mismatches, num_other_records = [], 0
    try:
        with zipfile.ZipFile(io.BufferedReader(Item(descriptor, offset, length))) as archive:
            records = archive.infolist()
            elements = [info for info in records if "/data/" in info.filename]
            own_share = {info.filename for info in elements[share[0] :: share[1]]} if values else set()
            for info in records:
                if "/data/" in info.filename and info.filename not in own_share:
                    continue
                num_other_records += "/data/" not in info.filename
                try:
                    with archive.open(info) as record:
                        while record.read(STEP):
                            pass
                except zipfile.BadZipFile:
                    mismatches.append(info.filename)
    except Exception as error:  # a damaged archive raises almost anything
        raise Flaw(f"it cannot be read: {error}") from error
    if sum("/data/" not in name for name in mismatches) == num_other_records:  # all mismatch: there are no checksums
        return {}
    if mismatches:
        raise Flaw(f"its own checksum does not fit, in {listed(mismatches)}")
    return {info.filename: info.CRC for info in records if "/data/" in info.filename}
