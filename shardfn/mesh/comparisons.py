"""This rank's position for other ranks: the user's line, its next collective, and the calls that it has left.

It is kept while ranks compare their collectives, under `debug(collectives=True)`. Each comparison has two numbers:
one among all comparisons of its group, and one within the enclosing call, which is the outermost shard_map or
evaluation of gradients. Ranks also compare whether a comparison is the first of its call. A rank that has left a call
can therefore never reach a later comparison of that call: its next one is the first of a later call, or outside of any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from threading import get_ident

from shardfn import callers
from shardfn.compat import process_groups


@dataclass
class _Body:
    """A call inside which ranks compare.

    Attributes:
        where: the user's line that made the call.
        depth: how many such calls are open, one inside another.
        counts: number of comparisons so far, by group.
        alike: whether all ranks raise the next error.
    """

    where: str
    depth: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    alike: bool = False


@dataclass(frozen=True)
class ReachedComparison:
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
reaching: dict[int, ReachedComparison] = {}
"""The comparison that each thread waits in, until all other ranks have reached it."""


@contextlib.contextmanager
def body() -> Iterator[None]:
    """Marks a call inside which ranks compare; comparisons inside are numbered."""
    thread = get_ident()
    open_body = _bodies.get(thread)
    if open_body is None:
        open_body = _bodies[thread] = _Body(callers.caller())
    open_body.depth += 1
    outcome, own_error = "returned from", False
    try:
        yield
    except BaseException as error:
        own_error = not open_body.alike
        outcome = f"left with {type(error).__name__} ({str(error)[:300]}), raised at {callers.raised_at(error)},"
        raise
    finally:
        open_body.depth -= 1
        if not open_body.depth:
            _bodies.pop(thread, None)
            for group in open_body.counts:
                _left[group] = _numbers.get(group, 0), f"has {outcome} the call at {open_body.where}", own_error


def numbered_place(group: str, text: str) -> ReachedComparison:
    """Numbers the next comparison in a group."""
    number = _numbers[group] = _numbers.get(group, 0) + 1
    open_body = _bodies.get(get_ident())
    if open_body is None:
        return ReachedComparison(text, group, number, 0, "")
    open_body.alike = False
    inside = open_body.counts[group] = open_body.counts.get(group, 0) + 1
    return ReachedComparison(text, group, number, inside, open_body.where)


def mark_common_error() -> None:
    """Records that all ranks know of a difference, so the error that follows is not this rank's own."""
    open_body = _bodies.get(get_ident())
    if open_body is not None:
        open_body.alike = True


def unnumbered(operation: str, group: str) -> ReachedComparison:
    """Returns an unnumbered place for a comparison of something other than the next collective."""
    return ReachedComparison(f"{operation}, called at {callers.caller()}{failure(group)}", group, 0, 0, "")


@contextlib.contextmanager
def holding_at(place: ReachedComparison) -> Iterator[None]:
    """Holds this thread at a place; when the block ends without an error, all ranks have reached it."""
    thread = get_ident()
    reaching[thread] = place
    try:
        yield
        reached(place.text)
        _left.pop(place.group, None)
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
    return {group: (n, outcome) for group, (n, outcome, _) in list(_left.items()) if n == _numbers.get(group)}


def failure(group: str) -> str:
    """Returns, for a message, the error that ended the call of the group's last comparison; empty without one."""
    if process_groups.worlds_of_threads():
        return ""  # ranks are threads here, and this state mixes all of them
    number, outcome, own_error = _left.get(group, (0, "", False))
    return f" (after it {outcome})" if own_error and number == _numbers.get(group) else ""


def reset_comparisons(groups: Iterable[str]) -> None:
    """Restarts the count of comparisons in these groups."""
    for group in groups:
        for counts in (_numbers, _left, *(open_body.counts for open_body in list(_bodies.values()))):
            counts.pop(group, None)  # type: ignore[attr-defined]


def clear() -> None:
    """Forgets everything, for a new world."""
    for state in (_bodies, _numbers, _left, _last, reaching):
        state.clear()
