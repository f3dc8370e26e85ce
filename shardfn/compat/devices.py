"""The current device of each thread, and caches of tensors and streams on devices."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar, cast

import torch

from shardfn.compat import dispatch

P = ParamSpec("P")
T = TypeVar("T")
clears: list[Callable[[], None]] = []  # callbacks that drop cached objects on devices


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """`functools.lru_cache` for objects on a device, such as small tensors and streams; `clear_caches` clears it."""
    cached_function = functools.lru_cache(maxsize=4096)(function)
    clears.append(cached_function.cache_clear)
    return cast(Callable[P, T], cached_function)


def clear_caches() -> None:
    """Drops cached objects on devices: a later simulated device of the same name does not know them."""
    for clear in clears:
        clear()


def current(kind: str) -> torch.device:
    """Returns the device of a kind that is current in this thread, with its index."""
    if kind in ("cpu", "meta"):
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def use(device: torch.device) -> None:
    """Makes a device current in this thread."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).set_device(device)


def capturing(device: torch.device) -> bool:
    """Whether this thread captures a graph on a device, so that operations are recorded and do not run."""
    is_capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return is_capturing is not None and bool(is_capturing())


def uploaded(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the host on a device, by a copy from pinned memory, for which the host does not wait."""
    if x.device == device:
        return x
    pins = x.device.type == "cpu" and dispatch.readable(x)
    return (x.pin_memory() if pins else x).to(device, non_blocking=True)


def elements_at_a_time(device: torch.device, cached: int, max_elements: int = 2**24) -> int:
    """The number of elements to process at a time on a device.

    Args:
        device: their device.
        cached: the number on a CPU, such that intermediate results stay in its cache.
        max_elements: the number on an accelerator, such that kernels take longer than their launches: in float32,
            64 MiB a result.
    """
    return cached if device.type == "cpu" else max_elements


def as_here() -> Callable[[], None]:
    """Returns a function that makes this thread's current device current in the thread that calls it."""
    kind = in_use()
    return (lambda: None) if kind is None else functools.partial(use, current(kind))


def in_use() -> str | None:
    """Returns the kind of accelerator that this process has begun to use; None if it has not.

    Asking for more, even whether there is one, would begin it: the process could not be forked any more, and one that
    works on the CPU would take memory of the first device.
    """
    kind = torch.accelerator.current_accelerator()
    begun = kind is not None and getattr(torch.get_device_module(kind), "is_initialized", lambda: True)()
    return kind.type if kind is not None and begun else None


_EXACT = "pinned_max_round_threshold_mb"


def pin_exactly() -> None:
    """Lets pinned memory of more than a MiB have its own size: torch's allocator rounds it up to a power of two.

    torch has a setting for that since 2.13; what the user has set stays.
    """
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if settings is None or change is None or _EXACT in (before := settings()):
        return
    try:
        change(",".join(filter(None, [before, f"{_EXACT}:1"])))  # replaces all settings
    except RuntimeError:  # not known to this torch
        change(before)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """A context without the garbage collector, so that objects are freed at the same places in each run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
