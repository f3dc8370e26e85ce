"""Splits trees by a rule, such as into trained and frozen parameters, and combines them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import optree
from torch import Tensor

from shardfn.mesh.selectors import Chosen, Which, chosen
from shardfn.mesh.spec import dotted
from shardfn.quoting import listed
from shardfn.shards.layout import is_flat
from shardfn.shards.pieces import names_of, path_in
from shardfn.tracebacks import api_boundary

T = TypeVar("T")


@api_boundary
def partition(tree: Any, predicate: Which) -> tuple[Any, Any]:
    """Two trees of one structure: the chosen parameters, and the rest, each with None in place of the other's leaves.

    Gradients, an optimizer's `init` and its `step` leave None out, so parameters that are not passed to them are
    frozen: they have no gradients and no state. `torch.func` raises an error for a None: see `flatten_by_path`.

    Args:
        tree: a pytree of tensors, flat shards and anything else, which goes to the rest.
        predicate: which parameters: a regular expression that matches the whole path, such as `blocks.0.attn.q`,
            several of them, or a function of a path and a full shape.

    Returns:
        `(chosen, rest)`; `combine(chosen, rest)` is the tree.

    Raises:
        ValueError: a flat shard of which the rule chooses only some parameters; a pattern that matches nothing.
        TypeError: `predicate` is neither patterns nor a function.

    Example:
        >>> import torch
        >>> partition({"w": torch.ones(1), "lora": torch.zeros(1)}, lambda path, shape: "lora" in path)
        ({'w': None, 'lora': tensor([0.])}, {'w': tensor([1.]), 'lora': None})
    """
    leaves, spec = optree.tree_flatten(tree, is_leaf=is_flat)
    which, paths = chosen(predicate, "partition"), names_of(leaves, spec)
    names = [name for path, leaf in zip(paths, leaves, strict=True) for name, _ in _leaf_parameters(path, leaf)]
    if unused := which.unused(names):
        raise ValueError(f"partition: nothing matches {listed(sorted(unused))}; there are {listed(names)}")
    choices = [_chosen(path, leaf, which) for path, leaf in zip(paths, leaves, strict=True)]
    selected = [leaf if is_chosen else None for leaf, is_chosen in zip(leaves, choices, strict=True)]
    rest = [None if is_chosen else leaf for leaf, is_chosen in zip(leaves, choices, strict=True)]
    return optree.tree_unflatten(spec, selected), optree.tree_unflatten(spec, rest)


def combine(*trees: Any) -> Any:
    """The inverse of `partition`: one tree with the leaves of all trees.

    Args:
        *trees: trees of one structure, at most one of them with a leaf at each place, the others with None there. All
            but one may be `flatten_by_path`.

    Raises:
        ValueError: trees of different structures; two trees have a leaf at the same place.

    Example:
        >>> combine({"a": 1, "b": None}, {"a": None, "b": 2})
        {'a': 1, 'b': 2}
    """
    if not trees:
        raise ValueError("combine: there are no trees")
    flattened = [_flat_tree(tree) for tree in trees]
    full = next((places for places in flattened if all(places.has_places_of(other) for other in flattened)), None)
    if full is None:
        raise ValueError(_different(flattened))
    leaves: list[Any] = []
    for i, path in enumerate(full.paths):
        candidates = [places.leaves[i] if places.spec == full.spec else places.tree.get(path) for places in flattened]
        present = [leaf for leaf in candidates if leaf is not None]
        if len(present) > 1:
            raise ValueError(f"combine: {len(present)} trees have something at {path or 'the root'}")
        leaves.append(present[0] if present else None)
    return optree.tree_unflatten(full.spec, leaves)


def flatten_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, in a dict without entries for None; `combine` puts them back.

    All registries of pytrees know dicts, so `torch.func.jvp`, `vjp` and `vmap` accept the chosen tree of `partition` in
    this form.

    Args:
        tree: a pytree of tensors, flat shards, None and anything else.

    Returns:
        `{path: leaf}`.

    Raises:
        ValueError: two places have the same path.

    Example:
        >>> import torch
        >>> tree = {"layers": [torch.ones(1), torch.zeros(1)]}
        >>> chosen, rest = partition(tree, lambda path, shape: path == "layers.1")
        >>> flatten_by_path(chosen)
        {'layers.1': tensor([0.])}
        >>> combine(flatten_by_path(chosen), rest)
        {'layers': [tensor([1.]), tensor([0.])]}
    """
    places = _flat_tree(tree)
    twice = [path for path, times in Counter(places.paths).items() if times > 1]
    if twice:
        raise ValueError(f"flatten_by_path: two places in the tree have the path {twice[0]!r}: give a key another name")
    return {path: leaf for path, leaf in zip(places.paths, places.leaves, strict=True) if leaf is not None}


def with_leaves(leaves: Sequence[T], indices: Iterable[int], replacements: Iterable[T]) -> list[T]:
    """A copy of `leaves` with `replacements` at the given indices."""
    replaced = list(leaves)
    for i, leaf in zip(indices, replacements, strict=True):
        replaced[i] = leaf
    return replaced


@dataclass(frozen=True)
class _FlatTree:
    """A flattened tree, in which None is a leaf; `by_path` says whether it may be a dict by `flatten_by_path`."""

    tree: Any
    paths: list[str]
    leaves: list[Any]
    spec: optree.PyTreeSpec
    by_path: bool

    def has_places_of(self, other: _FlatTree) -> bool:
        """Whether this tree has a place for each leaf of the other."""
        return other.spec == self.spec or (other.by_path and set(other.paths) <= set(self.paths))


def _flat_tree(tree: Any) -> _FlatTree:
    accessors, leaves, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_flat, none_is_leaf=True)
    by_path = type(tree) is dict and all(len(path) == 1 for path in accessors) and all(type(key) is str for key in tree)
    return _FlatTree(tree, list(map(dotted, accessors)), leaves, spec, by_path)


def _different(trees: Sequence[_FlatTree]) -> str:
    """The message for trees that cannot be combined."""
    if all(tree.by_path for tree in trees):
        return (
            "combine: each tree is a dict of another structure, with keys that the others lack, so nothing says what "
            "the whole looks like: one of them must have all places, as both trees that partition returns do"
        )
    n, full = next((n, tree) for n, tree in enumerate(trees, 1) if not tree.by_path)
    m, other = next((m, tree) for m, tree in enumerate(trees, 1) if not full.has_places_of(tree))
    if other.by_path:
        missing = [path for path in other.paths if path not in full.paths]
        return (
            f"combine: tree {m} has {listed(missing, 3)}, for which tree {n} has no place, whose paths are "
            f"{listed(full.paths)}: both must come from one partition"
        )
    both = listed([other.spec, full.spec], separator=" and ", room=1200)
    return f"combine: tree {m} has another structure than tree {n}: {both}"


def _leaf_parameters(path: str, leaf: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The paths and shapes of the parameters of a leaf at this path."""
    if not is_flat(leaf):
        return [(path, tuple(getattr(leaf, "shape", ())))]
    return [(path_in(leaf.layout, i, path), leaf.layout.whole_shape(i)) for i in range(len(leaf.layout.entries))]


def _chosen(path: str, leaf: Any, predicate: Chosen) -> bool:
    if not isinstance(leaf, Tensor) and not is_flat(leaf):
        return False
    answers = {name: predicate(name, shape) for name, shape in _leaf_parameters(path, leaf)}
    if len(set(answers.values())) > 1:
        chosen = next(path for path, answer in answers.items() if answer)
        rejected = next(path for path, answer in answers.items() if not answer)
        raise ValueError(
            f"partition: stage {leaf.layout.stage!r} has one buffer for parameters that the rule chooses, such as "
            f"{chosen}, and others, such as {rejected}. Keep them in two, by shard(..., frozen=[...]) or a strategy "
            f"that is a function"
        )
    return any(answers.values())
