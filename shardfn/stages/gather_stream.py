"""The stream of an accelerator on which gathers start, next to the one that computes.

A gather waits for what the computing stream had been given when it was issued: then its shards are there, and its
buffer is free. What that stream is given afterwards, such as the stage before its own, runs at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from shardfn.collectives.into_buffers import Handle
from shardfn.compat import devices


class GatherStream:
    """A stream on which the gathers of one schedule start, and another on which what arrives encoded is decoded.

    On one alone, the next gather would start only when this one has been decoded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        # Before what computes, so that a small copy does not wait for the blocks of a large product.
        self.stream, self.decoding = (self.module.Stream(device=device, priority=-1) for _ in range(2))

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """A context for the start of a gather, which waits for all that the current stream has been given."""
        if devices.capturing(self.device):  # a graph cannot wait for events from outside of it
            yield
            return
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            yield

    def now(self) -> Any:
        """The stream that computes."""
        return self.module.current_stream(self.device)

    def decoded(self, work: Handle) -> Copied:
        """Waits for a work that decodes what arrives, on the stream for that; returns a handle of both."""
        with self.module.stream(self.decoding):
            work.wait()
            return Copied(self)


class Copied:
    """What the current stream has been given; waiting for them holds up the accelerator's stream, not the host."""

    __slots__ = ("_on", "event")

    def __init__(self, stream: GatherStream) -> None:
        self._on, self.event = stream, stream.module.current_stream(stream.device).record_event()

    def wait(self) -> None:
        """Makes the current stream run what is enqueued from now on after it."""
        self._on.module.current_stream(self._on.device).wait_event(self.event)
