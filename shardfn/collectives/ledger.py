"""Ledgers: records of the collectives that a piece of code ran, with their bytes, transports and stages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from shardfn.compat import autograd
from shardfn.mesh.axes import mesh_numbered, sizes
from shardfn.mesh.grid import as_names
from shardfn.mesh.scope import axes_here


@dataclass(frozen=True)
class Record:
    """One collective, as this rank took part in it.

    Attributes:
        op: `"all_gather"`, `"reduce_scatter"`, `"all_reduce"`, ...
        axis: names of the axes that it ran along.
        stage: path of the stage that it served; `""` outside of stages.
        dtype: dtype on the wire.
        bytes: bytes that this rank sent, with each piece counted once.
        how: the transport.
        scheduled: whether a stage, a ring or a pipeline issued it ahead of need or waited for it later, so that
            computation may run meanwhile; otherwise it ran at its place in the program.
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
        records: one for each collective.
        gathered: the largest total size in bytes of the buffers into which stages gathered and decoded parameters.
    """

    records: list[Record] = field(default_factory=list)
    gathered: int = 0

    def select(self, **wanted: object) -> list[Record]:
        """Returns the records with these attributes: `log.select(op="all_gather", backward=True)`."""
        return [entry for entry in self.records if all(getattr(entry, key) == value for key, value in wanted.items())]

    def count(self, **wanted: object) -> int:
        """Returns the number of records with these attributes."""
        return len(self.select(**wanted))

    def bytes(self, **wanted: object) -> int:
        """Returns the bytes that this rank sent in records with these attributes."""
        return sum(entry.bytes for entry in self.select(**wanted))

    def __str__(self) -> str:
        kinds: dict[tuple[str, ...], list[int]] = {}
        for entry in self.records:
            timing = ("scheduled" if entry.scheduled else "unscheduled", "backward" if entry.backward else "forward")
            key = (entry.op, " x ".join(entry.axis), str(entry.dtype).removeprefix("torch."), entry.how, *timing)
            kinds.setdefault(key, []).append(entry.bytes)
        head = ("op", "axis", "dtype", "transport", "issued", "pass", "calls", "MB sent")
        rows = [(*key, str(len(sent)), f"{sum(sent) / 1e6:.3f}") for key, sent in kinds.items()]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        return "\n".join(line.rstrip() for line in lines)


class _Attribution(threading.local):
    """The ledgers open on this thread, and the stage and pass to which its collectives are attributed."""

    def __init__(self) -> None:
        self.open: list[Ledger] = []
        self.stage = ""
        self.leaf = ""  # path of the leaf that a collective is working on
        self.backward: bool | None = None
        self.scheduled = False
        self.silent = False


attribution = _Attribution()
open_ledgers: list[list[Ledger]] = []  # the open ledgers of each thread that records


class attributed_to:  # a class, since a generator takes four times as long, and each stage enters ten of these
    """A context in which collectives are recorded as those of a stage.

    Args:
        stage: the stage's path.
        backward: whether they belong to a backward pass; None keeps the outer value.
        scheduled: whether a schedule issues them, rather than the program in its order.
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
    """A context in which collectives are recorded as issued in program order, such as those of a stage's function."""

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before, attribution.scheduled = attribution.scheduled, False

    def __exit__(self, *_: object) -> None:
        attribution.scheduled = self.before


class unrecorded:
    """A context in which collectives are not recorded: those of shardfn's own checks."""

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before, attribution.silent = attribution.silent, True

    def __exit__(self, *_: object) -> None:
        attribution.silent = self.before


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    """Records every collective of the code inside, on this rank.

    Collectives in a graph made by torch.compile are not seen.

    Example:
        ``with ledger() as log: step(params, tokens)``, then ``print(log)`` or ``log.count(op="all_gather")``
    """
    log = Ledger()
    attribution.open.append(log)
    if len(attribution.open) == 1:
        open_ledgers.append(attribution.open)
    try:
        yield log
    finally:
        attribution.open.remove(log)
        if not attribution.open:
            open_ledgers.remove(attribution.open)


def recording() -> bool:
    """Whether any thread has an open ledger."""
    return bool(open_ledgers)


def record_buffers(nbytes: int) -> None:
    """Enters the size in bytes of the buffers for gathered parameters."""
    for log in _listening():
        log.gathered = max(log.gathered, nbytes)


def record_again(log: Ledger) -> None:
    """Enters the collectives of a captured step that was replayed."""
    for other in _listening():
        other.records += log.records
        other.gathered = max(other.gathered, log.gathered)


def _listening() -> list[Ledger]:
    """Returns the ledgers open on this thread; on an autograd thread, those of the one thread that records."""
    if attribution.silent:
        return []
    return attribution.open or (open_ledgers[0] if len(open_ledgers) == 1 and autograd.autograd_thread() else [])


def record(
    op: str,
    group: str,
    dtype: torch.dtype,
    sent: int,
    transport: str,
    axis: tuple[str, ...] | None = None,
    scheduled: bool | None = None,
    backward: bool | None = None,
) -> None:
    """Enters a collective on the group of this name in the ledgers that are open here."""
    logs = _listening()
    if not logs or torch.compiler.is_compiling():
        return
    if axis is None:
        axis = ()
        if (axes := axes_here()) is not None:
            axis = next((as_names(names) for names, bound in list(axes.used.items()) if bound.group == group), ())
            size_of = sizes(mesh_numbered(axes.number))
            axis = tuple(name for name in axis if size_of[name] > 1)  # so that it does not depend on the first user
    if backward is None:
        backward = autograd.inside_backward() if attribution.backward is None else attribution.backward
    issued_early = attribution.scheduled if scheduled is None else scheduled
    entry = Record(op, axis, attribution.stage, dtype, sent, transport, issued_early, backward)
    for log in logs:
        log.records.append(entry)
