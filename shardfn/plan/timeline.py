"""Predicted times of a plan's works, on links and a chip of given speeds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from shardfn.plan import presets
from shardfn.plan.drawing import duration
from shardfn.plan.machines import Chip, Links, nodes_of
from shardfn.plan.schedule import Work
from shardfn.quoting import short
from shardfn.tracebacks import api_boundary

if TYPE_CHECKING:
    from shardfn.plan.plan import StepPlan

COMPUTE, COPY = "compute", "copy"


@dataclass(frozen=True)
class Spent:
    """Seconds of one stage.

    Attributes:
        computing: while its operations run.
        communicating: while its collectives run, alone or not.
        exposed: while its collectives run and nothing is computed.
    """

    computing: float = 0.0
    communicating: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The times of a plan's works on one rank. It takes the other ranks to be as far as this one.

    Attributes:
        links: name of the links.
        chip: name of the chip.
        begins: seconds from the start of the step at which each work begins, by its position in the plan.
        ends: and at which it ends.
        seconds: of the whole step.
        computing: seconds in which something is computed.
        communicating: seconds in which a collective runs.
        exposed: seconds in which a collective runs and nothing is computed.
        copying: seconds in which only copies between host and device run.
        waiting: seconds in which nothing runs on the device, as the host is late.
        stages: the same by stage.
        utilization: MFU: the arithmetic of forward, backward and update, without what is computed again, over what the
            chip could do at its peak in the same time.
        tokens: tokens a second on this rank; None if their number was not given.
    """

    links: str
    chip: str
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    seconds: float
    computing: float
    communicating: float
    exposed: float
    copying: float
    waiting: float
    stages: dict[str, Spent]
    utilization: float
    tokens: float | None = None

    def __str__(self) -> str:
        parts = {"computing": self.computing, "exposed": self.exposed, "copying": self.copying, "waiting": self.waiting}
        shares = ", ".join(f"{name} {100 * part / self.seconds:.1f} %" for name, part in parts.items() if part)
        speed = "" if self.tokens is None else f", {self.tokens:,.0f} tokens/s a rank"
        head = f"{duration(self.seconds)} a step on {self.chip}, {self.links}: {shares or 'nothing'}"
        return f"{head}; MFU {100 * self.utilization:.1f} %{speed}"


@api_boundary
def timed(
    plan: StepPlan, links: Links | str, chip: Chip | str, per_node: int | None = None, tokens: float | None = None
) -> Timeline:
    """Computes when each work of a plan begins and ends.

    Works of a stream run one after another. A work begins when its stream is free, those that it comes after have
    ended, and the host has issued it. Collectives that use a network at the same time have equal parts of its
    bandwidth, and so have those within a node, and copies: each of `n` takes `n` times as long meanwhile.

    Args:
        plan: the plan of a rank.
        links: times of collectives, or the name of a common machine, `"h100"` say.
        chip: times of computing, or the name of a common GPU.
        per_node: ranks on a node, which are numbered one after another. Default: as in the plan.
        tokens: that a rank processes in a step.

    Raises:
        TypeError: the links or the chip are something else.
        ValueError: the links or the chip lack a figure; works wait for each other in a circle; `per_node` or `tokens`
            is not positive.
    """
    links = presets.links(links) if isinstance(links, str) else links
    chip = presets.chip(chip) if isinstance(chip, str) else chip
    for name, value, kind in (("links", links, Links), ("chip", chip, Chip)):
        if not isinstance(value, kind):
            raise TypeError(f"timed: {name} must be {kind.__name__}, or a name, got {type(value).__name__}")
    for name, number in (("per_node", per_node), ("tokens", tokens)):
        if number is not None and (not isinstance(number, (int, float)) or number <= 0):
            raise ValueError(f"timed: {name} must be a positive number, got {short(repr(number))}")
    jobs_by_key: dict[tuple[object, ...], _Job] = {}  # most works are like others
    jobs = []
    for work in plan.works:
        key = work.kind, work.sent, work.ranks, work.nodes, work.axis, work.moved, work.launches, *work.flops.items()
        if key not in jobs_by_key:
            jobs_by_key[key] = _job(plan, work, links, chip, per_node)
        jobs.append(jobs_by_key[key])
    begins, ends = _schedule_works(plan.works, jobs, chip.host)
    spent = _spent(plan.works, begins, ends)
    total = max(ends, default=0.0)
    useful = [work for work in plan.works if work.phase != "recompute"]
    peak = sum(count / chip.rate(dtype) for work in useful for dtype, count in work.flops.items() if count)
    return Timeline(
        links=links.name,
        chip=chip.name,
        begins=tuple(begins),
        ends=tuple(ends),
        seconds=total,
        computing=spent[COMPUTE, None],
        communicating=spent["communicating", None],
        exposed=spent["exposed", None],
        copying=spent[COPY, None],
        waiting=spent["waiting", None],
        stages={
            name: Spent(*(spent[state, name] for state in (COMPUTE, "communicating", "exposed")))
            for name in dict.fromkeys(work.stage for work in plan.works)
        },
        utilization=peak / total if total else 0.0,
        tokens=tokens / total if tokens is not None and total else None,
    )


_Job = tuple[float, str]
"""A work's seconds if it is alone, and the link that it needs."""


def _job(plan: StepPlan, work: Work, links: Links, chip: Chip, per_node: int | None) -> _Job:
    if work.kind == COMPUTE:
        return chip.seconds(work), ""
    if work.kind == COPY:
        return links.seconds(COPY, work.sent, 1), "host"
    nodes = work.nodes
    if per_node is not None and work.axis and all(name in plan.mesh for name in work.axis):
        nodes = nodes_of(plan.mesh, plan.rank, work.axis, per_node)
    return links.seconds(work.kind, work.sent, work.ranks, nodes), "network" if nodes > 1 else "node"


def _schedule_works(works: tuple[Work, ...], jobs: list[_Job], host: float) -> tuple[list[float], list[float]]:
    """Returns the start and end times of works."""
    streams: dict[int, deque[int]] = {}
    issued, issue_time = [], 0.0
    for i, work in enumerate(works):
        streams.setdefault(work.stream, deque()).append(i)
        issue_time += work.launches * host
        issued.append(issue_time)
    begins, ends = [math.nan] * len(works), [math.nan] * len(works)
    left: dict[int, float] = {}  # seconds of running works, if alone
    time = 0.0
    while any(streams.values()):
        heads = [queue[0] for queue in streams.values() if queue and queue[0] not in left]
        ready = [i for i in heads if all(not math.isnan(ends[j]) for j in works[i].after)]
        for i in ready:
            if issued[i] <= time:
                begins[i], left[i] = time, jobs[i][0]
        later = [issued[i] - time for i in ready if issued[i] > time]
        if not left and not later:
            raise ValueError(f"timed: works {sorted(heads)[:4]} of the plan wait for each other, or for none before")
        links = {i: jobs[i][1] for i in left}
        busy = Counter(links.values())
        pace = {i: float(busy[link]) if link else 1.0 for i, link in links.items()}
        step = min([left[i] * pace[i] for i in left] + later)
        time += step
        for i in list(left):
            left[i] -= step / pace[i]
            if left[i] <= 1e-12:
                ends[i] = time
                del left[i]
                streams[works[i].stream].popleft()
    return begins, ends


def _spent(works: tuple[Work, ...], begins: list[float], ends: list[float]) -> dict[tuple[str, str | None], float]:
    """Returns seconds by activity and by stage (None: all): computing hides collectives, and these hide copies."""
    spent: defaultdict[tuple[str, str | None], float] = defaultdict(float)
    starting: defaultdict[float, list[int]] = defaultdict(list)
    ending: defaultdict[float, list[int]] = defaultdict(list)
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if end > begin:
            starting[begin].append(i)
            ending[end].append(i)
    running: set[int] = set()
    for start, stop in pairwise(sorted({*begins, *ends, 0.0})):
        running.difference_update(ending[start])
        running.update(starting[start])
        span = stop - start
        kinds = {i: "exposed" if works[i].collective else works[i].kind for i in running}
        stages = {works[i].stage for i in running if works[i].collective}
        for stage in (*stages, None) if stages else ():
            spent["communicating", stage] += span
        state = next((kind for kind in (COMPUTE, "exposed", COPY) if kind in kinds.values()), "waiting")
        spent[state, None] += span
        first = min((i for i in running if kinds[i] == state), default=None, key=lambda i: (begins[i], i))
        if first is not None:
            spent[state, works[first].stage] += span
    return spent
