"""Makes meshes: of all processes, or again on the ranks of a mesh that was garbage-collected."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfn.compat import devices
from shardfn.local_paths import local_path
from shardfn.mesh.axes import device_of, grid_of, per_mesh, row
from shardfn.mesh.grid import Grid, show
from shardfn.mesh.groups import connected_group, group_over
from shardfn.mesh.planned import planned
from shardfn.mesh.start import check_device, claim_device, idle_devices, patience, start_distributed
from shardfn.quoting import advised, short
from shardfn.tracebacks import api_boundary

_log = logging.getLogger("shardfn")


@api_boundary
@advised({}, "axes have names, the slowest first: make_mesh(data=2, tensor=4)")
def make_mesh(
    *, device: str | None = None, scratch: Any = None, timeout: float | timedelta | None = None, **sizes: int
) -> DeviceMesh:
    """Makes a mesh of all processes with the named axes, slowest-varying first.

    Starts torch.distributed if nobody has: from the environment of torchrun, srun or mpirun, or else as a world of one
    process. In the first case it also sets those of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT that are
    unset, as torchrun does. The last axes lie within a node as far as its ranks reach: the order of the axes decides
    which, since launchers number the ranks of a node consecutively unless told otherwise. An axis that would fit into a
    node but spans several is named in the log.

    Args:
        device: `"cpu"`, `"cuda"`, ...; default: CUDA if there is any, else the CPU.
        scratch: the path of a folder on a local disk where strategies keep values; see `Placement.on`. Default: the
            environment's SHARDFN_SCRATCH. What is stored there is lost when the process ends.
        timeout: how long ranks wait for each other, at the start and in every group of this world: seconds, or a
            `timedelta`. Default: torch's. A world that has begun keeps its own.
        **sizes: axis name -> number of ranks along it. One may be -1: whatever is left of the world.

    Returns:
        torch's own mesh, whose dimensions have these names and sizes; rank `r` is at the place with the row-major
        index `r`. Meshes of one world share their process groups.

    Raises:
        ValueError: no axes, a size below 1, more than one -1, or sizes whose product is not the world's size; a device
            with an index; a timeout that is not positive and finite, or differs from that of a world which has begun;
            a launcher's variables are missing or contradict each other.
        TypeError: a timeout that is no time, or a scratch that is no path.
        RuntimeError: ranks did not come in time, or disagree about their world; two ranks of a host use one
            accelerator although there are others; a node has more ranks than devices.

    Example:
        >>> mesh = make_mesh(replica=2, shard=-1)  # doctest: +SKIP
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(
                f"make_mesh: axis {short(repr(name))} has size {short(repr(size))}; a size is a positive integer, "
                f"or -1 once, as in make_mesh(data=2, tensor=-1)"
            )
    if not sizes or list(sizes.values()).count(-1) > 1:
        raise ValueError(
            f"make_mesh needs at least one axis, and at most one of size -1, as in make_mesh(data=-1); got "
            f"{short(show(sizes), 800) or 'none'}"
        )
    if scratch is not None and not isinstance(scratch, (str, os.PathLike)):
        raise TypeError(
            f"make_mesh: scratch must be the path of a folder, got {short(repr(scratch))}. No axis can have this name"
        )
    if scratch is not None:
        local_path(scratch, "make_mesh: scratch")
    if scratch is not None and not os.fspath(scratch):
        raise ValueError("make_mesh: scratch must be the path of a folder or None, got ''")
    device = device or planned() or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    if planned() and device != planned():
        raise ValueError(
            f"make_mesh: device={device!r}, while this process plans for {planned()!r}: leave device= out, or pass the "
            f"name of what `with plan.mode(...) as device` gives"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"make_mesh: device='cuda', but torch {torch.__version__} finds no CUDA device: install a build of torch "
            f"for CUDA, look at CUDA_VISIBLE_DEVICES, or pass device='cpu'"
        )
    hosts = start_distributed(device, patience(timeout))
    claim_device(device)
    if device == "cuda":
        devices.pin_exactly()
    world = dist.get_world_size()
    product = math.prod(size for size in sizes.values() if size != -1)
    if world % product or (-1 not in sizes.values() and product != world):
        multiple, fix = ("a multiple of ", "") if -1 in sizes.values() else ("", ", or let one axis be -1")
        start = (
            f"plan with plan.mode(ranks={product})"
            if planned()
            else f"start it with torchrun --nproc-per-node {product}"
        )
        raise ValueError(
            f"make_mesh({short(show(sizes), 800)}) needs {multiple}{product} {'ranks' if planned() else 'processes'}, "
            f"but the world has {world}: {start}{fix}"
        )
    filled = {name: world // product if size == -1 else size for name, size in sizes.items()}
    spans = across(hosts, filled)
    if spans and dist.get_rank() == 0:
        _log.warning("make_mesh(%s): %s", show(filled), spans)
    if dist.get_rank() == 0 and not planned() and (idle := idle_devices(device, hosts)):
        _log.warning(
            "make_mesh(%s): %d of this host's devices are idle: start a rank for each, torchrun --nproc-per-node gpu",
            show(filled), idle,
        )  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh

    whole = init_device_mesh(device, (world,), mesh_dim_names=("world",)).mesh
    mesh = _device_mesh(whole.view(tuple(filled.values())), tuple(filled), device)
    device_of(mesh)  # cached now: threads that use the mesh may have a different current device
    if scratch is not None:
        folder = os.path.abspath(os.path.expanduser(os.fspath(scratch)))
        per_mesh(mesh, "scratch", lambda: folder)
    return mesh


def _device_mesh(places: torch.Tensor, names: tuple[str, ...], device: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    groups = [connected_group(group_over(row(places, [dim])), devices.current(device)) for dim in range(places.ndim)]
    return DeviceMesh.from_group(groups, device, places, mesh_dim_names=names)


def made_again(grid: Grid, device: str) -> DeviceMesh:
    """Makes a mesh again that was garbage-collected while values are still placed on it."""
    names, lengths = zip(*grid.sizes, strict=True)
    mesh = _device_mesh(torch.tensor(grid.ranks, device="cpu").view(lengths), names, device)
    grid_of(mesh)
    return mesh


def across(hosts: Sequence[str], sizes: dict[str, int]) -> str:
    """Returns a warning about an axis that spans nodes although it would fit into one; empty if there is none.

    Args:
        hosts: the host of each rank.
        sizes: axis name -> number of ranks along it, slowest-varying first.
    """
    inner, largest = 1, max(Counter(hosts).values(), default=0)
    for name, size in reversed(sizes.items()):
        inner *= size
        if inner > largest:
            return ""
        for first in range(0, len(hosts), inner):
            row = hosts[first : first + inner]
            if len(set(row)) > 1:
                shown = ", ".join(row[:8]) + (", ..." if len(row) > 8 else "")
                interleaved = sum(host != following for host, following in pairwise(hosts)) >= len(set(hosts))
                return (
                    f"axis {name!r} spans nodes, though a node has up to {largest} ranks: ranks {first} to "
                    f"{first + inner - 1} are on {shown}. {_CONSECUTIVE if interleaved else _DIVIDING}"
                )
    return ""


_CONSECUTIVE = (
    "Let the ranks of a node be consecutive: srun --distribution=block, mpirun --map-by slot, torchrun --node-rank in "
    "the order of the nodes"
)
_DIVIDING = "Let the sizes of the last axes divide the ranks of each node, and start as many on every node"
