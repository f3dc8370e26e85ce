"""The process-wide state in which every call starts, on every rank of every kind of world.

The caller's warning filters are carried to other processes: what is an error here is an error there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardfn.mesh.groups import worlds

Filter = tuple[str, str, str, str, int]


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


def filters() -> list[Filter]:
    """This process's filters as plain values, first match first."""

    def text(pattern: Any) -> str:
        return getattr(pattern, "pattern", pattern) or ""

    def name(kind: Any) -> str:
        return f"{kind.__module__}:{kind.__qualname__}"

    return [(action, text(msg), name(kind), text(mod), line) for action, msg, kind, mod, line in warnings.filters]


@contextmanager
def filtering(filters: Sequence[Filter]) -> Iterator[None]:
    """Applies these filters in the block. Not for threads: filters belong to the process."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, kind, module, line in reversed(filters):
            if category := _category(kind):
                warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]
        yield


def _category(kind: str) -> type[Warning] | None:
    # A class whose module was never imported here cannot be warned with here.
    module, _, name = kind.partition(":")
    category: Any = sys.modules.get(module)
    for part in name.split("."):
        category = getattr(category, part, None)
    return category if isinstance(category, type) and issubclass(category, Warning) else None
