"""Ranks that wait for each other in vain find out, and say so.

Whoever is about to block until other ranks come says it first: `with on("all_gather", group, stage): work.wait()`. One
thread in each process looks once a second. A wait that is longer than `PATIENCE` goes to the log, and to the store by
which the processes met, where the other ranks read it. From what all of them wait for it follows who can still
come. A rank is given up only for what it cannot take back: it has ended, or each of its threads that use the group
waits itself for a rank that is given up. Then the group is broken, on which the blocked thread wakes with an error.
Ranks of a host that has vanished, see `silence`, are given up by each rank that waits for them, for itself.

A rank that computes is waited for without end, and so is one that waits for something which was not announced here.

With `debug(collectives=True)` ranks also say where they stand, see `positions`: what they are about to do, the last
that they came to, and which calls they have left; who has left the call in which others wait cannot come to that.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch.distributed as dist

from shardfn.compat import process_groups
from shardfn.debugging import debugging
from shardfn.mesh import positions, silence
from shardfn.mesh.verdict import (
    CALL,
    SHOWN,
    State,
    Thread,
    Vain,
    advised,
    came,
    given_up,
    ranks_named,
    standing,
    waits_in_vain,
)
from shardfn.quoting import listed

PATIENCE = 5.0  # seconds until a rank that waits says what it waits for
TICK = 1.0  # seconds between two looks
PATIENCE_COMPARING, TICK_COMPARING = 1.0, 0.25  # the same while ranks compare what they are about to do
MOST_KINDS = 4096  # that are counted of one group

_log = logging.getLogger("shardfn")
_KEY = "shardfn/waiting/{}"
_ADDRESSES = "shardfn/addresses/{}"


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
    """

    __slots__ = (
        "__weakref__", "_before", "_outer", "count", "group", "note", "of", "ranks", "sided", "verdict", "what",
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
        before = self._before = _waits.get(me)
        if before is not None and before.group == self.group and (before.of != "" or self.of == ""):
            self._outer = True
            return self  # the outer one says more, and is what other ranks are compared by
        self._outer = False
        counts = _counts.get((me, self.group))
        if counts is None or len(counts) > MOST_KINDS:
            counts = _counts[(me, self.group)] = {}
        key = (self.what, self.of)
        self.count = counts[key] = counts.get(key, 0) + 1
        self.verdict = ""
        _waits[me] = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if self._outer:
            return
        before = self._before
        if before is None:
            _waits.pop(get_ident(), None)
        else:
            _waits[get_ident()] = before
        if isinstance(error, RuntimeError) and (told := _failed(self, error)) is not error:
            raise told from None  # what the backend says of it is in there, and comes after

    @property
    def nested(self) -> bool:
        """Whether it is a part of another one of the same group, which says more."""
        return self._outer

    def __str__(self) -> str:
        of = f" of {self.of!r}" if self.of != "" else ""
        along = named(self.group)
        return f"{self.what}{of}{f' over {along}' if along else ''}"


@contextlib.contextmanager
def during(call: str) -> Iterator[None]:
    """What this thread waits for is a part of this call of the user's, `"sf.unshard"` say: messages name it."""
    me = get_ident()
    own = me not in _calls
    if own:
        _calls[me] = f"{call}, called at {positions.caller()}" if debugging.collectives else call
    try:
        yield
    finally:
        if own:
            _calls.pop(me, None)


_calls: dict[int, str] = {}  # of the user's, by thread
_waits: dict[int, on] = {}  # by thread
_counts: dict[tuple[int, str], dict[tuple[str, Any], int]] = {}  # what each thread came to, by group
_along: dict[str, str] = {}  # the axes along which a group runs
_watcher: _Watcher | None = None
looking: dict[int, Callable[[Any], None]] = {}
"""What else the thread that looks does, once a second, with its own way to the store; by who asked for it."""


def along(group: str, axes: str) -> None:
    """Messages call a group by these axes."""
    _along[group] = axes


def named(group: str) -> str:
    """The axes by which messages call a group; empty if nobody has said them."""
    return _along.get(group, "")


def _patience() -> float:
    return min(PATIENCE, PATIENCE_COMPARING) if debugging.collectives else PATIENCE


def _tick() -> float:
    return min(TICK, TICK_COMPARING) if debugging.collectives else TICK


def joined() -> None:
    """This process has entered a world, whose ranks may come to wait for each other: somebody looks after them."""
    global _watcher
    if dist.get_world_size() == 1 or not process_groups.between_processes():
        return
    if _watcher is None:
        atexit.register(_leave)
    else:
        _watcher.over = True
    _waits.clear()
    _counts.clear()
    positions.clear()
    _watcher = _Watcher(dist.get_rank())
    store = process_groups.default_store()
    store.set(_ADDRESSES.format(_watcher.rank), json.dumps(silence.own_addresses()))
    _watcher.home = silence.addresses_of(process_groups.host_of(store))
    threading.Thread(target=_watcher.run, name="shardfn-waiting", daemon=True).start()


def release(groups: Iterable[str], told: str) -> None:
    """Waits in these groups, and for groups to be made, are in vain: who is woken says so."""
    names, me = set(groups), get_ident()
    for thread, wait in list(_waits.items()):
        if thread != me and not wait.verdict and (wait.group in names or wait.group.startswith("meeting ")):
            wait.verdict = told


def forget(groups: Iterable[str]) -> None:
    """What was waited for in these groups is over, on all their ranks, however often each of them came to it."""
    names = set(groups)
    for key in [key for key in list(_counts) if key[1] in names or key[1].startswith("meeting ")]:
        _counts.pop(key, None)
    positions.forget(names)


def _forked() -> None:
    global _watcher
    _watcher = None
    looking.clear()
    _waits.clear()
    _calls.clear()
    _counts.clear()
    positions.clear()


os.register_at_fork(after_in_child=_forked)


def _leave() -> None:
    """The process ends: nobody should wait for it."""
    if _watcher is not None and dist.is_initialized():
        _watcher.over = True
        _watcher.looks.acquire(timeout=TICK)  # a thread inside torch when the interpreter ends aborts the process
        failed = getattr(sys, "last_value", None)
        ended = "has ended" if failed is None else f"has failed: {type(failed).__name__}: {failed}"
        with contextlib.suppress(RuntimeError, UnicodeError):
            process_groups.default_store().set(
                _KEY.format(_watcher.rank), json.dumps(_state(0, {}, _watcher.vain, ended[:500]))
            )


def failed(error: BaseException) -> None:
    """This rank comes to nothing any more for which others wait, though its process lives: they need not wait for it.

    Until `goes_on` says something else.
    """
    if _watcher is not None and dist.is_initialized():
        with _watcher.looks:
            _watcher.ended = f"has failed: {type(error).__name__}: {error}"[:500]
            state = _state(_watcher.beat, {}, _watcher.vain, _watcher.ended)
            process_groups.default_store().set(_KEY.format(_watcher.rank), json.dumps(state))


def goes_on() -> None:
    """This rank comes again, after it had `failed`."""
    if _watcher is not None and _watcher.ended:
        _watcher.ended, _watcher.told = "", True  # so that its next look says it


def meet(name: str, ranks: Sequence[int], what: str, of: str) -> None:
    """Waits until all of these ranks have come to the same place, by way of the store.

    Raises:
        RuntimeError: some rank cannot come any more, or did not within the world's timeout.
    """
    store, limit = (
        process_groups.default_store(),
        time.monotonic() + process_groups.default_store().timeout.total_seconds(),
    )
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
    end, pause = time.monotonic() + min(TICK, 0.5), 0.001
    while not store.check(keys):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause *= 2
    return True


# --- what a rank publishes ---


def _state(beat: int, stuck: dict[int, on], vain: Vain | None = None, ended: str = "") -> State:
    told = {"beat": beat, "ended": ended, "vain": vain or {}, "last": positions.last(), "left": positions.left()}
    if not stuck and not ended:
        return {**told, "threads": None, "counts": {}}
    main, alive = threading.main_thread().ident, set(sys._current_frames())
    used: dict[int, list[str]] = {main or 0: []}
    counts: dict[str, dict[str, int]] = {}
    for (thread, group), each in list(_counts.items()):
        if thread in alive:
            used.setdefault(thread, []).append(group)
        total = counts.setdefault(group, {})
        for key, n in list(each.items()):
            total[_key(*key)] = total.get(_key(*key), 0) + n
    threads = [
        {"thread": thread, "main": thread == main, "used": groups, "wait": _wait(thread, stuck.get(thread))}
        for thread, groups in used.items()
    ]
    return {**told, "threads": threads, "counts": counts}


def _key(what: str, of: Any) -> str:
    return f"{what} {of}"


def _wait(thread: int, wait: on | None) -> dict[str, Any] | None:
    if wait is None:
        return None
    return {
        "group": wait.group,
        "ranks": _ranks(wait),
        "told": _named_wait(wait, thread),
        "key": _key(wait.what, wait.of),
        "count": wait.count,
        "sided": wait.sided,
        "first": sum(_counts.get((thread, wait.group), {}).values()) < 2,
        "place": _place(thread),
    }


def _place(thread: int) -> list[Any] | None:
    here = positions.reaching.get(thread)
    return [here.group, here.number, here.inside] if here is not None else None


def _named_wait(wait: on, thread: int) -> str:
    call, here = _calls.get(thread), positions.reaching.get(thread)
    what = str(wait) if here is None else here.text
    return f"{what} in {call}" if call else what


def _ranks(wait: on) -> list[int]:
    return list(dist.get_process_group_ranks(process_groups.group_of(wait.group)) if wait.ranks is None else wait.ranks)


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
    if _watcher is None or " in vain for " in str(error) or not _BROKEN.search(str(error)):
        return error
    given_up_here, *those = _watcher.vain.get(str(_watcher.rank), [""])
    if any(wait.group == group for _, group, *_ in those):
        return RuntimeError(advised(given_up_here))
    states: dict[int, State] = {}
    others: list[int] = []
    silently = ""
    with contextlib.suppress(Exception):  # the store may have gone with a rank
        others = [rank for rank in _ranks(wait) if rank != _watcher.rank][:64]
        states = _read(process_groups.default_store(), others)
        silently = " without a word"
    for state in states.values():
        if str(_watcher.rank) in state["vain"]:
            return RuntimeError(advised(state["vain"][str(_watcher.rank)][0]))
    known = [rank for rank, state in states.items() if state["ended"] or state["vain"] or state["threads"]]
    spoke = [rank for rank, state in states.items() if state["ended"] or state["vain"]]
    gone = [] if spoke else _gone(others)
    told = f"rank {_watcher.rank} waited in vain for {_named_wait(wait, get_ident())}"
    if known and not gone:
        return RuntimeError(advised(f"{told}: {standing(known, states)}"))
    who = f"{ranks_named(gone)} {'has' if len(gone) == 1 else 'have'}" if gone else "a rank has"
    after = f", after {positions.last()}" if positions.last() else ""
    return RuntimeError(f"{told}: {who} ended{silently}{after}; look at its output first ({brief(error)})")


def _gone(ranks: Sequence[int]) -> list[int]:
    """Those of these ranks whose processes have ended, as far as this one's connections tell."""
    gone: list[int] = []
    with contextlib.suppress(RuntimeError):
        for pause in (0.0, 0.1, 0.3):  # one connection may be closed sooner than another
            time.sleep(pause)
            gone = gone or [rank for rank in ranks if process_groups.disconnected(rank)]
    return gone


def _read(store: Any, ranks: Iterable[int]) -> dict[int, State]:
    return {rank: json.loads(text) for rank, text in _texts(store, _KEY, ranks).items()}


def _texts(store: Any, key: str, ranks: Iterable[int]) -> dict[int, bytes]:
    """What each of these ranks has set under a key, if it has."""
    there = [rank for rank in ranks if store.check([key.format(rank)])]
    return dict(zip(there, store.multi_get([key.format(rank) for rank in there]) if there else [], strict=True))


def _stands() -> tuple[str, Any]:
    return positions.last(), positions.left()


# --- the thread that looks ---


@dataclass
class _Watcher:
    """What looks after the waits of this process in one world.

    Attributes:
        rank: of this process.
        over: whether it is to end.
        beat: how often it has published how it stands.
        since: each thread's wait, and when it was first seen.
        spoke: when that was last in the log.
        told: whether others may believe that this rank waits.
        stands: what else they believe.
        ended: why it comes to nothing any more; empty if it may.
        vain: what was given up.
        suspects: the waits that seem to be in vain, with the beat of each rank when they first did.
        store: this thread's own way to the store: one that is used by a blocked thread is blocked, too.
        home: the addresses of the host that has the store.
        looks: is held while it looks.
    """

    rank: int
    over: bool = False
    beat: int = 0
    since: dict[int, tuple[weakref.ref[on], float]] = field(default_factory=dict)
    spoke: dict[int, float] = field(default_factory=dict)
    told: bool = False
    stands: Any = ("", {})
    ended: str = ""
    vain: Vain = field(default_factory=dict)
    suspects: tuple[Any, dict[int, int]] = ((), {})
    store: Any = None
    home: frozenset[str] = frozenset()
    looks: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        while not self.over:
            time.sleep(_tick())
            try:
                with self.looks:
                    if not self.over and dist.is_initialized():
                        self.look()
            except Exception as error:  # the world may end meanwhile
                _log.debug("looking after waits: %s", error)

    def look(self) -> None:
        """Tells the others what this rank waits for, and looks what they do."""
        for each in list(looking.values()):
            each(self.reach())
        now, waits = time.monotonic(), dict(_waits)
        since = {}
        for thread, wait in waits.items():
            seen = self.since.get(thread)
            since[thread] = seen if seen is not None and seen[0]() is wait else (weakref.ref(wait), now)
        self.since = since
        stuck = {thread: wait for thread, wait in waits.items() if now - since[thread][1] >= _patience()}
        self.spoke = {thread: when for thread, when in self.spoke.items() if thread in stuck}
        if any(now - began >= _tick() for _, began in since.values()) and self.vanished(stuck):
            return
        if stuck or self.told or self.stands != _stands():
            self.tell(stuck)
        if stuck and self.beat % (1 + dist.get_world_size() // 64) == 0:
            self.think(stuck, now)

    def vanished(self, stuck: dict[int, on]) -> bool:
        """Gives up what waits for a host that does not answer any more; whether the store cannot be asked now."""
        quiet = silence.quiet_hosts(silence.readings())
        gone = {address for address, seconds in quiet.items() if seconds >= silence.SILENCE} if stuck else set()
        unreachable = bool(self.home & quiet.keys())
        if self.home & gone:
            self.hang_up(self.home & gone, "the host of the store by which the ranks have met", quiet, stuck)
        elif gone and not unreachable:
            ranks = sorted({rank for wait in stuck.values() for rank in _ranks(wait)} - {self.rank})
            away = {rank: there & gone for rank, there in self.addresses(ranks).items() if there & gone}
            if away:
                self.hang_up(set().union(*away.values()), f"the host of {ranks_named([*away])}", quiet, stuck)
        return unreachable

    def addresses(self, ranks: list[int]) -> dict[int, set[str]]:
        """Those by which ranks are connected to others."""
        return {rank: set(json.loads(text)) for rank, text in _texts(self.reach(), _ADDRESSES, ranks).items()}

    def hang_up(self, lost: Set[str], whose: str, quiet: dict[str, float], stuck: dict[int, on]) -> None:
        """Wakes the threads that wait, with an error, and ends what connects this process to these hosts."""
        said = f"{whose}, {listed(sorted(lost))}, has not answered for {min(quiet[one] for one in lost):.0f} s"
        for thread, wait in stuck.items():
            if not wait.verdict:
                wait.verdict = (
                    f"rank {self.rank} waited in vain for {_named_wait(wait, thread)}: {said}. "
                    f"It has gone, or the network between has"
                )
                _log.error("%s", wait.verdict)
        silence.hang_up(lost)
        for group in {wait.group for wait in stuck.values() if wait.ranks is None}:
            process_groups.break_group(process_groups.group_of(group))

    def reach(self) -> Any:
        """This thread's own way to the store."""
        if self.store is None:
            self.store = process_groups.default_store().clone()
        return self.store

    def tell(self, stuck: dict[int, on]) -> None:
        self.reach()
        self.beat += 1
        self.told, self.stands = bool(stuck), _stands()
        self.store.set(_KEY.format(self.rank), json.dumps(_state(self.beat, stuck, self.vain, self.ended)))

    def think(self, stuck: dict[int, on], now: float) -> None:
        states = self.reached(stuck)
        found = waits_in_vain(states)
        if self.sure(found, states):
            self.vain = given_up(found, states)
        heard = [state["vain"].get(str(self.rank)) for state in states.values()]
        for thread, wait in stuck.items():
            mine = wait.group, _key(wait.what, wait.of), wait.count
            known = [
                told
                for told, *those in filter(None, [self.vain.get(str(self.rank)), *heard])
                if [thread, *mine] in those
            ]
            if known and not wait.verdict and _waits.get(thread) is wait:
                wait.verdict = advised(known[0])
                self.give_up(wait, stuck)
            elif now >= self.spoke.get(thread, 0):
                waited = now - self.since[thread][1]
                self.spoke[thread] = now + 2 * waited
                late = [r for r in _ranks(wait) if r != self.rank and not (r in states and came(states[r], *mine))]
                said = standing(late, states, _wait(thread, wait)) if late else "all have come, and it has not arrived"
                more = f". {wait.note}" if wait.note else ""
                what = _named_wait(wait, thread)
                _log.warning("rank %d has waited %.1f s for %s: %s%s", self.rank, waited, what, said, more)

    def reached(self, stuck: dict[int, on]) -> dict[int, State]:
        """What this rank, those that it waits for, those that they wait for, ... have told."""
        states: dict[int, State] = {self.rank: json.loads(json.dumps(_state(self.beat, stuck, self.vain)))}
        wanted = {rank for wait in stuck.values() for rank in _ranks(wait)} - states.keys()
        while wanted:
            more = _read(self.store, sorted(wanted))
            states |= more
            wanted = {
                rank
                for state in more.values()
                for thread in state["threads"] or ()
                if thread["wait"]
                for rank in thread["wait"]["ranks"]
            } - states.keys()
            if not more:
                break
        return states

    def sure(self, found: dict[Thread, list[int]], states: dict[int, State]) -> bool:
        """Whether all who wait in vain were seen to do so, at one time, and again some time later."""
        waits = {
            (rank, thread["thread"]): thread["wait"] for rank, s in states.items() for thread in s["threads"] or ()
        }
        now = sorted((*who, waits[who]["group"], waits[who]["key"], waits[who]["count"]) for who in found)
        beats = {rank: states[rank]["beat"] for rank, _ in found}
        if self.suspects[0] != now:
            self.suspects = now, beats
        return bool(now) and all(beats[rank] >= before + 2 for rank, before in self.suspects[1].items())

    def give_up(self, wait: on, stuck: dict[int, on]) -> None:
        """Wakes the thread that is blocked in a wait, with an error."""
        self.tell(stuck)
        _log.error("%s", wait.verdict)
        if wait.ranks is None:
            process_groups.break_group(process_groups.group_of(wait.group))
