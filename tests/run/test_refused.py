"""What is wrong is one clear error, on every rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, TensorDataset

import shardfn as sf
from shardfn.testing import World, world
from tests.refusals import told

X = torch.arange(80).view(40, 2)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.count()


class Broken:
    def __init__(self, row: int) -> None:
        self.row = row

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        if row == self.row:
            raise OSError("the disk is gone")
        return row


class Some(Broken):
    """Several rows at once, as a function of their numbers gives them."""

    def __init__(self, read: Callable[[list[int]], Any]) -> None:
        super().__init__(-1)
        self.read = read

    def __getitems__(self, rows: list[int]) -> Any:
        return self.read(rows)


def ragged(row: int) -> Any:
    return {"x": torch.zeros(3 if row == 9 else 2)}


def lengths(file: int) -> Iterator[int]:
    yield from range(5)


NONE: Any = None
Stream = functools.partial(sf.run.Stream, range(4), lengths)

WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "batch that ranks cannot share": (
        lambda: {"batch": 7},
        "split into equal parts for 2 ranks along data: say batch=6 or 8",
    ),
    "batch of one row": (lambda: {"batch": 1}, "say batch=2"),
    "batch of none": (lambda: {"batch": 0}, "ValueError: sf.run.batches: batch must be an integer of 1 or more, got 0"),
    "batch of a half": (lambda: {"batch": 4.0}, "batch must be an integer of 1 or more, got 4.0, a float"),
    "batch of more than there is": (lambda: {"batch": 42}, "batch=42 rows a step, and the source has 40"),
    "an unknown axis": (lambda: {"axes": "rows"}, "unknown axis 'rows'; the mesh has data=2"),
    "an axis twice": (lambda: {"axes": ("data", "data")}, "axis 'data' is named twice"),
    "axes of no names": (lambda: {"axes": 3}, "TypeError: sf.run.batches: axes must be the name of a mesh axis"),
    "axes in a list": (lambda: {"axes": ["data"]}, "or a tuple of names, got ['data']"),
    "a negative start": (lambda: {"start": -1}, "ValueError: sf.run.batches: start must be an integer of 0 or more"),
    "a start of no step": (lambda: {"start": "3"}, "start must be an integer of 0 or more, got '3', a str"),
    "no rows": (lambda: {"source": []}, "ValueError: sf.run.batches: the source, of type list, has no rows"),
    "an empty tensor": (lambda: {"source": X[:0]}, "the source, of type Tensor, has no rows"),
    "a generator": (lambda: {"source": iter([1])}, "a data set with __len__ and __getitem__, got list_iterator"),
    "an iterable data set": (lambda: {"source": Endless()}, "sf.run.Stream(files, read, lanes=...)"),
    "a number": (lambda: {"source": 3}, "a data set with __len__ and __getitem__, got int"),
    "columns of different lengths": (
        lambda: {"source": {"x": X, "y": X[1:]}},
        "source['x'] has 40, source['y'] has 39",
    ),
    "a column of a list": (lambda: {"source": {"x": [1, 2]}}, "source['x'][0] must be a tensor or an array with "),
    "a column without rows": (lambda: {"source": (X, torch.tensor(1))}, "rows along dim 0, got a tensor without "),
    "a column elsewhere": (lambda: {"source": {"x": X.to("meta")}}, "source['x'] is on meta; keep sources on the CPU"),
    "a sparse column": (lambda: {"source": (X, X.to_sparse())}, "source[1] is a tensor that is not dense"),
    **{
        f"a column of {kind}": (
            functools.partial(dict, source={"x": X, "y": np.zeros(40, kind)}),
            f"TypeError: sf.run.batches: source['y'] is an array of {np.dtype(kind)}, of which there are no tensors",
        )
        for kind in ("U3", "object", "datetime64[s]", ">i4")
    },
    "a seed of no number": (lambda: {"seed": "abc"}, "TypeError: a seed is an int, not 'abc'"),
    "a seed of a half": (lambda: {"seed": 0.5}, "TypeError: a seed is an int"),
    "no epochs": (lambda: {"epochs": 0}, "epochs must be an integer of 1 or more, got 0"),
    "half an epoch": (lambda: {"epochs": 0.5}, "epochs must be an integer of 1 or more, got 0.5, a float"),
    "another last": (lambda: {"remainder": "keep"}, "remainder='keep'; what becomes of an epoch's last rows is one of"),
    "a collate that is none": (lambda: {"collate": "pad"}, "collate must be a function of a list of rows, got 'pad'"),
    "negative workers": (lambda: {"workers": -1}, "workers must be an integer of 0 or more, got -1"),
    "negative prefetch": (lambda: {"prefetch": -2}, "prefetch must be an integer of 0 or more, got -2"),
    "a shuffle that is none": (lambda: {"shuffle": 5}, "shuffle must be True or False, got 5"),
    "a rate of no number": (
        lambda: {"sample_rate": "0.1"},
        "TypeError: sf.run.batches: sample_rate must be the probability of",
    ),
    "a rate of none": (
        lambda: {"sample_rate": 0.0},
        "ValueError: sf.run.batches: sample_rate must be the probability of each row",
    ),
    "a rate of more than all": (
        lambda: {"sample_rate": 1.5},
        "sample_rate must be the probability of each row at each step, abo",
    ),
    "a rate with epochs": (
        lambda: {"sample_rate": 0.1, "epochs": 1},
        "samples steps independently: leave out epochs=, sh",
    ),
    "a rate in order": (lambda: {"sample_rate": 0.1, "shuffle": False}, "leave out epochs=, shuffle= and remainder="),
    "a rate of a stream": (
        lambda: {"sample_rate": 0.1, "source": Stream(lanes=2)},
        "sample_rate=0.1; rows of a stream are not fou",
    ),
    "a rate without room": (
        lambda: {"sample_rate": 0.1},
        "batch=4 is the most rows that a step may have, and samples have 4 on average, sometimes more: say batch=20",
    ),
    "lanes that do not divide": (
        lambda: {"source": Stream(lanes=3)},
        "batch=4 rows a step do not come in equal parts from lanes=3",
    ),
    "more workers than lanes": (lambda: {"source": Stream(lanes=2), "workers": 2}, "this rank reads 1 of the 2 lanes"),
    "more lanes than files": (lambda: {"source": Stream(lanes=5)}, "lanes=5, and there are 4 files"),
    "no block": (lambda: {"source": Stream(lanes=1, block=0)}, "block=0; at least 1 row"),
    "lengths of some": (
        lambda: {"source": Stream(lanes=1, lengths=[5])},
        "lengths has 1 numbers, and there are 4 files",
    ),
    "one path": (lambda: {"source": sf.run.Stream("a.txt", lengths, lanes=1)}, "files must be a list of files"),
    "no files": (lambda: {"source": sf.run.Stream([], lengths, lanes=1)}, "there are no files"),
    "no reader": (lambda: {"source": sf.run.Stream([1], NONE, lanes=1)}, "read must be a function of a file"),
}

LATER: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "strings": (
        lambda: {"source": [{"text": "a"}] * 8},
        "has str at row['text'], which cannot become a tensor. Convert it to numbers",
    ),
    "nothing": (lambda: {"source": [(1, None)] * 8}, "has NoneType at row[1]"),
    "rows of different shapes": (
        lambda: {"source": [ragged(i) for i in range(12)], "batch": 12, "shuffle": False},
        "row 9 of the source has ['x'] float32 [3], and row 6 has ['x'] float32 [2]",
    ),
    "rows of different keys": (lambda: {"source": [{"x": 1}, {"y": 1}] * 4}, "rows of a batch must be alike"),
    "fewer rows at once": (lambda: {"source": Some(lambda rows: rows[:1])}, "Some, gave 1 rows for 2 numbers"),
    "columns at once": (lambda: {"source": Some(lambda rows: {"x": rows, "y": rows})}, "gave a dict for 2 numbers"),
    "a row that cannot be read": (lambda: {"source": Broken(4), "batch": 40}, "the disk is gone"),
    "the same by a worker": (lambda: {"source": Broken(5), "batch": 40, "workers": 1}, "the disk is gone"),
    "a mask of its own": (lambda: {"source": {"mask": X}, "remainder": "pad"}, 'these have a "mask": rename it'),
    "a rate and a mask": (lambda: {"sample_rate": 0.1, "source": {"mask": X}, "batch": 40}, 'have a "mask": rename it'),
    "wrong lengths": (
        lambda: {"source": Stream(lanes=2, lengths=[5, 5, 4, 5]), "shuffle": False},
        "2 has 5 rows, and lengths says 4",
    ),
    "files without rows": (lambda: {"source": sf.run.Stream([1, 2], lambda _: [], lanes=2)}, "have no rows"),
}


def made(more: dict[str, Any]) -> sf.run.Batches:
    given: dict[str, Any] = {"source": X, "axes": "data", "batch": 4, "seed": 0}
    return sf.run.batches(mesh=sf.make_mesh(data=2, device="cpu"), **given | more)


def refusals(names: list[str]) -> list[str]:
    return [told(lambda name=name: made(WRONG[name][0]())) for name in names]


def test_wrong_arguments_are_refused_on_every_rank() -> None:
    for found in world(2).run(refusals, list(WRONG)):
        for name, message in zip(WRONG, found, strict=True):
            assert WRONG[name][1] in message, name


def read(name: str) -> str:
    return told(lambda: list(itertools.islice(made(LATER[name][0]()), 20)))


@pytest.mark.parametrize("name", LATER)
@pytest.mark.world(2)
def test_what_cannot_be_read_is_said_on_every_rank_at_its_step(world: World, name: str) -> None:
    found = world.run(read, name)
    assert all(LATER[name][1] in one for one in found), found
    if "read" in name:
        assert sorted(one.split(":")[0] for one in found) == ["OSError", "RuntimeError"]
        assert any("could not read its batch of step 0" in one and "Traceback" in one for one in found)


ONES = torch.ones(40)
STREAM: dict[str, Any] = {"read": lambda file: [torch.ones(1)] * 8, "lanes": 2}
UNEQUAL: dict[str, tuple[Any, str]] = {
    "seed": (lambda r: {"seed": r}, "rank 0 has seed=0; rank 1 has seed=1"),
    "batch": (lambda r: {"batch": 4 + 4 * r}, "rank 0 has batch=4; rank 1 has batch=8"),
    "start": (lambda r: {"start": r}, "rank 0 has start=0; rank 1 has start=1"),
    "length": (lambda r: {"source": X[r:]}, "rank 0 has rows=40; rank 1 has rows=39; rank 0 has source: "),
    "rows": (lambda r: {"source": X + r}, "rank 0 has rows of the source with checksum "),
    "shape": (
        lambda r: {"source": {"x": torch.ones(40, 3 + r), "y": ONES}},
        "rank 0 has source['x']: float32 [40, 3]; rank 1 has source['x']: float32 [40, 4]. All",
    ),
    "dtype": (
        lambda r: {"source": [ONES, ONES.double()][r]},
        "rank 0 has source: float32 [40]; rank 1 has source: float64 [40]. All",
    ),
    "keys": (
        lambda r: {"source": {"x": ONES, "ab"[r]: ONES}},
        "rank 0 has source['a']: float32 [40], which rank 1 lacks; rank 1 has source['b']: float32 [40], which rank 0",
    ),
    "type": (
        lambda r: {"source": [ONES, [1.0] * 40][r]},
        "rank 0 has source: float32 [40]; rank 1 has source: a list, its first row float. All",
    ),
    "kind of rows": (
        lambda r: {"source": [{"x": [1, 1.0][r]}] * 40},
        "rank 0 has source: a list, its first row ['x'] int; rank 1 has source: a list, its first row ['x'] float. All",
    ),
    "subset": (
        lambda r: {"source": torch.utils.data.Subset(TensorDataset(X), [*range(r, 40, 2)])},
        "rank 0 has rows of the source with checksum ",
    ),
    "files": (
        lambda r: {"source": sf.run.Stream(["a", "b", "c"][: 2 + r], **STREAM)},
        "rank 0 has files: 2, from 'a' to 'b'; rank 1 has files: 3, from 'a' to 'c'. All",
    ),
    "other files": (
        lambda r: {"source": sf.run.Stream(["a", "bc"[r], "d"], **STREAM)},
        "rank 0 has files: 3, from 'a' to 'd', names with checksum ",
    ),
}


def unequal(what: str) -> str:
    rank = dist.get_rank()
    more: dict[str, dict[str, Any]] = {
        "one alone is wrong": {"batch": 4 - rank},
        "source fails": {"source": Broken(0 if rank else -1)},
    }
    return told(lambda: made(more[what]))


@pytest.mark.parametrize("what", ["one alone is wrong", "source fails"])
@pytest.mark.world(2)
def test_a_rank_that_alone_is_wrong_is_named_on_the_other(world: World, what: str) -> None:
    first, second = world.run(unequal, what)
    assert first.startswith("ValueError: sf.run.batches: rank 1 failed: ")
    assert ("cannot be split into equal parts" if what == "one alone is wrong" else "the disk is gone") in first
    assert "batch=3" in second or "OSError" in second


def all_unequal() -> dict[str, str]:
    return {what: told(lambda given=given: made(given(dist.get_rank()))) for what, (given, _) in UNEQUAL.items()}


@pytest.mark.world(2)
def test_ranks_that_are_given_different_things_say_what_differs(world: World) -> None:
    for found in world.run(all_unequal):
        for what, (_, words) in UNEQUAL.items():
            assert found[what].startswith("ValueError: sf.run.batches: the arguments differ between ranks: "), found[
                what
            ]
            assert words in found[what], found[what]


def negative_step() -> str:
    return told(lambda: made({})(-1))


def endless_length() -> str:
    return told(lambda: len(made({})))


@pytest.mark.world(2)
def test_a_step_is_not_negative_and_for_ever_has_no_length(world: World) -> None:
    assert all("start must be an integer of 0 or more, got -1" in one for one in world.run(negative_step))
    assert all("TypeError" in one and "have no length" in one for one in world.run(endless_length))


def stopped_apart() -> str:
    batches = made({})
    one = iter(batches)
    for _ in range(2 + dist.get_rank()):
        next(one)
    return told(lambda: next(iter(batches)))


@pytest.mark.world(2)
def test_ranks_that_stopped_at_different_steps_say_so(world: World) -> None:
    assert all("ranks ask for different batches" in one for one in world.run(stopped_apart))
