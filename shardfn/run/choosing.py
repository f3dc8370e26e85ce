"""Which checkpoint a run goes on from. One that cannot be read, or is not whole, is never passed over in silence."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardfn.checkpoint.disk import sync
from shardfn.checkpoint.folders import aside, intact, names_in, restored
from shardfn.checkpoint.manifest import MANIFEST
from shardfn.checkpoint.team import CheckpointError, Team
from shardfn.checkpoint.verifying import verify
from shardfn.quoting import findings

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
