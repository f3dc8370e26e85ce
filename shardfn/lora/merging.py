"""Adapters into the weights that they adapt, and out again: each rank changes the elements that it holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import process_groups
from shardfn.interop.functional import Functional, expect_functional
from shardfn.lora.adapters import BARE, Adapter, is_adapter, leaves_by_path, parameter_of
from shardfn.lora.init import is_stage_or_packed, whole_values
from shardfn.mesh import waiting
from shardfn.mesh.scope import mesh_of
from shardfn.mesh.spec import dotted
from shardfn.quant.packed import dequantize, is_packed
from shardfn.quoting import listed, short_errors
from shardfn.shards.layout import FlatShard, Range, is_flat, is_stage, local_parameters, stage_shards
from shardfn.shards.sharding import Rules, agreed
from shardfn.shards.unsharding import unshard
from shardfn.tiers import copying
from shardfn.tiers.placing import brought

_log = logging.getLogger("shardfn")


@waiting.during("sf.lora.merge")
@short_errors
def merge(params: Any, adapters: Any, model: Functional | None = None) -> Any:
    """Parameters that give without adapters what these give with them, to rounding; all ranks call together.

    No weight is whole anywhere, unless it is kept in few bits: such parameters are decoded, all of the tree's, one
    stage after another, since a sum would have to be rounded to few bits again. The log of `shardfn` says so.

    Args:
        params: of the base, flat shards, whole tensors, or both.
        adapters: what `init` or `load` made, sharded or not.
        model: what `interop.functional` made, if they are of one.

    Returns:
        New parameters of the same structure.

    Raises:
        ValueError: adapters of other parameters, or without the model that they belong to; a weight that is tied to
            another, which would change as well.

    Example:
        ``interop.save_pretrained("merged", model, lora.merge(params, adapters, model))``
    """
    given = _given(adapters, model)
    _check(params, given)
    if few := [node for node in _stages(params) if _in_few_bits(node)]:
        ranks = [stage_shards(node)[0].layout.grid.ranks for node in few if is_stage(node)]
        if all(process_groups.global_rank() == min(those) for those in ranks):  # one warning, not one of each rank
            _log.warning(
                "lora.merge: parameters that were kept in few bits are in full precision now: merged ones would have "
                "to be rounded to few bits again"
            )
        params = optree.tree_map(_in_full, params, is_leaf=is_stage_or_packed)
    ratios = {path: _ratio(params, path, x) for path, x in given.items() if is_adapter(x) and x.magnitude is not None}

    def change(path: str, at: Range, values: Tensor) -> Tensor:
        adapter = given[path]
        if not is_adapter(adapter):
            return _elements(adapter, at)
        changed = values + _delta(adapter, at).to(values.device)
        if path in ratios:
            column = ratios[path] if adapter.recipe.kind != "linear" else ratios[path][:, None]
            changed = changed * _elements(column.expand(adapter.shape()), at).to(values.device)
        return changed

    return _changed(params, given, change)


@waiting.during("sf.lora.unmerge")
@short_errors
def unmerge(params: Any, adapters: Any, model: Functional | None = None) -> Any:
    """The inverse of `merge`, to rounding in the dtype of the parameters.

    Args:
        params: what `merge` returned.
        adapters: what was merged.
        model: as for `merge`.

    Raises:
        ValueError: as `merge`; adapters that replaced parameters, or scaled them by a norm that is not known any more,
            as DoRA does: keep the parameters from before.
    """
    given = _given(adapters, model)
    for path, one in given.items():
        if not is_adapter(one) or one.magnitude is not None:
            what = "scaled by DoRA" if is_adapter(one) else "replaced"
            raise ValueError(
                f"lora.unmerge: {path} was {what}, and what it was before is not in it any more: keep the parameters "
                f"from before merge"
            )
    _check(params, given)
    if any(map(_in_few_bits, _stages(params))):
        raise ValueError("lora.unmerge: there are parameters in few bits, into which nothing can have been merged")
    return _changed(params, given, lambda path, at, values: values - _delta(given[path], at).to(values.device))


# --- what there is to merge ---


def _given(adapters: Any, model: Functional | None) -> dict[str, Any]:
    """Adapters, and tensors that replace parameters, whole, by the names of these.

    Raises:
        ValueError: a weight that is tied to others.
    """
    found = leaves_by_path(unshard(adapters), is_adapter)
    if model is None:
        return found
    expect_functional("lora", model)
    made: dict[str, Any] = {}
    for path, one in found.items():
        name = parameter_of(path, one.recipe.kind) if is_adapter(one) else path
        if name not in model.names:
            raise ValueError(f"lora: there is no {name} in {type(model.module).__name__}, which an adapter could be of")
        canonical = model.names[name]
        holder, _, attribute = name.rpartition(".")
        bare = attribute if is_adapter(one) and one.recipe.kind in BARE else None
        if is_adapter(one) and (wrong := one.misfit(model.module.get_submodule(holder), bare)):
            raise ValueError(f"lora: {path} is {wrong}: are these adapters of another model?")
        aliases = [alias for alias, name_in_tree in model.names.items() if name_in_tree == canonical]
        holders = {id(model.module.get_submodule(alias.rpartition(".")[0])): alias for alias in aliases}
        if len(holders) > 1:
            others = listed(alias for alias in holders.values() if alias != name)
            raise ValueError(
                f"lora: {name} is tied to {others}, which would change as well: merge into a model in which they are "
                f"not tied, such as by tie_word_embeddings=False in its configuration"
            )
        made[canonical] = one
    return made


def _check(params: Any, given: Mapping[str, Any]) -> None:
    """Raises ValueError for adapters of other weights than are there, the same on every rank."""
    for name, leaf in leaves_by_path(params, lambda x: is_flat(x) or is_packed(x)).items():
        shapes = {name: tuple(leaf.shape)} if not is_flat(leaf) else {
            entry.path: leaf.layout.meant_shape(number) for number, entry in enumerate(leaf.layout.entries)
        }  # fmt: skip
        for path in shapes.keys() & given.keys():
            one, shape = given[path], shapes[path]
            wrong = one.unlike(shape) if is_adapter(one) else ""
            if not is_adapter(one) and tuple(one.shape) != shape:
                wrong = f"of shape {list(shape)}, and what replaces it {list(one.shape)}"
            if wrong:
                raise ValueError(f"lora: {path} is {wrong}: are these adapters of other parameters?")


def _ratio(params: Any, path: str, adapter: Adapter) -> Tensor:
    """Of DoRA: for each output what its weights are multiplied by, from the whole weight, and where that is."""
    weight = whole_values(params, [path]).get(path)
    if weight is None:
        raise ValueError(_lost([path]))
    there: Adapter = optree.tree_map(lambda x: x.to(weight.device), adapter)
    return there.on(weight, training=False)._ratio()


# --- into the parameters ---


def _changed(params: Any, given: Mapping[str, Any], change: Callable[[str, Range, Tensor], Tensor]) -> Any:
    """Parameters of which the elements that this rank holds are changed."""
    rank, used = process_groups.global_rank(), set[str]()

    def one(path: str, leaf: Any) -> Any:
        if is_flat(leaf):
            used.update(entry.path for entry in leaf.layout.entries if entry.path in given)
            made = FlatShard(copying.clone(leaf.values), leaf.layout)
            views = local_parameters(made)
            for at in leaf.layout.ranges(rank):
                if at.path in given:
                    now = brought(views[at.path], mesh_of(leaf.layout.grid, f"lora: stage {leaf.layout.stage!r}"))
                    copying.copy_(views[at.path], change(at.path, at, now))
            return made
        if path not in given:
            return leaf
        used.add(path)
        shape = tuple(leaf.shape)
        at = Range(path, 0, leaf.numel(), shape, (0,) * len(shape))
        return change(path, at, leaf.reshape(-1)).to(leaf).view(shape)

    with torch.no_grad():
        accessors, leaves, spec = optree.tree_flatten_with_accessor(params, is_leaf=is_flat)
        made = [one(dotted(accessor), leaf) for accessor, leaf in zip(accessors, leaves, strict=True)]
    if lost := [path for path in given if path not in used]:
        raise ValueError(_lost(lost))
    return optree.tree_unflatten(spec, made)


def _delta(adapter: Adapter, at: Range) -> Tensor:
    """Elements of the product, of which only the rows that have them are multiplied out."""
    if at.start >= at.stop:
        return adapter.a.new_zeros(0)
    first, second = (x if x.ndim == 3 else x[None] for x in adapter.factors())
    few = 3 - len(at.shape)
    (begin, top, left), (_, height, columns) = (0,) * few + (*at.corner,), (1,) * few + (*at.shape,)
    low, high = at.start // columns, -(-at.stop // columns)
    made = []
    for i in range(low // height, -(-high // height)):
        rows = slice(top + max(low - i * height, 0), top + min(high - i * height, height))
        made.append(first[begin + i, rows] @ second[begin + i, :, left : left + columns])
    found = torch.cat(made).reshape(-1) * adapter.recipe.scale
    return found[at.start - low * columns : at.stop - low * columns]


def _elements(whole: Tensor, at: Range) -> Tensor:
    """Those of a parameter that a range has."""
    for dim, (begin, length) in enumerate(zip(at.corner, at.shape, strict=True)):
        whole = whole.narrow(dim, begin, length)
    return whole.reshape(-1)[at.start : at.stop]


def _lost(paths: list[str]) -> str:
    return (
        f"lora: there is no parameter {listed(paths, 4)} that an adapter could be of: are these the "
        f"parameters that the adapters belong to, and is model= passed, if they are a model's?"
    )


# --- few bits ---


def _stages(params: Any) -> list[Any]:
    return optree.tree_leaves(params, is_leaf=is_stage_or_packed)


def _in_few_bits(node: Any) -> bool:
    return bool(stage_shards(node)[0].layout.packed) if is_stage(node) else is_packed(node)


def _in_full(node: Any) -> Any:
    """A stage with decoded parameters, placed as they were."""
    if not _in_few_bits(node):
        return node
    if is_packed(node):
        return node.decoded()
    flats = stage_shards(node)
    layouts = [flat.layout for flat in flats]
    known = {entry.path: (layout, entry) for layout in layouts for entry in layout.entries}
    mesh = mesh_of(layouts[0].grid, f"lora.merge: stage {layouts[0].stage!r}")
    rules = Rules(
        mesh,
        lambda path, shape: known[path][0].placement,
        None,
        lambda path, shape: not known[path][0].trainable,
        lambda path, shape: known[path][1].spec,
        "global",
    )
    whole = dequantize(unshard(node))
    return agreed(rules, "lora.merge", lambda: rules.cut(layouts[0].stage, whole))
