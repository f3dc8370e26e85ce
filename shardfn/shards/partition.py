"""Trees taken apart by a rule, and put together again: what is trained, and what is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import optree
from torch import Tensor

from shardfn.mesh.selectors import Chosen, Which, chosen
from shardfn.mesh.spec import dotted
from shardfn.quoting import listed, short_errors
from shardfn.shards.layout import FlatShard, is_flat

T = TypeVar("T")


@short_errors
def partition(tree: Any, predicate: Which) -> tuple[Any, Any]:
    """Two trees of one structure: the parameters that the rule chooses, and the rest; None where the other has it.

    A gradient, an optimizer's `init` and its `step` leave None out, so what is not passed to them is frozen: it moves
    no gradients and has no state. `torch.func` takes a None for a parameter, and refuses it: see `pruned`.

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
        raise ValueError(f"partition: nothing matches {listed(sorted(unused))}; there are {listed(names)}")
    taken = [_chosen(path, leaf, which) for path, leaf in zip(paths, leaves, strict=True)]
    yes = [leaf if one else None for leaf, one in zip(leaves, taken, strict=True)]
    no = [None if one else leaf for leaf, one in zip(leaves, taken, strict=True)]
    return optree.tree_unflatten(spec, yes), optree.tree_unflatten(spec, no)


def combine(*trees: Any) -> Any:
    """The inverse of `partition`: one tree that has at each place what one of the trees has there.

    Args:
        *trees: of one structure, with None where another has something. All but one may be `pruned`.

    Raises:
        ValueError: trees of different structures; a place at which two trees have something.

    Example:
        >>> combine({"a": 1, "b": None}, {"a": None, "b": 2})
        {'a': 1, 'b': 2}
    """
    if not trees:
        raise ValueError("combine: there are no trees")
    every = [_places(tree) for tree in trees]
    whole = next((one for one in every if all(one.has_places_of(other) for other in every)), None)
    if whole is None:
        raise ValueError(_different(every))
    made: list[Any] = []
    for i, path in enumerate(whole.paths):
        found = [one.leaves[i] if one.spec == whole.spec else one.tree.get(path) for one in every]
        there = [leaf for leaf in found if leaf is not None]
        if len(there) > 1:
            raise ValueError(f"combine: {len(there)} trees have something at {path or 'the root'}")
        made.append(there[0] if there else None)
    return optree.tree_unflatten(whole.spec, made)


def pruned(tree: Any) -> dict[str, Any]:
    """What a tree has, by path, in a dict with nothing in it for a None; `combine` puts it back.

    All registries of pytrees know dicts, so `torch.func.jvp`, `vjp` and `vmap` take what `partition` chose, alone.

    Args:
        tree: a pytree of tensors, flat shards, None and anything else.

    Returns:
        `{path: leaf}`.

    Raises:
        ValueError: two places with one path.

    Example:
        >>> import torch
        >>> tree = {"layers": [torch.ones(1), torch.zeros(1)]}
        >>> chosen, rest = partition(tree, lambda path, shape: path == "layers.1")
        >>> pruned(chosen)
        {'layers.1': tensor([0.])}
        >>> combine(pruned(chosen), rest)
        {'layers': [tensor([1.]), tensor([0.])]}
    """
    places = _places(tree)
    twice = [path for path, times in Counter(places.paths).items() if times > 1]
    if twice:
        raise ValueError(f"pruned: two places in the tree have the path {twice[0]!r}: give a key another name")
    return {path: leaf for path, leaf in zip(places.paths, places.leaves, strict=True) if leaf is not None}


def with_leaves(leaves: Sequence[T], at: Iterable[int], others: Iterable[T]) -> list[T]:
    """The leaves of a tree, but others at some places."""
    mixed = list(leaves)
    for i, leaf in zip(at, others, strict=True):
        mixed[i] = leaf
    return mixed


@dataclass(frozen=True)
class _Places:
    """A tree taken apart, a None being a leaf; `by_path` says whether it can be a dict that `pruned` made."""

    tree: Any
    paths: list[str]
    leaves: list[Any]
    spec: optree.PyTreeSpec
    by_path: bool

    def has_places_of(self, other: _Places) -> bool:
        """Whether what the other tree has can be put into this one."""
        return other.spec == self.spec or (other.by_path and set(other.paths) <= set(self.paths))


def _places(tree: Any) -> _Places:
    accessors, leaves, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_flat, none_is_leaf=True)
    by_path = type(tree) is dict and all(len(one) == 1 for one in accessors) and all(type(key) is str for key in tree)
    return _Places(tree, list(map(dotted, accessors)), leaves, spec, by_path)


def _different(every: Sequence[_Places]) -> str:
    """Why trees do not go together."""
    if all(one.by_path for one in every):
        return (
            "combine: each tree is a dict of another structure, with keys that the others lack, so nothing says what "
            "the whole looks like: one of them must have all places, as both trees that partition returns do"
        )
    n, whole = next((n, one) for n, one in enumerate(every, 1) if not one.by_path)
    m, other = next((m, one) for m, one in enumerate(every, 1) if not whole.has_places_of(one))
    if other.by_path:
        lost = [path for path in other.paths if path not in whole.paths]
        return (
            f"combine: tree {m} has {listed(lost, 3)}, for which tree {n} has no place, whose paths are "
            f"{listed(whole.paths)}: both must come from one partition"
        )
    both = listed([other.spec, whole.spec], separator=" and ", room=1200)
    return f"combine: tree {m} has another structure than tree {n}: {both}"


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
