"""A sequence that is cut over ranks trains as a whole one does, and costs what the formula says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardfn as sf
from examples import ring_attention
from shardfn.testing import World, world

TINY = ring_attention.Config(width=16, heads=4, layers=2, hidden=24, context=32, batch=2, warmup=2, dtype=torch.float64)
STEPS = 3
CELLS = {"ring": TINY, "ring, in order": replace(TINY, in_order=True), "ulysses": replace(TINY, method="ulysses")}


def trained() -> dict[str, Any]:
    mesh = sf.make_mesh(device="cpu", context=-1)
    text = torch.frombuffer(bytearray(b"def f(x):\n    return x + 1\n" * 40), dtype=torch.uint8)
    found = {}
    for name, config in CELLS.items():
        losses, log = ring_attention.train(config, mesh, text, STEPS, 0)
        found[name] = losses, ring_attention.measured(log, config), ring_attention.formula(config, mesh.size())
    return found


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_the_curve_is_that_of_one_process_and_the_bytes_are_those_of_the_formula(world: World) -> None:
    wanted = alone()
    assert wanted[-1] < wanted[0] - 0.1, "nothing was learnt"
    for found in world.with_deadline(200).run(trained):
        for name, (losses, measured, formula) in found.items():
            assert ((torch.tensor(losses, dtype=torch.float64) - wanted).abs() / wanted).max() < 1e-12, name
            assert measured == formula, name
            assert measured.calls > 0


def alone() -> torch.Tensor:
    curves = [torch.tensor(losses, dtype=torch.float64) for losses, *_ in world(1).run(trained)[0].values()]
    assert all(torch.equal(curve, curves[0]) for curve in curves), "on one rank all methods are one"
    return curves[0]


def test_a_sequence_that_does_not_divide_is_refused_on_every_rank() -> None:
    def body() -> None:
        mesh = sf.make_mesh(device="cpu", context=4)
        ring_attention.train(replace(TINY, context=28), mesh, torch.zeros(100, dtype=torch.uint8), 1, 0)

    for error in world(4).errors(body):
        assert isinstance(error, ValueError)
        assert "28" in str(error)
        assert "pad it to 32" in str(error)
