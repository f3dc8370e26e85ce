"""A disk that fails as a test says: on the calls of the system that files make."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from shardfn.tiers.tensors import File


@contextlib.contextmanager
def disk(before: Callable[[str, int], None]) -> Iterator[None]:
    """Does something before each part is read or written: `(verb, offset)`; it may raise, or take its time."""
    read, write = File.read, File.write

    def reading(self: File, offset: int, into: memoryview) -> None:
        with self.failing("reading", len(into)):
            before("read", offset)
        read(self, offset, into)

    def writing(self: File, offset: int, source: memoryview) -> None:
        with self.failing("writing", len(source)):
            before("write", offset)
        write(self, offset, source)

    with mock.patch.object(File, "read", reading), mock.patch.object(File, "write", writing):
        yield


def failing(verb: str, after: int = 0, number: int = errno.EIO) -> Callable[[str, int], None]:
    """A disk that fails for good after so many reads or writes."""
    left = [after]

    def before(what: str, offset: int) -> None:
        del offset
        if what == verb:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))

    return before


def late(seed: int, longest: float = 0.004) -> Callable[[str, int], None]:
    """A disk that takes its time, sometimes."""
    draw, lock = random.Random(seed), threading.Lock()

    def before(what: str, offset: int) -> None:
        del what, offset
        with lock:
            pause = draw.random() * longest if draw.random() < 0.5 else 0.0
        time.sleep(pause)

    return before


class Held:
    """A disk that answers nothing until it is let go."""

    def __init__(self, verb: str) -> None:
        self.verb, self.go, self.met = verb, threading.Event(), threading.Event()

    def __call__(self, what: str, offset: int) -> None:
        del offset
        if what == self.verb:
            self.met.set()
            self.go.wait(20)


def refusing_direct(real: Any = os.open) -> Any:
    """`os.open` of a file system that has no way past the page cache."""

    def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return int(real(path, flags, *more, **named))

    return mock.patch.object(os, "open", opened)
