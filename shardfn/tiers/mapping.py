"""Memory-mapped files through the C library: what Python lacks, or offers only with a descriptor for each stretch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from typing import Any

_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    for name in ("msync", "madvise"):
        getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def map_file(descriptor: int, offset: int, nbytes: int) -> int:
    """Maps a stretch of a file and returns its address; writes to the memory are writes to the file.

    Raises:
        OSError: the process has no address space left for it.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, offset)
    if address == _FAILED:
        _fail()
    return int(address)


def unmapped(address: int, nbytes: int) -> None:
    """Unmaps a stretch, which nothing may use any more.

    Raises:
        OSError: the addresses are not a stretch's.
    """
    if _libc().munmap(address, nbytes):
        _fail()


def written_out(address: int, nbytes: int) -> None:
    """Waits until what was written at an address is in the file, and frees its memory.

    Raises:
        OSError: the file cannot be written.
    """
    if _libc().msync(address, nbytes, _MS_SYNC) or _libc().madvise(address, nbytes, mmap.MADV_DONTNEED):
        _fail()


def zeroed(descriptor: int, offset: int, nbytes: int) -> bool:
    """Zeroes a stretch of a file without writing it; returns False if the file system cannot."""
    return bool(_libc().fallocate(descriptor, _ZERO_RANGE, offset, nbytes) == 0)


def private(path: str, inside: int) -> tuple[int, int] | None:
    """The address and size of a file's private mapping that contains the address `inside`; None if there is none."""
    try:
        with open("/proc/self/maps") as lines:
            rows = [line.split(None, 5) for line in lines]
    except OSError:  # no procfs
        return None
    inode = str(os.stat(path).st_ino)
    for where, access, _, _, number, *_ in rows:
        start, _, stop = where.partition("-")
        if number == inode and access.endswith("p") and int(start, 16) <= inside < int(stop, 16):
            return int(start, 16), int(stop, 16) - int(start, 16)
    return None


def drop_pages(address: int, nbytes: int) -> None:
    """Drops the pages at an address from this process's memory; private changes to them are lost."""
    if _libc().madvise(address, nbytes, mmap.MADV_DONTNEED):
        _fail()


def trim() -> None:
    """Returns free memory that glibc keeps, in pieces too small for later allocations, to the system."""
    with contextlib.suppress(AttributeError):  # only glibc has it
        _libc().malloc_trim(0)


def buffer_at(address: int, nbytes: int) -> Any:
    """The memory at an address, as an object with Python's buffer protocol."""
    return (ctypes.c_char * nbytes).from_address(address)


def _fail() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


_MS_SYNC = 4
_ZERO_RANGE = 16
