"""Copies between an accelerator and its host's memory, beside what the accelerator computes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Arrival:
    """Copies on their way in; who waits for them keeps the accelerator from going on without, not the host."""

    def __init__(self, streams: CopyStreams) -> None:
        self._streams, self.event = streams, None

    def wait(self) -> None:
        """What the accelerator is told from now on comes after them."""
        self._streams.module.current_stream(self._streams.device).wait_event(self.event)


class CopyStreams:
    """Two streams of an accelerator: one brings numbers in, and one takes them out."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self._in, self._out = self.module.Stream(device=device), self.module.Stream(device=device)

    def bring(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the accelerator of what is in locked memory; what is there already, itself."""
        current = self.module.current_stream(self.device)
        with self.module.stream(self._in):
            moved = [x if x.device == self.device else x.to(self.device, non_blocking=True) for x in columns]
        current.wait_stream(self._in)
        for x, own in zip(moved, columns, strict=True):
            if x is not own:
                x.record_stream(current)  # else its memory would be another's while this one still reads it
        return moved

    @contextlib.contextmanager
    def bringing(self) -> Iterator[Arrival]:
        """Copies that the block starts into memory of this device go beside what it computes, once that is free."""
        self._in.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self._in):
            arrival = Arrival(self)
            try:
                yield arrival
            finally:
                arrival.event = self._in.record_event()

    def settle(self) -> None:
        """Until what is brought in has been read, so that the host can overwrite it."""
        self._in.synchronize()

    def take_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Copies `(into, source)` to locked memory, once the accelerator has computed them; an event, after that."""
        self._out.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self._out):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
                source.record_stream(self._out)
            return self._out.record_event()


@functools.cache
def copy_streams(device: torch.device) -> CopyStreams:
    """Those of a device, made once."""
    return CopyStreams(device)
