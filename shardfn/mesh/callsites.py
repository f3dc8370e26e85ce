"""Describes for other ranks where this rank stands: the user's line, its next collective, and the calls it has left.

Kept while ranks compare what they are about to do, under `debug(collectives=True)`. Each comparison has two numbers:
one among all comparisons of its group, and one within the enclosing call, which is the outermost shard_map or
evaluation of gradients. Ranks also compare whether a comparison is the first of its call. A rank that has left a call
can therefore never reach a later comparison of that call: its next one is the first of another call, or outside of any.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import optree
import torch

from shardfn.compat import process_groups
from shardfn.quoting import installed

_FOLDERS = tuple(f"{Path(str(file)).parent}{os.sep}" for file in (torch.__file__, optree.__file__))
_NOT_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *_FOLDERS,
    *(str(module.__file__) for module in (contextlib, functools, threading)),
)


_UNKNOWN = "an unknown line"
_LOOPS = str(Path(__file__).parents[1] / "run")


@dataclass
class _Body:
    """A call inside which ranks compare.

    Attributes:
        where: the user's line that made the call.
        depth: how many such calls are open, one inside another.
        counts: number of comparisons so far, by group.
        alike: whether the next error is raised by all ranks alike.
    """

    where: str
    depth: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    alike: bool = False


@dataclass(frozen=True)
class Place:
    """The comparison that a thread has reached.

    Attributes:
        text: description of the operation that follows it.
        group: name of the group that compares.
        number: its number within the group.
        inside: its number within the enclosing call; 0 outside of any call.
        where: the user's line of that call.
    """

    text: str
    group: str
    number: int
    inside: int
    where: str


_bodies: dict[int, _Body] = {}  # open calls, by thread
_numbers: dict[str, int] = {}  # comparisons so far, by group
_left: dict[str, tuple[int, str, bool]] = {}  # group -> (last comparison, how its call ended, whether by an error)
_last: list[str] = []
reaching: dict[int, Place] = {}
"""The comparison that each thread waits in, until all other ranks have reached it."""


def caller() -> str:
    """Returns the innermost line of the user; in backward, the line that called backward."""
    return _users_line(_lines(sys._getframe(1)))


def asked(inner: str) -> str:
    """Returns the package's function that the user's line calls, for a message of one that runs inside it.

    Args:
        inner: the name of the function that runs; it is returned if it says more than that, or if the user calls no
            function by name.
    """
    if torch.compiler.is_compiling() or not inner.isidentifier():
        return inner
    names, frame = list[str](), sys._getframe(1)
    while not _users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_NOT_USERS[0]) and "<locals>" not in frame.f_code.co_qualname:
            names.append(frame.f_code.co_qualname)
        if frame.f_back is None:
            return inner
        frame = frame.f_back
    name = names[-1].replace("Functional.", "model.") if names else "_"
    return inner if re.search(r"(^|\.)_|[A-Z]", name) else name


def of_thread(thread: int) -> str:
    """Returns the innermost line of the user on a thread, wherever that is now; empty if there is none."""
    line = _users_line(_lines(sys._current_frames().get(thread)))
    return "" if line == _UNKNOWN else line


def warned(f: Callable[..., Any]) -> tuple[str, int, dict[str, Any]]:
    """Returns where a warning about a call of `f` belongs: file, line, and the names of that module.

    It is the user's line that calls it. Of a function that this package calls, as a loop calls its step, it is the line
    that defines it.
    """
    frame = sys._getframe(1)
    folders = set()
    while frame.f_back is not None and not _users(frame.f_code.co_filename):
        folders.add(os.path.dirname(frame.f_code.co_filename))
        frame = frame.f_back
    code = getattr(inspect.unwrap(f), "__code__", None)
    if _LOOPS in folders and code is not None and _users(code.co_filename):
        return code.co_filename, code.co_firstlineno, inspect.unwrap(f).__globals__
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals


def _users(file: str) -> bool:
    return not file.startswith(_NOT_USERS) and not installed(file)


def _lines(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _users_line(lines: Iterable[tuple[str, int]]) -> str:
    """Returns the first of these lines, from the innermost on, that is the user's, and where it led in a package."""
    within = ""
    for file, number in lines:
        if file.startswith(_NOT_USERS):
            continue
        if _users(file):
            return f"{file}:{number}" + (f" (in {within})" if within else "")
        within = within or f"{installed(file)}:{number}"
    return within or _UNKNOWN


@contextlib.contextmanager
def body() -> Iterator[None]:
    """Marks a call inside which ranks compare; comparisons inside are numbered."""
    thread = get_ident()
    open_body = _bodies.get(thread)
    if open_body is None:
        open_body = _bodies[thread] = _Body(caller())
    open_body.depth += 1
    outcome, own_error = "returned from", False
    try:
        yield
    except BaseException as error:
        own_error = not open_body.alike
        outcome = f"left with {type(error).__name__} ({str(error)[:300]}), raised at {_raised_at(error)},"
        raise
    finally:
        open_body.depth -= 1
        if not open_body.depth:
            _bodies.pop(thread, None)
            for group in open_body.counts:
                _left[group] = _numbers.get(group, 0), f"has {outcome} the call at {open_body.where}", own_error


def _raised_at(error: BaseException) -> str:
    """Returns the innermost user line that an error passed through."""
    lines, traceback = list[tuple[str, int]](), error.__traceback__
    while traceback is not None:
        lines.insert(0, (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _users_line(lines)


def place(group: str, text: str) -> Place:
    """Numbers the next comparison in a group."""
    number = _numbers[group] = _numbers.get(group, 0) + 1
    open_body = _bodies.get(get_ident())
    if open_body is None:
        return Place(text, group, number, 0, "")
    open_body.alike = False
    inside = open_body.counts[group] = open_body.counts.get(group, 0) + 1
    return Place(text, group, number, inside, open_body.where)


def alike() -> None:
    """Records that all ranks know of a difference, so the error that follows is not this rank's own."""
    open_body = _bodies.get(get_ident())
    if open_body is not None:
        open_body.alike = True


def outside(what: str, group: str) -> Place:
    """Returns an unnumbered place for a comparison of something other than the next collective."""
    return Place(f"{what}, called at {caller()}{failure(group)}", group, 0, 0, "")


@contextlib.contextmanager
def at(here: Place) -> Iterator[None]:
    """Holds this thread at a place; when the block ends without an error, all ranks have reached it."""
    thread = get_ident()
    reaching[thread] = here
    try:
        yield
        reached(here.text)
        _left.pop(here.group, None)
    finally:
        reaching.pop(thread, None)


def reached(text: str) -> None:
    """Notes a place that all ranks have reached."""
    _last[:] = [text]


def last() -> str:
    """Returns the text of the last place that all ranks reached, on any thread; empty if there is none."""
    return _last[0] if _last else ""


def left() -> dict[str, tuple[int, str]]:
    """Returns, for groups whose last comparison lies in a call that has ended, its number and how the call ended."""
    return {group: (n, how) for group, (n, how, _) in list(_left.items()) if n == _numbers.get(group)}


def failure(group: str) -> str:
    """Returns, for a message, the error that ended the call of the group's last comparison; empty without one."""
    if process_groups.worlds_of_threads():
        return ""  # ranks are threads here, and this state mixes all of them
    number, outcome, own_error = _left.get(group, (0, "", False))
    return f" (after it {outcome})" if own_error and number == _numbers.get(group) else ""


def forget(groups: Iterable[str]) -> None:
    """Restarts the count of comparisons in these groups."""
    for group in groups:
        for counts in (_numbers, _left, *(open_body.counts for open_body in list(_bodies.values()))):
            counts.pop(group, None)  # type: ignore[attr-defined]


def clear() -> None:
    """Forgets everything, for a new world."""
    for state in (_bodies, _numbers, _left, _last, reaching):
        state.clear()
