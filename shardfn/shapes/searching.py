"""Which ways to train a model fit into memory, and which of them is the cheapest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardfn.plan.fits import RESERVE, size_of
from shardfn.plan.machines import Chip, Links
from shardfn.shapes.extrapolating import PlanFigures, extrapolated
from shardfn.shapes.settings import Setting, dtype_of
from shardfn.shapes.sizes import Shape

TENSOR = 8  # ranks along `tensor` that are tried, besides none, for large models
LARGE = 2 * 10**10  # parameters from which it is tried
BATCHES = (1, 4)
_STATE = {"adamw": 2, "lion": 1}  # values of state for each parameter, at least; of others 0


@dataclass(frozen=True)
class Candidate:
    """A way to train, and what it comes to.

    Attributes:
        setting: the way.
        figures: of a rank in a step; None if what is kept alone exceeds the memory.
        spare: bytes of memory that are left over; negative if it does not fit.
        tokens: a second, on all ranks.
        cost: GPU hours for a billion tokens; infinite if it does not fit.
    """

    setting: Setting
    figures: PlanFigures | None
    spare: int
    tokens: float = 0.0
    cost: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.spare >= 0


def search(
    shape: Shape,
    ranks: int,
    memory: str | int,
    base: Setting,
    links: Links | str,
    chip: Chip | str,
    *,
    reserve: str | int = RESERVE,
    batches: Sequence[int] = BATCHES,
    told: Callable[[Candidate], None] = lambda found: None,
) -> list[Candidate]:
    """Plans a model in many ways, and returns those that fit, cheapest first; then the others, nearest first.

    Tried are strategies and meshes on which they differ; blocks that keep their activations, and that compute them
    again; and batches, until one does not fit. If nothing fits, the optimizer's state is kept on the host, and then
    everything.

    Args:
        shape: of the model.
        ranks: number of ranks.
        memory: of a device, as `StepPlan.fits` takes it.
        base: what is the same in all: sequence, dtypes, optimizer, ranks on a node. Its mesh does not matter.
        links: as for `StepPlan.timed`.
        chip: as for `StepPlan.timed`.
        reserve: as for `StepPlan.fits`.
        batches: sequences for each group of ranks that share matrices, growing.
        told: is called with each that was tried.

    Raises:
        ValueError: a size or a name is wrong; the model is not to be cut so.
    """
    room = size_of(memory) - size_of(reserve)
    found: list[Candidate] = []
    for tiers in ({}, {"state": "host"}, {"params": "host", "grads": "host", "state": "host"}):
        for strategy, mesh in ways(shape, ranks, base.per_node):
            for remat in ("off", "on"):
                for batch in batches:
                    setting = replace(base, mesh=mesh, strategy=strategy, remat=remat, batch=batch, tiers=tiers)  # type: ignore[arg-type]
                    found.append(_tried(shape, setting, room, links, chip))
                    told(found[-1])
                    if not found[-1].fits:
                        break
        if any(each.fits for each in found):
            break
    return sorted(found, key=lambda each: (each.cost, -each.spare))


def _tried(shape: Shape, setting: Setting, room: int, links: Links | str, chip: Chip | str) -> Candidate:
    least = state_bytes(shape, setting)
    if least > room:
        return Candidate(setting, None, room - least)
    figures = extrapolated(shape, setting, links, chip)
    spare = room - figures.needed
    each = setting.batch * (setting.sequence or shape.context)
    tokens = each * setting.ranks / setting.mesh.get("tensor", 1) / figures.seconds
    cost = setting.ranks / tokens * 1e9 / 3600 if spare >= 0 else math.inf
    return Candidate(setting, figures, spare, tokens, cost)


def state_bytes(shape: Shape, setting: Setting) -> int:
    """Returns the bytes of parameters, gradients and state that a rank has on the device at least."""
    placement, tensor = setting.placement(), setting.mesh.get("tensor", 1)
    whole = shape.parameters * dtype_of(setting.kept).itemsize / tensor
    cut, finer = (math.prod(setting.mesh[a] for a in axes) for axes in (placement.axes, placement.gradients))
    parts = {"params": whole / cut, "state": whole / finer * _STATE.get(setting.optimizer, 0)}
    return int(sum(count for kind, count in parts.items() if setting.tiers.get(kind, "device") == "device"))


def ways(shape: Shape, ranks: int, per_node: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields strategies with the meshes on which they are tried."""
    for tensor in (1, TENSOR):
        heads = math.gcd(shape.heads, shape.groups, shape.hidden, shape.vocabulary)
        if tensor > 1 and shape.parameters < LARGE:
            continue
        if ranks % tensor or tensor > per_node or (tensor > 1 and (heads % tensor or shape.experts)):
            continue
        rest, cut = ranks // tensor, {"tensor": tensor} if tensor > 1 else {}
        near = max(1, min(per_node // tensor, rest))
        for strategy in ("ddp", "zero1", "shard_grad_op", "full_shard"):
            yield strategy, {"shard": rest} | cut
        for size in (near, 8 * near):
            if 1 < size < rest and rest % size == 0:
                yield "hybrid_shard", {"replica": rest // size, "shard": size} | cut
        if 1 < near < rest and rest % near == 0:
            yield "hfsdp", {"replica": rest // near, "shard": near} | cut
