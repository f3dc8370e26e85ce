"""The memory timeline of a step: bytes by kind, the peak, and the allocations at the peak."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from typing import NamedTuple

from shardfn.plan.recorder import Event, MemoryBlock
from shardfn.plan.schedule import Allocation, Held

UNIT = 512  # bytes: CUDA's caching allocator gives each tensor whole ones


class Course(NamedTuple):
    """As in `StepPlan`."""

    held: tuple[Held, ...]
    peak: Held
    allocations: tuple[Allocation, ...]
    allocator: int
    host: dict[str, int]
    disk: dict[str, int]


def kind_of(block: MemoryBlock, returned: bool) -> str:
    """Returns the kind of a memory block: see `plan.step`."""
    phase, part, ended = block.place.phase, block.place.part, block.ended
    differentiates = ("backward", "recompute")
    if block.kind:
        return block.kind
    if part in ("gathered", "activations"):
        return part
    if part == "reducing" or phase == "backward":
        if returned or (ended and ended not in differentiates):
            return "gradients"
        return part or "transients"
    needed = phase == "forward" and ended in (*differentiates, "update")
    return "activations" if needed or (phase == "recompute" and ended == "backward") else "transients"


def course_of(
    events: Sequence[Event], before: dict[MemoryBlock, int], returned: Container[MemoryBlock | None], last: int
) -> Course:
    """Returns the course of a step.

    Args:
        events: in order.
        before: what was held before, with its bytes.
        returned: what is part of the step's result.
        last: the position of the last work.
    """
    kinds = {block: kind_of(block, block in returned) for block in [*before, *(event[2] for event in events)]}
    device, host, disk = (
        _TierTimeline(
            {block: n for block, n in before.items() if block.tier == tier}, [e for e in events if e[2].tier == tier]
        )
        for tier in ("device", "host", "disk")
    )
    usage, peak_after = device.peaks_by_work(kinds, max(last, 0))
    peak = max(usage, key=lambda entry: entry.total)
    return Course(
        usage,
        peak,
        device.allocations(kinds, peak_after),
        device.rounded(),
        host.bytes_at_peak(kinds),
        disk.bytes_at_peak(kinds),
    )


class _TierTimeline:
    """The memory of a tier: its blocks at the start, and their changes."""

    def __init__(self, start: dict[MemoryBlock, int], events: list[Event]) -> None:
        self.start, self.events = start, events

    def peaks_by_work(self, kinds: dict[MemoryBlock, str], last: int) -> tuple[tuple[Held, ...], int]:
        """Returns the peak during each work that changes the memory, and the number of events up to the overall one."""
        current = Counter[str]()
        for block, nbytes in self.start.items():
            current[kinds[block]] += nbytes
        total = max_total = sum(current.values())
        after = 0
        usage: dict[int, Held] = {}
        largest: dict[int, int] = {}
        for index, (position, change, block) in enumerate(self.events):
            work_index = min(max(position, 0), last)
            if work_index not in usage:
                usage[work_index], largest[work_index] = Held(work_index, dict(+current)), total
            current[kinds[block]] += change
            total += change
            if total > largest[work_index]:
                usage[work_index], largest[work_index] = Held(work_index, dict(+current)), total
            if total > max_total:
                max_total, after = total, index + 1
        return tuple(usage.values()) or (Held(0, dict(+current)),), after

    def bytes_at_peak(self, kinds: dict[MemoryBlock, str]) -> dict[str, int]:
        """Returns the bytes at the peak, by kind."""
        usage, _ = self.peaks_by_work(kinds, 0)
        return {kind: n for kind, n in max(usage, key=lambda entry: entry.total).kinds.items() if n}

    def allocations(self, kinds: dict[MemoryBlock, str], after: int) -> tuple[Allocation, ...]:
        """Returns the memory after this many events, by the line that made it, largest first."""
        sizes = defaultdict(int, self.start)
        for _, change, block in self.events[:after]:
            sizes[block] += change
        groups: dict[tuple[str, str, str], list[int]] = {}
        for block, nbytes in sizes.items():
            if nbytes:
                groups.setdefault((kinds[block], block.place.where, block.stage), []).append(nbytes)
        allocations = (Allocation(*key, count=len(group), bytes=sum(group)) for key, group in groups.items())
        return tuple(sorted(allocations, key=lambda entry: -entry.bytes))

    def rounded(self) -> int:
        """Returns the bytes at the peak if each block is rounded up to whole units."""
        sizes = defaultdict(int, self.start)
        total = max_total = sum(-(-nbytes // UNIT) * UNIT for nbytes in sizes.values())
        for _, change, block in self.events:
            total -= -(-sizes[block] // UNIT) * UNIT
            sizes[block] += change
            total += -(-sizes[block] // UNIT) * UNIT
            max_total = max(max_total, total)
        return max_total
