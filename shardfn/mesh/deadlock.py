"""What follows from what ranks have said they wait for: who waits in vain, and how to say it. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from shardfn.quoting import findings

SHOWN = 6  # ranks that a message speaks of
_ADVICE = "All ranks make the same calls in the same order: a branch around one goes the same way on every rank"
CALL = re.compile(r" in (sf\.[\w.]*\w)")

Vain = dict[str, list[Any]]
State = dict[str, Any]
"""What a rank has published.

beat        how often it has looked
ended       how it ended; empty if it has not
vain        rank -> what that waits for in vain, as this one has found, and which waits: [thread, group, key, count]
last        what it came to together with others, the last time that they compared it
left        group -> number of its last comparison there, whose call it has left since, and how it has
threads     None, while it does not wait; else those that live and have waited, and the main one:
    thread, main, used      its number, whether it is the main one, the groups it has used
    wait                    None, while it does not; else what `waiting` says of it, among it
        place               None, or the comparison that it is at: [group, number there, number in its call]
counts      group -> key -> how often the rank came to that
"""
Thread = tuple[int, int]  # rank, number


def waits_in_vain(states: dict[int, State]) -> dict[Thread, list[int]]:
    """The threads that wait for ranks which can never come, and for which.

    At first all are suspected. Then those are let off for whom each rank may still come, until no more are.

    Args:
        states: what ranks have published; of one that is not here, anything may still come.
    """
    waiting = {
        (rank, thread["thread"]): thread["wait"]
        for rank, state in states.items()
        for thread in (not state["ended"] and state["threads"]) or ()
        if _decidable(thread, state)
    }
    found: dict[Thread, list[int]] = {who: [] for who in waiting}
    while True:
        kept = {}
        for (rank, number), wait in waiting.items():
            if (rank, number) in found:
                lost = [other for other in wait["ranks"] if other != rank and _lost(other, wait, states, found)]
                if lost:
                    kept[(rank, number)] = lost
        if len(kept) == len(found):
            return kept
        found = kept


def _decidable(thread: dict[str, Any], state: State) -> bool:
    """Whether others can know what it takes to end a wait."""
    wait = thread["wait"]
    if wait is None or wait["sided"] or (wait["first"] and not thread["main"]):
        return False  # which thread of another rank a new thread belongs to, nobody knows yet
    same = [one for one in state["threads"] if one["wait"] and one["wait"]["group"] == wait["group"]]
    return len(same) == 1


def _lost(rank: int, wait: dict[str, Any], states: dict[int, State], found: dict[Thread, list[int]]) -> bool:
    """Whether a rank has not come to a wait, and cannot any more, if what is in `found` waits in vain."""
    state = states.get(rank)
    if state is None or came(state, wait["group"], wait["key"], wait["count"]):
        return False
    if state["ended"] or left(state, wait):
        return True
    if not state["threads"]:
        return False
    users = [thread for thread in state["threads"] if wait["group"] in thread["used"]]
    users = users or [thread for thread in state["threads"] if thread["main"]]
    return all((rank, thread["thread"]) in found for thread in users)


def left(state: State, wait: dict[str, Any]) -> str:
    """How a rank has left the call in which another one waits, for which it came to all but this; empty if it has not.

    Ranks compare whether a collective is the first of its call, so whatever it comes to next is something else.
    """
    group, number, inside = wait.get("place") or ("", 0, 0)
    last, how = state.get("left", {}).get(group, (0, ""))
    return str(how) if inside > 1 and last == number - 1 else ""


def came(state: State, group: str, key: str, count: int) -> bool:
    """Whether a rank has come to a wait for so many times."""
    return bool(state["counts"].get(group, {}).get(key, 0) >= count)


def given_up(found: dict[Thread, list[int]], states: dict[int, State]) -> Vain:
    """What each rank waits for in vain, as others read it."""
    vain: Vain = {}
    waits = waits_by_thread(states)
    for (rank, thread), lost in found.items():
        wait = waits[rank, thread]
        told = f"rank {rank} waits in vain for {wait['told']}: {standing(lost, states, wait)}"
        vain.setdefault(str(rank), [told]).append([thread, wait["group"], wait["key"], wait["count"]])
    return vain


def waits_by_thread(states: dict[int, State]) -> dict[Thread, dict[str, Any]]:
    """What each thread of these ranks waits for, None for nothing."""
    return {(rank, t["thread"]): t["wait"] for rank, state in states.items() for t in state["threads"] or ()}


def standing(ranks: Iterable[int], states: dict[int, State], wait: dict[str, Any] | None = None) -> str:
    """What these ranks do, in words, while one waits for them."""
    told: dict[str, list[int]] = {}
    for rank in ranks:
        state = states.get(rank)
        told.setdefault((left(state, wait) if state and wait else "") or _does(state), []).append(rank)
    return findings((f"{ranks_named(some)}{':' * (len(some) > 1)} {does}" for does, some in told.items()))


def _does(state: State | None) -> str:
    after = f", after {state['last']}" if state and state.get("last") else ""
    if state is None or not (state["ended"] or state["vain"] or state["threads"]):
        return f"has not come, and does something else{after}"
    if state["ended"]:
        return f"{state['ended']}{after}"
    waits = [thread["wait"]["told"] for thread in state["threads"] or () if thread["wait"]]
    return f"waits for {' and for '.join(waits)}" if waits else "has given up" if state["vain"] else "has not come"


def ranks_named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1 and 7 more`."""
    shown = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def advised(told: str) -> str:
    """What was said, and what to do about it."""
    if " has failed: " in told:
        return f"{told}. Look at the output of that rank first"
    found = CALL.search(told)
    if found is None:
        return f"{told}. {_ADVICE}"
    return f"{told}. All ranks call {found[1]}, whatever they do with it: only write files or print on rank 0"
