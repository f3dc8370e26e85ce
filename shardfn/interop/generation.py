"""Gathers parameters once for a generation, in which every token reads all of them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardfn.collectives import functional
from shardfn.mesh.axes import device_of
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import independent_axes, mesh_of, scope
from shardfn.quoting import byte_count
from shardfn.shards.layout import FlatShard, flat_shards

_log = logging.getLogger("shardfn")
SHARE = 0.5  # of the free memory that gathered parameters may take


def gathered_once(params: Mapping[str, Any], gathers: Mapping[str, Callable[..., Any]]) -> Mapping[str, Any]:
    """The parameters with those of stages gathered, if on all ranks they take at most half of the free memory.

    Quantized parameters, and those that are gathered in a quantized format, from several meshes or at one position of
    an axis, stay sharded. All ranks that run the program decide together, as all of them compare stages.

    Args:
        params: by stage; parameters that several stages read are stages of their own.
        gathers: by path of a stage, a function of its parameters that gathers them in its dtypes; the first is that of
            parameters outside of all stages.
    """
    stages = {path: flat_shards(part) for path, part in params.items()}
    shards = [flat for flats in stages.values() for flat in flats]
    sharded = len({flat.layout.grid for flat in shards}) == 1 and any(flat.layout.size > 1 for flat in shards)
    if not sharded or planned() or any(map(_stays, shards)):
        return params
    grid = shards[0].layout.grid
    nbytes = sum(flat.layout.total * flat.values.itemsize for flat in shards)
    mesh = mesh_of(grid, "generate")
    device = device_of(mesh)  # where they are gathered, wherever they are kept
    with scope(mesh), torch.no_grad():
        lacks = torch.tensor(float(nbytes > SHARE * _free_bytes(device, len(grid.ranks))), device=device)
        axes = tuple(name for name, _ in grid.sizes if name not in independent_axes())
        fits = not functional.psum(lacks, axes).item()
    if not fits:
        _log.info("generate: each token gathers %s of parameters, for which a rank has no room", byte_count(nbytes))
        return params
    _log.info("generate: %s of parameters are gathered once, for all tokens", byte_count(nbytes))
    return {path: _gather_part(path, part, gathers) if stages[path] else part for path, part in params.items()}


def _gather_part(path: str, part: Any, gathers: Mapping[str, Callable[..., Any]]) -> Any:
    if path in gathers:
        return gathers[path](part, {})[0]
    return next(iter(gathers.values()))({path: part}, {})[0][path]


def _stays(flat: FlatShard) -> bool:
    placement = flat.layout.placement
    return bool(flat.layout.packed or placement.gather_format or placement.only_at)


def _free_bytes(device: torch.device, ranks: int) -> float:
    """The free memory of a rank's device; of a host, whose memory all ranks of a mesh may share, its part."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info"):
            return math.inf
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return float(module.mem_get_info(device)[0] + unused)
    with contextlib.suppress(OSError, ValueError):
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * float(facts["MemAvailable"].split()[0]) / ranks
    return math.inf
