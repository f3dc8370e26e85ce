"""What can be read from: checkpoints of this module, and of torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfn.checkpoint.boxes import Box
from shardfn.checkpoint.contents import SCALARS, Kind
from shardfn.checkpoint.disk import Flaw, opened, unpickled
from shardfn.checkpoint.folders import checkpoints, is_checkpoint, restored
from shardfn.checkpoint.manifest import MANIFEST, METADATA, Chunk, Manifest, read_manifest, refuse_outside
from shardfn.checkpoint.team import CheckpointError
from shardfn.compat import dcp


@dataclass
class Source(Manifest):
    """Named tensors and numbers that can be read in part.

    Attributes:
        folder: where the files are.
        torchs: whether it is torch.distributed.checkpoint's, without checksums of its files.
    """

    folder: Path = Path()
    torchs: bool = False

    @property
    def others(self) -> dict[str, str]:
        """What cannot be loaded into a tree, and what it is."""
        return dict.fromkeys(self.left_out, "neither a tensor nor a number or string")

    @property
    def left_out(self) -> list[str]:
        """Names of what is neither tensor, number nor string, and is not read."""
        return [name for name in self.places if name not in self.numbers]

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


def found_at(path: Path, also: Sequence[str] = ()) -> Path:
    """The folder of a checkpoint, whole or not; `also` is what else was looked for in it.

    Raises:
        CheckpointError: there is none.
    """
    folder = restored(path)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    if not is_checkpoint(folder):
        inside = checkpoints(folder)
        hint = f"; there are {len(inside)} in it: {inside[-1]}, which latest() finds, is the newest" if inside else ""
        lacks = " nor ".join((MANIFEST, METADATA, *also))
        raise CheckpointError(f"{path} is not a checkpoint: it has neither {lacks}{hint}")
    return folder


def source_of(path: Path, also: Sequence[str] = ()) -> Source:
    """A checkpoint, to read from; `also` is what else was looked for.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = found_at(path, also)
    if (folder / MANIFEST).exists():
        return Source(**vars(read_manifest(folder)), folder=folder)
    found = torchs(folder)
    for name, (file, offset, length) in found.places.items():
        # What is neither is not for trees to have; if one wants it all the same, it is missing.
        with opened(folder / file) as descriptor, contextlib.suppress(Flaw):
            value = unpickled(descriptor, offset, length)
            if type(value) in SCALARS:
                found.numbers[name] = value
    return found


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
    return Source(tensors, chunks, places=places, folder=folder, torchs=True)


def metadata_of(folder: Path) -> bytes:
    """The description by which torch's own loaders find what is there.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return (folder / METADATA).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error.strerror}") from error
