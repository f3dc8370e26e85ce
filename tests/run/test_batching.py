"""Batches of any source: the same on any number of ranks, from any step on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

import shardfn as sf
from shardfn.testing import World, world

STEPS = sorted(random.Random(3).sample(range(1000), 20))


class Noisy(Dataset[Any]):
    """Rows with random numbers of all kinds in them."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Any]:
        assert 0 <= row < self.count
        return {"row": row, "noise": (random.random(), np.random.rand(), torch.rand(2).double())}


class AtOnce(Noisy):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [{"row": row, "x": torch.full((2,), row)} for row in rows]

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row, "x": torch.full((2,), row)}


def sources() -> dict[str, Any]:
    x = torch.arange(80).view(40, 2)
    return {
        "tensor": x, "dict": {"x": x, "y": x.numpy()[:, 0]}, "tuple": (x, [x.double()]), "list": list(range(40)),
        "noisy": Noisy(), "subset": Subset(Subset(Noisy(100), range(50)), range(5, 45)), "at once": AtOnce(),
    }  # fmt: skip


def flat(batch: Any) -> list[Any]:
    """Every leaf's rows as lists."""
    if isinstance(batch, dict):
        return flat(list(batch.values()))
    if isinstance(batch, (list, tuple)):
        return [leaf for part in batch for leaf in flat(part)]
    assert isinstance(batch, Tensor)
    return [batch.tolist()]


def at(steps: list[int], name: str, sizes: dict[str, int], axes: Any, batch: int = 8, **more: Any) -> list[Any]:
    mesh = sf.make_mesh(device="cpu", **sizes)
    batches = sf.run.batches(sources()[name], mesh, axes, batch, 7, **more)
    return [flat(next(batches(step))) for step in steps]


def whole(parts: list[Any]) -> list[Any]:
    """One batch of those of several ranks, each leaf."""
    return [list(itertools.chain(*leaves)) for leaves in zip(*parts, strict=True)]


SAMPLES: dict[str, Any] = {"batch": 32, "sample_rate": 0.2}


@pytest.mark.parametrize("name", sources())
@pytest.mark.parametrize("more", [{}, SAMPLES], ids=["batches", "samples"])
def test_ranks_have_parts_of_the_same_batches(name: str, more: dict[str, Any]) -> None:
    alone = world(1).run(at, STEPS, name, {"data": 1}, "data", **more)[0]
    assert not more or len({sum(step[-1]) for step in alone}) > 2
    two = world(2).run(at, STEPS, name, {"data": 2}, "data", **more)
    four = world(4).run(at, STEPS, name, {"replica": 2, "shard": 2}, ("replica", "shard"), **more)
    for step in range(len(STEPS)):
        assert whole([rank[step] for rank in two]) == whole([rank[step] for rank in four]) == alone[step]
    grid = world(4).run(at, STEPS[:3], name, {"data": 2, "tensor": 2}, "data", **more)
    assert grid == [rank[:3] for rank in (two[0], two[0], two[1], two[1])]
    assert world(2).run(at, STEPS[:3], name, {"tensor": 2}, (), **more) == [alone[:3]] * 2


@pytest.mark.parametrize(("name", "workers"), [("noisy", 1), ("noisy", 2), ("subset", 2), ("dict", 2)])
def test_workers_read_what_one_process_reads(name: str, workers: int) -> None:
    wanted = world(2).run(at, [0, 5], name, {"data": 2}, "data")
    assert world(2).run(at, [0, 5], name, {"data": 2}, "data", workers=workers) == wanted


def resumed(name: str, last: Any, prefetch: int) -> None:
    mesh = sf.make_mesh(data=-1, device="cpu")
    more: Any = {"epochs": 2, "remainder": last, "prefetch": prefetch}
    batches = sf.run.batches(sources()[name], mesh, "data", 12, 7, **more)
    every = [flat(one) for one in batches]
    assert len(every) == len(batches) == {"drop": 6, "pad": 8, "wrap": 7}[last]
    for step in range(len(every) + 2):
        assert [flat(one) for one in batches(step)] == every[step:]
        from_there = sf.run.batches(sources()[name], mesh, "data", 12, 7, start=step, **more)
        assert [flat(one) for one in itertools.islice(from_there, 1)] == every[step : step + 1]
        assert from_there.identity == batches.identity


@pytest.mark.parametrize("name", ["dict", "at once"])
@pytest.mark.parametrize(("last", "prefetch"), [("drop", 0), ("pad", 2), ("wrap", 1)])
@pytest.mark.world(2)
def test_a_start_is_a_step_of_the_whole_run(world: World, name: str, last: str, prefetch: int) -> None:
    world.run(resumed, name, last, prefetch)


def masks() -> Any:
    mesh = sf.make_mesh(data=-1, device="cpu")
    found = []
    for source in (torch.arange(10), {"x": torch.arange(10)}, (torch.arange(10), torch.arange(10))):
        batches = list(sf.run.batches(source, mesh, "data", 4, 0, remainder="pad", epochs=1))
        assert {len(x) for batch in batches for x in flat(batch)} == {2}
        found.append([flat(batch) for batch in batches])
    return found


@pytest.mark.world(2)
def test_what_fills_the_last_batch_is_masked(world: World) -> None:
    ranks = world.run(masks)
    for kind in range(3):
        steps = [whole([rank[kind][step] for rank in ranks]) for step in range(3)]
        assert [step[-1] for step in steps] == [[True] * 4, [True] * 4, [True, True, False, False]]
        real = [row for step in steps for row, is_real in zip(step[0], step[-1], strict=True) if is_real]
        assert sorted(real) == list(range(10))
        assert all(len(step) == (3 if kind == 2 else 2) for step in steps)


def generators() -> bool:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    for workers in (0, 1):
        next(iter(sf.run.batches(Noisy(), sf.make_mesh(data=1, device="cpu"), "data", 8, 0, workers=workers)))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    return before == after


def test_the_programs_own_random_numbers_are_left_alone() -> None:
    assert world(1).run(generators) == [True]


def identities() -> list[Any]:
    mesh, x = sf.make_mesh(data=1, device="cpu"), torch.randn(64, 3)

    def of(source: Any = x, batch: int = 8, seed: int = 0, **more: Any) -> Any:
        return sf.run.batches(source, mesh, "data", batch, seed, **more).identity

    other = x.clone()
    other[0] = 1
    same = [of(), of(x.clone()), of(prefetch=0), of(start=3), of(epochs=2)]
    others = [
        of(x[:63]), of(other), of(x.double()), of(batch=4), of(seed=1), of(shuffle=False), of(remainder="pad"),
        of(list(range(64))), of(list(range(1, 65))), of((x,)),
    ]  # fmt: skip
    assert all(type(value) in (int, str) for value in of().values())
    return [same, others]


def test_an_identity_is_that_of_the_order() -> None:
    ((same, others),) = world(1).run(identities)
    assert all(one == same[0] for one in same)
    for i, one in enumerate(others):
        assert one not in [same[0], *others[:i]]


def rows_of_words(rows: list[Any]) -> Any:
    return [str(row) for row in rows], default_collate(rows)


def custom() -> Any:
    mesh = sf.make_mesh(data=-1, device="cpu")
    batches = sf.run.batches(torch.arange(8), mesh, "data", 4, 0, collate=rows_of_words, shuffle=False)
    assert (batches.steps_per_epoch, batches.steps, batches.axes) == (2, None, ("data",))
    words, rows = next(iter(batches))
    return words, rows.tolist()


@pytest.mark.world(2)
def test_a_collate_of_ones_own_makes_the_batch(world: World) -> None:
    assert world.run(custom) == [(["tensor(0)", "tensor(1)"], [0, 1]), (["tensor(2)", "tensor(3)"], [2, 3])]


def evaluated_between() -> Any:
    mesh = sf.make_mesh(data=-1, device="cpu")
    train = sf.run.batches(torch.arange(32), mesh, "data", 4, 0, epochs=1)
    test = sf.run.batches(torch.arange(8), mesh, "data", 4, 1, epochs=1)
    seen: list[Any] = []
    for batch in train:
        inner: Iterator[Any] = iter(test)
        seen.append((batch.tolist(), [one.tolist() for one in inner]))
    return seen


@pytest.mark.world(2)
def test_batches_of_two_kinds_are_read_at_the_same_time(world: World) -> None:
    first, second = world.run(evaluated_between)
    assert sorted(row for seen in (first, second) for train, _ in seen for row in train) == list(range(32))
    for seen in (first, second):
        assert all(tests == seen[0][1] for _, tests in seen)
