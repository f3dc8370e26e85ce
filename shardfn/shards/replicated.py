"""Whether values that claim to be the same on several ranks are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from shardfn.collectives.agree import agree, gathered
from shardfn.compat import process_groups
from shardfn.mesh.axes import grid_of
from shardfn.mesh.grid import Grid
from shardfn.mesh.scope import current_mesh, mesh_of
from shardfn.mesh.spec import dotted
from shardfn.quoting import findings, listed, short_errors
from shardfn.shards.layout import is_flat, local_parameters
from shardfn.tiers.copying import portions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Claim:
    """What this rank holds of one value, and along which axes others hold other parts of it."""

    path: str
    axes: tuple[str, ...]
    digest: int


@short_errors
def assert_replicated(tree: Any, mesh: DeviceMesh | None = None) -> None:
    """Raises an error on every rank unless what ranks hold of the same thing is the same, bit for bit.

    A flat shard is the same over its replicas, and a parameter in it over every axis that does not cut it; another
    tensor is the same on all ranks. All ranks call it together.

    Args:
        tree: a pytree of flat shards and tensors.
        mesh: default: the one of the flat shards, else the one in scope.

    Raises:
        ValueError: values that differ, with their paths and who holds what; a tree without a mesh.
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_flat)
    claims: list[Claim] = []
    grid: Grid | None = None
    compared = []
    for accessor, leaf in zip(accessors, leaves, strict=True):
        path = dotted(accessor)
        if is_flat(leaf):
            layout, held = leaf.layout, local_parameters(leaf)
            grid = layout.grid
            compared.append(str(layout))
            for number, entry in enumerate(layout.entries):
                axes = layout.cut_axes(number)
                claims.append(Claim(entry.path, axes, checksum(held[entry.path]) if entry.path in held else 0))
        elif isinstance(leaf, Tensor):
            compared.append(f"{path}: {leaf.dtype} {tuple(leaf.shape)}")
            claims.append(Claim(path, (), checksum(leaf)))
    if mesh is None:
        mesh = current_mesh() if grid is None else mesh_of(grid, "assert_replicated: the tree")
    if mesh is None:
        raise ValueError("assert_replicated: the tree has no flat shard, so pass the mesh whose ranks compare")
    agree(compared, mesh, "assert_replicated")
    _compare(claims, grid_of(mesh), mesh)


def _compare(claims: list[Claim], grid: Grid, mesh: DeviceMesh) -> None:
    rows = gathered(torch.tensor([process_groups.global_rank(), *(one.digest for one in claims)]), mesh)
    digests = {row[0]: row[1:] for row in rows.tolist()}
    wrong = []
    for i, one in enumerate(claims):
        places: dict[int, dict[int, list[int]]] = {}
        for rank in sorted(grid.ranks):
            held = places.setdefault(grid.index(rank, one.axes), {})
            held.setdefault(digests[rank][i], []).append(rank)
        for held in places.values():
            if len(held) > 1:
                who = " and others on ".join(f"rank{'s' * (len(r) > 1)} {listed(r)}" for r in held.values())
                wrong.append(f"{one.path or 'the tree itself'} has some numbers on {who}")
    if wrong:
        raise ValueError(
            f"assert_replicated: {findings(wrong)}: they must be the same there. Start every rank from one "
            f"seed, or make the parameters with init_sharded"
        )


def checksum(value: Tensor) -> int:
    """The same for the same bytes; what differs between ranks differs here, but for odds of 1 in 2^63."""
    if value.numel() == 0:
        return 0
    data = value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    odd = torch.arange(1, 2 * _WORDS, 2, device=data.device)  # so that the order counts
    total = 0
    for part in _parts(data):
        total = (total * 0x9E3779B97F4A7C15 + int((part * odd[: len(part)]).sum())) % 2**63
    return total


def _parts(data: Tensor) -> Iterator[Tensor]:
    """Bytes as numbers."""
    for some in portions(data):
        if some.storage_offset() % 8:
            some = some.clone()
        end = len(some) // 8 * 8
        yield from some[:end].view(torch.int64).split(_WORDS)
        if end < len(some):
            yield some[end:].long()


_WORDS = 2**16  # summed at a time, so that little memory is needed
