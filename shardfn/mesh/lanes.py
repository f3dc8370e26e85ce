"""Threads that work at the same time, each with process groups of its own."""

from __future__ import annotations

import re
import threading

from shardfn.compat import autograd, process_groups


class _Own(threading.local):
    """What this thread was said to belong to."""

    def __init__(self) -> None:
        self.lane: str | None = None


entered: list[tuple[int, str]] = []
"""The number and the lane of the mesh axes in scope on any thread: what an autograd thread may be working for."""
_own = _Own()


_NUMBERS = re.compile(r"(?<=^Thread)-\d+|(?<=^ThreadPoolExecutor)-\d+|_\d+$")


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
        thread.__dict__["_shardfn_lane"] = found
    return found


class in_lane:
    """A context: what runs inside belongs to a lane, on whichever thread autograd runs it."""

    __slots__ = ("before", "lane")

    def __init__(self, lane: str) -> None:
        self.lane = lane

    def __enter__(self) -> None:
        self.before, _own.lane = _own.lane, self.lane

    def __exit__(self, *_: object) -> None:
        _own.lane = self.before
