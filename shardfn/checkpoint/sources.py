"""Where tensors are read from: checkpoints of this module, and of torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint import files
from shardfn.checkpoint.boxes import Box
from shardfn.checkpoint.contents import SCALARS, Kind, Part, Scalar, as_bytes
from shardfn.checkpoint.files import Chunk
from shardfn.checkpoint.team import CheckpointError
from shardfn.compat import dcp


@dataclass(frozen=True)
class Source:
    """Named tensors and numbers that can be read in part.

    Attributes:
        folder: where the files are.
        tensors: their kinds.
        chunks: the parts that each is made of.
        numbers: and strings.
        by_rank: name -> ranks that have their own, under `name.rank0` and so on.
    """

    folder: Path
    tensors: dict[str, Kind]
    chunks: dict[str, list[Chunk]]
    numbers: dict[str, Scalar]
    by_rank: dict[str, int]

    def check(self, parts: Iterable[Part]) -> None:
        """Raises CheckpointError where a file is gone or too short for what these parts need of it."""
        for file, wanted in _by_file(parts, self.chunks).items():
            with opened(self.folder / file) as descriptor:
                has, needed = os.fstat(descriptor).st_size, max(chunk.offset + chunk.length for chunk, *_ in wanted)
            if has < needed:
                names = ", ".join(dict.fromkeys(name for chunk, name, _ in wanted if chunk.offset + chunk.length > has))
                raise CheckpointError(
                    f"{self.folder / file} is damaged: it ends after {has} of {needed} bytes, in {names}"
                )

    def read(self, parts: Iterable[Part]) -> None:
        """Fills each part's values, of whatever dtype, from the box of the tensor of its name.

        Raises:
            CheckpointError: a file that is gone or damaged.
        """
        parts = list(parts)
        by_file = _by_file(parts, self.chunks)
        missing = sum(part.box.numel for part in parts)
        space = bytearray()  # as large as the largest part that does not go straight to its place
        for file, wanted in by_file.items():
            with opened(self.folder / file) as descriptor:
                for chunk, name, some in wanted:
                    if not self.straight(descriptor, chunk, name, some):
                        if len(space) < chunk.length:
                            space = bytearray(chunk.length)
                        values = self.values(chunk, name, read_bytes(descriptor, chunk.offset, chunk.length, space))
                        for part in some:
                            both = part.box.common(chunk.box)
                            assert both is not None, "only parts that overlap are filled"
                            part.values[both.within(part.box)].copy_(values[both.within(chunk.box)])
                    missing -= sum(both.numel for part in some if (both := part.box.common(chunk.box)))
        if missing:
            raise CheckpointError(f"{self.folder} lacks {missing} elements of what its description says it has")

    def straight(self, descriptor: int, chunk: Chunk, name: str, parts: list[Part]) -> bool:
        """Reads a part right to where it shall be, if it can be; whether it did."""
        return False

    def values(self, chunk: Chunk, name: str, content: memoryview) -> Tensor:
        """The elements of a part, from its bytes."""
        raise NotImplementedError


class Ours(Source):
    """A checkpoint of this module. No pickle is read, and each part's checksum is compared."""

    def straight(self, descriptor: int, chunk: Chunk, name: str, parts: list[Part]) -> bool:
        """Reads a part right to where it shall be, if it can be; whether it did."""
        first, *others = parts
        x = first.values
        fits = not others and first.box == chunk.box and x.dtype == self.tensors[name].dtype
        if not fits or x.device.type != "cpu" or not x.is_contiguous() or x.is_conj() or x.is_neg():
            return False
        target = memoryview(as_bytes(x).numpy())  # type: ignore[arg-type]
        end = chunk.data + len(target)
        crc = zlib.crc32(read_bytes(descriptor, chunk.offset, chunk.data), chunk.before)
        read_into(descriptor, chunk.offset + chunk.data, target)
        crc = zlib.crc32(target, crc)
        crc = zlib.crc32(read_bytes(descriptor, chunk.offset + end, chunk.length - end), crc)
        if crc != chunk.after:
            raise self._damaged(chunk, name)
        return True

    def _damaged(self, chunk: Chunk, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / chunk.file} is damaged between bytes {chunk.offset} and {chunk.offset + chunk.length}, in "
            f"{name}: its checksum does not fit"
        )

    def values(self, chunk: Chunk, name: str, content: memoryview) -> Tensor:
        """The elements of a part, from its bytes."""
        if len(content) < chunk.length or zlib.crc32(content, chunk.before) != chunk.after:
            raise self._damaged(chunk, name)
        dtype = self.tensors[name].dtype
        end = chunk.data + chunk.box.numel * dtype.itemsize
        return torch.frombuffer(content, dtype=torch.uint8)[chunk.data : end].view(dtype).view(chunk.box.sizes)


class Torchs(Source):
    """A checkpoint of torch.distributed.checkpoint, of which only tensors, numbers and strings are unpickled."""

    def values(self, chunk: Chunk, name: str, content: memoryview) -> Tensor:
        """The elements of a part, from its bytes."""
        found = _unpickled(content, self.folder / chunk.file, name)
        if not isinstance(found, Tensor) or tuple(found.shape) != chunk.box.sizes:
            raise CheckpointError(f"{self.folder / chunk.file}: {name} is not what {files.METADATA} says it is")
        return found


def source_of(path: Path) -> Source:
    """A checkpoint, to read from.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = files.restored(path)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    if (folder / files.MANIFEST).exists():
        found = files.read_manifest(folder)
        return Ours(folder, found.tensors, found.chunks, found.numbers, found.by_rank)
    if (folder / files.METADATA).exists():
        return _torchs(folder)
    inside = files.checkpoints(folder)
    hint = f"; it has some in it: load {inside[-1]}, which latest() finds" if inside else ""
    raise CheckpointError(f"{path} is no checkpoint: it has neither {files.MANIFEST} nor {files.METADATA}{hint}")


def _torchs(folder: Path) -> Torchs:
    path = folder / files.METADATA
    try:
        described, places = dcp.read_checkpoint_metadata(path.read_bytes())
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    tensors = {name: Kind(dtype, tuple(shape)) for name, (dtype, shape, _) in described.items()}
    chunks = {
        name: [Chunk(Box(tuple(at), tuple(sizes)), *place) for at, sizes, *place in parts]
        for name, (_, _, parts) in described.items()
    }
    numbers: dict[str, Scalar] = {}
    for name, (file, offset, length) in places.items():
        # What is neither is not for trees to have; if one wants it all the same, it is missing.
        with opened(folder / file) as descriptor, contextlib.suppress(CheckpointError):
            value = _unpickled(read_bytes(descriptor, offset, length), folder / file, name)
            if type(value) in SCALARS:
                numbers[name] = value
    return Torchs(folder, tensors, chunks, numbers, {})


def _by_file(parts: Iterable[Part], chunks: dict[str, list[Chunk]]) -> dict[str, list[tuple[Chunk, str, list[Part]]]]:
    """By file, in the order in which they lie there: the chunks of which some part wants something, and these."""
    found: dict[str, dict[int, tuple[Chunk, str, list[Part]]]] = {}
    for part in parts:
        for chunk in chunks[part.name]:
            if part.box.common(chunk.box):
                known = found.setdefault(chunk.file, {}).setdefault(chunk.offset, (chunk, part.name, []))
                known[2].append(part)
    return {file: [some[offset] for offset in sorted(some)] for file, some in found.items()}


def read_bytes(descriptor: int, offset: int, length: int, into: bytearray | None = None) -> memoryview:
    """What is there, which is less than asked for at the end of a file; in new memory, or over what is in `into`."""
    length = max(0, min(length, os.fstat(descriptor).st_size - offset))
    view = memoryview(bytearray(length) if into is None else into)[:length]
    return view[: read_into(descriptor, offset, view)]


def read_into(descriptor: int, offset: int, view: memoryview) -> int:
    """Fills the memory with what is there; how much that is."""
    done = 0
    while done < len(view):
        more = os.preadv(descriptor, [view[done:]], offset + done)
        if more == 0:
            break
        done += more
    return done


def _unpickled(content: memoryview, file: Path, name: str) -> Any:
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged item raises almost anything
        told = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{file}: {name} cannot be read: {told}") from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file's descriptor while the block runs.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
