"""Which checked call runs on this thread, and whether it looks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from shardfn.compat import functorch


class _Here(threading.local):
    def __init__(self) -> None:
        self.recorder: Any = None
        self.paused = 0


here = _Here()
active = [0]  # recorders in this process; looked at before anything else is


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Nothing inside is recorded."""
    here.paused += 1
    try:
        yield
    finally:
        here.paused -= 1


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Nothing inside is recorded, differentiated, or part of a transform."""
    with paused(), functorch.outside_transforms(), torch.no_grad():
        yield
