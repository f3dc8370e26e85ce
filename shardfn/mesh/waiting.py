"""Announces waits for other ranks to the watchdog, which ends those that can never complete.

Code that is about to block until other ranks come announces it: `with on("all_gather", group, stage): work.wait()`. The
`watchdog` wakes the thread with an error if the wait can never end.

There is no time limit: a rank is waited for as long as it computes, or blocks in a call that was not announced here.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any

import torch.distributed as dist

from shardfn import callers
from shardfn.compat import process_groups
from shardfn.debugging import debugging
from shardfn.mesh import comparisons, watchdog
from shardfn.mesh.deadlock import CALL, SHOWN, State, ranks_named, standing, with_advice
from shardfn.mesh.watchdog import arrivals, broken_groups, waits

MOST_KINDS = 4096  # most kinds of waits counted for one group
ended: list[Callable[[on], None]] = []  # callbacks for the end of each wait
_axes_of: dict[str, str] = {}  # group -> the axes that it runs along


class on:
    """A context in which this thread waits for other ranks; a RuntimeError is raised again with the wait's description.

    Args:
        what: the operation: `"all_gather"`.
        group: name of the process group whose ranks are needed.
        of: the subject of the operation, such as a stage. Waits with equal `what` and `of` match between ranks.
        ranks: the ranks that are needed, if not the group's. Such a wait ends in an error only if they have ended, or
            are in a hopeless wait themselves, before they come to it.
        note: more about the wait, for this rank's log, and for what other ranks say of it.
        sided: whether the wait is one-sided, as for a message: it is given up only if `ranks` have ended.

    Attributes:
        nested: whether it is part of an outer wait on the same group, which says more.
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
        thread = get_ident()
        if self.group in broken_groups and self.ranks is None:
            raise RuntimeError(watchdog.since_when(self, broken_groups[self.group]))
        before = self._before = waits.get(thread)
        if before is not None and before.group == self.group and (before.of != "" or self.of == ""):
            self.nested = True
            return self  # the outer wait says more, and other ranks are compared by it
        self.nested = False
        counts = arrivals.get((thread, self.group))
        if counts is None or len(counts) > MOST_KINDS:
            counts = arrivals[(thread, self.group)] = {}
        key = (self.what, self.of)
        self.count = counts[key] = counts.get(key, 0) + 1
        self.verdict, self.renewed = "", False
        waits[thread] = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if self.nested:
            return
        before = self._before
        if before is None:
            waits.pop(get_ident(), None)
        else:
            waits[get_ident()] = before
        for tell in ended:
            tell(self)
        if isinstance(error, RuntimeError) and (outcome := _failed(self, error)) is not error:
            if self.ranks is None and not self.renewed and watchdog.STAYS not in str(outcome):
                broken_groups[self.group] = f"{callers.caller()}, where {outcome}"
            raise outcome from None  # the new error quotes the backend's message

    @property
    def key(self) -> str:
        """The text by which other ranks identify the wait."""
        return f"{self.what} {self.of}"

    def __str__(self) -> str:
        of = f" of {self.of!r}" if self.of != "" else ""
        axes = group_axes(self.group)
        return f"{self.what}{of}{f' over {axes}' if axes else ''}"


watchdog.wait_of = on


@contextlib.contextmanager
def during(call: str) -> Iterator[None]:
    """A context in which messages attribute waits to a call by the user, such as `"sf.unshard"`."""
    thread = get_ident()
    outermost = thread not in watchdog.calls
    if outermost:
        watchdog.calls[thread] = f"{call}, called at {callers.caller()}" if debugging.collectives else call
    try:
        yield
    finally:
        if outermost:
            watchdog.calls.pop(thread, None)


def name_axes(group: str, axes: str) -> None:
    """Makes messages name a group by these axes."""
    _axes_of[group] = axes


def group_axes(group: str) -> str:
    """Returns the axes by which messages name a group; empty if none were given."""
    return _axes_of.get(group, "")


def release(groups: Iterable[str], reason: str) -> None:
    """Cancels waits in groups that will be renewed, and waits for new groups: they raise `reason`."""
    names, own_thread = set(groups), get_ident()
    for thread, wait in list(waits.items()):
        if thread != own_thread and not wait.verdict and (wait.group in names or wait.group.startswith("meeting ")):
            wait.verdict, wait.renewed = reason, True


def reset_waits(groups: Iterable[str]) -> None:
    """Clears all state of waits in these groups, such as the counts of arrivals."""
    names = set(groups)
    for key in [key for key in list(arrivals) if key[1] in names or key[1].startswith("meeting ")]:
        arrivals.pop(key, None)
    for name in names:
        broken_groups.pop(name, None)
    comparisons.reset_comparisons(names)


def wait_for_ranks(name: str, ranks: Sequence[int], operation: str, caller: str) -> None:
    """Waits, by the store, until all of these ranks have made the same call.

    Raises:
        RuntimeError: a rank can no longer come, or did not within the world's timeout.
    """
    store = process_groups.default_store()
    limit = time.monotonic() + store.timeout.total_seconds()
    own_key = f"shardfn/meeting/{name}/{dist.get_rank()}"
    store.set(own_key, "")
    keys = [f"shardfn/meeting/{name}/{rank}" for rank in ranks]
    turns = itertools.cycle(range(len(ranks)))
    with on(operation, f"meeting {name}", caller, ranks, note=watchdog.STARTS) as wait:
        while not _came(store, keys):
            if wait.verdict or time.monotonic() > limit:
                store.delete_key(own_key)  # a rank that comes later must not count this one
                raise RuntimeError("timed out")
            # Only a few ranks at a time, to spare the store of a large world.
            sample = [next(turns) for _ in range(min(SHOWN, len(ranks)))]
            if any(not store.check([keys[i]]) and process_groups.disconnected(ranks[i]) for i in sample):
                raise RuntimeError("connection closed")


def _came(store: Any, keys: list[str]) -> bool:
    """Whether all keys are set within half a second. Polls, since a wait by the store would log that keys are late."""
    end, pause = time.monotonic() + min(watchdog.TICK, 0.5), 0.001
    while not store.check(keys):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause *= 2
    return True


# --- errors of waits that fail ---


def brief(error: BaseException) -> str:
    """Returns a backend's error message without its general advice."""
    return str(error).split(" This is typically")[0].rstrip(" .")


def cause(error: BaseException) -> BaseException | None:
    """Returns the `from` clause for an error that quotes this one: None if this one is a full report already."""
    return None if " in vain for " in str(error) else error


def elsewhere(error: BaseException) -> bool:
    """Whether the error says that missing ranks are in no tensor collective: they have ended, are saving, ..."""
    message = str(error)
    return " waits for " not in message or CALL.search(message) is not None or "the making of a group" in message


_BROKEN = re.compile("connection|closed|closure|timed out|timeout|reset by peer|broken pipe|abort", re.IGNORECASE)


def _failed(wait: on, error: RuntimeError) -> RuntimeError:
    """Returns the error for a failed wait: the watchdog's verdict, or the rank that ended or broke the group."""
    if wait.verdict:
        return RuntimeError(wait.verdict)
    if watchdog.watcher is None or " in vain for " in str(error) or not _BROKEN.search(str(error)):
        return error
    if wait.group in broken_groups and wait.ranks is None:  # by another thread or rank, since this wait began
        return RuntimeError(watchdog.since_when(wait, broken_groups[wait.group]))
    own_rank = watchdog.watcher.rank
    states: dict[int, State] = {}
    peers: list[int] = []
    silent = False
    with contextlib.suppress(Exception):  # the store may have gone with a rank
        peers = [rank for rank in watchdog.ranks_of(wait) if rank != own_rank][:64]
        states = watchdog.read_states(process_groups.default_store(), peers)
        silent = True
    own_wait, verdict = [get_ident(), wait.group, wait.key, wait.count], ""
    for state in states.values():
        message, *hopeless = state["vain"].get(str(own_rank), [""])
        verdict = verdict or (message if own_wait in hopeless else "")
    watchdog.pass_on([state["vain"] for state in states.values()])
    if verdict:
        return RuntimeError(with_advice(verdict))
    since = [state["broken"][wait.group] for state in states.values() if wait.group in state["broken"]]
    if since and wait.ranks is None:
        return RuntimeError(watchdog.since_when(wait, broken_groups.setdefault(wait.group, since[0])))
    stalled = [rank for rank, state in states.items() if state["ended"] or state["vain"] or state["threads"]]
    explained = [rank for rank, state in states.items() if state["ended"] or state["vain"]]
    gone = [] if explained else _gone(peers)
    message = f"rank {own_rank} waited in vain for {watchdog.text_of(wait, get_ident())}"
    if stalled and not gone:
        return RuntimeError(with_advice(f"{message}: {standing(stalled, states)}"))
    subject = f"{ranks_named(gone)} {'has' if len(gone) == 1 else 'have'}" if gone else "a rank has"
    last = comparisons.last()
    advice = "look first at its output, and at the system's log"
    if silent:
        last = f". The last that all ranks came to was {last}" if last else ""
        ending = f"{watchdog.KILLED}; {advice}{last}"
    else:
        ending = f"ended{f', after {last}' if last else ''}, and cannot be asked whether it was killed; {advice}"
    return RuntimeError(f"{message}: {subject} {ending} ({brief(error)})")


def _gone(ranks: Sequence[int]) -> list[int]:
    """Returns those of these ranks whose processes have ended, judged by this process's connections."""
    gone: list[int] = []
    with contextlib.suppress(RuntimeError):
        for pause in (0.0, 0.1, 0.3):  # connections do not all close at the same time
            time.sleep(pause)
            gone = gone or [rank for rank in ranks if process_groups.disconnected(rank)]
    return gone
