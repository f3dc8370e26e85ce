"""Merges adapters into their weights, and removes them again: each rank changes the elements that it holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import process_groups
from shardfn.interop.functional import Functional, expect_functional
from shardfn.lora.adapters import BARE, Adapter, is_adapter, parameter_of
from shardfn.lora.init import is_stage_or_packed, whole_values
from shardfn.mesh import waiting
from shardfn.mesh.scope import mesh_of
from shardfn.mesh.spec import dotted, leaves_by_path
from shardfn.quant.packed import dequantize, is_packed
from shardfn.quoting import listed
from shardfn.shards.layout import FlatShard, Range, is_flat, is_stage, local_parameters, stage_shards
from shardfn.shards.sharding import Rules, agreed
from shardfn.shards.unsharding import unshard
from shardfn.tiers import copying
from shardfn.tiers.placing import on_mesh_device
from shardfn.tracebacks import api_boundary

_log = logging.getLogger("shardfn")


@waiting.during("sf.lora.merge")
@api_boundary
def merge(params: Any, adapters: Any, model: Functional | None = None) -> Any:
    """Merges adapters into parameters, which then give the same results without them, to rounding; all ranks call it.

    No weight is gathered, except for DoRA, and quantized ones: all quantized parameters of the tree are decoded, one
    stage after another, since a sum would have to be rounded again. The log of `shardfn` says so.

    Args:
        params: parameters of the base: flat shards, whole tensors, or both.
        adapters: what `init` or `load` made, sharded or not.
        model: what `interop.functional` made, if the parameters are of one.

    Returns:
        New parameters of the same structure.

    Raises:
        ValueError: the adapters are of other parameters, or need the model that they belong to; a weight is tied to
            another, which would change as well.

    Example:
        ``interop.save_pretrained("merged", model, lora.merge(params, adapters, model))``
    """
    by_path = _adapters_by_path(adapters, model)
    _check_shapes(params, by_path)
    if quantised := [node for node in _stages(params) if _in_few_bits(node)]:
        ranks = [stage_shards(node)[0].layout.grid.ranks for node in quantised if is_stage(node)]
        if all(process_groups.global_rank() == min(group) for group in ranks):  # one warning, not one per rank
            _log.warning(
                "lora.merge: parameters that were kept in few bits are in full precision now: merged ones would have "
                "to be rounded to few bits again"
            )
        params = optree.tree_map(_in_full, params, is_leaf=is_stage_or_packed)
    ratios = {path: _ratio(params, path, x) for path, x in by_path.items() if is_adapter(x) and x.magnitude is not None}

    def change(path: str, span: Range, values: Tensor) -> Tensor:
        adapter = by_path[path]
        if not is_adapter(adapter):
            return _elements(adapter, span)
        changed = values + _delta(adapter, span).to(values.device)
        if path in ratios:
            column = ratios[path] if adapter.recipe.kind != "linear" else ratios[path][:, None]
            changed = changed * _elements(column.expand(adapter.shape()), span).to(values.device)
        return changed

    return _with_changes(params, by_path, change)


@waiting.during("sf.lora.unmerge")
@api_boundary
def unmerge(params: Any, adapters: Any, model: Functional | None = None) -> Any:
    """The inverse of `merge`, to rounding in the dtype of the parameters.

    Args:
        params: what `merge` returned.
        adapters: what was merged.
        model: as for `merge`.

    Raises:
        ValueError: as `merge`; adapters replaced parameters, or scaled them by a norm that is now lost, as DoRA does:
            keep the parameters from before.
    """
    by_path = _adapters_by_path(adapters, model)
    for path, adapter in by_path.items():
        if not is_adapter(adapter) or adapter.magnitude is not None:
            change = "scaled by DoRA" if is_adapter(adapter) else "replaced"
            raise ValueError(
                f"lora.unmerge: {path} was {change}, and what it was before is not in it any more: keep the parameters "
                f"from before merge"
            )
    _check_shapes(params, by_path)
    if any(map(_in_few_bits, _stages(params))):
        raise ValueError("lora.unmerge: the tree has quantized parameters, into which nothing can be merged")
    return _with_changes(
        params, by_path, lambda path, span, values: values - _delta(by_path[path], span).to(values.device)
    )


# --- what there is to merge ---


def _adapters_by_path(adapters: Any, model: Functional | None) -> dict[str, Any]:
    """Whole adapters, and tensors that replace parameters, by the parameters' paths.

    Raises:
        ValueError: they do not fit the model; a weight is tied to others.
    """
    adapters_by_path = leaves_by_path(unshard(adapters), is_adapter)
    if model is None:
        return adapters_by_path
    expect_functional("lora", model)
    by_name: dict[str, Any] = {}
    for path, adapter in adapters_by_path.items():
        name = parameter_of(path, adapter.recipe.kind) if is_adapter(adapter) else path
        if name not in model.names:
            raise ValueError(f"lora: there is no {name} in {type(model.module).__name__}, which an adapter could be of")
        canonical = model.names[name]
        holder, _, attribute = name.rpartition(".")
        bare = attribute if is_adapter(adapter) and adapter.recipe.kind in BARE else None
        if is_adapter(adapter) and (wrong := adapter.misfit(model.module.get_submodule(holder), bare)):
            raise ValueError(f"lora: {path} is {wrong}: are these adapters of another model?")
        aliases = [alias for alias, name_in_tree in model.names.items() if name_in_tree == canonical]
        holders = {id(model.module.get_submodule(alias.rpartition(".")[0])): alias for alias in aliases}
        if len(holders) > 1:
            tied = listed(alias for alias in holders.values() if alias != name)
            raise ValueError(
                f"lora: {name} is tied to {tied}, which would change as well: merge into a model in which they are "
                f"not tied, such as by tie_word_embeddings=False in its configuration"
            )
        by_name[canonical] = adapter
    return by_name


def _check_shapes(params: Any, by_path: Mapping[str, Any]) -> None:
    """Raises ValueError, the same on every rank, if adapters do not fit the parameters' shapes."""
    for name, leaf in leaves_by_path(params, lambda x: is_flat(x) or is_packed(x)).items():
        shapes = {name: tuple(leaf.shape)} if not is_flat(leaf) else {
            entry.path: leaf.layout.meant_shape(number) for number, entry in enumerate(leaf.layout.entries)
        }  # fmt: skip
        for path in shapes.keys() & by_path.keys():
            adapter, shape = by_path[path], shapes[path]
            wrong = adapter.unlike(shape) if is_adapter(adapter) else ""
            if not is_adapter(adapter) and tuple(adapter.shape) != shape:
                wrong = f"of shape {list(shape)}, and what replaces it {list(adapter.shape)}"
            if wrong:
                raise ValueError(f"lora: {path} is {wrong}: are these adapters of other parameters?")


def _ratio(params: Any, path: str, adapter: Adapter) -> Tensor:
    """DoRA's factor for each output, computed from the whole weight, on its device."""
    weight = whole_values(params, [path]).get(path)
    if weight is None:
        raise ValueError(_missing_message([path]))
    placed: Adapter = optree.tree_map(lambda x: x.to(weight.device), adapter)
    return placed.apply_to(weight, training=False)._ratio()


# --- into the parameters ---


def _with_changes(params: Any, by_path: Mapping[str, Any], change: Callable[[str, Range, Tensor], Tensor]) -> Any:
    """The parameters, with the elements that this rank holds changed."""
    rank, used = process_groups.global_rank(), set[str]()

    def changed_leaf(path: str, leaf: Any) -> Any:
        if is_flat(leaf):
            used.update(entry.path for entry in leaf.layout.entries if entry.path in by_path)
            changed = FlatShard(copying.clone(leaf.values), leaf.layout)
            views = local_parameters(changed)
            for span in leaf.layout.ranges(rank):
                if span.path in by_path:
                    values = on_mesh_device(
                        views[span.path], mesh_of(leaf.layout.grid, f"lora: stage {leaf.layout.stage!r}")
                    )
                    copying.copy_(views[span.path], change(span.path, span, values))
            return changed
        if path not in by_path:
            return leaf
        used.add(path)
        shape = tuple(leaf.shape)
        span = Range(path, 0, leaf.numel(), shape, (0,) * len(shape))
        return change(path, span, leaf.reshape(-1)).to(leaf).view(shape)

    with torch.no_grad():
        accessors, leaves, spec = optree.tree_flatten_with_accessor(params, is_leaf=is_flat)
        new_leaves = [changed_leaf(dotted(accessor), leaf) for accessor, leaf in zip(accessors, leaves, strict=True)]
    if unused := [path for path in by_path if path not in used]:
        raise ValueError(_missing_message(unused))
    return optree.tree_unflatten(spec, new_leaves)


def _delta(adapter: Adapter, span: Range) -> Tensor:
    """A range's elements of the scaled product; only the rows that contain them are multiplied out."""
    if span.start >= span.stop:
        return adapter.a.new_zeros(0)
    first, second = (x if x.ndim == 3 else x[None] for x in adapter.factors())
    missing = 3 - len(span.shape)
    (begin, top, left), (_, height, columns) = (0,) * missing + (*span.corner,), (1,) * missing + (*span.shape,)
    low, high = span.start // columns, -(-span.stop // columns)
    products = []
    for i in range(low // height, -(-high // height)):
        rows = slice(top + max(low - i * height, 0), top + min(high - i * height, height))
        products.append(first[begin + i, rows] @ second[begin + i, :, left : left + columns])
    elements = torch.cat(products).reshape(-1) * adapter.recipe.scale
    return elements[span.start - low * columns : span.stop - low * columns]


def _elements(full: Tensor, span: Range) -> Tensor:
    """A range's elements of a whole parameter."""
    for dim, (begin, length) in enumerate(zip(span.corner, span.shape, strict=True)):
        full = full.narrow(dim, begin, length)
    return full.reshape(-1)[span.start : span.stop]


def _missing_message(paths: list[str]) -> str:
    return (
        f"lora: there is no parameter {listed(paths, 4)} that an adapter could be of: are these the "
        f"parameters that the adapters belong to, and is model= passed, if they are a model's?"
    )


# --- quantized parameters ---


def _stages(params: Any) -> list[Any]:
    return optree.tree_leaves(params, is_leaf=is_stage_or_packed)


def _in_few_bits(node: Any) -> bool:
    return bool(stage_shards(node)[0].layout.packed) if is_stage(node) else is_packed(node)


def _in_full(node: Any) -> Any:
    """A stage with decoded parameters, placed as before."""
    if not _in_few_bits(node):
        return node
    if is_packed(node):
        return node.decoded()
    flats = stage_shards(node)
    layouts = [flat.layout for flat in flats]
    by_path = {entry.path: (layout, entry) for layout in layouts for entry in layout.entries}
    mesh = mesh_of(layouts[0].grid, f"lora.merge: stage {layouts[0].stage!r}")
    rules = Rules(
        mesh,
        lambda path, shape: by_path[path][0].placement,
        None,
        lambda path, shape: not by_path[path][0].trainable,
        lambda path, shape: by_path[path][1].spec,
        "global",
    )
    full = dequantize(unshard(node))
    return agreed(rules, "lora.merge", lambda: rules.cut(layouts[0].stage, full))
