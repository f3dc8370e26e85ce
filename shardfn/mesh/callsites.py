"""Where this rank stands, in words for others: the user's line, what it is about to do, which calls it has left.

Kept while ranks compare what they are about to do, `debug(collectives=True)`. A comparison has a place: its number
among all of its group, and its number in the call in which it is made, the outermost shard_map or evaluation of
gradients. Ranks also compare whether it is the first there. So a rank that has left the call in which others wait for
a later one can never come to that: its next comparison would be the first one of another call, or outside of any.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any

import optree
import torch

from shardfn.compat import process_groups

_FOLDERS = tuple(f"{Path(str(file)).parent}{os.sep}" for file in (torch.__file__, optree.__file__))
_NOT_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *_FOLDERS,
    *(str(module.__file__) for module in (contextlib, functools, threading)),
)


@dataclass
class _Body:
    """A call in which ranks meet.

    Attributes:
        where: the user's line.
        depth: such calls that are open.
        counts: of comparisons, by group.
        alike: whether the next error is one that all ranks raise.
    """

    where: str
    depth: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    alike: bool = False


@dataclass(frozen=True)
class Place:
    """A comparison that a thread is at.

    Attributes:
        text: what comes after it.
        group: along which.
        number: of it in its group.
        inside: its number in the call in which it is made; 0 outside of any.
        where: of that call.
    """

    text: str
    group: str
    number: int
    inside: int
    where: str


_bodies: dict[int, _Body] = {}  # by thread
_numbers: dict[str, int] = {}  # of comparisons, by group
_left: dict[str, tuple[int, str, bool]] = {}  # and whether by an error
_last: list[str] = []
reaching: dict[int, Place] = {}
"""What each thread is about to do, until all others have come to the same."""


def caller() -> str:
    """The line outside of this package and of torch that leads here; in backward that is who asked for it."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a line of no program's"


@contextlib.contextmanager
def body() -> Iterator[None]:
    """A call in which ranks meet: what is compared inside is numbered."""
    me = get_ident()
    here = _bodies.get(me)
    if here is None:
        here = _bodies[me] = _Body(caller())
    here.depth += 1
    how, failed = "returned from", False
    try:
        yield
    except BaseException as error:
        failed = not here.alike
        how = f"left with {type(error).__name__} ({str(error)[:300]}), raised at {_raised_at(error)},"
        raise
    finally:
        here.depth -= 1
        if not here.depth:
            _bodies.pop(me, None)
            for group in here.counts:
                _left[group] = _numbers.get(group, 0), f"has {how} the call at {here.where}", failed


def _raised_at(error: BaseException) -> str:
    """The innermost line of the user's that an error came through."""
    found, each = "", error.__traceback__
    while each is not None:
        code = each.tb_frame.f_code
        if not code.co_filename.startswith(_NOT_USERS):
            found = f"{code.co_filename}:{each.tb_lineno}"
        each = each.tb_next
    return found or "a line of no program's"


def place(group: str, text: str) -> Place:
    """The next comparison in a group."""
    number = _numbers[group] = _numbers.get(group, 0) + 1
    here = _bodies.get(get_ident())
    if here is None:
        return Place(text, group, number, 0, "")
    here.alike = False
    inside = here.counts[group] = here.counts.get(group, 0) + 1
    return Place(text, group, number, inside, here.where)


def alike() -> None:
    """All ranks are told that they differ: the error that comes is no rank's own."""
    here = _bodies.get(get_ident())
    if here is not None:
        here.alike = True


def outside(what: str, group: str) -> Place:
    """A comparison of something else than what comes next: it is not counted."""
    return Place(f"{what}, called at {caller()}{failure(group)}", group, 0, 0, "")


@contextlib.contextmanager
def at(here: Place) -> Iterator[None]:
    """This thread comes to a place; afterwards all others have."""
    me = get_ident()
    reaching[me] = here
    try:
        yield
        _last[:] = [here.text]
        _left.pop(here.group, None)
    finally:
        reaching.pop(me, None)


def last() -> str:
    """What all came to, the last time on any thread; empty if they did not."""
    return _last[0] if _last else ""


def left() -> dict[str, tuple[int, str]]:
    """By group, the number of the last comparison, where that was in a call that has ended since; and how it did."""
    return {group: (at, how) for group, (at, how, _) in list(_left.items()) if at == _numbers.get(group)}


def failure(group: str) -> str:
    """With what error the call ended in which the last comparison was, for a message; empty without one."""
    if process_groups.worlds_of_threads():
        return ""  # what is kept here is that of all ranks
    number, how, failed = _left.get(group, (0, "", False))
    return f" (after it {how})" if failed and number == _numbers.get(group) else ""


def forget(groups: Iterable[str]) -> None:
    """Ranks count what they compare in these groups from the start."""
    for group in groups:
        for counts in (_numbers, _left, *(here.counts for here in list(_bodies.values()))):
            counts.pop(group, None)  # type: ignore[attr-defined]


def clear() -> None:
    """Another world."""
    for kept in (_bodies, _numbers, _left, _last, reaching):
        kept.clear()
