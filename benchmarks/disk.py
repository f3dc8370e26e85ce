"""The bandwidth of a disk alone: a few threads read and write past the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from pathlib import Path

THREADS = 4
BLOCK = 4 * 2**20


class Bare:
    """A rank's file.

    Args:
        folder: where it is, without a name.
        nbytes: its length.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        self.blocks = max(nbytes // BLOCK, THREADS)
        plain, path = tempfile.mkstemp(prefix="bare-", dir=folder)
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        finally:
            os.close(plain)
            os.unlink(path)
        os.posix_fallocate(self.descriptor, 0, self.blocks * BLOCK)
        self.seconds(0, self.blocks * BLOCK)  # unwritten blocks would not be read from the disk

    def seconds(self, read: float, written: float) -> float:
        """The time to read and write so many bytes, interleaved so that both end together."""
        reads, writes = (round(n / BLOCK) for n in (read, written))
        threads = [threading.Thread(target=self._move, args=(n, reads, writes)) for n in range(THREADS)]
        began = time.perf_counter()
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return time.perf_counter() - began

    def _move(self, first: int, reads: int, writes: int) -> None:
        memory = memoryview(mmap.mmap(-1, BLOCK))
        for n in range(first, reads + writes, THREADS):
            before, after = (k * reads // (reads + writes) for k in (n, n + 1))
            call, at = (os.preadv, before) if after > before else (os.pwritev, n - before)
            done = call(self.descriptor, [memory], at % self.blocks * BLOCK)
            assert done == BLOCK, "the file is that long"


def moved() -> tuple[int, int]:
    """Bytes that this process has read from and written to the disk since it started."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])
