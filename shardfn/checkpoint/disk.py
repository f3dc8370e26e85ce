"""Bytes to and from files, whole or with an error."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from shardfn.checkpoint.items import Flaw
from shardfn.checkpoint.team import CheckpointError

BLOCKS, BLOCK = 16, 2**14  # of a file that is sampled, and the bytes of one


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


def sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
