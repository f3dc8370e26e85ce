"""Gradients that leave the device as they come."""

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

BEHIND = 2  # gradients that are written while others are computed


class GradOffload:
    """Where those of one mesh go, and those that are still on their way."""

    def __init__(self, mesh: Callable[[], DeviceMesh]) -> None:
        self.mesh = mesh
        self._going: deque[tuple[Tensor, Transfer]] = deque()
        self._copied: Any = None  # an event, after what goes to the host, which has to wait for it

    def add(self, known: Tensor | None, out: Tensor, tier: str) -> Tensor:
        """What has left of a gradient, with `out` added to it; `out` is nobody else's, and must not change."""
        if tier == "host":
            return self._to_host(known, out)
        if known is None:
            gradient = tensors.empty(tuple(out.shape), out.dtype, placing.file_of(self.mesh(), "grads"))
            if out.numel():
                self._going.append((gradient, _to_disk(gradient, out)))
            while len(self._going) > BEHIND:
                self._end()
            return gradient
        self.settle()
        streaming.add_(known, out.cpu())
        return known

    def _to_host(self, known: Tensor | None, out: Tensor) -> Tensor:
        if out.device.type == "cpu":
            return out if known is None else known.add_(out)
        gradient = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        self._copied = copy_streams(out.device).take_out([(gradient, out)])
        if known is None:
            return gradient
        self.settle()
        return known.add_(gradient)

    def _end(self) -> None:
        _, transfer = self._going.popleft()
        try:
            transfer.wait()
        finally:
            transfer.give_back()

    def settle(self) -> None:
        """Until all have arrived.

        Raises:
            RuntimeError: one of them cannot be written; none is under way any more.
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


def _to_disk(made: Tensor, out: Tensor) -> Transfer:
    """Starts to write a gradient, by way of the host's locked memory if an accelerator has it."""
    if out.device.type == "cpu":
        return writing(made, out)
    buffer = buffers.take(out.nbytes + ALIGNMENT)
    host = buffer.bytes[: out.nbytes].view(out.dtype)
    transfer = writing(made, host, after=copy_streams(out.device).take_out([(host, out)]))
    assert transfer.buffer is None, "what is aligned is written as it is"
    transfer.buffer = buffer
    return transfer
