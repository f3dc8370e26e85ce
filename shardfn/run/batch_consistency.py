"""Checks that all ranks have consistent batches before any rank gets one.

A summary of each next batch is all-gathered while the step of the present batch runs. So an error on one rank is raised
on all of them at the same step, and no rank waits for one that has no batch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.checkpoint.team import team_of
from shardfn.collectives.agree import agree, failing_together, gathered
from shardfn.compat import loaders, process_groups
from shardfn.compat.loaders import without_frames
from shardfn.mesh import waiting
from shardfn.mesh.axes import check_axes, grid_of, per_mesh, sizes
from shardfn.mesh.grid import AxisName, as_names
from shardfn.mesh.groups import cpu_group
from shardfn.quoting import listed, short
from shardfn.run.collating import (
    SIZES,
    TELLING,
    Lengths,
    Pad,
    digest,
    kinds,
    kinds_but_sizes,
    lengths_of,
    of_dicts,
    row_digests,
    sizes_of,
)
from shardfn.run.feeding import BatchCopy, Copier, fresh, owned

LOOKS = 64  # at most so many batches are compared by content
ASTRAY = -1  # sent in place of an iterator's number by a rank that has seen ranks out of step
FRAMES, TEXT = 4, 1800  # frames and characters that are shown of another rank's error


class State(IntEnum):
    """The state of a rank's batch for a step."""

    BATCH = 0
    END = 1
    FAILED = 2
    FILLED = 3
    """A batch of filler rows only, while other ranks still have real rows."""


@dataclass(frozen=True)
class Read:
    """The result of one rank's read for a step: a batch, nothing, or an error."""

    state: State
    batch: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Peers:
    """The ranks that compare their batches, and what they require of them.

    Attributes:
        mesh: the mesh of these ranks.
        axes: mesh axes along which batches differ.
        name: of the public function, for messages.
        places: index of each rank along `axes`, in rank order.
        unequal: whether ranks may run out of batches at different steps; the first to do so ends all.
        distinct: whether ranks at different places must have different rows, which is checked by content.
        lengths: how to handle batches that are longer on some ranks; None if shapes must be equal.
    """

    mesh: DeviceMesh
    axes: tuple[str, ...]
    name: str
    places: list[int]
    unequal: bool = False
    distinct: bool = False
    lengths: Lengths | None = None

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the mesh, sorted."""
        return sorted(grid_of(self.mesh).ranks)

    @property
    def axes_text(self) -> str:
        """The axes, for messages."""
        return " x ".join(self.axes) or "no axes"


def axes_of(axes: Any, mesh: DeviceMesh, name: str) -> tuple[str, ...]:
    """Checks the argument `axes` of the function `name` and returns it as a tuple.

    Raises:
        TypeError, ValueError: it does not name axes of the mesh.
    """
    names = as_names(axes) if isinstance(axes, (str, tuple)) else axes
    if not isinstance(names, tuple) or not all(isinstance(axis, str) for axis in names):
        raise TypeError(
            f"{name}: axes must be the name of a mesh axis, such as 'data', or a tuple of names, got {names!r}"
        )
    check_axes(names, mesh, f"{name}(axes={names!r})")
    return names


def peers(mesh: DeviceMesh, axes: tuple[str, ...], name: str, lengths: Lengths | None, **options: bool) -> Peers:
    """The `Peers` of a mesh, with each rank's place along `axes`."""
    grid, by_rank, size_along = grid_of(mesh), dict[int, int](), sizes(mesh)
    for rank, where in zip(grid.ranks, itertools.product(*map(range, size_along.values())), strict=True):
        position = dict(zip(size_along, where, strict=True))
        by_rank[rank] = functools.reduce(lambda place, axis: place * size_along[axis] + position[axis], axes, 0)
    return Peers(mesh, axes, name, [by_rank[rank] for rank in sorted(by_rank)], lengths=lengths, **options)


@dataclass
class _BatchDigests:
    """Digests of what a rank's batches have contained so far.

    Attributes:
        looking: whether the contents of the next batch are compared.
        rows: digests of the distinct rows.
        digest: of all batches so far.
    """

    looking: bool
    rows: set[int] = field(default_factory=set)
    digest: int = 0

    def add(self, batch: Any) -> None:
        """Adds a batch."""
        rows = row_digests(batch)
        self.rows.update(rows)
        self.digest = digest([self.digest, *rows])


def device_batches(batches: Generator[Read], start: int, peers: Peers, device: torch.device) -> Generator[Any]:
    """Yields the batches on the device, from step `start` on, until all ranks run out.

    Raises:
        ValueError: on every rank, before the step concerned: only some ranks have a batch; or batches differ in
            structure, shapes or dtypes; or ranks that must have different rows have the same, or ranks at the same
            place have different rows.
        RuntimeError: another rank failed to read its batch. The rank that failed raises its own error.
    """
    copier = Copier(device)
    digests = _BatchDigests(looking=len(peers.places) > 1 and process_groups.between_processes())
    counter: itertools.count[int] = per_mesh(peers.mesh, "feeds", itertools.count)
    number = next(counter)  # counts iterators over this mesh, so that ranks that iterate differently are found
    with contextlib.closing(batches):
        current, summaries = _next(batches, start, peers, digests, copier, number)
        for step in itertools.count(start):
            if _ended(current, summaries, step, peers, digests):
                return
            on_its_way, sizes = current.batch, _sizes(summaries, step, peers)
            current, summaries = _next(batches, step + 1, peers, digests, copier, number)
            batch = copier.arrived(on_its_way)
            yield batch if sizes is None or peers.lengths is None else peers.lengths.padded(batch, *sizes, peers.name)
            del on_its_way, batch


@dataclass(frozen=True)
class _Summaries:
    """The all-gathered summaries of a step's batches.

    Attributes:
        group: name of the process group.
        work: the all-gather, to be waited for; None if it is complete.
        rows: int64 `[ranks, numbers]`, complete once `work` is done.
        own: this rank's numbers, int64 `[1, numbers]`.
    """

    group: str
    work: Any
    rows: Tensor
    own: Tensor


def _next(
    batches: Iterator[Read], step: int, peers: Peers, digests: _BatchDigests, copier: Copier, number: int
) -> tuple[Read, _Summaries | None]:
    """Starts to copy the next batch to the device, and to all-gather the ranks' summaries of it."""
    shapes, sizes = 0, [0] * SIZES
    try:
        read = next(batches, Read(State.END))
        if read.state in (State.BATCH, State.FILLED):
            if len(peers.places) > 1:
                shapes = digest(_kinds(read.batch, peers))
                sizes = sizes_of(read.batch)
            if digests.looking:
                digests.add(read.batch)
            read = Read(read.state, copier.start(read.batch))
    except Exception as error:  # not raised before all ranks know of it, in `_ended`
        read = Read(State.FAILED, error=without_frames(error))
    # Threads, which run in tests, compare only where ranks would do something else without.
    threads_meet = process_groups.worlds_of_threads() and (peers.unequal or peers.lengths is not None)
    if len(peers.places) == 1 or not (process_groups.between_processes() or threads_meet):
        return read, None
    contents = digests.digest if digests.looking else 0
    return read, _send([number, step, read.state, shapes, contents, len(digests.rows), *sizes], peers)


def _kinds(batch: Any, peers: Peers) -> list[str]:
    """The kinds of leaves that must be equal on all ranks; without sizes if lengths may differ."""
    return kinds(batch) if peers.lengths is None else kinds_but_sizes(batch)


def _sizes(summaries: _Summaries | None, step: int, peers: Peers) -> tuple[list[int], list[int]] | None:
    """The smallest and largest size of each dimension over ranks; None if sizes cannot differ.

    Raises:
        ValueError: ranks that must have the same rows have batches of other shapes.
    """
    if peers.lengths is None or summaries is None:
        return None
    sizes = summaries.rows[:, -SIZES:]
    _first_at_places(sizes.tolist(), "have other shapes", step, peers)
    return sizes.amin(0).tolist(), sizes.amax(0).tolist()


def _first_at_places(every: Sequence[Any], differ: str, step: int, peers: Peers) -> dict[int, int]:
    """The first rank, by its index, at each place along the axes.

    Args:
        every: a value for each rank's batch.
        differ: what it means for the batches if the values differ, for the message.
        step: of the batches.
        peers: the ranks that compare them.

    Raises:
        ValueError: ranks at the same place have different values.
    """
    first: dict[int, int] = {}
    for i, place in enumerate(peers.places):
        j = first.setdefault(place, i)
        if every[i] != every[j]:
            raise ValueError(
                f"{peers.name}: ranks {peers.ranks[j]} and {peers.ranks[i]} stand at the same place along "
                f"{peers.axes_text}, but their batches of step {step} {differ}. Name all axes along which rows differ "
                f"in axes=, or give both ranks the same rows"
            )
    return first


def _send(row: list[int], peers: Peers) -> _Summaries:
    if process_groups.worlds_of_threads():  # which meet at once
        own_row = torch.tensor(row, device="cpu")
        return _Summaries("", None, gathered(own_row, peers.mesh, None, "the next batch", peers.name), own_row)
    group = cpu_group(peers.ranks, "feed")
    rows = torch.empty(len(peers.places), len(row), dtype=torch.int64, device="cpu")
    own_row = torch.tensor([row], device="cpu")
    return _Summaries(group.group_name, process_groups.start_all_gather(rows, own_row, group), rows, own_row)


def _ended(local_read: Read, summaries: _Summaries | None, step: int, peers: Peers, digests: _BatchDigests) -> bool:
    """Whether the step has no batch; raises on every rank if anything is wrong on one."""
    if summaries is None:
        if local_read.error is not None:
            raise local_read.error
        return local_read.state in (State.END, State.FILLED)
    if summaries.work is not None:
        with waiting.on("the next batch", summaries.group, peers.name, note=f"It is that of step {step}"):
            summaries.work.wait()
    numbers, steps, states, shapes, contents, rows = summaries.rows[:, :6].T.tolist()
    if len({*zip(numbers, steps, strict=True)}) > 1:
        if ASTRAY not in numbers:  # a rank that is ahead has begun another all-gather, and waits for this one to join
            _astray.append(_send([ASTRAY] * summaries.rows.shape[1], peers))
        raise ValueError(
            f"{peers.name}: ranks ask for different batches: those of steps {steps}, in the order of their ranks "
            f"{peers.ranks}, by their iterators number {numbers}. All ranks must read the same "
            f"steps"
        )
    if State.FAILED in states:
        _raise_failed(local_read, states, step, peers)
    if State.END in states:
        if not peers.unequal and {*states} != {State.END}:
            short = [rank for rank, state in zip(peers.ranks, states, strict=True) if state == State.END]
            long = [rank for rank in peers.ranks if rank not in short]
            raise ValueError(
                f"{peers.name}: {_ranks_have(short)} no batch for step {step}, and {_ranks_have(long)} one. All ranks "
                f"need the same number of batches. Drop or pad the rest"
            )
        return True
    if {*states} == {State.FILLED}:
        return True
    if len(set(shapes)) > 1:
        _differ(local_read, step, peers)
    if digests.looking:
        _compare_rows(contents, rows, step, peers)
        by_place = dict(zip(peers.places, contents, strict=True))
        # Ranks at different places may have had only equal rows so far, but too few to rule out chance.
        digests.looking = step < LOOKS and peers.distinct and len(set(by_place.values())) < len(by_place)
    return False


_astray: list[_Summaries] = []  # all-gathers that may never complete, kept referenced


def _raise_failed(local_read: Read, states: list[int], step: int, peers: Peers) -> None:
    text = ""
    if local_read.error is not None:
        text = short("".join(traceback.format_exception(local_read.error, limit=-FRAMES)).strip(), TEXT)
    texts = team_of([grid_of(peers.mesh)], "compare").gathered(text, f"{peers.name}: an error's text")
    if local_read.error is not None:
        raise local_read.error
    failed = states.index(State.FAILED)
    raise RuntimeError(
        f"{peers.name}: rank {peers.ranks[failed]} could not read its batch of step {step}:\n{texts[failed]}"
    )


def _ranks_have(ranks: list[int]) -> str:
    shown = listed(ranks, 4)
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"


def _differ(local_read: Read, step: int, peers: Peers) -> None:
    copy: BatchCopy = local_read.batch
    advice = "On every step all ranks have batches alike"
    if peers.lengths is None:
        advice = (
            "On every step all ranks have batches of equal shapes: drop a last one with fewer rows (drop_last=True); "
            'pad="ranks" fills them up to the longest of all ranks, pad="none" is for a step that takes what each rank '
            "has, with in_specs=..."
        )
    agree(_kinds(copy.batch, peers), peers.mesh, peers.name, subject=(f"the batches of step {step}", advice))


def _compare_rows(contents: list[int], rows: list[int], step: int, peers: Peers) -> None:
    first = _first_at_places(contents, "differ", step, peers)
    if not peers.distinct:
        return
    owner: dict[int, int] = {}
    for place, i in first.items():
        j = owner.setdefault(contents[i], i)
        if i != j and rows[i] >= TELLING:
            raise ValueError(
                f"{peers.name}: ranks {peers.ranks[j]} and {peers.ranks[i]} get the same rows at places "
                f"{peers.places[j]} and {place} along {peers.axes_text}: {rows[i]} different rows up to step {step}. "
                f"Use sf.run.batches, or a DistributedSampler with num_replicas={len(first)} and each rank's place"
            )


# --- a user's own loader ---


NAME = "sf.run.check_loader"


@dataclass(frozen=True)
class CheckedLoader:
    """Batches of a loader, compared between ranks before a step gets them; made by `check_loader`.

    Attributes:
        axes: mesh axes along which ranks have different rows.
    """

    axes: tuple[str, ...]
    _loader: Iterable[Any] = field(repr=False)
    _peers: Peers = field(repr=False)
    _begun: list[int] = field(repr=False, compare=False, default_factory=list)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh whose ranks iterate."""
        return self._peers.mesh

    def __iter__(self) -> Iterator[Any]:
        return self(0)

    def __call__(self, start: int) -> Iterator[Any]:
        """Iterates over the batches, after reading and dropping the first `start`.

        Raises:
            ValueError: the loader can be iterated only once, and batches of it have been read.
        """
        if self._begun and loaders.read_once(self._loader):
            raise ValueError(
                f"{NAME}: the loader is a {type(self._loader).__name__}, which can be read once, and its first batches "
                f"are gone. Pass an object that can be iterated again, such as a DataLoader"
            )
        self._begun.append(start)
        return device_batches(_reads(self._loader, start), start, self._peers, torch.device("cpu"))

    def __len__(self) -> int:
        size: Callable[[], int] | None = getattr(self._loader, "__len__", None)
        if size is None:
            raise TypeError(f"{NAME}: {type(self._loader).__name__} has no length")
        return size()


def check_loader(loader: Iterable[Any], mesh: DeviceMesh, axes: AxisName, *, pad: Pad | None = None) -> CheckedLoader:
    """Wraps a loader, so that its batches are compared between ranks before any rank gets one.

    These raise on every rank, instead of wrong training or a hang: ranks at different places along `axes` have the same
    rows, as with a forgotten sampler; ranks at the same place have different rows; numbers of batches differ, or the
    structure, shapes (but for `pad`) or dtypes of batches; one rank's loader fails. Rows are compared in the first
    batches of each iteration: they count as the same on two ranks if all were equal and at least 8 of them distinct,
    so that data with many equal rows raises no false alarm.

    Batches keep their type and device, except that mappings become dicts. One batch more than the loop has is read.
    Batches are therefore copied, so that a loader may reuse its memory; not those of torch's `DataLoader` with its
    default `collate_fn`, which are new anyway.

    Args:
        loader: gives pytrees of tensors or arrays with rows along dim 0.
        mesh: whose ranks iterate, all in the same way.
        axes: the axis or axes along which ranks have different rows; `()` for none.
        pad: how to handle batches that are longer on some ranks, as in `batches`; None: an error.

    Returns:
        An iterable of the same batches, with the loader's `len`.

    Raises:
        TypeError, ValueError: on every rank: the loader is not iterable, or the mesh lacks an axis.
    """
    sizes(mesh)
    with failing_together([mesh], NAME, (TypeError, ValueError)):
        names = axes_of(axes, mesh, NAME)
        if not isinstance(loader, Iterable):
            raise TypeError(f"{NAME}: the loader is of type {type(loader).__name__}, which gives no batches")
        lengths = lengths_of(pad, getattr(loader, "collate_fn", None), NAME)
    agree([f"axes={names!r}", f"pad={lengths!r}"], mesh, NAME, subject=("axes= and pad=", "Every rank passes the same"))
    return CheckedLoader(names, loader, peers(mesh, names, NAME, lengths, distinct=True))


def _reads(loader: Iterable[Any], start: int) -> Generator[Read]:
    """Yields a loader's batches from `start` on, telling StopIteration at its end from one raised by code it calls.

    Raises:
        RuntimeError: a row of the data set, or `collate_fn`, raised StopIteration.
    """
    batches, is_fresh = iter(loader), fresh(loader)
    for number in itertools.count():
        try:
            batch = next(batches)
        except StopIteration as end:
            loaders.refuse_failed(end, NAME)
            return
        if number >= start:
            tree = of_dicts(batch)
            yield Read(State.BATCH, tree if is_fresh else owned(tree))
