"""Threads that work at the same time, each with process groups of its own."""

from __future__ import annotations

import re
import threading

import torch.distributed as dist

from shardfn.compat import autograd, process_groups


class _Own(threading.local):
    """What this thread was said to belong to."""

    def __init__(self) -> None:
        self.lane: str | None = None


entered: list[tuple[int, str]] = []
"""The number and the lane of the mesh axes in scope on any thread: what an autograd thread may be working for."""
_own = _Own()


_NUMBERS = re.compile(r"(?<=^Thread)-\d+|(?<=^ThreadPoolExecutor)-\d+|_\d+$")
_OF_POOL = re.compile(r"_\d+$")


def lane() -> str:
    """Which of the threads that work at the same time this is: each has groups of its own.

    It is the thread's name, without the numbers that Python gives, by which it finds its like on the other ranks; the
    main thread's is empty.
    """
    if _own.lane is not None:
        return _own.lane
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    if autograd.autograd_thread():
        working = {one for _, one in list(entered)}
        return working.pop() if len(working) == 1 else ""
    found: str | None = thread.__dict__.get("_shardfn_lane")
    if found is None:
        found = "" if process_groups.worlds_of_threads() else _NUMBERS.sub("", thread.name)
        _refuse_twins(thread, found)
        thread.__dict__["_shardfn_lane"] = found
    return found


def _refuse_twins(thread: threading.Thread, lane: str) -> None:
    """Raises RuntimeError where another thread of the lane is alive, but for those of a pool, which take turns."""
    if not lane or _OF_POOL.search(thread.name) or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for other in threading.enumerate():
        if other is not thread and type(other) is type(thread) and _NUMBERS.sub("", other.name) == lane:
            other.__dict__.pop("_shardfn_lane", None)  # on another rank it may be the other that is refused
            other.__dict__["_shardfn_twin"] = thread.name
            thread.__dict__["_shardfn_twin"] = other.name
    twin = thread.__dict__.get("_shardfn_twin")
    if twin is not None:
        raise RuntimeError(
            f"threads {twin!r} and {thread.name!r} live at the same time, and other ranks cannot tell them apart: give "
            f"each thread a name of its own, the same on all ranks, in threading.Thread(name=...)"
        )


class in_lane:
    """A context: what runs inside belongs to a lane, on whichever thread autograd runs it."""

    __slots__ = ("before", "lane")

    def __init__(self, lane: str) -> None:
        self.lane = lane

    def __enter__(self) -> None:
        self.before, _own.lane = _own.lane, self.lane

    def __exit__(self, *_: object) -> None:
        _own.lane = self.before
