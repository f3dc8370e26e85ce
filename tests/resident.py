"""The resident memory of a process while something runs: its own memory, and pages of files."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def grown(run: Callable[[], Any]) -> tuple[float, float]:
    """The most MB by which the process's own memory, and its pages of files, grew while `run` ran."""
    over, most = threading.Event(), [0.0, 0.0]
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: freed memory goes back to the system
    libc.malloc_trim(0)

    def watch() -> None:
        while not over.wait(0.001):
            most[:] = map(max, most, _now())

    before = _now()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        over.set()
        watcher.join()
    most[:] = map(max, most, _now())
    return most[0] - before[0], most[1] - before[1]


def _now() -> tuple[float, float]:
    with open("/proc/self/status") as file:
        found = dict(line.split(":") for line in file if line.startswith("Rss"))
    return tuple(int(found[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def pages_of(folder: Path) -> float:
    """MB of resident pages of the files in a folder."""
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ")[0]:
                inside = f"{folder}/" in line
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total / 1024
