"""The ranks of a world come together at its beginning, and hear who is where, who is missing, and what is wrong."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardfn.mesh import watchdog
from shardfn.mesh.deadlock import ranks_named

GRACE = 10.0  # seconds for which the others wait longer than rank 0, which tells them what is wrong

_log = logging.getLogger("shardfn")
_CARD, _CARDS, _MISSING, _WRONG, _HEARD = "card/{}", "cards", "missing", "wrong", "heard"


@dataclass(frozen=True)
class Card:
    """What a rank says of itself.

    Attributes:
        host: the name of its node.
        size: of the world, as it knows it.
        local_rank: on its node, if a launcher has said so.
        devices: how many it sees and may choose from; 0 where it has one already, or needs none.
        timeout: in seconds, that it was asked to begin the world with.
        process: its number on its host.
    """

    host: str
    size: int
    local_rank: int | None
    devices: int
    timeout: float | None
    process: int


def roll_call(
    store: Any, rank: int, mine: Card, limit: float, verdict: Callable[[], str] = lambda: ""
) -> tuple[Card, ...]:
    """The cards of all ranks. Rank 0 reads them as they come; the others hear from it.

    Args:
        store: of this roll call alone.
        rank: of this process.
        mine: its card.
        limit: seconds until the rest is given up.
        verdict: says why to give up, if there is a reason.

    Raises:
        RuntimeError: on every rank that came: some cards do not fit together, two processes are one rank, another
            process has said that it is wrong, or some have not come.
    """
    if mine.size == 1:
        return (mine,)
    begun = time.monotonic()
    if store.add(f"{_CARD.format(rank)} times", 1) > 1:
        first = Card(**json.loads(store.get(_CARD.format(rank))))
        say_wrong(store, twice(rank, first, mine))
    else:
        store.set(_CARD.format(rank), json.dumps(asdict(mine)))
    come: dict[int, Card] = {}
    pause, speaks = 0.001, watchdog.PATIENCE
    while True:
        if store.check([_WRONG]):
            raise RuntimeError(_heard(store, rank, len(come)))
        if rank == 0 and _all_here(store, mine.size, come):
            store.set(_CARDS, json.dumps([asdict(come[one]) for one in range(mine.size)]))
        if store.check([_CARDS]):
            return tuple(Card(**card) for card in json.loads(store.get(_CARDS)))
        waited = time.monotonic() - begun
        if told := verdict():
            raise RuntimeError(told)
        if waited > speaks:
            speaks = 2 * waited
            _log.warning(
                "rank %d has waited %.0f s for the world to begin: %s",
                rank,
                waited,
                _missing(store, rank, mine.size, come),
            )
        if waited > limit + (GRACE if rank else 0):
            missing = _missing(store, rank, mine.size, come)
            say_wrong(
                store,
                f"{missing} in {limit:.0f} s. Look at the output of those processes, and whether as many were started "
                f"on every node as on this one; make_mesh(timeout=) says how long to wait",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def say_wrong(store: Any, told: str) -> None:
    """Ends the roll call, for all who come."""
    store.compare_set(_WRONG, "", told)


def _all_here(store: Any, size: int, come: dict[int, Card]) -> bool:
    """Reads the cards that have come since; whether they are all, and fit."""
    before = len(come)
    for rank in range(size):
        if rank not in come and store.check([_CARD.format(rank)]):
            come[rank] = Card(**json.loads(store.get(_CARD.format(rank))))
    if len(come) > before:
        told = contradiction(come)
        if told:
            say_wrong(store, told)
            return False
        missing = [rank for rank in range(size) if rank not in come]
        store.set(_MISSING, f"{ranks_named(missing)} of {size} {'has' if len(missing) == 1 else 'have'} not come")
    return len(come) == size


def _missing(store: Any, rank: int, size: int, come: Mapping[int, Card]) -> str:
    if store.check([_MISSING]):
        return bytes(store.get(_MISSING)).decode()
    return f"rank 0 of {size} has not come"


def _heard(store: Any, rank: int, come: int) -> str:
    """What is wrong. Rank 0, with which the store may go, leaves when the others have heard, too."""
    told = bytes(store.get(_WRONG)).decode()
    until = time.monotonic() + watchdog.PATIENCE
    heard = store.add(_HEARD, 1)
    while rank == 0 and heard < come and time.monotonic() < until:
        time.sleep(0.05)
        heard = store.add(_HEARD, 0)
    return f"make_mesh: {told}"


def twice(rank: int, first: Card, second: Card) -> str:
    """What to say of two processes that are one rank."""
    return (
        f"two processes are rank {rank} of {second.size}: process {first.process} of {first.host} and process "
        f"{second.process} of {second.host}. RANK is another one for each: do not export it before srun or mpirun, and "
        f"give each torchrun its own --node-rank"
    )


def contradiction(come: Mapping[int, Card]) -> str:
    """What is wrong with the cards that have come so far; empty where nothing is."""
    (one, first), *others = sorted(come.items())
    for rank, card in others:
        if card.size != first.size:
            return (
                f"rank {one} ({first.host}) was told of {first.size} ranks, and rank {rank} ({card.host}) of "
                f"{card.size}: WORLD_SIZE is the same for all of them, as is torchrun's --nnodes and --nproc-per-node"
            )
        if card.timeout != first.timeout:
            return (
                f"rank {one} passes timeout={first.timeout} and rank {rank} timeout={card.timeout}: pass the same on "
                f"every rank"
            )
    if len(come) == first.size:
        for rank, card in come.items():
            place = local_rank(rank, [come[one] for one in range(first.size)])
            if 1 < card.devices <= place:
                return (
                    f"rank {rank} is number {place} of the processes on {card.host}, where it sees {card.devices} "
                    f"devices: start no more processes on a node than it has devices, or let CUDA_VISIBLE_DEVICES "
                    f"show more"
                )
    return ""


def local_rank(rank: int, cards: Sequence[Card]) -> int:
    """A rank's number on its node: what its launcher says, or else its place among the ranks there."""
    said = cards[rank].local_rank
    return sum(card.host == cards[rank].host for card in cards[:rank]) if said is None else said
