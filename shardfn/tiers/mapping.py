"""A file as memory: what the C library has for it, and Python has not, or only with a descriptor for each stretch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from typing import Any

PAGE = mmap.PAGESIZE
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


def mapped(descriptor: int, offset: int, nbytes: int) -> int:
    """The address of a stretch of a file; what is written there is written to the file.

    Raises:
        OSError: there is no room for it among the process's addresses.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, offset)
    if address == _FAILED:
        _fail()
    return int(address)


def unmapped(address: int, nbytes: int) -> None:
    """Gives the addresses of a stretch back; nothing may use them any more.

    Raises:
        OSError: they are not those of a stretch.
    """
    if _libc().munmap(address, nbytes):
        _fail()


def written_out(address: int, nbytes: int) -> None:
    """Until what was written at an address is in the file, and out of this process's memory.

    Raises:
        OSError: the file cannot be written.
    """
    if _libc().msync(address, nbytes, _MS_SYNC) or _libc().madvise(address, nbytes, mmap.MADV_DONTNEED):
        _fail()


def zeroed(descriptor: int, offset: int, nbytes: int) -> bool:
    """Makes a stretch of a file zeros without writing them; False where the file system cannot."""
    return bool(_libc().fallocate(descriptor, _ZERO_RANGE, offset, nbytes) == 0)


def private(path: str, inside: int) -> tuple[int, int] | None:
    """Where a file is mapped for this process alone, and how long that is; None if it is not, where an address is."""
    try:
        with open("/proc/self/maps") as lines:
            rows = [line.split(None, 5) for line in lines]
    except OSError:  # a system that does not tell
        return None
    inode = str(os.stat(path).st_ino)
    for where, access, _, _, number, *_ in rows:
        start, _, stop = where.partition("-")
        if number == inode and access.endswith("p") and int(start, 16) <= inside < int(stop, 16):
            return int(start, 16), int(stop, 16) - int(start, 16)
    return None


def left(address: int, nbytes: int) -> None:
    """Takes the pages at an address out of this process's memory; what only this process had of them is lost."""
    if _libc().madvise(address, nbytes, mmap.MADV_DONTNEED):
        _fail()


def trim() -> None:
    """Gives memory that is free back to the system, which glibc keeps, in pieces too small for what comes next."""
    with contextlib.suppress(AttributeError):  # other C libraries have no such function, or no need of it
        _libc().malloc_trim(0)


def buffer_at(address: int, nbytes: int) -> Any:
    """The memory at an address, as an object with Python's buffer protocol."""
    return (ctypes.c_char * nbytes).from_address(address)


def _fail() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


_MS_SYNC = 4
_ZERO_RANGE = 16
