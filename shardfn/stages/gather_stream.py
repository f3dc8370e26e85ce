"""The accelerator stream on which gathers start, separate from the compute stream.

A gather waits for all work that the compute stream had been given when the gather was issued: then its shards are
written, and its buffer is free. Work that the compute stream is given afterwards, such as the stage before the gather's
own, overlaps with the gather.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives.into_buffers import Handle
from shardfn.compat import devices


class GatherStream:
    """Two streams of one schedule: gathers start on one, and quantized parameters are decoded on the other.

    On a single stream, the next gather would start only when this one has been decoded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        # High priority: otherwise a small copy would wait for the thread blocks of a large matrix product.
        self.stream, self.decoding = (self.module.Stream(device=device, priority=-1) for _ in range(2))

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """A context in which a gather starts; its stream first waits for the work given to the current stream."""
        if devices.capturing(self.device):  # a graph cannot wait for events from outside of it
            yield
            return
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            yield

    def compute_stream(self) -> Any:
        """The stream that computes."""
        return self.module.current_stream(self.device)

    def decoded(self, work: Handle) -> Copied:
        """Enqueues a work's wait and its decoding on the decoding stream; returns a handle of that point."""
        with self.module.stream(self.decoding):
            work.wait()
            return Copied(self)


class Copied:
    """A handle of the work that the current stream has been given; `wait` blocks a stream, not the host."""

    __slots__ = ("_on", "event")

    def __init__(self, stream: GatherStream) -> None:
        self._on, self.event = stream, stream.module.current_stream(stream.device).record_event()

    def wait(self) -> None:
        """Makes the current stream wait for that work."""
        self._on.module.current_stream(self._on.device).wait_event(self.event)


class Arrival(Copied):
    """The point at which the current stream has gathered or decoded parameters, for other streams that read them."""

    __slots__ = ("made_on",)

    def __init__(self, stream: GatherStream) -> None:
        super().__init__(stream)
        self.made_on = stream.compute_stream()

    def before_reading(self, memory: Tensor) -> None:
        """Makes the current stream, if it is a different one, wait for that point before it reads the memory."""
        current = self._on.compute_stream()
        if current != self.made_on:
            self.wait()
            memory.record_stream(current)
