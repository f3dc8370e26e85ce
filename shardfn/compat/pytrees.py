"""Registers pytree nodes with optree, and with torch's own registry, which torch.func uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional


def register(
    cls: type,
    flatten: Callable[[Any], tuple[Any, Any, Any]],
    unflatten: Callable[[Any, Any], Any],
    path_entry_type: type[optree.PyTreeEntry] = optree.AutoEntry,
) -> None:
    """Makes a class a node of both kinds of pytrees.

    Args:
        cls: the class.
        flatten: `node -> (children, static, names)`.
        unflatten: `(static, children) -> node`.
        path_entry_type: how optree's paths reach the children.
    """
    optree.register_pytree_node(
        cls, flatten, unflatten, path_entry_type=path_entry_type, namespace=optree.registry.__GLOBAL_NAMESPACE
    )

    def flat(node: Any) -> tuple[list[Any], Any]:
        children, static, _ = flatten(node)
        return list(children), static

    torch.utils._pytree.register_pytree_node(
        cls,
        flat,
        lambda children, static: unflatten(static, children),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
