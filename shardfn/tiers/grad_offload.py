"""Gradients that leave the device as they are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn.tiers import placing, streaming, tensors
from shardfn.tiers.copy_streams import copy_streams
from shardfn.tiers.files import ALIGNMENT
from shardfn.tiers.transfers import Transfer, buffers, writing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BEHIND = 2  # gradients that may be under way to disk at a time


class GradOffload:
    """Moves the gradients of one mesh to their tier, and keeps track of those under way."""

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
        self.settle()
        streaming.add_(so_far, out.cpu())
        return so_far

    def _to_host(self, so_far: Tensor | None, out: Tensor) -> Tensor:
        if out.device.type == "cpu":
            return out if so_far is None else so_far.add_(out)
        gradient = torch.empty(out.shape, dtype=out.dtype, pin_memory=True, device="cpu")
        self._copied = copy_streams(out.device).take_out([(gradient, out)])
        if so_far is None:
            return gradient
        self.settle()
        return so_far.add_(gradient)

    def _end(self) -> None:
        _, transfer = self._going.popleft()
        try:
            transfer.wait()
        finally:
            transfer.give_back()

    def settle(self) -> None:
        """Waits until all gradients have arrived.

        Raises:
            RuntimeError: one of them cannot be written; afterwards none is under way.
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
    buffer = buffers.take(out.nbytes + ALIGNMENT)
    host = buffer.bytes[: out.nbytes].view(out.dtype)
    transfer = writing(gradient, host, after=copy_streams(out.device).take_out([(host, out)]))
    assert transfer.buffer is None, "what is aligned is written as it is"
    transfer.buffer = buffer
    return transfer
