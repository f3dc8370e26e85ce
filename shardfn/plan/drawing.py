"""Layout of plots: the time and lane of each work of a plan, and colors, the same as in the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

from shardfn.plan.holdings import MeshSection
from shardfn.plan.schedule import Held, Work

FEW = ("#38618c", "#e08e45", "#4f9d69", "#c0504d", "#7b5ea7", "#3d9db3", "#b08a2e", "#c2679b")
MANY = ("#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#f2d13c")
PADDING, OTHER = "#e4e8ed", "#9aa7b5"
PALER = {"forward": 0.5, "recompute": 0.25, "backward": 0.0, "update": 0.0}
KINDS = {
    "parameters": "#38618c",
    "optimizer": "#7b5ea7",
    "gathered": "#4f9d69",
    "reducing": "#e08e45",
    "gradients": "#c0504d",
    "activations": "#3d9db3",
    "transients": "#b08a2e",
}
MORE = ("#c2679b", "#66727f", "#8c6d46", "#5a7d3a")  # for arguments with names of their own


@runtime_checkable
class Times(Protocol):
    """Start and end of each work, in seconds since the step began, in the order of a plan's works."""

    @property
    def begins(self) -> Sequence[float]: ...  # noqa: D102

    @property
    def ends(self) -> Sequence[float]: ...  # noqa: D102


@dataclass(frozen=True)
class Drawing:
    """A plan's works and memory, placed in time.

    Attributes:
        lanes: the names of the streams, from the top of a picture.
        lane: of each work, its stream's position among them.
        begin: of each work: in seconds, or its position if no times are known.
        end: likewise.
        held: the moment of each entry of the plan's `held`.
        peak: the moment of the largest of them.
        seconds: whether times are known.
    """

    lanes: tuple[str, ...]
    lane: tuple[int, ...]
    begin: tuple[float, ...]
    end: tuple[float, ...]
    held: tuple[float, ...]
    peak: float
    seconds: bool

    @property
    def last_end(self) -> float:
        """End of the last work."""
        return max(self.end, default=0.0)


def drawing(works: Sequence[Work], usage: Sequence[Held], times: Times | None) -> Drawing:
    """Places works in time; without times, each takes as long as any other, in the order in which they are issued.

    Memory is drawn where the host is: at the work of the first stream that is issued last by then, as the allocator
    gives out memory in that order.

    Raises:
        TypeError: the times are none.
        ValueError: there are times for more works, or for fewer.
    """
    if times is not None and not isinstance(times, Times):
        raise TypeError(f"the times are of type {type(times).__name__}: pass what plan.timed(links, chip) returns")
    streams = sorted({work.stream for work in works})
    names = _stream_names([[work for work in works if work.stream == stream] for stream in streams])
    lane = tuple(streams.index(work.stream) for work in works)
    if times is None:
        begin, end = tuple(map(float, range(len(works)))), tuple(map(float, range(1, len(works) + 1)))
        host: Sequence[float] = begin
    else:
        begin, end = tuple(times.begins), tuple(times.ends)
        if not len(begin) == len(end) == len(works):
            raise ValueError(f"plan: times must be those of this plan's {len(works)} works, got {len(begin)}")
        host = list(accumulate((t if i == 0 else 0.0 for t, i in zip(begin, lane, strict=True)), max))
    moments = tuple(host[entry.at] if i and works else 0.0 for i, entry in enumerate(usage))  # arguments from the start
    peak = max(range(len(usage)), key=lambda i: usage[i].total, default=None)
    return Drawing(names, lane, begin, end, moments, 0.0 if peak is None else moments[peak], times is not None)


def _stream_names(by_stream: Sequence[Sequence[Work]]) -> tuple[str, ...]:
    """Names the first stream `"compute"`, and others by the most frequent kind of their works."""
    names = ["compute"] if by_stream else []
    for works in by_stream[1:]:
        sent = [work for work in works if work.kind != "compute"]
        names.append(Counter(map(lane_of, sent)).most_common(1)[0][0] if sent else "side")
    axes = [{" x ".join(work.axis) for work in works if work.axis} for works in by_stream]
    suffixes = [f" {next(iter(axis_names))}" if len(axis_names) == 1 else "" for axis_names in axes]
    names = [f"{name}{axis}" if names.count(name) > 1 else name for name, axis in zip(names, suffixes, strict=True)]
    return tuple(
        f"{name} {names[:i].count(name) + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)
    )


def lane_of(work: Work) -> str:
    """Returns the lane name of a work that is not computed."""
    return {
        "all_gather": "gathers", "reduce_scatter": "reductions", "all_reduce": "reductions", "copy": "copies",
    }.get(work.kind, "sends")  # fmt: skip


def colors(section: MeshSection) -> dict[int, str]:
    """Returns rank -> color: a hue by position along the main shard axes, paler for replicas."""
    grid = section.grid
    if grid is None:
        return dict.fromkeys(section.ranks, FEW[0])
    bytes_by_axes = Counter[tuple[str, ...]]()
    for flat in section.flats:
        axes = tuple(name for name in flat.layout.placement.axes if grid.size(name) > 1)
        if axes:
            bytes_by_axes[axes] += flat.full_bytes
    all_axes = tuple(name for name, _ in grid.sizes)
    names = max(bytes_by_axes, key=lambda axes: bytes_by_axes[axes]) if bytes_by_axes else all_axes
    other_axes = tuple(name for name, _ in grid.sizes if name not in names)
    count, copies = grid.size(names), grid.size(other_axes)
    color_of = {}
    for rank in grid.ranks:
        paler = 0.45 * grid.index(rank, other_axes) / max(copies - 1, 1)
        color_of[rank] = mix_colors(hue(grid.index(rank, names), count), "#ffffff", paler)
    return color_of


def hue(index: int, count: int) -> str:
    """Returns color `index` of `count` distinct ones."""
    if count <= len(FEW):
        return FEW[index]
    low, part = divmod(index / (count - 1) * (len(MANY) - 1), 1)
    return mix_colors(MANY[int(low)], MANY[min(math.ceil(low + part), len(MANY) - 1)], part)


def mix_colors(a: str, b: str, part: float) -> str:
    """Mixes two colors: `part` of `b`, the rest of `a`."""
    return "#" + "".join(f"{round(x + (y - x) * part):02x}" for x, y in zip(_rgb(a), _rgb(b), strict=True))


def text_color(color: str) -> str:
    """Returns the text color, black or white, that is readable on a color."""
    r, g, b = _rgb(color)
    return "#ffffff" if 0.299 * r + 0.587 * g + 0.114 * b < 160 else "#1c2733"


def _rgb(color: str) -> Sequence[int]:
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]


def stage_colors(works: Sequence[Work]) -> dict[tuple[str, str], str]:
    """Returns (stage, phase) -> color: a hue by stage in their order, and its forward paler; gray outside of stages."""
    stages = [stage for stage in dict.fromkeys(work.stage for work in works) if stage]
    hues = {stage: hue(i, len(stages)) for i, stage in enumerate(stages)} | {"": OTHER}
    return {
        (work.stage, work.phase): mix_colors(hues[work.stage], "#ffffff", PALER.get(work.phase, 0.0)) for work in works
    }


def kind_colors(usage: Sequence[Held]) -> dict[str, str]:
    """Returns a color for each kind of memory, in the order in which they are stacked."""
    kinds = dict.fromkeys(kind for entry in usage for kind in entry.kinds)
    other_kinds = [kind for kind in kinds if kind not in KINDS]
    return {kind: color for kind, color in KINDS.items() if kind in kinds} | {
        kind: MORE[i % len(MORE)] for i, kind in enumerate(other_kinds)
    }


def duration(seconds: float) -> str:
    """Returns a time with four digits, in seconds or the smaller unit that makes it at least 1."""
    unit, size = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if seconds >= pair[1]), ("µs", 1e-6))
    return f"{seconds / size:.4g} {unit}"


def peak_told(works: Sequence[Work], peak: Held) -> str:
    """Describes the work during which the peak is."""
    if not works:
        return "before the first work"
    work = works[peak.at]
    text = f"{work.phase}{f' of {work.stage}' if work.stage else ''}"
    return f"{text}{f', {work.where}' if work.where else ''}"
