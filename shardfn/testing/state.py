"""The process-wide state of torch in which every call starts, on every rank of every kind of world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardfn.mesh.groups import worlds


def reset() -> None:
    """Sets seed 0 and float32 as the default dtype, and forgets runs that ended early: tests must not affect others."""
    # Not torch.manual_seed: without a GPU it keeps a stack trace for CUDA at every call.
    torch.default_generator.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    for world in worlds():
        world.agreed.pop("run that ended early", None)  # `shardfn.run.interrupts.KEY`, which this folder cannot import


@contextmanager
def borrowed() -> Iterator[None]:
    """Restores the caller's state after the block, for ranks that live in the caller's process and reset it."""
    dtype, random = torch.get_default_dtype(), torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.default_generator.set_state(random)
