"""A mesh without its process groups: the names and sizes of its axes, and the rank at each place."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

AxisName = str | tuple[str, ...]
"""One mesh axis, or the product of several, major to minor. `()` means this rank alone and needs no mesh."""


@dataclass(frozen=True)
class Axis:
    """One mesh axis, or the product of several, as this rank sees it.

    Attributes:
        size: number of ranks along it.
        index: this rank's position along it; of several names the first is major.
        group: name of the process group that runs along it.
    """

    size: int
    index: int
    group: str


ALONE = Axis(1, 0, "")  # the product of no axes: this rank alone


@dataclass(frozen=True)
class Grid:
    """A mesh without its process groups: axis names and sizes, and the rank at each place, row-major.

    Layouts hold a grid in place of the mesh: functions, trees and caches hold layouts, and must not keep process groups
    and buffers alive. Flat shards keep the mesh alive.
    """

    sizes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        # No fields: torch.compile hashes fields, whether they are compared or not.
        self.__dict__.update(_meshes=[], _places={rank: place for place, rank in enumerate(self.ranks)})

    @property
    def _meshes(self) -> list[weakref.ref[DeviceMesh]]:
        meshes: list[weakref.ref[DeviceMesh]] = self.__dict__["_meshes"]
        return meshes

    def add(self, mesh: DeviceMesh) -> None:
        """Adds a mesh with this grid, by weak reference."""
        self._meshes.append(weakref.ref(mesh, self._meshes.remove))

    def mesh(self) -> DeviceMesh | None:
        """Returns the newest of its meshes that is still alive, or None."""
        for reference in self._meshes[::-1]:  # not by `meshes`: this runs for every flat shard that is made
            mesh = reference()
            if mesh is not None:
                return mesh
        return None

    def meshes(self) -> Iterator[DeviceMesh]:
        """Yields those of its meshes that are still alive, newest first."""
        for reference in self._meshes[::-1]:  # a copy: a mesh may die meanwhile, which removes its reference
            mesh = reference()
            if mesh is not None:
                yield mesh

    def size(self, names: AxisName) -> int:
        """Returns the number of ranks along an axis, or along the product of several."""
        lengths = dict(self.sizes)
        return math.prod(lengths[name] for name in as_names(names))

    def index(self, rank: int, names: AxisName) -> int:
        """Returns a rank's position along an axis, or along the product of several, major to minor.

        Raises:
            ValueError: the rank is not in the mesh.
        """
        place = self.__dict__["_places"].get(rank)
        if place is None:
            raise ValueError(f"rank {rank} is not in the mesh, whose ranks are {self.ranks}")
        positions = {}
        for name, size in reversed(self.sizes):
            place, positions[name] = divmod(place, size)
        lengths, index = dict(self.sizes), 0
        for name in as_names(names):
            index = index * lengths[name] + positions[name]
        return index

    def __deepcopy__(self, memo: Any) -> Grid:
        return self

    def __reduce__(self) -> Any:
        return Grid, (self.sizes, self.ranks)

    def __str__(self) -> str:
        return show(dict(self.sizes))


def as_names(axis: AxisName) -> tuple[str, ...]:
    """Returns an axis as a tuple of names: `"a"` becomes `("a",)`."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def show(sizes: dict[str, int]) -> str:
    """Formats sizes as `make_mesh` takes them: `"replica=2, shard=4"`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
