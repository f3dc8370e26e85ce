"""Copies between tensors in portions, so that memory does not grow with what is copied."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardfn.tiers import tensors
from shardfn.tiers.tensors import ALIGNMENT, File, on_disk, place_of, wait_for_writes
from shardfn.tiers.transfers import PendingRead, reading, writing

PORTION = 2**23  # bytes
ROOM = PORTION + 2 * ALIGNMENT  # bytes of a buffer; all have the same size, so that few are needed


def arrivals(sources: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields tensors in memory, one after another, while the next one is read; each is valid until the next one.

    Raises:
        RuntimeError: something cannot be read.
    """
    rest = ((x, reading(x, ROOM)) for x in sources)  # lazy: each read starts when islice takes the item
    coming = deque(islice(rest, 1))
    try:
        while coming:
            coming.extend(islice(rest, 1))
            x, under_way = coming[0]
            if under_way is not None:
                under_way.wait()
                x = under_way.values
            yield x
            _end(coming.popleft()[1])
    finally:
        for _, under_way in coming:
            _end(under_way)


def _end(under_way: PendingRead | None) -> None:
    if under_way is not None:
        under_way.give_back()


def portions(x: Tensor) -> Iterator[Tensor]:
    """Yields a tensor's elements in order, as vectors in memory; each is valid until the next one."""
    return arrivals(x.detach().reshape(-1).split(PORTION // x.element_size()))


def copy_(into: Tensor, x: Tensor) -> None:
    """Copies the values of `x` into a tensor of the same shape, wherever both are.

    Raises:
        RuntimeError: something cannot be read or written.
    """
    if not on_disk(into) and not on_disk(x):
        into.copy_(x)
    elif not into.is_contiguous():
        into.copy_(x)
        wait_for_writes(into)
        wait_for_writes(x)
    elif x.numel():
        offset, flat = 0, into.detach().view(-1)
        for part in portions(x):
            target = flat[offset : offset + len(part)]
            offset += len(part)
            if place_of(target) is None:
                target.copy_(part)
                continue
            under_way = writing(target, part.to(into.dtype).cpu(), ROOM)
            under_way.wait()
            under_way.give_back()


def read(x: Tensor) -> Tensor:
    """A tensor's values in memory: itself if they are there, otherwise a copy."""
    if not on_disk(x):
        return x
    memory = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copy_(memory, x)
    return memory


@contextlib.contextmanager
def filling(x: Tensor) -> Iterator[Tensor]:
    """Memory for the block to fill with a tensor's values: its own, or memory that is then copied to disk."""
    if place_of(x) is None:
        yield x
        wait_for_writes(x)
        return
    memory = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    yield memory
    copy_(x, memory)


def clone(x: Tensor, file: File | None = None) -> Tensor:
    """A copy of a tensor on the same tier; if that is disk, in `file`, or by default in the same file.

    Raises:
        OSError: the disk has no room.
        RuntimeError: something cannot be read or written.
    """
    place = place_of(x)
    if place is None:
        copied = x.clone()
        return copied.pin_memory() if torch.cuda.is_available() and x.is_pinned() else copied
    copied = tensors.empty(tuple(x.shape), x.dtype, file or place.stretch.file)
    copy_(copied, x)
    return copied


def deepcopy(x: Any, memo: dict[int, Any]) -> Any:
    """Like `copy.deepcopy`, but the copy of a tensor on disk is on disk."""
    if not isinstance(x, Tensor) or not x.is_leaf or place_of(x) is None:
        return copy.deepcopy(x, memo)
    if id(x) not in memo:
        memo[id(x)] = clone(x.detach()).requires_grad_(x.requires_grad)
    return memo[id(x)]
