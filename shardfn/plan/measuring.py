"""Measures links and chips: how long the ranks at hand take for collectives, arithmetic and copies."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives import into_buffers, kernels
from shardfn.collectives.agree import agree
from shardfn.collectives.into_buffers import Communicator, communicator_of
from shardfn.collectives.ledger import unrecorded
from shardfn.compat import process_groups
from shardfn.mesh.axes import device_of, sizes
from shardfn.mesh.grid import show
from shardfn.plan.machines import OPERATIONS, Chip, Curve, Links, nodes_of
from shardfn.quoting import short
from shardfn.tracebacks import api_boundary

SIZES = tuple(2**k for k in range(12, 25, 2))  # 4 KiB to 16 MiB
_BUDGET = 0.2  # seconds for the repetitions of one entry, after the first


@api_boundary
def measure_links(
    mesh: DeviceMesh, *, sent: Sequence[int] = SIZES, repeats: int = 5, per_node: int | None = None
) -> Links:
    """Measures how long collectives take along each axis of a mesh, and along all axes together.

    All ranks call it together, with the same arguments, and get the same tables: of each entry, the median over
    repetitions of the slowest rank's time. It measures the collectives of shardfn on this mesh's devices and groups,
    while nothing else runs; it takes some seconds for each axis.

    Args:
        mesh: the ranks.
        sent: bytes that a rank sends in each entry of the tables.
        repeats: of each entry, at most; fewer where one takes long.
        per_node: ranks on a node, numbered one after another. Default: `LOCAL_WORLD_SIZE`, which launchers set, or else
            all.

    Returns:
        The tables, which `StepPlan.timed` takes and `Links.save` writes.

    Raises:
        ValueError: no axis has two ranks; sizes or numbers that are not positive; ranks pass different ones.

    Example:
        ``measure_links(mesh).save("links.json")``
    """
    sizes(mesh)  # which refuses what is no mesh
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if per_node is None else per_node
    arguments = [f"sent: {list(sent)}", f"repeats: {repeats}", f"per_node: {per_node}"]
    error = _argument_error(mesh, sent, repeats, per_node)
    arguments = arguments if error is None else [str(error)]
    agree(arguments, mesh, "measure_links", error)
    if error is not None:  # of one rank alone
        raise error
    names_of_axes = [name for name, size in sizes(mesh).items() if size > 1]
    everyone = communicator_of(mesh, tuple(names_of_axes))
    axis_groups = dict.fromkeys([*((name,) for name in names_of_axes), everyone.names])
    curves: dict[str, dict[tuple[int, int], Curve]] = {}
    for names in axis_groups:
        comm = communicator_of(mesh, names)
        nodes = nodes_of(sizes(mesh), dist.get_rank(), names, per_node)
        spread = nodes, comm.axis.size // nodes
        for operation in OPERATIONS:
            if spread not in curves.setdefault(operation, {}):  # axes with the same spread share a table
                curves[operation][spread] = _measured(operation, comm, everyone, sent, repeats)
    device = device_of(mesh)
    name = f"{device.type}, {process_groups.backend_of(everyone.group, device.type)}"
    device_tensor = torch.zeros(2**22, device=device)
    host_tensor = torch.zeros(2**22, device="cpu", pin_memory=device.type != "cpu")
    seconds = _fastest(lambda: device_tensor.copy_(host_tensor, non_blocking=True), device)
    slowest = _max_over_ranks([seconds], everyone)[0]
    return Links(name, f"measured on a mesh of {show(sizes(mesh))}", curves, device_tensor.nbytes / slowest)


def _argument_error(mesh: DeviceMesh, sent: Sequence[int], repeats: int, per_node: int) -> Exception | None:
    """Returns the error in the arguments, if any."""
    if math.prod(sizes(mesh).values()) < 2:
        return ValueError(f"measure_links: the mesh ({show(sizes(mesh))}) has one rank, which has no link to another")
    if not sent or list(sent) != sorted(set(sent)) or sent[0] < 1:
        return ValueError(
            f"measure_links: sent must be numbers of bytes, growing from 1 or more, got {short(list(sent))}"
        )
    if repeats < 1 or per_node < 1:
        return ValueError(f"measure_links: repeats and per_node must be 1 or more, got {repeats} and {per_node}")
    return None


def _measured(operation: str, comm: Communicator, everyone: Communicator, sent: Sequence[int], repeats: int) -> Curve:
    """Returns the table of one operation along some axes, which all groups run at the same time."""
    curve = []
    for requested in sent:
        run, num_bytes = _operation(operation, comm, requested)
        with unrecorded():
            curve.append((float(num_bytes), _median(run, everyone, repeats)))
    return tuple(dict(curve).items())


def _operation(operation: str, comm: Communicator, sent: int) -> tuple[Callable[[], Any], int]:
    """Returns a function that runs a collective, and the bytes that a rank then sends: about `sent`."""
    size, group, device = comm.axis.size, comm.axis.group, comm.device
    width = 4  # float32, in which all backends reduce
    share = {"all_reduce": 2 * (1 - 1 / size), "send": 1.0}.get(operation, 1 - 1 / size)
    piece = max(1, round(sent / share / width / size))
    full = torch.zeros(size * piece, device=device)
    bytes_sent = round(full.nbytes * share)
    if operation == "all_gather":
        buffer = full.view(torch.uint8)
        local = buffer.view(size, -1)[comm.axis.index]
        return lambda: into_buffers.all_gather(buffer, comm, full.dtype, local).wait(), bytes_sent
    if operation == "reduce_scatter":
        out = torch.zeros(piece, device=device)
        scratch = torch.zeros(2 * size * piece, device=device)
        return lambda: into_buffers.reduce_scatter(full, out, comm, lambda n: scratch[:n]).wait(), bytes_sent
    if operation == "all_reduce":
        return lambda: into_buffers.all_reduce(full, comm).wait(), bytes_sent
    if operation == "all_to_all":
        return lambda: kernels.all_to_all(full, 0, 0, size, group), bytes_sent
    source = [(rank - 1) % size for rank in range(size)]
    return lambda: kernels.permute(full, source, comm.axis.index, group), bytes_sent


def _median(run: Callable[[], Any], everyone: Communicator, repeats: int) -> float:
    """Returns the median over repetitions of the slowest rank's seconds."""
    spent: list[float] = []
    run()  # connects, and fills caches
    started = time.perf_counter()
    while len(spent) < repeats:
        _finish(everyone.device)
        _max_over_ranks([0.0], everyone)  # ranks begin at the same time
        began = time.perf_counter()
        run()
        _finish(everyone.device)
        spent.append(time.perf_counter() - began)
        if _max_over_ranks([time.perf_counter() - started], everyone)[0] > _BUDGET:  # all ranks stop together
            break
    return statistics.median(_max_over_ranks(spent, everyone))


def _max_over_ranks(values: Sequence[float], everyone: Communicator) -> list[float]:
    """Returns the largest value of all ranks, for each."""
    with unrecorded():
        row = torch.tensor(values, dtype=torch.float64, device=everyone.device)
        largest: list[float] = kernels.all_reduce(row, "max", everyone.axis.group).tolist()
    return largest


def _finish(device: torch.device) -> None:
    """Waits until the device has nothing left to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


# --- one device ---


@api_boundary
def measure_chip(device: torch.device | str = "cpu", *, dtypes: Sequence[torch.dtype] = (), side: int = 0) -> Chip:
    """Measures how fast a device multiplies matrices and moves memory.

    Its rates and bandwidth are what was reached, so `efficiency` and `reach` are 1.

    Args:
        device: the device.
        dtypes: those whose rate is measured. Default: float32, and bfloat16 on an accelerator.
        side: of the square matrices. Default: 1,024 on a CPU, and 8,192 elsewhere.

    Raises:
        ValueError: the side is negative.
        TypeError: the dtypes are no list of dtypes.

    Example:
        ``measure_chip("cuda").save("chip.json")``
    """
    device = torch.device(device)
    on_cpu = device.type == "cpu"
    if type(side) is not int or side < 0:
        raise ValueError(f"measure_chip: side must be a positive number, got {short(repr(side))}")
    dtype_list = dtypes if isinstance(dtypes, (list, tuple)) else [dtypes]
    if not isinstance(dtypes, (list, tuple)) or not all(isinstance(x, torch.dtype) for x in dtype_list):
        raise TypeError(f"measure_chip: dtypes must be a list, such as [torch.bfloat16], got {short(repr(dtypes))}")
    side = side or (1024 if on_cpu else 8192)
    dtypes = dtypes or ((torch.float32,) if on_cpu else (torch.float32, torch.bfloat16))
    rates = {}
    for dtype in dtypes:
        factor = torch.ones(side, side, dtype=dtype, device=device)
        out = torch.empty_like(factor)
        seconds = _fastest(functools.partial(torch.mm, factor, factor, out=out), device)
        rates[str(dtype).removeprefix("torch.")] = 2 * side**3 / seconds
    a = torch.zeros(2**22 if on_cpu else 2**28, device=device)
    b = torch.zeros_like(a)
    bandwidth = 2 * a.nbytes / _fastest(lambda: b.copy_(a), device)
    scalar = torch.zeros(1, device=device)
    if on_cpu:
        name, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        properties = torch.get_device_module(device).get_device_properties(device)
        name, memory = str(properties.name), int(properties.total_memory)
    launch = _fastest(lambda: [scalar.add_(1) for _ in range(100)], device) / 100
    return Chip(name, "measured", rates, bandwidth, memory, efficiency=1.0, reach=1.0, launch=launch)


def _fastest(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Returns the median seconds of a few runs."""
    run()
    spent = []
    for _ in range(repeats):
        _finish(device)
        began = time.perf_counter()
        run()
        _finish(device)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)
