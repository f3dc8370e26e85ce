"""Deadlock detection: pure functions that compute from ranks' published states which waits can never end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from shardfn.quoting import findings

_AND = (("where", " at {}"), ("note", " ({})"))  # further fields of a rank's wait in messages, with their formats
SHOWN = 6  # most ranks that a message lists
_ADVICE = "All ranks make the same calls in the same order: a branch around one goes the same way on every rank"
_OUTSIDE = "take it out of a branch such as `if rank == 0`, and leave there only what uses its result"
BARRIER = "torch.distributed.barrier"
CALL = re.compile(r" in (sf\.[\w.]*\w)")

Vain = dict[str, list[Any]]
State = dict[str, Any]
"""What a rank has published.

beat        how often it has published its state
ended       how it ended; empty while it runs
vain        rank -> text of its hopeless wait, as found by this rank, then the waits: [thread, group, key, count]
last        the last place that it reached together with the others, if they compare
left        group -> number of its last comparison there, in a call that has ended since, and how that call ended
broken      group -> the failure that broke the group
threads     None while no thread waits; else the live threads that have waited before, and the main thread:
    thread, main, used      its identifier, whether it is the main thread, the groups it has used
    wait                    None while it does not wait; else a description made by `watchdog`, in which
        where               is the user's line, unless `told` has it
        place               is None, or the comparison that it is at: [group, number there, number in its call]
counts      group -> key -> how often the rank has arrived at it; None if it was killed, and nobody knows. For a barrier
            of the program's own 1 while the rank is in it, as nobody counts these
"""
Thread = tuple[int, int]  # rank, thread identifier


def waits_in_vain(states: dict[int, State]) -> dict[Thread, list[int]]:
    """Returns the threads whose waits can never end, each with the ranks that can never come.

    Computes the greatest fixed point: all waiting threads start as suspects, and a thread is cleared when every rank
    that it waits for may still come; this repeats until no more are cleared.

    Args:
        states: the published state of each rank; a rank that is absent may still come to anything.
    """
    waiting = {
        (rank, thread["thread"]): thread["wait"]
        for rank, state in states.items()
        for thread in (not state["ended"] and state["threads"]) or ()
        if _decidable(thread, state, states)
    }
    suspects: dict[Thread, list[int]] = {thread: [] for thread in waiting}
    while True:
        remaining = {}
        for (rank, number), wait in waiting.items():
            if (rank, number) in suspects and (lost := _lost_by(rank, wait, states, suspects)):
                remaining[(rank, number)] = lost
        if len(remaining) == len(suspects):
            return remaining
        suspects = remaining


def _decidable(thread: dict[str, Any], state: State, states: dict[int, State]) -> bool:
    """Whether the published states are enough to tell if a wait can end."""
    wait = thread["wait"]
    if wait is None or (wait["first"] and not thread["main"]):
        return False  # nobody knows yet which threads of other ranks a new thread meets
    if wait["sided"] and not all(rank in states and states[rank]["ended"] for rank in wait["ranks"]):
        return False
    rivals = [other for other in state["threads"] if other["wait"] and other["wait"]["group"] == wait["group"]]
    return len(rivals) == 1


def _lost_by(rank: int, wait: dict[str, Any], states: dict[int, State], suspects: dict[Thread, list[int]]) -> list[int]:
    """Returns the ranks that can never come to a rank's wait.

    A killed rank may have done its part before it ended. So it counts as lost only if no other rank is still to come.
    """
    awaited = [other for other in wait["ranks"] if other != rank]
    lost = [other for other in awaited if _lost(other, wait, states, suspects)]
    killed = [other for other in awaited if other not in lost and other in states and states[other]["counts"] is None]
    come = {other for other, state in states.items() if came(state, wait["group"], wait["key"], wait["count"])}
    late = [other for other in awaited if other not in {*lost, *killed, *come}]
    return lost if late else sorted([*lost, *killed])


def _lost(rank: int, wait: dict[str, Any], states: dict[int, State], suspects: dict[Thread, list[int]]) -> bool:
    """Whether a rank has not arrived at a wait and never can, if the suspects' waits never end."""
    state = states.get(rank)
    if state is None or came(state, wait["group"], wait["key"], wait["count"]):
        return False
    if left(state, wait):
        return True
    if state["ended"]:  # a program may still come to its own barrier after an error in a run
        return state["counts"] is not None and not wait["key"].startswith(BARRIER)
    if not state["threads"]:
        return False
    users = [thread for thread in state["threads"] if wait["group"] in thread["used"]]
    users = users or [thread for thread in state["threads"] if thread["main"]]
    return all((rank, thread["thread"]) in suspects for thread in users)


def left(state: State, wait: dict[str, Any]) -> str:
    """Returns how a rank left the call in which another rank waits; empty if it has not left it.

    It counts only if the rank took part in all comparisons of the call but this one. Ranks also compare whether a
    collective is the first of its call; so the rank's next collective, in a later call, cannot match this one.
    """
    group, number, inside = wait.get("place") or ("", 0, 0)
    last, outcome = state.get("left", {}).get(group, (0, ""))
    return str(outcome) if inside > 1 and last == number - 1 else ""


def came(state: State, group: str, key: str, count: int) -> bool:
    """Whether a rank has arrived at a wait at least so many times."""
    return bool((state["counts"] or {}).get(group, {}).get(key, 0) >= count)


def given_up(hopeless: dict[Thread, list[int]], states: dict[int, State]) -> Vain:
    """Returns each rank's hopeless waits with a message, in the form that ranks publish."""
    vain: Vain = {}
    waits = waits_by_thread(states)
    for (rank, thread), lost in hopeless.items():
        wait = waits[rank, thread]
        message = f"rank {rank} waits in vain for {wait['told']}: {standing(lost, states, wait)}"
        vain.setdefault(str(rank), [message]).append([thread, wait["group"], wait["key"], wait["count"]])
    return vain


def waits_by_thread(states: dict[int, State]) -> dict[Thread, dict[str, Any]]:
    """Returns the wait of each thread of these ranks; None if it does not wait."""
    return {(rank, t["thread"]): t["wait"] for rank, state in states.items() for t in state["threads"] or ()}


def standing(ranks: Iterable[int], states: dict[int, State], wait: dict[str, Any] | None = None) -> str:
    """Describes the activity of ranks for which another rank waits, grouped by activity."""
    ranks_by_activity: dict[str, list[int]] = {}
    for rank in ranks:
        state = states.get(rank)
        ranks_by_activity.setdefault((left(state, wait) if state and wait else "") or _does(state), []).append(rank)
    return findings((f"{ranks_named(same)}{':' * (len(same) > 1)} {does}" for does, same in ranks_by_activity.items()))


def _does(state: State | None) -> str:
    after = f", after {state['last']}" if state and state.get("last") else ""
    if state is None or not (state["ended"] or state["vain"] or state["threads"]):
        return f"has not come, and does something else{after}"
    if state["ended"]:
        return f"{state['ended']}{after}"
    open_waits = [thread["wait"] for thread in state["threads"] or () if thread["wait"]]
    waits = [
        "".join([wait["told"], *(form.format(wait[name]) for name, form in _AND if wait.get(name))])
        for wait in open_waits
    ]
    return f"waits for {' and for '.join(waits)}" if waits else "has given up" if state["vain"] else "has not come"


def ranks_named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1 and 7 more`."""
    shown = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def with_advice(message: str) -> str:
    """Appends advice to a message about a wait."""
    if " has failed: " in message:
        return f"{message}. Look at the output of that rank first"
    return f"{message}{advice(message) or f'. {_ADVICE}'}"


def advice(message: str) -> str:
    """Returns what to append to a message about a wait in one of the user's calls; empty for any other wait."""
    call = CALL.search(message)
    return f". All ranks call {call[1]}: {_OUTSIDE}" if call else ""
