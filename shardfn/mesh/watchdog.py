"""The watchdog thread: finds waits for other ranks that can never end, and wakes their threads with an error.

Every tick it checks the waits of this process's threads (`waiting`). It logs a wait longer than `PATIENCE`, and
publishes it in the rendezvous store, where other ranks read it. From all published waits each rank computes which waits
can never end (`deadlock`):

- A rank is lost if it has ended, or if each of its threads that use the group waits for a lost rank. Then the watchdog
  breaks the group, so that the blocked thread wakes with an error.
- If a host has vanished (`liveness`), each rank that waits for ranks on it gives these up without asking others.
- A killed process publishes nothing, so a rank on its host that waits for it publishes its end. It may have done its
  part before it was killed; so it counts as lost only once all other ranks have come.
- If a thread that waits for a killed rank does not wake, the process exits, since nothing else would end the wait.

With `debug(collectives=True)` ranks also publish their position (`comparisons`): their next operation, the last one
that all reached, and the calls that they have left. A rank that has left a call cannot come to a wait inside that call.
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
    came,
    given_up,
    ranks_named,
    standing,
    waits_by_thread,
    waits_in_vain,
    with_advice,
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
"""The current wait of each thread."""
calls: dict[int, str] = {}
"""The user's call that each thread is in."""
arrivals: dict[tuple[int, str], dict[tuple[str, Any], int]] = {}
"""By thread and group: how often the thread has come to each kind of wait."""
broken_groups: dict[str, str] = {}
"""Group -> the failed wait that broke it."""
watcher: Watcher | None = None
"""The watcher of this process's world; None in a world of one process."""
wait_of: type[on] | None = None
"""The class `waiting.on`. `waiting` sets it, since an import here would be circular."""
looking: dict[int, Callable[[Any], None]] = {}
"""Callbacks that the watchdog thread runs at every tick with its store client, by the id of their owner."""


def watch_world() -> None:
    """Starts a watcher for the world that this process has joined, if it has several processes."""
    global watcher
    if dist.get_world_size() == 1 or not process_groups.between_processes():
        return
    if watcher is None:
        atexit.register(_leave)
    else:
        watcher.over = True
    _forget_waits()
    watcher = Watcher(dist.get_rank())
    store = process_groups.default_store()
    store.set(_ADDRESSES.format(watcher.rank), json.dumps(liveness.own_addresses()))
    store.set(_PROCESS.format(watcher.rank), liveness.own_process())
    watcher.home = liveness.addresses_of(process_groups.host_of(store))
    threading.Thread(target=watcher.run, name="shardfn-waiting", daemon=True).start()


def _forget_waits() -> None:
    for state in (waits, arrivals, broken_groups):
        state.clear()
    comparisons.clear()


def _forked() -> None:
    global watcher
    watcher = None
    looking.clear()
    calls.clear()
    _forget_waits()


os.register_at_fork(after_in_child=_forked)


def _leave() -> None:
    """Publishes that this process ends, so that other ranks stop waiting for it."""
    if watcher is not None and dist.is_initialized():
        watcher.over = True
        watcher.looks.acquire(timeout=TICK)  # a thread inside torch when the interpreter ends aborts the process
        error = getattr(sys, "last_value", None)
        # The last error is the reason why this rank comes to no more waits, even if the program caught it.
        outcome = watcher.ended or "has ended" if error is None else f"has failed: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError, UnicodeError):
            watcher.publish(process_groups.default_store(), 0, {}, outcome[:500])


def failed(error: BaseException) -> None:
    """Publishes that this rank comes to no further waits, although its process is alive.

    Other ranks stop waiting for it, until it calls `goes_on`.
    """
    if watcher is not None and dist.is_initialized():
        watcher.ended = f"has failed: {type(error).__name__}: {error}"[:500]
        _say_now(watcher)


def _say_now(watcher: Watcher) -> None:
    """Publishes this rank's state at once, from a thread that does not wait."""
    with watcher.looks:  # the watching thread holds it while it publishes
        watcher.publish(process_groups.default_store(), watcher.beat, {}, watcher.ended)


def goes_on() -> None:
    """Revokes `failed`: this rank comes to waits again."""
    if watcher is not None and watcher.ended:
        watcher.ended, watcher.told = "", True  # makes the next check publish it


# --- the state that a rank publishes ---


def state_of(beat: int, stuck: dict[int, on], vain: Vain | None = None, ended: str = "") -> State:
    """Returns the state that this rank publishes; `stuck` are its waits longer than `PATIENCE`, by thread."""
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
    """Returns the published states of those of these ranks that have published one."""
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
    """Publishes the hopeless waits that other ranks have found, and breaks their groups on this rank."""
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
        ended: the reason why this rank comes to no further waits; empty if it may.
        vain: waits that were found to be hopeless.
        suspects: the waits that seem hopeless, with the beat of each rank when they first did.
        store: the thread's own client of the store: a client that a blocked thread uses is blocked for all threads.
        home: the addresses of the host that serves the store.
        server: rank 0's process, if it serves the store.
        processes: the processes of ranks that this one has waited for, see `liveness.own_process`.
        dead: the ranks whose processes have ended.
        barrier: the main thread's wait in a barrier that the program called itself; None if it is in none.
        came: number of waits at which the main thread had arrived at the last check.
        given: by thread, a wait for a dead rank that was given up, the thread's frame then, and the checks since.
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
                        self.poll()
            except Exception as error:  # the world may end during a check
                _log.debug("looking after waits: %s", error)

    def poll(self) -> None:
        """Runs one check: publishes this rank's waits, and reads those of other ranks."""
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
        """Returns the main thread's wait in `dist.barrier`, if the program has called it."""
        main = threading.main_thread().ident or 0
        before = self.came
        self.came = sum(sum(kinds.values()) for (thread, _), kinds in list(arrivals.items()) if thread == main)
        # Only while the thread makes no progress: a reference to a frame keeps its locals alive.
        frame = None if self.came != before or main in waits else sys._current_frames().get(main)
        if frame is None or frame.f_code is not _IN_BARRIER:
            self.barrier = None
            return {}
        members: Any = frame.f_locals["group"] or dist.group.WORLD
        group = members.group_name
        if self.barrier is None or self.barrier.group != group:
            assert wait_of is not None, "`waiting` is imported by the package"
            self.barrier = wait_of(BARRIER, group)
            self.barrier.count, self.barrier.verdict = 1, ""  # not a count of arrivals, see `State`
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
        """Wakes the waiting threads with an error, for a reason that needs no confirmation by other ranks."""
        for thread, wait in stuck.items():
            if not wait.verdict:
                wait.verdict = f"rank {self.rank} waited in vain for {text_of(wait, thread)}: {reason}"
                _log.error("%s", wait.verdict)
        first()
        _break({wait.group for wait in stuck.values() if wait.ranks is None or wait.sided})

    def bereft(self, stuck: dict[int, on], current_time: float) -> bool:
        """Whether rank 0 has ended, and with it the store that it served; then also gives up long waits for it."""
        if not liveness.has_ended(self.server):
            return False
        self.dead.add(0)
        long = _pace()[0] * STARTING  # without the store, a rank that is merely late cannot be told from a lost one
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
        """Publishes this rank's state, with these waits."""
        self.reach()
        self.beat += 1
        self.told, self.stands = bool(stuck), (comparisons.last(), comparisons.left())
        self.publish(self.store, self.beat, stuck, self.ended)

    def publish(self, store: Any, beat: int, stuck: dict[int, on], ended: str) -> None:
        """Sets the state that others read of this rank."""
        store.set(_KEY.format(self.rank), json.dumps(state_of(beat, stuck, self.vain, ended)))

    def think(self, stuck: dict[int, on], current_time: float) -> None:
        """Gives up the waits that any rank has found hopeless, and logs other long waits."""
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
            verdicts = [with_advice(message) for message in verdicts] + [
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
        """Publishes the end of ranks on this host whose processes have ended without publishing it."""
        if new := ranks - self.processes.keys():
            self.processes |= _texts(self.reach(), _PROCESS, sorted(new))
        for rank in sorted(ranks & self.processes.keys() - self.dead):
            if liveness.has_ended(self.processes[rank].decode()):
                self.dead.add(rank)
                text = _texts(self.reach(), _KEY, [rank]).get(rank, b"").decode()
                known = json.loads(text or '{"beat": 0, "vain": {}, "broken": {}, "last": "", "left": {}, "ended": ""}')
                if not known["ended"]:
                    ended: State = {"ended": f"has {KILLED}", "threads": None, "counts": None}
                    # compare_set, as the rank's own last state may arrive meanwhile.
                    self.store.compare_set(_KEY.format(rank), text, json.dumps(known | ended))

    def leave_the_deaf(self) -> None:
        """Ends this process if a thread did not wake after its wait for a dead rank was given up.

        It counts checks rather than seconds, as the process may have been stopped meanwhile. A thread that a debugger
        holds counts as awake, as its frame changes.
        """
        if not self.given:  # a reference to a frame keeps its locals alive
            return
        frames = sys._current_frames()
        for thread, (wait, place, checks) in list(self.given.items()):
            if waits.get(thread) is not wait or _frame_position(frames.get(thread)) != place:
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
        """Returns the states of this rank, of all ranks that it waits for directly or indirectly, and of `also`."""
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
        ranks = [dist.get_process_group_ranks(group) for group in map(_group_named, used) if group is not None]
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
        """Marks this rank's groups with hopeless waits as broken; returns those that were not marked before.

        Other ranks may wait for this rank in such a group, and its next collective there would not match theirs.
        """
        self.vain = {**vain, **self.vain}
        causes = {
            name: cause for cause, *waits in vain.values() for _, name, *_ in waits if _group_named(name) is not None
        }
        new = causes.keys() - broken_groups.keys()
        broken_groups.update({name: causes[name] for name in new})
        return new


def _threads_at(wait: on) -> dict[int, tuple[on, Any, int]]:
    """Returns the threads in a wait, for `Watcher.given`."""
    frames = sys._current_frames()
    return {
        thread: (wait, _frame_position(frames.get(thread)), 0) for thread, other in list(waits.items()) if other is wait
    }


def _frame_position(frame: Any) -> Any:
    """Returns a thread's frame and instruction; holding the frame keeps its id from being reused."""
    return frame and (frame, frame.f_lasti)


def _group_named(group: str) -> Any:
    """Returns the process group of this name, or None if this process has none."""
    try:
        return process_groups.group_of(group)
    except (LookupError, RuntimeError, ValueError):
        return None


def _break(groups: Iterable[str]) -> None:
    for name in groups:
        process_groups.break_group(process_groups.group_of(name))
