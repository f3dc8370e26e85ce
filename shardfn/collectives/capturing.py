"""The state of a thread that captures, rehearses or traces a step; the capturing itself is in `compiled/`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn import callers

Late = tuple[Tensor, Callable[[Tensor], str | None]]


class Watch:
    """State of one call of a step that is being captured, rehearsed or traced.

    Args:
        name: the caller, for messages.
        device: where the step runs.

    Attributes:
        late: tensors that the host is to check after each run, see `late_checks`.
        works: the collectives of a traced step, which lives as long as they do.
        drawing: the reason why random numbers may not be drawn now; empty if they may.
    """

    traces = False
    """Whether tensors have no values, as under a tracer."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.late: list[Late] = []
        self.works: list[Any] = []
        self.drawing = ""


class _CurrentCapture(threading.local):
    watch: Watch | None = None
    prepares = False  # whether an eager step runs that will become one program


current = _CurrentCapture()


def capturing() -> Watch | None:
    """The `Watch` of the step that this thread captures, rehearses or traces; None if it does none of these."""
    return current.watch


def preparing() -> bool:
    """Whether this thread runs a step eagerly that it will capture or trace at a later call."""
    return current.prepares


def refuse_traced(operation: str) -> None:
    """Raises RuntimeError if this thread traces a step, whose tensors have no values to send."""
    watch = current.watch
    if watch is not None and watch.traces:
        raise RuntimeError(f"{watch.name}: a compiled step cannot hold {operation} (at {callers.caller()})")
