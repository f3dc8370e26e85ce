"""A run is its steps, one after another; one that stops goes on as if it had not."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch

import shardfn as sf
from shardfn.testing import World
from tests.refusals import told
from tests.run.toy import Rows, begin, mesh_here, step_of, whole


def bare_and_loop(steps: int) -> list[bool]:
    mesh = mesh_here()
    step, rows = step_of(mesh), Rows(mesh)(0)
    state, losses = begin(mesh), []
    for _ in range(steps):
        state, metrics = step(state, next(rows))
        losses.append(metrics["loss"].item())
    told: list[Any] = []
    ended, run = sf.run.loop(step_of(mesh), begin(mesh), Rows(mesh), steps=steps, report=lambda *one: told.append(one))
    mine = [(n, metrics["loss"]) for n, metrics in told]
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return [
        all(map(torch.equal, whole(ended), whole(state))), list(run.metrics["loss"].values()) == losses,
        mine == (list(enumerate(losses, 1)) if first else []), ended["seen"] == 8 * steps,
        (run.start, run.step, run.ended) == (0, steps, "finished"), run.metrics["rows"][steps] == 8,
    ]  # fmt: skip


@pytest.mark.parametrize("world", [2, 4], indirect=True)
def test_a_run_is_the_steps_of_a_bare_loop_and_tells_all_of_them(world: World) -> None:
    assert world.run(bare_and_loop, 7) == [[True] * 6] * world.size


def parts(folder: Path, ends: list[int], noise: float) -> tuple[list[Any], list[float]]:
    mesh = mesh_here()
    losses: dict[int, float] = {}
    for end in ends:
        torch.manual_seed(end)
        step = step_of(mesh, noise)
        state, run = sf.run.loop(
            step, begin(mesh), Rows(mesh), steps=end, save=folder, save_every=2, keep_last=2, report=[]
        )
        losses |= run.metrics.get("loss", {})
    return whole(state), [losses[n] for n in range(1, ends[-1] + 1)]


@pytest.mark.parametrize("world", [1, 2, 4], indirect=True)
def test_a_run_in_parts_is_bit_for_bit_the_run_in_one(world: World, tmp_path: Path) -> None:
    apart = world.run(parts, tmp_path / "apart", [3, 7, 7, 12], 0.3)
    once = world.run(parts, tmp_path / "once", [12], 0.3)
    for (a, losses), (b, others) in zip(apart, once, strict=True):
        assert losses == others
        assert all(map(torch.equal, a, b))
    assert len(list((tmp_path / "once").iterdir())) == 2


def test_it_goes_on_with_other_numbers_of_ranks_to_rounding(tmp_path: Path) -> None:
    from shardfn.testing.world import world as shared

    for size, end in ((2, 4), (4, 9), (1, 12)):
        found = shared(size).run(parts_with, tmp_path / "changing", end)
    once = shared(2).run(parts_with, tmp_path / "once", 12)
    for a, b in zip(found[0], once[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def parts_with(folder: Path, end: int) -> list[Any]:
    mesh = mesh_here()
    return whole(sf.run.loop(step_of(mesh), begin(mesh), Rows(mesh), steps=end, save=folder, report=[])[0])


def drawn(folder: Path) -> list[Any]:
    """What each generator gives in a step, in batches and in an evaluation."""
    mesh, seen = mesh_here(), []

    def numbers() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    def step(state: Any, batch: Any) -> Any:
        seen.append(numbers() + batch)
        return state + 1, {"loss": 0.0}

    def evaluate(state: Any) -> Any:
        numbers()
        return {"drawn": random.random()}

    def batches(start: int) -> Any:
        for n in itertools.count():  # as a loader that reads what comes before once more
            batch = numbers()
            if n >= start:
                yield batch

    batches.axes, batches.mesh = ("shard",), mesh  # type: ignore[attr-defined]
    for end, evaluation in ((2, None), (5, (evaluate, 1))):
        sf.run.loop(step, 0, batches, steps=end, save=folder / "a", evaluate=evaluation, report=[])
    apart, seen = seen, []
    _, run = sf.run.loop(step, 0, batches, steps=5, save=folder / "b", evaluate=evaluate, report=[])
    return [apart == seen, apart, list(run.metrics["eval/drawn"])]


@pytest.mark.world(2)
def test_random_numbers_are_those_of_step_and_place_whatever_happens_between(world: World, tmp_path: Path) -> None:
    (same, first, evaluated), (also, second, _) = world.run(drawn, tmp_path)
    assert same
    assert also
    assert evaluated == [5]
    every = [number for rank in (first, second) for step in rank for number in step]
    assert len(set(every)) == len(every) == 2 * 5 * 6


def evaluated(folder: Path) -> tuple[list[Any], list[Any]]:
    told: list[Any] = []

    def evaluate(state: Any) -> Any:
        return {"state": torch.tensor(state)}

    def step(state: int, batch: int) -> Any:
        return state + batch, {"loss": torch.tensor(float(batch))}

    every: Any = {"first": (evaluate, 2), "last": evaluate}
    sf.run.loop(step, 0, lambda start: range(start, 9), steps=5, evaluate=every, report=lambda *one: told.append(one))
    both: list[Any] = []
    reports = [lambda *one: told.append(one), lambda *one: both.append(one)]
    _, run = sf.run.loop(step, 0, range(9), steps=3, evaluate=evaluate, report=reports)
    return [(n, m) for n, m in told if "loss" not in m], [run.metrics, len(both)]


def test_what_is_evaluated_is_reported_at_its_own_interval_and_at_the_end(tmp_path: Path) -> None:
    told, (metrics, lines) = evaluated(tmp_path)
    assert told == [
        (2, {"eval/first/state": 1.0}), (4, {"eval/first/state": 6.0}), (5, {"eval/first/state": 10.0}),
        (5, {"eval/last/state": 10.0}), (3, {"eval/state": 3.0}),
    ]  # fmt: skip
    assert metrics["eval/state"] == {3: 3.0}
    assert metrics["loss"] == {1: 0.0, 2: 1.0, 3: 2.0}
    assert lines == 4


def test_metrics_may_lie_in_memory_that_the_next_step_writes_to() -> None:
    count = torch.zeros(())

    def step(state: torch.Tensor, batch: int) -> Any:
        state += 1
        return state, {"loss": state}

    _, run = sf.run.loop(step, count, range(9), steps=6, report=[])
    assert list(run.metrics["loss"].values()) == [1, 2, 3, 4, 5, 6]


def test_figures_of_a_step_are_reported() -> None:
    told: list[dict[str, float]] = []

    def step(state: int, batch: Any) -> Any:
        return state, {"loss": 1.0}

    lengths = [16, 8, 64, 16, 2]
    rows = [{"tokens": torch.zeros(4, length, dtype=torch.int64)} for length in lengths]
    sf.run.loop(step, 0, rows, steps=5, report=lambda _, metrics: told.append(metrics), flops=1e9, peak_flops=1e12)
    assert list(told[0]) == ["loss", "seconds", "tokens_per_second", "memory_gib", "tflops", "mfu"]
    for one, length in zip(told, lengths, strict=True):
        assert one["tokens_per_second"] * one["seconds"] == pytest.approx(4 * length)
        assert one["tflops"] * one["seconds"] == pytest.approx(1e-3)
        assert one["mfu"] == pytest.approx(one["tflops"])
        assert 0.01 < one["memory_gib"] < 100


def test_each_step_is_said_to_take_what_it_took_however_late_its_metrics_are_read() -> None:
    told: list[float] = []

    def step(state: int, batch: Any) -> Any:
        time.sleep(0.02)
        return state, {"loss": 1.0}

    began = time.perf_counter()
    sf.run.loop(step, 0, range(5), steps=5, report=lambda _, metrics: told.append(metrics["seconds"]))
    assert min(told) >= 0.02
    assert sum(told) <= time.perf_counter() - began


def begun_elsewhere(folder: str) -> Any:
    mesh = sf.make_mesh(data=-1, device="cpu")
    params = sf.shard({"w": torch.zeros(4, dtype=torch.float64)}, mesh, sf.full_shard("data"))
    numbers: list[int] = []

    def step(state: Any, batch: int, n: int) -> Any:
        numbers.append(n)
        return optree.tree_map(lambda x: x + n * batch, state), {"loss": float(n)}

    def rows(start: int) -> range:
        return range(start, 99)

    whole, _ = sf.run.loop(step, params, rows, steps=6, report=[])
    half, _ = sf.run.loop(step, params, rows, steps=3, report=[])
    end, run = sf.run.loop(step, half, rows, steps=6, start=3, report=[], save=f"{folder}/x", save_every=2, keep_last=9)
    _, resumed = sf.run.loop(step, half, rows, steps=8, start=3, report=[], save=f"{folder}/x")
    first = min(name for name in os.listdir(f"{folder}/x") if name[0] != ".")  # the other rank may hold its lock yet
    facts = (run.start, run.step, resumed.start, list(run.metrics["loss"]), [first])
    copy = pickle.loads(pickle.dumps(run))
    assert dict(copy.metrics["loss"]) == dict(run.metrics["loss"])
    wrong = told(lambda: sf.run.loop(step, params, rows, steps=2, start=3, report=[]))
    return sf.unshard(end)["w"].equal(sf.unshard(whole)["w"]), facts, numbers, wrong


@pytest.mark.world(2)
def test_run_goes_on_from_a_state_of_elsewhere_and_steps_know_their_number(world: World, tmp_path: Path) -> None:
    for same, facts, numbers, wrong in world.run(begun_elsewhere, str(tmp_path)):
        assert same
        assert facts == (3, 6, 6, [4, 5, 6], ["step-00000003"])
        assert numbers == [*range(1, 7), *range(1, 4), *range(4, 7), 7, 8]
        assert "start must be the number of steps that the state has taken, 0 to 2" in wrong
