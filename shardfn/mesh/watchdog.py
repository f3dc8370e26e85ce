"""The thread that watches this process's waits for other ranks, and other ranks' waits for this process.

Every tick it checks what the threads of this process wait for, see `waiting`. A wait longer than `PATIENCE` goes to the
log, and to the store through which the processes met, where other ranks read it. From all these waits follows who can
still come, see `deadlock`. A rank is given up only if that is final: it has ended, or each of its threads that use the
group waits for a rank that is given up. The group is then broken, so that the blocked thread wakes with an error. If a
host has vanished, see `liveness`, each rank that waits for its ranks gives them up on its own. A killed process
publishes nothing: a rank of its host that waits for it does so in its place. It may have done its part before, so it
counts as lost only once all others have come. If a thread that waits for such a rank does not wake, the process ends,
since nothing else would end the wait.

With `debug(collectives=True)` ranks also publish where they stand, see `comparisons`: their next operation, the last
one that all reached, and the calls that they have left. A rank that has left a call can no longer come to what others
wait for in that call.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
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

from shardfn import callers
from shardfn.compat import process_groups
from shardfn.debugging import debugging
from shardfn.mesh import comparisons, liveness
from shardfn.mesh.deadlock import (
    BARRIER,
    State,
    Thread,
    Vain,
    advice,
    advised,
    came,
    given_up,
    ranks_named,
    standing,
    waits_by_thread,
    waits_in_vain,
)
from shardfn.quoting import listed, short

if TYPE_CHECKING:
    from shardfn.mesh.waiting import on

PATIENCE = 5.0  # seconds after which a rank publishes and logs what it waits for
WAKING = 10.0  # seconds in which a thread must wake that waited for a rank whose process has ended
STARTING = 6  # times as long until it logs that it waits for others to begin, or to compile
STARTS = "A rank that still imports modules or loads data comes later"
COMPILES = "One process of a host compiles at a time, which takes minutes"
TICK = 1.0  # seconds between two checks
PATIENCE_COMPARING, TICK_COMPARING = 1.0, 0.25  # the same while ranks compare what they are about to do

_log = logging.getLogger("shardfn")
_IN_BARRIER = inspect.unwrap(dist.barrier).__code__
_KEY = "shardfn/waiting/{}"
_ADDRESSES = "shardfn/addresses/{}"
_PROCESS = "shardfn/process/{}"

waits: dict[int, on] = {}
"""What each thread waits for."""
calls: dict[int, str] = {}
"""The user's call that each thread is in."""
arrivals: dict[tuple[int, str], dict[tuple[str, Any], int]] = {}
"""By thread and group: how often the thread has come to each kind of wait."""
broken_groups: dict[str, str] = {}
"""Group -> the failed wait that broke it."""
watcher: Watcher | None = None
"""The watcher of this process's world; None in a world of one process."""
wait_of: type[on] | None = None
"""`waiting.on`, which that module puts here, as it imports this one."""
looking: dict[int, Callable[[Any], None]] = {}
"""Callbacks that the watching thread runs every tick with its own store client, by the id of who registered them."""


def joined() -> None:
    """Starts a watcher for the world that this process has joined, if it has several processes."""
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
    store.set(_PROCESS.format(watcher.rank), liveness.own_process())
    watcher.home = liveness.addresses_of(process_groups.host_of(store))
    threading.Thread(target=watcher.run, name="shardfn-waiting", daemon=True).start()


def _clear() -> None:
    for state in (waits, arrivals, broken_groups):
        state.clear()
    comparisons.clear()


def _forked() -> None:
    global watcher
    watcher = None
    looking.clear()
    calls.clear()
    _clear()


os.register_at_fork(after_in_child=_forked)


def _leave() -> None:
    """Publishes that this process ends, so that nobody goes on waiting for it."""
    if watcher is not None and dist.is_initialized():
        watcher.over = True
        watcher.looks.acquire(timeout=TICK)  # a thread inside torch when the interpreter ends aborts the process
        error = getattr(sys, "last_value", None)
        # An error that the program caught before it left is still why this rank comes to nothing more.
        outcome = watcher.ended or "has ended" if error is None else f"has failed: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError, UnicodeError):
            watcher.publish(process_groups.default_store(), 0, {}, outcome[:500])


def failed(error: BaseException) -> None:
    """Publishes that this rank comes to no further waits, although its process lives.

    Others then stop waiting for it, until `goes_on`.
    """
    if watcher is not None and dist.is_initialized():
        watcher.ended = f"has failed: {type(error).__name__}: {error}"[:500]
        _say_now(watcher)


def _say_now(watcher: Watcher) -> None:
    """Publishes this rank's state at once, from a thread that does not wait."""
    with watcher.looks:  # the watching thread holds it while it publishes
        watcher.publish(process_groups.default_store(), watcher.beat, {}, watcher.ended)


def goes_on() -> None:
    """Takes back `failed`: this rank comes to waits again."""
    if watcher is not None and watcher.ended:
        watcher.ended, watcher.told = "", True  # makes the next check publish it


# --- the state that a rank publishes ---


def state_of(beat: int, stuck: dict[int, on], vain: Vain | None = None, ended: str = "") -> State:
    """Returns the state that this rank publishes, with the waits that take long."""
    state = {"beat": beat, "ended": ended, "vain": vain or {}, "last": comparisons.last(), "left": comparisons.left()}
    state["broken"] = dict(broken_groups)
    if not stuck and not ended:
        return {**state, "threads": None, "counts": {}}
    main, alive = threading.main_thread().ident, set(sys._current_frames())
    used: dict[int, list[str]] = {main or 0: []}
    counts: dict[str, dict[str, int]] = {}
    for (thread, group), kinds in list(arrivals.items()):
        if thread in alive:
            used.setdefault(thread, []).append(group)
        totals = counts.setdefault(group, {})
        for (operation, caller), n in list(kinds.items()):
            totals[f"{operation} {caller}"] = totals.get(f"{operation} {caller}", 0) + n
    threads = [
        {"thread": thread, "main": thread == main, "used": groups, "wait": _wait(thread, stuck.get(thread))}
        for thread, groups in used.items()
    ]
    for wait in stuck.values():
        counts.setdefault(wait.group, {}).setdefault(wait.key, wait.count)  # a barrier is not among the arrivals
    return {**state, "threads": threads, "counts": counts}


def _wait(thread: int, wait: on | None) -> dict[str, Any] | None:
    if wait is None:
        return None
    place, text = comparisons.reaching.get(thread), text_of(wait, thread)
    return {
        "group": wait.group,
        "ranks": ranks_of(wait),
        "told": text,
        "where": "" if "called at" in text else callers.of_thread(thread),
        "note": "" if wait.note in (STARTS, COMPILES) else short(wait.note, 640),
        "key": wait.key,
        "count": wait.count,
        "sided": wait.sided,
        "first": sum(arrivals.get((thread, wait.group), {}).values()) < 2,
        "place": None if place is None else [place.group, place.number, place.inside],
    }


def text_of(wait: on, thread: int) -> str:
    """Describes what a thread waits for, with the user's call."""
    call, place = calls.get(thread), comparisons.reaching.get(thread)
    text = str(wait) if place is None else place.text
    return f"{text} in {call}" if call else text


def ranks_of(wait: on) -> list[int]:
    """Returns the ranks that a wait needs."""
    return list(dist.get_process_group_ranks(process_groups.group_of(wait.group)) if wait.ranks is None else wait.ranks)


def read_states(store: Any, ranks: Iterable[int]) -> dict[int, State]:
    """Returns the published states of these ranks, of those that have published any."""
    return {rank: json.loads(text) for rank, text in _texts(store, _KEY, ranks).items()}


def _texts(store: Any, key: str, ranks: Iterable[int]) -> dict[int, bytes]:
    """Returns the texts under a key of those ranks that have set one."""
    present = [rank for rank in ranks if store.check([key.format(rank)])]
    return dict(zip(present, store.multi_get([key.format(rank) for rank in present]) if present else [], strict=True))


KILLED = "ended without an error message (killed, out of memory, or crashed)"
STAYS = ". It stays broken: end the processes, and begin again from a checkpoint"


def since_when(wait: on, since: str) -> str:
    """Describes a wait in a group that is broken."""
    return f"{wait}: its group has been broken since {since}{STAYS}"


def pass_on(reports: Sequence[Vain]) -> None:
    """Before this rank goes on, passes on what other ranks have found about hopeless waits, and breaks those groups."""
    if watcher is not None and (broken := set().union(*map(watcher.hear, reports))):
        _say_now(watcher)
        _break(broken)


# --- the watching thread ---


def _pace() -> tuple[float, float]:
    """Returns the seconds after which a rank publishes a wait, and the seconds between two checks."""
    if debugging.collectives:
        return min(PATIENCE, PATIENCE_COMPARING), min(TICK, TICK_COMPARING)
    return PATIENCE, TICK


@dataclass
class Watcher:
    """Watches the waits of this process in one world.

    Attributes:
        rank: of this process.
        over: whether the thread is to end.
        beat: how often it has published its state.
        since: each thread's wait, and when it was first seen.
        spoke: when each thread's wait may be logged again.
        told: whether the last published state has waits.
        stands: the last place and the left calls that were published last.
        ended: why this rank comes to no further waits; empty if it may.
        vain: waits that were given up.
        suspects: the waits that seem hopeless, with the beat of each rank when they first did.
        store: the thread's own client of the store: a client that a blocked thread uses is blocked for all threads.
        home: the addresses of the host that serves the store.
        server: rank 0's process, if it serves the store.
        processes: the processes of ranks that this one has waited for, see `liveness.own_process`.
        dead: the ranks whose processes have ended.
        barrier: the main thread's wait in a barrier of the program's own; None if it is in none.
        came: how often the main thread had arrived at any wait, when last looked.
        given: the waits for a dead rank that were given up, by thread: where it was then, and the checks since.
        looks: held during a check.
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
    server: str = ""
    processes: dict[int, bytes] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    barrier: on | None = None
    came: int = -1
    given: dict[int, tuple[on, Any, int]] = field(default_factory=dict)
    looks: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Checks at every tick until it is over."""
        while not self.over:
            time.sleep(_pace()[1])
            try:
                with self.looks:
                    if not self.over and dist.is_initialized():
                        self.look()
            except Exception as error:  # the world may end during a check
                _log.debug("looking after waits: %s", error)

    def look(self) -> None:
        """Publishes what this rank waits for, and checks what the others do."""
        for callback in list(looking.values()):
            callback(self.reach())
        current_time, current_waits = time.monotonic(), waits | self.in_barrier()
        since = {}
        for thread, wait in current_waits.items():
            known = self.since.get(thread)
            since[thread] = known if known is not None and known[0]() is wait else (weakref.ref(wait), current_time)
        self.since = since
        self.leave_the_deaf()
        patience, tick = _pace()
        stuck = {thread: wait for thread, wait in current_waits.items() if current_time - since[thread][1] >= patience}
        if stuck and self.bereft(stuck, current_time):
            return
        self.spoke = {thread: when for thread, when in self.spoke.items() if thread in stuck}
        if any(current_time - began >= tick for _, began in since.values()) and self.vanished(stuck):
            return
        if stuck or self.told or self.stands != (comparisons.last(), comparisons.left()):
            self.tell(stuck)
        # More rarely in a large world, all of whose ranks read from one store.
        if stuck and self.beat % (1 + dist.get_world_size() // 64) == 0:
            self.think(stuck, current_time)

    def in_barrier(self) -> dict[int, on]:
        """Returns the main thread's wait in a barrier of the program's own, if it is in one."""
        main = threading.main_thread().ident or 0
        before = self.came
        self.came = sum(sum(kinds.values()) for (thread, _), kinds in list(arrivals.items()) if thread == main)
        # Frames are looked at only while nothing happens: who looks at one keeps its locals alive for that long.
        frame = None if self.came != before or main in waits else sys._current_frames().get(main)
        if frame is None or frame.f_code is not _IN_BARRIER:
            self.barrier = None
            return {}
        members: Any = frame.f_locals["group"] or dist.group.WORLD
        group = members.group_name
        if self.barrier is None or self.barrier.group != group:
            assert wait_of is not None, "`waiting` is imported by the package"
            self.barrier = wait_of(BARRIER, group)
            self.barrier.count, self.barrier.verdict = 1, ""  # not a real count: see `State`
        return {main: self.barrier}

    def vanished(self, stuck: dict[int, on]) -> bool:
        """Gives up waits for hosts that have vanished; returns whether the store is out of reach now."""
        quiet = liveness.quiet_hosts(liveness.readings())
        gone = {address for address, seconds in quiet.items() if seconds >= liveness.SILENCE} if stuck else set()
        unreachable = bool(self.home & quiet.keys())
        if self.home & gone:
            self.hang_up(self.home & gone, "the host of the store by which the ranks have met", quiet, stuck)
        elif gone and not unreachable:
            ranks = sorted({rank for wait in stuck.values() for rank in ranks_of(wait)} - {self.rank})
            lost = {rank: addresses & gone for rank, addresses in self.addresses(ranks).items() if addresses & gone}
            if lost:
                self.hang_up(set().union(*lost.values()), f"the host of {ranks_named([*lost])}", quiet, stuck)
        return unreachable

    def addresses(self, ranks: list[int]) -> dict[int, set[str]]:
        """Returns the addresses by which ranks are connected to others."""
        return {rank: set(json.loads(text)) for rank, text in _texts(self.reach(), _ADDRESSES, ranks).items()}

    def hang_up(self, lost: Set[str], whose: str, quiet: dict[str, float], stuck: dict[int, on]) -> None:
        """Wakes the waiting threads with an error, and ends this process's connections to the lost hosts."""
        reason = f"{whose}, {listed(sorted(lost))}, has not answered for {min(quiet[host] for host in lost):.0f} s"
        self.abandon(stuck, f"{reason}. It has gone, or the network between has", lambda: liveness.hang_up(lost))

    def abandon(self, stuck: dict[int, on], reason: str, first: Callable[[], None] = lambda: None) -> None:
        """Wakes the waiting threads with an error, for a reason that needs no other rank's word."""
        for thread, wait in stuck.items():
            if not wait.verdict:
                wait.verdict = f"rank {self.rank} waited in vain for {text_of(wait, thread)}: {reason}"
                _log.error("%s", wait.verdict)
        first()
        _break({wait.group for wait in stuck.values() if wait.ranks is None or wait.sided})

    def bereft(self, stuck: dict[int, on], current_time: float) -> bool:
        """Whether rank 0 has ended, and with it the store that it served; gives up waits for it that are long."""
        if not liveness.has_ended(self.server):
            return False
        self.dead.add(0)
        long = _pace()[0] * STARTING  # nobody can tell any more who else comes late
        lost = {t: wait for t, wait in stuck.items() if current_time - self.since[t][1] >= long and 0 in ranks_of(wait)}
        for wait in lost.values():
            if not wait.verdict:
                self.given |= _threads_at(wait)
        self.abandon(lost, "rank 0, which served the store through which the ranks met, has ended. Look at its log")
        return True

    def reach(self) -> Any:
        """Returns this thread's own client of the store."""
        if self.store is None:
            self.store = process_groups.default_store().clone()
        return self.store

    def tell(self, stuck: dict[int, on]) -> None:
        """Publishes how this rank stands, with these waits."""
        self.reach()
        self.beat += 1
        self.told, self.stands = bool(stuck), (comparisons.last(), comparisons.left())
        self.publish(self.store, self.beat, stuck, self.ended)

    def publish(self, store: Any, beat: int, stuck: dict[int, on], ended: str) -> None:
        """Sets the state that others read of this rank."""
        store.set(_KEY.format(self.rank), json.dumps(state_of(beat, stuck, self.vain, ended)))

    def think(self, stuck: dict[int, on], current_time: float) -> None:
        """Gives up waits that this rank or another has found hopeless, and logs the others."""
        self.bury({rank for wait in stuck.values() for rank in ranks_of(wait)} - {self.rank})
        states = self.reached(stuck)
        hopeless = waits_in_vain(states)
        if self.sure(hopeless, states):
            self.vain = given_up(hopeless, states)
        reports = [state["vain"].get(str(self.rank)) for state in states.values()]
        for thread, wait in stuck.items():
            key = wait.group, wait.key, wait.count
            verdicts = [
                message
                for message, *lost in filter(None, [self.vain.get(str(self.rank)), *reports])
                if [thread, *key] in lost
            ]
            verdicts = [advised(message) for message in verdicts] + [
                since_when(wait, broken_groups.setdefault(wait.group, state["broken"][wait.group]))
                for state in states.values()
                if wait.ranks is None and wait.group in state["broken"]
            ]
            if verdicts and not wait.verdict and (waits | self.in_barrier()).get(thread) is wait:
                wait.verdict = verdicts[0]
                self.give_up(wait, stuck)
                continue
            begins = wait.note == STARTS and thread not in calls
            waited, slow = current_time - self.since[thread][1], begins or wait.note == COMPILES
            patience = _pace()[0] * (STARTING if slow else 1)
            concerns = wait is not self.barrier or (self.rank, thread) in hopeless
            if current_time >= self.spoke.get(thread, 0) and waited >= patience and concerns:
                self.spoke[thread] = current_time + 2 * waited
                late = [r for r in ranks_of(wait) if r != self.rank and not (r in states and came(states[r], *key))]
                reason = (
                    standing(late, states, _wait(thread, wait)) if late else "all have come, and it has not arrived"
                )
                text = f"rank {self.rank} has waited {waited:.1f} s for {text_of(wait, thread)}: {reason}"
                note = advice(text) if late else ""
                note += f". {wait.note}" if wait.note and (begins or wait.note != STARTS) else ""
                _log.warning("%s%s", text, note)

    def bury(self, ranks: set[int]) -> None:
        """Publishes that ranks have ended whose processes on this host have done so without a word."""
        if new := ranks - self.processes.keys():
            self.processes |= _texts(self.reach(), _PROCESS, sorted(new))
        for rank in sorted(ranks & self.processes.keys() - self.dead):
            if liveness.has_ended(self.processes[rank].decode()):
                self.dead.add(rank)
                text = _texts(self.reach(), _KEY, [rank]).get(rank, b"").decode()
                known = json.loads(text or '{"beat": 0, "vain": {}, "broken": {}, "last": "", "left": {}, "ended": ""}')
                if not known["ended"]:
                    ended: State = {"ended": f"has {KILLED}", "threads": None, "counts": None}
                    # Unless its last words arrive meanwhile.
                    self.store.compare_set(_KEY.format(rank), text, json.dumps(known | ended))

    def leave_the_deaf(self) -> None:
        """Ends this process if a thread has not moved since its wait for a dead rank was given up.

        Checks are counted, and not seconds, in which this process may have been stopped; and a debugger moves the
        thread that it holds.
        """
        if not self.given:  # frames that are looked at live longer, and what they hold does
            return
        frames = sys._current_frames()
        for thread, (wait, place, checks) in list(self.given.items()):
            if waits.get(thread) is not wait or _place(frames.get(thread)) != place:
                del self.given[thread]
            elif checks * _pace()[1] < WAKING:
                self.given[thread] = wait, place, checks + 1
            else:
                _log.critical("%s. The connection has not noticed, so this process ends", wait.verdict)
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):
                        stream.flush()
                os._exit(1)

    def reached(self, stuck: dict[int, on], also: Iterable[int] = ()) -> dict[int, State]:
        """Returns the states of this rank, of those it waits for, of those they wait for and so on, and of `also`."""
        # Its own state also goes through JSON, to compare with those of others: tuples become lists.
        states: dict[int, State] = {self.rank: json.loads(json.dumps(state_of(self.beat, stuck, self.vain)))}
        missing = {*also, *(rank for wait in stuck.values() for rank in ranks_of(wait))} - states.keys()
        while missing:
            new_states = read_states(self.store, sorted(missing))
            states |= new_states
            missing = {
                rank
                for state in new_states.values()
                for thread in state["threads"] or ()
                if thread["wait"]
                for rank in thread["wait"]["ranks"]
            } - states.keys()
            if not new_states:
                break
        return states

    def sure(self, hopeless: dict[Thread, list[int]], states: dict[int, State]) -> bool:
        """Whether an earlier check found the same hopeless waits, and all their ranks have published twice since."""
        waits_of = waits_by_thread(states)
        waits = sorted(
            (*thread, *(waits_of[thread][name] for name in ("group", "key", "count"))) for thread in hopeless
        )
        # States are read one by one, so one reading may mix moments; two later beats of each rank confirm it.
        beats = {rank: states[rank]["beat"] for rank, _ in hopeless}
        if self.suspects[0] != waits:
            self.suspects = waits, beats
        return bool(waits) and all(beats[rank] >= before + 2 for rank, before in self.suspects[1].items())

    def give_up(self, wait: on, stuck: dict[int, on]) -> None:
        """Wakes the thread that is blocked in a wait, with an error."""
        used = {group for _, group in list(arrivals)}
        ranks = [dist.get_process_group_ranks(group) for group in map(_made, used) if group is not None]
        states = self.reached(stuck, set().union(*ranks))
        broken = self.hear(given_up(waits_in_vain(states), states))
        if wait.ranks is None:
            broken |= {wait.group}
            broken_groups.setdefault(wait.group, wait.verdict)
        if self.dead.intersection(ranks_of(wait)):
            self.given |= _threads_at(wait)
        self.tell(stuck)
        _log.error("%s", wait.verdict)
        _break(broken)

    def hear(self, vain: Vain) -> set[str]:
        """Marks and returns the groups of this rank that hopeless waits break.

        Others may wait there for this rank, and whatever it did there next would not be what they wait for.
        """
        self.vain = {**vain, **self.vain}
        causes = {name: cause for cause, *waits in vain.values() for _, name, *_ in waits if _made(name) is not None}
        new = causes.keys() - broken_groups.keys()
        broken_groups.update({name: causes[name] for name in new})
        return new


def _threads_at(wait: on) -> dict[int, tuple[on, Any, int]]:
    """Returns the threads in a wait, for `Watcher.given`."""
    frames = sys._current_frames()
    return {thread: (wait, _place(frames.get(thread)), 0) for thread, other in list(waits.items()) if other is wait}


def _place(frame: Any) -> Any:
    """Returns where a thread is; the frame is kept, so that no other is taken for it."""
    return frame and (frame, frame.f_lasti)


def _made(group: str) -> Any:
    """Returns the process group of this name, or None if this process has none."""
    try:
        return process_groups.group_of(group)
    except (LookupError, RuntimeError, ValueError):
        return None


def _break(groups: Iterable[str]) -> None:
    for name in groups:
        process_groups.break_group(process_groups.group_of(name))
