"""A checkpoint as it is written: a file for each rank, and a name when all of it is on the disk.

A file is what `torch.save` makes of each part of a tensor, one after another.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint import folders, snapshots
from shardfn.checkpoint.boxes import Box
from shardfn.checkpoint.contents import Scalar, as_bytes, contents, crc, most_of, pieces
from shardfn.checkpoint.manifest import Chunk, Manifest
from shardfn.checkpoint.team import CheckpointError, team_of
from shardfn.quoting import findings, listed
from shardfn.tiers import copying
from shardfn.tiers.copying import arrivals

Surplus = Callable[[Path], list[Path]]
_log = logging.getLogger("shardfn")
STEP = 2**23  # bytes after which the disk begins


class Writer:
    """A file that grows, and `written`: what is in it, as a manifest of its own."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.name, self.written = f"__{rank}_0.distcp", Manifest()
        self._file = (folder / self.name).open("w+b", buffering=0)
        self._error: Exception | None = None
        self._crc = self._at = self._sent = 0

    def tensor(self, name: str, values: torch.Tensor, box: Box) -> None:
        """Appends a part of a tensor."""
        offset, before = self._at, self._crc
        self._save(_alone(values))
        if self._at - self._sent >= STEP:  # the disk may begin: it starts to write what is not wanted in memory
            os.posix_fadvise(self._file.fileno(), self._sent, self._at - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = self._at
        chunk = Chunk(box, self.name, offset, self._at - offset, self._begin_of_data(offset), before, self._crc)
        self.written.chunks.setdefault(name, []).append(chunk)

    def number(self, name: str, value: Scalar) -> None:
        """Appends a number or a string, for readers other than this one."""
        offset = self._at
        self._save(value)
        self.written.numbers[name] = value
        self.written.places[name] = self.name, offset, self._at - offset

    def end(self) -> Manifest:
        """Waits until all is on the disk; what is in the file."""
        os.fsync(self._file.fileno())
        self._file.close()
        self.written.files[self.name] = self._at, self._crc
        return self.written

    def close(self) -> None:
        """Gives up, where it has not ended."""
        self._file.close()

    def write(self, content: Any) -> int:
        """What torch.save calls."""
        view = memoryview(content)
        self._crc = zlib.crc32(view, self._crc)
        self._at += len(view)
        rest = view
        try:
            while rest and self._error is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._error = error
        return len(view)

    def flush(self) -> None:
        """What torch.save may call."""

    def _save(self, value: Any) -> None:
        try:
            torch.save(value, self)  # type: ignore[arg-type]  # it only writes
        except RuntimeError:  # torch reports it in its own words
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error

    def _begin_of_data(self, offset: int) -> int:
        """Where the elements begin in what torch.save wrote there: a zip archive without compression."""
        tail = min(self._at - offset, 2048)
        content = os.pread(self._file.fileno(), tail, self._at - tail)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:  # it counts from the end
            (info,) = [one for one in archive.infolist() if one.filename.endswith("/data/0")]
        begin = info.header_offset + self._at - tail - offset
        header = os.pread(self._file.fileno(), 30, offset + begin)
        return begin + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The same elements on the CPU, in a storage that holds nothing else; in the same memory where they lie there."""
    content = as_bytes(values)
    if len(content) == 0:
        return torch.empty(values.shape, dtype=values.dtype)
    return torch.frombuffer(content.numpy(), dtype=torch.uint8).view(values.dtype).view(values.shape)


# --- by all ranks ---


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
        with folders.discarding(self.folder) if self.team.rank == 0 else contextlib.nullcontext():
            alone = self._agreed(self.team.together(what, self._begin))
            written = self.team.together(what, lambda: self._own(alone))
            self._go_on()
            self.team.first(what, lambda: self._end(written, alone))

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
        own = {name: found.numbers[name] for name in found.by_rank if name in found.numbers}
        plain |= {name: ((), zlib.crc32(f"{type(x).__name__} {x!r}".encode())) for name, x in own.items()}
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
