"""Saves training state to a folder that is a complete checkpoint, or does not exist."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from shardfn.checkpoint import folders
from shardfn.checkpoint.team import CheckpointError, RankGroup, on_each_rank, team_of
from shardfn.checkpoint.writing import Save, Surplus
from shardfn.compat import devices
from shardfn.local_paths import local_path
from shardfn.mesh import waiting
from shardfn.tracebacks import api_boundary

Busy = Literal["wait", "refuse"]
_log = logging.getLogger("shardfn")


@waiting.during("sf.checkpoint.save")
@api_boundary
def save(path: str | os.PathLike[str], state: Any, *, keep: int | None = None, overwrite: bool = False) -> None:
    """Writes training state, on all ranks together, to a folder that all of them see.

    The format is torch.distributed.checkpoint's, under true parameter names and whole shapes, so its loaders read it.
    Each rank writes its own pieces, and its share of replicated ones; nothing is gathered. In addition to its shards a
    rank needs 64 MB of memory, also for shards on disk, of which 8 MB are read at a time.

    When this returns, the folder exists and is complete; if it raises, what was there before is unchanged. A process
    that dies leaves at most a hidden folder next to it, which the next `save` there removes.

    Args:
        path: of the checkpoint, such as `runs/1/step-00100`. Its parent holds one run's checkpoints.
        state: any pytree of flat shards, tensors of any dtype, numbers, strings and generators: parameters, optimizer
            state, step. Tensors, numbers and strings are the same on every rank; see `ByRank`.
        keep: how many of the newest checkpoints stay in the parent folder afterwards, 1 or more; None for all.
        overwrite: replace a checkpoint of this name, which stays until the new one is complete.

    Raises:
        CheckpointError: writing failed, on the ranks that it names; or an earlier `save_async` failed.
        FileExistsError: the path exists.
        TypeError, ValueError: the tree has contents that cannot be saved, or differs between ranks.

    Example:
        ``save(f"runs/1/step-{step:05}", {"params": params, "state": state, "step": step}, keep=3)``
    """
    wait_for_saves()
    on_each_rank(lambda: Save(local_path(path, "checkpoint.save: path"), state, overwrite, keeping(keep))).write()


class Pending:
    """A checkpoint that `save_async` is writing.

    Attributes:
        path: of the checkpoint.
        error: why it was not written, until `wait` has raised it; None if nothing has gone wrong so far.
        ended: when writing ended, on the clock of `time.monotonic`; None until then.

    Example:
        ``pending = save_async(path, state); ...; pending.wait()``
    """

    def __init__(self, save: Save, asks: RankGroup) -> None:
        self.path, self.asks = save.path, asks
        self.error: Exception | None = None
        self.ended: float | None = None
        self._save, self._as_here = save, devices.as_here()
        # A daemon, since a failing process must not wait for it: other processes would wait for that one.
        self._thread = threading.Thread(target=self._write, name=f"checkpoint {self.path.name}", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            self._as_here()
            with waiting.during("sf.checkpoint.save_async"):
                self._save.write()
        except Exception as error:
            self.error = error
            _log.error("the checkpoint %s was not written: %s", self.path, error)
        finally:
            self._save.drop_tensors()
            self.ended = time.monotonic()

    def done(self) -> bool:
        """Whether writing has ended, with success or an error; does not wait."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stops writing, and waits a moment for the thread to notice.

        A thread inside torch when the interpreter ends would abort the process.
        """
        self._save.stopped.set()
        self._thread.join(_MOMENT)

    def wait(self) -> None:
        """Waits until the checkpoint is complete.

        Raises:
            CheckpointError: it could not be written.
            FileExistsError, ValueError: as `save` does; each error is raised once.
        """
        self._thread.join()
        with contextlib.suppress(ValueError):  # it has been waited for before
            _pending.remove(self)
        if self.error is not None:
            error, self.error = self.error, None
            raise error


@waiting.during("sf.checkpoint.save_async")
@api_boundary
def save_async(
    path: str | os.PathLike[str], state: Any, *, keep: int | None = None, overwrite: bool = False, busy: Busy = "wait"
) -> Pending:
    """Writes training state in the background: training may go on and change it as soon as this returns.

    It first copies this rank's pieces to memory on the CPU, which later calls reuse: as many bytes as the rank's shards
    and plain tensors have. Tensors on disk are copied on that disk, which takes 20 MB of memory, as many bytes again on
    disk, and the time to read and write them. A program that ends without an error waits for its last checkpoint.

    Args:
        path: of the checkpoint, as for `save`.
        state: a tree as `save` takes one.
        keep: how many of the newest checkpoints stay afterwards, 1 or more; None for all.
        overwrite: replace a checkpoint of this name.
        busy: what to do while an earlier one is still being written: `"wait"` for it, or `"refuse"`.

    Returns:
        A `Pending`. An error in the background is raised by its `wait`, or else by the next call of this module.

    Raises:
        CheckpointError: an earlier one is still being written and `busy="refuse"`, or it failed.
        TypeError, ValueError: the tree has contents that cannot be saved. Differences between ranks are found in the
            background.

    Example:
        ``save_async(f"runs/1/step-{step:05}", {"params": params, "state": state, "step": step}, keep=3)``
    """
    if busy not in ("wait", "refuse"):
        raise ValueError(f'busy must be "wait" or "refuse", got {busy!r}')
    for pending in _pending if busy == "refuse" else ():
        if any(pending.asks.gathered(not pending.done())):  # all ranks refuse if one is still writing
            raise CheckpointError(f"{Path(path)}: {pending.path} is still being written")
    return begin(lambda: Save(local_path(path, "checkpoint.save_async: path"), state, overwrite, keeping(keep)))


def begin(make: Callable[[], Save]) -> Pending:
    """Starts to write in the background. Raises as `save_async` does."""
    wait_for_saves()
    save = on_each_rank(make)
    save.copy()
    pending = Pending(save, team_of(save.contents.grids, "ask"))
    _pending.append(pending)
    _wait_at_exit()
    return pending


_pending: list[Pending] = []


def wait_for_saves() -> None:
    """Waits for checkpoints that are being written in the background.

    Raises:
        CheckpointError: one could not be written.
    """
    while _pending:
        _pending[0].wait()


@functools.cache
def _wait_at_exit() -> None:
    """Makes a program that ends without an error wait for its last checkpoint, before process groups end."""

    def leave() -> None:
        if getattr(sys, "last_value", None) is None:
            with contextlib.suppress(Exception):  # the error has been logged
                wait_for_saves()
        for pending in _pending:
            pending.stop()

    atexit.register(leave)


_MOMENT = 2.0  # seconds that `stop` waits for the writing thread


def keeping(keep: int | None) -> Surplus:
    """The function that finds the checkpoints to delete, where the newest `keep` stay.

    Raises:
        ValueError: `keep` is not 1 or more.
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"keep must be the number of checkpoints that stay, 1 or more, or None for all, got {keep!r}")
    return functools.partial(folders.older, keep=keep)
