"""Process groups: which there are in this world, for all its threads and meshes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardfn.compat import process_groups
from shardfn.mesh import waiting, watchdog
from shardfn.mesh.grid import Grid
from shardfn.mesh.lanes import lane

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class World:
    """What this process has made of one world, for all its threads.

    Attributes:
        group: the group of all its ranks.
        grids: each grid that a mesh was made of, once, and the kind of device of the last.
        again: meshes that had gone, and were asked for again.
        agreed: what else its ranks have made or found out together, by lane.
        made: groups by use, lane and members.
    """

    group: dist.ProcessGroup | None
    grids: dict[Grid, tuple[Grid, str]] = field(default_factory=dict)
    again: dict[Grid, DeviceMesh] = field(default_factory=dict)
    agreed: dict[str, Any] = field(default_factory=dict)
    made: dict[tuple[str | int, ...], Future[dist.ProcessGroup]] = field(default_factory=dict)


OF_STEPS = ("", "reduce", "compare", "notes", "finish")  # uses of groups; what is saved meanwhile has other ones
_worlds: dict[int, World] = {}  # one, but in tests whose ranks are threads
_lock = threading.Lock()


def world_of_thread() -> World:
    """The world of this thread, which all threads of a process share."""
    group = dist.group.WORLD
    found = _worlds.get(id(group))
    if found is None:
        with _lock:
            found = _worlds.get(id(group))
            if found is None:
                if not process_groups.worlds_of_threads():
                    _worlds.clear()  # of one that has ended nothing is used again
                found = _worlds[id(group)] = World(group)
                if group is not None:
                    watchdog.joined()
    return found


def worlds() -> list[World]:
    """Those that this process knows."""
    return list(_worlds.values())


def forget_world() -> None:
    """This rank leaves its world."""
    _worlds.pop(id(dist.group.WORLD), None)


def group_over(ranks: list[int], use: str = "", backend: str | None = None) -> dist.ProcessGroup:
    """The group of these ranks, in this order, which all meshes share. Its members make it together, once a world.

    Args:
        ranks: global ranks, of which this is one.
        use: groups of different uses are different, though their ranks are the same.
        backend: of a group that is new; default: the world's.
    """
    world = world_of_thread()
    assert world.group is not None
    part = lane()
    if not use and not part and ranks == list(range(world.group.size())):
        return world.group
    key: tuple[str | int, ...] = (use, part, *ranks)
    found = world.made.get(key)
    if found is None:
        made: Future[dist.ProcessGroup] = Future()
        found = world.made.setdefault(key, made)
        if found is made:
            try:
                if process_groups.between_processes():
                    waiting.meet(repr(key), ranks, "the making of a group", use or "axes")
                made.set_result(process_groups.new_group(ranks, repr(key), backend))
            except BaseException as error:
                world.made.pop(key)
                made.set_exception(error)
                raise
    return found.result()


def cpu_group(ranks: list[int], use: str) -> dist.ProcessGroup:
    """As `group_over`, a group that moves CPU tensors, which no other use can disturb.

    Raises:
        RuntimeError: this torch has no gloo, which moves CPU tensors.
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
    """The groups of several ranks, all of them among these, by which this thread's steps move anything."""
    world, part = world_of_thread(), lane()
    found = [
        made.result()
        for (use, where, *_), made in list(world.made.items())
        if where == part and use in OF_STEPS and made.done() and made.exception() is None
    ]
    found += [world.group] if world.group is not None and not part else []
    among = set(ranks)
    return [one for one in found if one.size() > 1 and among.issuperset(dist.get_process_group_ranks(one))]
