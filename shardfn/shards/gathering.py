"""Whole parameters on some ranks alone, to which the others send what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.compat import functorch, process_groups
from shardfn.mesh.grid import Grid
from shardfn.mesh.scope import scope
from shardfn.quoting import listed, short
from shardfn.shards.layout import FlatShard, Layout
from shardfn.tiers.placing import brought

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Part = tuple[int, int, int, int]
"""Number of a parameter, elements `start` to `stop` of the value that a rank has, and where in its piece they begin."""


def targets(ranks: Any, grids: Iterable[Grid]) -> tuple[int, ...]:
    """The global ranks that are meant, each of which is in all of these meshes.

    Raises:
        TypeError: not a list of integers.
        ValueError: none, one of them twice, or one that is not in a mesh.
    """
    ranks = list(ranks) if isinstance(ranks, Iterable) else ranks
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise TypeError(
            f"unshard: ranks={short(repr(ranks))}; it is a list of global ranks, such as [0], or None for all of them"
        )
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"unshard: ranks={short(ranks)}; it names at least one rank, and each once; None is all of them"
        )
    for grid in grids:
        wrong = [rank for rank in ranks if rank not in grid.ranks]
        if wrong:
            raise ValueError(
                f"unshard: ranks={short(ranks)}, but rank {wrong[0]} is not in the mesh ({grid}), whose ranks are "
                f"{listed(sorted(grid.ranks))}"
            )
    return tuple(ranks)


def device_of(to: Any) -> torch.device:
    """The device that is meant, which there is.

    Raises:
        ValueError: there is none.
    """
    try:
        device = torch.device(to)
        torch.empty(0, device=device)
    except Exception as error:  # each device has its own
        said = str(error).partition("\n")[0]
        raise ValueError(f"unshard: to={to!r} is not a device of this process ({said})") from error
    return device


def gathered_to(
    flat: FlatShard, ranks: Sequence[int], numbers: Sequence[int], mesh: DeviceMesh, to: torch.device | None
) -> dict[int, Tensor]:
    """These parameters of a flat shard by number, whole, where this rank is among `ranks`; elsewhere nothing.

    Each element is sent once to each of the ranks, by the nearest rank that has it.

    Raises:
        NotImplementedError: a transform follows the shard.
    """
    _refuse_followed(flat, ranks)
    layout, me, found = flat.layout, process_groups.global_rank(), {}
    members, names = layout.grid.ranks, tuple(name for name, _ in layout.grid.sizes)
    with scope(mesh), torch.no_grad():
        values = brought(flat.values.detach(), mesh)
        for target in ranks:
            own = parts(layout, numbers, me, target)
            rows = [values[at : at + stop - start] for _, start, stop, at in own]
            sent = rows[0] if len(rows) == 1 else torch.cat([values[:0], *rows])
            lengths = [_length(parts(layout, numbers, rank, target)) if me == target else 0 for rank in members]
            came = functional.ragged_all_to_all(
                sent, names, [len(sent) if rank == target else 0 for rank in members], lengths
            )
            if me == target:
                every = [(rank, parts(layout, numbers, rank, target)) for rank in members]
                found = _assembled(layout, numbers, every, came, to)
    return found


def parts(layout: Layout, numbers: Sequence[int], source: int, target: int) -> list[Part]:
    """What one rank sends to another: what it holds, unless a rank that is nearer to the other holds the same."""
    if not layout.here(source):
        return []
    index, found = layout.index(source), []
    for number in numbers:
        same = layout.same_axes(number)
        start, stop, at = layout.within(number, index)
        if start < stop and layout.grid.index(source, same) == layout.grid.index(target, same):
            found.append((number, start, stop, at))
    return found


def _length(some: Sequence[Part]) -> int:
    return sum(stop - start for _, start, stop, _ in some)


def _assembled(
    layout: Layout, numbers: Sequence[int], every: list[tuple[int, list[Part]]], came: Tensor, to: torch.device | None
) -> dict[int, Tensor]:
    """Whole parameters from what came from each rank, in the order of ranks."""
    where = came.device if to is None else to
    whole = {i: torch.empty(layout.whole_shape(i), dtype=came.dtype, device=where) for i in numbers}
    cut: dict[tuple[int, tuple[int, ...]], Tensor] = {}  # values of which the whole ones are made
    at = 0
    for rank, some in every:
        for number, start, stop, _ in some:
            entry = layout.entries[number]
            value = whole[number]
            if entry.spec.axes:
                value = cut.setdefault((number, layout.corner(entry, rank)), value.new_empty(entry.shape))
            value.view(-1)[start:stop].copy_(came[at : at + stop - start])
            at += stop - start
    for (number, corner), value in cut.items():
        region = tuple(slice(low, low + n) for low, n in zip(corner, value.shape, strict=True))
        whole[number][region].copy_(value)
    return whole


def _refuse_followed(flat: FlatShard, ranks: Sequence[int]) -> None:
    followed = {kind for _, kind in functorch.followed(flat.values)}
    if not torch.is_grad_enabled():
        followed.discard("gradient")
    if followed:
        raise NotImplementedError(
            f"unshard: with ranks={list(ranks)} it has no derivative and no batches, and stage {flat.layout.stage!r} "
            f"carries a {' and a '.join(sorted(followed))}: leave ranks out, or call it outside of transforms, under "
            f"torch.no_grad() if the shards require gradients"
        )
