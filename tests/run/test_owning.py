"""A batch stays what it was while the next one is read, whoever fills which memory again."""

from __future__ import annotations

import collections
import dataclasses
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import shardfn as sf
from shardfn.run.feeding import fresh, owned
from tests.refusals import told

COUNT, ROWS = 6, 4


@dataclasses.dataclass
class Pair:
    x: Any
    y: Any


class Words(collections.UserDict):
    """As a tokenizer gives."""


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def clone(self) -> Graph:
        return Graph(self.x.clone())


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "view": lambda x: x.view(2, -1).view(-1),
    "array": lambda x: x.numpy(),
    "tensor of an array": lambda x: torch.from_numpy(x.numpy()),
    "dict": lambda x: {"a": [x, (x.numpy(),)], "name": "one"},
    "dataclass": lambda x: Pair(x, {"y": x}),
    "mapping": lambda x: Words({"x": x, "y": [x]}),
    "object": Graph,
    "bytes": lambda x: bytearray(x.numpy().tobytes()),
}


def flat(batch: Any) -> list[float]:
    """All numbers in a batch."""
    if isinstance(batch, Pair):
        batch = [batch.x, batch.y]
    batch = dict(batch) if isinstance(batch, Words) else batch.x if isinstance(batch, Graph) else batch
    if isinstance(batch, bytearray):
        batch = np.frombuffer(batch, np.float32)
    leaves = optree.tree_leaves(batch)
    return [number for x in leaves if not isinstance(x, str) for number in x.tolist()]


def one_buffer(form: Callable[[torch.Tensor], Any], late: int = 0) -> Iterator[Any]:
    """A loader that fills the same memory for every batch, or from a batch on."""
    buffer = torch.empty(ROWS)
    for n in range(COUNT):
        yield form((torch.empty(ROWS) if n < late else buffer).fill_(n))


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_loader_may_fill_its_memory_again(form: str, late: int) -> None:
    mesh = sf.make_mesh(device="cpu", data=1)
    found = [flat(batch) for batch in sf.run.check_loader(one_buffer(FORMS[form], late), mesh, "data")]
    assert len(found) == COUNT
    assert [set(numbers) for numbers in found] == [{float(n)} for n in range(COUNT)]


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT * ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor(float(row))


class Collating:
    """Fills the same memory for every batch."""

    def __init__(self) -> None:
        self.buffer = np.empty(ROWS, np.float32)

    def __call__(self, rows: list[torch.Tensor]) -> Any:
        self.buffer[:] = torch.stack(rows).numpy()
        return {"rows": torch.from_numpy(self.buffer)}


@pytest.mark.parametrize("workers", [0, 1])
def test_what_makes_a_batch_of_rows_may_fill_its_memory_again(workers: int) -> None:
    mesh = sf.make_mesh(device="cpu", data=1)
    more: dict[str, Any] = {"shuffle": False, "collate": Collating(), "workers": workers, "epochs": 1}
    sources = [Numbers(), sf.run.Stream([0], lambda _: iter(Numbers()[n] for n in range(COUNT * ROWS)), lanes=1)]
    for source in sources if workers == 0 else sources[:1]:
        found = [batch["rows"].tolist() for batch in sf.run.batches(source, mesh, "data", ROWS, 0, prefetch=3, **more)]
        assert found == torch.arange(COUNT * ROWS).view(COUNT, ROWS).tolist()


def test_what_torch_stacks_is_not_copied_again() -> None:
    assert fresh(DataLoader(Numbers(), batch_size=2))
    assert not fresh(DataLoader(Numbers(), batch_size=None))
    assert not fresh(DataLoader(Numbers(), batch_size=2, collate_fn=Collating()))
    assert not fresh([torch.zeros(2)])


def test_a_slice_of_a_data_set_is_copied_without_the_rest() -> None:
    rows = torch.zeros(1000, 4)
    assert owned({"x": Pair(rows[:2], 1)})["x"].x.untyped_storage().nbytes() == 2 * 4 * 4


@dataclasses.dataclass
class Stops(Dataset[Any]):
    """One row of which ends what iterates over it."""

    error: type[Exception] = StopIteration

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> torch.Tensor:
        if row == 21:
            raise self.error
        return torch.ones(2)


def stopping(rows: list[Any]) -> Any:
    raise StopIteration


@pytest.mark.parametrize("workers", [0, 1])
def test_what_stops_iteration_where_batches_are_made_is_not_their_end(workers: int) -> None:
    mesh = sf.make_mesh(device="cpu", data=1)
    own = sf.run.batches(Numbers(), mesh, "data", 2, 0, collate=stopping, workers=workers)
    assert "collate raised StopIteration" in told(lambda: list(own))
    loaders = [
        DataLoader(Stops(), batch_size=2, num_workers=workers),
        DataLoader(Numbers(), batch_size=2, num_workers=workers, collate_fn=stopping),
    ]
    for loader in loaders:
        said = told(lambda loader=loader: list(sf.run.check_loader(loader, mesh, "data")))
        assert said.startswith("RuntimeError: sf.run.check_loader: a row of the loader's data set, or its collate_fn,")
    assert told(lambda: list(sf.run.check_loader(iter([torch.ones(2)] * 3), mesh, "data"))) == "it was done"


class Streaming(IterableDataset[Any]):
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        yield from (Stops(self.error)[row] for row in range(64))


def failing_loaders(error: type[Exception]) -> dict[str, Callable[[Any], Any]]:
    """Ways to read rows in workers, one of which fails."""
    rows, options = Stops(error), dict[str, Any](batch_size=2, num_workers=2)

    def step(state: Any, batch: Any) -> Any:
        return state, {}

    return {
        "a loader": lambda mesh: list(sf.run.check_loader(DataLoader(rows, **options), mesh, "data")),
        "workers that stay": lambda mesh: list(
            sf.run.check_loader(DataLoader(rows, **options, persistent_workers=True), mesh, "data")
        ),
        "a stream": lambda mesh: list(sf.run.check_loader(DataLoader(Streaming(error), **options), mesh, "data")),
        "batches": lambda mesh: list(sf.run.batches(rows, mesh, "data", 2, 0, workers=2)),
        "batches, nothing read ahead": lambda mesh: list(
            sf.run.batches(rows, mesh, "data", 2, 0, workers=2, prefetch=0)
        ),
        "a loop": lambda mesh: sf.run.loop(
            step, {}, sf.run.check_loader(DataLoader(rows, **options), mesh, "data"), steps=30
        ),
        "a loop over a loader": lambda mesh: sf.run.loop(step, {}, DataLoader(rows, **options), steps=30),
    }


@pytest.mark.parametrize("error", [ValueError, StopIteration], ids=lambda error: error.__name__)
@pytest.mark.parametrize("name", failing_loaders(ValueError))
def test_workers_end_with_the_error_of_their_loader(name: str, error: type[Exception]) -> None:
    mesh = sf.make_mesh(device="cpu", data=1)
    gc.collect()
    gc.disable()
    try:
        before = multiprocessing.active_children()
        assert error.__name__ in told(lambda: failing_loaders(error)[name](mesh))
        assert set(multiprocessing.active_children()) <= set(before)
    finally:
        gc.enable()


class Changed(Dataset[Any]):
    """Images, some of which have been made anew."""

    def __init__(self, other: range) -> None:
        self.other = other

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor([row, int(row in self.other)])


@pytest.mark.parametrize("other", [range(400, 500), range(1, 999), range(900, 999), range(999, 1000)], ids=str)
def test_a_data_set_of_which_a_part_has_changed_is_another_one(other: range) -> None:
    mesh = sf.make_mesh(device="cpu", data=1)
    known = [sf.run.batches(Changed(one), mesh, "data", 8, 0).identity for one in (range(0), range(0), other)]
    assert known[0] == known[1] != known[2]


def asked(_: torch.Tensor) -> bool:
    raise AssertionError("a process that was forked when CUDA had begun cannot ask")


def test_workers_do_not_ask_whether_memory_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", asked)
    mesh = sf.make_mesh(device="cpu", data=1)
    own = sf.run.batches(Numbers(), mesh, "data", ROWS, 0, collate=Collating(), workers=1)
    assert len(flat(next(iter(own)))) == ROWS
    with pytest.raises(AssertionError, match="cannot ask"):
        owned(torch.ones(2))
