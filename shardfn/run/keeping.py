"""Which of a run's checkpoints stay: the newest, the best by a metric, and whatever the run has not made itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardfn.checkpoint.folders import intact
from shardfn.quoting import listed
from shardfn.run.choosing import step_of, steps_in

HEAD = {"step": int, "run.seed": int, "run.batches": str, "run.parts": str, "run.best": str}
"""What a checkpoint of a run has besides the state, by name."""


@dataclass(frozen=True)
class Best:
    """A metric by which checkpoints are compared.

    Attributes:
        metric: its name.
        highest: whether more is better.
    """

    metric: str
    highest: bool

    def of(self, values: Mapping[int, float]) -> int | None:
        """The best step; of several, the first."""
        sign = -1 if self.highest else 1
        return min(values, key=lambda step: (sign * values[step], step), default=None)


def best_of(given: Any, evaluations: Mapping[str, Any]) -> Best | None:
    """The argument `best`.

    Raises:
        TypeError, ValueError: it is something else, or of an evaluation that is not made.
    """
    if given is None:
        return None
    metric, which = given if isinstance(given, tuple) and len(given) == 2 else (given, "lowest")
    if not isinstance(metric, str) or which not in ("lowest", "highest"):
        raise TypeError(
            f"sf.run.loop: best={given!r}; it is the name of a metric, 'eval/loss', of which the lowest is best, or "
            f"('eval/accuracy', 'highest')"
        )
    if metric.startswith("eval/") and not any(metric.startswith(f"{name}/") for name in evaluations):
        raise ValueError(f"sf.run.loop: best={given!r}, and no evaluate= gives that metric")
    return Best(metric, which == "highest")


def compared(best: Best | None, evaluation: str, found: Mapping[str, Any]) -> None:
    """Raises ValueError, if an evaluation does not give the metric that is said to be of it."""
    if best is not None and best.metric.startswith(f"{evaluation}/"):
        name = best.metric.removeprefix(f"{evaluation}/")
        if name not in found:
            raise ValueError(f"sf.run.loop: best={best.metric!r}, and {evaluation} gives {listed(found)}")


@dataclass
class Keeping:
    """What stays.

    Attributes:
        newest: how many of the newest; None for all.
        best: the metric by which the best is known.
        values: of that metric, by step, as the first rank has them.
    """

    newest: int | None
    best: Best | None
    values: dict[int, float] = field(default_factory=dict)

    def known(self, step: int, steps: list[int], history: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
        """The values of steps with a checkpoint, of which `step` has just been taken.

        Raises:
            ValueError: no step has such a metric.
        """
        if self.best is None:
            return {}
        found = history.get(self.best.metric, {})
        taken = [name for name, series in history.items() if step in series and not name.startswith("eval/")]
        if taken and not found and not self.best.metric.startswith("eval/"):
            raise ValueError(f"sf.run.loop: best={self.best.metric!r}, and the metrics of a step are {listed(taken)}")
        new = {n: found[n] for n in (*steps, step) if n in found}
        return {n: x for n, x in (self.values | new).items() if not math.isnan(x)}

    def packed(self) -> str:
        """The values as JSON, with the metric's name."""
        return json.dumps([None if self.best is None else self.best.metric, sorted(self.values.items())])

    def recall(self, packed: str) -> None:
        """Goes on with what a checkpoint says."""
        metric, values = json.loads(packed)
        if self.best is not None and metric == self.best.metric:
            self.values = dict(values)

    def surplus(self, folder: Path, values: Mapping[int, float]) -> list[Path]:
        """What does not stay of what runs have made in a folder. A link is nobody's to follow, or to delete."""
        if self.newest is None:
            return []
        own = {path: step for path, step in steps_in(folder).items() if not path.is_symlink() and _made(path)}
        here = {step: values[step] for step in own.values() if step in values}
        best = None if self.best is None else self.best.of(here)
        return [path for path in list(own)[: -self.newest] if own[path] != best]


def _made(path: Path) -> bool:
    """Whether it is a whole checkpoint of a run, under the name that it was given there.

    One that is torn stays: somebody may want to mend it.
    """
    found = intact(path)
    if isinstance(found, str) or found.numbers.get("step") != step_of(path):
        return False
    return all(isinstance(found.numbers.get(name), kind) for name, kind in HEAD.items())
