"""Poisson sampling: rows that come independently, the same on any number of ranks, none of which is left out."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shardfn as sf
from shardfn.curvature import dp_grads
from shardfn.run import order
from shardfn.run.order import RARE, Sample, sample_bound
from shardfn.testing import World, world
from tests.models import distance, normal
from tests.refusals import told
from tests.run.test_batching import SAMPLES, at, flat, sources


@given(
    sample=st.builds(
        Sample, st.integers(1, 300), st.just(304), st.integers(-(2**70), 2**70), st.floats(1e-9, 1.0, exclude_min=True)
    ),
    step=st.integers(0, 10**9),
    ranks=st.sampled_from([1, 2, 4, 8]),
)
def test_ranks_cut_one_sample_of_which_each_has_about_as_many(sample: Sample, step: int, ranks: int) -> None:
    size = sample.batch // ranks
    parts = [sample.part(step, rank * size, (rank + 1) * size) for rank in range(ranks)]
    real = [part.rows[part.real].tolist() for part in parts]
    assert list(itertools.chain(*real)) == sample.rows(step).tolist()
    counts = [len(rows) for rows in real]
    assert max(counts) - min(counts) <= 1
    assert all((part.rows[~part.real] == 0).all() and (part.epochs == step).all() for part in parts)
    assert (
        sample.rows(step).tolist() == Sample(sample.count, 10**6, sample.seed, sample.sample_rate).rows(step).tolist()
    )


def test_a_long_source_is_sampled_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(1000, 1000, 3, 0.3)
    before = sample.rows(2).tolist()
    monkeypatch.setattr(order, "AT_A_TIME", 300)
    assert sample.rows(2).tolist() == before


def test_samples_stay_what_they_are() -> None:
    """A run goes on with a later version of this library, and of numpy."""
    assert Sample(1000, 1000, 7, 0.01).rows(6).tolist() == [50, 297, 345, 413, 468, 475, 512, 791, 858, 966]


@pytest.mark.parametrize("rate", [0.03, 0.5, 0.9])
def test_rows_come_with_the_rate_and_independently(rate: float) -> None:
    """Sizes, rows, pairs of rows, and the same row at steps that follow each other; another sample for another seed."""
    count, steps = 40, 6000
    seen = np.zeros((3, steps, count))
    for seed in range(3):
        for step in range(steps):
            seen[seed, step, Sample(count, count, seed, rate).rows(step)] = 1
    apart = (seen - rate) / math.sqrt(rate * (1 - rate))
    assert abs(apart.mean()) < 5 / math.sqrt(apart.size)
    sizes = apart[0].sum(1) / math.sqrt(count)
    spread = math.sqrt((2 + (1 - 6 * rate * (1 - rate)) / (count * rate * (1 - rate))) / steps)
    assert abs(sizes.var() - 1) < 5 * spread
    assert abs(apart[0].mean(0)).max() < 5 / math.sqrt(steps)
    pairs = [apart[0].T @ apart[0], apart[0, 1:].T @ apart[0, :-1], apart[0].T @ apart[1], apart[1].T @ apart[2]]
    for number, products in enumerate(pairs):
        off = products / steps - (np.diag(np.diag(products)) / steps if number == 0 else 0)
        assert abs(off).max() < 5.5 / math.sqrt(steps), number


def test_a_rate_of_one_takes_all_and_a_tiny_one_none() -> None:
    assert Sample(9, 9, 0, 1.0).rows(3).tolist() == list(range(9))
    assert [len(Sample(9, 9, 0, 1e-12).rows(step)) for step in range(9)] == [0] * 9


@pytest.mark.parametrize(("count", "rate"), [(10, 0.5), (1797, 0.1), (60_000, 256 / 60_000), (10**9, 1e-8), (7, 1.0)])
def test_what_has_room_for_nearly_all_samples(count: int, rate: float) -> None:
    from scipy.stats import binom

    found = sample_bound(count, rate)
    assert binom.sf(found, count, rate) <= RARE
    assert found <= min(count, 1.05 * binom.isf(RARE, count, rate) + 3)


@pytest.mark.parametrize("name", ["noisy", "dict"])
def test_workers_sample_what_one_process_samples(name: str) -> None:
    wanted = world(2).run(at, [0, 5], name, {"data": 2}, "data", **SAMPLES)
    assert world(2).run(at, [0, 5], name, {"data": 2}, "data", workers=2, **SAMPLES) == wanted


def resumed(name: str, prefetch: int) -> None:
    mesh, more = sf.make_mesh(data=-1, device="cpu"), dict[str, Any](sample_rate=0.3, prefetch=prefetch)
    batches = sf.run.batches(sources()[name], mesh, "data", 40, 7, **more)
    assert (batches.steps, batches.steps_per_epoch) == (None, None)
    every = [flat(one) for one in itertools.islice(batches, 12)]
    for step in range(0, 12, 3):
        again = sf.run.batches(sources()[name], mesh, "data", 40, 7, start=step, **more)
        assert [flat(one) for one in itertools.islice(again, 2)] == every[step : step + 2]
    larger = sf.run.batches(sources()[name], mesh, "data", 44, 7, **more)
    assert batches.identity == larger.identity
    others: list[Any] = [{"seed": 8, "sample_rate": 0.3}, {"seed": 7, "sample_rate": 0.4}, {"seed": 7}]
    assert batches.identity not in [
        sf.run.batches(sources()[name], mesh, "data", 40, **other).identity for other in others
    ]


@pytest.mark.parametrize("name", ["dict", "noisy"])
@pytest.mark.world(2)
def test_a_start_is_a_step_of_the_whole_run(world: World, name: str) -> None:
    for prefetch in (0, 2):
        world.run(resumed, name, prefetch)


def full(name: str, workers: int) -> tuple[int, str]:
    """How many steps had room, and what was said at the one that had not."""
    mesh, seen = sf.make_mesh(data=-1, device="cpu"), list[Any]()
    before, order.RARE = order.RARE, 1.0
    try:
        batches = sf.run.batches(sources()[name], mesh, "data", 10, 7, sample_rate=0.2, workers=workers)
    finally:
        order.RARE = before
    return len(seen), told(lambda: seen.extend(batches)) + f" after {len(seen)}"


@pytest.mark.world(2)
@pytest.mark.parametrize(("name", "workers"), [("dict", 0), ("noisy", 0), ("noisy", 1)])
def test_a_sample_that_has_no_room_is_an_error_at_its_step(world: World, name: str, workers: int) -> None:
    sizes = [len(Sample(40, 10, 7, 0.2).rows(step)) for step in range(50)]
    step = next(step for step, size in enumerate(sizes) if size > 10)
    for _, said in world.run(full, name, workers):
        assert f"step {step} samples {sizes[step]} rows, more than batch=10 has room for" in said
        assert said.startswith("ValueError")
        assert said.endswith(f" after {step}")


@sf.stage
def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def losses(params: Any, x: Tensor) -> Tensor:
    return (layer(params["b"], layer(params["a"], x)) - 0.5).square().sum(1)


def privately(folder: str, steps: int) -> tuple[int, Any]:
    """The step at which a private run began, and its parameters."""
    mesh, optimizer = sf.make_mesh(device="cpu", data=-1), sf.optim.adam(0.1)
    batches = sf.run.batches((normal(60, 6, seed=1),), mesh, "data", 20, 5, sample_rate=0.05)
    params = sf.shard({"a": {"w": normal(6, 6, seed=2)}, "b": {"w": normal(6, 6, seed=3)}}, mesh, sf.full_shard("data"))

    @sf.shard_map(mesh=mesh, in_specs=(..., sf.P("data")), out_specs=...)
    def step(state: Any, batch: tuple[Tensor, Tensor]) -> Any:
        how: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 0.3, "expected_batch_size": 3.0, "seed": 9}
        x, mask = batch
        grads = dp_grads(losses, state["params"], x, mask=mask, step=state["step"], **how)
        params, moments = optimizer.step(state["params"], grads, state["moments"])
        return {"params": params, "moments": moments, "step": state["step"] + 1}, {}

    state = {"params": params, "moments": optimizer.init(params), "step": 0}
    state, run = sf.run.loop(step, state, batches, steps=steps, save=folder, save_every=3, report=[])
    return run.start, sf.unshard(state["params"])


def test_a_private_run_goes_on_at_any_step_on_any_number_of_ranks(tmp_path: Path) -> None:
    ((_, wanted),) = world(1).with_deadline(60).run(privately, str(tmp_path / "whole"), 9)
    for steps, ranks in ((3, 2), (6, 4), (9, 1)):
        for start, found in world(ranks).with_deadline(60).run(privately, str(tmp_path / "parts"), steps):
            assert start == steps - 3
            if steps == 9:
                assert distance(found, wanted) < 1e-12


def disagreeing() -> str:
    mesh = sf.make_mesh(data=-1, device="cpu")
    return told(lambda: sf.run.batches(torch.arange(40), mesh, "data", 40, 0, sample_rate=0.1 + 0.1 * mesh.get_rank()))


@pytest.mark.world(2)
def test_ranks_with_other_rates_are_told(world: World) -> None:
    for said in world.run(disagreeing):
        assert "sample_rate='0.1'" in said
        assert "sample_rate='0.2'" in said


def weighted(epoch: int) -> list[int]:
    """Row 3 half of the time."""
    g = torch.Generator().manual_seed(epoch)
    weights = torch.tensor([1.0, 1.0, 1.0, 3.0])
    return torch.multinomial(weights, 12, replacement=True, generator=g).tolist()


def sampled(start: int) -> Any:
    mesh = sf.make_mesh(data=-1, device="cpu")
    rows = torch.arange(4)
    given = sf.run.batches(rows, mesh, "data", 4, 0, epochs=3, sampler=weighted)
    others = [
        told(lambda: sf.run.batches(rows, mesh, "data", 4, 0, sampler=lambda epoch: [7])),
        told(
            lambda: list(
                sf.run.batches(rows, mesh, "data", 1 * mesh.size(), 0, epochs=2, sampler=lambda e: [0] * (4 + e))
            )
        ),
        told(lambda: sf.run.batches(rows, mesh, "data", 4, 0, sampler=weighted, sample_rate=0.5)),
        told(lambda: sf.run.batches(rows, mesh, "data", 4, 0, sampler=lambda _: [mesh.get_rank()] * 4)),
    ]
    return [x.tolist() for x in given(start)], len(given), others


@pytest.mark.world(2)
def test_sampler_gives_the_rows_of_each_epoch_from_any_step(world: World) -> None:
    wanted = [row for epoch in range(3) for row in weighted(epoch)]
    for start in (0, 4):
        (one, steps, others), (two, *_) = world.run(sampled, start)
        assert [row for pair in zip(one, two, strict=True) for part in pair for row in part] == wanted[4 * start :]
        assert steps == 9
        assert "sampler must give numbers of the source's 4 rows" in others[0]
        assert "sampler must give 4 rows in each epoch, as in the first, got 5 in epoch 1" in others[1]
        assert "without sample_rate=" in others[2]
        assert "ValueError" in others[3]
