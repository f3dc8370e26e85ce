"""Whether a plan fits into a device's memory, why not, and what would make it fit."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfn.quoting import byte_count, short
from shardfn.tracebacks import api_boundary

if TYPE_CHECKING:
    from shardfn.plan.plan import StepPlan

RESERVE = "2GiB"
"""Bytes of a device that no tensor gets: its context, and the buffers of communicators. An assumption."""
_UNITS = {"b": 1} | {
    f"{prefix}{infix}b": base**power
    for power, prefix in enumerate("kmgt", 1)
    for infix, base in (("", 1000), ("i", 1024))
}


@dataclass(frozen=True)
class Change:
    """A change to the step or its strategy.

    Attributes:
        what: it is.
        saves: bytes at the peak that it makes unnecessary, about. Plan the changed step to know them exactly.
        enough: whether the plan would then fit.
    """

    what: str
    saves: int
    enough: bool


@dataclass(frozen=True)
class Fit:
    """Whether a plan fits; true if it does.

    Attributes:
        memory: bytes of the device.
        reserve: of these, bytes that are left for other things.
        needed: bytes at the peak.
        spare: bytes left over; negative: missing.
        largest: kinds of what is held at the peak, with bytes, largest first.
        where: the line at which most of the largest kind was made.
        changes: what would help: first those that are enough, and of these those that save least.
    """

    memory: int
    reserve: int
    needed: int
    spare: int
    largest: tuple[tuple[str, int], ...]
    where: str
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return self.spare >= 0

    @property
    def reason(self) -> str:
        """A sentence that says by how much it fits or not, what is largest, and the nearest change that fits."""
        needs, reserve, memory = byte_count(self.needed), byte_count(self.reserve), memory_told(self.memory)
        if self.reserve > self.memory:
            return (
                f"it does not fit: {reserve} of the device are to be left free, and it has {memory}: pass a smaller "
                f"reserve; the plan needs {needs}"
            )
        usage = f"it needs {needs} of {memory}, of which {reserve} are left free"
        if self:
            return f"it fits: {usage}; {byte_count(self.spare)} are spare"
        kinds = ", ".join(f"{kind} {byte_count(count)}" for kind, count in self.largest[:3])
        advice = next((f"; nearest: {x.what} (saves about {byte_count(x.saves)})" for x in self.changes), "")
        if self.changes and not self.changes[0].enough:
            first = self.changes[0]
            advice = f"; no one change is enough; most saves: {first.what} ({byte_count(first.saves)})"
        location = f" (at {self.where})" if self.where else ""
        return f"it does not fit: {usage}; {byte_count(-self.spare)} are missing. Largest are {kinds}{location}{advice}"

    def __str__(self) -> str:
        return self.reason


@api_boundary
def fits(plan: StepPlan, memory: str | int, reserve: str | int = RESERVE) -> Fit:
    """Compares a plan's peak with a device's memory.

    Args:
        plan: the plan of a rank.
        memory: of the device: bytes, or a text such as `"80GiB"` or `"80 GB"`.
        reserve: what is left for other things than tensors, in the same way. Default: 2 GiB, an assumption.

    Returns:
        A value that is true if the plan fits, and says why not.

    Raises:
        ValueError: a text is no size, or a number is negative.

    Example:
        >>> size_of("80GiB") == 80 * 2**30
        True
    """
    total, reserved = size_of(memory), size_of(reserve)
    spare = total - reserved - plan.peak.total
    largest = tuple(sorted(((k, n) for k, n in plan.peak.kinds.items() if n), key=lambda pair: -pair[1]))
    first = next((x for x in plan.allocations if largest and x.kind == largest[0][0]), None)
    changes = () if spare >= 0 else _changes(plan, -spare)
    return Fit(total, reserved, plan.peak.total, spare, largest, first.where if first else "", changes)


def _changes(plan: StepPlan, missing: int) -> tuple[Change, ...]:
    """Returns changes that would save memory, the nearest first."""
    kinds = plan.peak.kinds
    persistent = sum(kinds.get(kind, 0) for kind in ("parameters", "optimizer", "gradients"))
    recomputes = any(work.phase == "recompute" for work in plan.works)
    savings = {
        'keep the optimizer\'s state on the host, strategy.with_tiers(state="host")': kinds.get("optimizer", 0),
        "compute activations again in backward, stage(remat=True)": 0 if recomputes else kinds.get("activations", 0),
        (
            'keep parameters, gradients and state on the host, .with_tiers(params="host", grads="host", state="host")'
        ): persistent,
    }
    sent = Counter[str]()  # along each axis, in gathers
    for work in plan.works:
        if work.kind == "all_gather" and work.axis:
            sent[work.axis[-1]] += work.sent
    if sent:
        savings[f"twice as many ranks along {max(sent, key=lambda name: sent[name])!r}"] = persistent // 2
    working = kinds.get("activations", 0) + kinds.get("transients", 0)
    times = 2 ** max(1, math.ceil(math.log2(working / (working - missing)))) if working > missing else 2
    micro = f"micro-batches {times} times as small, accumulate(micro={times}), if there are as many rows"
    savings[micro] = working - working // times
    changes = [Change(description, saves, saves >= missing) for description, saves in savings.items() if saves]
    return tuple(sorted(changes, key=lambda x: (not x.enough, x.saves if x.enough else -x.saves)))


def memory_told(n: int) -> str:
    """A device's memory in both units, `85.9 GB (80 GiB)`: everything else is in GB, of 10^9 bytes."""
    return f"{byte_count(n)} ({n / 2**30:.4g} GiB)" if n >= 2**27 else byte_count(n)


def size_of(text: str | int) -> int:
    """Returns a number of bytes, such as that of `"80GiB"`.

    Raises:
        ValueError: the text is no size, or the number is negative.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text) if isinstance(text, str) else None
    unit = match[2] if match else ""
    bits = unit.endswith("b") and not unit.islower()  # 80 Gb are bits
    if match is None or bits or unit.lower() not in _UNITS:
        raise ValueError(
            f"{short(repr(text))} is not a memory size: write a whole number of bytes, or a text with a unit, such as "
            f"'80GiB' or '80 GB'"
        )
    return int(float(match[1]) * _UNITS[unit.lower()])
