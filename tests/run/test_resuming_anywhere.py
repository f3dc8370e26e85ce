"""A run goes on from any step, after kills, and without a host that was lost, as if it had never stopped."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks import elastic_rank
from benchmarks.elastic import Job, Place
from shardfn import P
from shardfn.testing import World, world
from tests.killed_runs import difference, kill
from tests.launched import workers

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


# --- kills at any moment; `python -m tests.killed_runs` does more of them ---


@pytest.mark.parametrize(("sizes", "parts"), [([1], 0), ([2], 0), ([4], 0), ([1, 2, 4], 0), ([4, 2, 1], 8)], ids=str)
def test_killed_runs_go_on_as_if_nothing_had_happened(sizes: list[int], parts: int, tmp_path: Path) -> None:
    same_bits = len(sizes) == 1 or parts > 0
    noise = 0.2 if same_bits else 0.0
    begun = kill(3, sizes, seed=len(sizes) + sizes[0], folder=tmp_path, steps=10, noise=noise, parts=parts)
    assert len(begun) == 4
    far, same = difference(tmp_path, 1 if parts else sizes[0], noise, parts)
    if same_bits:
        assert (far, same) == (0, True)
    else:
        assert far < 1e-12


# --- a host is lost and returns; torchrun starts the processes ---


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """On two hosts that are this machine, with so many ranks each."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    first, second, shard = request.param
    places = {"a": Place((), "localhost", first), "b": Place((), "localhost", second)}
    folder = tmp_path / "job"
    folder.mkdir()
    made = Job(folder, places, ("--pace", "0.05", "--shard", str(shard)), variables, port)
    yield made
    for host in made.agents:
        lost(made, host)


def lost(job: Job, host: str) -> None:
    """All processes of a host are killed, its agent before those that it would start again."""
    agent = job.agents[host]
    if agent.poll() is None:
        for process in [agent.pid, *workers(agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait()


@pytest.mark.parametrize("job", [(1, 1, 1)], indirect=True)
def test_a_run_goes_on_without_a_host_and_with_it_again(job: Job, tmp_path: Path) -> None:
    for host in job.places:
        job.start(host)
    job.trained(2, elastic_rank.EVERY + 2)
    with job.event("killed", 1, 3):
        lost(job, "b")
    with job.event("returned", 2, 3):
        job.start("b")
    job.end()
    assert [row["steps repeated"] >= 0 for row in job.rows] == [True, True]
    rows = job.steps()
    apart = tmp_path / "apart"
    apart.mkdir()
    world(2).with_deadline(200).run(elastic_rank.train, apart, rows[-1]["step"] + 1, 0.0, 1)
    wanted = {row["step"]: row["loss"] for row in elastic_rank.rows_of(apart)}
    for row in rows:
        assert abs(row["loss"] / wanted[row["step"]] - 1) < 1e-12
