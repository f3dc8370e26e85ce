"""Random numbers of steps and data sets, as functions of the seed, the purpose, and this rank's place."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from shardfn.compat import devices, process_groups
from shardfn.mesh.axes import grid_of
from shardfn.mesh.grid import Grid, as_names
from shardfn.shards.layout import flat_shards
from shardfn.shards.random import mixed


def grids(state: Any) -> list[Grid]:
    """The meshes of the flat shards in a tree, without duplicates."""
    return list(dict.fromkeys(flat.layout.grid for flat in flat_shards(state)))


def place(batches: Any, state: Any) -> tuple[int, int]:
    """This rank's place along the axes of the batches, and the number of places.

    The axes are `batches.axes`, or else those along which the state's strategies place parameters: ranks along other
    axes, as for tensor parallelism, read the same rows. Without a mesh each process has its own place.

    Raises:
        ValueError: the mesh lacks an axis.
    """
    flats, mesh = flat_shards(state), getattr(batches, "mesh", None)
    grid = grid_of(mesh) if mesh is not None else flats[0].layout.grid if flats else None
    rank = process_groups.global_rank()
    if grid is None:
        return (rank, torch.distributed.get_world_size()) if torch.distributed.is_initialized() else (0, 1)
    axes = getattr(batches, "axes", None)
    placements = [flat.layout.placement for flat in flats if flat.layout.grid == grid]
    used = {name for placement in placements for name in (*placement.axes, *placement.replicas)}
    names = tuple(name for name, _ in grid.sizes if name in used) if axes is None else as_names(axes)
    unknown = [name for name in names if name not in dict(grid.sizes)]
    if unknown:
        raise ValueError(
            f"sf.run.loop: batches.axes={axes!r}: the mesh of the state has no axis {unknown[0]!r} ({grid})"
        )
    return grid.index(rank, names), grid.size(names)


def is_exact(state: Any) -> bool:
    """Whether parameters in a tree have exact parts; then steps begin with the same seed on all ranks."""
    return any(flat.layout.placement.exact for flat in flat_shards(state))


@dataclass(frozen=True)
class Generators:
    """States of the generators that `seed_all` seeds; for accelerators, only the current device's."""

    host: tuple[Any, Any, Tensor]
    device: Tensor | None

    @staticmethod
    def capture() -> Generators:
        """Captures the present states, without waiting."""
        module = _module()
        return Generators(_host_states(), None if module is None else module.get_rng_state())

    def restore(self) -> None:
        """Sets the generators back to these states."""
        _restore_host(self.host)
        module = _module()
        if module is not None and self.device is not None:
            module.set_rng_state(self.device)


def _module() -> Any:
    """The torch module of the accelerator, or None if it is not in use: reading a state would initialize it."""
    kind = devices.in_use()
    return None if kind is None else torch.get_device_module(kind)


def _host_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore_host(states: tuple[Any, Any, Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def seed_all(seed: int, *keys: int | str) -> None:
    """Seeds the generators of Python, numpy, and torch on all devices from `seed` and `keys`, without waiting."""
    number = mixed(seed, *keys)
    seed_host(number)
    device = torch.accelerator.current_accelerator()
    if device is not None:
        torch.get_device_module(device).manual_seed_all(number)


def seed_host(seed: int) -> None:
    """Seeds the generators of Python, numpy, and torch on the CPU, before code of a data set runs.

    What that code draws then depends on the seed alone, whichever process runs it.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 1 ms to look for devices


@contextlib.contextmanager
def lent_generators() -> Iterator[None]:
    """Restores the generators of the host after the block; in a worker process, which has its own, does nothing."""
    if get_worker_info() is not None:
        yield
        return
    states = _host_states()
    try:
        yield
    finally:
        _restore_host(states)
