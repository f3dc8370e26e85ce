"""The process-wide state of torch in which every call starts, on every rank of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardfn.mesh.groups import worlds


def reset() -> None:
    """Seed 0, float32 as the default dtype, and no run that ended early: no test depends on the ones before it."""
    # Not torch.manual_seed: without a GPU it keeps a stack trace for CUDA at every call.
    torch.default_generator.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    for world in worlds():
        world.agreed.pop("run that ended early", None)  # which is `shardfn.run.interrupts.KEY`


@contextmanager
def borrowed() -> Iterator[None]:
    """Let ranks that live in the caller's process reset its state, and give it back."""
    dtype, random = torch.get_default_dtype(), torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.default_generator.set_state(random)
