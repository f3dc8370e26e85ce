"""Reports of each step on the first rank: on the terminal, as lines of JSON, or to TensorBoard."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from shardfn.local_paths import local_path


class jsonl:
    """A report that appends a line of JSON for each step: `{"step": 12, "loss": 3.25, ...}`.

    A run that resumes at a step first cuts off the lines of later steps, so that no step occurs twice; results of an
    evaluation that is repeated at that step replace the earlier ones. A run that begins with the first step moves a
    file with steps to `metrics.jsonl.1`, or the next free number. Values that are not finite become `null`, since JSON
    has no such numbers.

    Args:
        path: of the file, created along with its folder. A file with other content than such lines is an error, and is
            left unchanged.

    Example:
        ``loop(..., report=[sf.run.progress(), sf.run.jsonl("runs/1/metrics.jsonl")])``
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path, "jsonl: path")
        self._file: TextIO | None = None
        self._start, self._at = 0, 0
        self._there: dict[frozenset[str], str] = {}  # lines of the step at which the run resumes, by their metrics

    def begin(self, step: int, steps: int) -> None:
        """Opens the file, after cutting off the lines of steps later than `step`.

        Raises:
            ValueError: it has other content than metrics.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._start, self._at, self._there = step, 0, {}
        kept_bytes, later = self._count_kept_bytes(step)
        if step == 0 and later:
            candidates = (self.path.with_name(f"{self.path.name}.{n}") for n in itertools.count(1))
            self.path.rename(next(path for path in candidates if not path.exists()))
        elif self.path.is_file():
            os.truncate(self.path, kept_bytes)
        self._file = self.path.open("a")

    def _count_kept_bytes(self, step: int) -> tuple[int, bool]:
        """The number of bytes up to the lines of `step`, and whether there are complete lines of later steps."""
        kept_bytes, last, later = 0, 0.0, False
        if not self.path.is_file():
            return kept_bytes, later
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # After a power failure a file may have zeros in place of a line.
                line_step = _line_step(line if number == 1 else line.rstrip(b"\0"))
                if line_step is None or line_step < last:
                    raise ValueError(
                        f"sf.run.jsonl: line {number} of {self.path} is not a run's metrics, and the file is left "
                        f"unchanged: pass the path of a new one, or of one that sf.run.jsonl has written"
                    )
                if line_step <= step:
                    kept_bytes += len(line)
                if line_step < step:
                    self._at = kept_bytes
                elif line_step == step:
                    self._there[frozenset(json.loads(line))] = line.decode()
                last, later = line_step, later or step < line_step < math.inf
        return kept_bytes, later

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Appends a line."""
        assert self._file is not None, "`begin` comes first"
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **values} | {"step": step}) + "\n"
        if step == self._start:
            self._there[frozenset({"step", *values})] = line
            self._file.truncate(self._at)
            line = "".join(self._there.values())
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)  # which the error of a full disk lacks
            raise

    def end(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _line_step(line: bytes) -> float | None:
    """The step of a line; infinity for a truncated line; None if it is not a line of metrics."""
    if not line.endswith(b"\n"):
        return math.inf if line.startswith(_BEGINS) or _BEGINS.startswith(line) else None
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        return None
    return values["step"] if all(isinstance(x, int | float | None) for x in values.values()) else None


_BEGINS = b'{"step": '


class tensorboard:
    """A report that writes TensorBoard files; a run that resumes at a step replaces later steps.

    Args:
        folder: of its files.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "sf.run.tensorboard needs tensorboard, which is in the extra tensorboard: pip install '.[tensorboard]'"
            )
        self.folder = local_path(folder, "tensorboard: folder")
        self._writer: Any = None

    def begin(self, step: int, steps: int) -> None:
        """Opens a file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Adds each metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_log = logging.getLogger("shardfn")

Report = Callable[[int, dict[str, float]], Any]
"""Called as `report(step, metrics)` after each step, counted from 1. If it has a method `begin(step, steps)`, that is
called first, with the step at which the run begins and its last one; if it has `end()`, that is called at the end. If
it has `resumed(path, step)`, that is called before all, with the checkpoint that the run resumed from, if it did; if it
has `saved(path, step)`, that is called for each checkpoint once it is complete and on disk, as to upload it."""


class Reports:
    """The reports of one run. An error in one fails the run, on all ranks.

    Attributes:
        error: of the first report that failed; after it, no report is called until the end.
    """

    def __init__(self, every: Sequence[Report]) -> None:
        self.every = every
        self.error: Exception | None = None

    def begin(self, step: int, steps: int, path: Path | None) -> None:
        """Tells the reports at which step the run begins and which is its last, and from which checkpoint, if any."""
        if path is not None:
            self._call_each(lambda report: getattr(report, "resumed", _nothing)(path, step))
        self._call_each(lambda report: getattr(report, "begin", _nothing)(step, steps))

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Passes the metrics of a step to each report, as a separate dict, which it may change."""
        self._call_each(lambda report: report(step, dict(metrics)))

    def saved(self, path: Path, step: int) -> None:
        """Tells the reports that a checkpoint is complete."""
        self._call_each(lambda report: getattr(report, "saved", _nothing)(path, step))

    def end(self) -> None:
        """Ends all reports. The run is over by then, so an error is only logged."""
        for report in self.every:
            try:
                getattr(report, "end", _nothing)()
            except Exception as error:
                _log.error("the report %r failed at its end, and may be incomplete: %r", report, error, exc_info=error)

    def _call_each(self, call: Callable[[Report], Any]) -> None:
        if self.error is not None:
            return
        try:
            for report in self.every:
                call(report)
        except Exception as error:  # all ranks raise it, at their next exchange
            self.error = error


def _nothing(*_: object) -> None:
    """In place of `begin` and `end` for a report that has none."""


MEASURED = 3  # steps after the first, before the time left is shown
REFRESH = 0.25  # seconds between two updates of the progress bar


class progress:
    """A report that shows step, metrics, tokens per second, memory, utilization and time left on standard error.

    On a terminal with rich installed (the extra `cli`) it is a progress bar; otherwise it prints a line now and then.

    Args:
        seconds: between two lines.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        if not seconds > 0:
            raise ValueError(f"sf.run.progress: seconds must be above 0, got {seconds!r}")
        self.seconds = seconds
        self._bar: Any = None
        self._shown: dict[str, float] = {}

    def resumed(self, path: Path, step: int) -> None:
        """Says from which checkpoint the run resumed."""
        print(f"resumed from {path} (step {step})", file=sys.stderr, flush=True)

    def begin(self, step: int, steps: int) -> None:
        """Starts to show a run that begins at `step`."""
        self.steps, self.first = steps, step
        self.before = time.monotonic()
        self.shown_step, self.step, self._shown, self._pace = -1, step, {}, _Pace()
        if sys.stderr.isatty() and find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = [TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=20),
                       TextColumn("{task.fields[shown]}"), TextColumn("{task.fields[left]}")]  # fmt: skip
            self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
            self._bar.start()
            self._bar.add_task("", total=steps, completed=step, shown="", left="")

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Shows a step if enough time has passed."""
        self.step = step
        self._shown |= metrics
        if step == self.first:  # a repeated evaluation
            return
        time_s = time.monotonic()
        self._pace.add(step, time_s, metrics.get("seconds", 0.0))
        first = self.shown_step < 0
        if first or time_s - self.before >= (self.seconds if self._bar is None else REFRESH):
            self.before = time_s
            self._show()

    def end(self) -> None:
        """Shows the last step."""
        if self._shown and self.shown_step != self.step:
            self._show()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self) -> None:
        self.shown_step = self.step
        text, left = metrics_line(self._shown), self._pace.left(self.steps - self.step)
        if self._bar is None:
            print(f"step {self.step}/{self.steps}  {text}{left and f'  {left}'}", file=sys.stderr, flush=True)
        else:
            self._bar.update(0, completed=self.step, shown=text, left=left)
            self._bar.refresh()


class _Pace:
    """The time that steps take, after the first one of the program, which also compiles, allocates and compares."""

    def __init__(self) -> None:
        self.began, self.now, self.seconds, self.steps = 0.0, 0.0, 0.0, -1

    def add(self, step: int, time_s: float, seconds: float) -> None:
        """Notes that a step was read at a time, and how long it took by itself."""
        self.now = time_s
        if self.steps < 0:
            self.first, self.began = step, time_s
        else:
            self.seconds += seconds
        self.steps = step - self.first

    def left(self, steps: int) -> str:
        """The time that so many more steps take, as text; empty while unknown."""
        if steps and self.steps < MEASURED:
            return ""
        # By the clock, which sees evaluations too; but of steps that are read all at once it sees too little.
        step_s = max(self.now - self.began, self.seconds) / max(1, self.steps)
        return f"{lasting(step_s * steps)} left"


def metrics_line(metrics: dict[str, float]) -> str:
    """Metrics as one line: the loss and other metrics first, at most 6, then figures in their units."""
    units: dict[str, Callable[[float], str]] = {
        "tokens_per_second": lambda x: f"{_short_number(x)} tokens/s",
        "seconds": lambda x: f"{x:.3g} s/step",
        "memory_gib": lambda x: f"{x:.2f} GiB",
        "tflops": lambda x: f"{x:.3g} TFLOP/s",
        "mfu": lambda x: f"{x:.1%} MFU",
    }
    other_metrics = [f"{name} {value:.4g}" for name, value in metrics.items() if name not in units and name != "tokens"]
    return "  ".join(other_metrics[:6] + [write(metrics[name]) for name, write in units.items() if name in metrics])


def _short_number(number: float) -> str:
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:.3g}"


def lasting(seconds: float) -> str:
    """A duration as text, such as `3 h 05 min`."""
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s} s"
    if total_s < 3600:
        return f"{total_s // 60} min {total_s % 60:02} s"
    return f"{total_s // 3600} h {total_s % 3600 // 60:02} min"
