"""A plan as a trace in Chrome's format (the "Trace Event Format"), which chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfn.plans.drawing import Drawing, Times

if TYPE_CHECKING:
    from shardfn.plans.views import Views

MICRO = 1e6  # the format counts microseconds


def write(path: str | os.PathLike[str], plan: Views, times: Times | None) -> None:
    """Writes the trace."""
    events = list(_events(plan, plan.drawing(times)))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _events(plan: Views, drawing: Drawing) -> Iterator[dict[str, Any]]:
    unit = MICRO if drawing.seconds else 1.0
    process = {"pid": plan.rank}
    yield {"ph": "M", "name": "process_name", **process, "args": {"name": f"{plan.told}, rank {plan.rank}"}}
    for lane, name in enumerate(drawing.lanes):
        yield {"ph": "M", "name": "thread_name", **process, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **process, "tid": lane, "args": {"sort_index": lane}}
    for work, lane, begin, end in zip(plan.works, drawing.lane, drawing.begin, drawing.end, strict=True):
        told = {
            "stage": work.stage, "phase": work.phase, "operations": work.launches, "flop": sum(work.flops.values()),
            "bytes moved": work.moved, "axis": " x ".join(work.axis), "dtype": work.dtype, "bytes sent": work.sent,
            "where": work.where,
        }  # fmt: skip
        name = " ".join(filter(None, (work.stage, work.phase if work.kind == "compute" else work.kind)))
        yield {
            "ph": "X", "name": name, "cat": work.kind, **process, "tid": lane, "ts": begin * unit,
            "dur": (end - begin) * unit, "args": {key: value for key, value in told.items() if value},
        }  # fmt: skip
    kinds = dict.fromkeys(kind for one in plan.held for kind in one.kinds)
    for moment, one in zip(drawing.held, plan.held, strict=True):
        held = {kind: one.kinds.get(kind, 0) for kind in kinds}
        yield {"ph": "C", "name": "bytes held", **process, "ts": moment * unit, "args": held}
