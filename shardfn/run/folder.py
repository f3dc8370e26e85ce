"""A run's folder: which checkpoint it goes on from, and which of them stay.

One that cannot be read, or is not whole, is never passed over in silence. What no run has made is never deleted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardfn.checkpoint.disk import sync
from shardfn.checkpoint.folders import aside, intact, names_in, restored
from shardfn.checkpoint.manifest import MANIFEST
from shardfn.checkpoint.team import CheckpointError, Team
from shardfn.checkpoint.verifying import verify
from shardfn.quoting import findings, listed

Resume = bool | Literal["previous"]
STEP = re.compile(r"step-(\d{8,})")
_log = logging.getLogger("shardfn")


@dataclass(frozen=True)
class Choice:
    """What there is to go on from.

    Attributes:
        path: of the newest whole checkpoint.
        torn: newer ones, and why they are not whole.
    """

    path: Path | None
    torn: dict[Path, str]


def steps_in(folder: Path) -> dict[Path, int]:
    """What has the name of a checkpoint of a run, oldest first, and its step.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    found = {folder / name: int(match[1]) for name in names_in(folder) if (match := STEP.fullmatch(name))}
    return dict(sorted(found.items(), key=lambda one: one[1]))


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint of a run."""
    return int(path.name.removeprefix("step-"))


def chosen(team: Team, folder: Path, resume: Resume) -> Choice:
    """The newest whole checkpoint in a folder, as the first rank sees it.

    Raises:
        CheckpointError: the folder or a checkpoint cannot be read; or a newer one is not whole, and `resume` does not
            say what then; or none is. The same on every rank.
    """
    what = f"look for checkpoints in {folder}"
    return team.together(what, lambda: _chosen(folder, resume) if team.rank == 0 else Choice(None, {}))[0]


def _chosen(folder: Path, resume: Resume) -> Choice:
    torn: dict[Path, str] = {}
    for path in reversed(steps_in(folder)):
        flaw = _flaw(path, every_byte=resume == "previous")
        if not flaw:
            break
        torn[path] = flaw
    else:
        path = None
    if torn and (path is None or resume != "previous"):
        raise CheckpointError(_said(torn, path))
    return Choice(path, torn)


def _flaw(path: Path, every_byte: bool) -> str:
    found = intact(restored(path))
    if isinstance(found, str):
        return found
    if "step" in found.numbers and found.numbers["step"] != step_of(path):
        return f"it is of step {found.numbers['step']}, and has another's name: rename it, or move it elsewhere"
    if not every_byte:
        return ""
    own = (*found.files, MANIFEST)  # what somebody has put beside them is no damage
    return "; ".join([f"{one.file}: {one.what}" for one in verify(path).damage if one.file in own][:3])


def _said(torn: dict[Path, str], path: Path | None) -> str:
    which = findings((f"{one.name}: {flaw}" for one, flaw in torn.items()))
    if path is None:
        return f"no checkpoint is whole ({which}). Nothing was deleted: mend one, or pass another folder for a new run"
    return (
        f"newer checkpoints than {path.name} are not whole ({which}). Nothing was deleted: mend them, or pass "
        f'resume="previous", which goes on from {path.name} if every byte of it is right, and puts them aside'
    )


def put_aside(team: Team, torn: dict[Path, str]) -> None:
    """Gives those that are not whole names under which nobody takes them for checkpoints, and says so.

    Raises:
        CheckpointError: they cannot be renamed. The same on every rank.
    """

    def rename() -> None:
        for path, flaw in torn.items():
            away = _free(path)
            restored(path).rename(away)
            _log.warning("%s is not whole, and not gone on from; it is now %s: %s", path, away.name, flaw)
        for folder in {path.parent for path in torn}:
            sync(folder)

    if torn:
        team.first(f"put {', '.join(path.name for path in torn)} aside", rename)


def _free(path: Path) -> Path:
    away, number = aside(path, "damaged"), 1
    while os.path.lexists(away):
        away, number = aside(path, f"damaged.{number}"), number + 1
    return away


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
