"""The buffers of the schedule: what stages gather and decode into, and what gradients and disks go through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import optree
from torch import Tensor

from shardfn.compat import process_groups
from shardfn.quant.packed import Packed
from shardfn.shards.layout import FlatShard, Layout, is_stage, stage_shards
from shardfn.shards.placement import Tiers
from shardfn.stages.decoding import room
from shardfn.stages.options import Options
from shardfn.stages.reduction import Reductions
from shardfn.stages.signature import GatherPlan, Signature
from shardfn.tiers import copying, grad_offload, streaming
from shardfn.tiers.files import ALIGNMENT
from shardfn.tiers.transfers import UNIT


class Planned:
    """A stage of which this rank runs calls: its signature, its shards, and how these travel."""

    def __init__(self, flats: list[FlatShard], options: Options) -> None:
        layouts = tuple(flat.layout for flat in flats)
        self.flats = flats
        self.signature = Signature("", lambda: None, options, layouts[0].tree, (), (), layouts)
        self.plan: GatherPlan = self.signature.plan([flat.values for flat in flats])

    @property
    def gathers(self) -> list[FlatShard]:
        """The shards that go through a buffer."""
        return [flat for flat, gather in zip(self.flats, self.plan.each, strict=True) if gather.moves]


def planned(tree: Any, options: Options) -> list[list[Planned]]:
    """The stages on each mesh that this rank runs, each once. What follows asks for those of one mesh."""
    meshes: dict[Any, dict[int, Planned]] = {}
    for node in optree.tree_leaves(tree, is_leaf=is_stage):
        if not is_stage(node):
            continue
        flats = stage_shards(node)
        if all(flat.layout.here(process_groups.global_rank()) for flat in flats):
            known = meshes.setdefault(flats[0].layout.grid, {})
            known.setdefault(id(flats[0].values), Planned(flats, options))
    return [list(some.values()) for some in meshes.values()]


def gathered(stages: list[Planned], options: Options) -> int:
    """What parameters are gathered into."""
    largest = max(one.plan.nbytes for one in stages)
    kept = [one for one in stages if one.signature.keep in (True, "step")]
    turns = sum(one.plan.nbytes > 0 and one not in kept for one in stages)
    copies = sum(_secondary(one) for one in stages if isinstance(one.signature.keep, tuple))
    return min(turns, options.prefetch + 1) * largest + sum(one.plan.nbytes for one in kept) + copies


def _secondary(stage: Planned) -> int:
    """What forward leaves for backward to gather from."""
    if stage.plan.secondary is None or not stage.plan.nbytes:
        return 0
    nbytes = 0
    for gather, copy in zip(stage.plan.each, stage.plan.secondary.each, strict=True):
        if copy is not gather and gather.moves:
            piece = copy.layout.piece * gather.dtype.itemsize
            nbytes += piece if gather.wire is None else gather.layout.size * gather.wire.length // copy.layout.size
    return nbytes


def decoded(stages: list[Planned], options: Options) -> int:
    """What parameters in few bits are decoded to."""

    def of(packed: Packed) -> int:
        return room(packed.numel * (options.gather_dtype or packed.dtype).itemsize)

    return max(sum(map(of, one.signature.packed)) for one in stages)


def reducing(stages: list[Planned], options: Options) -> int:
    """What gradients take off from, and what arrives; and those that are about to leave the device."""
    scratch: dict[int, int] = {}
    away = 0
    for one in stages:
        for k, flat in enumerate(one.flats):
            layout, itemsize = flat.layout, options.sum_dtype(flat.values.dtype).itemsize
            if not layout.trainable:
                continue
            if max(layout.size, layout.state_layout.size) > 1:
                scratch[k] = max(scratch.get(k, 0), layout.padded * itemsize)
            if layout.placement.tiers.grads != "device":
                away = max(away, layout.state_layout.piece * max(itemsize, flat.values.itemsize))
    return 2 * 2 * sum(scratch.values()) + (Reductions.UNDER_WAY + 1) * away


# --- what reads and writes disks ---


def moving(every: list[Planned], options: Options, state: Iterable[tuple[Tensor, str, Layout | None]]) -> int:
    """What is read ahead and written behind on all meshes, for all kinds: the buffers are kept, by their sizes."""
    away = any(flat.layout.placement.tiers != Tiers() for one in every for flat in one.flats)
    return _read(every, options) + _written(every) + _streamed(every, state) + away * _rounded(copying.ROOM)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT


def _most(counts: Iterable[dict[int, int]], at_once: int) -> int:
    """Bytes of buffers, if so many of these may be in use at once: counts by size."""
    every = list(counts)
    sizes = {size for one in every for size in one}
    return sum(size * sum(sorted((one.get(size, 0) for one in every), reverse=True)[:at_once]) for size in sizes)


def _sizes(nbytes: Iterable[int]) -> dict[int, int]:
    return Counter(_rounded(n) for n in nbytes if n)


def _read(stages: list[Planned], options: Options) -> int:
    """Parameters on their way into the ring."""
    of = (
        [-(-flat.values.nbytes // ALIGNMENT) * ALIGNMENT for flat in one.gathers if _params_on_disk(flat)]
        for one in stages
    )
    return _most(map(_sizes, of), 1 + 2 * options.prefetch)


def _params_on_disk(flat: FlatShard) -> bool:
    return bool(flat.layout.placement.tiers.params == "disk")


def _written(stages: list[Planned]) -> int:
    """Gradients on their way to disk."""
    nbytes = [n + 2 * ALIGNMENT for one in stages for flat in one.flats if (n := _gradient_on_disk(flat))]
    return _most([_sizes([n]) for n in nbytes], grad_offload.BEHIND + 1)


def _gradient_on_disk(flat: FlatShard) -> int:
    layout = flat.layout
    if not layout.trainable or layout.placement.tiers.grads != "disk":
        return 0
    return int(layout.state_layout.held(process_groups.global_rank()) * flat.values.itemsize)


def _streamed(stages: list[Planned], state: Iterable[tuple[Tensor, str, Layout | None]]) -> int:
    """An optimizer's step: of each column that is on disk some stretches, the last of which may be of any length."""
    columns: dict[Layout, list[tuple[int, int]]] = {}
    for flat in (flat for one in stages for flat in one.flats if flat.layout.trainable):
        own = columns.setdefault(flat.layout.state_layout, [])
        itemsize, held = flat.values.itemsize, flat.layout.state_layout.piece
        own += [(held * itemsize, itemsize)] * (_params_on_disk(flat) + bool(_gradient_on_disk(flat)))
    for x, tier, layout in state:
        if tier == "disk" and layout is not None:
            columns.setdefault(layout, []).append((x.nbytes, x.itemsize))
    at_once = streaming.AHEAD + 1 + streaming.BEHIND
    return at_once * _most([_any_length(some) for some in columns.values()], 1)


def _any_length(columns: list[tuple[int, int]]) -> dict[int, int]:
    """How many buffers of each size the stretches of some columns may need, of whatever length these are."""
    longest = (_rounded(min(nbytes, streaming.CHUNK * itemsize) + 2 * ALIGNMENT) for nbytes, itemsize in columns)
    return Counter(size for most in longest for size in range(UNIT, most + 1, UNIT))
