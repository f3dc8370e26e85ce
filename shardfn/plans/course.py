"""The course of the memory during a step: what is held by kind, when it is the most, and what that is made of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from typing import NamedTuple

from shardfn.plans.recorder import Event, MemoryBlock
from shardfn.plans.schedule import Allocation, Held

UNIT = 512  # bytes: CUDA's caching allocator gives each tensor whole ones


class Course(NamedTuple):
    """As in `Plan`."""

    held: tuple[Held, ...]
    peak: Held
    allocations: tuple[Allocation, ...]
    allocator: int
    host: dict[str, int]
    disk: dict[str, int]


def kind_of(block: MemoryBlock, returned: bool) -> str:
    """Says what a memory is for: see `plan`."""
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
    held, peak_after = device.course(kinds, max(last, 0))
    peak = max(held, key=lambda entry: entry.total)
    return Course(
        held, peak, device.allocations(kinds, peak_after), device.rounded(), host.most(kinds), disk.most(kinds)
    )


class _TierTimeline:
    """The memory of a tier: what there is at the start, and how that changes."""

    def __init__(self, start: dict[MemoryBlock, int], events: list[Event]) -> None:
        self.start, self.events = start, events

    def course(self, kinds: dict[MemoryBlock, str], last: int) -> tuple[tuple[Held, ...], int]:
        """Returns the most that is held during each work that changes it, and after how many events it is the most of
        all.
        """
        now = Counter[str]()
        for block, nbytes in self.start.items():
            now[kinds[block]] += nbytes
        total = most = sum(now.values())
        after = 0
        held: dict[int, Held] = {}
        largest: dict[int, int] = {}
        for number, (position, change, block) in enumerate(self.events):
            at = min(max(position, 0), last)
            if at not in held:
                held[at], largest[at] = Held(at, dict(+now)), total
            now[kinds[block]] += change
            total += change
            if total > largest[at]:
                held[at], largest[at] = Held(at, dict(+now)), total
            if total > most:
                most, after = total, number + 1
        return tuple(held.values()) or (Held(0, dict(+now)),), after

    def most(self, kinds: dict[MemoryBlock, str]) -> dict[str, int]:
        """Returns the most that is held, by kind."""
        held, _ = self.course(kinds, 0)
        return {kind: n for kind, n in max(held, key=lambda entry: entry.total).kinds.items() if n}

    def allocations(self, kinds: dict[MemoryBlock, str], after: int) -> tuple[Allocation, ...]:
        """Returns what is held after this many events, by the line that made it, largest first."""
        sizes = defaultdict(int, self.start)
        for _, change, block in self.events[:after]:
            sizes[block] += change
        groups: dict[tuple[str, str, str], list[int]] = {}
        for block, nbytes in sizes.items():
            if nbytes:
                groups.setdefault((kinds[block], block.place.where, block.stage), []).append(nbytes)
        made = (Allocation(*key, count=len(each), bytes=sum(each)) for key, each in groups.items())
        return tuple(sorted(made, key=lambda entry: -entry.bytes))

    def rounded(self) -> int:
        """Returns the most that is held if each memory has whole units."""
        sizes = defaultdict(int, self.start)
        total = most = sum(-(-nbytes // UNIT) * UNIT for nbytes in sizes.values())
        for _, change, block in self.events:
            total -= -(-sizes[block] // UNIT) * UNIT
            sizes[block] += change
            total += -(-sizes[block] // UNIT) * UNIT
            most = max(most, total)
        return most
