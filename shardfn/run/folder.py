"""A run's folder: which checkpoint to resume from, which checkpoints to delete, and its lock.

A checkpoint that cannot be read or is incomplete is never skipped silently. Only checkpoints that runs have made are
deleted. One run at a time has the folder; the kernel drops its lock when its process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardfn.checkpoint.disk import sync
from shardfn.checkpoint.folders import intact, names_in, path_status, restored, staging_path
from shardfn.checkpoint.manifest import MANIFEST
from shardfn.checkpoint.team import CheckpointError, RankGroup
from shardfn.checkpoint.verifying import verify
from shardfn.quoting import findings, listed

Resume = bool | Literal["previous"]
STEP = re.compile(r"step-(\d{8,})")
_log = logging.getLogger("shardfn")


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from.

    Attributes:
        path: of the newest complete checkpoint; None if there is none.
        torn: newer ones, with the reason why each is not complete.
    """

    path: Path | None
    torn: dict[Path, str]


def steps_in(folder: Path) -> dict[Path, int]:
    """The step of each entry named like a run's checkpoint, oldest first.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    steps = {folder / name: int(match[1]) for name in names_in(folder) if (match := STEP.fullmatch(name))}
    return dict(sorted(steps.items(), key=lambda entry: entry[1]))


def step_of(path: Path) -> int:
    """The step in the name of a run's checkpoint."""
    return int(path.name.removeprefix("step-"))


def newest_checkpoint(group: RankGroup, folder: Path, resume: Resume) -> Choice:
    """Finds the newest complete checkpoint in a folder, as the first rank sees it.

    Raises:
        CheckpointError: the folder or a checkpoint cannot be read; or a newer one is incomplete and `resume` is not
            `"previous"`; or all are incomplete. The same on every rank.
    """
    task = f"look for checkpoints in {folder}"
    return group.run_and_gather(
        task, lambda: _newest_checkpoint(folder, resume) if group.rank == 0 else Choice(None, {})
    )[0]


def _newest_checkpoint(folder: Path, resume: Resume) -> Choice:
    torn: dict[Path, str] = {}
    for path in reversed(steps_in(folder)):
        flaw = _flaw(path, every_byte=resume == "previous")
        if not flaw:
            break
        torn[path] = flaw
    else:
        path = None
    if torn and (path is None or resume != "previous"):
        raise CheckpointError(_refusal(torn, path))
    return Choice(path, torn)


def _flaw(path: Path, every_byte: bool) -> str:
    manifest = intact(restored(path))
    if isinstance(manifest, str):
        return manifest
    if "step" in manifest.numbers and manifest.numbers["step"] != step_of(path):
        return f"it is of step {manifest.numbers['step']}, and has another's name: rename it, or move it elsewhere"
    if not every_byte:
        return ""
    files = (*manifest.files, MANIFEST)  # files that somebody has added are not damage
    return "; ".join([f"{damage.file}: {damage.what}" for damage in verify(path).damage if damage.file in files][:3])


def _refusal(torn: dict[Path, str], path: Path | None) -> str:
    which = findings((f"{entry.name}: {flaw}" for entry, flaw in torn.items()))
    if path is None:
        return f"no checkpoint is whole ({which}). Nothing was deleted: mend one, or pass another folder for a new run"
    return (
        f"newer checkpoints than {path.name} are not whole ({which}). Nothing was deleted: mend them, or pass "
        f'resume="previous", which goes on from {path.name} if every byte of it is right, and puts them aside'
    )


def put_aside(group: RankGroup, torn: dict[Path, str]) -> None:
    """Renames incomplete checkpoints so that they no longer count as checkpoints, and logs it.

    Raises:
        CheckpointError: they cannot be renamed. The same on every rank.
    """

    def rename() -> None:
        for path, flaw in torn.items():
            target, number = staging_path(path, "damaged"), 1
            while os.path.lexists(target):
                target, number = staging_path(path, f"damaged.{number}"), number + 1
            restored(path).rename(target)
            _log.warning("%s is not whole, and not gone on from; it is now %s: %s", path, target.name, flaw)
        for folder in {path.parent for path in torn}:
            sync(folder)

    if torn:
        group.first(f"put {', '.join(path.name for path in torn)} aside", rename)


HEAD = {"step": int, "run.seed": int, "run.batches": str, "run.parts": str, "run.best": str}
"""Types of what a run's checkpoint holds besides the state, by name."""


@dataclass(frozen=True)
class Best:
    """The metric that decides which checkpoint is best.

    Attributes:
        metric: its name.
        highest: whether more is better.
    """

    metric: str
    highest: bool

    def best_step(self, values: Mapping[int, float]) -> int | None:
        """The step with the best value, the earliest of equals; None if there are no values."""
        sign = -1 if self.highest else 1
        return min(values, key=lambda step: (sign * values[step], step), default=None)


def best_of(best: Any, evaluations: Mapping[str, Any]) -> Best | None:
    """Checks the argument `best`.

    Raises:
        TypeError, ValueError: it has another form, or names a metric of an evaluation that is not made.
    """
    if best is None:
        return None
    metric, which = best if isinstance(best, tuple) and len(best) == 2 else (best, "lowest")
    if not isinstance(metric, str) or which not in ("lowest", "highest"):
        raise TypeError(
            f"sf.run.loop: best must be the name of a metric to minimize, such as 'eval/loss', or "
            f"('eval/accuracy', 'highest'), got {best!r}"
        )
    if metric.startswith("eval/") and not any(metric.startswith(f"{name}/") for name in evaluations):
        raise ValueError(f"sf.run.loop: best={best!r}, and no evaluate= gives that metric")
    return Best(metric, which == "highest")


def check_best_metric(best: Best | None, evaluation: str, metrics: Mapping[str, Any]) -> None:
    """Raises ValueError if an evaluation lacks the metric that `best` names."""
    if best is not None and best.metric.startswith(f"{evaluation}/"):
        name = best.metric.removeprefix(f"{evaluation}/")
        if name not in metrics:
            raise ValueError(f"sf.run.loop: best={best.metric!r}, and {evaluation} gives {listed(metrics)}")


@dataclass
class Keeping:
    """Decides which checkpoints stay.

    Attributes:
        newest: how many of the newest stay; None for all.
        best: the metric that decides which one is best and stays too.
        values: of that metric, by step, as the first rank has them.
    """

    newest: int | None
    best: Best | None
    values: dict[int, float] = field(default_factory=dict)

    def known(self, step: int, steps: list[int], history: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
        """The values of the metric at steps that have a checkpoint.

        Args:
            step: has just been taken.
            steps: earlier ones with a checkpoint whose values may have come since.
            history: the metrics of the run, by name and step.

        Raises:
            ValueError: steps have no such metric.
        """
        if self.best is None:
            return {}
        values_by_step = history.get(self.best.metric, {})
        names = [name for name, series in history.items() if step in series and not name.startswith("eval/")]
        if names and not values_by_step and not self.best.metric.startswith("eval/"):
            raise ValueError(f"sf.run.loop: best={self.best.metric!r}, and the metrics of a step are {listed(names)}")
        recent = {n: values_by_step[n] for n in (*steps, step) if n in values_by_step}
        return {n: x for n, x in (self.values | recent).items() if not math.isnan(x)}

    def packed(self) -> str:
        """The metric's name and its values as JSON."""
        return json.dumps([None if self.best is None else self.best.metric, sorted(self.values.items())])

    def recall(self, packed: str) -> None:
        """Restores the values from a checkpoint, if they are of the same metric."""
        metric, values = json.loads(packed)
        if self.best is not None and metric == self.best.metric:
            self.values = dict(values)

    def surplus(self, folder: Path, values: Mapping[int, float]) -> list[Path]:
        """The run checkpoints in a folder that should be deleted. Links are neither followed nor deleted."""
        if self.newest is None:
            return []
        steps = {path: step for path, step in steps_in(folder).items() if not path.is_symlink() and _is_of_run(path)}
        candidates = {step: values[step] for step in steps.values() if step in values}
        best = None if self.best is None else self.best.best_step(candidates)
        return [path for path in list(steps)[: -self.newest] if steps[path] != best]


def _is_of_run(path: Path) -> bool:
    """Whether a path is a complete checkpoint of a run, under its original name.

    An incomplete one is not deleted, since it may be possible to repair it.
    """
    manifest = intact(path)
    if isinstance(manifest, str) or manifest.numbers.get("step") != step_of(path):
        return False
    return all(isinstance(manifest.numbers.get(name), kind) for name, kind in HEAD.items())


# --- locking it for one run at a time ---


LOCK = ".lock"
HERE, ELSEWHERE = 3.0, 100.0  # seconds to wait for a run on this host to end, and on one that may be gone
NAMING = 2.0  # seconds to wait for a run that has taken the folder to write its name
SIZE = 2**12  # most bytes of the lock file that are read
BUSY = (errno.EACCES, errno.EAGAIN)  # another process holds the lock
LACKING = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # the file system has no locks
_held: dict[tuple[int, int, int], bytes] = {}  # by process and file: the kernel lets a process take its own lock again
_guard = threading.Lock()


class Lock:
    """A run's lock on the folder of its checkpoints, held by the first rank.

    It is a POSIX record lock, which worker processes do not inherit. Where the file system has no locks, the later run
    takes the folder, and the earlier one fails before its next write, since the file no longer has its content.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._file: int | None = None
        self._written = b""
        self._refused: OSError | None = None

    def acquire(self) -> None:
        """Takes the lock, waiting a while for another run to end. An OSError is only raised later, by `check`.

        Raises:
            CheckpointError: another run has the folder.
        """
        began, warned = time.monotonic(), False
        try:
            while not self._try():
                other, is_local = self._owner(self._content())
                if time.monotonic() - began > (HERE if is_local else ELSEWHERE):
                    raise CheckpointError(
                        f"{self.path.parent} belongs to another run, which has not ended: {other}. Give one of the two "
                        f"another folder, or end that one"
                        f"{'' if is_local else f'; if its host is gone, delete {self.path}'}"
                    )
                if not warned and not is_local:
                    warned = True
                    _log.warning("waiting up to %g s for the run that has %s: %s", ELSEWHERE, self.path.parent, other)
                time.sleep(0.05)
        except OSError as error:
            self._refused = error

    def check(self) -> None:
        """Raises CheckpointError if another run has taken the folder since, or if it cannot be written to."""
        # The file may have been deleted, say by a clean-up, and may be deleted again at any time: it is read once.
        while (
            (content := self._content()) != self._written and self._file is not None and path_status(self.path) is None
        ):
            self.release()
            self.acquire()
        if self._refused is not None:
            raise CheckpointError(f"{self.path.parent} cannot be written to: {self._refused.strerror}")
        if self._file is None or content != self._written:
            # The other run may be between emptying the file and writing its name into it.
            deadline = time.monotonic() + NAMING
            while not content and path_status(self.path) is not None and time.monotonic() < deadline:
                time.sleep(0.05)
                content = self._content()
            raise CheckpointError(f"{self.path.parent} belongs to another run now: {self._owner(content)[0]}")

    def release(self) -> None:
        """Releases the lock, and deletes its file if it is still this run's."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError, CheckpointError):  # a file that stays does not hinder the next run
                if self._is_current(file) and os.pread(file, SIZE, 0) == self._written:
                    self.path.unlink()
            _held.pop(_file_key(os.fstat(file)), None)
            os.close(file)

    def _try(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _guard:  # record locks are the process's: its threads are kept apart by `_held`
            status = path_status(self.path)
            if status is not None and _file_key(status) in _held:
                return False
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                # The other run may have deleted the file after it was opened here.
                if _try_lock(file, self.path) and self._is_current(file):
                    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
                    facts = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "mark": uuid.uuid4().hex}
                    self._written = json.dumps(facts).encode()
                    os.ftruncate(file, 0)
                    os.pwrite(file, self._written, 0)
                    self._file, _held[_file_key(os.fstat(file))] = file, self._written
            finally:
                if self._file is None:
                    os.close(file)
            return self._file is not None

    def _is_current(self, file: int | None = None) -> bool:
        """Whether `file`, by default the run's open file, is still the one at the path."""
        file, status = self._file if file is None else file, path_status(self.path)
        return file is not None and status is not None and _file_key(status) == _file_key(os.fstat(file))

    def _content(self) -> bytes:
        """The content of the lock file.

        Read through the open descriptor if there is one: closing a second one would drop this process's lock.
        """
        if self._file is not None and self._is_current():
            return os.pread(self._file, SIZE, 0)
        status = path_status(self.path)
        try:
            return b"" if status is None else _held.get(_file_key(status)) or self.path.read_bytes()
        except FileNotFoundError:  # the other run has ended meanwhile
            return b""

    def _owner(self, content: bytes) -> tuple[str, bool]:
        """Describes the process that wrote this content, and tells whether it is on this host."""
        try:
            facts = json.loads(content)
            host = facts["host"]
            return f"process {facts['pid']} on {host}, since {facts['since']}", host == socket.gethostname()
        except (ValueError, KeyError, TypeError):
            return f"{self.path} does not say which", True


def _file_key(status: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), status.st_dev, status.st_ino


def _try_lock(file: int, path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in BUSY:
            return False
        if error.errno not in LACKING:
            raise
        _log.warning("%s: %s: if two runs come to this folder, the earlier one will end", path, error.strerror)
    return True
