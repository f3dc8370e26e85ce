"""The mesh in scope: the mesh of the surrounding `shard_map`, by which axis names are resolved."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardfn import callers
from shardfn.compat import autograd, dynamo
from shardfn.compat.replacing import replaced
from shardfn.debugging import debugging
from shardfn.mesh import comparisons, lanes
from shardfn.mesh.axes import Axes, axis_of, device_of, grid_of, known_axes, mesh_numbered
from shardfn.mesh.grid import ALONE, Axis, AxisName, Grid, as_names
from shardfn.mesh.groups import world_of_thread
from shardfn.mesh.make import made_again


class _Scope(threading.local):
    """The mesh in scope on this thread."""

    def __init__(self) -> None:  # set in every thread, as torch.compile guards on these attributes
        self.mesh: DeviceMesh | None = None
        self.axes: Axes | None = None
        self.independent: tuple[str, ...] = ()
        self.part: BatchPart | None = None
        self.elsewhere = False


_scope = _Scope()


def scope(mesh: DeviceMesh, axes: Axes | None = None) -> contextlib.AbstractContextManager[None]:
    """A context in which axis names mean those of `mesh`; `axes` is `known_axes(mesh)` if the caller has it."""
    if debugging.collectives and not torch.compiler.is_compiling():
        return _watched(mesh, axes)
    return _scoped(mesh, axes)


@contextlib.contextmanager
def _watched(mesh: DeviceMesh, axes: Axes | None) -> Iterator[None]:
    with comparisons.body(), _scoped(mesh, axes):
        yield


@contextlib.contextmanager
def _scoped(mesh: DeviceMesh, axes: Axes | None) -> Iterator[None]:
    axes = known_axes(mesh) if axes is None else axes
    before = _scope.mesh, _scope.axes, _scope.part
    _scope.mesh, _scope.axes, _scope.part = mesh, axes, None
    entry = axes.number, axes.lane
    lanes.entered.append(entry)
    try:
        yield
    finally:
        lanes.entered.remove(entry)
        _scope.mesh, _scope.axes, _scope.part = before


@contextlib.contextmanager
def as_if_at(axis: AxisName, index: int) -> Iterator[None]:
    """A context in which the program computes shapes as a different rank along an axis of the mesh in scope."""
    mesh, axes = _scope.mesh, _scope.axes
    assert mesh is not None, "an axis belongs to a mesh"
    assert axes is not None, "a mesh has axes"
    axis_there = dataclasses.replace(bound_axis(axis, "axis"), index=index)
    names = as_names(axis)
    used = {known: bound for known, bound in axes.used.items() if not set(as_names(known)) & set(names)}
    there_axes = dataclasses.replace(axes, used=used | dict.fromkeys((axis, names), axis_there))
    with replaced(_scope, elsewhere=True), _scoped(mesh, there_axes):
        yield


def elsewhere() -> bool:
    """Whether the program computes shapes as a different rank, which may hold parameters that this rank lacks."""
    return _scope.elsewhere


def current_mesh() -> DeviceMesh | None:
    """Returns the mesh in scope, or None."""
    return _scope.mesh


def current_axes() -> Axes | None:
    """Returns the axes of the mesh in scope, or None."""
    return _scope.axes


def bound_axis(axis: AxisName, where: str) -> Axis:
    """Returns the named axis of the mesh in scope.

    Args:
        axis: a name or a tuple of names.
        where: the calling function, for the message.

    Raises:
        TypeError: the axis is neither a name nor a tuple of names.
        NameError: no mesh is in scope.
        ValueError: the mesh has no axis of a name.
    """
    if not isinstance(axis, str) and not (isinstance(axis, tuple) and all(isinstance(name, str) for name in axis)):
        got = type(axis).__name__ if isinstance(axis, torch.Tensor) or "tensor(" in repr(axis) else repr(axis)
        raise TypeError(f"{callers.api_name(where)}: axis must be a name or a tuple of names, got {got}")
    if not axis:
        return ALONE
    axes = axes_here()
    part = _part_here(axes)
    if part is not None and set(part.axes) & set(as_names(axis)):
        if where == "fold_in" and set(part.axes) == set(as_names(axis)):
            return Axis(part.count, part.number, _PART)
        raise RuntimeError(
            f"{callers.api_name(where)}: axis {axis!r} means nothing in an exact part of a batch, a function of its "
            f"own rows. Return (total, count) of these rows; accumulate adds over all parts"
        )
    if axes is None:
        raise NameError(
            f"{callers.api_name(where)}: there is no mesh in scope, so the axis {axis!r} means nothing here. "
            f"Call it under shardfn.shard_map(f, mesh=..., in_specs=..., out_specs=...)."
        )
    if torch.compiler.is_compiling():
        return _axis_of_number(axes.number, axis, where)
    bound = axes.used.get(axis)
    return _axis_of_number(axes.number, axis, where) if bound is None else bound


def axes_here() -> Axes | None:
    """Returns the axes in scope; on an accelerator's autograd thread, those of the only mesh in use; or None."""
    if _scope.axes is not None or not autograd.autograd_thread():
        return _scope.axes
    meshes = [mesh_numbered(number) for number, _ in set(lanes.entered)]
    return known_axes(meshes[0]) if len(meshes) == 1 else None


@dynamo.constant_when_traced
def _axis_of_number(number: int, axis: AxisName, where: str) -> Axis:
    return axis_of(mesh_numbered(number), axis, where)


def current_device() -> torch.device | None:
    """Returns the device of this rank's tensors on the mesh in scope; None if there is none."""
    return None if _scope.axes is None else _device_numbered(_scope.axes.number)


@dynamo.constant_when_traced
def _device_numbered(number: int) -> torch.device:
    return device_of(mesh_numbered(number))


def scope_of(grid: Grid, where: str) -> contextlib.AbstractContextManager[None]:
    """A context in which axis names mean those of the mesh with this grid, which `mesh_of` returns."""
    return scope(mesh_of(grid, where))


def mesh_of(grid: Grid, where: str) -> DeviceMesh:
    """Returns the mesh in scope, checked against `grid`; without one, the newest mesh made with that grid.

    Raises:
        ValueError: the mesh in scope has a different grid; or none is in scope, and this process made none like it.
    """
    mesh = _scope.mesh
    if mesh is None:
        world = world_of_thread()
        canonical, device = world.grids.get(grid, (None, ""))
        if canonical is None:
            raise ValueError(
                f"{where} is placed on a mesh ({grid}) that this process does not have: make it with "
                f"make_mesh({grid}), or call it under shard_map(mesh=...)"
            )
        alive = canonical.mesh()
        if alive is None:  # no flat shard keeps the mesh alive, for instance after loading from a file
            alive = world.again[canonical] = made_again(canonical, device)
        return alive
    if grid_of(mesh) is not grid and grid_of(mesh) != grid:
        own_grid = grid_of(mesh)
        got = (
            str(own_grid)
            if str(own_grid) != str(grid)
            else f"{own_grid}, with other ranks: {own_grid.ranks}, not {grid.ranks}"
        )
        raise ValueError(
            f"{where} is placed on a mesh ({grid}), but the mesh in scope has ({got}): run it on its own mesh, or "
            f"place it again with shardfn.shard(shardfn.unshard(...), mesh, ...)"
        )
    return mesh


_PART = "part"
_open_parts: list[tuple[int, Any, BatchPart]] = []  # of all ranks of this process: autograd's threads have no scope


def is_part(axis: Axis) -> bool:
    """Whether an axis stands for the parts of a batch, in place of the ranks that compute them."""
    return axis.group is _PART


@dataclasses.dataclass(frozen=True)
class BatchPart:
    """A part of a batch whose sums do not depend on the mesh.

    Attributes:
        axes: the axes along which ranks work on different parts.
        number: its number among the parts of all ranks.
        count: the number of these.
    """

    axes: tuple[str, ...]
    number: int
    count: int


def inside_part() -> bool:
    """Whether the program computes one part of a batch, whose sums do not depend on the mesh."""
    return _scope.part is not None


@contextlib.contextmanager
def in_part(part: BatchPart) -> Iterator[None]:
    """A context in which the program computes one part of a batch; the part's axes are those of the mesh in scope."""
    axes = _scope.axes
    assert axes is not None, "a part is one of the batch of a mesh"
    entry = axes.number, axes.lane, part
    _open_parts.append(entry)
    try:
        with replaced(_scope, part=part):
            yield
    finally:
        _open_parts.remove(entry)


def _part_here(axes: Axes | None) -> BatchPart | None:
    """The part that the program computes; on an accelerator's autograd thread, the one whose backward runs there.

    Backward blocks the thread that called it, so a rank has one part at a time.
    """
    if _scope.part is not None or axes is None or not _open_parts or not autograd.autograd_thread():
        return _scope.part
    parts = {lane: part for number, lane, part in list(_open_parts) if number == axes.number}
    if parts and axes.lane not in parts and len({lane for _, lane in list(lanes.entered)}) > 1:
        raise RuntimeError(
            "an autograd thread computes for several threads, one of them exact parts of a batch, so it is unknown "
            "which part this is: compute backward in one thread at a time"
        )
    return parts.get(axes.lane)


def independent_along(names: tuple[str, ...]) -> Any:
    """A context in which ranks along these axes run different programs, as pipeline stages do."""
    return replaced(_scope, independent=(*_scope.independent, *names))


def independent_axes() -> tuple[str, ...]:
    """Returns the axes along which ranks run different programs, so that no collective may use them."""
    return _scope.independent


def refuse_independent(axis: AxisName, where: str) -> None:
    """Raises RuntimeError if ranks along an axis run independently, where a collective would deadlock."""
    if _scope.independent and (shared := set(_scope.independent).intersection(as_names(axis))):
        raise RuntimeError(
            f"{where}: ranks along {' and '.join(map(repr, sorted(shared)))} run independently here, each its own part "
            f"of a pipeline on its own micro-batch: nothing can go along that axis but before or after the pipeline"
        )
