"""Writes a checkpoint: a file for each rank, and the final name when all is on disk.

A file is a sequence of `torch.save` items, one for each part of a tensor.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint import folders, replicas
from shardfn.checkpoint.contents import Scalar, contents
from shardfn.checkpoint.disk import Item
from shardfn.checkpoint.manifest import Chunk, Manifest
from shardfn.checkpoint.replicas import Place as CopyPlace
from shardfn.checkpoint.team import CheckpointError, team_of
from shardfn.checkpoint.tensor_bytes import as_bytes, crc, most_of, pieces
from shardfn.collectives.late_checks import late_checks
from shardfn.quoting import findings
from shardfn.shards.boxes import Box
from shardfn.tiers import copying
from shardfn.tiers.copying import arrivals
from shardfn.tiers.tensors import ALIGNMENT, DiskExtent, File, FileRange, place_of

Surplus = Callable[[Path], list[Path]]
_log = logging.getLogger("shardfn")
STEP = 2**23  # bytes after which the kernel is told to start writing to disk


class Writer:
    """A rank's file; `written` is the manifest of its contents."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.name, self.written = f"__{rank}_0.distcp", Manifest()
        self._file = (folder / self.name).open("w+b", buffering=0)
        self._error: Exception | None = None
        self._crc = self._at = self._sent = 0

    def tensor(self, name: str, values: torch.Tensor, box: Box) -> None:
        """Appends a part of a tensor."""
        offset, before = self._at, self._crc
        self._save(_own_storage(values))
        if self._at - self._sent >= STEP:  # the kernel starts to write pages that it is told are not needed in memory
            os.posix_fadvise(self._file.fileno(), self._sent, self._at - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = self._at
        chunk = Chunk(box, self.name, offset, self._at - offset, self._begin_of_data(offset), before, self._crc)
        self.written.chunks.setdefault(name, []).append(chunk)

    def number(self, name: str, value: Scalar) -> None:
        """Appends a number or a string, which only torch's loaders read from here."""
        offset = self._at
        self._save(value)
        self.written.numbers[name] = value
        self.written.places[name] = self.name, offset, self._at - offset

    def end(self) -> Manifest:
        """Syncs and closes the file; returns its manifest."""
        os.fsync(self._file.fileno())
        self._file.close()
        self.written.files[self.name] = self._at, self._crc
        return self.written

    def close(self) -> None:
        """Closes the file without syncing, if `end` has not been called."""
        self._file.close()

    def write(self, content: Any) -> int:
        """Called by torch.save: writes, and updates the checksum. An OSError is kept for `_save` to raise."""
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
        """May be called by torch.save."""

    def _save(self, value: Any) -> None:
        try:
            torch.save(value, self)  # type: ignore[arg-type]  # it only writes
        except RuntimeError:  # torch's own error for a failed write; `_error` says more
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error

    def _begin_of_data(self, offset: int) -> int:
        """The offset of the elements in an item at `offset`: a zip archive without compression."""
        item = Item(self._file.fileno(), offset, self._at - offset)
        with zipfile.ZipFile(io.BufferedReader(item)) as archive:
            (info,) = [record for record in archive.infolist() if record.filename.endswith("/data/0")]
        header = os.pread(self._file.fileno(), 30, offset + info.header_offset)
        return (
            info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        )


def _own_storage(values: torch.Tensor) -> torch.Tensor:
    """The same elements in a CPU storage that holds nothing else, without a copy if they are contiguous on the CPU."""
    content = as_bytes(values)
    if len(content) == 0:
        return torch.empty(values.shape, dtype=values.dtype, device="cpu")
    return torch.frombuffer(content.numpy(), dtype=torch.uint8).view(values.dtype).view(values.shape)


# --- by all ranks ---


class Save:
    """One call of `save`.

    Args:
        path: of the checkpoint.
        state: the tree to save.
        overwrite: whether it may replace a checkpoint.
        surplus: returns the checkpoints in a folder to delete once this one is complete; called on the first rank.
        check_ownership: raises if this process may no longer write; called on the first rank before it creates or
            renames anything.
    """

    def __init__(
        self,
        path: Path,
        state: Any,
        overwrite: bool,
        surplus: Surplus,
        check_ownership: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path.absolute()  # the program may change its working directory before it is written
        self.contents, self.overwrite = contents(state, shared=True), overwrite
        self.surplus, self.ours = surplus, check_ownership
        self.folder = folders.staging_path(self.path, "writing")
        self.team = team_of(self.contents.grids)
        self.digests = replicas.digests(self.contents)  # here, as training may go on when `write` runs
        self.stopped = threading.Event()
        self.failed: Exception | None = None  # raised on all ranks when they next meet
        try:
            late_checks().read(wait=True)  # what is wrong must not be saved
        except RuntimeError as error:
            self.failed = error

    def copy(self) -> None:
        """Replaces the tensors by copies, so that training may change the originals."""
        flat_tree = self.contents
        try:
            copies = snapshot_of([box.values for box in flat_tree.boxes])
            flat_tree.boxes = [replace(box, values=copy) for box, copy in zip(flat_tree.boxes, copies, strict=True)]
            flat_tree.plain = {name: copying.clone(x.cpu()) for name, x in flat_tree.plain.items()}
        except (OSError, RuntimeError) as error:
            self.failed = error

    def drop_tensors(self) -> None:
        """Drops references to tensors and copies once writing has ended, so that their memory can be reused."""
        self.contents.boxes.clear()
        self.contents.plain.clear()

    def _check_stopped(self) -> None:
        if self.stopped.is_set():
            raise CheckpointError(f"save {self.path}: this rank has failed meanwhile")

    def write(self) -> None:
        """Writes everything to disk, and then renames it to its path."""
        task = f"save {self.path}"
        with folders.discarding(self.folder) if self.team.rank == 0 else contextlib.nullcontext():
            alone = self._agreed(self.team.run_and_gather(task, self._begin))
            written = self.team.run_and_gather(task, lambda: self._write_local(alone))
            self._check_stopped()
            self.team.first(task, lambda: self._end(written, alone))

    def _begin(self) -> tuple[bool, int, dict[str, tuple[Any, int]], dict[CopyPlace, int]]:
        """Whether the path is taken, a digest of what ranks must have in common, and digests of what may differ.

        The last are of whole tensors by name, and of this rank's copies of flat shards by place.
        """
        flat_tree, is_occupied = self.contents, False
        if self.failed is not None:
            raise self.failed
        if self.team.rank == 0:
            self.ours()
            replaces = self.overwrite and folders.is_checkpoint(self.path) and not self.path.is_symlink()
            is_occupied = os.path.lexists(self.path) and not replaces
            if not is_occupied:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                folders.tidy(self.path.parent)
                self.folder.mkdir()
        plain: dict[str, tuple[Any, int]] = {name: (tuple(x.shape), crc(x)) for name, x in flat_tree.plain.items()}
        own_numbers = {name: flat_tree.numbers[name] for name in flat_tree.by_rank if name in flat_tree.numbers}
        plain |= {name: ((), zlib.crc32(f"{type(x).__name__} {x!r}".encode())) for name, x in own_numbers.items()}
        digest = zlib.crc32(repr(sorted(self._in_common().items())).encode())
        return is_occupied, digest, plain, replicas.summary(self.digests)

    def _in_common(self) -> dict[str, str]:
        """The facts that must be equal on all ranks, by name."""
        flat_tree = self.contents
        facts = {name: str(kind) for name, kind in flat_tree.tensors.items()}
        facts |= {name: f"{type(value).__name__} {value!r}" for name, value in flat_tree.numbers.items()}
        facts |= {name: f"by rank {facts[name].split(' ')[0]}" for name in flat_tree.by_rank}
        return {"the path": str(self.path), **facts}

    def _agreed(self, summaries: list[tuple[bool, int, dict[str, tuple[Any, int]], dict[CopyPlace, int]]]) -> list[str]:
        """Names whose values differ between ranks and may, so each rank saves its own. Raises the same on all ranks."""
        if summaries[0][0]:
            advice = (
                "is not a checkpoint, or is a link: pass another path"
                if self.overwrite
                else "pass overwrite=True, or another path"
            )
            raise FileExistsError(f"{self.path} exists{', and ' if self.overwrite else ': '}{advice}")
        if len({digest for _, digest, *_ in summaries}) > 1:
            self._differ(self.team.gathered(self._in_common()))
        plain = summaries[0][2]
        differing = [name for name in plain if any(digests[name] != plain[name] for *_, digests, _ in summaries)]
        differing += replicas.differing(self.digests, [places for *_, places in summaries], self.team)
        wrong = [name for name in differing if name not in self.contents.by_rank]
        if wrong:
            raise ValueError(f"save {self.path}: {replicas.advice(wrong, 'save ByRank(value), which keeps each')}")
        return differing

    def _differ(self, facts: list[dict[str, str]]) -> None:
        lines, nothing = [], "nothing of this name"
        for rank, other in enumerate(facts):
            names = [name for name in {**facts[0], **other} if facts[0].get(name) != other.get(name)]
            lines += [
                f"{name}: rank 0 has {facts[0].get(name, nothing)}, rank {rank} {other.get(name, nothing)}"
                for name in names
            ]
        raise ValueError(
            f"save {self.path}: ranks differ: {findings(lines)}. What each rank has its own of goes into ByRank(...)"
        )

    def _copies(self, name: str) -> int:
        """The number of values of an entry that differs between ranks."""
        copy = self.contents.copies.get(name)
        return self.team.size if copy is None else copy.count

    def _write_local(self, alone: list[str]) -> Manifest:
        """Writes this rank's file; returns its manifest."""
        flat_tree, group = self.contents, self.team
        if not self.folder.is_dir():
            raise OSError(f"this rank does not see {self.folder}, which rank 0 made: all ranks need one file system")
        with contextlib.closing(Writer(self.folder, group.rank)) as writer:
            for part, values in zip(flat_tree.boxes, arrivals(part.values for part in flat_tree.boxes), strict=True):
                self._check_stopped()
                index = flat_tree.copies[part.name].index if part.name in flat_tree.by_rank else 0
                if part.name in alone:
                    saved_name = _of_rank(part.name, index)
                    writer.written.tensors[saved_name] = flat_tree.tensors[part.name]
                    writer.tensor(saved_name, values, part.box)
                elif index == 0:  # of equal copies that may differ, the first
                    writer.tensor(part.name, values, part.box)
            load = [0] * group.size
            for name, x in flat_tree.plain.items():
                turn = load.index(min(load))
                load[turn] += x.numel() * x.element_size() + 4096
                if name in alone or turn == group.rank:
                    saved_name = _of_rank(name, group.rank) if name in alone else name
                    writer.written.tensors[saved_name] = flat_tree.tensors[name]
                    for box, piece in pieces(x, most_of(x)):
                        self._check_stopped()
                        writer.tensor(saved_name, copying.read(piece), box)
            for name, value in flat_tree.numbers.items():
                if name in alone or group.rank == 0:
                    writer.number(_of_rank(name, group.rank) if name in alone else name, value)
            return writer.end()

    def _end(self, written: list[Manifest], alone: list[str]) -> None:
        """Merges the manifests of all ranks, and publishes the checkpoint."""
        flat_tree, size = self.contents, self.team.size
        manifest = Manifest(
            tensors={name: kind for name, kind in flat_tree.tensors.items() if name not in alone},
            by_rank={name: self._copies(name) for name in sorted(alone)},
            about=folders.about(self.path.parent, size, flat_tree.exact),
        )
        for part in written:
            manifest.add(part)
        keys = {name: key for name, key in flat_tree.keys.items() if name not in alone}
        for name in alone:
            *outer, last = flat_tree.keys[name]
            keys |= {_of_rank(name, i): (*outer, _of_rank(str(last), i)) for i in range(self._copies(name))}
        for name in manifest.tensors:
            if flaw := manifest.flaw(name):
                raise CheckpointError(f"{name}: {flaw}: was the tree made on this mesh?")
        self.ours()
        folders.completed(self.folder, self.path, manifest, keys)
        try:
            for path in self.surplus(self.path.parent):
                folders.spare(path)
        except CheckpointError as error:  # the new checkpoint is complete, so this is no reason to fail
            _log.warning("%s is saved, and older ones could not be looked at: %s", self.path, error)


def _of_rank(name: str, index: int) -> str:
    """The name of one rank's value of an entry, or of one copy of a flat shard's parameter."""
    return f"{name}.rank{index}"


# --- copies of tensors that training may change meanwhile ---


_memory: list[Tensor] = []
_files: dict[tuple[int, str], File] = {}  # by process and folder; kept for the next call, as `_memory` is


def snapshot_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors to memory that is kept for the next call; adjacent ones are copied at once.

    Raises:
        OSError: the disk has no room for copies of tensors on it.
        RuntimeError: reading or writing fails.
    """
    places = [place_of(x) for x in tensors]
    in_memory = iter(_in_memory([x for x, place in zip(tensors, places, strict=True) if place is None]))
    on_disk = iter(_on_disk([(x, place) for x, place in zip(tensors, places, strict=True) if place is not None]))
    return [next(in_memory if place is None else on_disk) for place in places]


def _on_disk(tensors: list[tuple[Tensor, DiskExtent]]) -> list[Tensor]:
    spans: dict[FileRange, tuple[int, int]] = {}
    for _, place in tensors:
        low, high = spans.get(place.stretch, (place.start, place.stop))
        spans[place.stretch] = min(low, place.start) // ALIGNMENT * ALIGNMENT, max(high, place.stop)
    copies: dict[FileRange, Tensor] = {}
    for x, (stretch, *_) in tensors:
        low, high = spans[stretch]
        if stretch not in copies:
            key = os.getpid(), stretch.file.folder  # a file must not be shared with another process
            if key not in _files:
                _files[key] = File(stretch.file.folder, "snapshot")
            copies[stretch] = copying.clone(_bytes_of(x)[low:high], _files[key])
    return [
        copies[stretch][start - spans[stretch][0] : stop - spans[stretch][0]].view(x.dtype).view(x.shape)
        for x, (stretch, start, stop, _) in tensors
    ]


def _bytes_of(x: Tensor) -> Tensor:
    """A tensor's whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _in_memory(tensors: list[Tensor]) -> list[Tensor]:
    runs: list[_CopiedRange] = []
    places = []
    for values in tensors:
        start = int(values.storage_offset()) * values.element_size()
        stop = start + values.numel() * values.element_size()
        last = runs[-1] if runs else None
        if (
            last is None
            or last.bytes.data_ptr() != values.untyped_storage().data_ptr()
            or not 0 <= start - last.stop <= _GAP
        ):
            begin = -(-(last.begin + last.stop - last.start) // 64) * 64 if last else 0
            last = _CopiedRange(_bytes_of(values), start, stop, begin)
            runs.append(last)
        last.stop = stop
        places.append(last.begin + start - last.start)
    total = runs[-1].begin + runs[-1].stop - runs[-1].start if runs else 0
    devices = {run.bytes.device for run in runs if run.bytes.device.type != "cpu"}
    if not _memory or _memory[0].numel() < total or (devices and not _memory[0].is_pinned()):
        _memory[:] = [torch.empty(total, dtype=torch.uint8, pin_memory=bool(devices), device="cpu")]
    for run in runs:
        copy = _memory[0][run.begin : run.begin + run.stop - run.start]
        copy.copy_(run.bytes[run.start : run.stop], non_blocking=True)
    for device in devices:  # one wait for all copies of a device
        torch.get_device_module(device).current_stream(device).synchronize()
    return [
        _memory[0][begin_of_copy : begin_of_copy + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        for begin_of_copy, x in zip(places, tensors, strict=True)
    ]


@dataclass
class _CopiedRange:
    """Bytes `start` to `stop` of a storage, which are copied to `begin` on."""

    bytes: Tensor
    start: int
    stop: int
    begin: int


_GAP = 4096  # gaps of at most so many bytes are copied along with their neighbors
