"""Tensors whose numbers are on disk: ordinary ones, whose memory is a stretch of a file.

Whatever torch does with a tensor it does with these, at the speed of pages that come and go. What is done at every
step, gathering parameters and moving them by their gradients, reads and writes the file itself; see `transfers`.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.tiers import mapping
from shardfn.tiers.files import File, Stretch


class Place(NamedTuple):
    """Where on disk a tensor's numbers are: bytes `start` to `stop` of a stretch, of which the last one has `end`."""

    stretch: Stretch
    start: int
    stop: int
    end: int


_stretches: dict[int, tuple[Stretch, int]] = {}  # by address, with how many bytes are of a tensor
_dropped: deque[Stretch] = deque()  # by the garbage collector, which must not do more: see `files`


def empty(shape: tuple[int, ...], dtype: torch.dtype, file: File, zeros: bool = False) -> Tensor:
    """A tensor in a file, with whatever numbers, or zeros.

    Raises:
        OSError: there is no room for it.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    collect()
    stretch, new = file.take(nbytes)
    if zeros and not new:
        stretch.clear()
    memory = mapping.buffer_at(stretch.address, nbytes)
    _stretches[stretch.address] = stretch, nbytes
    weakref.finalize(memory, _dropped.append, stretch).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def collect() -> None:
    """Gives back the places of tensors that are gone."""
    while _dropped:
        stretch = _dropped.popleft()
        del _stretches[stretch.address]
        stretch.file.give_back(stretch)


def place_of(x: Tensor) -> Place | None:
    """Where on disk a tensor is; None of one that is in memory, not in order, or not what its bytes say."""
    found = None if x.is_conj() or x.is_neg() else _stretch_of(x)
    if found is None or not x.is_contiguous():
        return None
    stretch, end = found
    start = int(x.storage_offset()) * x.dtype.itemsize
    return Place(stretch, start, start + x.numel() * x.dtype.itemsize, end)


def _stretch_of(x: Tensor) -> tuple[Stretch, int] | None:
    """The stretch that a tensor is in, and how many bytes of it are used."""
    if torch.compiler.is_compiling() or not _stretches or x.device.type != "cpu":
        return None
    if type(x) not in (Tensor, torch.nn.Parameter):
        return None
    try:
        return _stretches.get(x.untyped_storage().data_ptr())
    except RuntimeError:  # of what a transform made
        return None


def on_disk(x: object) -> bool:
    """Whether a value is a tensor whose memory is a file's."""
    return isinstance(x, Tensor) and _stretch_of(x) is not None


def release(x: Tensor) -> None:
    """A tensor takes no memory, if it is on disk, until somebody reads it again."""
    known = _stretch_of(x)
    if known is not None:
        known[0].release()


def settle(x: Tensor) -> None:
    """Until what was written into a tensor is on disk, if that is where it is, and takes no memory."""
    known = _stretch_of(x)
    if known is not None:
        known[0].settle()
