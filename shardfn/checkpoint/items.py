"""What `torch.save` made, inside of a file: a zip archive without compression, whose records have checksums.

torch.load compares none of these checksums, so that a changed bit would be loaded without an error; here they are.
"""

from __future__ import annotations

import io
import os
import zipfile
from typing import Any

import torch

from shardfn.quoting import listed

STEP = 2**22  # bytes that are read at a time


class Flaw(Exception):
    """What is wrong with part of a file, without saying with which."""


class Item(io.RawIOBase):
    """Bytes of a file as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """To a place in it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError(f"{self._at} is before the beginning")
        return self._at

    def tell(self) -> int:
        """The place in it."""
        return self._at

    def readinto(self, target: bytearray | memoryview) -> int:  # type: ignore[override]
        """Up to as many bytes as there is room for."""
        room = memoryview(target)[: max(0, self._length - self._at)]
        more = os.preadv(self._descriptor, [room], self._offset + self._at) if room else 0
        self._at += more
        return more


def unpickled(descriptor: int, offset: int, length: int, *, values: bool = True) -> Any:
    """What was saved, of which only tensors, numbers, strings and containers are unpickled.

    Args:
        descriptor: of the file.
        offset: where it begins.
        length: in bytes.
        values: whether tensors have theirs; if not, they are on the device `meta`, and are not compared either.

    Raises:
        Flaw: it cannot be read, or does not fit its checksums.
    """
    if values:
        checked(descriptor, offset, length)
    try:
        item = io.BufferedReader(Item(descriptor, offset, length))
        return torch.load(item, map_location="cpu" if values else "meta", weights_only=True)
    except Exception as error:  # a damaged item raises almost anything
        raise Flaw(f"it cannot be read: {str(error).partition(chr(10))[0] or type(error).__name__}") from error


def checked(
    descriptor: int, offset: int, length: int, *, values: bool = True, share: tuple[int, int] = (0, 1)
) -> dict[str, int]:
    """Compares the records with their checksums; those of tensors' elements if `values`.

    Of `share=(i, n)`, one of n that compare together, records i, i + n and so on of elements are.

    Returns:
        The checksums of the elements of tensors by record; none if `torch.save` was configured to make none.

    Raises:
        Flaw: the records that do not fit.
    """
    wrong, others = [], 0
    try:
        with zipfile.ZipFile(io.BufferedReader(Item(descriptor, offset, length))) as archive:
            records = archive.infolist()
            elements = [info for info in records if "/data/" in info.filename]
            mine = {info.filename for info in elements[share[0] :: share[1]]} if values else set()
            for info in records:
                if "/data/" in info.filename and info.filename not in mine:
                    continue
                others += "/data/" not in info.filename
                try:
                    with archive.open(info) as record:
                        while record.read(STEP):
                            pass
                except zipfile.BadZipFile:
                    wrong.append(info.filename)
    except Exception as error:  # a damaged archive raises almost anything
        raise Flaw(f"it cannot be read: {error}") from error
    if sum("/data/" not in name for name in wrong) == others:
        return {}
    if wrong:
        raise Flaw(f"its own checksum does not fit, in {listed(wrong)}")
    return {info.filename: info.CRC for info in records if "/data/" in info.filename}
