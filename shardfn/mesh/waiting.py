"""Ranks that wait for each other in vain find out, and say so.

Whoever is about to block until other ranks come says it first: `with on("all_gather", group, stage): work.wait()`. The
`watchdog` looks after these waits, and wakes a thread that waits in vain with an error.

A rank that computes is waited for without end, and so is one that waits for something which was not announced here.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any

import torch.distributed as dist

from shardfn.compat import process_groups
from shardfn.debugging import debugging
from shardfn.mesh import callsites, watchdog
from shardfn.mesh.deadlock import CALL, SHOWN, State, advised, ranks_named, standing
from shardfn.mesh.watchdog import arrivals, broken_groups, waits

MOST_KINDS = 4096  # that are counted of one group
_axes_of: dict[str, str] = {}  # along which a group runs


class on:
    """This thread waits for other ranks while the block runs; a RuntimeError from inside says what for.

    Args:
        what: the operation: `"all_gather"`.
        group: name of the process group whose ranks it needs.
        of: what it is done to, a stage say. Ranks meet whose `what` and `of` are equal.
        ranks: the ranks it needs, where that is not the group's. Such a wait ends in an error only if they have come
            to wait for others in vain, or ended, before they came to this.
        note: more about it, for this rank's log.
        sided: whether only some ranks wait for this, as for a message: it is logged, and never given up.

    Attributes:
        nested: whether it is a part of another one of the same group, which says more.
    """

    __slots__ = (
        "__weakref__", "_before", "count", "group", "nested", "note", "of", "ranks", "renewed", "sided", "verdict",
        "what",
    )  # fmt: skip

    def __init__(
        self,
        what: str,
        group: str,
        of: Any = "",
        ranks: Sequence[int] | None = None,
        note: str = "",
        sided: bool = False,
    ) -> None:
        self.what, self.group, self.of, self.ranks, self.note, self.sided = what, group, of, ranks, note, sided

    def __enter__(self) -> on:
        me = get_ident()
        if self.group in broken_groups and self.ranks is None:
            raise RuntimeError(watchdog.since_when(self, broken_groups[self.group]))
        before = self._before = waits.get(me)
        if before is not None and before.group == self.group and (before.of != "" or self.of == ""):
            self.nested = True
            return self  # the outer one says more, and is what other ranks are compared by
        self.nested = False
        counts = arrivals.get((me, self.group))
        if counts is None or len(counts) > MOST_KINDS:
            counts = arrivals[(me, self.group)] = {}
        key = (self.what, self.of)
        self.count = counts[key] = counts.get(key, 0) + 1
        self.verdict, self.renewed = "", False
        waits[me] = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if self.nested:
            return
        before = self._before
        if before is None:
            waits.pop(get_ident(), None)
        else:
            waits[get_ident()] = before
        if isinstance(error, RuntimeError) and (told := _failed(self, error)) is not error:
            if self.ranks is None and not self.renewed and watchdog.STAYS not in str(told):
                broken_groups[self.group] = f"{callsites.caller()}, where {told}"
            raise told from None  # what the backend says of it is in there, and comes after

    @property
    def key(self) -> str:
        """By which other ranks know it."""
        return f"{self.what} {self.of}"

    def __str__(self) -> str:
        of = f" of {self.of!r}" if self.of != "" else ""
        along = named(self.group)
        return f"{self.what}{of}{f' over {along}' if along else ''}"


@contextlib.contextmanager
def during(call: str) -> Iterator[None]:
    """What this thread waits for is a part of this call of the user's, `"sf.unshard"` say: messages name it."""
    me = get_ident()
    own = me not in watchdog.calls
    if own:
        watchdog.calls[me] = f"{call}, called at {callsites.caller()}" if debugging.collectives else call
    try:
        yield
    finally:
        if own:
            watchdog.calls.pop(me, None)


def along(group: str, axes: str) -> None:
    """Messages call a group by these axes."""
    _axes_of[group] = axes


def named(group: str) -> str:
    """The axes by which messages call a group; empty if nobody has said them."""
    return _axes_of.get(group, "")


def release(groups: Iterable[str], told: str) -> None:
    """Waits in these groups, which will be renewed, and for groups to be made, are in vain: who is woken says so."""
    names, me = set(groups), get_ident()
    for thread, wait in list(waits.items()):
        if thread != me and not wait.verdict and (wait.group in names or wait.group.startswith("meeting ")):
            wait.verdict, wait.renewed = told, True


def forget(groups: Iterable[str]) -> None:
    """What was waited for in these groups is over, on all their ranks, however often each of them came to it."""
    names = set(groups)
    for key in [key for key in list(arrivals) if key[1] in names or key[1].startswith("meeting ")]:
        arrivals.pop(key, None)
    for name in names:
        broken_groups.pop(name, None)
    callsites.forget(names)


def meet(name: str, ranks: Sequence[int], what: str, of: str) -> None:
    """Waits until all of these ranks have come to the same place, by way of the store.

    Raises:
        RuntimeError: some rank cannot come any more, or did not within the world's timeout.
    """
    store = process_groups.default_store()
    limit = time.monotonic() + store.timeout.total_seconds()
    store.set(f"shardfn/meeting/{name}/{dist.get_rank()}", "")
    left = [f"shardfn/meeting/{name}/{rank}" for rank in ranks]
    each = itertools.cycle(range(len(ranks)))
    with on(what, f"meeting {name}", of, ranks) as here:
        while not _came(store, left):
            if here.verdict or time.monotonic() > limit:
                raise RuntimeError("timed out")
            # A few in turn: the store of a large world could not bear more.
            some = [next(each) for _ in range(min(SHOWN, len(ranks)))]
            if any(not store.check([left[i]]) and process_groups.disconnected(ranks[i]) for i in some):
                raise RuntimeError("connection closed")


def _came(store: Any, keys: list[str]) -> bool:
    """Whether all keys are there, or come within half a second; a wait by the store would log that they are late."""
    end, pause = time.monotonic() + min(watchdog.TICK, 0.5), 0.001
    while not store.check(keys):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause *= 2
    return True


# --- what is said when a wait fails ---


def brief(error: BaseException) -> str:
    """What a backend says, without its general advice."""
    return str(error).split(" This is typically")[0].rstrip(" .")


def cause(error: BaseException) -> BaseException | None:
    """From what an error is raised whose text has that of this one: nothing, where that says it all."""
    return None if " in vain for " in str(error) else error


def elsewhere(error: BaseException) -> bool:
    """Whether the ranks that did not come are in no collective on tensors: they have ended, save something, ..."""
    told = str(error)
    return " waits for " not in told or CALL.search(told) is not None or "the making of a group" in told


_BROKEN = re.compile("connection|closed|closure|timed out|timeout|reset by peer|broken pipe|abort", re.IGNORECASE)


def _failed(wait: on, error: RuntimeError) -> RuntimeError:
    """What to raise when a wait failed by itself: because a rank has gone, or broke the group."""
    if wait.verdict:
        return RuntimeError(wait.verdict)
    if watchdog.watcher is None or " in vain for " in str(error) or not _BROKEN.search(str(error)):
        return error
    if wait.group in broken_groups and wait.ranks is None:  # since this thread came to it
        return RuntimeError(watchdog.since_when(wait, broken_groups[wait.group]))
    me = watchdog.watcher.rank
    states: dict[int, State] = {}
    others: list[int] = []
    silently = ""
    with contextlib.suppress(Exception):  # the store may have gone with a rank
        others = [rank for rank in watchdog.ranks_of(wait) if rank != me][:64]
        states = watchdog.read_states(process_groups.default_store(), others)
        silently = " without a word"
    mine, found = [get_ident(), wait.group, wait.key, wait.count], ""
    for state in states.values():
        told, *those = state["vain"].get(str(me), [""])
        found = found or (told if mine in those else "")
    watchdog.pass_on([state["vain"] for state in states.values()])
    if found:
        return RuntimeError(advised(found))
    since = [state["broken"][wait.group] for state in states.values() if wait.group in state["broken"]]
    if since and wait.ranks is None:
        return RuntimeError(watchdog.since_when(wait, broken_groups.setdefault(wait.group, since[0])))
    known = [rank for rank, state in states.items() if state["ended"] or state["vain"] or state["threads"]]
    spoke = [rank for rank, state in states.items() if state["ended"] or state["vain"]]
    gone = [] if spoke else _gone(others)
    told = f"rank {me} waited in vain for {watchdog.text_of(wait, get_ident())}"
    if known and not gone:
        return RuntimeError(advised(f"{told}: {standing(known, states)}"))
    who = f"{ranks_named(gone)} {'has' if len(gone) == 1 else 'have'}" if gone else "a rank has"
    after = f", after {callsites.last()}" if callsites.last() else ""
    return RuntimeError(f"{told}: {who} ended{silently}{after}; look at its output first ({brief(error)})")


def _gone(ranks: Sequence[int]) -> list[int]:
    """Those of these ranks whose processes have ended, as far as this one's connections tell."""
    gone: list[int] = []
    with contextlib.suppress(RuntimeError):
        for pause in (0.0, 0.1, 0.3):  # one connection may be closed sooner than another
            time.sleep(pause)
            gone = gone or [rank for rank in ranks if process_groups.disconnected(rank)]
    return gone
