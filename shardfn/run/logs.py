"""Metrics to files: a line of JSON for each step, or TensorBoard's."""

from __future__ import annotations

import itertools
import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO


class jsonl:
    """A report that appends a line of JSON for each step: `{"step": 12, "loss": 3.25, ...}`.

    A run that goes on from a step first cuts off what the file has of later ones, so that no step is there twice, and
    what is evaluated again at that step replaces what there was. One that begins with the first step moves a file with
    steps away, to `metrics.jsonl.1`, or the next number that is free. What is not finite becomes `null`, since JSON has
    no such numbers.

    Args:
        path: of the file, which is made with its folder. A file that has anything else than such lines is an error, and
            stays as it is.

    Example:
        ``loop(..., report=[sf.run.progress(), sf.run.jsonl("runs/1/metrics.jsonl")])``
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._start, self._at = 0, 0
        self._there: dict[frozenset[str], str] = {}  # the lines of the step that it goes on from, by their names

    def begin(self, step: int, steps: int) -> None:
        """Opens the file, and cuts it off after a step.

        Raises:
            ValueError: it has something else than metrics.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._start, self._at, self._there = step, 0, {}
        kept, later = self._kept(step)
        if step == 0 and later:
            self.path.rename(_free(self.path))
        elif self.path.is_file():
            os.truncate(self.path, kept)
        self._file = self.path.open("a")

    def _kept(self, step: int) -> tuple[int, bool]:
        """How many bytes are of steps up to one, and whether there are whole lines of later ones."""
        kept, last, later = 0, 0.0, False
        if not self.path.is_file():
            return kept, later
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # A disk that lost its power has zeros where a line was to be.
                found = _step(line if number == 1 else line.rstrip(b"\0"))
                if found is None or found < last:
                    raise ValueError(
                        f"sf.run.jsonl: line {number} of {self.path} is none of a run's metrics, and the file is left "
                        f"as it is: pass the path of a new one, or of one that sf.run.jsonl has written"
                    )
                if found <= step:
                    kept += len(line)
                if found < step:
                    self._at = kept
                elif found == step:
                    self._there[frozenset(json.loads(line))] = line.decode()
                last, later = found, later or step < found < math.inf
        return kept, later

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Appends a line."""
        assert self._file is not None, "`begin` comes first"
        known = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **known} | {"step": step}) + "\n"
        if step == self._start:
            self._there[frozenset({"step", *known})] = line
            self._file.truncate(self._at)
            line = "".join(self._there.values())
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)  # which a full disk does not say
            raise

    def end(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _step(line: bytes) -> float | None:
    """The step of a line; infinity of one that was torn; None if it is no line of metrics."""
    if not line.endswith(b"\n"):
        return math.inf if line.startswith(_BEGINS) or _BEGINS.startswith(line) else None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        return None
    return found["step"] if all(isinstance(x, int | float | None) for x in found.values()) else None


_BEGINS = b'{"step": '


def _free(path: Path) -> Path:
    """A path beside one, where nothing is."""
    beside = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(one for one in beside if not one.exists())


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
