"""A batch whose memory nobody else writes to: the next one is read before its step has run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info


def owned(batch: Any) -> Any:
    """A copy of all tensors and arrays in what somebody's code has made, who may fill them again.

    Which of them will be, nobody can know: a slice of a data set looks like a part of a buffer. A copy stays on the
    device, and in locked memory. Objects of no known kind are left as they are.
    """
    return optree.tree_map(_copied, batch, none_is_leaf=True)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _again(leaf) if type(leaf) is Tensor else leaf.clone()
    if isinstance(leaf, (np.ndarray, bytearray)):
        return leaf.copy()
    if isinstance(leaf, MutableMapping):  # of a class of its own, as tokenizers give
        made = copy.copy(leaf)
        for key, value in leaf.items():
            made[key] = owned(value)
        return made
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        like: Any = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(like, field.name, owned(getattr(leaf, field.name)))
        return like
    clone = getattr(leaf, "clone", None)  # tensor dicts, graphs
    return clone() if callable(clone) else leaf


def _again(x: Tensor) -> Tensor:
    return torch.empty_like(x, pin_memory=True).copy_(x) if _locked(x) else x.clone()


def _locked(x: Tensor) -> bool:
    if get_worker_info() is not None:  # a forked process must not touch CUDA, and to ask already does
        return False
    return x.layout is torch.strided and x.device.type == "cpu" and x.is_pinned()


def fresh(loader: Any) -> bool:
    """Whether each batch has memory of its own: torch stacks rows, and nobody's code comes after that."""
    return type(loader) is DataLoader and loader.collate_fn is default_collate
