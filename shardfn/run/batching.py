"""The batches of a run: all ranks follow one order of rows, and each reads its part of it."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.agree import agree, failing_together
from shardfn.mesh.axes import device_of, sizes
from shardfn.mesh.grid import AxisName
from shardfn.optim.hyperparameters import check_integer
from shardfn.run.batch_consistency import Peers, Read, State, axes_of, device_batches, peers
from shardfn.run.collating import Collate, Lengths, Pad, lengths_of
from shardfn.run.feeding import ahead, locked
from shardfn.run.order import RARE, Order, Remainder, Sample, Sampled, Sampler, chosen_rows, sample_bound
from shardfn.run.sources import NAME, BatchReader, by_workers, portion, prepared, sampled
from shardfn.run.streams import Stream, Streamed, stream_facts
from shardfn.shards.random import int_seed
from shardfn.tracebacks import api_boundary

_SOURCES = (
    "the arguments",
    "All ranks pass the same arguments, and a source with the same rows in the same order: `batches` itself cuts it, "
    "so it must not be cut or shuffled by rank before",
)


@dataclass(frozen=True)
class Batches:
    """This rank's part of a run's batches, from any step on; made by `batches`.

    `batches(step)` iterates from that step on, and `iter(batches)` from the step given as `start=`. `len` is the number
    of all steps if `epochs` is given.

    Attributes:
        axes: mesh axes along which ranks have different rows.
        identity: what the order depends on, as str and int: with equal identities, step `k` has the same rows.
        steps_per_epoch: batches of an epoch, rounded up; None for a stream, and with `sample_rate`.
        start: the step that `iter` begins with.
        steps: batches in all epochs; None if endless or unknown.
    """

    axes: tuple[str, ...]
    identity: dict[str, str | int]
    steps_per_epoch: int | None
    start: int
    steps: int | None
    _peers: Peers = field(repr=False)
    _open: Callable[[int], Generator[Read]] = field(repr=False)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh whose ranks read the batches."""
        return self._peers.mesh

    def __call__(self, start: int) -> Generator[Any]:
        """Iterates over the batches from step `start` on, on the mesh's device.

        Raises:
            ValueError: a negative step.
        """
        check_integer(NAME, "start", start, 0)
        return device_batches(self._open(start), start, self._peers, device_of(self.mesh))

    def __iter__(self) -> Generator[Any]:
        return self(self.start)

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("these batches have no length: epochs=None is for ever, and a stream is read to its end")
        return self.steps


@api_boundary
def batches(
    source: Any,
    mesh: DeviceMesh,
    axes: AxisName,
    batch: int,
    seed: int,
    *,
    start: int = 0,
    epochs: int | None = None,
    shuffle: bool = True,
    remainder: Remainder = "drop",
    collate: Collate | None = None,
    workers: int = 0,
    prefetch: int = 2,
    pad: Pad | None = None,
    sample_rate: float | None = None,
    sampler: Sampler | None = None,
) -> Batches:
    """Batches of rows, sharded over mesh axes, in an order that depends only on seed and step.

    Each rank reads only its own rows: the batch of a step is the concatenation of the parts along `axes`, however many
    there are. Ranks along other axes get the same rows. To resume, only the step number is needed. All ranks of the
    mesh make this call, and iterate in the same way.

    Args:
        source: rows. A tensor or array, or a dict or tuple of them, whose dim 0 the rows are; a data set or list with
            `__len__` and `__getitem__`, and `__getitems__` if it reads several at once; `token_windows` or
            `packed_windows`; a `Stream` of files.
        mesh: whose ranks read.
        axes: the axis, or axes major to minor, along which ranks have different rows, as an entry of `P` names them;
            `()` for none, so that all ranks have all rows.
        batch: rows of a step, on all ranks together.
        seed: of the order, and of random numbers in a data set's own code: the generators of Python, numpy and torch
            are seeded by seed, epoch and row before each row is read, so the result depends on neither ranks nor
            workers.
        start: the step that `iter` begins with.
        epochs: how often every row is read; None is for ever.
        shuffle: whether each epoch has its own random order instead of the source's.
        remainder: what happens if the rows of an epoch do not fill its last batch: `"drop"` leaves them out; `"pad"`
            repeats some to fill it, and adds to every batch a mask, bool `[rows]`, False for the repeated rows: as
            `batch["mask"]` of a dict, else as the last item of a tuple; `"wrap"` continues with the next epoch.
        collate: makes a batch of a list of rows; default: torch's `default_collate`. Its random numbers depend on the
            step and on the rank's place.
        workers: processes that read; 0: a data set's code runs when the batch is asked for. Sources that run no user
            code, as tensors and token files, are read by a thread even so.
        prefetch: batches that are read ahead, by each worker too; 0: none.
        pad: how to handle batches that `collate` makes longer on some ranks, as collators of transformers do, which pad
            to the longest row of a rank. None: an error. `"ranks"`: pads at the ends to the longest of all ranks:
            `labels` with -100, `attention_mask` and `token_type_ids` with 0, `input_ids` with what `collate.tokenizer`
            pads with, and likewise keys that end in `_` and one of these names. A dict: the same, with values of your
            own by a leaf's last key: `{"input_ids": 0}`. `"none"`: each rank keeps its own lengths, for a step with
            `in_specs=...`.
        sample_rate: for Poisson sampling, as differential privacy asks for: the probability, above 0 and at most 1,
            with which each row is in a step's batch, independently of other rows and steps. Then `batch` is the most
            rows that a step may have: what is missing is filled up with row 0, spread over all ranks, and every batch
            has a mask as with `remainder="pad"`. A sample that is larger is an error at its step; `batch` must be so
            large that this has a probability of at most 1e-9 a step. Samples depend on the seed and the step, and not
            on `batch`. They go on for ever: `epochs`, `shuffle` and `remainder` are left out, and the source is no
            stream. Each step takes about 7 ns for each row of the source, on every rank. Random numbers in a data set's
            code depend on seed, step and row.

        sampler: in place of `shuffle`, a function of the epoch's number that gives the numbers of its rows, in order,
            such as rows drawn with weights: as many in each epoch, and the same on all ranks and in a run that resumes.
            It is called again for each epoch, by workers too. Not of a stream, nor with `sample_rate`.

    Returns:
        A `Batches`.

    Raises:
        TypeError, ValueError: on every rank: an argument is wrong, or arguments or sources differ between ranks.
    """
    sizes(mesh)
    with failing_together([mesh], NAME):  # a source may raise anything
        lengths = lengths_of(pad, collate, NAME)
        result, facts = _make_batches(
            source,
            mesh,
            axes,
            batch,
            seed,
            start,
            epochs,
            shuffle,
            remainder,
            collate,
            workers,
            prefetch,
            lengths,
            sample_rate,
            sampler,
        )
    values = {
        **result.identity,
        "batch": batch,
        "start": start,
        "epochs": epochs,
        "axes": result.axes,
        "pad": result._peers.lengths,
    }
    digest = values.pop("source")
    compared = [*(f"{name}={value!r}" for name, value in values.items()), *facts]
    agree([*compared, f"rows of the source with checksum {digest}"], mesh, NAME, subject=_SOURCES)
    return result


def _make_batches(
    source: Any, mesh: DeviceMesh, axes: Any, batch: int, seed: int, start: int, epochs: int | None, shuffle: bool,
    remainder: Remainder, collate: Collate | None, workers: int, prefetch: int, lengths: Lengths | None,
    sample_rate: float | None, sampler: Sampler | None,
) -> tuple[Batches, list[str]]:  # fmt: skip
    """The batches, and a line for each fact about their source."""
    axes = axes_of(axes, mesh, NAME)
    for name, value, minimum in (("batch", batch, 1), ("workers", workers, 0), ("prefetch", prefetch, 0)):
        check_integer(NAME, name, value, minimum)
    if epochs is not None:
        check_integer(NAME, "epochs", epochs, 1)
    check_integer(NAME, "start", start, 0)
    if remainder not in get_args(Remainder):
        raise ValueError(
            f"{NAME}: remainder={remainder!r}; what becomes of an epoch's last rows is one of {get_args(Remainder)}"
        )
    if collate is not None and not callable(collate):
        raise TypeError(f"{NAME}: collate must be a function of a list of rows, got {collate!r}")
    if type(shuffle) is not bool:
        raise TypeError(f"{NAME}: shuffle must be True or False, got {shuffle!r}")
    if sample_rate is not None:
        _check_rate(sample_rate, source, shuffle and remainder == "drop" and epochs is None)
    seed = int_seed(seed)
    group = peers(mesh, axes, NAME, lengths, unequal=isinstance(source, Stream))
    size = portion(batch, max(group.places) + 1, axes)
    first = group.places[group.ranks.index(dist.get_rank())] * size
    identity: dict[str, str | int] = {"seed": seed, "batch": batch, "shuffle": int(shuffle), "remainder": remainder}
    device = device_of(mesh)
    if sampler is not None and (not callable(sampler) or sample_rate is not None or isinstance(source, Stream)):
        raise TypeError(
            f"{NAME}: sampler must be a function of the epoch, without sample_rate= and not for streams, got "
            f"{type(sampler).__name__}"
        )
    if isinstance(source, Stream):
        streamed = Streamed(source, seed, shuffle, remainder, epochs, batch, first, first + size, collate)
        identity["source"], facts = stream_facts(source)
        streamed.check(workers)
        reads = partial(streamed.open_batches, workers, prefetch, device)
        return Batches(axes, identity, None, start, None, group, reads), facts
    source = prepared(source)
    order: Order | Sample = Order(len(source), batch, seed, shuffle, remainder, epochs)
    if sampler is not None:
        first_rows = chosen_rows(sampler, 0, len(source), None)
        order = Sampled(len(first_rows), batch, seed, shuffle, remainder, epochs, sampler, len(source))
        identity["sampler"] = zlib.crc32(first_rows.tobytes())
    if sample_rate is not None:
        order = Sample(len(source), batch, seed, float(sample_rate))
        identity = {"seed": seed, "sample_rate": repr(order.sample_rate)}
        _check_room(order, max(group.places) + 1)
    elif remainder == "drop" and batch > order.count:
        raise ValueError(
            f'{NAME}: batch={batch} rows a step, and the source has {order.count}: remainder="drop" leaves none. Say '
            f'remainder="wrap" or "pad", or a smaller batch'
        )
    reader = BatchReader(source, order, first, first + size, collate)
    digest, facts = sampled(source, seed)
    identity |= {"rows": len(source), "source": digest}
    reads = partial(_reads, reader, workers, prefetch, device)
    return Batches(axes, identity, order.steps_per_epoch, start, order.steps, group, reads), facts


def _reads(reader: BatchReader, workers: int, prefetch: int, device: torch.device, start: int) -> Generator[Read]:
    """Yields a rank's batches, read by workers, by a thread, or when they are asked for."""
    steps = reader.order.steps
    if workers:
        numbers = itertools.count(start) if steps is None else range(start, steps)
        batches = ahead(partial(by_workers, reader, numbers, workers, prefetch), max(1, prefetch), device)
    elif reader.ready and prefetch:
        batches = ahead(partial(reader.batches_from, start, steps), prefetch, device)
    else:
        batches = reader.batches_from(start, steps)
    with contextlib.closing(batches):
        for batch in batches:
            yield Read(State.BATCH, locked(batch, device))


def _check_rate(sample_rate: Any, source: Any, default: bool) -> None:
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, (int, float)):
        raise TypeError(
            f"{NAME}: sample_rate must be the probability of each row at each step, a number, or None, got "
            f"{sample_rate!r}"
        )
    if not 0 < sample_rate <= 1:
        raise ValueError(
            f"{NAME}: sample_rate must be the probability of each row at each step, above 0, at most 1, got "
            f"{sample_rate!r}"
        )
    if not default:
        raise ValueError(
            f"{NAME}: sample_rate={sample_rate!r} samples steps independently: leave out epochs=, shuffle= and "
            "remainder="
        )
    if isinstance(source, Stream):
        raise ValueError(
            f"{NAME}: sample_rate={sample_rate!r}; rows of a stream are not found by their numbers, so none is sampled"
        )


def _check_room(sample: Sample, places: int) -> None:
    """Raises ValueError if samples would often be larger than a batch."""
    needed = sample_bound(sample.count, sample.sample_rate)
    if sample.batch < needed:
        raise ValueError(
            f"{NAME}: batch={sample.batch} is the most rows that a step may have, and samples have "
            f"{sample.count * sample.sample_rate:.4g} on average, sometimes more: say "
            f"batch={-(-needed // places) * places}, which is too few with a probability of at most {RARE:g} a step"
        )


class Feed(Protocol):
    """A function that gives a run's batches from any step on."""

    def __call__(self, start: int) -> Iterator[Any]:
        """Iterates over this rank's part of the batches from step `start` on."""
