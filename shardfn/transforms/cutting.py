"""A batch, and its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from shardfn.quoting import listed
from shardfn.shards.layout import is_flat


@dataclass(frozen=True)
class Batch:
    """One batch of this rank that will be cut into parts.

    Attributes:
        tensors: its leaves, `[rows, ...]` each.
        tree: its structure.
        rows: number of rows of each leaf.
    """

    tensors: list[Tensor]
    tree: optree.PyTreeSpec
    rows: int

    @property
    def kinds(self) -> list[str]:
        """What batches of all ranks must have in common: a line for each leaf, without its number of rows."""
        paths = optree.treespec_paths(self.tree)
        return [f"batch{written(path)} {x.dtype} {x.ndim}-d" for path, x in zip(paths, self.tensors, strict=True)]

    @property
    def elements(self) -> int:
        """Number of elements of all leaves."""
        return sum(x.numel() for x in self.tensors)

    def parts(self, n: int) -> list[Any]:
        """The batch in `n` parts; the first may have one row more, and with too few rows the last have none."""
        split = [x.tensor_split(n) for x in self.tensors]
        return [optree.tree_unflatten(self.tree, [pieces[i] for pieces in split]) for i in range(n)]


def batch_of(tree: Any, micro: Any) -> Batch:
    """The batch, checked.

    Raises:
        TypeError, ValueError: the batch, or `micro`, is not what it should be.
    """
    if micro != "auto" and (not isinstance(micro, int) or isinstance(micro, bool)):
        raise TypeError(f'accumulate: micro={micro!r}; it is a number of parts, or "auto"')
    if micro != "auto" and micro < 1:
        raise ValueError(f"accumulate: micro={micro}; a batch is cut into 1 part or more")
    paths, leaves, spec = optree.tree_flatten_with_path(tree)
    if not leaves:
        raise ValueError("accumulate: with micro= the second argument is one batch, and this one has no tensors")
    if any(is_flat(node) for node in optree.tree_leaves(tree, is_leaf=is_flat)):
        raise TypeError("accumulate: the batch has a flat shard in it, which has no rows; pass parameters as `params`")
    rows = {}
    for path, leaf in zip(paths, leaves, strict=True):
        name = f"batch{written(path)}"
        if not isinstance(leaf, Tensor) or hasattr(leaf, "placements"):
            kind = type(leaf).__name__
            raise TypeError(f"accumulate: {name} is of type {kind}; with micro= a batch is a pytree of plain tensors")
        if leaf.ndim == 0:
            raise ValueError(f"accumulate: {name} is a scalar; every tensor of a batch has its rows in dim 0")
        if leaf.requires_grad:
            raise ValueError(f"accumulate: {name} requires a gradient; only `params` get one here: detach it")
        rows[name] = len(leaf)
    if len(set(rows.values())) > 1:
        counts = listed(f"{name} has {n}" for name, n in rows.items())
        raise ValueError(f"accumulate: tensors of one batch have the same number of rows in dim 0, and {counts}")
    return Batch(leaves, spec, next(iter(rows.values())))


def written(path: tuple[Any, ...]) -> str:
    """A path in a tree, written as Python."""
    return "".join(f"[{key!r}]" for key in path)
