"""The process groups of this world, shared by all threads and meshes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfn.compat import process_groups
from shardfn.mesh import waiting, watchdog
from shardfn.mesh.grid import Grid
from shardfn.mesh.lanes import lane


@dataclass(frozen=True)
class ProcessWorld:
    """The meshes, process groups and agreements of this process in one world, shared by all its threads.

    Attributes:
        group: the group of all its ranks.
        grids: the canonical object for each grid, and the device type of the newest mesh made of it.
        again: meshes that had been garbage-collected and were made again.
        agreed: other objects that its ranks have created or agreed on together, by key.
        made: groups by use, lane and members; also groups made elsewhere, once they are connected.
    """

    group: dist.ProcessGroup | None
    grids: dict[Grid, tuple[Grid, str]] = field(default_factory=dict)
    again: dict[Grid, DeviceMesh] = field(default_factory=dict)
    agreed: dict[str, Any] = field(default_factory=dict)
    made: dict[tuple[str | int, ...], Future[dist.ProcessGroup]] = field(default_factory=dict)


# A forked process, such as a data loader's worker, has a group's objects but not its threads, and crashes if the
# garbage collector frees one. So objects from before the fork are never collected.
os.register_at_fork(after_in_child=gc.freeze)

# The uses of groups in steps; background saves use others.
OF_STEPS = ("", "gather", "reduce", "compare", "notes", "finish")
_worlds: dict[int, ProcessWorld] = {}  # more than one only in tests whose ranks are threads
_lock = threading.Lock()  # threads may ask for a new world at once, and only one may start its watchdog


def world_of_thread() -> ProcessWorld:
    """Returns this thread's world, creating it on first use; all threads of a process share it."""
    group = dist.group.WORLD
    world = _worlds.get(id(group))
    if world is None:
        with _lock:
            world = _worlds.get(id(group))
            if world is None:
                if not process_groups.worlds_of_threads():
                    _worlds.clear()  # a world that has ended is never used again
                world = _worlds[id(group)] = ProcessWorld(group)
                if group is not None:
                    watchdog.watch_world()
    return world


def worlds() -> list[ProcessWorld]:
    """Returns the worlds that this process has."""
    return list(_worlds.values())


def forget_world() -> None:
    """Removes this thread's world."""
    _worlds.pop(id(dist.group.WORLD), None)


def group_over(ranks: list[int], use: str = "", backend: str | None = None) -> dist.ProcessGroup:
    """Returns the group of these ranks in this order; its members create it together, once in a world.

    Args:
        ranks: global ranks; this rank is one of them.
        use: groups of different uses differ even if their ranks are equal.
        backend: backend of a new group; default: the world's.
    """
    world = world_of_thread()
    assert world.group is not None
    lane_name = lane()
    if not use and not lane_name and ranks == list(range(world.group.size())):
        return world.group
    key: tuple[str | int, ...] = (use, lane_name, *ranks)
    return _once(key, ranks, use or "axes", lambda: process_groups.new_group(ranks, repr(key), backend))


def connected_group(group: dist.ProcessGroup, device: torch.device, pairs: bool = False) -> dist.ProcessGroup:
    """Returns the group, once its ranks are connected for tensors on their devices; its members take part together.

    NCCL connects ranks in their first collective, which cannot be interrupted while it connects: if a rank ran out of
    memory before it got there, the other ranks would wait forever. `pairs` connects neighbors, for messages.
    """
    if process_groups.connected(group, device, pairs):
        return group
    connect = process_groups.connection(group, device, pairs)
    ranks = dist.get_process_group_ranks(group)
    purpose = "pairs" if pairs else "connected"
    return _once((purpose, lane(), device.type, str(group.group_name)), ranks, "axes", connect)


def _once(
    key: tuple[str | int, ...], ranks: list[int], caller: str, make: Callable[[], dist.ProcessGroup]
) -> dist.ProcessGroup:
    world = world_of_thread()
    future = world.made.get(key)
    if future is None:
        own_future: Future[dist.ProcessGroup] = Future()
        # Two threads of a lane may ask at the same time: the first makes the group, the other waits for the result.
        future = world.made.setdefault(key, own_future)
        if future is own_future:
            try:
                if process_groups.between_processes():
                    waiting.wait_for_ranks(repr(key), ranks, "the making of a group", caller)
                    # Without the watchdog, the backend would wait for minutes for a rank that is killed now.
                    with waiting.on("the connecting of a group", f"meeting {key!r}", caller, ranks):
                        group = make()
                else:
                    group = make()
                own_future.set_result(group)
            except BaseException as error:
                world.made.pop(key)  # a later call tries again
                own_future.set_exception(error)
                raise
    return future.result()


def cpu_group(ranks: list[int], use: str) -> dist.ProcessGroup:
    """Like `group_over`, for CPU tensors: returns a separate gloo group, so that no other use can interfere.

    Raises:
        RuntimeError: this build of torch has no gloo, which moves CPU tensors.
    """
    if not process_groups.between_processes():
        return group_over(ranks)
    if not dist.is_gloo_available():
        raise RuntimeError(
            f"ranks {use} on the CPU, by gloo, as well as what moves tensors on their devices, and this torch "
            f"({torch.__version__}) was built without gloo: install one with it, as PyTorch's own packages are"
        )
    return group_over(ranks, use, "gloo")


def groups_of_steps(ranks: list[int]) -> list[dist.ProcessGroup]:
    """Returns the groups of several ranks, all among `ranks`, in which this thread's steps communicate."""
    world, lane_name = world_of_thread(), lane()
    groups = [
        promise.result()
        for (use, owner, *_), promise in list(world.made.items())
        if owner == lane_name and use in OF_STEPS and promise.done() and promise.exception() is None
    ]
    groups += [world.group] if world.group is not None and not lane_name else []
    members = set(ranks)
    return [group for group in groups if group.size() > 1 and members.issuperset(dist.get_process_group_ranks(group))]
