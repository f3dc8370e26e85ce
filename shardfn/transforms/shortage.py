"""Out-of-memory errors: recognizes them, and frees memory and restores random state for another attempt."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import devices

# As torch, NCCL, Triton and CUDA's libraries write it. cuBLAS says that it is "not initialized" if it finds no room for
# its workspace; so it does after an error that has ended the device's context, and then the second try fails.
_WORDS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|std::bad_alloc"
    r"|Cannot allocate memory"
    r"|(CUDA|HIP|CUDA driver) error: out of memory"
    r"|Cuda failure (\d+ )?'out of memory'"
    r"|Failed to CUDA (host alloc|[mc]alloc(Async)?) "
    r"|Triton Error \[\w+\]: out of memory"
    r"|(XPU|MPS backend) out of memory"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION|ALLOC)_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"
    r"|CUFFT_ALLOC_FAILED"
)

SPOKEN = re.compile(f"OutOfMemoryError|MemoryError|out of memory|{_WORDS.pattern}")
"""Matches messages in which another rank reports that it is out of memory."""


def handled() -> set[int]:
    """Ids of the exceptions that callers are handling, and of all in their chains of causes and contexts.

    They become the context of any exception raised now.
    """
    ids: set[int] = set()
    queue = [sys.exception()]
    while queue:
        current = queue.pop()
        if current is not None and id(current) not in ids:
            ids.add(id(current))
            queue += [current.__cause__, current.__context__]
    return ids


def exhausted(error: BaseException, before: Collection[int] = ()) -> str | None:
    """The allocator's message, if an exception was raised for want of memory; else None.

    Args:
        error: the exception.
        before: the result of `handled` before; these exceptions are not its cause.
    """
    ids = set(before) - {id(error)}
    queue: list[BaseException | None] = [error]
    while queue:
        err = queue.pop()
        if err is None or id(err) in ids:
            continue
        ids.add(id(err))
        text = str(err)
        lines = text.strip().splitlines() or [""]
        telling = [line for line in lines if _WORDS.search(line)] if isinstance(err, RuntimeError) else []
        if telling or isinstance(err, (torch.OutOfMemoryError, MemoryError)):
            return ": ".join(filter(None, [type(err).__name__, (telling or lines)[0].strip()]))
        queue += [err.__cause__, err.__context__]
    return None


class RandomNumbers:
    """The state of torch's generators: of the CPU, the tensors' devices and the current accelerator."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.numbers = torch.get_rng_state()
        devices = {x.device for x in tensors} - {torch.device("cpu"), torch.device("meta")}
        device = torch.accelerator.current_accelerator()
        self.unused: Any = None
        if device is not None:
            module = torch.get_device_module(device)
            if getattr(module, "is_initialized", lambda: True)():
                index = torch.accelerator.current_device_index()
                devices.add(torch.device(device.type, index))
            else:
                self.unused = module
        self.more = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]

    def restore(self) -> None:
        """Restores the state, so that the same numbers are drawn again."""
        torch.set_rng_state(self.numbers)
        for device, state in self.more:
            torch.get_device_module(device).set_rng_state(state, device)
        # If the accelerator was first used since then, its random state began with its seed.
        if self.unused is not None and self.unused.is_initialized():
            self.unused.manual_seed(self.unused.initial_seed())


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Version counters, which change when tensors are written into."""
    return [0 if x.is_inference() else x._version for x in tensors]


def emptied() -> None:
    """Frees the memory of a failed attempt: reference cycles such as graphs, and the allocator's cache."""
    gc.collect()
    kind = devices.in_use()
    if kind is not None:
        module = torch.get_device_module(kind)
        module.synchronize()
        module.empty_cache()
