"""How ranks compare what each of them has taken down: along which axes of a mesh it differs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn.check.bits import pieces, whole
from shardfn.check.findings import Finding
from shardfn.check.trace import Mask
from shardfn.check.values import Evidence, like_of
from shardfn.collectives import agree, kernels
from shardfn.mesh.axes import axis_of, sizes
from shardfn.mesh.grid import Axis

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LONGEST = 2000  # of what a rank says of an error


@dataclass(frozen=True)
class Exchange:
    """The ranks of a mesh, who compare.

    Attributes:
        mesh: theirs.
        axes: names of those along which there are several, one for each bit of a mask.
        name: of the function that is checked, for messages.
    """

    mesh: DeviceMesh
    axes: tuple[str, ...]
    name: str

    @property
    def everybody(self) -> Axis:
        """All axes as one."""
        return axis_of(self.mesh, tuple(sizes(self.mesh)))

    def beyond_rounding(self, x: Tensor, axes: Mask) -> Mask:
        """Those of the axes along which numbers differ by more than the order in which they may have been added.

        Every rank calls it with the same axes.
        """
        if not axes:
            return axes
        kind = keys([f"{like_of(x)} {x.layout} {x.is_nested} {x.device.type}"])
        if any(self.along(self.gathered(torch.tensor(kind)))) or x.is_nested or x.layout is not torch.strided:
            return axes  # where ranks have other kinds, none of them may go by its own
        if not (x.is_floating_point() or x.is_complex()) or not x.numel():
            return axes
        for k, name in enumerate(self.axes):
            if axes >> k & 1 and not self._apart(x.detach(), axis_of(self.mesh, name).group):
                axes &= ~(1 << k)
        return axes

    def _apart(self, x: Tensor, group: str) -> bool:
        """Whether numbers of one shape differ beyond rounding between the ranks of any group along an axis."""
        found = torch.zeros(2, dtype=torch.float64)  # the largest number, and the largest difference
        for some in pieces(x):
            parts = torch.view_as_real(some) if some.is_complex() else some
            wide = parts.to(torch.float64 if parts.dtype == torch.float64 else torch.float32)
            high, low = kernels.all_reduce(wide, "max", group), kernels.all_reduce(wide, "min", group)
            here = torch.stack([torch.maximum(high.abs(), low.abs()).amax(), (high - low).amax()])
            found = torch.maximum(found, here.to(found))
        apart = ~(found[1] <= found[0] * torch.finfo(x.dtype).eps ** 0.5)  # not a number is apart, too
        return bool(self.gathered(apart.long()[None]).any())

    def gathered(self, row: Tensor) -> Tensor:
        """Every rank's row."""
        return agree.gathered(row, self.mesh, None, "comparing what varies", self.name)

    def along(self, rows: Tensor) -> list[Mask]:
        """For each column the axes along which ranks have different numbers."""
        shape = tuple(sizes(self.mesh).values())
        grid = rows.view(*shape, rows.shape[1])
        found = [0] * rows.shape[1]
        for k, name in enumerate(self.axes):
            dim = list(sizes(self.mesh)).index(name)
            apart = (grid.amax(dim) != grid.amin(dim)).reshape(-1, rows.shape[1]).any(0).tolist()
            found = [mask | bit << k for mask, bit in zip(found, map(int, apart), strict=True)]
        return found

    def spread(self, own: list[tuple[int, int, int]], absent: bool = True) -> dict[int, Mask]:
        """By node, the axes along which other ranks have something else under its key; or, with `absent`, nothing."""
        most = int(self.gathered(torch.tensor([len(own)])).max())
        table = torch.zeros(most, 3, dtype=torch.int64)
        if own:
            table[: len(own)] = torch.tensor([(key, seen, 1) for key, _, seen in own])
        rows = self.gathered(table)
        known = [{key: seen for key, seen, there in rank if there} for rank in rows.tolist()]
        shape = tuple(sizes(self.mesh).values())
        places, here = torch.arange(len(known)).view(shape), self.everybody.index
        found: dict[int, Mask] = {}
        for k, name in enumerate(self.axes):
            lines = places.movedim(list(sizes(self.mesh)).index(name), -1).reshape(-1, sizes(self.mesh)[name]).tolist()
            line = next(line for line in lines if here in line)
            for key, node, _ in own:
                if len({known[r].get(key) for r in line if absent or key in known[r]}) > 1:
                    found[node] = found.get(node, 0) | 1 << k
        return found

    def together(self, find: Callable[[], list[Finding]]) -> list[Finding]:
        """What any rank finds.

        Raises:
            RuntimeError: a rank could not look, and which, on all of them.
        """
        failed: Exception | None = None
        own: list[Any] = []
        try:
            own = [dataclasses.astuple(one) for one in find()]
        except Exception as error:  # the others wait for what this rank says
            failed = error
        said = own if failed is None else f"{type(failed).__name__}: {failed}"[:_LONGEST]
        text = json.dumps(said).encode()
        many, longest = self.gathered(torch.tensor([len(said), len(text)])).amax(0).tolist()
        if not many:
            return []
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.gathered(padded)
        told = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in rows]
        for rank, some in enumerate(told):
            if isinstance(some, str):
                raise RuntimeError(f"{self.name}: rank {rank} failed to check the call: {some}") from failed
        every = [Finding(kind, tuple(axes), *words) for some in told for kind, axes, *words in some]
        return list({(one.kind, one.axes, one.path, one.path or one.text): one for one in reversed(every)}.values())[
            ::-1
        ]


def numbers(evidence: list[Evidence]) -> list[tuple[int, int, int]]:
    """Key, node and number; numbers on devices are waited for at once."""
    seen = whole([one.seen for one in evidence])
    return [(one.key, one.node, n) for one, n in zip(evidence, seen, strict=True)]


def keys(paths: Iterable[str]) -> list[int]:
    """A number for each path, the same on every rank."""
    return [int.from_bytes(hashlib.blake2b(path.encode(), digest_size=7).digest(), "big") for path in paths]


def digest(evidence: list[tuple[int, int, int]]) -> int:
    """One number for all."""
    total = 0
    for key, _, seen in evidence:  # in any order: branches may do the same in another one
        said = f"{key},{seen}".encode()
        total += int.from_bytes(hashlib.blake2b(said, digest_size=7).digest(), "big")
    return total % 2**62
