"""How far a run is, on the terminal, or as lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

REFRESH = 0.25  # seconds between two changes of a bar


class progress:
    """A report that shows step, loss, tokens a second, memory, use of the device, and time left, on standard error.

    On a terminal, where rich is installed (the extra `cli`), it is a bar; otherwise a line now and then.

    Args:
        seconds: between two lines.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        if not seconds > 0:
            raise ValueError(f"sf.run.progress: seconds={seconds!r}; it is more than 0")
        self.seconds = seconds
        self._bar: Any = None
        self._shown: dict[str, float] = {}

    def begin(self, step: int, steps: int) -> None:
        """Starts to show a run that goes on from a step."""
        self.steps, self.first = steps, step
        self.began = self.before = time.monotonic()
        self.said, self.step, self._shown = -1, step, {}
        if sys.stderr.isatty() and find_spec("rich") is not None:
            self._bar = _bar(step, steps)

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Shows a step, if it is time to."""
        self.step = step
        self._shown |= metrics
        if step == self.first:  # evaluated again: how long a step takes is not known yet
            return
        now = time.monotonic()
        first = self.said < 0
        if first or now - self.before >= (self.seconds if self._bar is None else REFRESH):
            self.before = now
            self._show()

    def end(self) -> None:
        """Shows the last step."""
        if self._shown and self.said != self.step:
            self._show()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self) -> None:
        self.said = self.step
        left = (time.monotonic() - self.began) / (self.step - self.first) * (self.steps - self.step) if (
            self.step > self.first) else 0.0  # fmt: skip
        text = described(self._shown)
        if self._bar is None:
            print(f"step {self.step}/{self.steps}  {text}  {lasting(left)} left", file=sys.stderr, flush=True)
        else:
            self._bar.update(0, completed=self.step, shown=text, left=lasting(left))
            self._bar.refresh()


def _bar(step: int, steps: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = [TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=20),
               TextColumn("{task.fields[shown]}"), TextColumn("{task.fields[left]} left")]  # fmt: skip
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    bar.start()
    bar.add_task("", total=steps, completed=step, shown="", left="?")
    return bar


def described(metrics: dict[str, float]) -> str:
    """Metrics in a line: the loss and what was evaluated first, then figures in their units."""
    units: dict[str, Callable[[float], str]] = {
        "tokens_per_second": lambda x: f"{_short(x)} tokens/s",
        "seconds": lambda x: f"{x:.3g} s/step",
        "memory_gib": lambda x: f"{x:.2f} GiB",
        "tflops": lambda x: f"{x:.3g} TFLOP/s",
        "mfu": lambda x: f"{x:.1%} MFU",
    }
    own = [f"{name} {value:.4g}" for name, value in metrics.items() if name not in units and name != "tokens"]
    return "  ".join(own[:6] + [write(metrics[name]) for name, write in units.items() if name in metrics])


def _short(number: float) -> str:
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:.3g}"


def lasting(seconds: float) -> str:
    """A length of time, as `3 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
