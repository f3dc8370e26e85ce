"""What a stage's function must not do, and the errors that say so."""

from __future__ import annotations

import gc
import inspect
import re
import types
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.quoting import listed
from shardfn.stages.replay import Off
from shardfn.stages.signature import Signature


def refuse_opaque(signature: Signature, leaves: Sequence[Any]) -> None:
    """Raises TypeError for an output that hides tensors from pytrees."""
    for leaf in leaves:
        if type(leaf) not in _PLAIN and _hides_tensors(leaf):
            kind = type(leaf).__name__
            raise TypeError(
                f"{signature}, in shardfn.jvp: it returns a {kind}, which is not a pytree node, with tensors in it, "
                f"whose tangents would be lost. Return a tuple or dict of tensors, register {kind} with optree, or, "
                f"for a module, choose stages= so that who reads it is in one stage with it"
            )


_PLAIN = {object, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_MOST_LOOKED_AT = 1000


def _hides_tensors(value: Any) -> bool:
    """Whether a value leads to a tensor: by an attribute, a closure, a generator's frame, an array's memory."""
    queue, seen = [value], {id(value)}
    while queue and len(seen) < _MOST_LOOKED_AT:
        current = queue.pop()
        if isinstance(current, Tensor):
            return True
        if isinstance(current, types.FunctionType):  # without its globals, which lead to all of its module
            referred = [current.__closure__, current.__defaults__, current.__kwdefaults__, current.__dict__]
        elif isinstance(current, types.GeneratorType):
            referred = list(inspect.getgeneratorlocals(current).values())
        elif type(current).__module__ == "numpy":
            referred = [getattr(current, "base", None)]
        else:
            referred = [] if isinstance(current, (type, types.ModuleType)) else gc.get_referents(current)
        for other in referred:
            if id(other) not in seen and not isinstance(other, (type, types.ModuleType)):
                seen.add(id(other))
                queue.append(other)
    return False


_DTYPES = re.compile("dtype|scalar type|weight type|bias type", re.IGNORECASE)


def refuse_mixed(signature: Signature, error: RuntimeError, parameters: Any, arguments: Sequence[Any]) -> None:
    """Raises RuntimeError in place of torch's if a function mixes parameters of one dtype with arguments of another."""
    own, others = (
        {x.dtype for x in optree.tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()}
        for tree in (parameters, [x for i, x in enumerate(arguments) if i not in signature.shards])
    )
    if not own or not others or len(own | others) == 1 or not _DTYPES.search(str(error)):
        return
    casts = {name: getattr(signature.options, name) for name in ("gather_dtype", "input_dtype")}
    asked_for = (
        " and ".join(f"{name}={dtype}" for name, dtype in casts.items() if dtype)
        or "no gather_dtype and no input_dtype"
    )
    first, second = (listed(sorted(map(str, dtypes))) for dtypes in (own, others))
    raise RuntimeError(
        f"{signature}: its function gets parameters of {first} and other arguments of {second}, which it mixes "
        f"({error}). With {asked_for}: gather_dtype is the dtype in which it gets parameters, input_dtype that of its "
        f"other arguments; give both the same, or cast inside the function"
    ) from error


def writes(signature: Signature, path: str | None = None) -> str:
    """The message for a function that writes into parameters; `path` is of one of them, if it is known."""
    into = path or "its parameters, or into another tensor that it was given"
    return (
        f"{signature}: its function writes into {into}. Parameters are a gathered copy or the shard itself, and it may "
        f"run again in backward: compute a new tensor, and update parameters outside of stages"
    )


def closes_over(signature: Signature) -> str:
    """The message for a function that runs again with tangents, and closes over what needs a gradient."""
    return (
        f"{signature}: in shardfn.jvp of a gradient, with remat, its function uses a tensor that needs a gradient and "
        f"is not among its arguments, such as one that another stage made: pass it, or use remat=False"
    )


def other_result(signature: Signature, first: str, then: str) -> str:
    """The message for a function that returns something else when it runs again."""
    return (
        f"{signature}: its function ran again for its gradient and returned something else: first {first}, then "
        f"{then}. The gradient would be that of another function. It depends on more than its arguments: a counter, a "
        f"cache or a switch such as module.train() has changed since the first run. Pass that in as an argument, and "
        f"return what is to be kept"
    )


def other_numbers(signature: Signature, off: Off) -> str:
    """The message for a function that returns other numbers when it runs again."""
    return (
        f"{signature}: its function ran again for its gradient and returned other numbers: tensor {off.number} of its "
        f"result, {off.kind}, differs by {off.part:.1e} of its norm. The gradient would be that of another function. "
        f"It depends on more than its arguments: on what its first run left in a dict, a list, an attribute or a "
        f"global, on random numbers that are not torch's, or on an object that has changed since. Pass that in as an "
        f"argument and return what is to be kept, or use remat=False"
    )
