"""Adapters learn, the base stays, and a step costs what the formula says."""

from __future__ import annotations

import functools
from typing import Any

import optree
import pytest
import torch

import shardfn as sf
from examples import lora, train_lm
from shardfn.testing import World

TINY = train_lm.Config(width=16, heads=2, layers=3, hidden=24, context=16, batch=8, dtype=torch.float64)


def adapted(where: str, n: int) -> Any:
    text = torch.frombuffer(bytearray(b"def f(x):\n    return x + 1\n" * 40), dtype=torch.uint8)
    base = train_lm.init(TINY, 0)
    run = lora.adapt(TINY, sf.make_mesh(device="cpu", replica=1, shard=n), base, text, 8, 0, where)
    same = all(map(torch.equal, optree.tree_leaves(run.base), optree.tree_leaves(base)))
    return run.losses, same, run.measured, run.expected


@functools.cache
def on(world: World, where: str) -> list[Any]:
    return world.with_deadline(60).run(adapted, where, world.size)


@pytest.mark.parametrize("world", [(1, "processes"), (4, "processes")], indirect=True, ids=["1", "4"])
@pytest.mark.parametrize("where", list(lora.BASES))
def test_a_frozen_base_costs_what_the_formula_says(world: World, where: str) -> None:
    for losses, same, measured, expected in on(world, where):
        assert losses[-1] < losses[0] - 0.1
        assert same
        assert measured.held == expected.held
        if world.size > 1:
            assert measured.sent == expected.sent
            assert expected.gathered <= measured.gathered <= expected.gathered * 1.2


@pytest.mark.world(4)
def test_where_the_base_lives_does_not_change_the_curve(world: World) -> None:
    curves = [torch.tensor(on(world, where)[0][0]) for where in lora.BASES]
    for curve in curves[1:]:
        assert (curve - curves[0]).abs().max() < 1e-12
