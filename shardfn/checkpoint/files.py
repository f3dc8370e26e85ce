"""A checkpoint on disk: torch.distributed.checkpoint's files, and a manifest by which a torn one is known.

A folder holds `__<rank>_0.distcp`, one after another what `torch.save` makes of each part of a tensor; `.metadata`, by
which torch's own loaders find them; and `manifest.json`, by which this one does: every entry and part, with a running
CRC-32 of each file before and behind it, so that the last is the file's, and each part can be checked alone. The
manifest ends in a CRC-32 of its own. It is written last, in a folder that gets its name when all is on the disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import sys
import time
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint.boxes import Box
from shardfn.checkpoint.contents import Kind, Scalar, as_bytes
from shardfn.checkpoint.team import CheckpointError
from shardfn.compat import dcp

MANIFEST, METADATA = "manifest.json", ".metadata"
FORMAT = "shardfn checkpoint 1"
STEP = 2**23  # bytes after which the disk begins


@dataclass(frozen=True)
class Chunk:
    """Where a part of a tensor is: `length` bytes of a file from `offset` on, of which its elements begin at `data`.

    `before` and `after` are the file's CRC-32 up to there, and up to its end.
    """

    box: Box
    file: str
    offset: int
    length: int
    data: int = 0
    before: int = 0
    after: int = 0


@dataclass
class Manifest:
    """What a checkpoint holds.

    Attributes:
        tensors: their kinds by name.
        chunks: the parts of each, disjoint.
        numbers: and strings.
        by_rank: name -> ranks that have their own, under `name.rank0` and so on.
        files: name -> bytes and CRC-32.
        about: when it was made, by how many ranks, and its number in the folder.
    """

    tensors: dict[str, Kind] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    numbers: dict[str, Scalar] = field(default_factory=dict)
    by_rank: dict[str, int] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


class Writer:
    """One file of a checkpoint, as it grows."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.crc, self.at = name, 0, 0
        self._file = (folder / name).open("w+b", buffering=0)
        self._error: Exception | None = None
        self._sent = 0

    def tensor(self, values: torch.Tensor, box: Box) -> Chunk:
        """Appends a part of a tensor."""
        offset, before = self.at, self.crc
        self._save(_alone(values))
        if self.at - self._sent >= STEP:  # the disk may begin: it starts to write what is not wanted in memory
            os.posix_fadvise(self._file.fileno(), self._sent, self.at - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = self.at
        return Chunk(box, self.name, offset, self.at - offset, self._begin_of_data(offset), before, self.crc)

    def number(self, value: Scalar) -> tuple[str, int, int]:
        """Appends a number or a string, for readers other than this one: file, offset, length."""
        offset = self.at
        self._save(value)
        return self.name, offset, self.at - offset

    def _save(self, value: Any) -> None:
        try:
            torch.save(value, self)  # type: ignore[arg-type]  # it only writes
        except RuntimeError:  # torch tells of it in its own words
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error

    def write(self, content: Any) -> int:
        """What torch.save calls."""
        view = memoryview(content)
        self.crc = zlib.crc32(view, self.crc)
        self.at += len(view)
        rest = view
        try:
            while rest and self._error is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._error = error
        return len(view)

    def flush(self) -> None:
        """What torch.save may call."""

    def _begin_of_data(self, offset: int) -> int:
        """Where the elements begin in what torch.save wrote there: a zip archive without compression."""
        tail = min(self.at - offset, 2048)
        content = os.pread(self._file.fileno(), tail, self.at - tail)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:  # it counts from the end
            (info,) = [one for one in archive.infolist() if one.filename.endswith("/data/0")]
        begin = info.header_offset + self.at - tail - offset
        header = os.pread(self._file.fileno(), 30, offset + begin)
        return begin + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")

    def end(self) -> tuple[int, int]:
        """Waits until all is on the disk; bytes and CRC-32."""
        os.fsync(self._file.fileno())
        self._file.close()
        return self.at, self.crc

    def close(self) -> None:
        """Gives up."""
        self._file.close()


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The same elements on the CPU, in a storage that holds nothing else; in the same memory where they lie there."""
    content = as_bytes(values)
    if len(content) == 0:
        return torch.empty(values.shape, dtype=values.dtype)
    return torch.frombuffer(content.numpy(), dtype=torch.uint8).view(values.dtype).view(values.shape)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """To the disk, with everything else that is in the folder."""
    body = {
        "format": FORMAT,
        "byteorder": sys.byteorder,
        "about": manifest.about,
        "files": manifest.files,
        "numbers": {name: _packed(value) for name, value in manifest.numbers.items()},
        "by_rank": manifest.by_rank,
        "tensors": {
            name: {
                "dtype": str(kind.dtype).removeprefix("torch."),
                "shape": kind.shape,
                "chunks": [
                    [c.box.offsets, c.box.sizes, c.file, c.offset, c.length, c.data, c.before, c.after]
                    for c in manifest.chunks.get(name, [])
                ],
            }
            for name, kind in manifest.tensors.items()
        },
    }
    text = json.dumps(body, indent=0, separators=(",", ":"))[:-2].encode() + b',\n"crc32":'
    write_whole(folder / MANIFEST, text + _end(text))


def write_metadata(
    folder: Path, manifest: Manifest, keys: dict[str, tuple[Any, ...]], numbers: dict[str, tuple[str, int, int]]
) -> None:
    """The file by which torch's loaders find what is there."""
    found = dcp.checkpoint_metadata(
        {
            name: (kind.dtype, kind.shape, [(c.box.offsets, c.box.sizes, c.file, c.offset, c.length) for c in chunks])
            for name, kind in manifest.tensors.items()
            for chunks in [manifest.chunks.get(name, [])]
        },
        numbers,
        keys,
    )
    content = pickle.dumps(found)
    write_whole(folder / METADATA, content)
    manifest.files[METADATA] = len(content), zlib.crc32(content)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint of shardfn: {error.strerror}: {path}") from error
    text, mark, end = content.rpartition(b',\n"crc32":')
    if not mark or end != _end(text + mark):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")
    body = json.loads(content)
    if body["format"] != FORMAT or body["byteorder"] != sys.byteorder:
        raise CheckpointError(
            f"{path} is {body['format']!r}, {body['byteorder']} endian; this reads {FORMAT!r}, {sys.byteorder} endian"
        )
    unknown = {one["dtype"] for one in body["tensors"].values() if not hasattr(torch, one["dtype"])}
    if unknown:
        raise CheckpointError(
            f"{path} has tensors of {', '.join(sorted(unknown))}, which torch {torch.__version__} lacks"
        )
    tensors = {name: Kind(getattr(torch, one["dtype"]), tuple(one["shape"])) for name, one in body["tensors"].items()}
    chunks = {
        name: [Chunk(Box(tuple(offsets), tuple(sizes)), *rest) for offsets, sizes, *rest in one["chunks"]]
        for name, one in body["tensors"].items()
    }
    numbers = {name: _unpacked(value) for name, value in body["numbers"].items()}
    files = {name: (size, crc) for name, (size, crc) in body["files"].items()}
    return Manifest(tensors, chunks, numbers, body["by_rank"], files, body["about"])


def intact(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint whose files are all there, in full length; None for anything else."""
    try:
        manifest = read_manifest(folder)
        whole = all((folder / name).stat().st_size == size for name, (size, _) in manifest.files.items())
    except (CheckpointError, OSError):
        return None
    return manifest if whole else None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one, whole or not, of this module or of torch.distributed.checkpoint."""
    return (folder / MANIFEST).exists() or (folder / METADATA).exists()


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints in a folder that are whole, oldest first."""
    if not root.is_dir():
        return []
    found = []
    replaced = (folder.name[1:].removesuffix(".replaced") for folder in root.glob(".*.replaced"))
    names = {folder.name for folder in root.iterdir() if not folder.name.startswith(".") and folder.is_dir()}
    for path in (root / name for name in names | set(replaced)):
        manifest = intact(restored(path))
        if manifest is not None:
            found.append((manifest.about["number"], path))
    return [folder for _, folder in sorted(found)]


def aside(path: Path, what: str) -> Path:
    """Where something that belongs to a checkpoint is while it is not, or no more, one."""
    return path.parent / f".{path.name}.{what}"


def publish(folder: Path, path: Path) -> None:
    """Gives a folder its name, and what had it another one until then."""
    sync(folder)
    old = aside(path, "replaced")
    if path.exists():
        discard(old)
        path.rename(old)
    folder.rename(path)
    sync(path.parent)
    discard(old)


def restored(path: Path) -> Path:
    """The path, or where its checkpoint is if a process died while it was replaced."""
    old = aside(path, "replaced")
    return old if not path.exists() and old.exists() else path


def discard(folder: Path) -> None:
    """Deletes a folder, whose name nobody takes for a checkpoint's meanwhile."""
    folder = restored(folder)
    if not folder.exists():
        return
    if not folder.name.startswith("."):
        away = aside(folder, "deleting")
        discard(away)
        folder = folder.rename(away)
    shutil.rmtree(folder)


def tidy(root: Path, keep: int | None) -> None:
    """Deletes what dead processes left, and all but the newest `keep` checkpoints."""
    for folder in root.glob(".*.*"):
        if folder.suffix in (".writing", ".deleting") and folder.is_dir():
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
    for folder in checkpoints(root)[:-keep] if keep else []:
        discard(folder)


def about(root: Path, ranks: int) -> dict[str, Any]:
    """What a new checkpoint in this folder says of itself."""
    known = [intact(restored(path)) for path in checkpoints(root)]
    number = 1 + max((one.about["number"] for one in known if one is not None), default=0)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"number": number, "made": made, "ranks": ranks, "torch": torch.__version__}


def write_whole(path: Path, content: bytes) -> None:
    """A file that is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _end(text: bytes) -> bytes:
    return b"%d}\n" % zlib.crc32(text)


def _packed(value: Scalar) -> Any:
    return {"complex": [value.real, value.imag]} if isinstance(value, complex) else value


def _unpacked(value: Any) -> Scalar:
    return complex(*value["complex"]) if isinstance(value, dict) else value
