"""What the arguments of a step are: parameters, an optimizer's state, gradients, or something else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import optree
from torch import Tensor

from shardfn.mesh.spec import dotted
from shardfn.plans.places import Place
from shardfn.plans.recorder import Recorder
from shardfn.quant.packed import is_packed
from shardfn.shards.layout import is_flat

_NAMES = {
    "parameters": re.compile(r"param|weight|adapter|base$|model$"),
    "optimizer": re.compile(r"opt|state|moment"),
    "gradients": re.compile(r"grad"),
}


def mark(recorder: Recorder, given: Sequence[tuple[str, Any]]) -> int:
    """Notes for the memory of a step's arguments what it is; returns the number of elements of all parameters.

    Args:
        recorder: where it is noted.
        given: the arguments, by name.
    """
    numbers: dict[Any, int] = {}
    found = False
    for name, tree in given:
        sharded = any(is_flat(node) for _, node in _nodes(tree))
        default = "parameters" if sharded and not found else ""
        found |= sharded
        for path, node in _nodes(tree):
            kind = _kind(name, path) or default or name
            for x in optree.tree_leaves(node):
                block = recorder.find(x) if isinstance(x, Tensor) else None
                if block is not None and not block.kind:
                    block.kind, block.place = kind, Place("forward", "", name)
            if kind == "parameters":
                numbers |= _numbers(node)
    return sum(numbers.values())


def _kind(name: str, path: tuple[str, ...]) -> str:
    """What an argument's name says, or that of a part of it: `state.params` are parameters."""
    for part in (*path[:1], name) if _matching(name) == "optimizer" else (name, *path[:1]):
        kind = _matching(part)
        if kind:
            return kind
    return ""


def _matching(name: str) -> str:
    return next((kind for kind, pattern in _NAMES.items() if pattern.match(name.lower())), "")


def _nodes(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=lambda x: is_flat(x) or is_packed(x))
    for accessor, leaf in zip(accessors, leaves, strict=True):
        yield tuple(dotted(accessor).split(".")), leaf


def _numbers(node: Any) -> dict[Any, int]:
    """The number of elements of each parameter of a node, on all ranks."""
    if is_flat(node):
        layout = node.layout
        return {(layout.stage, entry.path): math.prod(layout.meant_shape(i)) for i, entry in enumerate(layout.entries)}
    if is_packed(node):
        return {id(node): math.prod(node.shape)}
    return {id(node): node.numel()} if isinstance(node, Tensor) else {}
