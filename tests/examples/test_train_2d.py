"""On two axes the curve is that of the main job, and `tensor` costs what the formula says."""

from __future__ import annotations

from typing import Any

import torch

import shardfn as sf
from examples import train_2d, train_lm
from examples.run import curve
from shardfn.testing import world
from tests.examples.test_pipeline import text

TINY = train_lm.Config(
    width=16, heads=4, layers=2, hidden=24, context=16, batch=8, warmup=3, dtype=torch.float64, clip=0.5
)
STEPS = 4
CELLS = [(2, 2, False), (2, 2, True), (1, 4, False), (1, 4, True), (4, 1, False)]


def alone() -> list[float]:
    mesh = sf.make_mesh(device="cpu", replica=1, shard=1)
    return curve(train_lm.train(TINY, mesh, (text(), text()), STEPS, 0, sf.full_shard("shard")).run)


def on_two_axes() -> list[Any]:
    found = []
    for shard, tensor, sequence in CELLS:
        mesh = sf.make_mesh(device="cpu", shard=shard, tensor=tensor)
        losses, log = train_2d.train(TINY, mesh, text(), STEPS, 0, sequence)
        found.append((losses, train_2d.sent(log), train_2d.formula(TINY, shard, tensor, sequence)))
    return found


def test_the_curve_is_that_of_one_process_and_the_bytes_are_those_of_the_formula() -> None:
    wanted = torch.tensor(world(1).with_deadline(200).run(alone)[0], dtype=torch.float64)
    assert wanted[-1] < wanted[0] - 0.1, "nothing was learnt"
    for found in world(4).with_deadline(200).run(on_two_axes):
        assert len(found) == len(CELLS)
        for cell, (losses, sent, formula) in zip(CELLS, found, strict=True):
            assert ((torch.tensor(losses, dtype=torch.float64) - wanted).abs() / wanted).max() < 1e-12, cell
            assert sent == formula, cell
