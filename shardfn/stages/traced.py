"""A stage where torch.compile traces: the composition that it means, in Python that dynamo follows.

What is known before any number is, layouts and axes, is found out once, while tracing, by functions whose results a
graph takes as constants; dynamo guards on the layouts that it gave them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.compat import dynamo
from shardfn.mesh.axes import known_axes, mesh_numbered
from shardfn.mesh.scope import current_axes, mesh_of, scope
from shardfn.quant.packed import Packed
from shardfn.shards.layout import FlatShard, Layout, is_stage
from shardfn.stages.signature import Options, cast, decoded, signature_of


def called(name: str, function: Callable[..., Any], options: Options, args: Any, kwargs: Any) -> Any:
    """The function on whole parameters in place of the shards among its arguments."""
    dynamo.trace_dicts()
    nodes, tree = optree.tree_flatten((args, kwargs), is_leaf=lambda x: type(x) is Packed or _is_stage(x))
    nodes = [node.decoded() if type(node) is Packed else node for node in nodes]
    layouts = [flat.layout for node in nodes if _is_stage(node) for flat in _flats(node)]
    if not layouts:
        args, kwargs = optree.tree_unflatten(tree, nodes)
        return function(*args, **kwargs)
    axes = current_axes()
    _check(None if axes is None else axes.number, name, *layouts)
    with scope(*_home(layouts[0])) if axes is None else contextlib.nullcontext():
        whole = [_whole(name, node, options) if _is_stage(node) else _cast(node, options.input_dtype) for node in nodes]
        args, kwargs = optree.tree_unflatten(tree, whole)
        result = function(*args, **kwargs)
    return optree.tree_map(lambda y: cast(y, options.output_dtype), result) if options.output_dtype else result


def _is_stage(node: Any) -> bool:
    """What `is_stage` says, without a look at what dynamo cannot see."""
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
    """Refuses a call on these, if anything is wrong with it, where the axes of this number are in scope."""
    flats = tuple(FlatShard(None, layout) for layout in layouts)  # type: ignore[arg-type]
    try:
        signature = signature_of(name, _check, Options(), flats, {})
        where = f"stage {name}: {signature.stage!r}"
        with contextlib.nullcontext() if number is None else scope(mesh_numbered(number)):
            mesh_of(signature.grid, where)
        signature.refuse_elsewhere()
    except ValueError as error:
        dynamo.refuse_in_graph(str(error))


@dynamo.constant_when_traced
def _home(layout: Layout) -> Any:
    mesh = mesh_of(layout.grid, "a stage")
    return mesh, known_axes(mesh)


@dynamo.constant_when_traced
def _plan(layout: Layout) -> Any:
    """A layout's facts as plain numbers; its `skeleton` is there afterwards, for dynamo to read."""
    assert layout.skeleton is not None
    entries = tuple((entry.shape, tuple(map(str, entry.leaves))) for entry in layout.entries)
    replicas = layout.placement.replicas if layout.grid.size(layout.placement.replicas) > 1 else ()
    lengths, chosen = layout.splits
    axes = layout.placement.axes if layout.size > 1 else ()
    return layout.piece, replicas, axes, tuple(lengths), tuple(chosen), entries


def _whole(name: str, node: Any, options: Options) -> Any:
    """A stage's parameters, by collectives; gradients are summed in the wider of the dtypes asked for."""
    leaves: dict[str, Tensor] = {}
    flats = _flats(node)
    for flat in flats:
        values = flat.values
        piece, replicas, axes, lengths, chosen, entries = _plan(flat.layout)
        if not isinstance(values, Tensor) or values.shape != (piece,):
            dynamo.refuse_in_graph(
                f"stage {name}: a flat shard does not hold a tensor of its piece's shape, ({piece},)"
            )
        if _travels(flat.layout, values.dtype, options.gather is not None or options.reduce is not None):
            dynamo.refuse_in_graph(
                f"stage {name}: its parameters or gradients travel in few bits, which torch.compile cannot follow "
                f"around a stage: compile the stage's function instead, shardfn.stage(torch.compile(f), gather=...)"
            )
        lower = (options.gather_dtype or values.dtype) if values.dtype.is_floating_point else values.dtype
        if lower != values.dtype:
            values = values.to(lower).to(torch.promote_types(options.sum_dtype(values.dtype), lower))
        if replicas:
            values = functional.pvary(values, replicas)
        if axes:
            values = functional.all_gather(values, axes)
        parts = values.to(lower).split(lengths)
        for i, (shape, numbers) in zip(chosen, entries, strict=True):
            for number in numbers:
                leaves[number] = parts[i].view(shape)
    made = optree.tree_map(lambda number: leaves[number], flats[0].layout.skeleton)
    return decoded(made, lambda packed: packed.decoded(options.gather_dtype)) if _packs(flats[0].layout) else made


@dynamo.constant_when_traced
def _travels(layout: Layout, dtype: torch.dtype, asked: bool) -> bool:
    """Whether a shard, or its gradient, travels in few bits."""
    placement = layout.placement
    asked = asked or placement.gather is not None or placement.reduce is not None
    return asked and dtype.is_floating_point and (layout.size > 1 or layout.grid.size(placement.replicas) > 1)


@dynamo.constant_when_traced
def _packs(layout: Layout) -> bool:
    """Whether some of the stage's parameters are in few bits."""
    return bool(layout.packed)


def _cast(node: Any, dtype: torch.dtype | None) -> Any:
    return node if dtype is None else cast(node, dtype)
