"""Copies of tensors to be saved in the background: in memory or, of tensors on disk, on that disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardfn.tiers import copying
from shardfn.tiers.files import ALIGNMENT, File, Stretch
from shardfn.tiers.tensors import Place, place_of

_memory: list[Tensor] = []
_files: dict[tuple[int, str], File] = {}  # by process and folder; kept for the next call, as `_memory` is


def taken(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors to memory that is kept for the next call; adjacent ones are copied at once.

    Raises:
        OSError: the disk has no room for copies of tensors on it.
        RuntimeError: reading or writing fails.
    """
    places = [place_of(x) for x in tensors]
    in_memory = iter(_in_memory([x for x, place in zip(tensors, places, strict=True) if place is None]))
    on_disk = iter(_on_disk([(x, place) for x, place in zip(tensors, places, strict=True) if place is not None]))
    return [next(in_memory if place is None else on_disk) for place in places]


def _on_disk(tensors: list[tuple[Tensor, Place]]) -> list[Tensor]:
    spans: dict[Stretch, tuple[int, int]] = {}
    for _, place in tensors:
        low, high = spans.get(place.stretch, (place.start, place.stop))
        spans[place.stretch] = min(low, place.start) // ALIGNMENT * ALIGNMENT, max(high, place.stop)
    copies: dict[Stretch, Tensor] = {}
    for x, (stretch, *_) in tensors:
        low, high = spans[stretch]
        if stretch not in copies:
            key = os.getpid(), stretch.file.folder  # a file must not be shared with another process
            if key not in _files:
                _files[key] = File(stretch.file.folder, "snapshot")
            copies[stretch] = copying.clone(_bytes_of(x)[low:high], _files[key])
    return [
        copies[stretch][start - spans[stretch][0] : stop - spans[stretch][0]].view(x.dtype).view(x.shape)
        for x, (stretch, start, stop, _) in tensors
    ]


def _bytes_of(x: Tensor) -> Tensor:
    """A tensor's whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _in_memory(tensors: list[Tensor]) -> list[Tensor]:
    runs: list[_Run] = []
    places = []
    for values in tensors:
        start = int(values.storage_offset()) * values.element_size()
        stop = start + values.numel() * values.element_size()
        last = runs[-1] if runs else None
        if (
            last is None
            or last.bytes.data_ptr() != values.untyped_storage().data_ptr()
            or not 0 <= start - last.stop <= _GAP
        ):
            begin = -(-(last.begin + last.stop - last.start) // 64) * 64 if last else 0
            last = _Run(_bytes_of(values), start, stop, begin)
            runs.append(last)
        last.stop = stop
        places.append(last.begin + start - last.start)
    total = runs[-1].begin + runs[-1].stop - runs[-1].start if runs else 0
    devices = {run.bytes.device for run in runs if run.bytes.device.type != "cpu"}
    if not _memory or _memory[0].numel() < total or (devices and not _memory[0].is_pinned()):
        _memory[:] = [torch.empty(total, dtype=torch.uint8, pin_memory=bool(devices), device="cpu")]
    for run in runs:
        copy = _memory[0][run.begin : run.begin + run.stop - run.start]
        copy.copy_(run.bytes[run.start : run.stop], non_blocking=True)
    for device in devices:  # one wait for all copies of a device
        torch.get_device_module(device).current_stream(device).synchronize()
    return [
        _memory[0][begin_of_copy : begin_of_copy + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        for begin_of_copy, x in zip(places, tensors, strict=True)
    ]


@dataclass
class _Run:
    """Bytes `start` to `stop` of a storage, which are copied to `begin` on."""

    bytes: Tensor
    start: int
    stop: int
    begin: int


_GAP = 4096  # gaps of at most so many bytes are copied along with their neighbours
