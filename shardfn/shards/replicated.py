"""Checks that replicated values are equal on all ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.agree import agree, at_once, gathered
from shardfn.compat import functorch, process_groups
from shardfn.mesh.axes import grid_of
from shardfn.mesh.grid import Grid
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import current_mesh, mesh_of
from shardfn.mesh.spec import dotted
from shardfn.quoting import findings, listed
from shardfn.shards.layout import is_flat, local_parameters
from shardfn.tiers.copying import portions
from shardfn.tracebacks import api_boundary


@dataclass(frozen=True)
class Claim:
    """A checksum of this rank's part of a value, and the axes along which ranks hold different parts."""

    path: str
    axes: tuple[str, ...]
    digest: int


@api_boundary
def assert_replicated(tree: Any, mesh: DeviceMesh | None = None) -> None:
    """Raises an error on every rank unless replicated values are equal bit for bit.

    A flat shard is replicated over its `replicas`, and each of its parameters over every axis that does not shard it; a
    plain tensor over all ranks. All ranks call it together.

    Args:
        tree: a pytree of flat shards and tensors.
        mesh: default: the mesh of the flat shards, else the one in scope.

    Raises:
        ValueError: values differ; the message has their paths, and which ranks hold which; a tree without a mesh.
    """
    if planned():
        return
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_flat)
    claims: list[Claim] = []
    grid: Grid | None = None
    compared = []
    for accessor, leaf in zip(accessors, leaves, strict=True):
        path = dotted(accessor)
        if is_flat(leaf):
            if leaf.values is None:  # of a frozen parameter, in a gradient
                continue
            layout, local = leaf.layout, local_parameters(leaf)
            grid = layout.grid
            compared.append(str(layout))
            for number, entry in enumerate(layout.entries):
                axes = layout.cut_axes(number)
                claims.append(Claim(entry.path, axes, checksum(local[entry.path]) if entry.path in local else 0))
        elif isinstance(leaf, Tensor):
            compared.append(f"{path}: {leaf.dtype} {tuple(leaf.shape)}")
            claims.append(Claim(path, (), checksum(leaf)))
    if mesh is None:
        mesh = current_mesh() if grid is None else mesh_of(grid, "assert_replicated: the tree")
    if mesh is None:
        raise ValueError("assert_replicated: the tree has no flat shard, so pass the mesh whose ranks compare")
    agree(compared, mesh, "assert_replicated", subject=_TREES)
    _compare_claims(claims, grid_of(mesh), mesh)


_TREES = ("the trees", "Every rank passes the same tree, of the same dtypes, shapes and layouts")


@at_once()
def _compare_claims(claims: list[Claim], grid: Grid, mesh: DeviceMesh) -> None:
    rows = gathered(
        torch.tensor([process_groups.global_rank(), *(claim.digest for claim in claims)], device="cpu"), mesh
    )
    digests = {row[0]: row[1:] for row in rows.tolist()}
    problems = []
    for i, claim in enumerate(claims):
        places: dict[int, dict[int, list[int]]] = {}
        for rank in sorted(grid.ranks):
            by_digest = places.setdefault(grid.index(rank, claim.axes), {})
            by_digest.setdefault(digests[rank][i], []).append(rank)
        for by_digest in places.values():
            if len(by_digest) > 1:
                # More than one digest: these ranks should agree and do not.
                rank_groups = " and others on ".join(
                    f"rank{'s' * (len(r) > 1)} {listed(r)}" for r in by_digest.values()
                )
                problems.append(f"{claim.path or 'the tree itself'} has some numbers on {rank_groups}")
    if problems:
        raise ValueError(
            f"assert_replicated: {findings(problems)}: they must be the same there. Start every rank from one "
            f"seed, or make the parameters with init_sharded"
        )


@at_once()
def checksum(value: Tensor) -> int:
    """A 63-bit checksum of a tensor's bytes; different bytes have equal checksums with a probability of about 2^-63."""
    value = functorch.unwrapped(value)
    if value.numel() == 0:
        return 0
    data = value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    words = _WORDS if data.device.type == "cpu" else 16 * _WORDS  # an accelerator is slow at many small sums
    odd = torch.arange(1, 2 * words, 2, device=data.device)  # odd weights, so that the order of words matters
    sums = [(part * odd[: len(part)]).sum() for part in _as_words(data, words)]
    total = 0
    for number in torch.stack(sums).tolist():  # one wait for all of them
        total = (total * 0x9E3779B97F4A7C15 + number) % 2**63
    return total


def _as_words(data: Tensor, words: int) -> Iterator[Tensor]:
    """The bytes as 64-bit integers, and the rest as single bytes."""
    for chunk in portions(data):
        if chunk.storage_offset() % 8:  # a view as int64 must be aligned
            chunk = chunk.clone()
        end = len(chunk) // 8 * 8
        yield from chunk[:end].view(torch.int64).split(words)
        if end < len(chunk):
            yield chunk[end:].long()


_WORDS = 2**16  # words summed at a time, to bound memory
