"""Floating-point operations of torch's operations, as `torch.utils.flop_counter` counts them; and memory traffic."""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat.dispatch import tensors_in

_known: dict[Any, int] = {}


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Returns how many floating-point operations an operation takes; 0 for those that torch does not count."""
    from torch.utils import flop_counter  # which imports triton

    formula = flop_counter.flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    leaves = optree.tree_leaves((args, kwargs, out))
    key = func.overloadpacket, *(tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves)
    if key not in _known:
        args, kwargs, out = optree.tree_map(
            lambda x: x.shape if isinstance(x, Tensor) else x, (args, kwargs, out), none_is_leaf=True
        )
        if "attention" in str(func.overloadpacket):  # the formulas want as many heads of keys as of queries
            heads = max(x[1] for x in args if isinstance(x, torch.Size) and len(x) == 4)
            args = [torch.Size((x[0], heads, *x[2:])) if isinstance(x, torch.Size) and len(x) == 4 else x for x in args]
        _known[key] = int(formula(*args, **kwargs, out_val=out))
    return _known[key]


_aten: Any = torch.ops.aten
_LOOKUPS = {getattr(_aten, name) for name in ("embedding", "index", "index_select", "gather", "take")}
_PLACED = {
    getattr(_aten, name)
    for name in ("index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_")
}
_UNREAD = {
    getattr(_aten, name)
    for name in ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "_foreach_copy_", "_foreach_zero_")
}  # fmt: skip


def traffic_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Returns how many bytes an operation reads and writes: of each tensor all, once, if nothing else is known of it.

    What it writes into is read, too, unless it is overwritten. Of a table in which it looks up rows it reads as much as
    the result has; of one in which it changes some, it reads and writes as much as it is given.
    """
    packet, counted, total = func.overloadpacket, set[int](), 0
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads" and kwargs.get("grad_scale") is None:  # of fused optimizers
            written = False
        for x in optree.tree_leaves(value):
            if not isinstance(x, Tensor) or id(x) in counted:
                continue
            counted.add(id(x))
            nbytes = _tensor_bytes(x)
            if i == 0 and packet in _LOOKUPS:
                nbytes = min(nbytes, sum(map(_tensor_bytes, tensors_in(out))))
            elif i == 0 and packet in _PLACED:
                nbytes = min(nbytes, max(y.nbytes for y in tensors_in(args[1:])))
            total += nbytes * (2 if written and packet not in _UNREAD else 1)
    return total + sum(_tensor_bytes(x) for x in tensors_in(out) if id(x) not in counted)


def _tensor_bytes(x: Tensor) -> int:
    """The bytes of a tensor; of one that is expanded, those that it has."""
    if x.layout is not torch.strided:
        return 0
    return x.itemsize * math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step or not n)


def operation_number(backward: bool) -> int:
    """Returns the number of the operation of this thread that autograd records now, or of that of which it runs the
    derivative; -1 if none is recorded.
    """
    if not backward:
        return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())
