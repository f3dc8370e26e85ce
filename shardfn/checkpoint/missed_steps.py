"""Steps that parameters have missed, which optimizers count only for parameters that have: entries that may be absent.

A parameter whose moments are not in a checkpoint, such as one that was frozen then, keeps the steps that it has made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import optree

from shardfn.checkpoint.contents import ByRank, Contents, parameters
from shardfn.mesh.spec import joined, keys_of
from shardfn.shards.pieces import spread, units

MOMENTS = ("mean",), ("codes", "mean"), ("square",)  # where states that count have trees like the parameters


@dataclass(frozen=True)
class StepCounts:
    """The counts of one optimizer state in a tree to load into.

    Attributes:
        keys: from the root of the tree to the state.
        by_rank: whether its numbers may differ between ranks.
        moments: for each parameter the name of its first moments, by the path by which its steps are counted.
        made: how many steps each parameter has made, by the same.
    """

    keys: tuple[Any, ...]
    by_rank: bool
    moments: dict[str, str]
    made: dict[str, int]

    def entry(self, path: str) -> str:
        """The name of the number of steps that a parameter has missed."""
        return joined(*self.keys, "missed", path)

    def expect(self, flat_tree: Contents) -> None:
        """Adds the numbers that a checkpoint may have to the contents of the tree."""
        for path in self.moments:
            name = self.entry(path)
            flat_tree.numbers[name], flat_tree.keys[name] = 0, (*self.keys, "missed", path)
            flat_tree.optional.add(name)
            if self.by_rank:
                flat_tree.by_rank.add(name)

    def missed(self, step: int, numbers: dict[str, Any], read: dict[str, Any]) -> dict[str, int]:
        """The number of loaded steps that each parameter has missed, from the numbers and names read."""
        late = {
            path: numbers.get(self.entry(path), 0) if name in read else step - self.made[path]
            for path, name in self.moments.items()
        }
        return {path: number for path, number in late.items() if number}


def step_counts(tree: Any) -> tuple[Any, list[StepCounts]]:
    """The tree with none of its steps missed, and the counts of its optimizer states."""
    accessors, leaves, spec = optree.tree_flatten_with_accessor(tree, is_leaf=_counts_steps)
    counts = []
    for accessor, leaf in zip(accessors, leaves, strict=True):
        if _counts_steps(leaf):
            nodes = [entry for entry in accessor if getattr(entry, "type", None) is not ByRank]
            keys, step = tuple(keys_of(nodes)), int(leaf["step"])
            moments = dict(_moments(keys, leaf))
            steps_made = {path: step - int(leaf["missed"].get(path, 0)) for path in moments}
            counts.append(StepCounts(keys, len(nodes) < len(accessor), moments, steps_made))
    return spec.unflatten(leaf | {"missed": {}} if _counts_steps(leaf) else leaf for leaf in leaves), counts


def with_missed(tree: Any, counts: list[StepCounts], numbers: dict[str, Any], read: dict[str, Any]) -> Any:
    """The loaded tree with the steps that parameters have missed."""
    leaves, spec = optree.tree_flatten(tree, is_leaf=_counts_steps)
    remaining_counts = iter(counts)
    return spec.unflatten(
        leaf | {"missed": next(remaining_counts).missed(int(leaf["step"]), numbers, read)}
        if _counts_steps(leaf)
        else leaf
        for leaf in leaves
    )


def _counts_steps(node: Any) -> bool:
    return type(node) is dict and {"step", "numbers", "missed"} <= node.keys() and type(node["missed"]) is dict


def _moments(keys: tuple[Any, ...], state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for place in MOMENTS:
        tree: Any = state
        for key in place:
            tree = tree.get(key) if isinstance(tree, dict) else None
        if tree is not None:
            paths = (path for unit in units(tree).each if unit.values is not None for _, path, _ in spread(unit))
            names = (joined(*keys, *place, name) for name, *_ in parameters(tree))
            yield from zip(paths, names, strict=True)
            return
