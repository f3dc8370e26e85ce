"""Comparison of checked calls' records between ranks: finds the mesh axes along which they differ."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.check.bits import digest_of, flat_chunks, to_ints
from shardfn.check.findings import Finding
from shardfn.check.trace import Mask
from shardfn.check.values import Evidence, like_of
from shardfn.collectives import agree, kernels
from shardfn.mesh.axes import axis_of, grid_of, sizes
from shardfn.mesh.grid import Axis

_LONGEST = 2000  # most characters of an error that a rank sends


@dataclass(frozen=True)
class Exchange:
    """The ranks of a mesh that compare records.

    Attributes:
        mesh: their mesh.
        axes: names of the axes with several ranks, one for each bit of a mask.
        name: the checked function's name, for messages.
    """

    mesh: DeviceMesh
    axes: tuple[str, ...]
    name: str

    @property
    def everybody(self) -> Axis:
        """All axes as one."""
        return axis_of(self.mesh, tuple(sizes(self.mesh)))

    def beyond_rounding(self, x: Tensor, axes: Mask) -> Mask:
        """The axes in `axes` along which values differ by more than the rounding of sums.

        Every rank calls it with the same axes.
        """
        if not axes:
            return axes
        kind = keys([f"{like_of(x)} {x.layout} {x.is_nested} {x.device.type}"])
        unlike = any(self.varying_axes(self.gathered(torch.tensor(kind, device="cpu"))))
        if unlike or x.is_nested or x.layout is not torch.strided:
            return axes  # tensors of different kinds cannot be compared; all ranks decide the same here
        if not (x.is_floating_point() or x.is_complex()) or not x.numel():
            return axes
        for k, name in enumerate(self.axes):
            if axes >> k & 1 and not self._differs_along(x.detach(), axis_of(self.mesh, name).group):
                axes &= ~(1 << k)
        return axes

    def _differs_along(self, x: Tensor, group: str) -> bool:
        """Whether tensors of one shape differ beyond rounding between the ranks of any group along an axis."""
        maxima = torch.zeros(2, dtype=torch.float64, device="cpu")  # the largest number, and the largest difference
        for chunk in flat_chunks(x):
            parts = torch.view_as_real(chunk) if chunk.is_complex() else chunk
            wide = parts.to(torch.float64 if parts.dtype == torch.float64 else torch.float32)
            high, low = kernels.all_reduce(wide, "max", group), kernels.all_reduce(wide, "min", group)
            local = torch.stack([torch.maximum(high.abs(), low.abs()).amax(), (high - low).amax()])
            maxima = torch.maximum(maxima, local.to(maxima))
        differs = ~(maxima[1] <= maxima[0] * torch.finfo(x.dtype).eps ** 0.5)  # negated, so that nan counts as apart
        return bool(self.gathered(differs.long()[None]).any())

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks, in the order of the mesh."""
        return grid_of(self.mesh).ranks

    def gathered(self, row: Tensor) -> Tensor:
        """Every rank's row, in the order of the mesh, in which ranks need not be sorted."""
        rows = agree.gathered(row, self.mesh, None, "comparing what varies", self.name)
        place = {rank: i for i, rank in enumerate(sorted(self.ranks))}
        return rows[[place[rank] for rank in self.ranks]]

    def varying_axes(self, rows: Tensor) -> list[Mask]:
        """For each column, a mask of the axes along which ranks have different numbers."""
        shape = tuple(sizes(self.mesh).values())
        grid = rows.view(*shape, rows.shape[1])
        masks = [0] * rows.shape[1]
        for k, name in enumerate(self.axes):
            dim = list(sizes(self.mesh)).index(name)
            differs = (grid.amax(dim) != grid.amin(dim)).reshape(-1, rows.shape[1]).any(0).tolist()
            masks = [mask | bit << k for mask, bit in zip(masks, map(int, differs), strict=True)]
        return masks

    def spread(self, local_rows: list[tuple[int, int, int]], absent: bool = True) -> dict[int, Mask]:
        """By node, the axes along which ranks have a different number under its key, or with `absent` have none."""
        longest = int(self.gathered(torch.tensor([len(local_rows)], device="cpu")).max())
        table = torch.zeros(longest, 3, dtype=torch.int64, device="cpu")
        if local_rows:
            table[: len(local_rows)] = torch.tensor([(key, number, 1) for key, _, number in local_rows], device="cpu")
        rows = self.gathered(table)
        by_rank = [{key: number for key, number, is_filled in rank if is_filled} for rank in rows.tolist()]
        shape = tuple(sizes(self.mesh).values())
        places, own_index = torch.arange(len(by_rank), device="cpu").view(shape), self.everybody.index
        masks: dict[int, Mask] = {}
        for k, name in enumerate(self.axes):
            lines = places.movedim(list(sizes(self.mesh)).index(name), -1).reshape(-1, sizes(self.mesh)[name]).tolist()
            line = next(line for line in lines if own_index in line)
            for key, node, _ in local_rows:
                if len({by_rank[r].get(key) for r in line if absent or key in by_rank[r]}) > 1:
                    masks[node] = masks.get(node, 0) | 1 << k
        return masks

    def all_findings(self, find: Callable[[], list[Finding]]) -> list[Finding]:
        """The findings of all ranks.

        Raises:
            RuntimeError: on all ranks, if one of them failed to find out; names that rank.
        """
        failed: Exception | None = None
        local_findings: list[Any] = []
        try:
            local_findings = [dataclasses.astuple(f) for f in find()]
        except Exception as error:  # sent to the other ranks, which wait for this one's message
            failed = error
        message = local_findings if failed is None else f"{type(failed).__name__}: {failed}"[:_LONGEST]
        text = json.dumps(message).encode()
        count, longest = self.gathered(torch.tensor([len(message), len(text)], device="cpu")).amax(0).tolist()
        if not count:
            return []
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.gathered(padded)
        replies = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in rows]
        for rank, reply in zip(self.ranks, replies, strict=True):
            if isinstance(reply, str):
                raise RuntimeError(f"{self.name}: rank {rank} failed to check the call: {reply}") from failed
        merged = [Finding(kind, tuple(axes), *words) for reply in replies for kind, axes, *words in reply]
        return list({(f.kind, f.axes, f.path, f.path or f.text): f for f in reversed(merged)}.values())[::-1]


def numbers(evidence: list[Evidence]) -> list[tuple[int, int, int]]:
    """Key, node and number of each piece of evidence; waits once for all numbers on devices."""
    values = to_ints([e.seen for e in evidence])
    return [(e.key, e.node, n) for e, n in zip(evidence, values, strict=True)]


def keys(paths: Iterable[str]) -> list[int]:
    """A hash of each path, the same on every rank."""
    return [digest_of(path.encode()) for path in paths]


def digest(evidence: list[tuple[int, int, int]]) -> int:
    """One hash for all, whatever their order."""
    # A sum, as branches may run the same operations in a different order.
    return sum(digest_of(f"{key},{number}".encode()) for key, _, number in evidence) % 2**62
