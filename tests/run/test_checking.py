"""Batches of anybody's loader: the same rows on all ranks, other rows, too few batches."""

from __future__ import annotations

import itertools
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import shardfn as sf
from shardfn import P
from shardfn.quoting import MOST
from shardfn.run.randomness import place
from shardfn.testing import World
from tests.refusals import told


def rows(loader: Any, axes: Any = "data", **sizes: int) -> str | list[Any]:
    """The first leaf of each batch, or what is wrong."""
    mesh = sf.make_mesh(device="cpu", **(sizes or {"data": -1}))
    found: list[Any] = []
    wrong = told(lambda: found.extend(one[0].tolist() for one in sf.run.check_loader(loader(mesh), mesh, axes)))
    return found if wrong == "it was done" else wrong


def data(count: int = 64) -> Any:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(torch.arange(count), x)


def plain(_: Any) -> Any:
    return DataLoader(data(), batch_size=8)


def cut(mesh: Any) -> Any:
    where = {"num_replicas": mesh["data"].size(), "rank": mesh.get_local_rank("data"), "shuffle": False}
    return DataLoader(data(), batch_size=8, sampler=DistributedSampler(data(), **where))


def by_world(_: Any) -> Any:
    return DataLoader(data(), batch_size=8, sampler=DistributedSampler(data(), shuffle=False))


def small(_: Any) -> Any:
    return DataLoader(data(), batch_size=2)


def zeros(_: Any) -> Any:
    return [(torch.zeros(8, 3),)] * 5


def few_kinds(_: Any) -> Any:
    return [(torch.arange(64) % 4,)] * 5


def fewer(_: Any) -> Any:
    return [(torch.full((8,), dist.get_rank()),)] * (5 - dist.get_rank())


def shapes(_: Any) -> Any:
    return [(torch.full((8 - (step == 2 and dist.get_rank()),), dist.get_rank()),) for step in range(5)]


def failing(_: Any) -> Any:
    for step in range(5):
        if step == 3 and dist.get_rank() == 1:
            raise OSError("the disk is gone")
        yield (torch.full((8,), dist.get_rank()),)


@pytest.mark.world(2)
def test_a_forgotten_sampler_is_an_error_at_the_first_step(world: World) -> None:
    for told_ in world.run(rows, plain):
        assert "ranks 0 and 1 get the same rows" in told_
        assert "8 different rows up to step 0" in told_
    for told_ in world.run(rows, small):
        assert "up to step 3" in told_
    first, second = world.run(rows, cut)
    assert sorted(row for batch in first + second for row in batch) == list(range(64))


@pytest.mark.world(2)
def test_rows_that_are_alike_are_not_refused(world: World) -> None:
    assert [len(one) for one in world.run(rows, zeros)] == [5, 5]
    assert [len(one) for one in world.run(rows, few_kinds)] == [5, 5]
    assert world.run(rows, plain, ()) == [[list(range(at, at + 8)) for at in range(0, 64, 8)]] * 2


@pytest.mark.world(4)
def test_ranks_along_other_axes_have_the_same_rows(world: World) -> None:
    found = world.run(rows, cut, data=2, tensor=2)
    assert found[0] == found[1] != found[2] == found[3]
    for told_ in world.run(rows, by_world, data=2, tensor=2):
        assert "ranks 0 and 1 stand at the same place along data" in told_


@pytest.mark.world(2)
def test_different_numbers_and_shapes_of_batches_are_errors_on_every_rank(world: World) -> None:
    assert all("rank 1 has no batch for step 4, and rank 0 has one" in one for one in world.run(rows, fewer))
    for told_ in world.run(rows, shapes):
        assert "the batches of step 2 differ between ranks: rank 0 has [0] int64 [8]; rank 1 has [0] int64 [7]" in told_


@pytest.mark.world(2)
def test_a_loader_that_fails_fails_everywhere_at_its_step(world: World) -> None:
    first, second = world.run(rows, failing)
    assert "RuntimeError: sf.run.check_loader: rank 1 could not read its batch of step 3" in first
    assert "OSError: the disk is gone" in first
    assert second == "OSError: the disk is gone"


def once(kind: str) -> tuple[list[int], str]:
    """The first rows of an iterator, and what its second iteration says."""
    mesh, numbers = sf.make_mesh(data=-1, device="cpu"), range(dist.get_rank(), 20, 2)
    makes: dict[str, Any] = {
        "generator": lambda: (torch.tensor([n]) for n in numbers),
        "map": lambda: map(torch.tensor, ([n] for n in numbers)),
        "iterator of a loader": lambda: iter(DataLoader(list(numbers), batch_size=1)),  # type: ignore[arg-type]
        "class": lambda: Again(numbers),
    }
    checked = sf.run.check_loader(makes[kind](), mesh, "data")
    first = [int(x) for x in itertools.islice(checked(0), 2)]
    return first, told(lambda: first.extend(int(x) for x in itertools.islice(checked(2), 2)))


class Again:
    """As before generators: an iterator that begins again."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> Again:
        self.at = 0
        return self

    def __next__(self) -> Any:
        self.at += 1
        return torch.tensor([self.numbers[self.at - 1]])


@pytest.mark.parametrize("kind", ["generator", "map", "iterator of a loader", "class"])
@pytest.mark.world(2)
def test_what_can_be_read_once_is_not_gone_on_from(world: World, kind: str) -> None:
    for rank, (first, said) in enumerate(world.run(once, kind)):
        assert first == [rank + 2 * n for n in range(4 if kind == "class" else 2)]
        assert said == "it was done" if kind == "class" else "which can be read once, and its first batches" in said


def made_of_others(same: bool, kind: str) -> tuple[int, str]:
    """Batches of tensors that are made of others."""
    mesh, rank = sf.make_mesh(data=-1, device="cpu"), 0 if same else dist.get_rank()

    def batch(n: int) -> Any:
        x = torch.eye(3) * (1 + 2 * n + rank)
        if kind == "jagged":
            return torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
        if kind == "nested":
            return torch.nested.nested_tensor([x[0], x[1, :2]])
        return x.to_sparse() if kind == "coo" else x.to_sparse_csr() if kind == "csr" else x.to_sparse_csc()

    found: list[Any] = []
    loader = [{"x": batch(n), "y": torch.zeros(3)} for n in range(12)]
    said = told(lambda: found.extend(sf.run.check_loader(loader, mesh, "data", pad={"y": 0})))
    return len(found), said


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "jagged", "nested"])
@pytest.mark.world(2)
def test_tensors_that_are_made_of_others_are_compared_by_these(world: World, kind: str) -> None:
    assert world.run(made_of_others, False, kind) == [(12, "it was done")] * 2
    for count, said in world.run(made_of_others, True, kind):
        assert count < 12
        assert "ranks 0 and 1 get the same rows" in said


def wordy() -> str:
    def loader() -> Any:
        yield torch.ones(2) * dist.get_rank()
        if dist.get_rank() == 1:
            raise ValueError("é" * 9000)

    return told(lambda: list(sf.run.check_loader(loader(), sf.make_mesh(data=-1, device="cpu"), "data")))


@pytest.mark.world(2)
def test_what_another_rank_says_is_no_longer_than_a_message_may_be(world: World) -> None:
    first, _ = world.run(wordy)
    assert "rank 1 could not read its batch of step 1" in first
    assert len(first.removeprefix("RuntimeError: ")) <= MOST


def arguments() -> list[str]:
    mesh = sf.make_mesh(data=-1, device="cpu")
    loader = plain(mesh)
    checked = sf.run.check_loader(loader, mesh, ())
    assert (len(checked), checked.axes, len(list(checked(6)))) == (8, (), 2)
    return [
        told(lambda: sf.run.check_loader(3, mesh, "data")),  # type: ignore[arg-type]
        told(lambda: sf.run.check_loader(loader, mesh, "rows")),
        told(lambda: sf.run.check_loader(loader, mesh, ["data"])),  # type: ignore[arg-type]
        told(lambda: sf.run.check_loader(loader, mesh, "data" if dist.get_rank() else ())),
        told(lambda: len(sf.run.check_loader(zip(loader), mesh, "data"))),
    ]


@pytest.mark.world(2)
def test_wrong_arguments_are_refused(world: World) -> None:
    for found in world.run(arguments):
        number, axis, axes, differ, length = found
        assert "the loader is of type int" in number
        assert "unknown axis 'rows'" in axis
        assert "got ['data']" in axes
        assert "differ between ranks" in differ
        assert "has no length" in length


class Drawing(torch.utils.data.Dataset[Any]):
    """Each row is its number, and what the generators give when it is read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        return row, torch.rand(()), random.random(), np.random.rand()


def shuffling() -> Any:
    return DataLoader(Drawing(), batch_size=2, shuffle=True)


def sampling() -> Any:
    return DataLoader(Drawing(), 2, sampler=RandomSampler(Drawing(), replacement=True, num_samples=40))


def in_parts(folder: Path, make: Any, check: bool) -> tuple[list[Any], list[Any], float]:
    """The batches of a run of 20 steps, those of one that stops after 5 of them, and how it stands after it."""
    mesh, both = sf.make_mesh(device="cpu", data=1), []
    for name, ends in (("once", [20]), ("parts", [5, 20])):
        seen: list[Any] = []

        def step(state: Any, batch: Any, seen: list[Any] = seen) -> Any:
            seen.append([leaf.tolist() for leaf in batch])
            return state + torch.rand(()).item(), {"loss": 0.0}

        for end in ends:
            loader = make()
            given = sf.run.check_loader(loader, mesh, ()) if check else partial(after, loader)
            state, _ = sf.run.loop(step, 0.0, given, steps=end, save=folder / name, report=[])
        both.append((seen, state))
    (once, drawn), (parts, again) = both
    return once, parts, drawn - again


def after(loader: Any, start: int) -> Any:
    return itertools.islice(iter(loader), start, None)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("make", [shuffling, sampling])
@pytest.mark.world(1)
def test_a_run_on_a_loader_that_shuffles_goes_on_with_its_rows(
    world: World, make: Any, check: bool, tmp_path: Path
) -> None:
    ((once, parts, differ),) = world.run(in_parts, tmp_path, make, check)
    assert len(once) == 20
    assert parts == once
    assert differ == 0.0
    assert len({number for batch in once for leaf in batch[1:] for number in leaf}) == 3 * 40


def own_numbers() -> list[tuple[int, int]]:
    """Places of this rank by batches, which know their mesh, beside a state that knows none."""
    mesh = sf.make_mesh(device="cpu", data=2, tensor=2)
    one = sf.run.batches(torch.arange(64), mesh, "data", 8, 0)
    return [place(batches, {"w": torch.ones(2)}) for batches in (one, sf.run.check_loader(one, mesh, "data"))]


@pytest.mark.world(4)
def test_ranks_with_the_same_rows_have_the_same_place(world: World) -> None:
    assert world.run(own_numbers) == [[(rank // 2, 2)] * 2 for rank in range(4)]


def looped(rows_from: str, silent: bool = False) -> str:
    mesh = sf.make_mesh(data=-1, device="cpu")
    params = sf.shard({"w": torch.ones(3, 3)}, mesh, sf.full_shard("data"))
    whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    inputs: Any = "global" if rows_from == "global" else "local"

    @sf.shard_map(mesh=mesh, in_specs=(..., P("data")), out_specs=..., inputs=inputs)
    def total(p: Any, x: torch.Tensor) -> Any:
        return sf.psum((x @ sf.unshard(p)["w"]).square().sum(), "data")

    def step(state: Any, x: torch.Tensor) -> Any:
        return state, {"loss": total(state, x)}

    own = whole.chunk(mesh.size())[mesh.get_rank()] if rows_from == "cut" else whole
    with warnings.catch_warnings():
        if silent:
            warnings.simplefilter("ignore", sf.check.VaryingWarning)
        return told(lambda: sf.run.loop(step, params, [own] * 2, steps=2, report=[]))


@pytest.mark.world(2)
def test_loop_refuses_the_same_rows_on_all_ranks(world: World) -> None:
    for text in world.run(looped, "all"):
        assert text.startswith("VaryingError: sf.run.loop: ")
        assert "each rank reads the same rows" in text
        assert "inputs='global'" in text
    for rows_from in ("cut", "global"):
        assert world.run(looped, rows_from) == ["it was done"] * 2
    assert world.run(looped, "all", True) == ["it was done"] * 2
