"""The step that a thread captures, rehearses or traces; what watches over it is in `compiled/`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn import callers

Late = tuple[Tensor, Callable[[Tensor], str | None]]


class Watch:
    """The watch over one call of a step that is to become one program.

    Args:
        name: the caller, for messages.
        device: where the step runs.

    Attributes:
        late: tensors that the host is to check after each run, see `late_checks`.
        works: the collectives of a traced step, which lives as long as they do.
        drawing: why random numbers may not be drawn here; empty if they may.
    """

    traces = False
    """Whether tensors have no numbers."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.late: list[Late] = []
        self.works: list[Any] = []
        self.drawing = ""


class _CurrentCapture(threading.local):
    watch: Watch | None = None
    prepares = False  # whether a step runs as it is, and will become one program


current = _CurrentCapture()


def capturing() -> Watch | None:
    """The watch over the step that this thread captures, rehearses or traces; None if it does none of these."""
    return current.watch


def preparing() -> bool:
    """Whether this thread runs a step as it is, which it will capture or trace at a later call."""
    return current.prepares


def refuse_traced(operation: str) -> None:
    """Raises RuntimeError if this thread traces a step, whose tensors have no numbers to send."""
    watch = current.watch
    if watch is not None and watch.traces:
        raise RuntimeError(f"{watch.name}: a compiled step cannot hold {operation} (at {callers.caller()})")
