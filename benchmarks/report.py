"""The output of every benchmark command: a table of rows, then the figures and their goals."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from rich.console import Console
from rich.table import Table

LACKING = 77  # exit status of a benchmark that lacks something; test runners take it for "skipped"
Sense = Literal["at most", "at least"]


@dataclass(frozen=True)
class Goal:
    """A figure and its upper or lower limit.

    Attributes:
        tolerance: how much worse than recorded it may be, as a fraction of its value or its limit, the larger of both.
    """

    name: str
    value: float
    limit: float
    sense: Sense = "at most"
    tolerance: float = 0.0

    @property
    def met(self) -> bool:
        return bool(self.value <= self.limit if self.sense == "at most" else self.value >= self.limit)  # or of numpy


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the option that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write rows and goals to FILE")
    return made


def lacks(told: str) -> NoReturn:
    """Ends a benchmark that cannot run here because something that it needs is missing."""
    print(told, file=sys.stderr)
    ends = SystemExit(told)
    ends.code = LACKING
    raise ends


def publish(title: str, rows: Sequence[dict[str, Any]], goals: Sequence[Goal], file: Path | None) -> None:
    """Prints rows as tables, a new table when the columns change, then the goals; writes both to the file."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    for _, group in itertools.groupby(rows, key=list):
        same = list(group)
        columns = list(same[0])
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if isinstance(same[0][column], str) else "right")
        for row in same:
            table.add_row(*(_show(value) for value in row.values()))
        console.print(table)
        title = ""
    ends = Table(title="against the goals", title_justify="left")
    for column in ("figure", "value", "goal", "met"):
        ends.add_column(column, justify="left" if column == "figure" else "right")
    for goal in goals:
        ends.add_row(goal.name, short(goal.value), f"{goal.sense} {short(goal.limit)}", "yes" if goal.met else "NO")
    console.print(ends)
    save(rows, goals, file)


def save(rows: Sequence[dict[str, Any]], goals: Sequence[Goal], file: Path | None) -> None:
    """Writes rows and goals to a file, if there is one."""
    if file:
        told = [asdict(goal) | {"met": goal.met} for goal in goals]
        file.write_text(json.dumps({"rows": list(rows), "goals": told}, indent=1) + "\n")


def interleaved(
    runs: dict[str, Callable[[], Any]], *, repeats: int, inner: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds per call of each function; they take turns, so that changes of the machine's speed affect all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = clock()
            for _ in range(inner):
                run()
            times[name].append((clock() - began) / inner)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def short(value: float) -> str:
    """A number as text: integers in full, others with three digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.3g}"


def _show(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
