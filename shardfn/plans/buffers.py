"""Sizes in bytes of the schedule's buffers: for gathering, decoding, reducing gradients, and disk transfers."""

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
    """A stage whose calls this rank runs: its signature, its shards, and how these are gathered."""

    def __init__(self, flats: list[FlatShard], options: Options) -> None:
        layouts = tuple(flat.layout for flat in flats)
        self.flats = flats
        self.signature = Signature("", lambda: None, options, layouts[0].tree, (), (), layouts)
        self.plan: GatherPlan = self.signature.plan([flat.values for flat in flats])

    @property
    def gathers(self) -> list[FlatShard]:
        """The shards that are gathered through a buffer."""
        return [flat for flat, gather in zip(self.flats, self.plan.each, strict=True) if gather.moves]


def planned(tree: Any, options: Options) -> list[list[Planned]]:
    """Returns the stages that this rank runs, each once, as a list for each mesh; other functions take one list."""
    meshes: dict[Any, dict[int, Planned]] = {}
    for node in optree.tree_leaves(tree, is_leaf=is_stage):
        if not is_stage(node):
            continue
        flats = stage_shards(node)
        if all(flat.layout.here(process_groups.global_rank()) for flat in flats):
            stages = meshes.setdefault(flats[0].layout.grid, {})
            stages.setdefault(id(flats[0].values), Planned(flats, options))
    return [list(group.values()) for group in meshes.values()]


def gathered(stages: list[Planned], options: Options) -> int:
    """Returns the size of the buffers into which parameters are gathered."""
    largest = max(stage.plan.nbytes for stage in stages)
    kept = [stage for stage in stages if stage.signature.keep in (True, "step")]
    in_ring = sum(stage.plan.nbytes > 0 and stage not in kept for stage in stages)
    copies = sum(_secondary(stage) for stage in stages if isinstance(stage.signature.keep, tuple))
    return min(in_ring, options.prefetch + 1) * largest + sum(stage.plan.nbytes for stage in kept) + copies


def _secondary(stage: Planned) -> int:
    """Returns the size of the copy that forward leaves for backward to gather from."""
    if stage.plan.secondary is None or not stage.plan.nbytes:
        return 0
    nbytes = 0
    for gather, copy in zip(stage.plan.each, stage.plan.secondary.each, strict=True):
        if copy is not gather and gather.moves:
            piece = copy.layout.piece * gather.dtype.itemsize
            nbytes += piece if gather.wire is None else gather.layout.size * gather.wire.length // copy.layout.size
    return nbytes


def decoded(stages: list[Planned], options: Options) -> int:
    """Returns the size of the largest stage's buffers for parameters decoded from few bits."""

    def decoded_size(packed: Packed) -> int:
        return room(packed.numel * (options.gather_dtype or packed.dtype).itemsize)

    return max(sum(map(decoded_size, stage.signature.packed)) for stage in stages)


def reducing(stages: list[Planned], options: Options) -> int:
    """Returns the size of the buffers that gradients are sent from and received in, or leave the device through."""
    scratch: dict[int, int] = {}
    offloaded = 0
    for stage in stages:
        for k, flat in enumerate(stage.flats):
            layout, itemsize = flat.layout, options.sum_dtype(flat.values.dtype).itemsize
            if not layout.trainable:
                continue
            if max(layout.size, layout.state_layout.size) > 1:
                scratch[k] = max(scratch.get(k, 0), layout.padded * itemsize)
            if layout.placement.tiers.grads != "device":
                offloaded = max(offloaded, layout.state_layout.piece * max(itemsize, flat.values.itemsize))
    return 2 * 2 * sum(scratch.values()) + (Reductions.UNDER_WAY + 1) * offloaded


# --- disk transfers ---


def moving(stages: list[Planned], options: Options, state: Iterable[tuple[Tensor, str, Layout | None]]) -> int:
    """Returns the size of the disk buffers of all meshes together: buffers are kept, and reused by size."""
    offloads = any(flat.layout.placement.tiers != Tiers() for one in stages for flat in one.flats)
    return _read(stages, options) + _written(stages) + _streamed(stages, state) + offloads * _rounded(copying.ROOM)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT


def _most(counts: Iterable[dict[int, int]], at_once: int) -> int:
    """Returns the bytes of buffers when at most `at_once` of these demands (size -> count) are active together."""
    demands = list(counts)
    sizes = {size for d in demands for size in d}
    return sum(size * sum(sorted((d.get(size, 0) for d in demands), reverse=True)[:at_once]) for size in sizes)


def _sizes(nbytes: Iterable[int]) -> dict[int, int]:
    return Counter(_rounded(n) for n in nbytes if n)


def _read(stages: list[Planned], options: Options) -> int:
    """Returns the size of the buffers for parameters read from disk into the ring."""
    of = (
        [-(-flat.values.nbytes // ALIGNMENT) * ALIGNMENT for flat in stage.gathers if _params_on_disk(flat)]
        for stage in stages
    )
    return _most(map(_sizes, of), 1 + 2 * options.prefetch)


def _params_on_disk(flat: FlatShard) -> bool:
    return bool(flat.layout.placement.tiers.params == "disk")


def _written(stages: list[Planned]) -> int:
    """Returns the size of the buffers for gradients written to disk."""
    nbytes = [n + 2 * ALIGNMENT for stage in stages for flat in stage.flats if (n := _gradient_on_disk(flat))]
    return _most([_sizes([n]) for n in nbytes], grad_offload.BEHIND + 1)


def _gradient_on_disk(flat: FlatShard) -> int:
    layout = flat.layout
    if not layout.trainable or layout.placement.tiers.grads != "disk":
        return 0
    return int(layout.state_layout.held(process_groups.global_rank()) * flat.values.itemsize)


def _streamed(stages: list[Planned], state: Iterable[tuple[Tensor, str, Layout | None]]) -> int:
    """Returns the size of an optimizer step's buffers: some chunks of each column on disk, the last of any length."""
    columns: dict[Layout, list[tuple[int, int]]] = {}
    for flat in (flat for stage in stages for flat in stage.flats if flat.layout.trainable):
        layout_columns = columns.setdefault(flat.layout.state_layout, [])
        itemsize, held = flat.values.itemsize, flat.layout.state_layout.piece
        layout_columns += [(held * itemsize, itemsize)] * (_params_on_disk(flat) + bool(_gradient_on_disk(flat)))
    for x, tier, layout in state:
        if tier == "disk" and layout is not None:
            columns.setdefault(layout, []).append((x.nbytes, x.itemsize))
    at_once = streaming.AHEAD + 1 + streaming.BEHIND
    return at_once * _most([_any_length(some) for some in columns.values()], 1)


def _any_length(columns: list[tuple[int, int]]) -> dict[int, int]:
    """Returns size -> count of the buffers that chunks of these columns may need, whatever their lengths."""
    longest = (_rounded(min(nbytes, streaming.CHUNK * itemsize) + 2 * ALIGNMENT) for nbytes, itemsize in columns)
    return Counter(size for limit in longest for size in range(UNIT, limit + 1, UNIT))
