"""Checks of functions inside `shardfn.jvp`: uses of tensors that lost their gradient, and writes into parameters.

A tensor that a stage's function computed and kept, but did not return, has lost its gradient outside of the stage.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.compat import autograd, functorch, together
from shardfn.compat.blockwise_attention import sdpa
from shardfn.compat.norms import Padded
from shardfn.compat.replacing import replaced

_STAGE = "_shardfn_stage"  # an attribute of tensors
_VALUE = "_shardfn_value"  # the same, of what is in their wrappers: since torch 2.14 a Function gets that alone


class Watched(Padded):
    """A context in which what a stage's function computed and did not return is not used: it has lost its gradient.

    And in which attention keeps no scores.
    """

    table = Padded.table | together.TABLE | {F.scaled_dot_product_attention: sdpa}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # what is traced is computed later
            return super().__torch_function__(func, types, args, kwargs)
        if _running.lent and _writes(func, args, kwargs or {}):
            raise RuntimeError(WRITES)
        if (function := functorch.applied_to(func, args)) is not None:
            _refuse_once(function, args[1:])
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, torch.Size) or not isinstance(result, (Tensor, tuple, list)):
            return result
        # A pullback of `torch.func.vjp` differentiates what has lost its wrapper.
        if func is not Tensor.detach and not (func is torch.autograd.grad and _running.stage is not None):
            _refuse_leaks((args, kwargs))
        if _running.stage is not None:
            belonging(result)
        return result


def _escaped(stage: str) -> RuntimeError:
    """The error for a loss that depends on a tensor inside a stage, which has lost its gradient there."""
    return RuntimeError(
        f"stage {stage!r}: the loss depends on a tensor that this stage's function computed but did not return: a "
        f"hook, an attribute or a list kept it. Its gradient would be lost. Return it from the stage, "
        f"or keep y.detach().clone() of it"
    )


def _refuse_leaks(arguments: Any) -> None:
    """Raises an error if what a stage's function kept has lost a gradient that is needed."""
    for x in optree.tree_leaves(arguments) if torch.is_grad_enabled() else ():
        if isinstance(x, Tensor) and functorch.lost(x):
            stages = [stage for y in functorch.layers(x) if (stage := getattr(y, _STAGE, None)) is not None]
            if stages:
                raise _escaped(stages[0])


def refuse_applied(function: Any, args: Sequence[Any]) -> None:
    """Raises RuntimeError if a Function gets what a stage has lost, or will be differentiated twice and cannot be."""
    _refuse_leaks(args)
    if torch.is_grad_enabled() and _running.stage is None and not autograd.inside_backward():
        for x in args:
            stage = getattr(x, _VALUE, None) if isinstance(x, Tensor) and not x.requires_grad else None
            if stage is not None:
                raise _escaped(stage)
    _refuse_once(function, args)


def _refuse_once(function: Any, args: Sequence[Any]) -> None:
    """Raises RuntimeError if backward of a Function will be differentiated, and says that it cannot be."""
    moving = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
    if moving and functorch.once_differentiable(function):
        raise RuntimeError(
            f"a gradient inside shardfn.jvp, as in a Hessian-vector product, needs the derivative of the backward of "
            f"{function.__name__}, which is marked with @once_differentiable. Write that backward with operations of "
            f"torch, without the mark"
        )


def belonging(tree: Any) -> None:
    """Marks tensors that have gradients as those of the stage that runs."""
    for x in optree.tree_leaves(tree):
        if isinstance(x, Tensor) and x.requires_grad:
            *_, value = functorch.layers(x)
            setattr(x, _STAGE, _running.stage)
            if value is not x:
                setattr(value, _VALUE, _running.stage)


WRITES = "a stage's function writes into what it was lent"


class _WatchedCalls(threading.local):
    stage: str | None = None
    lent: Sequence[tuple[int, int]] = ()


_running = _WatchedCalls()


def running(stage: str | None, lent: Sequence[tuple[int, int]]) -> Any:
    """A context for the function of a stage, whose tensors belong to it, and which writes to nothing that is lent."""
    return replaced(_running, stage=stage, lent=lent)


def _writes(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch is known to write into memory that is lent, from its first argument and its name."""
    name = getattr(func, "__name__", "")
    targets = [kwargs.get("out")]
    if (
        name in _IN_PLACE
        or (name.endswith("_") and not name.endswith("__") and name not in _AS_IT_IS)
        or kwargs.get("inplace")
    ):
        targets += args[:1]
    for x in optree.tree_leaves(targets):
        if isinstance(x, Tensor) and x.layout is torch.strided:
            address = functorch.unwrapped(x).data_ptr()
            if any(start <= address < stop for start, stop in _running.lent):
                return True
    return False


_AS_IT_IS = {"requires_grad_", "detach_", "rename_", "share_memory_"}  # which change no number
_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}
