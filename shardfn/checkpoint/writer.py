"""One file of a checkpoint as it is written: what `torch.save` makes of each part of a tensor, one after another."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint.boxes import Box
from shardfn.checkpoint.contents import Scalar, as_bytes
from shardfn.checkpoint.manifest import Chunk, Manifest

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
