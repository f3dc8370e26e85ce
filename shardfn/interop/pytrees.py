"""Arguments and results of modules as tensors and a number that says how they were put together.

Stages take any pytree, but know only optree's nodes; models return what torch's registry knows, such as the outputs of
`transformers`, and dataclasses. Tuples keep their types, of whatever class they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch.utils import _pytree


class _Fields:
    """The values of a dataclass, or of a tuple of another class, as a node of torch's registry; a tuple's items have
    numbers for names.
    """

    def __init__(self, kind: type, names: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.kind, self.names, self.values = kind, names, values


_pytree.register_pytree_node(
    _Fields,
    lambda one: (list(one.values), (one.kind, one.names)),
    lambda values, context: _Fields(context[0], context[1], tuple(values)),
)


class Forms:
    """The structures that one stage's arguments or results have had; each has a number."""

    def __init__(self) -> None:
        self.known: list[Any] = []
        self._writable: dict[int, bool] = {}

    def flatten(self, tree: Any) -> tuple[tuple[Any, ...], int]:
        """The leaves, and the number of what is around them."""
        keep = _whole_or_cache if _caches_are_nodes(len(_pytree.SUPPORTED_NODES)) else _whole
        leaves, spec = _pytree.tree_flatten(tree, is_leaf=keep)
        if any(map(_is_record, leaves)):
            leaves, spec = _pytree.tree_flatten(_unpacked(tree), is_leaf=keep)
        for number, one in enumerate(self.known):
            if one is spec or one == spec:
                return tuple(leaves), number
        self.known.append(spec)
        return tuple(leaves), len(self.known) - 1

    def unflatten(self, leaves: Any, number: int) -> Any:
        """The inverse."""
        tree = _pytree.tree_unflatten(list(leaves), self.known[number])
        return _packed(tree) if _has_fields(self.known[number]) else tree

    def writable(self, number: int) -> bool:
        """Whether there is something in it that can be written to: a list, say, or a dataclass."""
        if number not in self._writable:
            self._writable[number] = any(map(_is_writable, _children(self.known[number])))
        return self._writable[number]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with what a function makes of each leaf."""
    forms = Forms()
    leaves, form = forms.flatten(tree)
    return forms.unflatten([function(x) for x in leaves], form)


def _whole(x: Any) -> bool:
    """Whether torch's registry would make something else of it: a plain tuple."""
    return type(x) is torch.Size


def _whole_or_cache(x: Any) -> bool:
    return _whole(x) or is_cache(x)


def is_cache(x: Any) -> bool:
    """Whether it is a cache of keys and values, which is written to: it stays the object that it is."""
    return type(x).__name__.endswith("Cache")


@functools.lru_cache(maxsize=8)
def _caches_are_nodes(nodes: int) -> bool:
    """Whether some library registered its caches, as exports do, so that flattening would take them apart."""
    return any(kind.__name__.endswith("Cache") for kind in _pytree.SUPPORTED_NODES)


def _is_record(x: Any) -> bool:
    """Of what is a leaf for torch's registry."""
    if isinstance(x, tuple):
        return not _whole(x) and not optree.is_structseq(x)
    return dataclasses.is_dataclass(x) and not isinstance(x, type) and not is_cache(x)


def _unpacked(tree: Any) -> Any:
    """With the values of records, and of records in these, in their places."""

    def one(x: Any) -> Any:
        if not _is_record(x):
            return x
        values = _values(x)
        return _Fields(type(x), tuple(values), tuple(map(_unpacked, values.values())))

    return _pytree.tree_map(one, tree, is_leaf=_whole_or_cache)


def _values(x: Any) -> dict[Any, Any]:
    if isinstance(x, tuple):
        return {**dict(enumerate(x)), **getattr(x, "__dict__", {})}
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if hasattr(x, field.name)}


def _packed(tree: Any) -> Any:
    """The inverse."""

    def one(x: Any) -> Any:
        if not isinstance(x, _Fields):
            return x
        values = dict(zip(x.names, map(_packed, x.values), strict=True))
        items = [values.pop(name) for name in x.names if isinstance(name, int)]
        made: Any = tuple.__new__(x.kind, items) if issubclass(x.kind, tuple) else object.__new__(x.kind)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    return _pytree.tree_map(one, tree, is_leaf=lambda x: isinstance(x, _Fields) or _whole_or_cache(x))


def _has_fields(spec: Any) -> bool:
    return spec.type is _Fields or any(map(_has_fields, _children(spec)))


def _is_writable(spec: Any) -> bool:
    fixed = spec.is_leaf() or (isinstance(spec.type, type) and issubclass(spec.type, tuple))
    return not fixed or any(map(_is_writable, _children(spec)))


def _children(spec: Any) -> Any:
    return spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
