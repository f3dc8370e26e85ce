"""The threads that start what moves: a send copies to the other side at once if that waits for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shardfn.mesh.lanes import lane

_NAME = "shardfn-link"
_launchers: dict[str, ThreadPoolExecutor] = {}  # by lane: one may wait for a hop, which must not hold up the others


class Launched:
    """Works that another thread starts: in a group, or such as take care of themselves.

    If it is dropped, `left` gets them: gloo would forget a message that nobody holds, and give the next one that the
    other rank sends to the wrong side of the gap. They are waited for with the next ones.
    """

    __slots__ = ("left", "works")

    def __init__(self, start: Callable[[], list[Any]], group: Any = None) -> None:
        self.left = [] if group is None else _left.setdefault(group, [])
        self.works: Future[list[Any]] | None = launch(start)

    def wait(self) -> None:
        """Until all have arrived, and all that was dropped before."""
        while self.left:
            _wait_for(self.left[-1])
            self.left.pop()
        if self.works is not None:
            _wait_for(self.works)
        self.works = None

    def __del__(self) -> None:
        if self.works is not None:
            self.left.append(self.works)


def _wait_for(works: Future[list[Any]]) -> None:
    every = works.result()
    while every:
        every.pop().wait()  # what is interrupted here is not waited for twice: gloo would, for another message


_left: weakref.WeakKeyDictionary[Any, list[Future[list[Any]]]] = weakref.WeakKeyDictionary()  # by group


def forget(groups: Sequence[Any]) -> None:
    """All that was under way in these groups has ended, and is nothing to what comes."""
    settle()  # what waits there to be started meets the end of its group first
    for group in groups:
        _left.pop(group, None)


def launch(start: Callable[[], list[Any]]) -> Future[list[Any]]:
    """Starts works on the lane's launcher, in the order of the calls, and at once on that thread itself."""
    if not threading.current_thread().name.startswith(_NAME):
        part = lane()
        if part not in _launchers:
            _launchers.setdefault(part, ThreadPoolExecutor(1, thread_name_prefix=_NAME))
        return _launchers[part].submit(start)
    done: Future[list[Any]] = Future()
    done.set_result(start())
    return done


def settle() -> None:
    """Until all that waits to be started on the lane's launcher has been."""
    launcher = _launchers.get(lane())
    if launcher is not None:
        launcher.submit(lambda: None).result()
