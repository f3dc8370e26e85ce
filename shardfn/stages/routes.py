"""Routes of gradients from a stage's parameters to its shards: the axes of each hop, dtypes and formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.into_buffers import Communicator, Purpose, purpose_of, transport
from shardfn.mesh.axes import sizes
from shardfn.mesh.exact import split_bases
from shardfn.quant.formats import Format
from shardfn.shards.layout import Layout
from shardfn.shards.placement import Tier
from shardfn.stages.gather_plan import Gather


class Level(NamedTuple):
    """A scatter along one of several axes.

    Attributes:
        along: the communicator of the axis.
        before: product of the sizes of the axes before it, along which later levels scatter.
    """

    along: Communicator
    before: int

    def ordered(self, flat: Tensor) -> Tensor:
        """A buffer rearranged so that the elements for each rank are contiguous."""
        return (
            flat if self.before == 1 else flat.view(self.before, self.along.axis.size, -1).transpose(0, 1).reshape(-1)
        )


@dataclass(frozen=True)
class Route:
    """Communicators of the hops of a gradient; None for a hop along which there is one rank.

    Attributes:
        shard: for the reduce-scatter over the axes that shard the parameters.
        split: for the second reduce-scatter, over the replica axes that shard the optimizer state.
        replica: for the all-reduce over the other replica axes.
        levels: reduce-scatters along one axis each, which replace the first one where gradients are quantized.
        tree: with `Placement.exact`, the tree of additions over the ranks along `shard`, which are then all ranks with
            other rows; `replica` gathers the result at the end of the step.
    """

    shard: Communicator | None
    split: Communicator | None
    replica: Communicator | None
    levels: tuple[Level, ...] = ()
    tree: RankTree | None = None


@dataclass(frozen=True)
class RankTree:
    """A sum over ranks whose bits do not depend on their number.

    Attributes:
        bases: those of the digits of a rank's number, along which the tree adds.
        pieces: for each rank, the index of the piece of the buffer that it sums.
    """

    bases: tuple[int, ...]
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of a gradient: from the function's backward, in sums, and in the shard."""

    function: torch.dtype
    sum: torch.dtype
    shard: torch.dtype


@dataclass(frozen=True, eq=False)
class Reduction:
    """The reduction of one buffer's gradients to its shard's gradient; static, the same at every step.

    Attributes:
        layout: the layout by which the first reduce-scatter splits the buffer.
        route: the communicators of its hops.
        dtypes: dtypes before, in and after the sum.
        format: the quantized format in which it is sent, if any.
        purpose: identifies the gradient, so that messages for different gradients cannot be mixed up.
    """

    layout: Layout
    route: Route
    dtypes: Dtypes
    format: Format | None
    purpose: Purpose

    def in_pieces(self) -> bool:
        """Whether slices of the gradients are sent without a copy; the same decision on all ranks."""
        shard, summed = self.route.shard, self.dtypes.sum
        return (
            shard is not None
            and self.format is None
            and self.route.tree is None
            and transport("reduce_scatter", shard) == "direct"
            and self.layout.coarse
            and self.dtypes.function == summed == self.dtypes.shard
            and (summed.itemsize >= 4 or shard.axis.size == 2)  # else partial sums would be rounded
            and not summed.is_complex
        )

    @property
    def tier(self) -> Tier:
        """The memory tier that keeps the gradient."""
        return self.layout.placement.tiers.grads

    def marked(self) -> bool:
        """Whether the buffer has marks at its end; in a quantized format each piece has a tag instead."""
        return self.route.shard is not None and self.format is None


def routed(
    gather: Gather,
    dtypes: Dtypes,
    format: Format | None,
    divides: bool,
    mesh: DeviceMesh,
    communicator: Callable[[tuple[str, ...]], Communicator | None],
) -> Reduction:
    """The reduction of a buffer's gradient; with `divides`, to the layout of the shard's optimizer state."""
    layout = gather.layout
    fine = layout.state_layout if divides else layout
    if layout.placement.exact:
        return _exactly(fine, dtypes, format, mesh, communicator)
    first = fine if layout.size == 1 else layout  # unsharded parameters need a single scatter, over all state axes
    axes, replicas = first.placement.axes, fine.placement.replicas
    levels = _levels(axes, sizes(mesh), communicator) if format else ()
    split, replica = map(communicator, (fine.placement.axes[len(axes) :], replicas))
    identity = repr((layout.stage, layout.entries, layout.padded, str(dtypes.sum), divides))
    route = Route(communicator(axes), split, replica, levels)
    return Reduction(first, route, dtypes, format, purpose_of(layout.stage, f"reduces {identity}"))


def _exactly(
    layout: Layout,
    dtypes: Dtypes,
    format: Format | None,
    mesh: DeviceMesh,
    communicator: Callable[[tuple[str, ...]], Communicator | None],
) -> Reduction:
    """The reduction of a buffer's gradient by a tree over all ranks along the data axes.

    Raises:
        ValueError: the stage quantizes gradients.
    """
    if format is not None:
        raise ValueError(
            f"stage {layout.stage!r} has reduce_format, and parameters with with_exact: gradients that are quantized "
            f"on the way have other bits on another number of ranks. Leave one of them out"
        )
    placement, ranks = layout.placement, layout.grid.ranks
    data_axes = tuple(name for name in sizes(mesh) if name in placement.axes + placement.replicas)
    replicas = layout.grid.size(placement.replicas)
    pieces = [layout.index(r) * replicas + layout.grid.index(r, placement.replicas) for r in ranks]
    tree = RankTree(split_bases(placement.exact, len(ranks))[0], tuple(pieces))
    route = Route(communicator(data_axes), None, communicator(placement.replicas), (), tree)
    identity = repr((layout.stage, layout.entries, layout.padded, str(dtypes.sum), "exactly"))
    return Reduction(layout, route, dtypes, None, purpose_of(layout.stage, f"reduces {identity}"))


def _levels(axes: tuple[str, ...], size_of: Any, communicator: Callable[..., Any]) -> tuple[Level, ...]:
    """Scatters along single axes, the mesh's last axis first: its links are the fastest, and later hops send less."""
    remaining, levels = [name for name in axes if size_of[name] > 1], []
    for name in sorted(remaining, key=list(size_of).index, reverse=True):
        i = remaining.index(name)
        levels.append(Level(communicator((name,)), math.prod(size_of[other] for other in remaining[:i])))
        remaining.remove(name)
    return tuple(levels)
