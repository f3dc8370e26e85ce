"""A page for the browser that shows plans in time: one file, with its data, style and script inside."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfn.plans.drawing import Times, duration, kind_colors, peak_told, stage_colors
from shardfn.quoting import byte_count

if TYPE_CHECKING:
    from shardfn.plans.views import Views

NANO = 1e9  # a page's times are whole nanoseconds


def write(path: str | os.PathLike[str], shown: Sequence[tuple[Views, Times | None]]) -> None:
    """Writes the page of one plan, or of several on one axis."""
    panels = [_panel(plan, times) for plan, times in shown]
    data = json.dumps(panels, separators=(",", ":")).replace("<", "\\u003c")  # nothing in it may end the script
    text = files("shardfn.plans").joinpath("webpage.html").read_text(encoding="utf-8")
    title = html.escape(" and ".join(dict.fromkeys(plan.told for plan, _ in shown)))
    Path(path).write_text(text.replace("{{title}}", title).replace("{{data}}", data), encoding="utf-8")


def _panel(plan: Views, times: Times | None) -> dict[str, Any]:
    drawing = plan.drawing(times)
    unit = NANO if drawing.seconds else 1
    words, colors, kinds = _Numbered(), stage_colors(plan.works), kind_colors(plan.held)
    works = plan.works
    columns = {
        "lane": drawing.lane,
        "begin": [round(t * unit) for t in drawing.begin],
        "end": [round(t * unit) for t in drawing.end],
        "color": words.of(colors[work.stage, work.phase] for work in works),
        "kind": words.of(work.kind for work in works),
        "stage": words.of(work.stage for work in works),
        "phase": words.of(work.phase for work in works),
        "axis": words.of(" x ".join(work.axis) for work in works),
        "dtype": words.of(work.dtype or " and ".join(work.flops) for work in works),
        "where": words.of(work.where for work in works),
        "launches": [work.launches for work in works],
        "flops": [sum(work.flops.values()) for work in works],
        "moved": [work.moved for work in works],
        "sent": [work.sent for work in works],
    }
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    took = f", {duration(drawing.whole)}" if drawing.seconds else ", in the order of issue"
    return {
        "title": f"{plan.told} on {mesh or 'no mesh'}, rank {plan.rank}{took}",
        "seconds": drawing.seconds,
        "whole": round(drawing.whole * unit),
        "lanes": drawing.lanes,
        "words": words.all,
        "works": columns,
        "kinds": [[kind, color] for kind, color in kinds.items()],
        "held": [[round(t * unit) for t in drawing.held], *([one.kinds.get(k, 0) for one in plan.held] for k in kinds)],
        "peak": {
            "at": round(drawing.peak * unit),
            "bytes": plan.peak.total,
            "told": f"peak {byte_count(plan.peak.total)}: {peak_told(works, plan.peak)}",
        },
    }


class _Numbered:
    """Words by number, each once."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}

    def of(self, words: Iterable[str]) -> list[int]:
        return [self.number.setdefault(word, len(self.number)) for word in words]

    @property
    def all(self) -> list[str]:
        return list(self.number)
