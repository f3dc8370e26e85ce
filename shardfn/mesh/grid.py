"""What a mesh is without its process groups: the names and sizes of its axes, and who stands where."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
class Grid:
    """What a mesh is without its process groups: axis names and sizes, and the rank at each place, row-major.

    Layouts have it in place of the mesh: they are static, and functions, trees and caches keep them, which must not
    keep process groups and buffers. What keeps a mesh is a flat shard.
    """

    sizes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    _meshes: list[weakref.ref[DeviceMesh]] = field(default_factory=list, init=False, repr=False, compare=False)

    def add(self, mesh: DeviceMesh) -> None:
        """Another mesh that is like this."""
        self._meshes.append(weakref.ref(mesh, self._meshes.remove))

    def mesh(self) -> DeviceMesh | None:
        """The last of its meshes that is alive."""
        for one in self._meshes[::-1]:  # as `meshes`, at every flat shard that is made
            found = one()
            if found is not None:
                return found
        return None

    def meshes(self) -> Iterator[DeviceMesh]:
        """Those of its meshes that are alive, the last one first."""
        for one in self._meshes[::-1]:  # a copy: one may go meanwhile
            found = one()
            if found is not None:
                yield found

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

    def __deepcopy__(self, memo: Any) -> Grid:
        return self

    def __reduce__(self) -> Any:
        return Grid, (self.sizes, self.ranks)

    def __str__(self) -> str:
        return show(dict(self.sizes))


def as_names(axis: AxisName) -> tuple[str, ...]:
    """`"a"` and `("a", "b")` as a tuple of names."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def show(sizes: dict[str, int]) -> str:
    """Sizes as `make_mesh` takes them."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
