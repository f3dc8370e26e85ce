"""The plan of a step: what it computes, sends and holds, on one rank, before it is run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from shardfn.collectives.ledger import Ledger
from shardfn.local_paths import local_path
from shardfn.plan import fits, pictures, table, timeline
from shardfn.plan.drawing import Drawing, Times, drawing
from shardfn.plan.fits import RESERVE, Fit
from shardfn.plan.machines import Chip, Links
from shardfn.plan.printed import Line, Printed, need_matplotlib, save_figure
from shardfn.plan.schedule import Allocation, Held, Work
from shardfn.plan.timeline import Timeline
from shardfn.quoting import listed, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1  # of the files
PHASES = ("forward", "backward", "recompute", "update")
_BACKWARD = ("backward", "recompute")


@dataclass(frozen=True, repr=False)
class StepPlan(Printed):
    """The works and memory of one rank in a step.

    Attributes:
        name: of the step's function.
        mesh: the sizes of the mesh's axes, by name, in order.
        rank: whose plan it is.
        works: in the order in which the host issues them.
        held: the course of the memory on the device: an entry for each work during which it changed.
        host: the most bytes held on the host, pinned or not, by kind.
        disk: the most bytes in files, by kind, in whole blocks of 4096.
        peak: the largest entry of `held`.
        allocations: what is held at the peak, largest first.
        parameters: number of elements of all parameters on all ranks.
        assumed: where the step reads numbers on the host, which the plan takes for 1, and masks for true: a step that
            decides by them is planned for that case. Also what else depends on numbers, such as the loads of experts.
        allocator: the most bytes on the device as CUDA's caching allocator counts them: each tensor has whole 512.
    """

    name: str
    mesh: dict[str, int]
    rank: int
    works: tuple[Work, ...]
    held: tuple[Held, ...]
    host: dict[str, int]
    disk: dict[str, int]
    peak: Held
    allocations: tuple[Allocation, ...]
    parameters: int
    allocator: int = 0
    assumed: tuple[str, ...] = ()

    def timed(
        self, links: Links | str, chip: Chip | str, per_node: int | None = None, tokens: float | None = None
    ) -> Timeline:
        """Computes when each work begins and ends: see `shardfn.plan.timeline.timed`."""
        return timeline.timed(self, links, chip, per_node, tokens)

    def fits(self, memory: str | int, reserve: str | int = RESERVE) -> Fit:
        """Compares the peak with a device's memory, `"80GiB"` say: see `shardfn.plan.fits.fits`."""
        return fits.fits(self, memory, reserve)

    @property
    def collectives(self) -> list[Work]:
        """The collectives, in the order in which they are launched."""
        return [work for work in self.works if work.collective]

    def select(self, **attributes: object) -> list[Work]:
        """Returns the works with these attributes: `plan.select(kind="all_gather", phase="backward")`.

        Raises:
            TypeError: works have no such attribute.
            ValueError: there is no such pass; or the mesh has no such axis.
        """
        names = [field.name for field in fields(Work)]
        for name in attributes:
            if name not in names:
                raise TypeError(f"works of a plan have no attribute {short(repr(name))}; they have {listed(names, 20)}")
        if attributes.get("phase", PHASES[0]) not in PHASES:
            raise ValueError(f"phase={short(repr(attributes['phase']))}; a plan has {listed(PHASES)}")
        axis: Any = attributes.get("axis", ())
        axis = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in axis:
            if name not in self.mesh:
                raise ValueError(f"axis {short(repr(name))}: the plan's mesh has {listed(self.mesh) or 'none'}")
        attributes |= {"axis": axis} if "axis" in attributes else {}
        return [work for work in self.works if all(getattr(work, key) == value for key, value in attributes.items())]

    def count(self, **attributes: object) -> int:
        """Returns the number of works with these attributes."""
        return len(self.select(**attributes))

    def sent(self, **attributes: object) -> int:
        """Returns the bytes that this rank sends in collectives with these attributes."""
        return sum(work.sent for work in self.select(**attributes) if work.collective)

    def flops(self, **attributes: object) -> int:
        """Returns the floating-point operations of works with these attributes."""
        return sum(sum(work.flops.values()) for work in self.select(**attributes))

    def __sub__(self, other: StepPlan) -> Difference:
        """Returns the difference from another plan."""
        if not isinstance(other, StepPlan):
            return NotImplemented
        return Difference(
            self.name if self.name == other.name else f"{self.name} - {other.name}",
            _less(self.peak.kinds, other.peak.kinds),
            self.peak.total - other.peak.total,
            _less(self.host, other.host),
            _less(self.disk, other.disk),
            _less(_by_kind(self.works, "launches"), _by_kind(other.works, "launches")),
            _less(_by_kind(self.collectives, ""), _by_kind(other.collectives, "")),
            _less(_by_kind(self.collectives, "sent"), _by_kind(other.collectives, "sent")),
            self.flops() - other.flops(),
        )

    def check(self, log: Ledger) -> None:
        """Compares the plan with the ledger of a step that was run: the same collectives, with the same bytes.

        Their order is not compared: ranks on CPUs launch what a former one brings when it has come.

        Args:
            log: of one step, not the first, on a rank at the same place: `with ledger() as log: step(...)`.

        Raises:
            TypeError: the log is none.
            AssertionError: they differ; the message names the first collective that only one of them has.

        Example:
            ``plan.check(log)``
        """
        if not isinstance(log, Ledger):
            raise TypeError(f"check: the log is of type {type(log).__name__}, not a Ledger: `with ledger() as log:`")
        planned: list[_Known] = [
            (work.kind, work.axis, work.stage, work.dtype, work.sent, work.scheduled, work.phase in _BACKWARD)
            for work in self.collectives
        ]
        ran: list[_Known] = [
            (x.op, x.axis, x.stage, str(x.dtype).removeprefix("torch."), x.bytes, x.scheduled, x.backward)
            for x in log.records
        ]
        missing, more = Counter(planned) - Counter(ran), Counter(ran) - Counter(planned)
        if not missing and not more:
            return
        first = next((f"planned, but not run: {_describe_collective(x)}" for x in planned if x in missing), "")
        second = next((f"run, but not planned: {_describe_collective(x)}" for x in ran if x in more), "")
        raise AssertionError(
            f"plan of {self.name}, rank {self.rank}: {len(planned)} collectives and {sum(e[4] for e in planned)} bytes "
            f"are planned, and {len(ran)} and {sum(e[4] for e in ran)} were run; "
            f"{'; '.join(filter(None, (first, second)))}. Compare a step after the first, on the same shapes and mesh"
        )

    # --- what it shows of itself ---

    @property
    def title(self) -> str:
        """Label in plots."""
        return self.name.rpartition("<locals>.")[2]

    def _lines(self, width: int) -> Iterator[Line]:
        return table.lines(self, width)

    def table(self, width: int | None = None) -> str:
        """Returns the table: memory at the peak, the largest allocations, what is sent, and what each stage does.

        Stages that do the same are one row, and long lists end with how much more there is, so a table has at most
        about 60 lines.

        Args:
            width: the most columns of a line. Default: the terminal's width.
        """
        return self.text(width)

    def drawing(self, times: Times | None = None) -> Drawing:
        """Returns the time and lane of each work; a profile has its own times."""
        return drawing(self.works, self.held, self if times is None and isinstance(self, Times) else times)

    def figure(self, times: Times | None = None, beside: StepPlan | None = None) -> Figure:
        """Returns the picture, which notebooks can show, too: the lanes, and the memory beneath.

        Args:
            times: when each work begins and ends, in seconds, such as `plan.timed(...)` returns. Default: the order
                in which works are issued.
            beside: another plan or a profile, shown beneath on the same axis.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
            ValueError: the times are those of another plan.
        """
        need_matplotlib("plan")
        return pictures.draw_plans(self._shown(times, beside))

    def _shown(self, times: Times | None, other: StepPlan | None) -> list[tuple[StepPlan, Times | None]]:
        if other is not None and not isinstance(other, StepPlan):
            raise TypeError(f"plan: beside must be another plan, or a profile, got {type(other).__name__}")
        return [(self, times), *([(other, None)] if other is not None else [])]

    def save_picture(
        self, path: str | os.PathLike[str], times: Times | None = None, beside: StepPlan | None = None
    ) -> None:
        """Writes the picture, in the format given by the file name's suffix: `.svg`, `.png`, `.pdf`.

        Args:
            path: of the file.
            times: as for `figure`.
            beside: as for `figure`.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
            ValueError: no picture format has this suffix, or the times are those of another plan.
        """
        save_figure("plan", self.figure(times, beside), path)

    def trace(self, path: str | os.PathLike[str], times: Times | None = None) -> None:
        """Writes a trace in Chrome's format, which chrome://tracing and Perfetto open.

        Streams are threads, and memory is a counter by kind. Without times, a work takes one microsecond.

        Args:
            path: of the file, such as `"step.json"`.
            times: as for `figure`.

        Raises:
            ValueError: the times are those of another plan.
        """
        pictures.write_trace(path, self, times)

    # --- files ---

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, which `load` reads."""
        local_path(path, "StepPlan.save: path").write_text(json.dumps({"version": VERSION, **asdict(self)}) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepPlan:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file is no plan, or one of another version, or has unknown or missing fields.
            OSError: it cannot be read.
        """
        where = f"the plan {os.fspath(path)!r}"
        try:
            content = json.loads(local_path(path, "StepPlan.load: path").read_text())
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        version = content.pop("version", None) if isinstance(content, dict) else None
        if version is None:
            raise ValueError(f"{where} holds no plan: Plan.save writes them")
        if version != VERSION:
            raise ValueError(f"{where} has version {version!r}, and this shardfn reads {VERSION}: plan the step again")
        try:
            return cls(**_read_plan(_checked_fields(cls, content, where), where))
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{where} is damaged: {error}; save it again") from error


@dataclass(frozen=True)
class Difference:
    """The difference between two plans; negative where the first takes less.

    Attributes:
        name: of the step.
        kinds: bytes at the peak, by kind.
        peak: bytes at the peak, all together.
        host: bytes on the host, by kind.
        disk: bytes on disk, by kind.
        launches: operations on the device, by kind of work.
        collectives: numbers of collectives, by kind.
        sent: bytes sent, by kind of collective.
        flops: floating-point operations.
    """

    name: str
    kinds: dict[str, int]
    peak: int
    host: dict[str, int]
    disk: dict[str, int]
    launches: dict[str, int]
    collectives: dict[str, int]
    sent: dict[str, int]
    flops: int

    def __str__(self) -> str:
        rows = [("peak, bytes", "all", self.peak), ("floating-point operations", "all", self.flops)]
        for label, parts in (
            ("peak, bytes", self.kinds),
            ("host, bytes", self.host),
            ("disk, bytes", self.disk),
            ("launches", self.launches),
            ("collectives", self.collectives),
            ("sent, bytes", self.sent),
        ):
            rows += [(label, kind, n) for kind, n in parts.items()]
        changed = [(label, kind, f"{n:+,}") for label, kind, n in rows if n]
        if not changed:
            return f"{self.name}: no difference"
        widths = [max(len(row[i]) for row in changed) for i in range(3)]
        lines = (f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in changed)
        return "\n".join([self.name, *lines])


def _read_plan(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of a plan, decoded from a file."""
    works = [
        Work(**_checked_fields(Work, work, where) | {key: tuple(work[key]) for key in ("after", "axis")})
        for work in values["works"]
    ]
    allocations = [Allocation(**_checked_fields(Allocation, entry, where)) for entry in values["allocations"]]
    usage = [Held(**_checked_fields(Held, entry, where)) for entry in values["held"]]
    peak = Held(**_checked_fields(Held, values["peak"], where))
    numbers = [values["mesh"], values["host"], values["disk"], *(entry.kinds for entry in (*usage, peak))]
    if not all(isinstance(number, int) for group in numbers for number in group.values()):
        raise TypeError("sizes are numbers")
    more = {"works": works, "held": usage, "allocations": allocations, "assumed": values["assumed"]}
    return values | {key: tuple(value) for key, value in more.items()} | {"peak": peak}


_Known = tuple[str, tuple[str, ...], str, str, int, bool, bool]
"""The facts about a collective that a plan and a ledger share."""


def _describe_collective(entry: _Known) -> str:
    kind, axis, stage, dtype, sent, scheduled, backward = entry
    when = f"{'scheduled' if scheduled else 'unscheduled'} in {'backward' if backward else 'forward'}"
    return f"{kind} of {sent} bytes of {dtype} over {' x '.join(axis) or 'ranks'} for stage {stage!r}, {when}"


def _less(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: a.get(key, 0) - b.get(key, 0) for key in dict.fromkeys([*a, *b])}


def _by_kind(works: Iterable[Work], attribute: str) -> dict[str, int]:
    """Returns the sum of an attribute, or the number of works, by kind."""
    sums = Counter[str]()
    for work in works:
        sums[work.kind] += getattr(work, attribute) if attribute else 1
    return dict(sums)


def _checked_fields(kind: type, content: Any, where: str) -> dict[str, Any]:
    """Returns the fields of a value in a file, after checking that none is missing or unknown."""
    names = {field.name for field in fields(kind)}
    if not isinstance(content, dict) or content.keys() != names:
        differs = sorted(names ^ content.keys()) if isinstance(content, dict) else [str(content)[:40]]
        raise ValueError(f"{where}: {kind.__name__} has the fields {sorted(names)}; it differs in {differs[:4]}")
    return dict(content)
