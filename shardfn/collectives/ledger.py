"""The record of what moved: every collective of a piece of code, with its bytes and where it came from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from shardfn.compat import autograd
from shardfn.mesh.axes import known_axes, sizes
from shardfn.mesh.grid import as_names
from shardfn.mesh.scope import current_mesh


@dataclass(frozen=True)
class Record:
    """One collective, as this rank took part in it.

    Attributes:
        op: `"all_gather"`, `"reduce_scatter"`, `"all_reduce"`, ...
        axis: the names of the axes that it ran along.
        stage: path of the stage that it served, `""` outside of stages.
        dtype: on the wire.
        bytes: that this rank sent, where each piece travels once.
        how: the transport.
        scheduled: issued ahead of need or waited for behind it, by a stage, a ring or a pipeline, so that compute may
            run meanwhile; otherwise at its place in the program.
        backward: whether it belongs to a backward pass.
    """

    op: str
    axis: tuple[str, ...]
    stage: str
    dtype: torch.dtype
    bytes: int
    how: str
    scheduled: bool
    backward: bool


@dataclass
class Ledger:
    """The collectives of the code under `with ledger() as log:`, in the order in which they were issued.

    Attributes:
        records: one for each.
        gathered: the most bytes of the buffers into which stages gathered parameters, when one of them was filled.
    """

    records: list[Record] = field(default_factory=list)
    gathered: int = 0

    def select(self, **wanted: object) -> list[Record]:
        """The records whose attributes are as given: `log.select(op="all_gather", backward=True)`."""
        return [one for one in self.records if all(getattr(one, key) == value for key, value in wanted.items())]

    def count(self, **wanted: object) -> int:
        """How many records have such attributes."""
        return len(self.select(**wanted))

    def bytes(self, **wanted: object) -> int:
        """What this rank sent in records with such attributes."""
        return sum(one.bytes for one in self.select(**wanted))

    def __str__(self) -> str:
        kinds: dict[tuple[str, ...], list[int]] = {}
        for one in self.records:
            way = ("scheduled" if one.scheduled else "unscheduled", "backward" if one.backward else "forward")
            key = (one.op, " x ".join(one.axis), str(one.dtype).removeprefix("torch."), one.how, *way)
            kinds.setdefault(key, []).append(one.bytes)
        head = ("op", "axis", "dtype", "transport", "issued", "pass", "calls", "MB sent")
        rows = [(*key, str(len(sent)), f"{sum(sent) / 1e6:.3f}") for key, sent in kinds.items()]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        return "\n".join(line.rstrip() for line in lines)


class _Attribution(threading.local):
    """What is recorded on this thread, and on whose behalf."""

    def __init__(self) -> None:
        self.open: list[Ledger] = []
        self.stage = ""
        self.leaf = ""  # of the tree that a collective was given
        self.backward: bool | None = None
        self.scheduled = False
        self.silent = False


attribution = _Attribution()
_open: list[list[Ledger]] = []  # of every thread that records


class attributed_to:  # a class, since a generator takes four times as long, ten times a stage
    """A context: what moves inside is recorded as this stage's.

    Args:
        stage: its path.
        backward: whether it belongs to a backward pass; None for what it is outside.
        scheduled: whether a schedule issues it, and not the program at its place.
    """

    __slots__ = ("backward", "before", "scheduled", "stage")

    def __init__(self, stage: str, backward: bool | None = None, scheduled: bool = True) -> None:
        self.stage, self.backward, self.scheduled = stage, backward, scheduled

    def __enter__(self) -> None:
        self.before = attribution.stage, attribution.backward, attribution.scheduled
        attribution.stage, attribution.scheduled = self.stage, self.scheduled
        if self.backward is not None:
            attribution.backward = self.backward

    def __exit__(self, *_: object) -> None:
        attribution.stage, attribution.backward, attribution.scheduled = self.before


class unscheduled:
    """A context: what moves inside is recorded as issued at its place in the program, by a stage's function say."""

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before, attribution.scheduled = attribution.scheduled, False

    def __exit__(self, *_: object) -> None:
        attribution.scheduled = self.before


class unrecorded:
    """A context: what moves inside is recorded nowhere, since it is no part of the program."""

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before, attribution.silent = attribution.silent, True

    def __exit__(self, *_: object) -> None:
        attribution.silent = self.before


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    """Records every collective of the code inside, on this rank.

    What runs in a graph that torch.compile made is not seen.

    Example:
        ``with ledger() as log: step(params, tokens)``, then ``print(log)`` or ``log.count(op="all_gather")``
    """
    made = Ledger()
    attribution.open.append(made)
    if len(attribution.open) == 1:
        _open.append(attribution.open)
    try:
        yield made
    finally:
        attribution.open.remove(made)
        if not attribution.open:
            _open.remove(attribution.open)


def recording() -> bool:
    """Whether anybody records; false costs a look at one list."""
    return bool(_open)


def record_buffers(nbytes: int) -> None:
    """Enters the size of the buffers for gathered parameters."""
    for each in _heard():
        each.gathered = max(each.gathered, nbytes)


def _heard() -> list[Ledger]:
    """The ledgers that are open on this thread, or where autograd runs one for another, on that."""
    if attribution.silent:
        return []
    return attribution.open or (_open[0] if len(_open) == 1 and autograd.autograd_thread() else [])


def record(
    op: str,
    group: str,
    dtype: torch.dtype,
    sent: int,
    how: str,
    axis: tuple[str, ...] | None = None,
    scheduled: bool | None = None,
    backward: bool | None = None,
) -> None:
    """Enters a collective, on the group of this name, in the ledgers that are open here."""
    open_here = _heard()
    if not open_here or torch.compiler.is_compiling():
        return
    if axis is None:
        mesh = current_mesh()
        used = known_axes(mesh).used if mesh is not None else {}
        axis = next((as_names(names) for names, known in used.items() if known.group == group), ())
        if mesh is not None:  # the same name, whoever used the group first
            axis = tuple(name for name in axis if sizes(mesh)[name] > 1)
    if backward is None:
        backward = autograd.inside_backward() if attribution.backward is None else attribution.backward
    ahead = attribution.scheduled if scheduled is None else scheduled
    one = Record(op, axis, attribution.stage, dtype, sent, how, ahead, backward)
    for each in open_here:
        each.records.append(one)
