"""Copies of what is saved in the background: in memory, but of what is on disk, there."""

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
_files: dict[tuple[int, str], File] = {}  # by process and folder; kept as `_memory` is


def taken(every: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, in room that is kept for the next time; what lies side by side is copied at once.

    Raises:
        OSError: the disk has no room for those that are there.
        RuntimeError: something cannot be read or written.
    """
    places = [place_of(x) for x in every]
    here = iter(_in_memory([x for x, place in zip(every, places, strict=True) if place is None]))
    there = iter(_on_disk([(x, place) for x, place in zip(every, places, strict=True) if place is not None]))
    return [next(here if place is None else there) for place in places]


def _on_disk(every: list[tuple[Tensor, Place]]) -> list[Tensor]:
    spans: dict[Stretch, tuple[int, int]] = {}
    for _, place in every:
        low, high = spans.get(place.stretch, (place.start, place.stop))
        spans[place.stretch] = min(low, place.start) // ALIGNMENT * ALIGNMENT, max(high, place.stop)
    made: dict[Stretch, Tensor] = {}
    for x, (stretch, *_) in every:
        low, high = spans[stretch]
        if stretch not in made:
            key = os.getpid(), stretch.file.folder  # a file is its process's alone
            if key not in _files:
                _files[key] = File(stretch.file.folder, "snapshot")
            made[stretch] = copying.clone(_bytes_of(x)[low:high], _files[key])
    return [
        made[stretch][start - spans[stretch][0] : stop - spans[stretch][0]].view(x.dtype).view(x.shape)
        for x, (stretch, start, stop, _) in every
    ]


def _bytes_of(x: Tensor) -> Tensor:
    """All of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _in_memory(every: list[Tensor]) -> list[Tensor]:
    runs: list[_Run] = []
    places = []
    for values in every:
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
        _memory[:] = [torch.empty(total, dtype=torch.uint8, pin_memory=bool(devices))]
    for run in runs:
        copy = _memory[0][run.begin : run.begin + run.stop - run.start]
        copy.copy_(run.bytes[run.start : run.stop], non_blocking=True)
    for device in devices:  # one wait for all copies
        torch.get_device_module(device).current_stream(device).synchronize()
    return [
        _memory[0][at : at + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        for at, x in zip(places, every, strict=True)
    ]


@dataclass
class _Run:
    """Elements `start` to `stop` of the bytes of a storage, which go to `begin`."""

    bytes: Tensor
    start: int
    stop: int
    begin: int


_GAP = 4096  # bytes between parts that are copied with them
