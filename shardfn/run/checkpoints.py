"""A run's checkpoints: their contents, writing them in the background, and resuming from one."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardfn import checkpoint
from shardfn.checkpoint.contents import contents
from shardfn.checkpoint.folders import source_of
from shardfn.checkpoint.saving import begin, wait_for_saves
from shardfn.checkpoint.team import CheckpointError, RankGroup, team_of
from shardfn.checkpoint.writing import Save
from shardfn.quoting import findings
from shardfn.run.agreeing import ranks_of
from shardfn.run.folder import HEAD, Keeping, Lock
from shardfn.run.randomness import grids
from shardfn.transforms.fitting import recall, remembered

MOMENT = 3.0  # seconds that a failed run waits for its last checkpoint to complete
_log = logging.getLogger("shardfn")


@dataclass(frozen=True)
class Origin:
    """Identifies a run: a run with the same origin and step continues as if it had never stopped.

    Attributes:
        seed: of its random numbers.
        batches: the identity of its batches, as JSON.
    """

    seed: int
    batches: str

    def check(self, saved: Origin, path: Path) -> None:
        """Raises ValueError if a checkpoint belongs to another run."""
        if self.seed != saved.seed:
            raise ValueError(
                f"sf.run.loop: seed={self.seed}, and the run in {path} has seed={saved.seed}: pass that one, or "
                f"another folder for another run"
            )
        if self.batches != saved.batches:
            stored, current = _facts(saved.batches), _facts(self.batches)
            differ = [f"{name} was {stored.get(name)!r} and is {current.get(name)!r}" for name in {**stored, **current}
                      if stored.get(name) != current.get(name)]  # fmt: skip
            raise ValueError(
                f"sf.run.loop: the batches are not those of the run in {path}: {findings(differ)}. Steps after it "
                f"would get different rows. Pass the same batches, or another folder for another run"
            )


def _facts(batches: str) -> dict[str, Any]:
    identity = json.loads(batches)
    return identity if isinstance(identity, dict) else {"identity": identity}


def identity_of(batches: Any) -> str:
    """The `identity` attribute of batches as JSON; `null` if they have none.

    Raises:
        TypeError: it is not a dict of plain values.
    """
    identity = getattr(batches, "identity", None)
    if identity is not None and not isinstance(identity, dict):
        raise TypeError(f"sf.run.loop: batches.identity is a {type(identity).__name__}, not a dict of plain values")
    try:
        return json.dumps(identity, sort_keys=True)
    except TypeError as error:
        raise TypeError(f"sf.run.loop: batches.identity is a dict of plain values, and {error}") from None


def tree(state: Any, step: int, origin: Origin, parts: str = "", best: str = "") -> dict[str, Any]:
    """The pytree that is saved as a checkpoint."""
    run = {"seed": origin.seed, "batches": origin.batches, "parts": parts, "best": best}
    return {"state": state, "step": step, "run": run}


def loaded(path: Path, state: Any, origin: Origin) -> tuple[Any, dict[str, Any]]:
    """Loads a checkpoint into the memory of `state`; returns the state and the checkpoint's head.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
        ValueError: it is of another run.
    """
    # The head is checked first: a checkpoint of another run must not overwrite the state.
    wait_for_saves()
    group = team_of(grids(state), "run")
    head = group.run_and_gather(f"load {path}", lambda: _run_info(path) if group.rank == 0 else {})[0]
    origin.check(Origin(head["run.seed"], head["run.batches"]), path)
    if group.rank == 0:
        stored = source_of(path).numbers
        for name, value in contents({"state": state}, shared=False).numbers.items():
            if ".numbers." in name and name in stored and stored[name] != value:  # a hyperparameter of the optimizer
                _log.warning(
                    "%s has %s = %r, which goes on, and the program has %r: to change a number of a run, let it be a "
                    "function of the step", path, name, stored[name], value,
                )  # fmt: skip
    loaded_state = checkpoint.load(path, tree(state, 0, origin))["state"]
    parts = json.loads(head["run.parts"])
    local_parts = parts[0] if len(parts) == 1 else parts[group.rank] if len(parts) == group.size else "[]"
    recall(local_parts, ranks_of(group))
    return loaded_state, head


def _run_info(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint apart from the state, by name."""
    numbers = source_of(path).numbers
    lacks = [name for name, kind in HEAD.items() if not isinstance(numbers.get(name), kind)]
    if lacks:
        raise CheckpointError(
            f"it is not of sf.run.loop, or is of a different version of shardfn: it has no {' and no '.join(lacks)}. "
            f"Pass another folder; sf.checkpoint.load reads this one"
        )
    return {name: numbers[name] for name in HEAD}


@dataclass
class Saver:
    """Writes a run's checkpoints in the background.

    Attributes:
        folder: holds the checkpoints.
        keeping: decides which of them stay.
        origin: of the run.
        lock: on the folder, held by the first rank.
        saved: the step of the last checkpoint.
        seconds: the longest time that one took.
        error: why the last one could not be written, if `look` has found out.
        pending: the checkpoint that is being written.
        began: when it was begun.
        whole: called with path and step of each checkpoint that is complete.
    """

    folder: Path
    keeping: Keeping
    origin: Origin
    saved: int | None = None
    seconds: float = 0.0
    error: Exception | None = None
    pending: checkpoint.Pending | None = None
    began: float = field(default=0.0)
    whole: Callable[[Path, int], None] = field(default=lambda path, step: None)
    lock: Lock = field(init=False)

    def __post_init__(self) -> None:
        self.lock = Lock(self.folder)

    def path(self, step: int) -> Path:
        """The path of the checkpoint after `step` steps."""
        return self.folder / f"step-{step:08}"

    def save(self, state: Any, step: int, history: Mapping[str, Mapping[int, float]]) -> None:
        """Starts to write a checkpoint, after waiting for the one before.

        Raises:
            CheckpointError, TypeError, ValueError: as `checkpoint.save_async` does.
        """
        self.finish()
        steps = [] if self.saved is None else [self.saved]
        group = team_of(grids(state), "run")
        self.keeping.values = self.values(group, step, steps, history)
        self.began, self.saved = time.monotonic(), step
        # How many parts batches were split into to fit memory: one entry, or one for each rank if they differ.
        parts = group.gathered(remembered(ranks_of(group)), "comparing the parts of batches")
        parts_as_json = json.dumps(parts[:1] if len(set(parts)) == 1 else parts)
        content = tree(state, step, self.origin, parts_as_json, self.keeping.packed())
        surplus = partial(self.keeping.surplus, values=dict(self.keeping.values))
        self.pending = begin(lambda: Save(self.path(step), content, True, surplus, self.lock.check))

    def values(
        self, group: RankGroup, step: int, steps: list[int], history: Mapping[str, Mapping[int, float]]
    ) -> dict[int, float]:
        """The values of the metric that decides the best checkpoint, by step, as the first rank has them.

        Raises:
            CheckpointError: the run has no such metric.
        """
        if self.keeping.best is None:
            return {}
        return group.run_and_gather("compare checkpoints", lambda: self.keeping.known(step, steps, history))[0]

    def poll(self) -> None:
        """Notes without waiting whether the last checkpoint is complete, how long it took, and any error."""
        if self.pending is not None and self.pending.done():
            try:
                self.finish()
            except Exception as error:  # not raised, since other ranks notice it at another step
                self.error = error

    def finish(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()
            self.seconds = max(self.seconds, (pending.ended or time.monotonic()) - self.began)
            assert self.saved is not None, "it is the one that was written"
            self.whole(pending.path, self.saved)

    def needs(self) -> float:
        """An estimate, with a margin, of the seconds to finish the last checkpoint and to write another."""
        return (1.5 if self.pending is None else 2.5) * self.seconds

    def abandon(self) -> None:
        """Stops the last checkpoint, soon after a rank failed: that rank may still be writing, or be gone."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        until = time.monotonic() + MOMENT
        while not pending.done() and time.monotonic() < until:
            time.sleep(0.01)
        pending.stop()
        if pending.done():
            with contextlib.suppress(Exception):  # the error has been logged
                pending.wait()
