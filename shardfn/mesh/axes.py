"""Meshes and their axes: names in, process groups out.

A mesh is torch's `DeviceMesh` with named dims. Model code never sees a process group: it says `"shard"` or
`("replica", "shard")`, and the mesh of the surrounding `shard_map` gives the names their meaning.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import re
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from shardfn.compat import autograd, dynamo, process_groups
from shardfn.mesh import waiting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

AxisName = str | tuple[str, ...]
"""One mesh axis, or several as their product, major to minor; `()` is none: this rank alone, on a mesh or without."""


@dataclass(frozen=True)
class Axis:
    """One mesh axis, or the product of several, as this rank sees it.

    Attributes:
        size: ranks along it.
        index: this rank's position along it; the first of several names is the major one.
        group: name of the process group that runs along it.
    """

    size: int
    index: int
    group: str


ALONE = Axis(1, 0, "")  # the product of no axes


@dataclass(frozen=True)
class Axes:
    """The axes of one mesh that were used so far, and a number for the mesh, which a traced graph can hold."""

    number: int
    used: dict[AxisName, Axis]


@dataclass(frozen=True)
class Grid:
    """What a mesh is without its process groups: axis names and sizes, and the rank at each place, row-major."""

    sizes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def size(self, names: AxisName) -> int:
        """Ranks along an axis, or along the product of several."""
        have = dict(self.sizes)
        return math.prod(have[name] for name in as_names(names))

    def index(self, rank: int, names: AxisName) -> int:
        """Where a rank stands along an axis, or along the product of several, major to minor.

        Raises:
            ValueError: a rank that is not in the mesh.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in the mesh, whose ranks are {self.ranks}")
        place, at = self.ranks.index(rank), {}
        for name, size in reversed(self.sizes):
            place, at[name] = divmod(place, size)
        have, index = dict(self.sizes), 0
        for name in as_names(names):
            index = index * have[name] + at[name]
        return index

    def __str__(self) -> str:
        return _show(dict(self.sizes))


class _Scope(threading.local):
    """The mesh in scope on this thread."""

    def __init__(self) -> None:  # each thread's own from the start: a graph is for what it found there
        self.mesh: DeviceMesh | None = None
        self.axes: Axes | None = None
        self.independent: tuple[str, ...] = ()
        self.lane: str | None = None


@dataclass(frozen=True)
class World:
    """What this process has made of one world, for all its threads.

    Attributes:
        group: the group of all its ranks.
        meshes: the last mesh of each grid, and its kind of device.
        again: meshes that values were still placed on when they had gone.
        agreed: what else its ranks have made or found out together, by lane.
        made: groups by use, lane and members.
    """

    group: dist.ProcessGroup | None
    meshes: dict[Grid, tuple[weakref.ref[DeviceMesh], str]] = field(default_factory=dict)
    again: dict[Grid, DeviceMesh] = field(default_factory=dict)
    agreed: dict[str, Any] = field(default_factory=dict)
    made: dict[tuple[str | int, ...], Future[dist.ProcessGroup]] = field(default_factory=dict)


LEAVE_TOGETHER = timedelta(seconds=10)
_scope = _Scope()
_worlds: dict[int, World] = {}  # one, but in tests whose ranks are threads
_lock = threading.Lock()
_entered: list[int] = []  # numbers of the meshes in scope on any thread
_meshes: dict[int, weakref.ref[DeviceMesh]] = {}
_lanes: dict[int, str] = {}  # of them
_numbers = itertools.count()
_NUMBERS = re.compile(r"(?<=^Thread)-\d+|(?<=^ThreadPoolExecutor)-\d+|_\d+$")


def make_mesh(*, device: str | None = None, **sizes: int) -> DeviceMesh:
    """A mesh of all processes with the named axes, slowest-varying first.

    Starts torch.distributed if nobody has: from torchrun's environment where there is one, as a world of one
    process otherwise.

    Args:
        device: `"cpu"`, `"cuda"`, ...; default: CUDA where there is some, else the CPU.
        **sizes: axis name -> ranks along it. One may be -1: whatever is left of the world.

    Raises:
        ValueError: no axes, a size below 1, more than one -1, or sizes that do not multiply to the world.

    Example:
        >>> mesh = make_mesh(replica=2, shard=-1)  # doctest: +SKIP
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"make_mesh: axis {name!r} has size {size!r}; a size is a positive integer, or -1 once")
    if not sizes or list(sizes.values()).count(-1) > 1:
        raise ValueError(f"make_mesh needs at least one axis, and at most one of size -1; got {_show(sizes)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    _start_distributed()
    _claim_device(device)
    world = dist.get_world_size()
    known = math.prod(size for size in sizes.values() if size != -1)
    if world % known or (-1 not in sizes.values() and known != world):
        some, fix = ("a multiple of ", "") if -1 in sizes.values() else ("", ", or let one axis be -1")
        raise ValueError(
            f"make_mesh({_show(sizes)}) needs {some}{known} processes, but the world has {world}: "
            f"start it with torchrun --nproc-per-node {known}{fix}"
        )
    filled = {name: world // known if size == -1 else size for name, size in sizes.items()}
    from torch.distributed.device_mesh import init_device_mesh

    whole = init_device_mesh(device, (world,), mesh_dim_names=("world",)).mesh  # it chooses this process's device, too
    return _mesh(whole.view(tuple(filled.values())), tuple(filled), device)


def _mesh(places: torch.Tensor, names: tuple[str, ...], device: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    groups = [group_over(_row(places, [dim])) for dim in range(places.ndim)]
    return DeviceMesh.from_group(groups, device, places, mesh_dim_names=names)


def _again(grid: Grid, device: str) -> DeviceMesh:
    """A mesh that has gone, while values are placed on it."""
    names, lengths = zip(*grid.sizes, strict=True)
    mesh = _mesh(torch.tensor(grid.ranks).view(lengths), names, device)
    grid_of(mesh)
    return mesh


def sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Axis name -> size, in the mesh's order.

    Raises:
        ValueError: a mesh without dim names.
    """
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no axis names: pass mesh_dim_names=(...) to init_device_mesh, or use make_mesh")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def as_names(axis: AxisName) -> tuple[str, ...]:
    """`"a"` and `("a", "b")` as a tuple of names."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


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
            raise ValueError(f"{where}: unknown axis {name!r}; the mesh has {_show(have)}")
        if names.count(name) > 1:
            raise ValueError(f"{where}: axis {name!r} stands twice in {names}; each axis can cut a value once")


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


def bound_axis(axis: AxisName, where: str) -> Axis:
    """The named axis of the mesh in scope.

    Args:
        axis: a name or a tuple of names.
        where: the function that asks, for the message.

    Raises:
        NameError: no mesh in scope.
        ValueError: a name that the mesh does not have.
    """
    if not isinstance(axis, str) and not (isinstance(axis, tuple) and all(isinstance(name, str) for name in axis)):
        told = type(axis).__name__ if isinstance(axis, torch.Tensor) or "tensor(" in repr(axis) else repr(axis)
        raise TypeError(f"{where}: an axis is a name or a tuple of names, not {told}")
    if not axis:
        return ALONE
    axes = _scope.axes or _elsewhere()
    if axes is None:
        raise NameError(
            f"{where}: there is no mesh in scope, so the axis {axis!r} means nothing here. "
            f"Call it under shardfn.shard_map(f, mesh=..., in_specs=..., out_specs=...)."
        )
    if torch.compiler.is_compiling():
        return _axis_of_number(axes.number, axis, where)
    found = axes.used.get(axis)
    return _axis_of_number(axes.number, axis, where) if found is None else found


def current_mesh() -> DeviceMesh | None:
    """The mesh in scope, or None."""
    return _scope.mesh


def current_axes() -> Axes | None:
    """The axes of the mesh in scope, or None."""
    return _scope.axes


def mesh_numbered(number: int) -> DeviceMesh:
    """The mesh in scope whose axes have this number."""
    mesh = _meshes[number]()
    assert mesh is not None, "a mesh in scope is alive"
    return mesh


def grid_of(mesh: DeviceMesh) -> Grid:
    """The mesh's names, sizes and ranks; `mesh_of` finds the mesh again by them."""
    return per_mesh(mesh, "grid", lambda: _grid_of(mesh))


def _grid_of(mesh: DeviceMesh) -> Grid:
    grid = Grid(tuple(sizes(mesh).items()), tuple(mesh.mesh.flatten().tolist()))
    world_of_thread().meshes[grid] = weakref.ref(mesh), mesh.device_type
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


def mesh_of(grid: Grid, where: str) -> DeviceMesh:
    """The mesh in scope, which must be the one of `grid`; without one in scope, the last that was made like it.

    Raises:
        ValueError: another mesh is in scope, or none and there is no such mesh in this world.
    """
    mesh = _scope.mesh
    if mesh is None:
        here = world_of_thread()
        found, device = here.meshes.get(grid, (None, ""))
        if found is None:
            raise ValueError(
                f"{where} is placed on a mesh ({grid}) that this process does not have: make it with "
                f"make_mesh({grid}), or call it under shard_map(mesh=...)"
            )
        alive = found()
        if alive is None:
            alive = here.again[grid] = _again(grid, device)
        return alive
    if grid_of(mesh) is not grid and grid_of(mesh) != grid:
        mine = grid_of(mesh)
        told = str(mine) if str(mine) != str(grid) else f"{mine}, with other ranks: {mine.ranks}, not {grid.ranks}"
        raise ValueError(
            f"{where} is placed on a mesh ({grid}), but the mesh in scope has ({told}): run it on its own mesh, or "
            f"place it anew with shardfn.shard(shardfn.unshard(...), mesh, ...)"
        )
    return mesh


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
                made.set_result(_made(ranks, use, repr(key), backend))
            except BaseException as error:
                world.made.pop(key)
                made.set_exception(error)
                raise
    return found.result()


def _made(ranks: list[int], use: str, name: str, backend: str | None) -> dist.ProcessGroup:
    if _between_processes():
        waiting.meet(name, ranks, "the making of a group", use or "axes")
    return process_groups.new_group(ranks, name, backend)


def cpu_group(ranks: list[int], use: str) -> dist.ProcessGroup:
    """As `group_over`, a group that moves CPU tensors, which no other use can disturb.

    Raises:
        RuntimeError: this torch has no gloo, which moves CPU tensors.
    """
    if not _between_processes():
        return group_over(ranks)
    if not dist.is_gloo_available():
        raise RuntimeError(
            f"ranks {use} on the CPU, by gloo, beside whatever moves tensors on their devices, and this torch "
            f"({torch.__version__}) was built without gloo: install one with it, as PyTorch's own packages are"
        )
    return group_over(ranks, use, "gloo")


def _between_processes() -> bool:
    """Whether the world's ranks are processes that can meet, and not made up, or threads, as in tests."""
    config = str(dist.get_backend_config())
    return any(kind in config for kind in ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "undefined"))


def lane() -> str:
    """Which of the threads that work at the same time this is: each has groups of its own.

    It is the thread's name, without the numbers that Python gives, by which it finds its like on the other ranks; the
    main thread's is empty.
    """
    if _scope.lane is not None:
        return _scope.lane
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    if autograd.autograd_thread():
        entered = {_lanes[number] for number in set(_entered)}
        return entered.pop() if len(entered) == 1 else ""
    found: str | None = thread.__dict__.get("_shardfn_lane")
    if found is None:
        found = "" if process_groups.worlds_of_threads() else _NUMBERS.sub("", thread.name)
        thread.__dict__["_shardfn_lane"] = found
    return found


class in_lane:
    """A context: what runs inside belongs to a lane, on whichever thread autograd runs it."""

    __slots__ = ("before", "lane")

    def __init__(self, lane: str) -> None:
        self.lane = lane

    def __enter__(self) -> None:
        self.before, _scope.lane = _scope.lane, self.lane

    def __exit__(self, *_: object) -> None:
        _scope.lane = self.before


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
                    waiting.joined()
    return found


def forget_world() -> None:
    """This rank leaves its world."""
    _worlds.pop(id(dist.group.WORLD), None)


@contextlib.contextmanager
def scope(mesh: DeviceMesh, axes: Axes | None = None) -> Iterator[None]:
    """Axis names inside mean those of `mesh`; `axes` is `known_axes(mesh)`, where the caller has it."""
    axes = known_axes(mesh) if axes is None else axes
    before = _scope.mesh, _scope.axes
    _scope.mesh, _scope.axes = mesh, axes
    _entered.append(axes.number)
    try:
        yield
    finally:
        _entered.remove(axes.number)
        _scope.mesh, _scope.axes = before


@contextlib.contextmanager
def independent_along(names: tuple[str, ...]) -> Iterator[None]:
    """Inside, ranks along these axes each run a part of a program of their own, as the stages of a pipeline do."""
    before, _scope.independent = _scope.independent, (*_scope.independent, *names)
    try:
        yield
    finally:
        _scope.independent = before


def independent_axes() -> tuple[str, ...]:
    """The axes along which each rank runs its own part of a program here, so that nothing may go along them."""
    return _scope.independent


def refuse_independent(axis: AxisName, where: str) -> None:
    """Raises RuntimeError where ranks along an axis run independently: they could only wait for each other."""
    if _scope.independent and (among := set(_scope.independent).intersection(as_names(axis))):
        raise RuntimeError(
            f"{where}: ranks along {' and '.join(map(repr, sorted(among)))} run independently here, each its own part of "
            f"a pipeline on its own micro-batch, so nothing can go along that axis: do it before or after the pipeline"
        )


def _elsewhere() -> Axes | None:
    """What names mean on a thread that Python did not start: autograd recomputes on one, for CUDA tensors."""
    if not autograd.autograd_thread():
        return None
    meshes = [_meshes[number]() for number in set(_entered)]
    return known_axes(meshes[0]) if len(meshes) == 1 and meshes[0] is not None else None


@dynamo.constant_when_traced
def _axis_of_number(number: int, axis: AxisName, where: str) -> Axis:
    return axis_of(mesh_numbered(number), axis, where)


def known_axes(mesh: DeviceMesh) -> Axes:
    """The axes of the mesh that were used so far."""
    part = lane()
    return per_mesh(mesh, ("axes", part), lambda: _new_axes(mesh, part))


def _new_axes(mesh: DeviceMesh, part: str) -> Axes:
    axes = Axes(next(_numbers), {})
    _meshes[axes.number], _lanes[axes.number] = weakref.ref(mesh), part
    return axes


def _bind(mesh: DeviceMesh, names: tuple[str, ...], where: str) -> Axis:
    if not names:
        return ALONE
    check_axes(names, mesh, where)
    order = list(sizes(mesh))
    dims = [order.index(name) for name in names]
    ranks, rank = _row(mesh.mesh, dims), dist.get_rank()
    if not ranks:
        raise ValueError(f"{where}: rank {rank} is in no row of the mesh, whose ranks are {mesh.mesh.tolist()}")
    group = _group_name(mesh, names, ranks)
    waiting.along(group, " x ".join(names))
    return Axis(len(ranks), ranks.index(rank), group)


def _row(places: torch.Tensor, dims: list[int]) -> list[int]:
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


def _start_distributed() -> None:
    if dist.is_initialized():
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, size = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
        # When torchrun starts processes again, those that died have left their addresses in the store.
        life = dist.PrefixStore(f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)  # type: ignore[attr-defined]
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


def _check_device(device: str) -> None:
    """Raises ValueError for what names no kind of device, such as one with an index."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.index is not None:
        what = "a kind of device, without a number" if found is not None else "no device of torch"
        fix = "cuda" if found is None or found.type == "cuda" else found.type
        raise ValueError(f'make_mesh(device={device!r}): that is {what}; write device="{fix}" or device="cpu"')


def _claim_device(device: str) -> None:
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


def _show(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
