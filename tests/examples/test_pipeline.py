"""Layers that are cut over ranks train as on one, and the schedule is what is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardfn as sf
from examples import pipeline
from examples.run import curve
from examples.train_lm import train
from shardfn.testing import World, world

TINY = pipeline.Config(
    width=16, heads=2, layers=5, hidden=24, context=16, batch=8, warmup=2, micro=4, dtype=torch.float64
)
STEPS = 3
CELLS: list[tuple[int, int, Any]] = [(4, 1, "1f1b"), (4, 1, "gpipe"), (2, 2, "1f1b"), (2, 2, "gpipe")]


def text() -> torch.Tensor:
    return torch.frombuffer(bytearray(b"def f(x):\n    return x + 1\n" * 40), dtype=torch.uint8)


def alone() -> tuple[list[float], list[float]]:
    """Without a pipeline, and through one of one rank."""
    plain = train(TINY, sf.make_mesh(device="cpu", replica=1, shard=1), (text(), text()), STEPS, 0, sf.ddp(()))
    return curve(plain.run), pipeline.train(TINY, sf.make_mesh(device="cpu", pipe=1, shard=1), text(), STEPS, 0)[0]


def cut() -> list[Any]:
    found = []
    for pipe, shard, schedule in CELLS:
        mesh = sf.make_mesh(device="cpu", pipe=pipe, shard=shard)
        losses, log = pipeline.train(replace(TINY, schedule=schedule), mesh, text(), STEPS, 0)
        sent = log.bytes(op="send", backward=False), log.bytes(op="send", backward=True)
        found.append((losses, sent, pipeline.formula(TINY, shard, pipe, mesh.get_local_rank("pipe"))))
    return found


@pytest.mark.world(4)
def test_the_curve_is_that_of_one_process_and_the_bytes_are_those_of_the_formula(world: World) -> None:
    wanted, of_one_rank = on_one_process()
    assert wanted[-1] < wanted[0] - 0.1, "nothing was learnt"
    assert ((of_one_rank - wanted).abs() / wanted).max() < 1e-12
    for found in world.with_deadline(200).run(cut):
        for cell, (losses, sent, formula) in zip(CELLS, found, strict=True):
            assert ((torch.tensor(losses, dtype=torch.float64) - wanted).abs() / wanted).max() < 1e-12, cell
            assert sent == formula, cell


def on_one_process() -> list[torch.Tensor]:
    return [torch.tensor(losses, dtype=torch.float64) for losses in world(1).with_deadline(200).run(alone)[0]]


def test_the_schedule_is_drawn_slot_by_slot() -> None:
    assert pipeline.picture("1f1b", 2, 3) == [
        "F0 F1 .  B0 F2 B1 .  B2",
        ".  F0 B0 F1 B1 F2 B2 .".rstrip(),
    ]
    assert pipeline.picture("gpipe", 2, 2) == [
        "F0 F1 .  .  B0 B1",
        ".  F0 F1 B0 B1 .",
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("size", "count"), [(1, 3), (2, 5), (4, 2), (4, 8)])
def test_ranks_wait_for_the_share_of_time_that_is_said(schedule: Any, size: int, count: int) -> None:
    for row in pipeline.picture(schedule, size, count):
        cells = row.split()
        assert cells.count(".") * (count + size - 1) == len(cells) * (size - 1)


def test_more_ranks_than_layers_are_refused_on_every_rank() -> None:
    def body() -> None:
        mesh = sf.make_mesh(device="cpu", pipe=4, shard=1)
        pipeline.train(replace(TINY, layers=3), mesh, text(), 1, 0)

    for error in world(4).with_deadline(200).errors(body):
        assert isinstance(error, ValueError)
        assert "3 layers cannot be shared by 4 ranks" in str(error)
