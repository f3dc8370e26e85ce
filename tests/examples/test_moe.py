"""A mixture of experts trains alike on every mesh, and tokens travel as the formula says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardfn as sf
from examples import moe
from shardfn.testing import World, world

TINY = moe.Config(
    width=16, heads=2, layers=2, hidden=12, context=16, batch=8, warmup=2, experts=4, group=4, capacity=3,
    dtype=torch.float64,
)  # fmt: skip
STEPS = 3
CONFIGS = {"capacity": TINY, "dropless": replace(TINY, capacity=None)}


def trained(cells: list[tuple[int, int]]) -> list[Any]:
    text = torch.frombuffer(bytearray(b"def f(x):\n    return x + 1\n" * 40), dtype=torch.uint8)
    found = []
    for data, expert in cells:
        for name, config in CONFIGS.items():
            mesh = sf.make_mesh(device="cpu", data=data, expert=expert)
            losses, shares, log = moe.train(config, mesh, text, STEPS, 0)
            curve = torch.tensor(losses, dtype=torch.float64)
            found.append((name, curve, torch.tensor(shares), moe.travelled(log), (data, expert)))
    return found


@pytest.mark.world(4)
def test_every_mesh_has_the_curve_of_one_process_and_the_bytes_of_the_formula(world: World) -> None:
    wanted = alone()
    for found in world.with_deadline(200).run(trained, [(2, 2), (1, 4), (4, 1)]):
        assert len(found) == 6
        for name, losses, shares, sent, cell in found:
            assert ((losses - wanted[name][0]).abs() / losses).max() < 1e-12, (name, cell)
            assert torch.equal(shares, wanted[name][1]), (name, cell)
            if name == "capacity":
                assert sent == moe.formula(TINY, *cell), cell


def alone() -> dict[str, Any]:
    found = {
        name: (losses, shares) for name, losses, shares, *_ in world(1).with_deadline(200).run(trained, [(1, 1)])[0]
    }
    for name, (losses, shares) in found.items():
        assert losses[-1] < losses[0] - 0.1, "nothing was learnt"
        assert abs(shares[:-1].sum().item() - 1) < 1e-6
        assert (shares[-1] > 0) == (name == "capacity")
    return found


@pytest.mark.world(4)
def test_tokens_beyond_the_capacity_can_be_refused_on_every_rank(world: World) -> None:
    def body() -> None:
        mesh = sf.make_mesh(device="cpu", data=2, expert=2)
        text = torch.arange(200, dtype=torch.uint8)
        moe.train(replace(TINY, capacity=1, overflow="error"), mesh, text, 1, 0)

    for error in world.with_deadline(200).errors(body):
        assert isinstance(error, ValueError)
        assert "beyond the capacity of 1" in str(error)
