"""Maps the axis names of a mesh to process groups.

A mesh is torch's `DeviceMesh` with named dimensions. Model code never sees a process group: it writes `"shard"` or
`("replica", "shard")`, and the mesh of the surrounding `shard_map` gives these names their meaning.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfn import callers
from shardfn.compat import devices
from shardfn.mesh import waiting
from shardfn.mesh.grid import ALONE, Axis, AxisName, Grid, as_names, show
from shardfn.mesh.groups import connected_group, group_over, world_of_thread
from shardfn.mesh.lanes import lane
from shardfn.quoting import short

T = TypeVar("T")
_numbers = itertools.count()
_meshes: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Axes:
    """The axes of one mesh that one lane has used so far, under a number that a traced graph can hold."""

    number: int
    lane: str
    used: dict[AxisName, Axis]


def sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Axis name -> size, in the mesh's order.

    Raises:
        ValueError: a mesh without dim names.
        TypeError: the argument is not a mesh.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(f"the mesh is of type {type(mesh).__name__}, not a DeviceMesh, which make_mesh returns")
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no axis names: pass mesh_dim_names=(...) to init_device_mesh, or use make_mesh")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def check_axes(names: tuple[str, ...], mesh: DeviceMesh, where: str) -> None:
    """Raises ValueError unless each name is an axis of the mesh and occurs once.

    Args:
        names: axis names.
        mesh: the mesh that should have these axes.
        where: the caller's name for the value, quoted in the message.
    """
    have = sizes(mesh)
    for name in names:
        if name not in have:
            raise ValueError(
                f"{callers.api_name(where)}: unknown axis {short(repr(name))}; the mesh has {short(show(have), 800)}"
            )
        if names.count(name) > 1:
            raise ValueError(
                f"{where}: axis {short(repr(name))} is named twice in {short(names)}; each axis can shard a value once"
            )


def axis_of(mesh: DeviceMesh, axis: AxisName, where: str = "axis") -> Axis:
    """Returns the named axis of the mesh, or the product of several (major to minor). Cached per mesh and lane.

    Raises:
        ValueError: a name is unknown to the mesh or is given twice.
    """
    used = known_axes(mesh).used
    bound = used.get(axis)
    if bound is None:
        bound = used[axis] = _bind(mesh, as_names(axis), where)
    return bound


def known_axes(mesh: DeviceMesh) -> Axes:
    """Returns the axes of the mesh that this thread's lane has used so far."""
    lane_name = lane()
    return per_mesh(mesh, ("axes", lane_name), lambda: _new_axes(mesh, lane_name))


def _new_axes(mesh: DeviceMesh, lane_name: str) -> Axes:
    axes = Axes(next(_numbers), lane_name, {})
    _meshes[axes.number] = mesh
    return axes


def mesh_numbered(number: int) -> DeviceMesh:
    """Returns the mesh whose `Axes` carry this number."""
    return _meshes[number]


def grid_of(mesh: DeviceMesh) -> Grid:
    """Returns the mesh's axis names, sizes and ranks; `mesh_of` finds the mesh again by them."""
    return per_mesh(mesh, "grid", lambda: _grid_of(mesh))


def _grid_of(mesh: DeviceMesh) -> Grid:
    grid = Grid(tuple(sizes(mesh).items()), tuple(mesh.mesh.flatten().tolist()))
    grids = world_of_thread().grids
    # Equal grids become one object, so that comparing them by identity mostly suffices.
    grid, _ = grids[grid] = grids.get(grid, (grid, ""))[0], mesh.device_type
    grid.add(mesh)
    return grid


def per_mesh(mesh: DeviceMesh, key: Hashable, make: Callable[[], T]) -> T:
    """Returns the value that this mesh stores under a key; `make` builds it on first use.

    The value is stored on the mesh object itself: equal meshes of two process groups, of which one has ended, must not
    share it.
    """
    stored: dict[Hashable, Any] = mesh.__dict__.setdefault("_shardfn", {})
    value = stored.get(key)
    if value is None:
        value = stored.setdefault(key, make())
    return cast(T, value)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns the device of this rank's tensors on the mesh: the one that was current where the mesh was first used.

    `mesh.device_type` has no index, and what is current differs between threads.
    """
    return per_mesh(mesh, "device", lambda: devices.current(mesh.device_type))


def axis_groups() -> set[str]:
    """Returns the names of the groups along the axes that this thread's lane has used."""
    all_axes = (mesh.__dict__.get("_shardfn", {}).get(("axes", lane())) for mesh in list(_meshes.values()))
    return {axis.group for axes in all_axes if axes is not None for axis in axes.used.values() if axis.group}


def forget_runs() -> None:
    """Drops the run state that this thread's lane keeps on meshes: pending waits and gathered values."""
    for mesh in list(_meshes.values()):
        stored: dict[Hashable, Any] = mesh.__dict__.get("_shardfn", {})
        for key in list(stored):
            match key:
                case ("engine" | "schedule" | "gathers again", at) | ("team", at, _) if at == lane():
                    stored.pop(key, None)


def _bind(mesh: DeviceMesh, names: tuple[str, ...], where: str) -> Axis:
    if not names:
        return ALONE
    check_axes(names, mesh, where)
    order = list(sizes(mesh))
    dims = [order.index(name) for name in names]
    ranks, rank = row(mesh.mesh, dims), dist.get_rank()
    if not ranks:
        raise ValueError(f"{where}: rank {rank} is in no row of the mesh, whose ranks are {mesh.mesh.tolist()}")
    group = _group_name(mesh, names, ranks)
    waiting.name_axes(group, " x ".join(names))
    return Axis(len(ranks), ranks.index(rank), group)


def row(places: torch.Tensor, dims: list[int]) -> list[int]:
    """Returns the ranks along these dims (the first is major) that share this rank's position in all other dims."""
    other_dims = [dim for dim in range(places.ndim) if dim not in dims]
    rows = places.permute(*other_dims, *dims).reshape(-1, math.prod(places.shape[dim] for dim in dims))
    rank = dist.get_rank()
    return next((row for row in rows.tolist() if rank in row), [])


def _group_name(mesh: DeviceMesh, names: tuple[str, ...], ranks: list[int]) -> str:
    if len(ranks) == 1:
        return ""  # a single rank needs no group
    # The mesh has a group for each axis; lanes have groups of their own, and the group of all ranks is the world's.
    reusable = len(names) == 1 and ranks == sorted(ranks) and ranks != list(range(dist.get_world_size())) and not lane()
    group = mesh.get_group(names[0]) if reusable else group_over(ranks)
    return connected_group(group, device_of(mesh)).group_name
