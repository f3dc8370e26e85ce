"""The figures of a deep model's plan, from plans of shallow ones that differ in two layers.

All blocks of a model are identical, so from some depth on every two further blocks add the same amount. The memory in
use at a moment is linear in the number of blocks, and linear in the index of the block that runs; over the inner blocks
it is largest at the first or the last. So the peak of the deep model is the largest of the extrapolated values near the
ends.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from shardfn.plan.machines import Chip, Links
from shardfn.plan.plan import StepPlan
from shardfn.plan.timeline import Timeline
from shardfn.shapes.settings import Setting, plan_shape
from shardfn.shapes.sizes import Shape

PERIOD = 2  # blocks after which all is as before: those of a ring take turns with its two buffers


@dataclass(frozen=True)
class PlanFigures:
    """The main figures of a plan.

    Attributes:
        peak: bytes on the device at the peak, by kind.
        host: the most bytes on the host.
        seconds: of a step.
        exposed: seconds in which only collectives run.
        utilization: MFU.
        sent: bytes that a rank sends.
    """

    peak: dict[str, int]
    host: int
    seconds: float
    exposed: float
    utilization: float
    sent: int

    @property
    def needed(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())


def figures(plan: StepPlan, timeline: Timeline) -> PlanFigures:
    """Returns the figures of a plan."""
    return PlanFigures(
        peak={kind: count for kind, count in plan.peak.kinds.items() if count},
        host=sum(plan.host.values()),
        seconds=timeline.seconds,
        exposed=timeline.exposed,
        utilization=timeline.utilization,
        sent=sum(work.sent for work in plan.works if work.ranks > 1),
    )


def extrapolated(shape: Shape, setting: Setting, links: Links | str, chip: Chip | str) -> PlanFigures:
    """Returns the figures of a model's plan without planning all of its blocks.

    Bytes are those of the whole plan; seconds too, as far as each block takes as long as the one before it.

    Raises:
        ValueError, RuntimeError: as `planned` and `StepPlan.timed`.
    """
    # How many blocks at each end need not be like those between: gathers run ahead, and gradients are reduced later;
    # what leaves the device is there until copies have ended, some operations later.
    near = 4 if setting.tiers or setting.remat == "offload" else 2
    low = 2 * near + shape.layers % PERIOD
    if shape.layers <= low + PERIOD:
        plan = plan_shape(shape, setting)
        return figures(plan, plan.timed(links, chip))
    fixed = tuple((name, tuple(x.items()) if isinstance(x, dict) else x) for name, x in vars(setting).items())
    plans = [_shallow(replace(shape, layers=layers), fixed) for layers in (low, low + PERIOD)]
    less, more = (figures(plan, plan.timed(links, chip)) for plan in plans)
    times = (shape.layers - low) // PERIOD

    def further(low: float, high: float) -> float:
        return low + times * (high - low)

    peaks = [_peaks(plan, near) for plan in plans]
    candidates = [
        {kind: round(further(peaks[0][at][kind], peaks[1][at][kind])) for kind in peaks[0][at] | peaks[1][at]}
        for at in peaks[0]  # in the order of the step, so that of equal peaks the first is told, as by a plan
        if at in peaks[1]
    ]
    peak = max(candidates, key=lambda kinds: sum(kinds.values()))
    seconds = further(less.seconds, more.seconds)
    used = further(less.utilization * less.seconds, more.utilization * more.seconds)
    return PlanFigures(
        peak={kind: count for kind, count in peak.items() if count},
        host=round(further(less.host, more.host)),
        seconds=seconds,
        exposed=max(0.0, further(less.exposed, more.exposed)),
        utilization=used / seconds,
        sent=round(further(less.sent, more.sent)),
    )


@functools.lru_cache(64)
def _shallow(shape: Shape, setting: tuple[tuple[str, Any], ...]) -> StepPlan:
    """The plan for a setting's items, of which those that are dicts are tuples of items, so that it is a key."""
    facts: dict[str, Any] = {name: dict(x) if isinstance(x, tuple) else x for name, x in setting}
    return plan_shape(shape, Setting(**facts))


def _peaks(plan: StepPlan, near: int) -> dict[tuple[object, ...], Counter[str]]:
    """Returns the largest of what is held, by place: the phase, and the stage by its distance from an end."""
    numbers = [int(match[1]) for work in plan.works if (match := re.search(r"blocks\.(\d+)", work.stage))]
    depth, found = max(numbers) + 1, dict[tuple[object, ...], Counter[str]]()
    for entry in plan.held:
        work = plan.works[entry.at]
        match = re.search(r"blocks\.(\d+)", work.stage)
        stage: object = work.stage
        if match:
            k = int(match[1])
            stage = ("blocks", k if k < near else k - depth)
            if near <= k < depth - near:
                continue
        place = (work.kind, work.phase, stage)
        if place not in found or entry.total > found[place].total():
            found[place] = Counter(entry.kinds)
    return found
