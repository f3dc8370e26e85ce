"""Streams of files: the same batches on any number of ranks, from any step on, and each file is read once an epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import shardfn as sf
from shardfn.testing import World, world

LENGTHS = [5, 9, 3, 12, 7, 1, 8, 10]  # of file i, whose rows are 100 * i + j


def read(file: int) -> Iterator[Any]:
    for row in range(LENGTHS[file]):
        yield {"row": 100 * file + row, "noise": random.random() + torch.rand(()).item()}


def stream(lanes: int = 4, block: int = 4, known: bool = True) -> sf.run.Stream:
    return sf.run.Stream(range(len(LENGTHS)), read, lanes=lanes, block=block, lengths=LENGTHS if known else None)


def taken(sizes: dict[str, int], start: int, count: int, source: sf.run.Stream, **more: Any) -> list[Any]:
    mesh = sf.make_mesh(device="cpu", **sizes)
    batches = sf.run.batches(source, mesh, "data", 8, 7, start=start, **more)
    names = ["row", "noise", "mask"][: 2 + (more.get("remainder") == "pad")]
    return [[batch[name].tolist() for name in names] for batch in itertools.islice(batches, count)]


def whole(ranks: list[Any]) -> list[Any]:
    """The batches of all ranks, put together."""
    return [[list(itertools.chain(*leaf)) for leaf in zip(*step, strict=True)] for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_have_parts_of_the_same_batches(lanes: int, shuffle: bool) -> None:
    source = stream(lanes)
    alone = world(1).run(taken, {"data": 1}, 0, 20, source, shuffle=shuffle)[0]
    for size in (2, 4):
        assert whole(world(size).run(taken, {"data": size}, 0, 20, source, shuffle=shuffle)) == alone


def filled_again(kind: str) -> list[Any]:
    """The batches of a reader that has one buffer for all rows of a file."""

    def read(file: int) -> Iterator[Any]:
        buffer = torch.zeros(2, dtype=torch.int64)
        for row in range(LENGTHS[file]):
            buffer.fill_(100 * file + row)
            yield {"tensor": buffer, "array": buffer.numpy(), "dict": {"x": (buffer[:1],)}}[kind]

    mesh = sf.make_mesh(device="cpu", data=-1)
    source = sf.run.Stream(range(len(LENGTHS)), read, lanes=2, block=4)
    return [
        optree.tree_leaves(batch)[0][:, 0].tolist() for batch in sf.run.batches(source, mesh, "data", 8, 7, epochs=1)
    ]


@pytest.mark.parametrize("kind", ["tensor", "array", "dict"])
@pytest.mark.world(2)
def test_a_reader_may_fill_its_memory_again(world: World, kind: str) -> None:
    found = world.run(filled_again, kind)
    wanted = world.run(taken, {"data": 2}, 0, 99, stream(lanes=2, known=False), epochs=1)
    assert found == [[batch[0] for batch in one] for one in wanted]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("last", ["drop", "pad", "wrap"])
@pytest.mark.world(2)
def test_a_start_is_a_step_of_the_whole_run(world: World, last: str, known: bool) -> None:
    more: Any = {"remainder": last, "epochs": 2}
    every = world.run(taken, {"data": 2}, 0, 99, stream(known=known), **more)
    assert len(every[0]) == len(every[1]) >= 8
    for start in (1, 3, 7, len(every[0]) - 1, len(every[0]), len(every[0]) + 3):
        assert world.run(taken, {"data": 2}, start, 99, stream(known=known), **more) == [one[start:] for one in every]


def test_every_row_comes_once_in_each_epoch() -> None:
    rows = sorted(100 * file + row for file, length in enumerate(LENGTHS) for row in range(length))
    for size in (1, 2):
        steps = whole(world(size).run(taken, {"data": size}, 0, 99, stream(), remainder="pad", epochs=1))
        assert (
            sorted(row for row, _, real in (one for step in steps for one in zip(*step, strict=True)) if real) == rows
        )
        assert not any(step[2] == [False] * 8 for step in steps)
    steps = whole(world(1).run(taken, {"data": 1}, 0, 99, stream(), remainder="wrap", epochs=1))
    assert {row for step in steps for row in step[0]} == set(rows)


def opened(folder: Path, lanes: int, start: int) -> set[str]:
    """Which files this rank opens."""
    found = set()

    def noted(file: Path) -> Iterator[torch.Tensor]:
        found.add(file.name)
        yield from torch.arange(4)

    files = [folder / f"{number}" for number in range(8)]
    source = sf.run.Stream(files, noted, lanes=lanes, lengths=[4] * 8)
    batches = sf.run.batches(source, sf.make_mesh(data=2, device="cpu"), "data", 4, 0, start=start, epochs=1)
    list(batches)
    return found


@pytest.mark.world(2)
def test_a_rank_opens_only_the_files_of_its_lanes(world: World, tmp_path: Path) -> None:
    first, second = world.run(opened, tmp_path, 2, 0)
    assert (len(first), len(second), first & second) == (4, 4, set())
    assert world.run(opened, tmp_path, 1, 0) == [first | second] * 2
    later = world.run(opened, tmp_path, 2, 6)
    assert [len(found) for found in later] == [1, 1]  # what was read before is skipped unopened


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.world(2)
def test_workers_read_what_one_process_reads(world: World, workers: int) -> None:
    for last in ("drop", "pad"):
        more: Any = {"remainder": last, "epochs": 1}
        read = world.run(taken, {"data": 2}, 2, 99, stream(), workers=workers, **more)
        assert read == world.run(taken, {"data": 2}, 2, 99, stream(), **more)
        assert read[0]


def test_the_order_of_rows_is_new_in_each_epoch_and_for_each_seed() -> None:
    source = sf.run.Stream([0], read_many, lanes=1, block=64)
    found = world(1).run(shuffled, source)[0]
    assert len({tuple(one) for one in found}) == len(found) == 4
    assert all(sorted(one) == list(range(64)) for one in found)


def read_many(_: int) -> Iterator[torch.Tensor]:
    yield from torch.arange(64)


def shuffled(source: sf.run.Stream) -> list[Any]:
    mesh = sf.make_mesh(data=1, device="cpu")
    return [
        one.tolist() for seed in (0, 1) for one in sf.run.batches(source, mesh, "data", 64, seed, epochs=2)
    ]  # fmt: skip


def after_the_end(last: str) -> tuple[list[float], list[float]]:
    """What the program draws while it reads a stream to its end, and what it would draw without one."""
    more: Any = {"remainder": last, "epochs": 1, "shuffle": False}
    batches = sf.run.batches(stream(), sf.make_mesh(data=1, device="cpu"), "data", 8, 7, **more)
    torch.default_generator.manual_seed(3)
    random.seed(3)
    found = [number for _ in batches for number in (torch.rand(()).item(), random.random())]
    torch.default_generator.manual_seed(3)
    random.seed(3)
    return found, [number for _ in found[::2] for number in (torch.rand(()).item(), random.random())]


@pytest.mark.parametrize("last", ["drop", "pad"])
def test_the_programs_own_random_numbers_are_left_alone_to_the_end(last: str) -> None:
    ((found, alone),) = world(1).run(after_the_end, last)
    assert found == alone
    assert len(found) >= 4


def unequal(start: int, last: str) -> int:
    lengths = [4, 4, 4, 12]  # of which rank 0 has other lanes than rank 1
    source = sf.run.Stream(range(4), partial(counted, lengths), lanes=2, block=1, lengths=lengths)
    mesh = sf.make_mesh(data=2, device="cpu")
    batches = sf.run.batches(source, mesh, "data", 2, 7, start=start, epochs=1, shuffle=False, remainder=last)  # type: ignore[arg-type]
    return len(list(batches))


def counted(lengths: list[int], file: int) -> Iterator[torch.Tensor]:
    yield from torch.arange(lengths[file])


@pytest.mark.parametrize("last", ["drop", "pad"])
def test_ranks_that_are_threads_end_at_the_step_of_processes(last: str) -> None:
    for start in (0, 2):
        found = world(2, "threads").run(unequal, start, last)
        assert found == world(2).run(unequal, start, last)
        assert found[0] == found[1] == {"drop": 8, "pad": 16}[last] - start
