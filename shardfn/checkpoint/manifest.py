"""The files of a checkpoint: torch.distributed.checkpoint's, and a manifest that makes a torn one detectable.

A folder holds `__<rank>_0.distcp` files, each a sequence of `torch.save` items, one for each part of a tensor;
`.metadata`, which torch's loaders need; and `manifest.json`, which this one needs: every entry and part, with the
running CRC-32 of the file before and after each part, so that the last is the file's, and each part can be checked
alone. The manifest ends in its own CRC-32. It is written last, in a folder that gets its name when all is on disk.
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

from shardfn.checkpoint.contents import Scalar, TensorType
from shardfn.checkpoint.disk import write_whole
from shardfn.checkpoint.team import CheckpointError
from shardfn.compat import dcp
from shardfn.quoting import listed
from shardfn.shards.boxes import Box, flaw

MANIFEST, METADATA = "manifest.json", ".metadata"
FORMAT = "shardfn checkpoint 1"


@dataclass(frozen=True)
class Chunk:
    """The location of a part of a tensor in a file.

    Attributes:
        box: the part.
        file: name of the file.
        offset: first byte in it.
        length: number of bytes.
        data: byte within the part at which its elements begin.
        before: CRC-32 of the file up to `offset`.
        after: CRC-32 of the file up to the part's end; None if unknown.
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
        """The byte of the file after the part."""
        return self.offset + self.length


@dataclass
class Entries:
    """The entries of files, by name.

    Attributes:
        tensors: dtype and shape of each tensor.
        numbers: numbers and strings.
        by_rank: for entries that differ between ranks, the number of ranks; their values are at `name.rank0` and so on.
        others: entries that cannot be loaded into a tree, with a description.
    """

    tensors: dict[str, TensorType] = field(default_factory=dict)
    numbers: dict[str, Scalar] = field(default_factory=dict)
    by_rank: dict[str, int] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)


@dataclass
class Manifest(Entries):
    """The contents of a checkpoint.

    Attributes:
        chunks: the parts of each tensor, disjoint.
        files: name -> number of bytes and CRC-32.
        about: number in the folder, time of writing, ranks, and torch version.
        places: file, offset and length of each entry that is not a tensor, needed by torch's loaders only.
    """

    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    def add(self, other: Manifest) -> None:
        """Merges another manifest, such as that of one file of the same checkpoint."""
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
class TensorSource(Manifest):
    """Named tensors and numbers that can be read in part.

    Attributes:
        folder: where the files are.
        torchs: whether it is a checkpoint of torch.distributed.checkpoint, without checksums of its files.
    """

    folder: Path = Path()
    torchs: bool = False

    def identity(self) -> str:
        """A text that is equal for copies of a checkpoint, and different for other checkpoints."""
        numbers = sorted(self.numbers.items())
        return f"{zlib.crc32(metadata_of(self.folder)):x} {numbers}" if self.torchs else f"{sorted(self.files.items())}"

    def keys(self) -> dict[str, tuple[Any, ...]]:
        """Names as keys from the root of the tree, where these are known.

        Raises:
            CheckpointError: the metadata is damaged.
        """
        content = metadata_of(self.folder)
        if not self.torchs and self.files[METADATA] != (len(content), zlib.crc32(content)):
            raise CheckpointError(f"{self.folder / METADATA} is damaged: its checksum does not fit")
        return dcp.read_checkpoint_keys(content)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, which must be the last file, and syncs it to disk."""
    body = {
        "format": FORMAT,
        "byteorder": sys.byteorder,
        "about": manifest.about,
        "files": manifest.files,
        "numbers": {name: _encode_value(value) for name, value in manifest.numbers.items()},
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
    write_whole(folder / MANIFEST, text + _checksum_line(text))


def write_metadata(folder: Path, manifest: Manifest, keys: dict[str, tuple[Any, ...]]) -> None:
    """Writes the file that torch's loaders need."""
    metadata = dcp.checkpoint_metadata(
        {
            name: (kind.dtype, kind.shape, [(c.box.offsets, c.box.sizes, c.file, c.offset, c.length) for c in chunks])
            for name, kind in manifest.tensors.items()
            for chunks in [manifest.chunks.get(name, [])]
        },
        manifest.places,
        keys,
    )
    content = pickle.dumps(metadata)
    write_whole(folder / METADATA, content)
    manifest.files[METADATA] = len(content), zlib.crc32(content)


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder} is not a checkpoint of shardfn: {error.strerror}: {path}") from error
    text, mark, end = content.rpartition(b',\n"crc32":')
    if not mark or end != _checksum_line(text + mark):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")
    try:
        return _parsed(path, json.loads(content))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def torchs(folder: Path) -> TensorSource:
    """Reads the metadata of a torch.distributed.checkpoint; no other file is read.

    Raises:
        CheckpointError: it is damaged.
    """
    content = metadata_of(folder)
    try:
        described, places = dcp.read_checkpoint_metadata(content)
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error or type(error).__name__}") from error
    tensors = {name: TensorType(dtype, tuple(shape)) for name, (dtype, shape, _) in described.items()}
    chunks = {
        name: [Chunk(Box(tuple(offsets), tuple(sizes)), *place) for offsets, sizes, *place in parts]
        for name, (_, _, parts) in described.items()
    }
    refuse_outside(folder / METADATA, [chunk.file for some in chunks.values() for chunk in some])
    refuse_outside(folder / METADATA, [file for file, *_ in places.values()])
    return TensorSource(tensors, chunks=chunks, places=places, folder=folder, torchs=True)


def metadata_of(folder: Path) -> bytes:
    """The content of the metadata file of torch's loaders.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return (folder / METADATA).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error.strerror}") from error


def _parsed(path: Path, body: dict[str, Any]) -> Manifest:
    if body["format"] != FORMAT or body["byteorder"] != sys.byteorder:
        raise CheckpointError(
            f"{path} is {body['format']!r}, {body['byteorder']} endian; this reads {FORMAT!r}, {sys.byteorder} endian"
        )
    unknown = {x["dtype"] for x in body["tensors"].values() if not isinstance(_dtype(x), torch.dtype)}
    if unknown:
        raise CheckpointError(f"{path} has tensors of {listed(sorted(unknown))}, which torch {torch.__version__} lacks")
    tensors = {
        name: TensorType(_dtype(x), tuple(x["shape"]), x.get("meant", "")) for name, x in body["tensors"].items()
    }
    chunks = {
        name: [Chunk(Box(tuple(offsets), tuple(sizes)), *rest) for offsets, sizes, *rest in x["chunks"]]
        for name, x in body["tensors"].items()
    }
    numbers = {name: _decode_value(value) for name, value in body["numbers"].items()}
    files = {name: (size, crc) for name, (size, crc) in body["files"].items()}
    refuse_outside(path, [*files, *(chunk.file for some in chunks.values() for chunk in some)])
    if type(body["about"]["number"]) is not int:
        raise CheckpointError(f"{path} is damaged: its number is {body['about']['number']!r}")
    for name, kind in tensors.items():
        for part in chunks[name]:
            places = (*part.box.offsets, *part.box.sizes, part.offset, part.length, part.data, part.before, part.after)
            _refuse_unnatural(places, f"of a part of {name}")
            if part.data + part.box.numel * kind.dtype.itemsize > part.length:
                raise ValueError(f"elements of {name} are not in their part")
        _refuse_unnatural(kind.shape, f"in the shape of {name}")
    _refuse_unnatural([*body["by_rank"].values(), *(n for pair in files.values() for n in pair)], "of ranks or a file")
    return Manifest(tensors, numbers, body["by_rank"], chunks=chunks, files=files, about=body["about"])


def _dtype(entry: dict[str, Any]) -> Any:
    return getattr(torch, entry["dtype"], None)


def _refuse_unnatural(numbers: Iterable[Any], description: str) -> None:
    wrong = [n for n in numbers if type(n) is not int or n < 0]
    if wrong:
        raise ValueError(f"a number {description} is {wrong[0]!r}")


def refuse_outside(path: Path, names: Iterable[str]) -> None:
    """Raises CheckpointError for a file name that leads outside of the folder of the file that names it."""
    folder = os.path.realpath(path.parent)
    for name in dict.fromkeys(names):
        if os.path.commonpath([folder, os.path.realpath(os.path.join(folder, name))]) != folder:
            raise CheckpointError(
                f"{path} names the file {name!r}, which is outside of its folder, and not read. If you trust the "
                f"checkpoint, put the file itself there"
            )


def _checksum_line(text: bytes) -> bytes:
    return b"%d}\n" % zlib.crc32(text)


def _encode_value(value: Scalar) -> Any:
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {type(value).__name__: list(map(_encode_value, value))} if isinstance(value, (tuple, list)) else value


def _decode_value(value: Any) -> Scalar:
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    return complex(*parts) if kind == "complex" else {"tuple": tuple, "list": list}[kind](map(_decode_value, parts))
