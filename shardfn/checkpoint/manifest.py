"""A checkpoint on disk: torch.distributed.checkpoint's files, and a manifest by which a torn one is known.

A folder holds `__<rank>_0.distcp`, one after another what `torch.save` makes of each part of a tensor; `.metadata`, by
which torch's own loaders find them; and `manifest.json`, by which this one does: every entry and part, with a running
CRC-32 of each file before and behind it, so that the last is the file's, and each part can be checked alone. The
manifest ends in a CRC-32 of its own. It is written last, in a folder that gets its name when all is on the disk.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint.boxes import Box, flaw
from shardfn.checkpoint.contents import Kind, Scalar
from shardfn.checkpoint.disk import write_whole
from shardfn.checkpoint.team import CheckpointError
from shardfn.compat import dcp
from shardfn.quoting import listed

MANIFEST, METADATA = "manifest.json", ".metadata"
FORMAT = "shardfn checkpoint 1"


@dataclass(frozen=True)
class Chunk:
    """Where a part of a tensor is: `length` bytes of a file from `offset` on, of which its elements begin at `data`.

    `before` and `after` are the file's CRC-32 up to there, and up to its end; `after` is None where nobody knows it.
    """

    box: Box
    file: str
    offset: int
    length: int
    data: int = 0
    before: int = 0
    after: int | None = None

    @property
    def stop(self) -> int:
        """Where its bytes end."""
        return self.offset + self.length


@dataclass
class Entries:
    """What files hold, by name.

    Attributes:
        tensors: their kinds.
        numbers: and strings.
        by_rank: of how many ranks each has its own, under `name.rank0` and so on.
        others: what cannot be loaded into a tree, and what it is.
    """

    tensors: dict[str, Kind] = field(default_factory=dict)
    numbers: dict[str, Scalar] = field(default_factory=dict)
    by_rank: dict[str, int] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)


@dataclass
class Manifest(Entries):
    """What a checkpoint holds.

    Attributes:
        chunks: the parts of each tensor, disjoint.
        files: name -> bytes and CRC-32.
        about: when it was made, by how many ranks, and its number in the folder.
        places: file, offset and length of each number, and of whatever else torch's loaders find: for these alone.
    """

    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    def add(self, other: Manifest) -> None:
        """Takes in what another one has, such as one file of the same checkpoint."""
        for name, chunks in other.chunks.items():
            self.chunks.setdefault(name, []).extend(chunks)
        self.tensors |= other.tensors
        self.numbers |= other.numbers
        self.places |= other.places
        self.files |= other.files

    def flaw(self, name: str) -> str:
        """Why the parts of a tensor do not make it up; "" if they do."""
        return flaw(self.tensors[name].shape, [chunk.box for chunk in self.chunks.get(name, [])])


@dataclass
class Source(Manifest):
    """Named tensors and numbers that can be read in part.

    Attributes:
        folder: where the files are.
        torchs: whether it is torch.distributed.checkpoint's, without checksums of its files.
    """

    folder: Path = Path()
    torchs: bool = False

    def identity(self) -> str:
        """The same for copies of a checkpoint, and for no other."""
        numbers = sorted(self.numbers.items())
        return f"{zlib.crc32(metadata_of(self.folder)):x} {numbers}" if self.torchs else f"{sorted(self.files.items())}"

    def keys(self) -> dict[str, tuple[Any, ...]]:
        """Names as the keys from the root of the tree, where these are known.

        Raises:
            CheckpointError: the file that has them is damaged.
        """
        content = metadata_of(self.folder)
        if not self.torchs and self.files[METADATA] != (len(content), zlib.crc32(content)):
            raise CheckpointError(f"{self.folder / METADATA} is damaged: its checksum does not fit")
        return dcp.read_checkpoint_keys(content)


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
                **({"meant": kind.meant} if kind.meant else {}),
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


def write_metadata(folder: Path, manifest: Manifest, keys: dict[str, tuple[Any, ...]]) -> None:
    """The file by which torch's loaders find what is there."""
    found = dcp.checkpoint_metadata(
        {
            name: (kind.dtype, kind.shape, [(c.box.offsets, c.box.sizes, c.file, c.offset, c.length) for c in chunks])
            for name, kind in manifest.tensors.items()
            for chunks in [manifest.chunks.get(name, [])]
        },
        manifest.places,
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
        raise CheckpointError(f"{folder} is not a checkpoint of shardfn: {error.strerror}: {path}") from error
    text, mark, end = content.rpartition(b',\n"crc32":')
    if not mark or end != _end(text + mark):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")
    try:
        return _read(path, json.loads(content))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def torchs(folder: Path) -> Source:
    """What the description of torch.distributed.checkpoint says; no other file is read.

    Raises:
        CheckpointError: it is damaged.
    """
    content = metadata_of(folder)
    try:
        described, places = dcp.read_checkpoint_metadata(content)
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error or type(error).__name__}") from error
    tensors = {name: Kind(dtype, tuple(shape)) for name, (dtype, shape, _) in described.items()}
    chunks = {
        name: [Chunk(Box(tuple(at), tuple(sizes)), *place) for at, sizes, *place in parts]
        for name, (_, _, parts) in described.items()
    }
    refuse_outside(folder / METADATA, [one.file for some in chunks.values() for one in some])
    refuse_outside(folder / METADATA, [file for file, *_ in places.values()])
    return Source(tensors, chunks=chunks, places=places, folder=folder, torchs=True)


def metadata_of(folder: Path) -> bytes:
    """The description by which torch's own loaders find what is there.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return (folder / METADATA).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error.strerror}") from error


def _read(path: Path, body: dict[str, Any]) -> Manifest:
    if body["format"] != FORMAT or body["byteorder"] != sys.byteorder:
        raise CheckpointError(
            f"{path} is {body['format']!r}, {body['byteorder']} endian; this reads {FORMAT!r}, {sys.byteorder} endian"
        )
    unknown = {one["dtype"] for one in body["tensors"].values() if not isinstance(_dtype(one), torch.dtype)}
    if unknown:
        raise CheckpointError(f"{path} has tensors of {listed(sorted(unknown))}, which torch {torch.__version__} lacks")
    tensors = {
        name: Kind(_dtype(one), tuple(one["shape"]), one.get("meant", "")) for name, one in body["tensors"].items()
    }
    chunks = {
        name: [Chunk(Box(tuple(offsets), tuple(sizes)), *rest) for offsets, sizes, *rest in one["chunks"]]
        for name, one in body["tensors"].items()
    }
    numbers = {name: _unpacked(value) for name, value in body["numbers"].items()}
    files = {name: (size, crc) for name, (size, crc) in body["files"].items()}
    refuse_outside(path, [*files, *(chunk.file for some in chunks.values() for chunk in some)])
    if type(body["about"]["number"]) is not int:
        raise CheckpointError(f"{path} is damaged: its number is {body['about']['number']!r}")
    for name, kind in tensors.items():
        _refuse_nonsense(name, kind, chunks[name])
    _refuse_others([*body["by_rank"].values(), *(n for pair in files.values() for n in pair)], "of ranks or a file")
    return Manifest(tensors, numbers, body["by_rank"], chunks=chunks, files=files, about=body["about"])


def _dtype(one: dict[str, Any]) -> Any:
    return getattr(torch, one["dtype"], None)


def _refuse_nonsense(name: str, kind: Kind, chunks: list[Chunk]) -> None:
    """Raises ValueError for sizes and places that are none, and elements that are not in their part."""
    for one in chunks:
        places = (*one.box.offsets, *one.box.sizes, one.offset, one.length, one.data, one.before, one.after)
        _refuse_others(places, f"of a part of {name}")
        if one.data + one.box.numel * kind.dtype.itemsize > one.length:
            raise ValueError(f"elements of {name} are not in their part")
    _refuse_others(kind.shape, f"in the shape of {name}")


def _refuse_others(numbers: Iterable[Any], what: str) -> None:
    wrong = [n for n in numbers if type(n) is not int or n < 0]
    if wrong:
        raise ValueError(f"a number {what} is {wrong[0]!r}")


def refuse_outside(path: Path, names: Iterable[str]) -> None:
    """Raises CheckpointError for a file that would be read from elsewhere than the folder of what names it."""
    folder = os.path.realpath(path.parent)
    for name in dict.fromkeys(names):
        if os.path.commonpath([folder, os.path.realpath(os.path.join(folder, name))]) != folder:
            raise CheckpointError(
                f"{path} names the file {name!r}, which is outside of its folder, and is not read: put the file itself "
                f"there, if you trust whoever made it"
            )


def _end(text: bytes) -> bytes:
    return b"%d}\n" % zlib.crc32(text)


def _packed(value: Scalar) -> Any:
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {type(value).__name__: list(map(_packed, value))} if isinstance(value, (tuple, list)) else value


def _unpacked(value: Any) -> Scalar:
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    return complex(*parts) if kind == "complex" else {"tuple": tuple, "list": list}[kind](map(_unpacked, parts))
