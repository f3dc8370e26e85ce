"""A run's checkpoints: what is in them, when they are written, and how the newest whole one is gone on from."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardfn import checkpoint
from shardfn.checkpoint.contents import contents
from shardfn.checkpoint.folders import source_of
from shardfn.checkpoint.saving import begin, finish
from shardfn.checkpoint.team import CheckpointError, Team, team_of
from shardfn.checkpoint.writing import Save
from shardfn.quoting import findings
from shardfn.run.agreeing import ranks_of
from shardfn.run.folder import HEAD, Keeping
from shardfn.run.locking import Lock
from shardfn.run.randomness import grids
from shardfn.transforms.fitting import recall, remembered

MOMENT = 3.0  # seconds for which a run that failed lets its last checkpoint go on
_log = logging.getLogger("shardfn")


@dataclass(frozen=True)
class Origin:
    """What makes a run the same one: with these, and the step, it goes on as if it had never stopped.

    Attributes:
        seed: of its random numbers.
        batches: the identity of its batches, as JSON.
    """

    seed: int
    batches: str

    def check(self, found: Origin, path: Path) -> None:
        """Raises ValueError, if a checkpoint is of another run."""
        if self.seed != found.seed:
            raise ValueError(
                f"sf.run.loop: seed={self.seed}, and the run in {path} has seed={found.seed}: pass that one, or "
                f"another folder for another run"
            )
        if self.batches != found.batches:
            theirs, mine = _facts(found.batches), _facts(self.batches)
            differ = [f"{name} was {theirs.get(name)!r} and is {mine.get(name)!r}" for name in {**theirs, **mine}
                      if theirs.get(name) != mine.get(name)]  # fmt: skip
            raise ValueError(
                f"sf.run.loop: the batches are not those of the run in {path}: {findings(differ)}. Steps after it "
                f"would get other rows: give the batches as they were, or pass another folder for another run"
            )


def _facts(batches: str) -> dict[str, Any]:
    found = json.loads(batches)
    return found if isinstance(found, dict) else {"identity": found}


def identity_of(batches: Any) -> str:
    """What a feed says of its rows, as JSON; `null` of one that says nothing.

    Raises:
        TypeError: it is not a dict of plain values.
    """
    found = getattr(batches, "identity", None)
    if found is not None and not isinstance(found, dict):
        raise TypeError(f"sf.run.loop: batches.identity is a {type(found).__name__}, not a dict of plain values")
    try:
        return json.dumps(found, sort_keys=True)
    except TypeError as error:
        raise TypeError(f"sf.run.loop: batches.identity is a dict of plain values, and {error}") from None


def tree(state: Any, step: int, origin: Origin, parts: str = "", best: str = "") -> dict[str, Any]:
    """What a checkpoint holds."""
    run = {"seed": origin.seed, "batches": origin.batches, "parts": parts, "best": best}
    return {"state": state, "step": step, "run": run}


def loaded(path: Path, state: Any, origin: Origin) -> tuple[Any, dict[str, Any]]:
    """The state in a checkpoint, written into that one's memory, and what it has besides.

    Raises:
        CheckpointError: it is of another model, or damaged.
        ValueError: it is of another run.
    """
    # The numbers first: what is of another run must not overwrite the state.
    finish()
    team = team_of(grids(state), "run")
    head = team.together(f"load {path}", lambda: _head(path) if team.rank == 0 else {})[0]
    origin.check(Origin(head["run.seed"], head["run.batches"]), path)
    if team.rank == 0:
        _tell_changed(path, state)
    found = checkpoint.load(path, tree(state, 0, origin))["state"]
    _recall(team, head["run.parts"])
    return found, head


def _tell_changed(path: Path, state: Any) -> None:
    """Says which numbers of optimizers are other ones in the program: those in the checkpoint go on."""
    theirs = source_of(path).numbers
    ours = contents({"state": state}, shared=False).numbers
    for name, mine in ours.items():
        if ".numbers." in name and name in theirs and theirs[name] != mine:
            _log.warning(
                "%s has %s = %r, which goes on, and the program has %r: to change a number of a run, let it be a "
                "function of the step", path, name, theirs[name], mine,
            )  # fmt: skip


def _head(path: Path) -> dict[str, Any]:
    """What a checkpoint has besides the state, by name."""
    numbers = source_of(path).numbers
    lacks = [name for name, kind in HEAD.items() if not isinstance(numbers.get(name), kind)]
    if lacks:
        raise CheckpointError(
            f"it is not of sf.run.loop, or of that of another version of shardfn: it has no {' and no '.join(lacks)}. "
            f"Pass another folder; sf.checkpoint.load reads what is in this one"
        )
    return {name: numbers[name] for name in HEAD}


def _parts(state: Any) -> str:
    """In how many parts batches have fitted, on all ranks of a state, as JSON; once, where all ranks know the same."""
    team = team_of(grids(state), "run")
    every = team.gathered(remembered(ranks_of(team)), "comparing the parts of batches")
    return json.dumps(every[:1] if len(set(every)) == 1 else every)


def _recall(team: Team, parts: str) -> None:
    every = json.loads(parts)
    known = every[0] if len(every) == 1 else every[team.rank] if len(every) == team.size else "[]"
    recall(known, ranks_of(team))


@dataclass
class Saver:
    """Writes a run's checkpoints in the background.

    Attributes:
        folder: in which they are.
        keeping: which of them stay.
        origin: of the run.
        lock: on the folder, on the first rank.
        saved: the step of the last one.
        seconds: that the slowest one took.
        error: why the last one was not written, if `look` has seen that.
    """

    folder: Path
    keeping: Keeping
    origin: Origin
    saved: int | None = None
    seconds: float = 0.0
    error: Exception | None = None
    pending: checkpoint.Pending | None = None
    began: float = field(default=0.0)
    lock: Lock = field(init=False)

    def __post_init__(self) -> None:
        self.lock = Lock(self.folder)

    def path(self, step: int) -> Path:
        """Of the checkpoint after so many steps."""
        return self.folder / f"step-{step:08}"

    def save(self, state: Any, step: int, history: Mapping[str, Mapping[int, float]]) -> None:
        """Begins to write one; it waits for the one before.

        Raises:
            CheckpointError, TypeError, ValueError: as `checkpoint.save_async` does.
        """
        self.finish()
        steps = [] if self.saved is None else [self.saved]
        self.keeping.values = self.values(team_of(grids(state), "run"), step, steps, history)
        self.began, self.saved = time.monotonic(), step
        held = tree(state, step, self.origin, _parts(state), self.keeping.packed())
        surplus = partial(self.keeping.surplus, values=dict(self.keeping.values))
        self.pending = begin(lambda: Save(self.path(step), held, True, surplus, self.lock.check))

    def values(
        self, team: Team, step: int, steps: list[int], history: Mapping[str, Mapping[int, float]]
    ) -> dict[int, float]:
        """Of the metric that is compared, as the first rank has them.

        Raises:
            CheckpointError: it is no metric of the run.
        """
        if self.keeping.best is None:
            return {}
        return team.together("compare checkpoints", lambda: self.keeping.known(step, steps, history))[0]

    def look(self) -> None:
        """Sees whether the last one is over, and how long it took; it does not wait."""
        if self.pending is not None and self.pending.done():
            try:
                self.finish()
            except Exception as error:  # other ranks see it at another step
                self.error = error

    def finish(self) -> None:
        """Waits until the last one is whole.

        Raises:
            CheckpointError: it could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()
            self.seconds = max(self.seconds, (pending.ended or time.monotonic()) - self.began)

    def needs(self) -> float:
        """Seconds to wait for the last one and to write another, with something to spare."""
        return (1.5 if self.pending is None else 2.5) * self.seconds

    def abandon(self) -> None:
        """Gives up the last one after a moment, where a rank has failed: it may be writing, or may have gone."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        until = time.monotonic() + MOMENT
        while not pending.done() and time.monotonic() < until:
            time.sleep(0.01)
        pending.stop()
        if pending.done():
            with contextlib.suppress(Exception):  # the log has it
                pending.wait()
