"""Running out of memory: which errors say so, and what it takes to begin again."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

SPOKEN = re.compile("OutOfMemoryError|MemoryError|out of memory|can't allocate memory|bad_alloc")
"""In what another rank says of its error."""


def handled() -> set[int]:
    """The ids of the exceptions that the caller's callers are handling: they are the context of whatever is raised."""
    return _ids(sys.exception())


def _ids(error: BaseException | None) -> set[int]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            waiting += [one.__cause__, one.__context__]
    return seen


def exhausted(error: BaseException, before: Collection[int] = ()) -> str | None:
    """What the allocator says, if it is for want of memory that this was raised; else None.

    Args:
        error: what was raised.
        before: what was `handled` before that, and is no reason for it.
    """
    seen = set(before) - {id(error)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        text = str(one)
        if isinstance(one, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(one, RuntimeError) and any(words in text for words in _WORDS)
        ):
            return f"{type(one).__name__}: {text.strip().splitlines()[0]}" if text.strip() else type(one).__name__
        waiting += [one.__cause__, one.__context__]
    return None


_WORDS = (
    "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc",
    "Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip


class RandomNumbers:
    """Where torch's own random numbers stood, on the CPU, the device of these tensors and the accelerator in use."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.numbers = torch.get_rng_state()
        devices = {x.device for x in tensors} - {torch.device("cpu"), torch.device("meta")}
        device = torch.accelerator.current_accelerator(check_available=True)
        self.unused: Any = None
        if device is not None:
            module = torch.get_device_module(device)
            if getattr(module, "is_initialized", lambda: True)():
                index = torch.accelerator.current_device_index()
                devices.add(torch.device(device.type, index))
            else:
                self.unused = module
        self.more = [(one, torch.get_device_module(one).get_rng_state(one)) for one in devices]

    def restore(self) -> None:
        """Draws them again."""
        torch.set_rng_state(self.numbers)
        for device, state in self.more:
            torch.get_device_module(device).set_rng_state(state, device)
        if self.unused is not None and self.unused.is_initialized():  # it began with its seed
            self.unused.manual_seed(self.unused.initial_seed())


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Change when tensors are written into."""
    return [0 if x.is_inference() else x._version for x in tensors]


def emptied() -> None:
    """Gives back what an attempt had, graphs and kept memory included."""
    gc.collect()
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        module.synchronize()
        module.empty_cache()
