"""A plan in time: as a picture, and as a trace in Chrome's format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardfn.local_paths import local_path
from shardfn.plan.drawing import Drawing, Times, duration, kind_colors, peak_told, stage_colors
from shardfn.quoting import byte_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardfn.plan.plan import StepPlan

INK, DIM, RED = "#1c2733", "#66727f", "#c0504d"
WIDTH, LANE, CURVE = 11.0, 0.28, 1.7  # inches
MICRO = 1e6  # a trace counts microseconds


def draw_plans(shown: Sequence[tuple[StepPlan, Times | None]]) -> Figure:
    """Draws plans one above the other; on one axis of time, if the times of all are known."""
    from matplotlib.figure import Figure

    drawings = [plan.drawing(times) for plan, times in shown]
    heights = [size for drawing in drawings for size in (LANE * len(drawing.lanes) + 0.1, CURVE)]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.75 * len(shown)), dpi=100, facecolor="white", layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    share_axis = all(drawing.seconds for drawing in drawings)
    longest, max_bytes = max(drawing.last_end for drawing in drawings), max(plan.peak.total for plan, _ in shown)
    for i, ((plan, _), drawing) in enumerate(zip(shown, drawings, strict=True)):
        lanes, curve = axes[2 * i], axes[2 * i + 1]
        for panel in (lanes, curve):
            panel.set_xlim(0, max(longest if share_axis else drawing.last_end, 1e-12))
            panel.spines[["top", "right"]].set_visible(False)
        _draw_lanes(lanes, plan, drawing)
        _draw_memory(curve, plan, drawing, max_bytes)
    return figure


def _draw_lanes(axes: Any, plan: StepPlan, drawing: Drawing) -> None:
    colors = stage_colors(plan.works)
    for lane_index in range(len(drawing.lanes)):
        indices = [i for i, lane in enumerate(drawing.lane) if lane == lane_index]
        axes.broken_barh(
            [(drawing.begin[i], drawing.end[i] - drawing.begin[i]) for i in indices],
            (lane_index - 0.42, 0.84),
            facecolors=[colors[plan.works[i].stage, plan.works[i].phase] for i in indices],
            edgecolors="white",
            linewidth=0.3 if len(indices) < 200 else 0.0,
        )
    axes.set_yticks(range(len(drawing.lanes)), drawing.lanes)
    axes.set_ylim(len(drawing.lanes) - 0.45, -0.55)
    axes.tick_params(bottom=False, labelbottom=False)
    took = f", {duration(drawing.last_end)}" if drawing.seconds else ""
    axes.set_title(f"{plan.title}, rank {plan.rank}{took}", loc="left", fontsize=10, color=INK, parse_math=False)


def _draw_memory(axes: Any, plan: StepPlan, drawing: Drawing, max_bytes: int) -> None:
    colors = kind_colors(plan.held)
    if plan.held:
        moments = [*drawing.held, drawing.last_end]
        rows = [[entry.kinds.get(kind, 0) / 1e9 for entry in (*plan.held, plan.held[-1])] for kind in colors]
        unit, name = (1.0, "GB") if max_bytes >= 1e9 else (1e3, "MB")
        rows = [[value * unit for value in row] for row in rows]
        axes.stackplot(moments, rows, colors=list(colors.values()), labels=list(colors), step="post", linewidth=0)
        peak_time = drawing.peak
        axes.axvline(peak_time, color=RED, linewidth=1, linestyle="--")
        left = peak_time < drawing.last_end / 2
        axes.annotate(
            f" peak {byte_count(plan.peak.total)}: {peak_told(plan.works, plan.peak)} ",
            (peak_time, 1.0), xycoords=("data", "axes fraction"), ha="left" if left else "right", va="top", fontsize=8,
            color=INK, parse_math=False,
        )  # fmt: skip
        axes.set_ylim(0, 1.18 * max_bytes / 1e9 * unit)
        axes.set_ylabel(name)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False, reverse=True)
    axes.set_xlabel("seconds" if drawing.seconds else "works, in the order in which they are issued", color=DIM)


# --- a trace in the "Trace Event Format", which chrome://tracing and Perfetto open ---


def write_trace(path: str | os.PathLike[str], plan: StepPlan, times: Times | None) -> None:
    """Writes the trace."""
    events = list(_events(plan, plan.drawing(times)))
    local_path(path, "StepPlan.trace: path").write_text(
        json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8"
    )


def _events(plan: StepPlan, drawing: Drawing) -> Iterator[dict[str, Any]]:
    unit = MICRO if drawing.seconds else 1.0
    process = {"pid": plan.rank}
    yield {"ph": "M", "name": "process_name", **process, "args": {"name": f"{plan.title}, rank {plan.rank}"}}
    for lane, name in enumerate(drawing.lanes):
        yield {"ph": "M", "name": "thread_name", **process, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **process, "tid": lane, "args": {"sort_index": lane}}
    for work, lane, begin, end in zip(plan.works, drawing.lane, drawing.begin, drawing.end, strict=True):
        details = {
            "stage": work.stage, "phase": work.phase, "operations": work.launches, "flop": sum(work.flops.values()),
            "bytes moved": work.moved, "axis": " x ".join(work.axis), "dtype": work.dtype, "bytes sent": work.sent,
            "where": work.where,
        }  # fmt: skip
        name = " ".join(filter(None, (work.stage, work.phase if work.kind == "compute" else work.kind)))
        yield {
            "ph": "X", "name": name, "cat": work.kind, **process, "tid": lane, "ts": begin * unit,
            "dur": (end - begin) * unit, "args": {key: value for key, value in details.items() if value},
        }  # fmt: skip
    kinds = dict.fromkeys(kind for entry in plan.held for kind in entry.kinds)
    for moment, entry in zip(drawing.held, plan.held, strict=True):
        by_kind = {kind: entry.kinds.get(kind, 0) for kind in kinds}
        yield {"ph": "C", "name": "bytes held", **process, "ts": moment * unit, "args": by_kind}
