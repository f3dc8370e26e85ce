"""Data sets, tensors and arrays as sources of rows, read by number in this process or in workers."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from shardfn.checkpoint.contents import lack
from shardfn.quoting import listed, short
from shardfn.run.collating import Collate, collated, describe_leaf, digest, kinds, masked
from shardfn.run.feeding import owned
from shardfn.run.order import Numbers, Order, Sample, StepRows
from shardfn.run.randomness import lent_generators, seed_host
from shardfn.shards.random import mixed
from shardfn.transforms.fitting import path_text

NAME = "sf.run.batches"


@runtime_checkable
class Ready(Protocol):
    """A source that reads rows without user code, so that a thread may read them during a step."""

    def __len__(self) -> int:
        """The number of rows."""

    def __getitem__(self, row: int) -> Any:
        """One row."""

    def read_rows(self, rows: Numbers) -> Any:
        """A batch of rows: a tree of tensors with rows along dim 0."""

    def fingerprint(self) -> str:
        """A text that is equal for equal rows."""


class Columns:
    """A pytree of tensors and arrays with rows along dim 0."""

    def __init__(self, tree: Any) -> None:
        paths, self._leaves, self._structure = optree.tree_flatten_with_path(tree, none_is_leaf=True)
        counts: dict[str, int] = {}
        for path, leaf in zip(paths, self._leaves, strict=True):
            name = f"source{path_text(path)}"
            if not isinstance(leaf, (Tensor, np.ndarray)) or leaf.ndim == 0:
                shown = "a tensor without dimensions" if isinstance(leaf, (Tensor, np.ndarray)) else describe_leaf(leaf)
                raise TypeError(
                    f"{NAME}: {name} must be a tensor or an array with rows along dim 0, got {shown}. Pass rows that "
                    f"are objects in a list, or in a data set with __len__ and __getitem__"
                )
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                raise ValueError(
                    f"{NAME}: {name} is on {leaf.device}; keep sources on the CPU: batches are moved to the mesh's "
                    f"device automatically"
                )
            if problem := _no_rows(leaf):
                raise TypeError(f"{NAME}: {name} is {problem}")
            counts[name] = len(leaf)
        if len(set(counts.values())) > 1:
            shown = listed(f"{name} has {count}" for name, count in counts.items())
            raise ValueError(f"{NAME}: dim 0 (the rows) must be equal in all tensors, but {shown}")
        self._names, self._count = list(counts), next(iter(counts.values()), 0)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Any:
        return optree.tree_unflatten(self._structure, [leaf[row] for leaf in self._leaves])

    def read_rows(self, rows: Numbers) -> Any:
        """A batch of these rows."""
        index = torch.from_numpy(rows)
        columns = [
            leaf.index_select(0, index) if isinstance(leaf, Tensor) else torch.from_numpy(leaf[rows])
            for leaf in self._leaves
        ]
        return optree.tree_unflatten(self._structure, columns)

    def facts(self) -> list[str]:
        """One line for each tensor or array, to compare between ranks: `source['x']: float32 [100, 3]`."""
        return [f"{name}: {describe_leaf(leaf)}" for name, leaf in zip(self._names, self._leaves, strict=True)]

    def fingerprint(self) -> str:
        """A digest of dtypes, shapes, and a sample of rows."""
        return f"{digest((self.read_rows(some_of(self._count)), [describe_leaf(leaf) for leaf in self._leaves])):014x}"


def _no_rows(leaf: Tensor | np.ndarray) -> str:
    """Why a tensor or an array cannot be batched, for a message; "" if it can."""
    if isinstance(leaf, Tensor):
        return f"a tensor {lack(leaf)}" if lack(leaf) else ""
    try:
        torch.from_numpy(np.empty(0, leaf.dtype))
    except (TypeError, ValueError):  # dates, strings, objects, or a foreign byte order
        return f"an array of {leaf.dtype}, of which there are no tensors: convert it by astype, or leave it out"
    return ""


def some_of(count: int) -> Numbers:
    """Row numbers to sample a source by: at most 16, evenly spaced from the first to the last."""
    return np.unique(np.linspace(0, count - 1, 16).astype(np.int64))


def prepared(source: Any) -> Any:
    """Prepares a source: with `__len__` and `__getitem__`, and `Ready` where possible.

    Raises:
        TypeError: its rows cannot be found by number.
        ValueError: it has no rows, or tensors of different lengths.
    """
    class_name = type(source).__name__
    if isinstance(source, Tensor | np.ndarray | dict | tuple):
        source = Columns(source)
    if isinstance(source, IterableDataset) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise TypeError(
            f"{NAME}: source must be a data set with __len__ and __getitem__, got {class_name}. For files of rows "
            f"pass sf.run.Stream(files, read, lanes=...); iterate a loader of yours directly, or as "
            f"sf.run.check_loader(loader, mesh, axes)"
        )
    if len(source) == 0:
        raise ValueError(f"{NAME}: the source, of type {class_name}, has no rows")
    return source


def below_subsets(source: Any, rows: Sequence[int]) -> tuple[Any, list[int]]:
    """The data set below nested `Subset`s, and the numbers that the rows have in it."""
    numbers = list(rows)
    while type(source) is Subset:
        numbers = [int(source.indices[row]) for row in numbers]
        source = source.dataset
    return source, numbers


def portion(batch: int, places: int, axes: Sequence[str]) -> int:
    """The rows of a step at one place along the axes.

    Raises:
        ValueError: the rows cannot be split into equal parts.
    """
    if batch % places:
        near = [n for n in (batch // places * places, math.ceil(batch / places) * places) if n]
        raise ValueError(
            f"{NAME}: batch={batch} rows a step cannot be split into equal parts for {places} ranks along "
            f"{' x '.join(axes)}: say batch={' or '.join(map(str, near))}"
        )
    return batch // places


AT_ONCE = 1024  # at most so many rows have their order computed together


@dataclass(frozen=True)
class BatchReader(Dataset[Any]):
    """The batches of one place along the axes, by step number.

    Attributes:
        source: of rows.
        order: in which they are read.
        first: index of the first row to read in a step's batch.
        stop: index after the last one.
        collate: makes a batch of rows; None for the default.
    """

    source: Any
    order: Order | Sample
    first: int
    stop: int
    collate: Collate | None

    @property
    def ready(self) -> bool:
        """Whether reading runs no user code, which must not run during a step."""
        return isinstance(self.source, Ready) and self.collate is None

    def __getitem__(self, step: int) -> Any:
        return self.read(self.order.part(step, self.first, self.stop), step)

    def batches_from(self, start: int, stop: int | None) -> Generator[Any]:
        """Yields the batches of steps from `start` to `stop`; the order is computed for several steps at once."""
        if isinstance(self.order, Sample):  # one at a time, since a step may have no room for its sample
            yield from map(self.__getitem__, itertools.count(start))
            return
        size, steps = self.stop - self.first, 1
        while stop is None or start < stop:
            steps = steps if stop is None else min(steps, stop - start)
            part = self.order.part(start, self.first, self.stop, steps)
            for number in range(steps):
                rows = slice(number * size, (number + 1) * size)
                yield self.read(StepRows(part.rows[rows], part.epochs[rows], part.real[rows]), start + number)
            start, steps = start + steps, max(1, min(2 * steps, AT_ONCE // size))

    def read(self, part: StepRows, step: int) -> Any:
        """Reads the batch of these rows."""
        batch = self.source.read_rows(part.rows) if self.ready else self._collated(part, step)
        return masked(batch, part.real) if self.order.masked else batch

    def _collated(self, part: StepRows, step: int) -> Any:
        with lent_generators():
            rows = _read_rows(self.source, part, self.order.seed)
            seed_host(mixed(self.order.seed, "collate", step, self.first))
            return collated_copy(rows, part.rows.tolist(), self.collate)


def collated_copy(rows: list[Any], numbers: Sequence[int], collate: Collate | None) -> Any:
    """Collates rows to a batch that shares no memory with them.

    Raises:
        RuntimeError: `collate` raised StopIteration, which workers would take for the end of the data.
    """
    try:
        batch = collated(rows, numbers, collate)
    except StopIteration as error:
        raise RuntimeError("sf.run.batches: collate raised StopIteration") from error
    return batch if collate is None else owned(batch)


def _read_rows(source: Any, part: StepRows, seed: int) -> list[Any]:
    """Reads rows, each with its own seed; or all at once, with the first's, if the data set has `__getitems__`."""
    inner, numbers = below_subsets(source, part.rows.tolist())
    seeds = [mixed(seed, "row", *where) for where in zip(part.epochs.tolist(), part.rows.tolist(), strict=True)]
    if callable(getattr(inner, "__getitems__", None)):
        seed_host(seeds[0])
        try:
            result = inner.__getitems__(numbers)
            rows = [] if isinstance(result, Mapping) else list(result)
        except StopIteration as error:
            raise RuntimeError(f"sf.run.batches: rows {numbers} of the source raised StopIteration") from error
        if len(rows) != len(numbers):
            got = f"a {type(result).__name__}" if isinstance(result, Mapping) else f"{len(rows)} rows"
            raise ValueError(
                f"sf.run.batches: __getitems__ of the source, {type(inner).__name__}, gave {got} for {len(numbers)} "
                f"numbers; it gives a list of as many rows. What is to be left out is left out before, as by a Subset"
            )
        return rows
    return [_read_row(inner, number, seed) for number, seed in zip(numbers, seeds, strict=True)]


def _read_row(source: Any, number: int, seed: int) -> Any:
    seed_host(seed)
    try:
        return source[number]
    except StopIteration as error:  # which whoever iterates over batches would take for their end
        raise RuntimeError(f"sf.run.batches: row {number} of the source raised StopIteration") from error
    except Exception as error:
        error.add_note(f"sf.run.batches: row {number} of the source, {type(source).__name__}, was read")
        raise


def sampled(source: Any, seed: int) -> tuple[str, list[str]]:
    """A digest that is equal for equal rows, and one line for each fact about them that can be told.

    The digest is the source's own, or else of its length and a sample of its rows; a row that differs when it is read
    twice is left out.
    """
    if isinstance(source, Columns):
        return source.fingerprint(), source.facts()
    if isinstance(source, Ready):
        return source.fingerprint(), [_facts(source, source[0])]
    probes, facts = list[int](), list[str]()
    for row in some_of(len(source)).tolist():
        inner, (number,) = below_subsets(source, [row])
        with lent_generators():
            first, second = (_read_row(inner, number, mixed(seed, "probe", row)) for _ in range(2))
        facts = facts or [_facts(source, first)]
        probes.append(digest(first) if digest(first) == digest(second) else -1)
    return f"{digest([len(source), *probes]):014x}", facts


def _facts(source: Any, row: Any) -> str:
    return f"source: a {type(source).__name__}, its first row {short('; '.join(kinds(row)), 200)}"


def by_workers(data: Dataset[Any], steps: Iterable[int] | None, workers: int, prefetch: int) -> Iterator[Any]:
    """Yields what a data set gives for each step, or its own items if `steps` is None, read by torch workers."""
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=None, sampler=cast(Any, steps), num_workers=workers, collate_fn=_unchanged,
        prefetch_factor=max(1, prefetch), generator=torch.Generator(),  # the default would draw from torch's own
        worker_init_fn=_shield_from_signals,
    )  # fmt: skip
    yield from loader


def _shield_from_signals(_: int) -> None:
    """Moves a worker to a new process group and ignores SIGUSR1: signals for the run must not end it.

    Launchers such as torchrun signal a whole process group, but a run that is asked to stop still needs its workers.
    SIGTERM keeps its effect, since the main process ends a hanging worker by it.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    return batch
