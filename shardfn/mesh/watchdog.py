"""The thread that looks after the waits of this process, and after those of others for it.

Once a second it looks what the threads of this process wait for, see `waiting`. A wait that is longer than `PATIENCE`
goes to the log, and to the store by which the processes met, where the other ranks read it. From what all of them wait
for it follows who can still come, see `deadlock`. A rank is given up only for what it cannot take back: it has ended,
or each of its threads that use the group waits itself for a rank that is given up. Then the group is broken, on which
the blocked thread wakes with an error. Ranks of a host that has vanished, see `liveness`, are given up by each rank
that waits for them, for itself.

With `debug(collectives=True)` ranks also say where they stand, see `callsites`: what they are about to do, the last
that they came to, and which calls they have left; who has left the call in which others wait cannot come to that.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardfn.compat import process_groups
from shardfn.debugging import debugging
from shardfn.mesh import callsites, liveness
from shardfn.mesh.deadlock import (
    State,
    Thread,
    Vain,
    advised,
    came,
    given_up,
    ranks_named,
    standing,
    waits_by_thread,
    waits_in_vain,
)
from shardfn.quoting import listed

if TYPE_CHECKING:
    from shardfn.mesh.waiting import on

PATIENCE = 5.0  # seconds until a rank that waits says what it waits for
TICK = 1.0  # seconds between two looks
PATIENCE_COMPARING, TICK_COMPARING = 1.0, 0.25  # the same while ranks compare what they are about to do

_log = logging.getLogger("shardfn")
_KEY = "shardfn/waiting/{}"
_ADDRESSES = "shardfn/addresses/{}"

waits: dict[int, on] = {}
"""What each thread waits for."""
calls: dict[int, str] = {}
"""The call of the user's that each thread is in."""
arrivals: dict[tuple[int, str], dict[tuple[str, Any], int]] = {}
"""What each thread came to, and how often, by group."""
broken_groups: dict[str, str] = {}
"""Since when a group is, in which a wait failed."""
watcher: Watcher | None = None
"""Of the world that this process is in."""
looking: dict[int, Callable[[Any], None]] = {}
"""What else the thread that looks does, once a second, with its own way to the store; by who asked for it."""


def joined() -> None:
    """This process has entered a world, whose ranks may come to wait for each other: somebody looks after them."""
    global watcher
    if dist.get_world_size() == 1 or not process_groups.between_processes():
        return
    if watcher is None:
        atexit.register(_leave)
    else:
        watcher.over = True
    _clear()
    watcher = Watcher(dist.get_rank())
    store = process_groups.default_store()
    store.set(_ADDRESSES.format(watcher.rank), json.dumps(liveness.own_addresses()))
    watcher.home = liveness.addresses_of(process_groups.host_of(store))
    threading.Thread(target=watcher.run, name="shardfn-waiting", daemon=True).start()


def _clear() -> None:
    for kept in (waits, arrivals, broken_groups):
        kept.clear()
    callsites.clear()


def _forked() -> None:
    global watcher
    watcher = None
    looking.clear()
    calls.clear()
    _clear()


os.register_at_fork(after_in_child=_forked)


def _leave() -> None:
    """The process ends: nobody should wait for it."""
    if watcher is not None and dist.is_initialized():
        watcher.over = True
        watcher.looks.acquire(timeout=TICK)  # a thread inside torch when the interpreter ends aborts the process
        failed = getattr(sys, "last_value", None)
        ended = "has ended" if failed is None else f"has failed: {type(failed).__name__}: {failed}"
        with contextlib.suppress(RuntimeError, UnicodeError):
            watcher.publish(process_groups.default_store(), 0, {}, ended[:500])


def failed(error: BaseException) -> None:
    """This rank comes to nothing any more for which others wait, though its process lives: they need not wait for it.

    Until `goes_on` says something else.
    """
    if watcher is not None and dist.is_initialized():
        watcher.ended = f"has failed: {type(error).__name__}: {error}"[:500]
        _say_now(watcher)


def _say_now(watcher: Watcher) -> None:
    """Says how this rank stands, from a thread that does not wait."""
    with watcher.looks:  # which the watching thread holds while it does the same
        watcher.publish(process_groups.default_store(), watcher.beat, {}, watcher.ended)


def goes_on() -> None:
    """This rank comes again, after it had `failed`."""
    if watcher is not None and watcher.ended:
        watcher.ended, watcher.told = "", True  # so that its next look says it


# --- what a rank tells others ---


def state_of(beat: int, stuck: dict[int, on], vain: Vain | None = None, ended: str = "") -> State:
    """What this rank tells others of itself, where these waits take long."""
    told = {"beat": beat, "ended": ended, "vain": vain or {}, "last": callsites.last(), "left": callsites.left()}
    told["broken"] = dict(broken_groups)
    if not stuck and not ended:
        return {**told, "threads": None, "counts": {}}
    main, alive = threading.main_thread().ident, set(sys._current_frames())
    used: dict[int, list[str]] = {main or 0: []}
    counts: dict[str, dict[str, int]] = {}
    for (thread, group), each in list(arrivals.items()):
        if thread in alive:
            used.setdefault(thread, []).append(group)
        total = counts.setdefault(group, {})
        for (what, of), n in list(each.items()):
            total[f"{what} {of}"] = total.get(f"{what} {of}", 0) + n
    threads = [
        {"thread": thread, "main": thread == main, "used": groups, "wait": _wait(thread, stuck.get(thread))}
        for thread, groups in used.items()
    ]
    return {**told, "threads": threads, "counts": counts}


def _wait(thread: int, wait: on | None) -> dict[str, Any] | None:
    if wait is None:
        return None
    here = callsites.reaching.get(thread)
    return {
        "group": wait.group,
        "ranks": ranks_of(wait),
        "told": text_of(wait, thread),
        "key": wait.key,
        "count": wait.count,
        "sided": wait.sided,
        "first": sum(arrivals.get((thread, wait.group), {}).values()) < 2,
        "place": None if here is None else [here.group, here.number, here.inside],
    }


def text_of(wait: on, thread: int) -> str:
    """What a thread waits for, in words for others."""
    call, here = calls.get(thread), callsites.reaching.get(thread)
    what = str(wait) if here is None else here.text
    return f"{what} in {call}" if call else what


def ranks_of(wait: on) -> list[int]:
    """Those that a wait is for."""
    return list(dist.get_process_group_ranks(process_groups.group_of(wait.group)) if wait.ranks is None else wait.ranks)


def read_states(store: Any, ranks: Iterable[int]) -> dict[int, State]:
    """What these ranks have told, if they have."""
    return {rank: json.loads(text) for rank, text in _texts(store, _KEY, ranks).items()}


def _texts(store: Any, key: str, ranks: Iterable[int]) -> dict[int, bytes]:
    """What each of these ranks has set under a key, if it has."""
    there = [rank for rank in ranks if store.check([key.format(rank)])]
    return dict(zip(there, store.multi_get([key.format(rank) for rank in there]) if there else [], strict=True))


STAYS = ". It stays so: end the processes, and begin again from a checkpoint"


def since_when(wait: on, since: str) -> str:
    """What to say of a wait in a group that is broken."""
    return f"{wait}: its group is broken since {since}{STAYS}"


def pass_on(heard: Sequence[Vain]) -> None:
    """Who waits for this rank in vain, as others have found, hears it before this rank goes on."""
    if watcher is not None and (broken := set().union(*map(watcher.hear, heard))):
        _say_now(watcher)
        _break(broken)


# --- the thread that looks ---


def _pace() -> tuple[float, float]:
    """Seconds until a rank says what it waits for, and between two looks."""
    if debugging.collectives:
        return min(PATIENCE, PATIENCE_COMPARING), min(TICK, TICK_COMPARING)
    return PATIENCE, TICK


@dataclass
class Watcher:
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
        """Looks until it is over."""
        while not self.over:
            time.sleep(_pace()[1])
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
        now, current = time.monotonic(), dict(waits)
        since = {}
        for thread, wait in current.items():
            seen = self.since.get(thread)
            since[thread] = seen if seen is not None and seen[0]() is wait else (weakref.ref(wait), now)
        self.since = since
        patience, tick = _pace()
        stuck = {thread: wait for thread, wait in current.items() if now - since[thread][1] >= patience}
        self.spoke = {thread: when for thread, when in self.spoke.items() if thread in stuck}
        if any(now - began >= tick for _, began in since.values()) and self.vanished(stuck):
            return
        if stuck or self.told or self.stands != (callsites.last(), callsites.left()):
            self.tell(stuck)
        if stuck and self.beat % (1 + dist.get_world_size() // 64) == 0:
            self.think(stuck, now)

    def vanished(self, stuck: dict[int, on]) -> bool:
        """Gives up what waits for a host that does not answer any more; whether the store cannot be asked now."""
        quiet = liveness.quiet_hosts(liveness.readings())
        gone = {address for address, seconds in quiet.items() if seconds >= liveness.SILENCE} if stuck else set()
        unreachable = bool(self.home & quiet.keys())
        if self.home & gone:
            self.hang_up(self.home & gone, "the host of the store by which the ranks have met", quiet, stuck)
        elif gone and not unreachable:
            ranks = sorted({rank for wait in stuck.values() for rank in ranks_of(wait)} - {self.rank})
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
                    f"rank {self.rank} waited in vain for {text_of(wait, thread)}: {said}. "
                    f"It has gone, or the network between has"
                )
                _log.error("%s", wait.verdict)
        liveness.hang_up(lost)
        for group in {wait.group for wait in stuck.values() if wait.ranks is None}:
            process_groups.break_group(process_groups.group_of(group))

    def reach(self) -> Any:
        """This thread's own way to the store."""
        if self.store is None:
            self.store = process_groups.default_store().clone()
        return self.store

    def tell(self, stuck: dict[int, on]) -> None:
        """Says how this rank stands, with these waits."""
        self.reach()
        self.beat += 1
        self.told, self.stands = bool(stuck), (callsites.last(), callsites.left())
        self.publish(self.store, self.beat, stuck, self.ended)

    def publish(self, store: Any, beat: int, stuck: dict[int, on], ended: str) -> None:
        """Sets what others read of this rank."""
        store.set(_KEY.format(self.rank), json.dumps(state_of(beat, stuck, self.vain, ended)))

    def think(self, stuck: dict[int, on], now: float) -> None:
        """Gives up waits that are in vain, as this rank or another finds; of others it speaks in the log."""
        states = self.reached(stuck)
        found = waits_in_vain(states)
        if self.sure(found, states):
            self.vain = given_up(found, states)
        heard = [state["vain"].get(str(self.rank)) for state in states.values()]
        for thread, wait in stuck.items():
            mine = wait.group, wait.key, wait.count
            known = [
                told
                for told, *those in filter(None, [self.vain.get(str(self.rank)), *heard])
                if [thread, *mine] in those
            ]
            known = [advised(told) for told in known] + [
                since_when(wait, broken_groups.setdefault(wait.group, state["broken"][wait.group]))
                for state in states.values()
                if wait.ranks is None and wait.group in state["broken"]
            ]
            if known and not wait.verdict and waits.get(thread) is wait:
                wait.verdict = known[0]
                self.give_up(wait, stuck)
            elif now >= self.spoke.get(thread, 0):
                waited = now - self.since[thread][1]
                self.spoke[thread] = now + 2 * waited
                late = [r for r in ranks_of(wait) if r != self.rank and not (r in states and came(states[r], *mine))]
                said = standing(late, states, _wait(thread, wait)) if late else "all have come, and it has not arrived"
                more = f". {wait.note}" if wait.note else ""
                what = text_of(wait, thread)
                _log.warning("rank %d has waited %.1f s for %s: %s%s", self.rank, waited, what, said, more)

    def reached(self, stuck: dict[int, on], also: Iterable[int] = ()) -> dict[int, State]:
        """What this rank, those that it waits for, those that they wait for, ... and some others have told."""
        states: dict[int, State] = {self.rank: json.loads(json.dumps(state_of(self.beat, stuck, self.vain)))}
        wanted = {*also, *(rank for wait in stuck.values() for rank in ranks_of(wait))} - states.keys()
        while wanted:
            more = read_states(self.store, sorted(wanted))
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
        described = waits_by_thread(states)
        now = sorted((*who, *(described[who][name] for name in ("group", "key", "count"))) for who in found)
        beats = {rank: states[rank]["beat"] for rank, _ in found}
        if self.suspects[0] != now:
            self.suspects = now, beats
        return bool(now) and all(beats[rank] >= before + 2 for rank, before in self.suspects[1].items())

    def give_up(self, wait: on, stuck: dict[int, on]) -> None:
        """Wakes the thread that is blocked in a wait, with an error."""
        used = {group for _, group in list(arrivals)}
        ranks = [dist.get_process_group_ranks(group) for group in map(_made, used) if group is not None]
        states = self.reached(stuck, set().union(*ranks))
        broken = self.hear(given_up(waits_in_vain(states), states))
        if wait.ranks is None:
            broken |= {wait.group}
            broken_groups.setdefault(wait.group, wait.verdict)
        self.tell(stuck)
        _log.error("%s", wait.verdict)
        _break(broken)

    def hear(self, vain: Vain) -> set[str]:
        """Takes for broken, and returns, the groups of this rank in which some wait in vain, for it perhaps.

        What it would come to there next is not what they wait for.
        """
        self.vain = {**vain, **self.vain}
        found = {name: told for told, *waits in vain.values() for _, name, *_ in waits if _made(name) is not None}
        new = found.keys() - broken_groups.keys()
        broken_groups.update({name: found[name] for name in new})
        return new


def _made(group: str) -> Any:
    """The process group of this name, if this process has it."""
    try:
        return process_groups.group_of(group)
    except (LookupError, RuntimeError, ValueError):
        return None


def _break(groups: Iterable[str]) -> None:
    for name in groups:
        process_groups.break_group(process_groups.group_of(name))
