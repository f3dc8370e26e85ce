"""How the gradients of a stage's parameters go to the gradient of its shard: along which axes, in which dtypes."""

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
from shardfn.quant.formats import Format
from shardfn.shards.layout import Layout
from shardfn.shards.placement import Tier
from shardfn.stages.gather_plan import Gather


class Level(NamedTuple):
    """A scatter along one of several axes.

    Attributes:
        along: the communicator of the axis.
        before: number of pieces along the axes before it, which are scattered later.
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
    """Communicators along which a gradient is scattered and then summed; None where there is one rank.

    Attributes:
        shard: for the first scatter.
        split: for the second scatter, of each piece.
        replica: for the sum.
        levels: scatters along one axis each, in place of the first scatter.
    """

    shard: Communicator | None
    split: Communicator | None
    replica: Communicator | None
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of a gradient: as the function returns it, as it is summed, and as it arrives."""

    function: torch.dtype
    sum: torch.dtype
    shard: torch.dtype


@dataclass(frozen=True, eq=False)
class Reduction:
    """How the gradients of one buffer's parameters become the gradient of its shard; the same at every step.

    Attributes:
        layout: how the first scatter divides the buffer.
        format: the quantized format in which it is sent, if any.
        purpose: by which only messages for the same gradient meet.
    """

    layout: Layout
    route: Route
    dtypes: Dtypes
    format: Format | None
    purpose: Purpose

    def in_pieces(self) -> bool:
        """Whether gradients are sent from where they are, without a copy. All ranks decide alike."""
        shard, summed = self.route.shard, self.dtypes.sum
        return (
            shard is not None
            and self.format is None
            and transport("reduce_scatter", shard) == "direct"
            and self.layout.coarse
            and self.dtypes.function == summed == self.dtypes.shard
            and (summed.itemsize >= 4 or shard.axis.size == 2)  # else partial sums would be rounded
            and not summed.is_complex
        )

    @property
    def tier(self) -> Tier:
        """Where the gradient is kept."""
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
    """How a buffer's gradient is reduced; with `divides`, to the layout of the shard's optimizer state."""
    layout = gather.layout
    fine = layout.state_layout if divides else layout
    first = fine if layout.size == 1 else layout  # a whole parameter's gradient is scattered over all at once
    axes, replicas = first.placement.axes, fine.placement.replicas
    levels = _levels(axes, sizes(mesh), communicator) if format else ()
    split, replica = map(communicator, (fine.placement.axes[len(axes) :], replicas))
    identity = repr((layout.stage, layout.entries, layout.padded, str(dtypes.sum), divides))
    route = Route(communicator(axes), split, replica, levels)
    return Reduction(first, route, dtypes, format, purpose_of(layout.stage, f"reduces {identity}"))


def _levels(axes: tuple[str, ...], size_of: Any, communicator: Callable[..., Any]) -> tuple[Level, ...]:
    """A scatter axis by axis, from the mesh's last: its links are the fastest, and less is left for the others."""
    remaining, levels = [name for name in axes if size_of[name] > 1], []
    for name in sorted(remaining, key=list(size_of).index, reverse=True):
        i = remaining.index(name)
        levels.append(Level(communicator((name,)), math.prod(size_of[other] for other in remaining[:i])))
        remaining.remove(name)
    return tuple(levels)
