"""The meaning of a stage: its function on parameters that differentiable collectives gather.

Every transform and every later derivative goes through this. `composed` runs it; `traced` is the same in Python that
torch.compile can follow. Facts that do not depend on numbers, such as layouts and axes, are computed once, while
tracing, by functions whose results are constants of the graph; dynamo guards on the layouts passed to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.collectives import functional
from shardfn.collectives.ledger import attributed_to, unscheduled
from shardfn.compat import dynamo, functorch
from shardfn.mesh.axes import known_axes, mesh_numbered
from shardfn.mesh.scope import current_axes, current_mesh, elsewhere, mesh_of, scope, scope_of
from shardfn.quant.packed import Packed
from shardfn.shards.layout import FlatShard, Layout, is_stage
from shardfn.stages.options import Options
from shardfn.stages.parameters import record_parameters
from shardfn.stages.refusals import enter, refuse_mixed, running
from shardfn.stages.signature import Signature, cast, cast_all, decoded, signature_of, wire_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def composed(signature: Signature, leaves: Sequence[Any], mesh: DeviceMesh) -> Any:
    """The result of a call."""
    options = signature.options
    arguments = [cast(leaf, options.input_dtype) for leaf in leaves]
    enter(signature)
    try:
        with (
            attributed_to(signature.stage, scheduled=False),
            scope(mesh, known_axes(mesh)) if current_mesh() is not mesh else contextlib.nullcontext(),
        ):
            shards = zip(signature.shards, signature.layouts, strict=True)
            whole = [_parameters(leaves[i], layout, options) for i, layout in shards]
            try:
                result = signature.call(arguments, whole)
            except RuntimeError as error:
                refuse_mixed(signature, error, whole, arguments)
                raise
    finally:
        running.stage = None
    return cast_all(result, options.output_dtype) if options.output_dtype else result


def _parameters(shard: Tensor, layout: Layout, options: Options) -> list[Tensor]:
    """The parameters of a shard, gathered differentiably."""
    values = shard
    lower = _lower(shard, options)
    if elsewhere():
        return layout.views(
            torch.empty(layout.padded, dtype=lower, device=shard.device, requires_grad=shard.requires_grad)
        )
    wire = wire_of(layout, shard.dtype, options.gather)
    if wire is not None:
        values = wire.rounded(values, lower)
    if layout.size > 1:
        _refuse_bases(values, layout)
    axes = layout.placement.axes if layout.size > 1 else ()
    replicas = layout.placement.replicas if layout.grid.size(layout.placement.replicas) > 1 else ()
    views = layout.views(_whole(values, lower, options, axes, replicas))
    if (recorder := recording.current()) is not None:
        record_parameters(recorder, layout, shard, views)
    return views


def _lower(shard: Tensor, options: Options) -> torch.dtype:
    """The dtype in which a shard is gathered and passed to the function."""
    return (options.gather_dtype or shard.dtype) if shard.dtype.is_floating_point else shard.dtype


def _whole(
    values: Tensor, lower: torch.dtype, options: Options, axes: tuple[str, ...], replicas: tuple[str, ...]
) -> Tensor:
    """Gathers the whole buffer. Gradients are summed in the wider of the requested dtypes."""
    if lower != values.dtype:
        values = values.to(lower).to(torch.promote_types(options.sum_dtype(values.dtype), lower))
    if replicas:
        values = functional.pvary(values, replicas)
    if axes:
        values = functional.all_gather(values, axes)
    return values.to(lower)


def _refuse_bases(values: Tensor, layout: Layout) -> None:
    """Raises RuntimeError if a shard's tangents form a basis on every rank, which would sum columns of different ranks.

    For tangents of the whole parameters, a unit vector is nonzero on a single rank only.
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
                f"{layout.stage!r} is cut over {' x '.join(layout.placement.axes)}, and its tangents are a basis of "
                f"{len(tangents)} unit vectors on each of these {layout.size} ranks at once, as torch.func.jacfwd and "
                f"torch.func.hessian make them: what comes out are sums of {layout.size} columns. Use shardfn.jacfwd, "
                f"shardfn.jacrev or shardfn.hessian"
            )


# --- where torch.compile traces ---


def traced(name: str, function: Callable[..., Any], options: Options, args: Any, kwargs: Any) -> Any:
    """Calls the function with whole parameters in place of the shards among its arguments."""
    dynamo.trace_dicts()
    nodes, tree = optree.tree_flatten((args, kwargs), is_leaf=lambda x: type(x) is Packed or _is_stage(x))
    nodes = [node.decoded() if type(node) is Packed else node for node in nodes]
    layouts = [flat.layout for node in nodes if _is_stage(node) for flat in _flats(node)]
    if not layouts:
        args, kwargs = optree.tree_unflatten(tree, nodes)
        return function(*args, **kwargs)
    axes = current_axes()
    _check(None if axes is None else axes.number, name, *layouts)
    with scope_of(layouts[0].grid, "a stage") if axes is None else contextlib.nullcontext():
        nodes = [_traced_stage(name, n, options) if _is_stage(n) else cast(n, options.input_dtype) for n in nodes]
        args, kwargs = optree.tree_unflatten(tree, nodes)
        result = function(*args, **kwargs)
    return cast_all(result, options.output_dtype) if options.output_dtype else result


def _is_stage(node: Any) -> bool:
    """As `is_stage`, using only what dynamo can trace."""
    if type(node) is FlatShard:
        return True
    if type(node) is not dict or not node or not all(type(part) is FlatShard for part in node.values()):
        return False
    return _make_one(*[part.layout for part in node.values()])


@dynamo.constant_when_traced
def _make_one(*layouts: Layout) -> bool:
    return is_stage({i: FlatShard(None, layout) for i, layout in enumerate(layouts)})  # type: ignore[arg-type]


def _flats(node: Any) -> list[FlatShard]:
    return [node] if type(node) is FlatShard else [node[key] for key in sorted(node)]


@dynamo.constant_when_traced
def _check(number: int | None, name: str, *layouts: Layout) -> None:
    """Refuses a call on shards of these layouts if anything is wrong with it; `number` identifies the axes in scope."""
    flats = tuple(FlatShard(None, layout) for layout in layouts)  # type: ignore[arg-type]
    try:
        signature = signature_of(name, _check, Options(), flats, {})
        place = f"stage {name}: {signature.stage!r}"
        with contextlib.nullcontext() if number is None else scope(mesh_numbered(number)):
            mesh_of(signature.grid, place)
        signature.refuse_elsewhere()
    except ValueError as error:
        dynamo.refuse_in_graph(str(error))


@dynamo.constant_when_traced
def _plan(layout: Layout) -> Any:
    """A layout's facts as plain numbers; makes its cached `skeleton`, so that dynamo can read it."""
    assert layout.skeleton is not None
    entries = tuple((entry.shape, tuple(map(str, entry.leaves))) for entry in layout.entries)
    replicas = layout.placement.replicas if layout.grid.size(layout.placement.replicas) > 1 else ()
    lengths, chosen = layout.splits
    axes = layout.placement.axes if layout.size > 1 else ()
    return layout.piece, replicas, axes, tuple(lengths), tuple(chosen), entries, bool(layout.packed)


def _traced_stage(name: str, node: Any, options: Options) -> Any:
    """A stage's parameters in place of its shards."""
    leaves: dict[str, Tensor] = {}
    flats = _flats(node)
    for flat in flats:
        values = flat.values
        piece, replicas, axes, lengths, chosen, entries, packed = _plan(flat.layout)
        if not isinstance(values, Tensor) or values.shape != (piece,):
            dynamo.refuse_in_graph(
                f"stage {name}: a flat shard does not hold a tensor of its piece's shape, ({piece},)"
            )
        if _travels(flat.layout, values.dtype, options.gather is not None or options.reduce is not None):
            dynamo.refuse_in_graph(
                f"stage {name}: its parameters or gradients travel in few bits, which torch.compile cannot follow "
                f"around a stage: compile the stage's function instead, shardfn.stage(torch.compile(f), gather=...)"
            )
        parts = _whole(values, _lower(values, options), options, axes, replicas).split(lengths)
        for i, (shape, numbers) in zip(chosen, entries, strict=True):
            for number in numbers:
                leaves[number] = parts[i].view(shape)
    parameters = optree.tree_map(lambda number: leaves[number], flats[0].layout.skeleton)
    return decoded(parameters, lambda x: x.decoded(options.gather_dtype)) if packed else parameters


@dynamo.constant_when_traced
def _travels(layout: Layout, dtype: torch.dtype, requested: bool) -> bool:
    """Whether a shard or its gradient is sent in a quantized format."""
    placement = layout.placement
    requested = requested or placement.gather is not None or placement.reduce is not None
    return requested and dtype.is_floating_point and (layout.size > 1 or layout.grid.size(placement.replicas) > 1)
