"""How this process enters its world and leaves it, and which device is its own there."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardfn.compat import process_groups
from shardfn.mesh import launchers, rendezvous, waiting
from shardfn.mesh.groups import world_of_thread
from shardfn.mesh.rendezvous import agents_store, store_of_this_life
from shardfn.mesh.rollcall import Card, local_rank, roll_call, say_wrong

LEAVE_TOGETHER = timedelta(seconds=10)
USUALLY = timedelta(minutes=30)  # what torch takes where nothing is said

_log = logging.getLogger("shardfn")
_begun = 0  # worlds that this process has entered


def patience(timeout: object) -> timedelta | None:
    """What a user says of how long ranks wait for each other.

    Raises:
        TypeError: it is no time.
        ValueError: it is not above 0, or has no end.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, timedelta)):
        raise TypeError(f"make_mesh: timeout={timeout!r}; it is a number of seconds, or a datetime.timedelta")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0.001 <= seconds <= 1e9:
        raise ValueError(f"make_mesh: timeout={timeout!r}; it is above 0 and has an end, as 600 or timedelta(hours=1)")
    return timedelta(seconds=seconds)


def start_distributed(device: str = "cpu", timeout: timedelta | None = None) -> tuple[str, ...]:
    """Starts torch.distributed if nobody has, and chooses this process's device; the host of each rank.

    Raises:
        ValueError: the launcher's variables contradict each other; a timeout that is not that of a world which has
            begun.
        RuntimeError: the ranks did not all come, or do not fit together.
    """
    if not dist.is_initialized():
        cards = _start(device, timeout)
        if cards:
            world_of_thread().agreed[f"cards {device}"] = cards
    elif timeout is not None and timeout != process_groups.default_store().timeout:
        raise ValueError(
            f"make_mesh: timeout={timeout.total_seconds():g} s, but the world has begun, with "
            f"{process_groups.default_store().timeout.total_seconds():g} s: pass it to the first make_mesh, or to "
            f"init_process_group"
        )
    if not process_groups.between_processes():
        return ()
    cards = _cards(device)
    choose_device(device, local_rank(dist.get_rank(), cards))
    return tuple(card.host for card in cards)


def _start(device: str, timeout: timedelta | None) -> tuple[Card, ...]:
    """Enters the world of which the environment speaks."""
    global _begun
    try:
        start = launchers.found(os.environ, os.getpid())
    except ValueError as error:
        _complain(error)
        raise
    if start is None:
        tasks = launchers.said_by_job(os.environ)
        if tasks > 1:
            _log.warning(
                "make_mesh: a world of one process, in a SLURM job of %d tasks (SLURM_NTASKS): srun starts them all, "
                "and this process was started without it", tasks,
            )  # fmt: skip
        more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        alone = dist.HashStore()  # type: ignore[attr-defined]
        alone.set_timeout(timeout or USUALLY)
        dist.init_process_group(store=alone, rank=0, world_size=1, **more)
        atexit.register(_end_distributed)
        return ()
    limit = (timeout or USUALLY).total_seconds()
    for name, value in start.variables().items():
        os.environ[name] = os.environ.get(name) or value  # as torchrun does, for what else the program uses
    try:
        store = rendezvous.store_of(start, limit)
    except rendezvous.PortInUse as error:  # by another rank 0 perhaps, which waits for the others
        _complain(error)
        raise
    life = store_of_this_life(store, start.rank, start.size) if agents_store() else _life(store)
    mine = _card(device, start.size, start.local_rank, timeout)
    cards = roll_call(dist.PrefixStore("shardfn/roll", life), start.rank, mine, limit)  # type: ignore[attr-defined]
    choose_device(device, local_rank(start.rank, cards))
    dist.init_process_group(store=life, rank=start.rank, world_size=start.size, timeout=timeout)
    atexit.register(_end_distributed)
    _begun += 1
    return cards


def _life(store: Any) -> Any:
    """Of a store that rank 0 serves, which goes with it: what this world, of several in one process, has of it."""
    return dist.PrefixStore(f"life {_begun}", store)  # type: ignore[attr-defined]


def _complain(error: Exception) -> None:
    """Tells those that wait for this process that it does not come, if they can be found."""
    with contextlib.suppress(ValueError, RuntimeError):
        try:
            task = launchers.scheduled(os.environ, os.getpid())
        except ValueError:
            task = None
        store = rendezvous.reached_soon(*launchers.address(os.environ, task, ""))
        if store is not None:
            told = str(error).removeprefix("make_mesh: ")
            said = f"process {os.getpid()} of {socket.gethostname()} does not come: {told}"
            say_wrong(dist.PrefixStore("shardfn/roll", _life(store)), said)  # type: ignore[attr-defined]


def _card(device: str, size: int, local: int | None, timeout: timedelta | None) -> Card:
    seconds = None if timeout is None else timeout.total_seconds()
    return Card(socket.gethostname(), size, local, _devices(device), seconds, os.getpid())


def _cards(device: str) -> tuple[Card, ...]:
    """Of all ranks; they compare once for each kind of device."""
    agreed, size = world_of_thread().agreed, dist.get_world_size()
    found: tuple[Card, ...] | None = agreed.get(f"cards {device}")
    if found is None:
        local = os.environ.get("LOCAL_RANK", "")
        mine = _card(device, size, int(local) if local.isdecimal() else None, None)
        if size == 1:
            launchers.check_begun(os.environ, os.getpid(), size)
            return agreed.setdefault(f"cards {device}", (mine,))
        store, world = process_groups.default_store(), dist.group.WORLD
        assert world is not None
        number = agreed["roll calls"] = agreed.get("roll calls", -1) + 1
        with waiting.on("the first mesh", world.group_name, "make_mesh", range(size)) as here:
            found = agreed[f"cards {device}"] = roll_call(
                dist.PrefixStore(f"shardfn/roll {number}", store),  # type: ignore[attr-defined]
                dist.get_rank(), mine, store.timeout.total_seconds(), lambda: here.verdict,
            )  # fmt: skip
    return found


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


def _module(device: str) -> Any:
    """The module of a kind of device whose devices a process chooses from."""
    module = None if device == "cpu" else getattr(torch, device, None)
    return module if hasattr(module, "set_device") and hasattr(module, "device_count") else None


def _devices(device: str) -> int:
    """How many devices this process may choose from; 0 where it has chosen."""
    module = _module(device)
    return 0 if module is None or module.is_initialized() else int(module.device_count())


def choose_device(device: str, local: int) -> None:
    """Makes the device of this number on the node the current one, unless the process has chosen; the only one, if so.

    It comes before any group is made, so that each is made for the right device.
    """
    count = _devices(device)
    if count:
        _module(device).set_device(0 if count == 1 else local)


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
        return
    index, rank = module.current_device(), dist.get_rank()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    name = getattr(module.get_device_properties(index), "uuid", None) or f"{index} of {visible}"
    first = (
        process_groups.default_store()
        .compare_set(f"shardfn/device/{socket.gethostname()}/{name}", "", str(rank))
        .decode()
    )
    if first == str(rank):
        return
    if process_groups.backend_of(world, device) == "nccl" and module.device_count() == 1:
        raise RuntimeError(
            f"make_mesh: ranks {first} and {rank} both use the only {device} device that they see on "
            f"{socket.gethostname()}, and NCCL wants one for each: start one process for each device"
        )
    if module.device_count() > 1:
        local = os.environ.get("LOCAL_RANK", "its rank on this host")
        raise RuntimeError(
            f"make_mesh: ranks {first} and {rank} both use {device}:{index} of {socket.gethostname()}, which has "
            f"{module.device_count()}: call torch.{device}.set_device({local}) in each process before anything else "
            f"touches the device"
        )
