"""Which of torch.func's transforms run here, and what they do to a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch.autograd import forward_ad

from shardfn.compat.dispatch import temporarily_pop_interpreter_stack


def inside_transform() -> bool:
    """Whether a torch.func transform is running here."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> Any:
    """A context: ops inside are done at once, on plain tensors, whatever torch.func transforms run."""
    return torch._C._DisableFuncTorch()


def followed(x: torch.Tensor) -> set[tuple[int, str]]:
    """What follows a tensor, and on which level of torch.func's transforms: a gradient, a tangent, a batch."""
    functorch, found = torch._C._functorch, set()
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        found.add("tangent")
    top = functorch.peek_interpreter_stack()
    own = top is not None and functorch.is_functorch_wrapped_tensor(x) and functorch.maybe_get_level(x) == top.level()
    if own and functorch.is_batchedtensor(x):
        found.add("batch")
    elif x.requires_grad and (own or top is None):
        found.add("gradient")
    if top is None:
        return {(0, one) for one in found}
    with temporarily_pop_interpreter_stack():
        return {(top.level(), one) for one in found} | followed(functorch.get_unwrapped(x) if own else x)


def tangents(x: torch.Tensor) -> list[torch.Tensor]:
    """What forward mode follows of a tensor, on each level of torch.func's transforms, without their wrapping."""
    functorch, found = torch._C._functorch, list[torch.Tensor]()
    if forward_ad._current_level >= 0 and (tangent := forward_ad.unpack_dual(x).tangent) is not None:
        found.append(unwrapped(tangent))
    top = functorch.peek_interpreter_stack()
    if top is None:
        return found
    own = functorch.is_functorch_wrapped_tensor(x) and functorch.maybe_get_level(x) == top.level()
    with temporarily_pop_interpreter_stack():
        return found + tangents(functorch.get_unwrapped(x) if own else x)


def constant(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor inside what torch.func's gradients have wrapped; None if some level follows a gradient of it."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad or not functorch.is_gradtrackingtensor(x):
            return None
        x = functorch.get_unwrapped(x)
    return x


def inside_batching_or_forward() -> bool:
    """Whether a tensor may be a batch of vmap's, or carry a tangent: torch.func.grad and vjp alone do neither."""
    if forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() not in _REVERSE for level in stack)


def batching() -> bool:
    """Whether a vmap is running here."""
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


_REVERSE = (torch._C._functorch.TransformType.Grad,)


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, which binds the arguments to a signature anew at each call."""
    if inside_transform():
        return function.apply(*args)
    plain = super(torch.autograd.Function, function)
    return plain.apply(*[alive(x) if isinstance(x, torch.Tensor) else x for x in args])  # type: ignore[attr-defined]


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """A tensor without the wrapping of any transform."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def alive(x: torch.Tensor) -> torch.Tensor:
    """A tensor without the wrapping of transforms that have ended."""
    return torch._C._functorch.unwrap_if_dead(x)


def batched(x: torch.Tensor) -> bool:
    """Whether a tensor is a batch of `torch.autograd.grad(is_grads_batched=True)`'s."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def wrapped(x: Any) -> bool:
    """Whether a tensor belongs to a torch.func transform that is running."""
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def inside_forward_mode() -> bool:
    """Whether tensors may carry tangents here."""
    return forward_ad._current_level >= 0
