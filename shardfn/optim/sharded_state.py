"""Optimizer state that is sharded further than the parameters: ZeRO-1 and HFSDP, for any optimizer.

A rank updates its part of the parameters that several ranks hold, with its part of the gradient, and gathers the
other ranks' parts. The part is a flat shard with a finer layout, so optimizers need not know about it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.check import recording
from shardfn.collectives import functional
from shardfn.collectives.into_buffers import Communicator, Handle, all_gather, arrived, communicator_of
from shardfn.collectives.ledger import attributed_to
from shardfn.collectives.scheduled import Scheduled, run_in_graph
from shardfn.compat import dispatch, process_groups
from shardfn.mesh import waiting
from shardfn.mesh.scope import mesh_of, scope, scope_of
from shardfn.optim.differentiable import differentiable, share_memory
from shardfn.optim.state_offload import Init, Step
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.tiers import copying, placing
from shardfn.tiers.placing import on_mesh_device

Finer = Callable[[Layout], Layout]


def strategy_layout(layout: Layout) -> Layout:
    """The layout of a parameter's optimizer state by its strategy."""
    return layout.state_layout


def divides_init(init: Init, finer: Finer = strategy_layout) -> Init:
    """`init` on this rank's part of each flat shard that `finer` shards further."""

    @functools.wraps(init)
    def wrapped(params: Any) -> Any:
        return init(_local_parts(params, finer))

    return wrapped


def divides_step(step: Step, finer: Finer = strategy_layout) -> Step:
    """`step` on this rank's part of each flat shard that `finer` shards further; gathers new parts."""

    @functools.wraps(step)
    def wrapped(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        nodes = optree.tree_leaves(params, is_leaf=is_flat)
        if not any(is_flat(node) and finer(node.layout) != node.layout for node in nodes):
            return step(params, grads, state)
        parts = _local_parts(params, finer)
        before = [_version(node) for node in optree.tree_leaves(parts, is_leaf=is_flat)]
        new_parts, state = step(parts, _gradients(params, grads, finer), state)
        return _gathered(params, parts, before, new_parts, finer), state

    return wrapped


def _local_parts(params: Any, finer: Finer) -> Any:
    return optree.tree_map(
        lambda node: _part(node, finer(node.layout)) if is_flat(node) else node, params, is_leaf=is_flat
    )


def _gradients(params: Any, grads: Any, finer: Finer) -> Any:
    """This rank's parts of the gradients; `value_and_grad` may already return only these."""

    def part(node: Any, grad: Any) -> Any:
        if not is_flat(node) or grad is None:
            return grad
        values = grad.values if is_flat(grad) else grad
        fine = finer(node.layout)
        is_full = isinstance(values, Tensor) and values.shape == node.values.shape
        is_finer = is_flat(grad) and grad.layout == fine
        return _part(FlatShard(values, node.layout), fine) if is_full and not is_finer else grad

    leaves, tree = optree.tree_flatten(params, is_leaf=is_flat)
    return optree.tree_unflatten(tree, [part(p, g) for p, g in zip(leaves, tree.flatten_up_to(grads), strict=True)])


def _part(node: FlatShard, fine: Layout) -> FlatShard:
    """This rank's part of a flat shard: a view, or a differentiable slice."""
    layout, values = node.layout, node.values
    if fine == layout or not layout.trainable or not isinstance(values, Tensor):
        return node
    if differentiable(values):
        with scope_of(layout.grid, f"stage {layout.stage!r}"):
            return FlatShard(functional.local_slice(values, finer_axes(layout, fine)), fine)
    start = start_of(layout, fine)
    return FlatShard(values.detach()[start : start + fine.piece], fine)


def _gathered(params: Any, parts: Any, before: list[int], new_parts: Any, finer: Finer) -> Any:
    """The parameters with all ranks' new parts, gathered together."""
    leaves, tree = optree.tree_flatten(params, is_leaf=is_flat)
    handles: list[tuple[str, str, Handle]] = []
    gathered = []
    rows = zip(leaves, tree.flatten_up_to(parts), before, tree.flatten_up_to(new_parts), strict=True)
    for node, part, version, new in rows:
        if not is_flat(node):
            gathered.append(new)
        elif finer(node.layout) == node.layout or not node.layout.trainable:
            gathered.append(FlatShard(new.values, node.layout))
        else:
            shared = share_memory(new.values, part.values)
            # Sharing memory is not enough: without `donate`, a rank with nothing to update may return its part as is.
            donated = shared and (_version(part) != version or differentiable(new.values))
            values = _gather_updated(node, new.values, donated, finer(node.layout), handles)
            gathered.append(FlatShard(values, node.layout))
    for stage, group, handle in handles:
        try:
            # All gathers are in flight before the first is waited for, so they overlap.
            arrived(handle, "all_gather", group, stage)
        except RuntimeError as error:
            message = f"stage {stage!r}: gathering its new parameters failed on this rank: {error}"
            raise RuntimeError(message) from waiting.cause(error)
    return optree.tree_unflatten(tree, gathered)


class _GatherUpdated(Scheduled):
    """The gather of a parameter's new parts in a traced step: `this rank's part -> the parameter`."""

    ahead = 1

    def __init__(self, layout: Layout, fine: Layout, communicator: Communicator) -> None:
        super().__init__()
        self.layout, self.fine, self.communicator = layout, fine, communicator

    def __str__(self) -> str:
        return f"gather new parts of {self.layout.stage}: {self.layout.piece} {self.layout.dtype}"

    def empty_results(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        (part,) = inputs
        assert part is not None
        return [part.new_empty(self.layout.piece)]

    def start(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Handle]:
        (full,), (part,), start = self.empty_results(inputs), inputs, start_of(self.layout, self.fine)
        assert part is not None
        full[start : start + self.fine.piece].copy_(part)
        with attributed_to(self.layout.stage):
            return full, all_gather(full.view(torch.uint8), self.communicator, full.dtype)

    def finish(self, started: tuple[Tensor, Handle]) -> list[Tensor]:
        full, handle = started
        arrived(handle, "all_gather", self.communicator.gathers.group_name, self.layout.stage)
        return [full]


def _gather_updated(
    node: FlatShard, new: Tensor, donated: bool, fine: Layout, handles: list[tuple[str, str, Handle]]
) -> Tensor:
    """A parameter from all ranks' new parts; in its own memory, if this rank's part was updated in place."""
    layout = node.layout
    where, names = f"stage {layout.stage!r}", finer_axes(layout, fine)
    values, start = node.values, start_of(layout, fine)
    if differentiable(new):
        with scope_of(layout.grid, where), torch.set_grad_enabled(not donated and torch.is_grad_enabled()):
            gathered = functional.all_gather(new, names, to="invariant")
            return values.copy_(gathered) if donated else gathered
    mesh = mesh_of(layout.grid, where)
    if layout.placement.tiers.params != "device":
        return _gather_offloaded(node, new, donated, mesh, names)
    with torch.no_grad(), attributed_to(layout.stage):
        full = values.detach() if donated else torch.empty_like(values)
        local = full[start : start + fine.piece]
        if not share_memory(full, new):  # or else the part is in place already
            local.copy_(new)
        if layout.grid.size(names) > 1 and layout.lives_on(process_groups.global_rank()):
            communicator = communicator_of(mesh, names)
            if dispatch.in_graph():
                (gathered,) = run_in_graph(_GatherUpdated(layout, fine, communicator), [new])
                return values.copy_(gathered) if donated else gathered
            handle = all_gather(full.view(torch.uint8), communicator, full.dtype)
            handles.append((layout.stage, communicator.gathers.group_name, handle))
    if (recorder := recording.current()) is not None:
        recorder.gathered(new, names, values if donated else full)
    return values if donated else full


def _gather_offloaded(node: FlatShard, new: Tensor, donated: bool, mesh: DeviceMesh, names: tuple[str, ...]) -> Tensor:
    """As `_gather_updated`, for parameters on the host or on disk: the device gathers them one at a time."""
    tier = node.layout.placement.tiers.params
    with torch.no_grad(), scope(mesh):
        gathered = functional.all_gather(on_mesh_device(new.detach(), mesh), names, to="invariant")
        if not donated:
            return placing.put(gathered, tier, "params", mesh)
        copying.copy_(node.values.detach(), gathered)
        return node.values


def _version(node: Any) -> int:
    """The version counter of a node's values, which counts in-place changes."""
    values = node.values if is_flat(node) else node
    return values._version if isinstance(values, Tensor) and not values.is_inference() else 0


def finer_axes(layout: Layout, fine: Layout) -> tuple[str, ...]:
    """The axes over which `fine` is sharded and `layout` is not."""
    return fine.placement.axes[len(layout.placement.axes) :]


def start_of(layout: Layout, fine: Layout) -> int:
    """The offset of this rank's part in its piece."""
    return layout.grid.index(process_groups.global_rank(), finer_axes(layout, fine)) * fine.piece
