"""The memory that something takes while it runs: of a process, its own and pages of files; and the largest tensor."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in optree.tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out
