"""Copies between an accelerator and its host's memory, concurrent with the accelerator's computation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import devices


class Arrival:
    """Copies under way to the accelerator; waiting for them holds up the accelerator's stream, not the host."""

    def __init__(self, streams: CopyStreams) -> None:
        self._streams, self.event = streams, None

    def wait(self) -> None:
        """Makes the accelerator's current stream run what is enqueued from now on after the copies."""
        self._streams.module.current_stream(self._streams.device).wait_event(self.event)


class CopyStreams:
    """Two streams of an accelerator: one copies tensors in, and one copies them out."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self._in, self._out = self.module.Stream(device=device), self.module.Stream(device=device)

    def bring(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Copies tensors from pinned memory to the accelerator; those already there are returned as they are."""
        current = self.module.current_stream(self.device)
        with self.module.stream(self._in):
            moved = [x if x.device == self.device else x.to(self.device, non_blocking=True) for x in columns]
        current.wait_stream(self._in)
        for x, own in zip(moved, columns, strict=True):
            if x is not own:
                x.record_stream(current)  # the allocator must not reuse its memory while `current` reads it
        return moved

    @contextlib.contextmanager
    def bringing(self) -> Iterator[Arrival]:
        """Runs the block's copies into memory of this device on the copy stream, after what is enqueued by now."""
        self._in.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self._in):
            arrival = Arrival(self)
            try:
                yield arrival
            finally:
                arrival.event = self._in.record_event()

    def settle(self) -> None:
        """Waits until the copies in have read their sources, so that the host can overwrite these."""
        self._in.synchronize()

    def take_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Copies `(into, source)` pairs to pinned memory once the sources are computed; returns an event at the end."""
        self._out.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self._out):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
                source.record_stream(self._out)
            return self._out.record_event()


@devices.cached
def copy_streams(device: torch.device) -> CopyStreams:
    """The copy streams of a device, made once."""
    return CopyStreams(device)
