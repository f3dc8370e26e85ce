"""All ranks have the batches that they should have: each says so of a batch before any of them gets it.

What a rank says of the next batch goes around while the step of this one runs. So an error of one rank is an error of
all of them at the same step, and none waits for another that has no batch.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn.collectives.agree import agree, gathered
from shardfn.compat import process_groups
from shardfn.mesh import waiting
from shardfn.mesh.axes import check_axes, grid_of, per_mesh, sizes
from shardfn.mesh.grid import as_names
from shardfn.mesh.groups import cpu_group
from shardfn.quoting import listed, short
from shardfn.run.collating import SIZES, Lengths, kinds_but_sizes, sizes_of
from shardfn.run.feeding import Copier, Copy
from shardfn.run.fingerprints import TELLING, digest, kinds, rows_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LOOKS = 64  # batches at most that are compared by content
ASTRAY = -1  # in place of an iterator's number
FRAMES, TEXT = 4, 1800  # the last frames of another rank's error, and all its characters


class State(IntEnum):
    """What a rank has for a step."""

    BATCH = 0
    END = 1
    FAILED = 2
    FILLED = 3
    """A batch without a row that counts: others still have such rows."""


@dataclass(frozen=True)
class Read:
    """What one rank has read for a step: a batch, nothing, or an error."""

    state: State
    batch: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Peers:
    """Who compares, and how.

    Attributes:
        mesh: whose ranks.
        axes: along which batches differ.
        name: of the function that the user called.
        places: where along the axes each rank stands, in the order of their numbers.
        unequal: whether ranks may come to their ends at different steps, which is then the end of all.
        distinct: whether ranks at different places must not have the same rows; only contents tell.
        lengths: what becomes of batches that are longer on some ranks; None where there are none such.
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
        """All of them, in order."""
        return sorted(grid_of(self.mesh).ranks)

    @property
    def along(self) -> str:
        """The axes, for messages."""
        return " x ".join(self.axes) or "no axes"


def axes_of(axes: Any, mesh: DeviceMesh, name: str) -> tuple[str, ...]:
    """The argument `axes` of a function of this name.

    Raises:
        TypeError, ValueError: it names no axes of the mesh.
    """
    names = as_names(axes) if isinstance(axes, (str, tuple)) else axes
    if not isinstance(names, tuple) or not all(isinstance(axis, str) for axis in names):
        raise TypeError(f"{name}: axes={names!r}; it is the name of a mesh axis, 'data', or a tuple of names")
    check_axes(names, mesh, f"{name}(axes={names!r})")
    return names


def peers(mesh: DeviceMesh, axes: tuple[str, ...], name: str, lengths: Lengths | None, **how: bool) -> Peers:
    """All ranks of a mesh."""
    grid = grid_of(mesh)
    at = {rank: place for place, rank in enumerate(grid.ranks)}
    strides, rest = {}, 1
    for axis, size in reversed(sizes(mesh).items()):
        strides[axis], rest = (rest, size), rest * size
    places = []
    for rank in sorted(grid.ranks):
        place = 0
        for axis in axes:
            stride, size = strides[axis]
            place = place * size + at[rank] // stride % size
        places.append(place)
    return Peers(mesh, axes, name, places, lengths=lengths, **how)


@dataclass
class _Seen:
    """What the contents of a rank's batches have been so far.

    Attributes:
        looking: whether the next one is compared, too.
        rows: digests of different rows.
        digest: of everything.
    """

    looking: bool
    rows: set[int] = field(default_factory=set)
    digest: int = 0

    def add(self, batch: Any) -> None:
        """Another batch."""
        rows = rows_of(batch)
        self.rows.update(rows)
        self.digest = digest([self.digest, *rows])


def together(batches: Generator[Read], start: int, who: Peers, device: torch.device) -> Generator[Any]:
    """The batches, on the device, from step `start` on, until all ranks are at their ends.

    Raises:
        ValueError: on every rank, before the step of which it is true: some rank has no batch and others have one, or
            their batches differ in structure, shapes or dtypes; or ranks have the same rows that should not, or have
            other rows than those that stand at the same place.
        RuntimeError: another rank failed to read its batch. The rank that failed raises its own error.
    """
    copier = Copier(device)
    seen = _Seen(looking=len(who.places) > 1 and process_groups.between_processes())
    counter: itertools.count[int] = per_mesh(who.mesh, "feeds", itertools.count)
    number = next(counter)  # of the mesh's iterators: ranks that iterate differently see it
    with contextlib.closing(batches):
        this, said = _took(batches, start, who, seen, copier, number)
        for step in itertools.count(start):
            if _ended(this, said, step, who, seen):
                return
            copy, sizes = this.batch, _sizes(said, this, step, who)
            this, said = _took(batches, step + 1, who, seen, copier, number)
            batch = copier.arrived(copy)
            yield batch if sizes is None or who.lengths is None else who.lengths.padded(batch, *sizes, who.name)
            del copy, batch


@dataclass(frozen=True)
class _Said:
    """What all ranks say, when it has come: the work, and a row of each rank."""

    group: str
    work: Any
    rows: Tensor
    own: Tensor


def _took(
    batches: Iterator[Read], step: int, who: Peers, seen: _Seen, copier: Copier, number: int
) -> tuple[Read, _Said | None]:
    """The next batch, on its way to the device; and what this rank says of it, on its way to the others."""
    shapes, sizes = 0, [0] * SIZES
    try:
        one = next(batches, Read(State.END))
        if one.state in (State.BATCH, State.FILLED):
            if len(who.places) > 1:
                shapes = digest(_kinds(one.batch, who))
                sizes = sizes_of(one.batch)
            if seen.looking:
                seen.add(one.batch)
            one = Read(one.state, copier.start(one.batch))
    except Exception as error:
        one = Read(State.FAILED, error=error)
    if len(who.places) > 1 and who.unequal and process_groups.worlds_of_threads():
        return _among_threads(one, who), None
    if len(who.places) == 1 or not process_groups.between_processes():
        return one, None
    contents = seen.digest if seen.looking else 0
    return one, _say([number, step, one.state, shapes, contents, len(seen.rows), *sizes], who)


def _kinds(batch: Any, who: Peers) -> list[str]:
    """What batches of all ranks have in common."""
    return kinds(batch) if who.lengths is None else kinds_but_sizes(batch)


def _sizes(said: _Said | None, mine: Read, step: int, who: Peers) -> tuple[list[int], list[int]] | None:
    """The least and the most that batches of a step have on any rank, dimension by dimension; None where none differ.

    Raises:
        ValueError: ranks that must have the same rows have batches of other shapes.
    """
    if who.lengths is None or len(who.places) == 1 or (said is None and not process_groups.worlds_of_threads()):
        return None
    if said is None:
        own = torch.tensor(sizes_of(mine.batch.batch))
        every = gathered(own, who.mesh, None, "how long batches are", who.name)
    else:
        every = said.rows[:, -SIZES:]
    _first_at_places(every.tolist(), "have other shapes", step, who)
    return every.amin(0).tolist(), every.amax(0).tolist()


def _first_at_places(every: Sequence[Any], differ: str, step: int, who: Peers) -> dict[int, int]:
    """The first rank, by its index, at each place along the axes.

    Args:
        every: what is known of each rank's batch.
        differ: what that says of batches where it is not the same.
        step: whose batches they are.
        who: compares.

    Raises:
        ValueError: it is not the same on ranks at the same place.
    """
    first: dict[int, int] = {}
    for i, place in enumerate(who.places):
        j = first.setdefault(place, i)
        if every[i] != every[j]:
            raise ValueError(
                f"{who.name}: ranks {who.ranks[j]} and {who.ranks[i]} stand at the same place along {who.along}, and "
                f"so must get the same rows, but their batches of step {step} {differ}. Name all axes along which rows "
                f"differ in axes=, or give both the same rows"
            )
    return first


def _among_threads(mine: Read, who: Peers) -> Read:
    """What a rank has that is a thread, where the end of one is the end of all; they wait for each other."""
    states = gathered(torch.tensor([mine.state]), who.mesh, None, "the next batch", who.name).flatten().tolist()
    if mine.error is not None:
        return mine
    if State.FAILED in states:
        failed = who.ranks[states.index(State.FAILED)]
        return Read(State.FAILED, error=RuntimeError(f"{who.name}: rank {failed} could not read its batch"))
    if State.END in states:
        return Read(State.END)
    return Read(State.BATCH, mine.batch) if State.BATCH in states else mine


def _say(row: list[int], who: Peers) -> _Said:
    group, rows = cpu_group(who.ranks, "feed"), torch.empty(len(who.places), len(row), dtype=torch.int64)
    own = torch.tensor([row])
    return _Said(group.group_name, process_groups.start_all_gather(rows, own, group), rows, own)


def _ended(mine: Read, said: _Said | None, step: int, who: Peers, seen: _Seen) -> bool:
    """Whether the step has no batch; raises what is wrong on any rank."""
    if said is None:
        if mine.error is not None:
            raise mine.error
        return mine.state in (State.END, State.FILLED)
    with waiting.on("the next batch", said.group, who.name, note=f"It is that of step {step}"):
        said.work.wait()
    numbers, steps, states, shapes, contents, rows = said.rows[:, :6].T.tolist()
    if len({*zip(numbers, steps, strict=True)}) > 1:
        if ASTRAY not in numbers:  # who is ahead has said more than this rank, and waits for an answer
            _astray.append(_say([ASTRAY] * said.rows.shape[1], who))
        raise ValueError(
            f"{who.name}: ranks ask for different batches: those of steps {steps}, in the order of their ranks "
            f"{who.ranks}, by their iterators number {numbers}. All ranks iterate alike, and stop at the same step"
        )
    if State.FAILED in states:
        _raise_failed(mine, states, step, who)
    if State.END in states:
        if not who.unequal and {*states} != {State.END}:
            _raise_short(states, step, who)
        return True
    if {*states} == {State.FILLED}:
        return True
    if len(set(shapes)) > 1:
        _differ(mine, step, who)
    if seen.looking:
        _compare(contents, rows, step, who)
        seen.looking = _undecided(contents, who) and step < LOOKS
    return False


_astray: list[_Said] = []  # what nobody may ever answer


def _raise_failed(mine: Read, states: list[int], step: int, who: Peers) -> None:
    text = ""
    if mine.error is not None:
        text = short("".join(traceback.format_exception(mine.error, limit=-FRAMES)).strip(), TEXT)
    content = text.encode()
    most = int(gathered(torch.tensor([len(content)]), who.mesh, None, "an error's length", who.name).max())
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    texts = gathered(padded, who.mesh, None, "an error's text", who.name)
    if mine.error is not None:
        raise mine.error
    failed = states.index(State.FAILED)
    told = bytes(texts[failed].tolist()).rstrip(b"\0").decode(errors="replace")
    raise RuntimeError(f"{who.name}: rank {who.ranks[failed]} could not read its batch of step {step}:\n{told}")


def _raise_short(states: list[int], step: int, who: Peers) -> None:
    short = [rank for rank, state in zip(who.ranks, states, strict=True) if state == State.END]
    long = [rank for rank in who.ranks if rank not in short]
    raise ValueError(
        f"{who.name}: {_ranks(short)} no batch for step {step}, and {_ranks(long)} one. All ranks need as many "
        f"batches, or some would wait for the others in vain: drop or pad what is left over"
    )


def _ranks(some: list[int]) -> str:
    shown = listed(some, 4)
    return f"rank {shown} has" if len(some) == 1 else f"ranks {shown} have"


def _differ(mine: Read, step: int, who: Peers) -> None:
    copy: Copy = mine.batch
    advice = "On every step all ranks have batches alike"
    if who.lengths is None:
        advice = (
            'On every step all ranks have batches of equal shapes: pad="ranks" fills them up to the longest of all '
            'ranks, pad="own" is for a step that takes what each rank has, with in_specs=...; or drop what is left over'
        )
    agree(_kinds(copy.batch, who), who.mesh, who.name, subject=(f"the batches of step {step}", advice))


def _compare(contents: list[int], rows: list[int], step: int, who: Peers) -> None:
    first = _first_at_places(contents, "differ", step, who)
    if not who.distinct:
        return
    owner: dict[int, int] = {}
    for place, i in first.items():
        j = owner.setdefault(contents[i], i)
        if i != j and rows[i] >= TELLING:
            raise ValueError(
                f"{who.name}: ranks {who.ranks[j]} and {who.ranks[i]} get the same rows, though they stand at places "
                f"{who.places[j]} and {place} along {who.along}: up to step {step} their batches were equal, and "
                f"{rows[i]} different rows were in them. Give a sampler num_replicas={len(first)} and each rank its "
                f"place, as torch's DistributedSampler takes them; or let sf.run.batches cut the rows"
            )


def _undecided(contents: list[int], who: Peers) -> bool:
    """Whether some ranks have had the same rows so far, though too few to say that it is no accident."""
    one_each = dict(zip(who.places, contents, strict=True))
    return who.distinct and len(set(one_each.values())) < len(one_each)
