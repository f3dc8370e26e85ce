"""Lanes: threads of one process that communicate at the same time, each with its own process groups.

A thread and its counterparts on other ranks form a lane; they find each other by the thread's name.
"""

from __future__ import annotations

import re
import threading

import torch.distributed as dist

from shardfn.compat import autograd, process_groups


class _Own(threading.local):
    """The lane that this thread was assigned to by `in_lane`."""

    def __init__(self) -> None:
        self.lane: str | None = None


entered: list[tuple[int, str]] = []
"""Number and lane of the mesh axes in scope on each thread, from which an autograd thread infers its lane."""
_own = _Own()


_NUMBERS = re.compile(r"(?<=^Thread)-\d+|(?<=^ThreadPoolExecutor)-\d+|_\d+$")
_OF_POOL = re.compile(r"_\d+$")


def lane() -> str:
    """Returns the name of this thread's lane; each lane has its own process groups.

    It is the thread's name without the numbers that Python appends, which is how a thread finds its counterparts on
    other ranks. The main thread's lane is empty.
    """
    if _own.lane is not None:
        return _own.lane
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    if autograd.autograd_thread():
        # An autograd thread works for the thread that called backward; with several active lanes it is unknown which.
        lanes = {name for _, name in list(entered)}
        return lanes.pop() if len(lanes) == 1 else ""
    name: str | None = thread.__dict__.get("_shardfn_lane")
    if name is None:
        name = "" if process_groups.worlds_of_threads() else _NUMBERS.sub("", thread.name)
        _refuse_twins(thread, name)
        thread.__dict__["_shardfn_lane"] = name
    return name


def _refuse_twins(thread: threading.Thread, lane: str) -> None:
    """Raises RuntimeError if another live thread has the same lane; threads of a pool may, since they take turns."""
    if not lane or _OF_POOL.search(thread.name) or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for other in threading.enumerate():
        if other is not thread and type(other) is type(thread) and _NUMBERS.sub("", other.name) == lane:
            other.__dict__.pop("_shardfn_lane", None)  # on other ranks it may be the later thread
            other.__dict__["_shardfn_twin"] = thread.name
            thread.__dict__["_shardfn_twin"] = other.name
    twin = thread.__dict__.get("_shardfn_twin")
    if twin is not None:
        raise RuntimeError(
            f"threads {twin!r} and {thread.name!r} live at the same time, and other ranks cannot tell them apart: give "
            f"each thread its own name, the same on all ranks, in threading.Thread(name=...)"
        )


class in_lane:
    """A context in which code belongs to a lane, on whichever thread autograd runs it."""

    __slots__ = ("before", "lane")

    def __init__(self, lane: str) -> None:
        self.lane = lane

    def __enter__(self) -> None:
        self.before, _own.lane = _own.lane, self.lane

    def __exit__(self, *_: object) -> None:
        _own.lane = self.before
