"""Starts and ends torch.distributed in this process, and chooses its device."""

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
from shardfn.mesh import launchers, liveness, rendezvous, waiting, watchdog
from shardfn.mesh.groups import world_of_thread
from shardfn.mesh.rendezvous import agents_store, store_of_this_life
from shardfn.mesh.rollcall import Card, local_rank, roll_call, say_wrong

LEAVE_TOGETHER = timedelta(seconds=10)
USUALLY = timedelta(minutes=30)  # torch's default timeout

_log = logging.getLogger("shardfn")
_begun = 0  # number of worlds of several processes that this process has joined


def patience(timeout: object) -> timedelta | None:
    """Converts the user's timeout to a `timedelta`; None stays None.

    Raises:
        TypeError: the timeout is neither a number nor a `timedelta`.
        ValueError: the timeout is not positive or not finite.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, timedelta)):
        raise TypeError(f"make_mesh: timeout must be a number of seconds or a datetime.timedelta, got {timeout!r}")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0.001 <= seconds <= 1e9:
        raise ValueError(f"make_mesh: timeout must be above 0 and finite, such as 600, got {timeout!r}")
    return timedelta(seconds=seconds)


def start_distributed(device: str = "cpu", timeout: timedelta | None = None) -> tuple[str, ...]:
    """Starts torch.distributed if nobody has and chooses this process's device; returns the host of each rank.

    Raises:
        ValueError: the launcher's variables contradict each other, or the timeout differs from that of a world which
            has begun.
        RuntimeError: some ranks did not come, or their cards contradict each other.
    """
    if not dist.is_initialized():
        cards = _join_world(device, timeout)
        if cards:
            world_of_thread().agreed[f"cards {device}"] = cards
            _watching_store(cards)
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


def _join_world(device: str, timeout: timedelta | None) -> tuple[Card, ...]:
    """Joins the world that the environment describes; returns the ranks' cards, none for a world of one."""
    global _begun
    try:
        start = launchers.detect_launcher(os.environ, os.getpid())
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
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        local_store = dist.HashStore()  # type: ignore[attr-defined]
        local_store.set_timeout(timeout or USUALLY)
        dist.init_process_group(store=local_store, rank=0, world_size=1, **options)
        atexit.register(_end_distributed)
        return ()
    limit = (timeout or USUALLY).total_seconds()
    for name, value in start.variables().items():
        os.environ[name] = os.environ.get(name) or value  # as torchrun does, for other libraries of the program
    try:
        store = rendezvous.store_of(start, limit)
    except rendezvous.PortInUse as error:  # perhaps another rank 0 holds the port and waits for the others
        _complain(error)
        raise
    life = store_of_this_life(store, start.rank, start.size) if agents_store() else _life(store)
    own_card = _card(device, start.size, start.local_rank, timeout)
    cards = roll_call(dist.PrefixStore("shardfn/roll", life), start.rank, own_card, limit)  # type: ignore[attr-defined]
    choose_device(device, local_rank(start.rank, cards))
    dist.init_process_group(store=life, rank=start.rank, world_size=start.size, timeout=timeout)
    atexit.register(_end_distributed)
    _begun += 1
    return cards


def _life(store: Any) -> Any:
    """Returns this world's view of rank 0's store, since one process may join several worlds one after another."""
    return dist.PrefixStore(f"life {_begun}", store)  # type: ignore[attr-defined]


def _complain(error: Exception) -> None:
    """Publishes to the waiting processes that this one does not join, if their store can be reached."""
    with contextlib.suppress(ValueError, RuntimeError):
        try:
            task = launchers.scheduled(os.environ, os.getpid())
        except ValueError:
            task = None
        store = rendezvous.reached_soon(*launchers.address(os.environ, task, ""))
        if store is not None:
            reason = str(error).removeprefix("make_mesh: ")
            message = f"process {os.getpid()} of {socket.gethostname()} does not come: {reason}"
            say_wrong(dist.PrefixStore("shardfn/roll", _life(store)), message)  # type: ignore[attr-defined]


def _card(device: str, size: int, local: int | None, timeout: timedelta | None) -> Card:
    seconds = None if timeout is None else timeout.total_seconds()
    return Card(socket.gethostname(), size, local, _devices(device), seconds, os.getpid(), liveness.own_process())


def _cards(device: str) -> tuple[Card, ...]:
    """Returns the cards of all ranks, which they exchange once for each kind of device."""
    agreed, size = world_of_thread().agreed, dist.get_world_size()
    cards: tuple[Card, ...] | None = agreed.get(f"cards {device}")
    if cards is None:
        local = os.environ.get("LOCAL_RANK", "")
        own_card = _card(device, size, int(local) if local.isdecimal() else None, None)
        if size == 1:
            launchers.check_begun(os.environ, os.getpid(), size)
            return agreed.setdefault(f"cards {device}", (own_card,))
        store, world = process_groups.default_store(), dist.group.WORLD
        assert world is not None
        number = agreed["roll calls"] = agreed.get("roll calls", -1) + 1
        with waiting.on("the first mesh", world.group_name, "make_mesh", range(size)) as wait:
            cards = agreed[f"cards {device}"] = roll_call(
                dist.PrefixStore(f"shardfn/roll {number}", store),  # type: ignore[attr-defined]
                dist.get_rank(), own_card, store.timeout.total_seconds(), lambda: wait.verdict,
            )  # fmt: skip
        _watching_store(cards)
    return cards


def _watching_store(cards: tuple[Card, ...]) -> None:
    """Notes rank 0's process for the watchdog if it serves the store: after its end no rank could look that up."""
    if watchdog.watcher and watchdog.watcher.rank and process_groups.host_of(process_groups.default_store()):
        watchdog.watcher.server = "" if agents_store() else cards[0].alive


def _end_distributed() -> None:
    # A rank that exits while others still communicate would make these abort, so all ranks leave together. A rank that
    # failed must not wait for the others.
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        store, ranks = process_groups.default_store(), range(dist.get_world_size())
        with contextlib.suppress(RuntimeError):  # the wait has a timeout; a barrier's could not be left
            store.set(f"shardfn/leaving/{dist.get_rank()}", "")
            store.wait([f"shardfn/leaving/{rank}" for rank in ranks], LEAVE_TOGETHER)
        dist.destroy_process_group()


def check_device(device: str) -> None:
    """Raises ValueError unless the text names a kind of device, without an index."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = None
    if parsed is None or parsed.index is not None:
        problem = "one device; name a kind, without a number" if parsed is not None else "not a device of torch"
        fix = "cuda" if parsed is None or parsed.type == "cuda" else parsed.type
        raise ValueError(f'make_mesh(device={device!r}): that is {problem}; write device="{fix}" or device="cpu"')


def _module(device: str) -> Any:
    """Returns torch's module for a kind of device that a process chooses from, or None."""
    module = None if device == "cpu" else getattr(torch, device, None)
    return module if hasattr(module, "set_device") and hasattr(module, "device_count") else None


def _devices(device: str) -> int:
    """Returns how many devices this process may choose from; 0 if it has chosen already."""
    module = _module(device)
    return 0 if module is None or module.is_initialized() else int(module.device_count())


def idle_devices(device: str, hosts: tuple[str, ...]) -> int:
    """Returns how many devices of the first rank's host no rank uses, given the host of each rank, if it is known."""
    module = _module(device)
    ranks = hosts.count(hosts[0]) if hosts else dist.get_world_size()
    return max(int(module.device_count()) - ranks, 0) if module is not None else 0


def choose_device(device: str, local: int) -> None:
    """Makes the device with this local index current (the only device, if there is one), unless the process has chosen.

    Call it before any group is made, so that each group is made for the right device.
    """
    count = _devices(device)
    if count:
        _module(device).set_device(0 if count == 1 else local)


def claim_device(device: str) -> None:
    """Publishes which accelerator this process uses, and checks that no other rank uses it.

    Raises:
        RuntimeError: two ranks use one device although there are others, or although NCCL needs one for each.
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
