"""The offloading of a step: shards are read ahead, and gradients leave the device once computed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.tiers import placing, streaming, tensors
from shardfn.tiers.tensors import ALIGNMENT, place_of
from shardfn.tiers.transfers import (
    CopyStreams,
    PendingCopies,
    PendingRead,
    Transfer,
    buffers,
    copy_streams,
    reading,
    writing,
)


class DiskPrefetch:
    """Reads of one schedule, by address: the tensor (kept alive: its address stays its own), its version, the read."""

    def __init__(self) -> None:
        self._reads: dict[tuple[int, int], tuple[Tensor, int, PendingRead]] = {}
        self._streams: CopyStreams | None = None  # set if anything was copied since the last step
        self._copies: list[PendingCopies] = []

    def announce(self, x: Tensor) -> None:
        """Starts to read a tensor that will be needed, if it is on disk and has a version counter."""
        if place_of(x) is None or x.is_inference():
            return
        earlier = self._reads.get(_key(x))
        if earlier is not None and earlier[1] == x._version:
            return
        self._drop(x)
        started = reading(x.detach())
        if started is not None:
            self._reads[_key(x)] = x, x._version, started

    def started_read(self, x: Tensor) -> PendingRead | None:
        """The read of a tensor on disk, started now if not announced or outdated; None if not on disk."""
        if place_of(x) is None:
            return None
        started = self._reads.get(_key(x))
        if started is not None and not x.is_inference() and started[1] == x._version:
            del self._reads[_key(x)]
            return started[2]
        self._drop(x)
        return reading(x)

    def _drop(self, x: Tensor) -> None:
        """Gives up a tensor's read, whose values are out of date."""
        started = self._reads.pop(_key(x), None)
        if started is not None:
            started[2].give_up()

    @contextlib.contextmanager
    def arriving(self, tier: str, x: Tensor, device: torch.device) -> Iterator[Tensor]:
        """A shard's values in memory, for a block that starts to copy them to a device."""
        coming = self.started_read(x) if tier == "disk" else None
        arrival: PendingCopies | None = None
        try:
            if coming is not None:
                coming.wait()
                x = coming.values
            if x.device == device:
                yield x
            else:  # copies, and collectives that send them, run concurrently with the accelerator's computation
                self._streams = copy_streams(device)
                with self._streams.bringing() as arrival:
                    self._copies.append(arrival)
                    yield x
        finally:
            if coming is not None:
                coming.give_back(None if arrival is None else arrival.event)

    def copies(self) -> list[PendingCopies]:
        """The copies started since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def give_up(self) -> None:
        """Gives up what was announced, and waits until no copy reads what may be overwritten from now on."""
        reads, self._reads = self._reads, {}
        for _, _, coming in reads.values():
            coming.give_up()
        streams, self._streams = self._streams, None
        if streams is not None:
            streams.wait_for_reads()


def _key(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.numel()


# --- gradients, which leave the device as they are computed ---


BEHIND = 2  # gradients that may be in flight to disk at a time


class GradOffload:
    """Moves the gradients of one mesh to their tier, and tracks those in flight."""

    def __init__(self, mesh: Callable[[], DeviceMesh]) -> None:
        self.mesh = mesh
        self._going: deque[tuple[Tensor, Transfer]] = deque()
        self._copied: Any = None  # an event after the last copy to the host

    def add(self, so_far: Tensor | None, out: Tensor, tier: str) -> Tensor:
        """Adds `out` to a gradient on a tier, or starts one, and returns it. The caller must not use `out` any more."""
        if tier == "host":
            return self._to_host(so_far, out)
        if so_far is None:
            gradient = tensors.empty(tuple(out.shape), out.dtype, placing.file_of(self.mesh(), "grads"))
            if out.numel():
                self._going.append((gradient, _to_disk(gradient, out)))
            while len(self._going) > BEHIND:
                self._end()
            return gradient
        self.wait_for_gradients()
        streaming.add_(so_far, out.cpu())
        return so_far

    def _to_host(self, so_far: Tensor | None, out: Tensor) -> Tensor:
        if out.device.type == "cpu":
            return out if so_far is None else so_far.add_(out)
        gradient = torch.empty(out.shape, dtype=out.dtype, pin_memory=True, device="cpu")
        self._copied = copy_streams(out.device).take_out([(gradient, out)])
        if so_far is None:
            return gradient
        self.wait_for_gradients()
        return so_far.add_(gradient)

    def _end(self) -> None:
        _, transfer = self._going.popleft()
        try:
            transfer.wait()
        finally:
            transfer.give_back()

    def wait_for_gradients(self) -> None:
        """Waits until all gradients have arrived.

        Raises:
            RuntimeError: one of them cannot be written; afterwards none is in flight.
        """
        try:
            while self._going:
                self._end()
        finally:
            while self._going:
                self._going.popleft()[1].give_up()
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()


def _to_disk(gradient: Tensor, out: Tensor) -> Transfer:
    """Starts to write a gradient, from an accelerator by way of pinned memory of the host."""
    if out.device.type == "cpu":
        return writing(gradient, out)
    buffer = buffers.acquire(out.nbytes + ALIGNMENT)
    host = buffer.bytes[: out.nbytes].view(out.dtype)
    transfer = writing(gradient, host, after=copy_streams(out.device).take_out([(host, out)]))
    assert transfer.buffer is None, "what is aligned is written as it is"
    transfer.buffer = buffer
    return transfer
