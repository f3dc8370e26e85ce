"""The roll call at the start of a world, which finds missing ranks and contradictory settings.

Each rank publishes a card in the store; rank 0 collects and compares them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardfn.mesh import watchdog
from shardfn.mesh.deadlock import ranks_named

GRACE = 10.0  # seconds that other ranks wait longer than rank 0, so that they read its error

_log = logging.getLogger("shardfn")
_CARD, _CARDS, _MISSING, _WRONG, _HEARD = "card/{}", "cards", "missing", "wrong", "heard"


@dataclass(frozen=True)
class Card:
    """The record that each rank publishes at the start of a world.

    Attributes:
        host: the name of its node.
        size: of the world, according to this rank.
        local_rank: its rank on the node, if a launcher gave it.
        devices: number of devices that it sees and may choose from; 0 if it has chosen already or needs none.
        timeout: in seconds, as the user passed it; None for the default.
        process: its process id.
        alive: a unique name of its process, see `liveness.own_process`.
    """

    host: str
    size: int
    local_rank: int | None
    devices: int
    timeout: float | None
    process: int
    alive: str = ""


def roll_call(
    store: Any, rank: int, mine: Card, limit: float, verdict: Callable[[], str] = lambda: ""
) -> tuple[Card, ...]:
    """Returns the cards of all ranks. Rank 0 collects them as they arrive, and publishes them for the others.

    Args:
        store: used by this roll call alone.
        rank: of this process.
        mine: this process's card.
        limit: seconds after which ranks that are missing are given up.
        verdict: returns a reason to give up now, or an empty text.

    Raises:
        RuntimeError: on every rank that came: cards contradict each other, two processes claim one rank, another
            process has reported an error, or some ranks have not come.
    """
    if mine.size == 1:
        return (mine,)
    started = time.monotonic()
    # Only the first process of a rank leaves its card; a second one with the same rank reports both to all ranks.
    if store.add(f"{_CARD.format(rank)} times", 1) > 1:
        first = Card(**json.loads(store.get(_CARD.format(rank))))
        say_wrong(store, twice(rank, first, mine))
    else:
        store.set(_CARD.format(rank), json.dumps(asdict(mine)))
    cards: dict[int, Card] = {}
    pause, next_warning = 0.001, watchdog.PATIENCE * watchdog.STARTING
    while True:
        if store.check([_WRONG]):
            raise RuntimeError(_closing_error(store, rank, len(cards)))
        if rank == 0 and _all_here(store, mine.size, cards):
            store.set(_CARDS, json.dumps([asdict(cards[other]) for other in range(mine.size)]))
        if store.check([_CARDS]):
            return tuple(Card(**card) for card in json.loads(store.get(_CARDS)))
        waited = time.monotonic() - started
        if reason := verdict():
            raise RuntimeError(reason)
        if waited > next_warning:
            next_warning = 2 * waited
            _log.warning(
                "rank %d has waited %.0f s for the world to begin: %s. %s",
                rank,
                waited,
                _missing(store, rank, mine.size, cards),
                watchdog.STARTS,
            )
        if waited > limit + (GRACE if rank else 0):
            missing = _missing(store, rank, mine.size, cards)
            say_wrong(
                store,
                f"{missing} in {limit:.0f} s. Look at the output of those processes, and whether as many were started "
                f"on every node as on this one; make_mesh(timeout=) says how long to wait",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def say_wrong(store: Any, message: str) -> None:
    """Ends the roll call with an error for all who take part; the first error wins."""
    store.compare_set(_WRONG, "", message)


def _all_here(store: Any, size: int, cards: dict[int, Card]) -> bool:
    """Reads the cards that are new in the store; returns whether all are there and fit together."""
    before = len(cards)
    for rank in range(size):
        if rank not in cards and store.check([_CARD.format(rank)]):
            cards[rank] = Card(**json.loads(store.get(_CARD.format(rank))))
    if len(cards) > before:
        problem = contradiction(cards)
        if problem:
            say_wrong(store, problem)
            return False
        missing = [rank for rank in range(size) if rank not in cards]
        store.set(_MISSING, f"{ranks_named(missing)} of {size} {'has' if len(missing) == 1 else 'have'} not come")
    return len(cards) == size


def _missing(store: Any, rank: int, size: int, come: Mapping[int, Card]) -> str:
    if store.check([_MISSING]):
        return bytes(store.get(_MISSING)).decode()
    return f"rank 0 of {size} has not come"


def _closing_error(store: Any, rank: int, present: int) -> str:
    """Returns the error that ends the roll call; rank 0 first waits until the others have read it."""
    message = bytes(store.get(_WRONG)).decode()
    until = time.monotonic() + watchdog.PATIENCE
    heard = store.add(_HEARD, 1)
    # The store may end with rank 0's process, and the others need it to read the error.
    while rank == 0 and heard < present and time.monotonic() < until:
        time.sleep(0.05)
        heard = store.add(_HEARD, 0)
    return f"make_mesh: {message}"


def twice(rank: int, first: Card, second: Card) -> str:
    """Returns the message about two processes that claim one rank."""
    return (
        f"two processes are rank {rank} of {second.size}: process {first.process} of {first.host} and process "
        f"{second.process} of {second.host}. RANK must differ between them: do not export it before srun or mpirun, "
        f"and give each torchrun its own --node-rank"
    )


def contradiction(cards: Mapping[int, Card]) -> str:
    """Returns a message for cards that contradict each other; empty if none do."""
    (low, first), *others = sorted(cards.items())
    for rank, card in others:
        if card.size != first.size:
            return (
                f"rank {low} ({first.host}) was told of {first.size} ranks, and rank {rank} ({card.host}) of "
                f"{card.size}: WORLD_SIZE is the same for all of them, as is torchrun's --nnodes and --nproc-per-node"
            )
        if card.timeout != first.timeout:
            return (
                f"rank {low} passes timeout={first.timeout} and rank {rank} timeout={card.timeout}: pass the same on "
                f"every rank"
            )
    if len(cards) == first.size:
        for rank, card in cards.items():
            place = local_rank(rank, [cards[low] for low in range(first.size)])
            if 1 < card.devices <= place:
                return (
                    f"rank {rank} is number {place} of the processes on {card.host}, where it sees {card.devices} "
                    f"devices: start no more processes on a node than it has devices, or let CUDA_VISIBLE_DEVICES "
                    f"show more"
                )
    return ""


def local_rank(rank: int, cards: Sequence[Card]) -> int:
    """Returns a rank's number on its node: the launcher's, or else its position among the ranks there."""
    given = cards[rank].local_rank
    return sum(card.host == cards[rank].host for card in cards[:rank]) if given is None else given
