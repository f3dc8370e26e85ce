"""Trees taken apart by a rule, and put together again: what is trained, and what is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import optree
from torch import Tensor

from shardfn.mesh.spec import dotted
from shardfn.mesh.which import Chosen, Which, chosen
from shardfn.shards.layout import FlatShard, is_flat

T = TypeVar("T")


def partition(tree: Any, predicate: Which) -> tuple[Any, Any]:
    """Two trees of one structure: the parameters that the rule chooses, and the rest; None where the other has it.

    A gradient, an optimizer's `init` and its `step` leave None out, so what is not passed to them is frozen: it moves
    no gradients and has no state.

    Args:
        tree: a pytree of tensors, flat shards and anything else, which goes to the rest.
        predicate: which parameters: a regular expression that matches their whole path, `blocks.0.attn.q`, several of
            them, or a function of a path and a whole shape.

    Returns:
        `(chosen, rest)`; `combine(chosen, rest)` is the tree.

    Raises:
        ValueError: a flat shard of which the rule chooses some parameters only; a pattern that matches nothing.
        TypeError: something other than patterns or a function.

    Example:
        >>> import torch
        >>> partition({"w": torch.ones(1), "lora": torch.zeros(1)}, lambda path, shape: "lora" in path)
        ({'w': None, 'lora': tensor([0.])}, {'w': tensor([1.]), 'lora': None})
    """
    accessors, leaves, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_flat)
    which, paths = chosen(predicate, "partition"), list(map(dotted, accessors))
    names = [one for path, leaf in zip(paths, leaves, strict=True) for one in _names(path, leaf)]
    if unused := which.unused(names):
        raise ValueError(f"partition: nothing matches {', '.join(sorted(unused))}; there are {', '.join(names[:8])}")
    taken = [_chosen(path, leaf, which) for path, leaf in zip(paths, leaves, strict=True)]
    yes = [leaf if one else None for leaf, one in zip(leaves, taken, strict=True)]
    no = [None if one else leaf for leaf, one in zip(leaves, taken, strict=True)]
    return optree.tree_unflatten(spec, yes), optree.tree_unflatten(spec, no)


def combine(*trees: Any) -> Any:
    """The inverse of `partition`: one tree that has at each place what one of the trees has there.

    Raises:
        ValueError: trees of different structures; a place at which two trees have something.

    Example:
        >>> combine({"a": 1, "b": None}, {"a": None, "b": 2})
        {'a': 1, 'b': 2}
    """
    if not trees:
        raise ValueError("combine: there are no trees")
    flat = [optree.tree_flatten_with_accessor(tree, is_leaf=is_flat, none_is_leaf=True) for tree in trees]
    accessors, _, spec = flat[0]
    for number, (_, _, other) in enumerate(flat[1:], 2):
        if other != spec:
            raise ValueError(f"combine: tree {number} has another structure than the first: {other} and {spec}")
    made = []
    for accessor, found in zip(accessors, zip(*(leaves for _, leaves, _ in flat), strict=True), strict=True):
        there = [leaf for leaf in found if leaf is not None]
        if len(there) > 1:
            raise ValueError(f"combine: {len(there)} trees have something at {dotted(accessor) or 'the root'}")
        made.append(there[0] if there else None)
    return optree.tree_unflatten(spec, made)


def with_leaves(leaves: Sequence[T], at: Iterable[int], others: Iterable[T]) -> list[T]:
    """The leaves of a tree, but others at some places."""
    mixed = list(leaves)
    for i, leaf in zip(at, others, strict=True):
        mixed[i] = leaf
    return mixed


def _names(path: str, leaf: Any) -> list[str]:
    return [entry.path for entry in leaf.layout.entries] if is_flat(leaf) else [path]


def _chosen(path: str, leaf: Any, predicate: Chosen) -> bool:
    if isinstance(leaf, Tensor):
        return predicate(path, tuple(leaf.shape))
    if not is_flat(leaf):
        return False
    flat: FlatShard = leaf
    answers = {
        entry.path: predicate(entry.path, flat.layout.whole_shape(number))
        for number, entry in enumerate(flat.layout.entries)
    }
    if len(set(answers.values())) > 1:
        yes = next(path for path, answer in answers.items() if answer)
        no = next(path for path, answer in answers.items() if not answer)
        raise ValueError(
            f"partition: stage {flat.layout.stage!r} has parameters in one buffer of which the rule chooses some, such "
            f"as {yes}, but not {no}: keep them in two, by shard(..., frozen=[...]) or a strategy that is a function"
        )
    return any(answers.values())
