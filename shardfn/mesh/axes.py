"""The axes of a mesh: names in, process groups out.

A mesh is torch's `DeviceMesh` with named dims. Model code never sees a process group: it says `"shard"` or
`("replica", "shard")`, and the mesh of the surrounding `shard_map` gives the names their meaning.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from shardfn.mesh import waiting
from shardfn.mesh.grid import ALONE, Axis, AxisName, Grid, as_names, show
from shardfn.mesh.groups import group_over, world_of_thread
from shardfn.mesh.lanes import lane
from shardfn.quoting import short

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


T = TypeVar("T")
_numbers = itertools.count()
_meshes: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Axes:
    """The axes of one mesh that one lane has used so far, with a number for them, which a traced graph can hold."""

    number: int
    lane: str
    used: dict[AxisName, Axis]


def sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Axis name -> size, in the mesh's order.

    Raises:
        ValueError: a mesh without dim names.
        TypeError: something else than a mesh.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(f"the mesh is of type {type(mesh).__name__}, not a DeviceMesh, which make_mesh returns")
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no axis names: pass mesh_dim_names=(...) to init_device_mesh, or use make_mesh")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def check_axes(names: tuple[str, ...], mesh: DeviceMesh, where: str) -> None:
    """Raises ValueError unless each name is an axis of the mesh, once.

    Args:
        names: axis names.
        mesh: the mesh that should have them.
        where: what named them, for the message.
    """
    have = sizes(mesh)
    for name in names:
        if name not in have:
            raise ValueError(f"{where}: unknown axis {short(repr(name))}; the mesh has {short(show(have), 800)}")
        if names.count(name) > 1:
            raise ValueError(
                f"{where}: axis {short(repr(name))} is named twice in {short(names)}; each axis can cut a value once"
            )


def axis_of(mesh: DeviceMesh, axis: AxisName, where: str = "axis") -> Axis:
    """The named axis of the mesh, or the product of several, major to minor. Made once, then remembered.

    Raises:
        ValueError: a name that the mesh does not have, or has twice.
    """
    used = known_axes(mesh).used
    found = used.get(axis)
    if found is None:
        found = used[axis] = _bind(mesh, as_names(axis), where)
    return found


def known_axes(mesh: DeviceMesh) -> Axes:
    """The axes of the mesh that were used so far."""
    part = lane()
    return per_mesh(mesh, ("axes", part), lambda: _new_axes(mesh, part))


def _new_axes(mesh: DeviceMesh, part: str) -> Axes:
    axes = Axes(next(_numbers), part, {})
    _meshes[axes.number] = mesh
    return axes


def mesh_numbered(number: int) -> DeviceMesh:
    """The mesh in scope whose axes have this number."""
    return _meshes[number]


def grid_of(mesh: DeviceMesh) -> Grid:
    """The mesh's names, sizes and ranks; `mesh_of` finds the mesh again by them."""
    return per_mesh(mesh, "grid", lambda: _grid_of(mesh))


def _grid_of(mesh: DeviceMesh) -> Grid:
    grid = Grid(tuple(sizes(mesh).items()), tuple(mesh.mesh.flatten().tolist()))
    known = world_of_thread().grids
    grid, _ = known[grid] = known.get(grid, (grid, ""))[0], mesh.device_type
    grid.add(mesh)
    return grid


def per_mesh(mesh: DeviceMesh, key: Hashable, make: Callable[[], T]) -> T:
    """What this mesh has under a key, made when it is asked for first.

    It is on the mesh itself: equal meshes of two process groups, one ended and one alive, must not share it.
    """
    kept: dict[Hashable, Any] = mesh.__dict__.setdefault("_shardfn", {})
    found = kept.get(key)
    if found is None:
        found = kept.setdefault(key, make())
    return cast(T, found)


def axis_groups() -> set[str]:
    """Names of the groups along the axes that this thread's lane has used."""
    every = (mesh.__dict__.get("_shardfn", {}).get(("axes", lane())) for mesh in list(_meshes.values()))
    return {axis.group for axes in every if axes is not None for axis in axes.used.values() if axis.group}


def forget_runs() -> None:
    """Drops what this thread's lane keeps with meshes while its steps run: what it waited for, and what it gathered."""
    for mesh in list(_meshes.values()):
        kept: dict[Hashable, Any] = mesh.__dict__.get("_shardfn", {})
        for key in list(kept):
            match key:
                case ("engine", _, part) | ("team", part, _) if part == lane():
                    kept.pop(key, None)


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
    waiting.along(group, " x ".join(names))
    return Axis(len(ranks), ranks.index(rank), group)


def row(places: torch.Tensor, dims: list[int]) -> list[int]:
    """The ranks along these dims, the first of them major, with which this one shares its place in the others."""
    rest = [dim for dim in range(places.ndim) if dim not in dims]
    rows = places.permute(*rest, *dims).reshape(-1, math.prod(places.shape[dim] for dim in dims))
    rank = dist.get_rank()
    return next((row for row in rows.tolist() if rank in row), [])


def _group_name(mesh: DeviceMesh, names: tuple[str, ...], ranks: list[int]) -> str:
    if len(ranks) == 1:
        return ""  # nothing moves along it
    own = len(names) == 1 and ranks == sorted(ranks) and ranks != list(range(dist.get_world_size())) and not lane()
    return (mesh.get_group(names[0]) if own else group_over(ranks)).group_name
