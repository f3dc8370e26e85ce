"""Metrics to files: a line of JSON for each step, or TensorBoard's."""

from __future__ import annotations

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO


class jsonl:
    """A report that appends a line of JSON for each step: `{"step": 12, "loss": 3.25, ...}`.

    A run that goes on from a step first cuts off what the file has of later ones, so that no step is there twice, and
    what is evaluated again at that step replaces what there was. What is not finite becomes `null`,
    since JSON has no such numbers.

    Args:
        path: of the file, which is made with its folder.

    Example:
        ``loop(..., report=[sf.run.progress(), sf.run.jsonl("runs/1/metrics.jsonl")])``
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._start, self._at = 0, 0
        self._there: dict[frozenset[str], str] = {}  # the lines of the step that it goes on from, by their names

    def begin(self, step: int, steps: int) -> None:
        """Opens the file, and cuts it off after a step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(0)
            whole = self._at = 0
            self._start, self._there = step, {}
            for line in file:
                if not line.endswith(b"\n") or (number := _step(line)) > step:
                    break
                whole += len(line)
                if number == step:
                    self._there[frozenset(json.loads(line))] = line.decode()
                else:
                    self._at = whole
            file.truncate(whole)
        self._file = self.path.open("a")

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Appends a line."""
        assert self._file is not None, "`begin` comes first"
        known = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **known}) + "\n"
        if step == self._start:
            self._there[frozenset({"step", *known})] = line
            self._file.truncate(self._at)
            line = "".join(self._there.values())
        self._file.write(line)
        self._file.flush()

    def end(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class tensorboard:
    """A report that writes for TensorBoard, in which a run that goes on from a step replaces later ones.

    Args:
        folder: of its files.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "sf.run.tensorboard needs tensorboard, which is in the extra tensorboard: "
                "pip install 'shardfn[tensorboard]'"
            )
        self.folder = Path(folder)
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
