"""Lays out parameters without data exactly as parameters with data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from shardfn.mesh.selectors import Which
from shardfn.mesh.spec import dotted, joined
from shardfn.quant.packed import is_packed
from shardfn.quoting import listed
from shardfn.shards.hollow import drawn
from shardfn.shards.layout import FlatShard, is_flat
from shardfn.shards.placement import Strategy
from shardfn.shards.sharding import Rules, Specs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def made(path: str, node: Any) -> Any:
    """Returns a tree with each maker replaced by what it would make, without data.

    Raises:
        TypeError: a leaf is neither a tensor nor a maker.
        ValueError: a maker reads data.
    """
    accessors, leaves, tree = optree.tree_flatten_with_accessor(node, is_leaf=lambda x: is_flat(x) or is_packed(x))
    filled = (_leaf(joined(path, dotted(accessor)), leaf) for accessor, leaf in zip(accessors, leaves, strict=True))
    return optree.tree_unflatten(tree, list(filled))


def _leaf(name: str, leaf: Any) -> Any:
    if isinstance(leaf, Tensor) or is_flat(leaf) or is_packed(leaf):
        return leaf
    if isinstance(leaf, torch.nn.Module):
        raise TypeError(
            f"memory: {name or 'the tree'} is a module; its parameters as a tree are interop.functional(module).tree"
        )
    if not callable(leaf):
        raise TypeError(
            f"memory: {name or 'the tree'} is of type {type(leaf).__name__}; parameters are tensors, on the meta "
            f"device too, or makers, as init takes them"
        )
    return made(name, drawn(leaf, name or "the tree", "memory"))


def laid_out(
    params: Any, mesh: DeviceMesh, strategy: Strategy, stages: Which | None, frozen: Which, specs: Specs
) -> Any:
    """Returns the tree that `shard` would return, but without data, and without asking other ranks.

    Raises:
        ValueError, TypeError: as `shard`.
    """
    rules, names = Rules(mesh, strategy, stages, frozen, specs, "global", filled=False), list[str]()

    def cut(path: str, subtree: Any) -> Any:
        layouts, values = rules.laid(path, subtree)
        names.extend(values)
        flats = {
            key: FlatShard(torch.empty(layout.held(rules.rank), dtype=layout.dtype, device="meta"), layout)
            for key, layout in layouts.items()
        }
        return subtree if not flats else next(iter(flats.values())) if len(flats) == 1 else flats

    tree = rules.map_stages(params, cut, made)
    if rules.unused:
        raise ValueError(
            f"memory: nothing matches {listed(map(repr, sorted(rules.unused)))}; the parameters are {listed(names)}"
        )
    return tree


def without_numbers(tree: Any) -> Any:
    """Returns the same tree with tensors on the meta device; tensors that are shared stay shared."""
    replaced: dict[int, Tensor] = {}

    def hollow(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return replaced.setdefault(id(leaf), torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))

    return optree.tree_map(hollow, tree)
