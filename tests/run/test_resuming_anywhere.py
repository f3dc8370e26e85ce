"""A run goes on from any step, on any number of ranks, as if it had never stopped."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P
from shardfn.testing import World, world

STEPS, MORE, ROWS = 30, 3, 52  # of which 8 a step: epochs end within batches
DATA = ("replica", "shard")


@sf.stage
def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def maker(generator: torch.Generator) -> Any:
    return {"w": torch.randn(6, 6, generator=generator, dtype=torch.float64)}


def trained(folder: str, steps: int, **more: Any) -> tuple[int, list[float], list[Tensor]]:
    """The step that it went on from, the losses after it, and the rows of all ranks."""
    replica = 2 if torch.distributed.get_world_size() == 4 else 1
    mesh = sf.make_mesh(device="cpu", replica=replica, shard=-1)
    source = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = sf.run.batches(source, mesh, DATA, 8, seed=3, remainder="wrap")
    params = sf.init_sharded([maker] * 3, 0, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    optimizer, seen = so.adamw(1e-2), []

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=(..., P(), P()))
    def on_mesh(state: Any, rows: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            x = rows
            for p in sf.layers(params):
                x = layer(p, x)
            return sf.psum((x - 0.5).square().sum(), DATA) / sf.psum(rows.numel(), DATA)

        value, grads = sf.value_and_grad(loss)(state["params"])
        params, moments = optimizer.step(state["params"], grads, state["moments"])
        return {"params": params, "moments": moments}, value, sf.all_gather(rows, DATA, to="invariant")

    def step(state: Any, rows: Tensor) -> Any:
        state, value, whole = on_mesh(state, rows)
        seen.append(whole)
        return state, {"loss": value}

    state = {"params": params, "moments": optimizer.init(params)}
    _, run = sf.run.loop(step, state, batches, steps=steps, save=folder, report=[], **more)
    return run.start, list(run.metrics["loss"].values()), seen


def from_each(folder: str, numbers: list[int]) -> list[Any]:
    return [trained(f"{folder}/{n}", n + MORE) for n in numbers]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], list[Tensor]]:
    """Checkpoints of all steps of one run, and what it did."""
    folder = tmp_path_factory.mktemp("whole")
    ((_, losses, rows),) = world(1).with_deadline(200).run(trained, str(folder), STEPS, save_every=1)
    return folder, losses, rows


@pytest.mark.parametrize("world", [(n, "processes") for n in (1, 2, 4)], indirect=True, ids=["1", "2", "4"])
def test_rows_and_losses_after_any_step_are_those_of_the_run_that_never_stopped(
    world: World, whole: tuple[Path, list[float], list[Tensor]], tmp_path: Path
) -> None:
    checkpoints, losses, rows = whole
    numbers = random.Random(world.size).sample(range(1, STEPS - MORE + 1), 20)
    for n in numbers:
        shutil.copytree(checkpoints / f"step-{n:08}", tmp_path / str(n) / f"step-{n:08}")
    for found in world.with_deadline(200).run(from_each, str(tmp_path), numbers):
        for n, (start, after, seen) in zip(numbers, found, strict=True):
            assert start == n
            assert all(map(torch.equal, seen, rows[n : n + MORE]))
            want = torch.tensor(losses[n : n + MORE], dtype=torch.float64)
            assert ((torch.tensor(after, dtype=torch.float64) - want).abs() / want).max() < 1e-13
