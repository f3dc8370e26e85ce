"""The threads that start what moves: a send copies to the other side at once if that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shardfn.mesh.lanes import lane

_NAME = "shardfn-link"
_launchers: dict[str, ThreadPoolExecutor] = {}  # by lane: one may wait for a hop, which must not hold up the others


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
