"""Tensors whose values are on disk: ordinary ones, whose memory is a mapped stretch of a file.

Every torch operation works on them, at the speed of page faults. What is done at every step, gathering parameters and
updating them by their gradients, reads and writes the file directly; see `transfers`. There is one file a rank and
kind, without a name, in aligned stretches.

A stretch is preallocated, so that no write can fail for lack of room. It is read and written past the page cache where
the file system allows it, and otherwise its pages are dropped at once: the cache does not grow, nor does it determine
the speed. The file is unlinked as soon as it is made, so it is gone when the process is, however that ends.

The last block of a file belongs to no stretch and is never written. If another process truncates the file, that block
is lost too, and no write restores it: so each read notices, and none takes missing data for zeros.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.mesh.planned import planned
from shardfn.tiers import mapping

NAMED = "by make_mesh(..., scratch=folder) or SHARDFN_SCRATCH"
ALIGNMENT = 4096  # bytes to which direct I/O aligns memory addresses and file offsets
_NONE = -1  # instead of a descriptor
_ZEROS = mmap.mmap(-1, 2**20)  # never written to


# Descriptors and mapped addresses of collected files. `__del__` only records them: the garbage collector runs on any
# thread, in the middle of anything. What is left at exit goes with the process.
_ended: deque[tuple[int, int, list[tuple[int, int]]]] = deque()


def sweep() -> None:
    """Closes the descriptors and unmaps the addresses of files that were collected."""
    while _ended:
        plain, direct, addresses = _ended.popleft()
        for address, nbytes in addresses:
            mapping.unmapped(address, nbytes)
        for descriptor in (plain, direct):
            if descriptor != _NONE:
                os.close(descriptor)


@dataclass(frozen=True, eq=False)
class FileRange:
    """A stretch of a file, which is mapped into memory too.

    Attributes:
        file: the file.
        offset: where it begins in the file, a multiple of `ALIGNMENT`.
        nbytes: its size, a multiple of `ALIGNMENT` too.
        address: its address in memory.
    """

    file: File
    offset: int
    nbytes: int
    address: int

    def wait_for_writes(self) -> None:
        """Waits until what was written through the mapping is in the file, and frees its memory."""
        with self.file.failing("writing", self.nbytes):
            mapping.written_out(self.address, self.nbytes)
            os.posix_fadvise(self.file.plain, self.offset, self.nbytes, os.POSIX_FADV_DONTNEED)

    def release(self) -> None:
        """Frees the memory of the mapping: of pages read at once, of pages written once they are in the file."""
        mapping.drop_pages(self.address, self.nbytes)
        os.posix_fadvise(self.file.plain, self.offset, self.nbytes, os.POSIX_FADV_DONTNEED)

    def clear(self) -> None:
        """Fills it with zeros through the file: a write to the mapping of a truncated file would kill the process."""
        if planned() or mapping.zeroed(self.file.plain, self.offset, self.nbytes):
            return
        zeros = memoryview(_ZEROS)
        for offset in range(0, self.nbytes, len(zeros)):
            self.file.write(self.offset + offset, zeros[: self.nbytes - offset])


class File:
    """A file of a rank.

    Attributes:
        folder: where it is.
        kind: what is in it: `"params"`, `"grads"`, `"state"`, ...
        plain: a descriptor that goes through the page cache.
        direct: one that does not; negative where the file system does not allow it.
        nbytes: the total size of its stretches.
        process: the process that made it; a fork of that can read it, but not write to it.
    """

    def __init__(self, folder: str, kind: str) -> None:
        self.folder, self.kind, self.nbytes, self.process = folder, kind, 0, os.getpid()
        self._free: dict[int, list[FileRange]] = {}
        self.plain, self.direct = _NONE, _NONE
        self._addresses: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        try:
            os.makedirs(folder, exist_ok=True)
            self.plain, path = tempfile.mkstemp(prefix=f"shardfn-{kind}-", dir=folder)
        except OSError as error:
            raise OSError(
                error.errno, f"no file for {kind} can be made in {folder!r}: {error.strerror}; name a folder, {NAMED}"
            ) from error
        try:
            with contextlib.suppress(OSError):
                self.direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        finally:
            os.unlink(path)

    def __del__(self, ended: deque[Any] = _ended) -> None:  # bound here, since at exit the module's names are gone
        ended.append((self.plain, self.direct, self._addresses))

    def free_bytes(self) -> int:
        """Bytes that are free on its file system."""
        system = os.fstatvfs(self.plain)
        return system.f_bavail * system.f_frsize

    def allocate(self, nbytes: int) -> tuple[FileRange, bool]:
        """Returns a stretch of at least `nbytes` bytes, and whether it is new, and so full of zeros.

        Raises:
            OSError: the file system has no room for it.
            RuntimeError: the file is another process's.
        """
        self.refuse_fork()
        sweep()
        rounded = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if free := self._free.get(rounded):
                return free.pop(), False
            self._refuse_cut("making room for", rounded)
            offset = self.nbytes
            with self.failing("making room for", rounded):
                address = self._extended(rounded)
            self._addresses.append((address, rounded))
            self.nbytes += rounded
            return FileRange(self, offset, rounded, address), True

    def _extended(self, nbytes: int) -> int:
        """Extends the file and returns the address of the new bytes."""
        try:
            if planned():  # nothing is written
                os.ftruncate(self.plain, self.nbytes + nbytes + ALIGNMENT)
            else:
                os.posix_fallocate(self.plain, self.nbytes, nbytes + ALIGNMENT)
            return mapping.map_file(self.plain, self.nbytes, nbytes)
        except OSError:
            os.ftruncate(self.plain, self._length)  # frees what was allocated before the failure
            raise

    @property
    def _length(self) -> int:
        return self.nbytes + ALIGNMENT if self.nbytes else 0

    def refuse_fork(self) -> None:
        """Refuses any process but the one that made the file.

        Raises:
            RuntimeError: this is another process.
        """
        if os.getpid() != self.process:
            raise RuntimeError(
                f"process {os.getpid()} is a fork of {self.process}, whose {self.kind} are in a file in "
                f"{self.folder!r}: it can read but not change them. Start processes by "
                f'"spawn", or change them only in process {self.process}'
            )

    def _refuse_cut(self, verb: str, nbytes: int) -> None:
        had = self._length  # before fstat: another thread may extend the file meanwhile
        nbytes_now = os.fstat(self.plain).st_size
        if nbytes_now < had:
            raise OSError(
                errno.EIO,
                f"{verb} {nbytes / 1e6:.1f} MB of {self.kind} in {self.folder!r} failed: the file ends at "
                f"{nbytes_now} bytes and had {had}: something else has truncated it. Its contents are lost: start "
                f"again from the last checkpoint",
            )

    def give_back(self, stretch: FileRange) -> None:
        """Keeps a stretch that is no longer used for later ones of its size."""
        with self._lock:
            self._free.setdefault(stretch.nbytes, []).append(stretch)

    def read(self, offset: int, into: memoryview) -> None:
        """Fills memory from an offset of the file; both and the length must be aligned.

        Raises:
            OSError: the file cannot be read, or is too short.
        """
        self._move(os.preadv, self.direct, offset, into, "reading")
        self._refuse_cut("reading", len(into))

    def write(self, offset: int, source: memoryview) -> None:
        """Writes memory at an offset of the file; parts that are not aligned go through the page cache.

        Raises:
            OSError: the file cannot be written, or was truncated.
        """
        n = len(source)
        self._refuse_cut("writing", n)
        first = min(-offset % ALIGNMENT, n)
        last = first + (n - first) // ALIGNMENT * ALIGNMENT
        for start, stop, descriptor in ((0, first, _NONE), (first, last, self.direct), (last, n, _NONE)):
            if start < stop:
                self._move(os.pwritev, descriptor, offset + start, source[start:stop], "writing")

    def _move(self, call: Any, descriptor: int, offset: int, memory: memoryview, verb: str) -> None:
        cached, position = descriptor == _NONE, 0
        while position < len(memory):
            with self.failing(verb, len(memory)):
                done = call(self.plain if descriptor == _NONE else descriptor, [memory[position:]], offset + position)
            if done == 0:
                self._refuse_cut(verb, len(memory))
                raise OSError(errno.EIO, f"{verb} {len(memory) / 1e6:.1f} MB of {self.kind} in {self.folder!r} stopped")
            position += done
            if position % ALIGNMENT:
                descriptor = _NONE  # the rest is not aligned for direct I/O
        if cached and self.direct == _NONE:
            if verb == "writing":
                os.fdatasync(self.plain)
            os.posix_fadvise(self.plain, offset, len(memory), os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def failing(self, verb: str, nbytes: int) -> Iterator[None]:
        """Adds to an OSError inside what was attempted and, if the disk is full, how much room there is."""
        try:
            yield
        except OSError as error:
            free = ""
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                free = f"; {self.free_bytes() / 1e6:,.1f} MB are free there: make room, or name another folder, {NAMED}"
            raise OSError(
                error.errno,
                f"{verb} {nbytes / 1e6:.1f} MB of {self.kind} in {self.folder!r} failed: {error.strerror}{free}",
            ) from error


# --- tensors in them ---


class DiskExtent(NamedTuple):
    """The location of a tensor's values on disk: bytes `start` to `stop` of a stretch with `end` in use."""

    stretch: FileRange
    start: int
    stop: int
    end: int


_stretches: dict[int, tuple[FileRange, int]] = {}  # by address, with the number of bytes in use
_dropped: deque[FileRange] = deque()  # filled by the garbage collector, which must not do more: see `_ended`


def empty(shape: tuple[int, ...], dtype: torch.dtype, file: File, zeros: bool = False) -> Tensor:
    """A tensor in a file, uninitialized or of zeros.

    Raises:
        OSError: there is no room for it.
        RuntimeError: the file is another process's.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    collect()
    stretch, new = file.allocate(nbytes)
    if zeros and not new:
        stretch.clear()
    memory = mapping.buffer_at(stretch.address, nbytes)
    _stretches[stretch.address] = stretch, nbytes
    weakref.finalize(memory, _dropped.append, stretch).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def collect() -> None:
    """Gives back the stretches of tensors that were collected."""
    while _dropped:
        stretch = _dropped.popleft()
        del _stretches[stretch.address]
        stretch.file.give_back(stretch)


def place_of(x: Tensor) -> DiskExtent | None:
    """A tensor's location on disk; None if in memory, not contiguous, or lazily conjugated or negated."""
    used = None if x.is_conj() or x.is_neg() else _stretch_of(x)
    if used is None or not x.is_contiguous():
        return None
    stretch, end = used
    start = int(x.storage_offset()) * x.dtype.itemsize
    return DiskExtent(stretch, start, start + x.numel() * x.dtype.itemsize, end)


def _stretch_of(x: Tensor) -> tuple[FileRange, int] | None:
    """The stretch that a tensor is in, and how many of its bytes are in use; None if it is in none."""
    if torch.compiler.is_compiling() or not _stretches or x.device.type != "cpu":
        return None
    if type(x) not in (Tensor, torch.nn.Parameter):
        return None
    try:
        return _stretches.get(x.untyped_storage().data_ptr())
    except RuntimeError:  # a tensor of a torch.func transform
        return None


def on_disk(x: object) -> bool:
    """Whether a value is a tensor whose memory is a mapped file."""
    return isinstance(x, Tensor) and _stretch_of(x) is not None


def release(x: Tensor) -> None:
    """Frees the memory of a tensor on disk until it is read again."""
    used = _stretch_of(x)
    if used is not None:
        used[0].release()


def wait_for_writes(x: Tensor) -> None:
    """Waits until what was written into a tensor on disk is there, and frees its memory."""
    used = _stretch_of(x)
    if used is not None:
        used[0].wait_for_writes()
