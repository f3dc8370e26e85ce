"""Errors for stages' functions that write into parameters, mix dtypes, or differ in their recomputation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import optree
from torch import Tensor

from shardfn.quoting import listed
from shardfn.stages.replay import Off
from shardfn.stages.signature import Signature

_DTYPES = re.compile("dtype|scalar type|weight type|bias type", re.IGNORECASE)


def refuse_mixed(signature: Signature, error: RuntimeError, parameters: Any, arguments: Sequence[Any]) -> None:
    """Raises a clearer RuntimeError if a function mixes parameters and arguments of different dtypes."""
    param_dtypes, arg_dtypes = (
        {x.dtype for x in optree.tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()}
        for tree in (parameters, [x for i, x in enumerate(arguments) if i not in signature.shards])
    )
    if not param_dtypes or not arg_dtypes or len(param_dtypes | arg_dtypes) == 1 or not _DTYPES.search(str(error)):
        return
    casts = {name: getattr(signature.options, name) for name in ("gather_dtype", "input_dtype")}
    asked_for = (
        " and ".join(f"{name}={dtype}" for name, dtype in casts.items() if dtype)
        or "no gather_dtype and no input_dtype"
    )
    first, second = (listed(sorted(map(str, dtypes))) for dtypes in (param_dtypes, arg_dtypes))
    raise RuntimeError(
        f"{signature}: its function mixes parameters of {first} and other arguments of {second} ({error}), with "
        f"{asked_for}. Pass the same gather_dtype (of parameters) and input_dtype (of other arguments), or cast inside "
        f"the function"
    ) from error


def writes(signature: Signature, path: str | None = None) -> str:
    """The message for a function that writes into parameters; `path` is of one of them, if it is known."""
    into = path or "its parameters, or into another tensor that it was given"
    return (
        f"{signature}: its function writes into {into}. Parameters are a gathered copy or the shard itself, and it may "
        f"run again in backward: compute a new tensor, and update parameters outside of stages"
    )


def other_result(signature: Signature, first: str, then: str) -> str:
    """The message for a function whose second forward returns a different structure."""
    return (
        f"{signature}: its function ran again for its gradient and returned something else: first {first}, then "
        f"{then}. The gradient would be that of another function. It depends on more than its arguments: a counter, a "
        f"cache or a switch such as module.train() has changed since the first run. Pass that in as an argument, and "
        f"return what is to be kept"
    )


def other_numbers(signature: Signature, off: Off) -> str:
    """The message for a function whose second forward returns different values."""
    return (
        f"{signature}: its function ran again for its gradient and returned other numbers: tensor {off.number} of its "
        f"result, {off.kind}, differs by {off.part:.1e} of its norm. The gradient would be that of another function. "
        f"It depends on more than its arguments: on what its first run left in a dict, a list, an attribute or a "
        f"global, on random numbers that are not torch's, or on an object that has changed since. Pass that in as an "
        f"argument and return what is to be kept, or use remat=False"
    )
