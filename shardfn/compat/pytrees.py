"""Nodes of torch's own pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional


def register_in_torch(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    """Makes a class a node of torch's own pytrees, which torch.func flattens by."""
    torch.utils._pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )
