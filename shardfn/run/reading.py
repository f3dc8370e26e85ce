"""The rows of a step are read, here or in workers."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from shardfn.run.collating import Collate, collated, masked
from shardfn.run.fingerprints import digest
from shardfn.run.order import Order, Part
from shardfn.run.owning import owned
from shardfn.run.seeding import lent_generators, seed_all
from shardfn.run.sources import Ready, some_of, unwrapped
from shardfn.shards.random import mixed

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
            seed_all(mixed(self.order.seed, "collate", step, self.first))
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
        seed_all(seeds[0])
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
    seed_all(seed)
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


def steps_from(start: int, stop: int | None) -> Iterable[int]:
    """The numbers of steps."""
    return itertools.count(start) if stop is None else range(start, stop)
