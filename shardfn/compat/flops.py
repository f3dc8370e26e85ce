"""Floating-point operations of torch's operations, as `torch.utils.flop_counter` counts them."""

from __future__ import annotations

import functools
from typing import Any

import optree
import torch
from torch import Tensor

_known: dict[Any, int] = {}


@functools.cache
def _formulas() -> dict[Any, Any]:
    from torch.utils import flop_counter  # which imports triton

    return flop_counter.flop_registry


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Returns how many floating-point operations an operation takes; 0 for those that torch does not count."""
    formula = _formulas().get(func.overloadpacket)
    if formula is None:
        return 0
    leaves = optree.tree_leaves((args, kwargs, out))
    key = func.overloadpacket, *(tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves)
    if key not in _known:
        args, kwargs, out = optree.tree_map(_shape, (args, kwargs, out), none_is_leaf=True)
        if "attention" in str(func.overloadpacket):  # the formulas want as many heads of keys as of queries
            heads = max(x[1] for x in args if isinstance(x, torch.Size) and len(x) == 4)
            args = [torch.Size((x[0], heads, *x[2:])) if isinstance(x, torch.Size) and len(x) == 4 else x for x in args]
        _known[key] = int(formula(*args, **kwargs, out_val=out))
    return _known[key]


def _shape(x: Any) -> Any:
    return x.shape if isinstance(x, Tensor) else x


def operation_number(backward: bool) -> int:
    """Returns the number of the operation of this thread that autograd records now, or of that of which it runs the
    derivative; -1 if this torch has no such numbers, or if none is recorded.
    """
    try:
        if not backward:
            return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]
        node = torch._C._current_autograd_node()
        return -1 if node is None else int(node._sequence_nr())
    except AttributeError:
        return -1
