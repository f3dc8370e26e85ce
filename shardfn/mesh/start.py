"""How this process enters its world and leaves it, and which device is its own there."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardfn.compat import process_groups
from shardfn.mesh.lives import store_of_this_life

LEAVE_TOGETHER = timedelta(seconds=10)


def start_distributed() -> None:
    """Starts torch.distributed if nobody has: from torchrun's environment, or as a world of one process."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, size = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
        life = store_of_this_life(store, rank, size)
        dist.init_process_group(store=life, rank=rank, world_size=size)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    atexit.register(_end_distributed)


def _end_distributed() -> None:
    # A rank that leaves while others still talk makes them abort; one that failed must not wait, and one that chose
    # to exit may be waited for itself.
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        store, ranks = process_groups.default_store(), range(dist.get_world_size())
        with contextlib.suppress(RuntimeError):  # a barrier that some rank never joins could not be left again
            store.set(f"shardfn/leaving/{dist.get_rank()}", "")
            store.wait([f"shardfn/leaving/{rank}" for rank in ranks], LEAVE_TOGETHER)
        dist.destroy_process_group()


def check_device(device: str) -> None:
    """Raises ValueError for what names no kind of device, such as one with an index."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.index is not None:
        what = "a kind of device, without a number" if found is not None else "not a device of torch"
        fix = "cuda" if found is None or found.type == "cuda" else found.type
        raise ValueError(f'make_mesh(device={device!r}): that is {what}; write device="{fix}" or device="cpu"')


def claim_device(device: str) -> None:
    """Says which accelerator this process uses, and finds out whether another one does.

    Raises:
        RuntimeError: two ranks use one device, and there are others.
    """
    module: Any = None if device == "cpu" else getattr(torch, device, None)
    world = dist.group.WORLD
    assert world is not None, "torch.distributed has started"
    if not hasattr(module, "get_device_properties") or not module.is_initialized():
        return
    if process_groups.backend_of(world, device) == "fake":
        return  # what is not in use yet, `init_device_mesh` chooses by LOCAL_RANK
    index, rank = module.current_device(), dist.get_rank()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    name = getattr(module.get_device_properties(index), "uuid", None) or f"{index} of {visible}"
    first = (
        process_groups.default_store()
        .compare_set(f"shardfn/device/{socket.gethostname()}/{name}", "", str(rank))
        .decode()
    )
    if first != str(rank) and module.device_count() > 1:
        local = os.environ.get("LOCAL_RANK", "its rank on this host")
        raise RuntimeError(
            f"make_mesh: ranks {first} and {rank} both use {device}:{index} of {socket.gethostname()}, which has "
            f"{module.device_count()}: call torch.{device}.set_device({local}) in each process before anything else "
            f"touches the device"
        )
