"""Training state to a folder, which is a checkpoint when all of it is on the disk, and nothing before."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from shardfn.checkpoint import folders, snapshots
from shardfn.checkpoint.contents import Scalar, contents, crc, most_of, pieces
from shardfn.checkpoint.manifest import Manifest
from shardfn.checkpoint.team import CheckpointError, Team, on_each_rank, team_of
from shardfn.checkpoint.writer import Writer
from shardfn.mesh import waiting
from shardfn.quoting import findings, listed, short_errors
from shardfn.tiers import copying
from shardfn.tiers.copying import arrivals

Busy = Literal["wait", "refuse"]
Surplus = Callable[[Path], list[Path]]
_log = logging.getLogger("shardfn")


@waiting.during("sf.checkpoint.save")
@short_errors
def save(path: str | os.PathLike[str], state: Any, *, keep: int | None = None, overwrite: bool = False) -> None:
    """Writes training state, on all ranks together, to a folder that all of them see.

    The format is torch.distributed.checkpoint's, under true parameter names and whole shapes, so its loaders read it.
    Each rank writes its own pieces, and its share of what several hold; nothing is gathered. In addition to its shards
    a rank needs 64 MB of memory, also where these are on disk, of which 8 MB are read at a time.

    Either the folder is there and whole when this returns, or it raised an error and what was there before is
    untouched. A process that dies leaves at most a hidden folder next to it, which the next `save` there removes.

    Args:
        path: of the checkpoint, such as `runs/1/step-00100`. Its parent holds one run's checkpoints.
        state: any pytree of flat shards, tensors of any dtype, numbers, strings and generators: parameters, optimizer
            state, step. Tensors, numbers and strings are the same on every rank; see `ByRank`.
        keep: how many of the newest checkpoints stay in the parent folder afterwards, 1 or more; None for all.
        overwrite: replace a checkpoint of this name, which stays until the new one is whole.

    Raises:
        CheckpointError: what could not be written, and on which ranks; an earlier `save_async` that failed.
        FileExistsError: there is something of this name.
        TypeError, ValueError: what is in the tree cannot be saved, or differs between ranks.

    Example:
        ``save(f"runs/1/step-{step:05}", {"params": params, "state": state, "step": step}, keep=3)``
    """
    finish()
    on_each_rank(lambda: Save(Path(path), state, overwrite, keeping(keep))).write()


class Pending:
    """A checkpoint that `save_async` is writing.

    Attributes:
        path: of the checkpoint.
        error: why it was not written, until `wait` has raised it; None if nothing is wrong so far.
        ended: when it was over, on the clock of `time.monotonic`; None until then.

    Example:
        ``pending = save_async(path, state); ...; pending.wait()``
    """

    def __init__(self, save: Save, asks: Team) -> None:
        self.path, self.asks = save.path, asks
        self.error: Exception | None = None
        self.ended: float | None = None
        self._save = save
        # A process that fails must not wait for it: others would wait for that process.
        self._thread = threading.Thread(target=self._write, name=f"checkpoint {self.path.name}", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            with waiting.during("sf.checkpoint.save_async"):
                self._save.write()
        except Exception as error:
            self.error = error
            _log.error("the checkpoint %s was not written: %s", self.path, error)
        finally:
            self._save.forget()
            self.ended = time.monotonic()

    def done(self) -> bool:
        """Whether it is over, written or failed. It does not wait."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Gives it up, and waits a moment until the thread has seen it.

        One that was still inside torch when the interpreter ends would abort the process.
        """
        self._save.stopped.set()
        self._thread.join(_MOMENT)

    def wait(self) -> None:
        """Waits until it is whole.

        Raises:
            CheckpointError: it could not be written.
            FileExistsError, ValueError: as `save` does; each error is raised once.
        """
        self._thread.join()
        _forget(self)
        if self.error is not None:
            error, self.error = self.error, None
            raise error


@waiting.during("sf.checkpoint.save_async")
@short_errors
def save_async(
    path: str | os.PathLike[str],
    state: Any,
    *,
    keep: int | None = None,
    overwrite: bool = False,
    busy: Busy = "wait",
) -> Pending:
    """Writes training state in the background: training may go on, and change it, as soon as this returns.

    It first copies this rank's pieces to memory on the CPU, which later calls use again: as many bytes as the rank's
    shards and plain tensors have. What is on disk is copied there, which takes 20 MB of memory, as many bytes again on
    that disk, and the time to read and write them. A program that ends without an error waits for its last checkpoint.

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
        TypeError, ValueError: what is in the tree cannot be saved. What `save` finds by comparing ranks is found in the
            background.

    Example:
        ``save_async(f"runs/1/step-{step:05}", {"params": params, "state": state, "step": step}, keep=3)``
    """
    if busy not in ("wait", "refuse"):
        raise ValueError(f'busy={busy!r}; it is "wait" or "refuse"')
    if busy == "refuse":
        _refuse(Path(path))
    return begin(lambda: Save(Path(path), state, overwrite, keeping(keep)))


def begin(made: Callable[[], Save]) -> Pending:
    """Writes in the background. Raises as `save_async` does."""
    finish()
    begun = on_each_rank(made)
    begun.copy()
    pending = Pending(begun, team_of(begun.found.grids, "ask"))
    _pending.append(pending)
    _wait_at_exit()
    return pending


_pending: list[Pending] = []


def finish() -> None:
    """Waits for a checkpoint that is being written in the background.

    Raises:
        CheckpointError: it could not be written.
    """
    while _pending:
        _pending[0].wait()


@functools.cache
def _wait_at_exit() -> None:
    """A program that ends well ends when its last checkpoint is whole. Called when groups exist, so it runs before."""

    def leave() -> None:
        if getattr(sys, "last_value", None) is None:
            with contextlib.suppress(Exception):  # the log has it
                finish()
        for pending in _pending:
            pending.stop()

    atexit.register(leave)


def _forget(pending: Pending) -> None:
    with contextlib.suppress(ValueError):
        _pending.remove(pending)


def _refuse(path: Path) -> None:
    """All ranks refuse if one is still writing."""
    for pending in _pending:
        if any(pending.asks.gathered(not pending.done())):
            raise CheckpointError(f"{path}: {pending.path} is still being written")


_MOMENT = 2.0  # seconds for which a program that fails waits for the thread that writes


def keeping(keep: int | None) -> Surplus:
    """What does not stay, where the newest do.

    Raises:
        ValueError: less than one stays.
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"keep={keep!r}; it is how many checkpoints stay, an integer of 1 or more, or None for all")
    return functools.partial(folders.older, keep=keep)


def anybodys() -> None:
    """A folder is open to all."""


class Save:
    """One call of `save`.

    Args:
        path: of the checkpoint.
        state: what is saved.
        overwrite: whether it may replace one.
        surplus: of the folder, what is deleted when it is whole; the first rank asks.
        ours: raises where nothing may be written any more; the first rank asks before it makes or renames anything.
    """

    def __init__(
        self, path: Path, state: Any, overwrite: bool, surplus: Surplus, ours: Callable[[], None] = anybodys
    ) -> None:
        self.path = path.absolute()  # the program may go to another folder in the meantime
        self.found, self.overwrite = contents(state, shared=True), overwrite
        self.surplus, self.ours = surplus, ours
        self.folder = folders.aside(self.path, "writing")
        self.team = team_of(self.found.grids)
        self.stopped = threading.Event()
        self.failed: Exception | None = None  # of which all ranks hear when they meet

    def copy(self) -> None:
        """Goes on with copies of what there is now."""
        found = self.found
        try:
            copies = snapshots.taken([one.values for one in found.boxes])
            found.boxes = [replace(one, values=copy) for one, copy in zip(found.boxes, copies, strict=True)]
            found.plain = {name: copying.clone(x.cpu()) for name, x in found.plain.items()}
        except (OSError, RuntimeError) as error:
            self.failed = error

    def forget(self) -> None:
        """It is over: what it has may be used for others."""
        self.found.boxes.clear()
        self.found.plain.clear()

    def _go_on(self) -> None:
        if self.stopped.is_set():
            raise CheckpointError(f"save {self.path}: this rank has failed meanwhile")

    def write(self) -> None:
        """Everything to the disk, and then its name."""
        what = f"save {self.path}"
        try:
            alone = self._agreed(self.team.together(what, self._begin))
            written = self.team.together(what, lambda: self._own(alone))
            self._go_on()
            self.team.first(what, lambda: self._end(written, alone))
        except BaseException:
            if self.team.rank == 0:
                with contextlib.suppress(OSError):
                    folders.discard(self.folder)
            raise

    def _begin(self) -> tuple[bool, int, dict[str, tuple[Any, int]]]:
        """Whether the name is taken; what this rank has, and its plain tensors and own numbers, in short."""
        found, taken = self.found, False
        if self.failed is not None:
            raise self.failed
        if self.team.rank == 0:
            self.ours()
            replaces = self.overwrite and folders.is_checkpoint(self.path) and not self.path.is_symlink()
            taken = os.path.lexists(self.path) and not replaces
            if not taken:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                folders.tidy(self.path.parent)
                self.folder.mkdir()
        plain: dict[str, tuple[Any, int]] = {name: (tuple(x.shape), crc(x)) for name, x in found.plain.items()}
        plain |= {name: ((), _digest(found.numbers[name])) for name in found.by_rank if name in found.numbers}
        return taken, zlib.crc32(repr(sorted(self._in_common().items())).encode()), plain

    def _in_common(self) -> dict[str, str]:
        """What must be the same on all ranks, by name."""
        found = self.found
        facts = {name: str(kind) for name, kind in found.tensors.items()}
        facts |= {name: f"{type(value).__name__} {value!r}" for name, value in found.numbers.items()}
        facts |= {name: f"by rank {facts[name].split(' ')[0]}" for name in found.by_rank}
        return {"the path": str(self.path), **facts}

    def _agreed(self, every: list[tuple[bool, int, dict[str, tuple[Any, int]]]]) -> list[str]:
        """What ranks differ in and may: each keeps its own. All ranks meet the same."""
        if every[0][0]:
            what = (
                "is not a checkpoint, or is a link: pass another path"
                if self.overwrite
                else "pass overwrite=True, or another path"
            )
            raise FileExistsError(f"{self.path} exists{', and ' if self.overwrite else ': '}{what}")
        if len({digest for _, digest, _ in every}) > 1:
            self._differ(self.team.gathered(self._in_common()))
        plain = every[0][2]
        differ = [name for name in plain if any(one[name] != plain[name] for *_, one in every)]
        wrong = [name for name in differ if name not in self.found.by_rank]
        if wrong:
            raise ValueError(
                f"save {self.path}: {listed(wrong)} {'have' if len(wrong) > 1 else 'has'} other numbers on some "
                f"ranks than on others; what each rank has its own of goes into ByRank(...)"
            )
        return differ

    def _differ(self, every: list[dict[str, str]]) -> None:
        wrong, nothing = [], "nothing of this name"
        for rank, theirs in enumerate(every):
            names = [name for name in {**every[0], **theirs} if every[0].get(name) != theirs.get(name)]
            wrong += [
                f"{name}: rank 0 has {every[0].get(name, nothing)}, rank {rank} {theirs.get(name, nothing)}"
                for name in names
            ]
        raise ValueError(
            f"save {self.path}: ranks differ: {findings(wrong)}. What each rank has its own of goes into ByRank(...)"
        )

    def _own(self, alone: list[str]) -> Manifest:
        """Writes this rank's file; what is in it."""
        found, team = self.found, self.team
        if not self.folder.is_dir():
            raise OSError(f"this rank does not see {self.folder}, which rank 0 made: all ranks need one file system")
        with contextlib.closing(Writer(self.folder, team.rank)) as writer:
            for one, values in zip(found.boxes, arrivals(one.values for one in found.boxes), strict=True):
                self._go_on()
                writer.tensor(one.name, values, one.box)
            load = [0] * team.size
            for name, x in found.plain.items():
                turn = load.index(min(load))
                load[turn] += x.numel() * x.element_size() + 4096
                if name in alone or turn == team.rank:
                    own = _of_rank(name, team.rank) if name in alone else name
                    writer.written.tensors[own] = found.tensors[name]
                    for box, piece in pieces(x, most_of(x)):
                        self._go_on()
                        writer.tensor(own, copying.read(piece), box)
            for name, value in found.numbers.items():
                if name in alone or team.rank == 0:
                    writer.number(_of_rank(name, team.rank) if name in alone else name, value)
            return writer.end()

    def _end(self, written: list[Manifest], alone: list[str]) -> None:
        """What all ranks wrote becomes a checkpoint."""
        found, size = self.found, self.team.size
        manifest = Manifest(
            tensors={name: kind for name, kind in found.tensors.items() if name not in alone},
            by_rank=dict.fromkeys(sorted(alone), size),
            about=folders.about(self.path.parent, size),
        )
        for one in written:
            manifest.add(one)
        keys = {name: key for name, key in found.keys.items() if name not in alone}
        for name in alone:
            *outer, last = found.keys[name]
            keys |= {_of_rank(name, rank): (*outer, _of_rank(str(last), rank)) for rank in range(size)}
        for name in manifest.tensors:
            if flaw := manifest.flaw(name):
                raise CheckpointError(f"{name}: {flaw}: was the tree made on this mesh?")
        self.ours()
        folders.completed(self.folder, self.path, manifest, keys)
        try:
            for path in self.surplus(self.path.parent):
                folders.spare(path)
        except CheckpointError as error:  # it is whole, and that is what matters
            _log.warning("%s is saved, and older ones could not be looked at: %s", self.path, error)


def _of_rank(name: str, rank: int) -> str:
    """The name of what a rank has its own of."""
    return f"{name}.rank{rank}"


def _digest(value: Scalar) -> int:
    return crc(torch.tensor(list(f"{type(value).__name__} {value!r}".encode()), dtype=torch.uint8))
