"""Bytes of tensors, wherever they are, in portions."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardfn.shards.boxes import Box, full_box, steps
from shardfn.tiers import copying
from shardfn.tiers.copying import arrivals
from shardfn.tiers.tensors import on_disk

BUFFER = 2**25  # bytes that are written or read at a time


def crc(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's bytes."""
    checksum = 0
    for part in arrivals(part for _, part in pieces(tensor, most_of(tensor))):
        checksum = zlib.crc32(as_memoryview(part), checksum)
    return checksum


def most_of(x: Tensor) -> int:
    """The number of bytes of a tensor to write or read at a time."""
    return copying.PORTION if on_disk(x) else BUFFER


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's elements as a 1-D uint8 tensor on the CPU, a view where possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.view(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def as_memoryview(tensor: Tensor) -> memoryview:
    """A tensor's bytes as a memoryview; it shares the memory of a contiguous CPU tensor."""
    array: Any = as_bytes(tensor).numpy()
    return memoryview(array)


def pieces(values: Tensor, max_bytes: int) -> Iterator[tuple[Box, Tensor]]:
    """Yields boxes of at most `max_bytes`, at least one, and their values, in row-major order."""
    for box in steps(full_box(values.shape), max_bytes // values.element_size()):
        yield box, values[box.slices_in(full_box(values.shape))]
