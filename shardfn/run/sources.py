"""Data sets, tensors, arrays: rows that are found by their numbers, and read here or in workers."""

from __future__ import annotations

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
from shardfn.quoting import listed
from shardfn.run.collating import Collate, collated, masked
from shardfn.run.feeding import owned
from shardfn.run.fingerprints import described, digest
from shardfn.run.order import Numbers, Order, Part
from shardfn.run.randomness import lent_generators, seed_host
from shardfn.shards.random import mixed
from shardfn.transforms.cutting import written

NAME = "sf.run.batches"


@runtime_checkable
class Ready(Protocol):
    """Rows that are read without running anybody's code, so that a thread may read them beside a step."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, row: int) -> Any:
        """One of them."""

    def take(self, rows: Numbers) -> Any:
        """A batch of these: a tree of tensors whose dim 0 they are."""

    def fingerprint(self) -> str:
        """The same for the same rows."""


class Columns:
    """A pytree of tensors and arrays, whose dim 0 are the rows."""

    def __init__(self, tree: Any) -> None:
        paths, self._leaves, self._structure = optree.tree_flatten_with_path(tree, none_is_leaf=True)
        counts: dict[str, int] = {}
        for path, leaf in zip(paths, self._leaves, strict=True):
            name = f"source{written(path)}"
            if not isinstance(leaf, (Tensor, np.ndarray)) or leaf.ndim == 0:
                shown = "a tensor without dimensions" if isinstance(leaf, (Tensor, np.ndarray)) else described(leaf)
                raise TypeError(
                    f"{NAME}: {name} is {shown}; in a dict or tuple the leaves are tensors or arrays, whose dim 0 are "
                    f"the rows. Rows that are objects go in a list, or in a data set with __len__ and __getitem__"
                )
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                raise ValueError(
                    f"{NAME}: {name} is on {leaf.device}; keep what rows are read from on the CPU: batches come to the "
                    f"mesh's device by themselves"
                )
            if why := _no_rows(leaf):
                raise TypeError(f"{NAME}: {name} is {why}")
            counts[name] = len(leaf)
        if len(set(counts.values())) > 1:
            shown = listed(f"{name} has {count}" for name, count in counts.items())
            raise ValueError(f"{NAME}: dim 0 are the rows, of which all tensors have as many, but {shown}")
        self._count = next(iter(counts.values()), 0)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Any:
        return optree.tree_unflatten(self._structure, [leaf[row] for leaf in self._leaves])

    def take(self, rows: Numbers) -> Any:
        """A batch of these rows."""
        index = torch.from_numpy(rows)
        taken = [
            leaf.index_select(0, index) if isinstance(leaf, Tensor) else torch.from_numpy(leaf[rows])
            for leaf in self._leaves
        ]
        return optree.tree_unflatten(self._structure, taken)

    def fingerprint(self) -> str:
        """Of dtypes, shapes, and some rows between the first and the last."""
        return f"{digest((self.take(some_of(self._count)), [described(leaf) for leaf in self._leaves])):014x}"


def _no_rows(leaf: Tensor | np.ndarray) -> str:
    """Why no batches are made of a tensor or an array; "" of most."""
    if isinstance(leaf, Tensor):
        return f"a tensor {lack(leaf)}" if lack(leaf) else ""
    try:
        torch.from_numpy(np.empty(0, leaf.dtype))
    except (TypeError, ValueError):  # dates, words, objects; another order of bytes
        return f"an array of {leaf.dtype}, of which there are no tensors: convert it by astype, or leave it out"
    return ""


def some_of(count: int) -> Numbers:
    """The numbers of rows by which a source is known: at most 16, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, 16).astype(np.int64))


def opened(source: Any) -> Any:
    """A source as `batches` reads it: with `__len__` and `__getitem__`, and `Ready` if it can be.

    Raises:
        TypeError: it has no rows that could be found by their numbers.
        ValueError: it has none at all, or tensors of different lengths.
    """
    if isinstance(source, Tensor | np.ndarray | dict | tuple):
        source = Columns(source)
    if isinstance(source, IterableDataset) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise TypeError(
            f"{NAME}: the source, of type {type(source).__name__}, is no data set with __len__ and __getitem__, so no "
            f"row of it can be found by its number. Files of rows are read by sf.run.Stream(files, read, lanes=...); "
            f"a loader of yours can be iterated by itself, and sf.run.checked(loader, mesh, axes) compares its batches"
        )
    if len(source) == 0:
        raise ValueError(f"{NAME}: the source, of type {type(source).__name__}, has no rows")
    return source


def unwrapped(source: Any, rows: Sequence[int]) -> tuple[Any, list[int]]:
    """The data set of which a Subset, or one of that, has some rows, and their numbers in it."""
    found = list(rows)
    while type(source) is Subset:
        found = [int(source.indices[row]) for row in found]
        source = source.dataset
    return source, found


def portion(batch: int, places: int, axes: Sequence[str]) -> int:
    """Rows of one place along the axes.

    Raises:
        ValueError: the places cannot have equal parts.
    """
    if batch % places:
        near = [n for n in (batch // places * places, math.ceil(batch / places) * places) if n]
        raise ValueError(
            f"{NAME}: batch={batch} rows a step cannot be cut into equal parts for {places} ranks along "
            f"{' x '.join(axes)}: say batch={' or '.join(map(str, near))}"
        )
    return batch // places


AT_ONCE = 1024  # rows whose order is computed together, at most


@dataclass(frozen=True)
class Reader(Dataset[Any]):
    """Batches by the numbers of their steps; those of one place along the axes.

    Attributes:
        source: has the rows.
        order: in which they are read.
        first: of a step's rows that are read here.
        stop: where they end.
        collate: makes a batch of rows; None is the default.
    """

    source: Any
    order: Order
    first: int
    stop: int
    collate: Collate | None

    @property
    def ready(self) -> bool:
        """Whether reading runs none of the user's code, which may not run beside a step."""
        return isinstance(self.source, Ready) and self.collate is None

    def __getitem__(self, step: int) -> Any:
        return self.read(self.order.part(step, self.first, self.stop), step)

    def each(self, start: int, stop: int | None) -> Generator[Any]:
        """The batches of these steps; the order of many is computed at a time."""
        size, steps = self.stop - self.first, 1
        while stop is None or start < stop:
            steps = steps if stop is None else min(steps, stop - start)
            whole = self.order.part(start, self.first, self.stop, steps)
            for number in range(steps):
                some = slice(number * size, (number + 1) * size)
                yield self.read(Part(whole.rows[some], whole.epochs[some], whole.real[some]), start + number)
            start, steps = start + steps, max(1, min(2 * steps, AT_ONCE // size))

    def read(self, part: Part, step: int) -> Any:
        """The batch of these rows."""
        batch = self.source.take(part.rows) if self.ready else self._collated(part, step)
        return masked(batch, part.real) if self.order.last == "pad" else batch

    def _collated(self, part: Part, step: int) -> Any:
        with lent_generators():
            rows = _rows(self.source, part, self.order.seed)
            seed_host(mixed(self.order.seed, "collate", step, self.first))
            return made(rows, part.rows.tolist(), self.collate)


def made(rows: list[Any], numbers: Sequence[int], collate: Collate | None) -> Any:
    """A batch of rows, in memory of its own.

    Raises:
        RuntimeError: `collate` raised StopIteration, which workers would take for the end.
    """
    try:
        batch = collated(rows, numbers, collate)
    except StopIteration as error:
        raise RuntimeError("sf.run.batches: collate raised StopIteration") from error
    return batch if collate is None else owned(batch)


def _rows(source: Any, part: Part, seed: int) -> list[Any]:
    """Each read with random numbers of its own; all at once where the data set does that, with those of the first."""
    inner, numbers = unwrapped(source, part.rows.tolist())
    seeds = [mixed(seed, "row", *each) for each in zip(part.epochs.tolist(), part.rows.tolist(), strict=True)]
    if callable(getattr(inner, "__getitems__", None)):
        seed_host(seeds[0])
        try:
            found = inner.__getitems__(numbers)
            rows = [] if isinstance(found, Mapping) else list(found)
        except StopIteration as error:
            raise RuntimeError(f"sf.run.batches: rows {numbers} of the source raised StopIteration") from error
        if len(rows) != len(numbers):
            what = f"a {type(found).__name__}" if isinstance(found, Mapping) else f"{len(rows)} rows"
            raise ValueError(
                f"sf.run.batches: __getitems__ of the source, {type(inner).__name__}, gave {what} for {len(numbers)} "
                f"numbers; it gives a list of as many rows. What is to be left out is left out before, as by a Subset"
            )
        return rows
    return [_row(inner, number, seed) for number, seed in zip(numbers, seeds, strict=True)]


def _row(source: Any, number: int, seed: int) -> Any:
    seed_host(seed)
    try:
        return source[number]
    except StopIteration as error:  # which whoever iterates over batches would take for their end
        raise RuntimeError(f"sf.run.batches: row {number} of the source raised StopIteration") from error
    except Exception as error:
        error.add_note(f"sf.run.batches: row {number} of the source, {type(source).__name__}, was read")
        raise


def fingerprint(source: Any, seed: int) -> str:
    """The same for the same rows: of all that a source knows, or else of its length and rows between its outer ones.

    A row that is another one when it is read again says nothing.
    """
    if isinstance(source, Ready):
        return source.fingerprint()
    probes = []
    for row in some_of(len(source)).tolist():
        inner, (number,) = unwrapped(source, [row])
        with lent_generators():
            one, again = (digest(_row(inner, number, mixed(seed, "probe", row))) for _ in range(2))
        probes.append(one if one == again else -1)
    return f"{digest([len(source), *probes]):014x}"


def by_workers(data: Dataset[Any], steps: Iterable[int] | None, workers: int, prefetch: int) -> Iterator[Any]:
    """What a data set gives for each of these steps, or by itself, read by torch's workers, which end with this."""
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=None, sampler=cast(Any, steps), num_workers=workers, collate_fn=_same,
        prefetch_factor=max(1, prefetch), generator=torch.Generator(),  # else it would draw from torch's own
        worker_init_fn=_apart,
    )  # fmt: skip
    yield from loader


def _apart(_: int) -> None:
    """What asks a run for its end is for the run: until then it needs its workers, which end by themselves after it.

    Whoever starts processes, as torchrun, signals a process and all in its group. SIGTERM stays what it is, since by
    that the process itself ends a worker that hangs.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _same(batch: Any) -> Any:
    return batch
