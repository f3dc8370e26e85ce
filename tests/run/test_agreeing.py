"""What ranks tell each other at every step is counted alike on all of them, whoever comes late."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

import shardfn as sf
from shardfn.checkpoint.team import team_of
from shardfn.mesh import watchdog
from shardfn.mesh.axes import grid_of
from shardfn.run.agreeing import Word, WordExchange
from shardfn.testing import World

TURNS = 12


def seen(group: str) -> int:
    """How often others see this rank come to a turn."""
    found = watchdog.state_of(0, {}, {}, "ended")["counts"].get(group, {})
    return sum(n for key, n in found.items() if key.startswith("agreeing"))


def counted() -> tuple[int, list[Word]]:
    """How often this rank came to a turn, and what it heard."""
    team = team_of([grid_of(sf.make_mesh(device="cpu", data=2))], "run")
    assert team.group is not None
    group, exchange, heard = team.group.group_name, WordExchange(team), []
    before = seen(group)
    for turn in range(1, TURNS + 1):
        if (turn + dist.get_rank()) % 2:
            time.sleep(0.01)
        heard.append(exchange.turn(turn, Word(stop=2 if turn == 5 and dist.get_rank() else 0)))
    exchange.exchange_word(Word())
    return seen(group) - before, heard


@pytest.mark.world(2)
def test_every_rank_comes_to_every_turn(world: World) -> None:
    for count, heard in world.run(counted):
        assert count == TURNS + 1
        assert [word.stop for word in heard] == [0] * 5 + [2] + [0] * (TURNS - 6)
