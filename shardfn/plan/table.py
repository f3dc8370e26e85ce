"""A plan as lines of text: memory at the peak, collectives, and the work of each stage."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from shardfn.plan.drawing import kind_colors, peak_told
from shardfn.plan.printed import Line
from shardfn.plan.schedule import Work
from shardfn.quoting import amount, byte_count, listed

if TYPE_CHECKING:
    from shardfn.plan.plan import StepPlan

BAR = 32  # columns of the whole peak
LARGEST = 6  # allocations that are shown
ROWS = 14  # most rows of a table, of which the rest is one row


def lines(plan: StepPlan, width: int) -> Iterator[Line]:
    """Yields all lines; equal stages are one."""
    parts = (_head(plan), _memory(plan), _largest_allocations(plan), _collectives(plan), _stage_rows(plan))
    for i, part in enumerate(filter(None, map(list, parts))):
        if i:
            yield []
        yield from (truncate_line(line, width) for line in part)


def _head(plan: StepPlan) -> Iterator[Line]:
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    ranks = math.prod(plan.mesh.values())
    yield [(plan.title, "bold"), (f" on {mesh or 'no mesh'}: rank {plan.rank} of {ranks:,}", "")]
    launches, flops = sum(work.launches for work in plan.works), _flops(plan.works)
    by_dtype = ", ".join(f"{amount(n, 'FLOP')} in {dtype}" for dtype, n in flops.items() if n)
    numbers = f"{plan.parameters:,} parameters on all ranks; " if plan.parameters else ""
    if plan.assumed:
        yield [(f"what depends on numbers is assumed (1, where the host reads one): {listed(plan.assumed, 3)}", "bold")]
    yield [(f"{numbers}here {launches:,} operations{f', {by_dtype}' if by_dtype else ''}", "")]


def _memory(plan: StepPlan) -> Iterator[Line]:
    total, colors = plan.peak.total, kind_colors([plan.peak])
    yield [("memory at the peak", "bold"), (f"  {peak_told(plan.works, plan.peak)}", "dim")]
    for kind in colors:
        if nbytes := plan.peak.kinds[kind]:
            bar = "━" * max(1, round(BAR * nbytes / total))
            yield [(f"  {kind:<14}", ""), (f"{byte_count(nbytes):>10}  ", ""), (bar, colors[kind])]
    yield [(f"  {'all':<14}", "bold"), (f"{byte_count(total):>10}", "bold")]
    for where, by_kind in (("on the host", plan.host), ("on disk", plan.disk)):
        for kind, nbytes in by_kind.items():
            if nbytes * 1000 >= total:
                yield [(f"  {kind:<14}", ""), (f"{byte_count(nbytes):>10}", ""), (f"  {where}, at its own peak", "dim")]


def _largest_allocations(plan: StepPlan) -> Iterator[Line]:
    if plan.allocations:
        allocations = sorted(plan.allocations, key=lambda entry: -entry.bytes)
        rows = [(x.kind, byte_count(x.bytes), f"{x.count:,}", x.stage or "-", x.where or "-") for x in allocations]
        yield from table(("largest then", "bytes", "tensors", "stage", "made at"), rows, "lrrll", LARGEST)


def _collectives(plan: StepPlan) -> Iterator[Line]:
    sums: dict[tuple[str, ...], list[int]] = {}
    for work in plan.works:
        if work.kind != "compute":
            key = (work.kind, " x ".join(work.axis) or "-", work.dtype or "-", work.phase)
            sums.setdefault(key, []).append(work.sent)
    if sums:
        rows = [(*key, f"{len(sent):,}", byte_count(sum(sent))) for key, sent in sums.items()]
        yield from table(("sent", "axis", "dtype", "pass", "calls", "bytes"), rows, "llllrr", ROWS)


def _stage_rows(plan: StepPlan) -> Iterator[Line]:
    of_stage: dict[str, list[Work]] = {}
    for work in plan.works:
        of_stage.setdefault(work.stage, []).append(work)
    stages_by_row: dict[tuple[str, ...], list[str]] = {}
    for stage, works in of_stage.items():
        stages_by_row.setdefault((re.sub(r"\d+", "*", stage), *_stage_row(works)), []).append(
            stage or "(outside of stages)"
        )
    rows = [
        (stages[0] if len(stages) == 1 else f"{stages[0]} … {stages[-1]} ({len(stages)} alike)", *key[1:])
        for key, stages in stages_by_row.items()
    ]
    head = ("stage", "operations", "forward", "recompute", "backward", "update", "calls", "sent")
    yield from table(head, rows, "lrrrrrrr", ROWS)


def _stage_row(works: Sequence[Work]) -> tuple[str, ...]:
    """Counts a stage's operations, FLOP by phase, and collectives."""
    flops = {
        phase: sum(_flops(work for work in works if work.phase == phase).values())
        for phase in ("forward", "recompute", "backward", "update")
    }
    sent = [work.sent for work in works if work.kind != "compute"]
    counts = (f"{len(sent):,}", byte_count(sum(sent))) if sent else ("-", "-")
    launches = sum(work.launches for work in works)
    return (f"{launches:,}", *(amount(n, "FLOP") if n else "-" for n in flops.values()), *counts)


def _flops(works: Iterable[Work]) -> dict[str, int]:
    flops = Counter[str]()
    for work in works:
        flops.update(work.flops)
    return flops


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str, max_rows: int) -> Iterator[Line]:
    """Yields a heading and at most `max_rows` rows, in columns aligned to the left (l) or right (r)."""
    used = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]  # a column of nothing is left out
    head, align = [head[i] for i in used], "".join(align[i] for i in used)
    rows = [[row[i] for i in used] for row in rows]
    shown = rows if len(rows) <= max_rows else rows[: max_rows - 1]
    widths = [max(map(len, column)) for column in zip(head, *shown, strict=True)]
    for i, row in enumerate((head, *shown)):
        cells = (
            f"{cell:<{n}}" if side == "l" else f"{cell:>{n}}" for cell, n, side in zip(row, widths, align, strict=True)
        )
        yield [("  ".join(cells).rstrip(), "" if i else "bold")]
    if len(shown) < len(rows):
        yield [(f"… {len(rows) - len(shown):,} more rows", "dim")]


def truncate_line(line: Line, width: int) -> Line:
    """Shortens a line to a width, without the words that do not fit."""
    short: Line = []
    for text, style in line:
        if len(text) > width:
            return [*short, (text[: max(width - 1, 0)] + "…"[:width], style)]
        short.append((text, style))
        width -= len(text)
    return short
