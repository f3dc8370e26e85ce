"""A cache of shape inference: the results of operations on fake tensors, which torch computes slowly."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardfn.compat import autograd, dynamo
from shardfn.compat.dispatch import tensors_in

known: dict[Any, Results] = {}
"""By operation and arguments."""


class _Result(NamedTuple):
    """One tensor of a result.

    Attributes:
        argument: number of the tensor among the arguments whose memory it has; -1 for one of its own.
        same: whether it is that argument itself.
        shape, steps, start: of the tensor in its memory; the start of a view counts from the argument's.
    """

    argument: int
    same: bool
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    start: int
    dtype: torch.dtype
    device: torch.device


Results = tuple[list[Any], Any]
"""Each leaf of a result, and their tree."""


def key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """A hashable key of the result: the operation and its arguments; None if it depends on more."""
    if func.overloadpacket in _PLACING:
        return None
    try:
        key = func, _cache_key(args), _cache_key(kwargs), torch.get_default_dtype()
        hash(key)
    except TypeError:
        return None
    return key


def _cache_key(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, Tensor):
        if kind is not dynamo.FAKE or value.is_conj() or value.is_neg():
            raise TypeError
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple([_cache_key(x) for x in value])
    if isinstance(value, dict):
        return tuple([(name, _cache_key(x)) for name, x in value.items()])
    raise TypeError  # a storage, say, whose memory a key would keep


_PLACING = {  # where in which memory their results are, shapes do not say
    torch.ops.aten.as_strided, torch.ops.aten.as_strided_, torch.ops.aten.resize_, torch.ops.aten.set_,
}  # fmt: skip
_PLAIN = {
    int, float, complex, bool, type(None), str, torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format,
}  # fmt: skip


def results(out: Any, args: Any, kwargs: Any) -> Results:
    """The description of a result from which `again` makes it."""
    given = tensors_in(args, kwargs)
    numbers = {autograd.storage_of(x): i for i, x in reversed(list(enumerate(given)))}
    leaves, tree = optree.tree_flatten(out, none_is_leaf=True)
    return [_result(x, given, numbers) if isinstance(x, Tensor) else x for x in leaves], tree


def _result(x: Tensor, given: list[Tensor], numbers: dict[int, int]) -> _Result:
    same = next((i for i, y in enumerate(given) if y is x), -1)
    argument = same if same >= 0 else numbers.get(autograd.storage_of(x), -1)
    start = int(x.storage_offset()) * x.itemsize
    if argument >= 0:
        start -= int(given[argument].storage_offset()) * given[argument].itemsize
    return _Result(argument, same >= 0, tuple(x.shape), x.stride(), start, x.dtype, x.device)


def replayed_result(remembered: Results, args: Any, kwargs: Any) -> Any:
    """The same result for these arguments."""
    leaves, tree = remembered
    if len(leaves) == tree.num_nodes == 1 and type(leaves[0]) is _Result:  # one tensor, as of most operations
        return _result_tensor(leaves[0], tensors_in(args, kwargs) if leaves[0].argument >= 0 else [])
    given = tensors_in(args, kwargs) if any(type(x) is _Result and x.argument >= 0 for x in leaves) else []
    return optree.tree_unflatten(tree, [_result_tensor(x, given) if type(x) is _Result else x for x in leaves])


def _result_tensor(result: _Result, given: list[Tensor]) -> Tensor:
    if result.same:
        return given[result.argument]
    if result.argument < 0:
        made = torch.empty_strided(result.shape, result.steps, dtype=result.dtype, device="meta")
        return dynamo.fake_of(made, result.device)
    whole = given[result.argument]
    start = result.start + int(whole.storage_offset()) * whole.itemsize
    made = torch.empty(0, dtype=result.dtype, device="meta")
    made.set_(whole.untyped_storage(), start // result.dtype.itemsize, result.shape, result.steps)
    return dynamo.fake_of(made, result.device)
