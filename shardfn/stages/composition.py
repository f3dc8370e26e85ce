"""A stage as a composition: its function on parameters gathered by differentiable collectives.

This defines what a stage means; the schedule computes the same, faster. torch.func transforms use the composition, and
gradients of gradients use its transpose, `transposed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.check import recording
from shardfn.collectives import functional
from shardfn.collectives.ledger import attributed_to, unscheduled
from shardfn.compat import autograd, dispatch, functorch, process_groups
from shardfn.mesh.axes import known_axes, per_mesh
from shardfn.mesh.scope import current_mesh, elsewhere, scope
from shardfn.shards.layout import Layout
from shardfn.stages.gather_plan import GatherPlan, wire_of
from shardfn.stages.options import Options
from shardfn.stages.recorded import record_parameters
from shardfn.stages.refusals import refuse_mixed, writes
from shardfn.stages.signature import Signature, cast, cast_all
from shardfn.stages.written import snapshot


def composed(signature: Signature, leaves: Sequence[Any], mesh: DeviceMesh) -> Any:
    """Runs a call of a stage as a composition; returns its result."""
    options = signature.options
    arguments = [cast(leaf, options.input_dtype) for leaf in leaves]
    with (
        attributed_to(signature.stage, scheduled=False),
        scope(mesh, known_axes(mesh)) if current_mesh() is not mesh else contextlib.nullcontext(),
    ):
        shards = zip(signature.shards, signature.layouts, strict=True)
        full = [_gathered_parameters(leaves[i], layout, options) for i, layout in shards]
        parameters = [functorch.unwrapped(p) for ps in full for p in ps]
        compared = per_mesh(mesh, "compared parameters", set[Any])
        before = snapshot(signature, signature.layouts, full, compared, (signature.code, signature.layouts))
        versions = autograd.versions_of(parameters)
        try:
            result = signature.call(arguments, full)
        except RuntimeError as error:
            if " of View is a view and " in str(error):  # torch.func's error for a write into a view of `Layout.views`
                raise RuntimeError(writes(signature)) from error
            refuse_mixed(signature, error, full, arguments)
            raise
        if before is not None:
            before.check()
        if autograd.versions_of(parameters) != versions:
            raise RuntimeError(writes(signature))
    return cast_all(result, options.output_dtype) if options.output_dtype else result


def _gathered_parameters(shard: Tensor, layout: Layout, options: Options) -> list[Tensor]:
    """The parameters of a shard, gathered differentiably."""
    lower = (options.gather_dtype or shard.dtype) if shard.dtype.is_floating_point else shard.dtype
    if elsewhere():
        return layout.views(
            torch.empty(layout.padded, dtype=lower, device=shard.device, requires_grad=shard.requires_grad)
        )
    wire, placement = wire_of(layout, shard.dtype, options.gather_format), layout.placement
    values = shard
    if wire is not None:
        values = wire.rounded(shard, lower, layout.holes[layout.index(process_groups.global_rank())])
    if layout.size > 1 and not dispatch.in_graph():  # the eager call before has checked
        _refuse_bases(values, layout)
    if lower != values.dtype:  # gradients are summed in the wider of the requested dtypes
        values = values.to(lower).to(torch.promote_types(options.sum_dtype(values.dtype), lower))
    if layout.grid.size(placement.replicas) > 1:
        values = functional.pvary(values, placement.replicas)
    if layout.size > 1:
        values = functional.all_gather(values, placement.axes)
    views = layout.views(values.to(lower))
    if (recorder := recording.current()) is not None:
        record_parameters(recorder, layout, shard, views)
    return views


def _refuse_bases(values: Tensor, layout: Layout) -> None:
    """Raises RuntimeError if a shard's tangents form a basis on every rank: this would sum columns of different ranks.

    Of a unit vector over the full parameters, the tangent is nonzero on a single rank only.
    """
    for tangents in functorch.tangents(values) if functorch.batching() else ():
        if tangents.ndim != 2:
            continue
        with functorch.outside_transforms(), unscheduled(), torch.no_grad():
            units = (tangents.count_nonzero(-1) == 1) & (tangents.sum(-1) == 1)
            places = tangents[units].argmax(-1)
            units &= len(places) > 1 and len(places.unique()) == len(places)
            ranks = functional.psum(units.to(torch.float32), layout.placement.axes)
            on_each = bool((ranks == layout.size).any() and ((ranks == layout.size) | (ranks == 0)).all())
        if on_each:
            raise RuntimeError(
                f"{layout.stage!r} is sharded over {' x '.join(layout.placement.axes)}, and its tangents are "
                f"{len(tangents)} unit vectors on each of {layout.size} ranks, as in torch.func.jacfwd and "
                f"torch.func.hessian, so results are sums of {layout.size} columns. Use shardfn.jacfwd, shardfn.jacrev "
                f"or shardfn.hessian"
            )


def transposed(
    plan: GatherPlan, shards: Sequence[Tensor], trains: Sequence[bool], gradients: Sequence[Sequence[Tensor | None]]
) -> list[Tensor | None]:
    """Reduces gradients of parameters to gradients of shards by differentiable collectives."""
    reduced: list[Tensor | None] = []
    for gather, shard, is_trained, parameters in zip(plan.each, shards, trains, gradients, strict=True):
        if not is_trained:
            reduced.append(None)
            continue
        layout, placement = gather.layout, gather.layout.placement
        parts, end = [], 0
        # Padding depends on a tensor that needs a gradient. So the collectives below have a backward on every rank,
        # even where no gradient came, and second derivatives run the same collectives on all ranks.
        anchor = shard.new_zeros((), dtype=gather.dtype).requires_grad_()
        for entry, g in zip(layout.entries, parameters, strict=True):
            parts.append(anchor.expand(entry.offset - end))
            parts.append(anchor.expand(entry.numel) if g is None else g.reshape(-1))
            end = entry.offset + entry.numel
        flat = torch.cat([*parts, anchor.expand(layout.padded - end)]).to(shard.dtype)
        if layout.size > 1:
            flat = functional.reduce_scatter(flat, placement.axes)
        if layout.grid.size(placement.replicas) > 1:
            flat = functional.psum(flat, placement.replicas)
        reduced.append(flat)
    return reduced
