"""Tensors whose values are on disk: ordinary ones, whose memory is a mapped stretch of a file.

Every torch operation works on them, at the speed of page faults. What is done at every step, gathering parameters and
updating them by their gradients, reads and writes the file directly; see `transfers`.
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
    """Where on disk a tensor's values are: bytes `start` to `stop` of a stretch whose first `end` are in use."""

    stretch: Stretch
    start: int
    stop: int
    end: int


_stretches: dict[int, tuple[Stretch, int]] = {}  # by address, with the number of bytes in use
_dropped: deque[Stretch] = deque()  # filled by the garbage collector, which must not do more: see `files`


def empty(shape: tuple[int, ...], dtype: torch.dtype, file: File, zeros: bool = False) -> Tensor:
    """A tensor in a file, uninitialised or of zeros.

    Raises:
        OSError: there is no room for it.
        RuntimeError: the file is another process's.
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
    """Gives back the stretches of tensors that were collected."""
    while _dropped:
        stretch = _dropped.popleft()
        del _stretches[stretch.address]
        stretch.file.give_back(stretch)


def place_of(x: Tensor) -> Place | None:
    """Where on disk a tensor is; None if it is in memory, not contiguous, or a lazily conjugated or negated view."""
    used = None if x.is_conj() or x.is_neg() else _stretch_of(x)
    if used is None or not x.is_contiguous():
        return None
    stretch, end = used
    start = int(x.storage_offset()) * x.dtype.itemsize
    return Place(stretch, start, start + x.numel() * x.dtype.itemsize, end)


def _stretch_of(x: Tensor) -> tuple[Stretch, int] | None:
    """The stretch that a tensor is in, and how many of its bytes are in use; None if it is in none."""
    if torch.compiler.is_compiling() or not _stretches or x.device.type != "cpu":
        return None
    if type(x) not in (Tensor, torch.nn.Parameter):
        return None
    try:
        return _stretches.get(x.untyped_storage().data_ptr())
    except RuntimeError:  # a tensor of a torch.func transform
        return None


def on_disk(x: object) -> bool:
    """Whether a value is a tensor whose memory is a mapped file."""
    return isinstance(x, Tensor) and _stretch_of(x) is not None


def release(x: Tensor) -> None:
    """Frees the memory of a tensor on disk until it is read again."""
    used = _stretch_of(x)
    if used is not None:
        used[0].release()


def settle(x: Tensor) -> None:
    """Waits until what was written into a tensor on disk is there, and frees its memory."""
    used = _stretch_of(x)
    if used is not None:
        used[0].settle()
