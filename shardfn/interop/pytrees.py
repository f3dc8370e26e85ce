"""Flattens arguments and results of modules to leaves and a number that identifies their structure.

Stages take any pytree, but only know optree's nodes; models return nodes of torch's registry, such as the outputs of
`transformers`, and dataclasses. Tuples keep their types, of any class.
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
    """The values of a dataclass or a tuple subclass as a node of torch's registry; tuple items are named by numbers."""

    def __init__(self, kind: type, names: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.kind, self.names, self.values = kind, names, values


_pytree.register_pytree_node(
    _Fields,
    lambda node: (list(node.values), (node.kind, node.names)),
    lambda values, context: _Fields(context[0], context[1], tuple(values)),
)


class Forms:
    """The structures that one stage's arguments or results have had, numbered."""

    def __init__(self) -> None:
        self.known: list[Any] = []
        self._writable: dict[int, bool] = {}

    def flatten(self, tree: Any) -> tuple[tuple[Any, ...], int]:
        """The leaves, and the number of the structure."""
        keep = _whole_or_cache if _caches_are_nodes(len(_pytree.SUPPORTED_NODES)) else _is_torch_size
        leaves, spec = _pytree.tree_flatten(tree, is_leaf=keep)
        if any(map(_is_record, leaves)):
            leaves, spec = _pytree.tree_flatten(_unpack_records(tree), is_leaf=keep)
        for number, known_spec in enumerate(self.known):
            if known_spec is spec or known_spec == spec:
                return tuple(leaves), number
        self.known.append(spec)
        return tuple(leaves), len(self.known) - 1

    def unflatten(self, leaves: Any, number: int) -> Any:
        """The inverse of `flatten`."""
        tree = _pytree.tree_unflatten(list(leaves), self.known[number])
        return _pack_records(tree) if _has_fields(self.known[number]) else tree

    def writable(self, number: int) -> bool:
        """Whether a structure contains something that can be written to, such as a list or a dataclass."""
        if number not in self._writable:
            self._writable[number] = any(map(_is_writable, _children(self.known[number])))
        return self._writable[number]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` applied to each leaf."""
    forms = Forms()
    leaves, form = forms.flatten(tree)
    return forms.unflatten([function(x) for x in leaves], form)


def _is_torch_size(x: Any) -> bool:
    """Whether a value must be a leaf because torch's registry would turn it into a plain tuple."""
    return type(x) is torch.Size


def _whole_or_cache(x: Any) -> bool:
    return _is_torch_size(x) or is_cache(x)


def is_cache(x: Any) -> bool:
    """Whether a value is a cache of keys and values, which is written to and so must remain the same object."""
    return type(x).__name__.endswith("Cache")


@functools.lru_cache(maxsize=8)
def _caches_are_nodes(nodes: int) -> bool:
    """Whether a library has registered its caches as nodes, as for export, so that flattening would copy them."""
    return any(kind.__name__.endswith("Cache") for kind in _pytree.SUPPORTED_NODES)


def _is_record(x: Any) -> bool:
    """Whether a leaf of torch's registry is a dataclass or a tuple subclass."""
    if isinstance(x, tuple):
        return not _is_torch_size(x) and not optree.is_structseq(x)
    return dataclasses.is_dataclass(x) and not isinstance(x, type) and not is_cache(x)


def _unpack_records(tree: Any) -> Any:
    """Replaces records, also nested ones, by nodes with their values."""

    def unpack_record(x: Any) -> Any:
        if not _is_record(x):
            return x
        values = _record_values(x)
        return _Fields(type(x), tuple(values), tuple(map(_unpack_records, values.values())))

    return _pytree.tree_map(unpack_record, tree, is_leaf=_whole_or_cache)


def _record_values(x: Any) -> dict[Any, Any]:
    if isinstance(x, tuple):
        return {**dict(enumerate(x)), **getattr(x, "__dict__", {})}
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if hasattr(x, field.name)}


def _pack_records(tree: Any) -> Any:
    """The inverse of `_unpack_records`."""

    def pack_record(x: Any) -> Any:
        if not isinstance(x, _Fields):
            return x
        values = dict(zip(x.names, map(_pack_records, x.values), strict=True))
        items = [values.pop(name) for name in x.names if isinstance(name, int)]
        record: Any = tuple.__new__(x.kind, items) if issubclass(x.kind, tuple) else object.__new__(x.kind)
        for name, value in values.items():
            object.__setattr__(record, name, value)
        return record

    return _pytree.tree_map(pack_record, tree, is_leaf=lambda x: isinstance(x, _Fields) or _whole_or_cache(x))


def _has_fields(spec: Any) -> bool:
    return spec.type is _Fields or any(map(_has_fields, _children(spec)))


def _is_writable(spec: Any) -> bool:
    fixed = spec.is_leaf() or (isinstance(spec.type, type) and issubclass(spec.type, tuple))
    return not fixed or any(map(_is_writable, _children(spec)))


def _children(spec: Any) -> Any:
    return spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
