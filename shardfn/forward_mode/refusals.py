"""Errors for functions of stages that `shardfn.jvp` cannot run."""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.stages.signature import Signature


def refuse_opaque(signature: Signature, leaves: Sequence[Any]) -> None:
    """Raises TypeError for an output that hides tensors from pytrees."""
    for leaf in leaves:
        if type(leaf) not in _PLAIN and _hides_tensors(leaf):
            kind = type(leaf).__name__
            raise TypeError(
                f"{signature}, in shardfn.jvp: it returns a {kind}, which is not a pytree node, so tangents would be "
                f"lost. Return a tuple or dict, register {kind} with optree, or choose stages= that include its reader"
            )


_PLAIN = {object, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_MOST_LOOKED_AT = 1000


def _hides_tensors(value: Any) -> bool:
    """Whether a value leads to a tensor: by an attribute, a closure, a generator's frame, an array's memory."""
    queue, visited = [value], {id(value)}
    while queue and len(visited) < _MOST_LOOKED_AT:
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
            if id(other) not in visited and not isinstance(other, (type, types.ModuleType)):
                visited.add(id(other))
                queue.append(other)
    return False


def closes_over(signature: Signature) -> str:
    """The message for a function that runs again with tangents, and closes over what needs a gradient."""
    return (
        f"{signature}: in shardfn.jvp of a gradient, with remat, its function uses a tensor that needs a gradient and "
        f"is not among its arguments, such as one that another stage made: pass it, or use remat=False"
    )
