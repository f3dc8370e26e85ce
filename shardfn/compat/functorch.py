"""Queries about the torch.func transforms that are active, and what they do to a tensor."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import vmap_increment_nesting
from torch.autograd import forward_ad


def inside_transform() -> bool:
    """Whether a torch.func transform is running here."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> Any:
    """A context in which ops run at once on plain tensors, whatever torch.func transforms are active."""
    return torch._C._DisableFuncTorch()


def followed(x: torch.Tensor) -> set[tuple[int, str]]:
    """Returns, with the level of torch.func's transforms, what is tracked for a tensor: gradient, tangent or batch."""
    functorch, kinds = torch._C._functorch, set()
    if tangent_of(x) is not None:
        kinds.add("tangent")
    top = functorch.peek_interpreter_stack()
    is_wrapped_here = (
        top is not None and functorch.is_functorch_wrapped_tensor(x) and functorch.maybe_get_level(x) == top.level()
    )
    if is_wrapped_here and functorch.is_batchedtensor(x):
        kinds.add("batch")
    elif x.requires_grad and (is_wrapped_here or top is None):
        kinds.add("gradient")
    if top is None:
        return {(0, kind) for kind in kinds}
    with temporarily_pop_interpreter_stack():
        return {(top.level(), kind) for kind in kinds} | followed(functorch.get_unwrapped(x) if is_wrapped_here else x)


def tangents(x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tangents of a tensor on each level of torch.func's transforms, unwrapped."""
    functorch, result = torch._C._functorch, list[torch.Tensor]()
    if (tangent := tangent_of(x)) is not None:
        result.append(unwrapped(tangent))
    top = functorch.peek_interpreter_stack()
    if top is None:
        return result
    is_wrapped_here = functorch.is_functorch_wrapped_tensor(x) and functorch.maybe_get_level(x) == top.level()
    with temporarily_pop_interpreter_stack():
        return result + tangents(functorch.get_unwrapped(x) if is_wrapped_here else x)


def inside_batching_or_forward() -> bool:
    """Whether tensors may be vmap batches or carry tangents; neither holds under torch.func.grad and vjp alone."""
    if forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() != torch._C._functorch.TransformType.Grad for level in stack)


def batching() -> bool:
    """Whether a vmap is running here."""
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Does `function.apply(*args)` without binding the arguments to a signature again at each call."""
    if inside_transform():
        return function.apply(*args)
    plain = super(torch.autograd.Function, function)
    return plain.apply(*[alive(x) if isinstance(x, torch.Tensor) else x for x in args])  # type: ignore[attr-defined]


@contextlib.contextmanager
def applications_seen(callback: Callable[[Any, Sequence[Any]], None]) -> Iterator[None]:
    """A context in which `look(function, args)` is called before a Function is applied outside of transforms.

    Modes do not see that, but each application makes an object for its backward, and then looks up the forward.
    It is called for Functions of others, in this thread. Among the arguments are those that have lost a gradient, with
    the wrappers of transforms that have ended; since torch 2.14 these come without them.
    """
    module, thread = torch._functorch.utils, threading.get_ident()
    kind: Any = torch.autograd.function.BackwardCFunction
    unwrap, init = module.unwrap_dead_wrappers, kind.__init__
    dead_arguments, replaced = list[Any](), dict[Any, Any]()

    def unwrap_dead_wrappers(args: Any) -> Any:  # which comes first, before torch 2.14
        if threading.get_ident() == thread:
            dead_arguments[:] = [x for x in args if isinstance(x, torch.Tensor) and lost(x)]
        return unwrap(args)

    def restore(function: Any) -> None:
        forward = replaced.pop(function)
        if forward is None:
            del function.forward  # it is that of a class above
        else:
            function.forward = forward

    def begin(context: Any) -> None:
        function, differentiates = type(context)._forward_cls, torch.is_grad_enabled()
        if threading.get_ident() != thread or function.__module__.startswith(("shardfn.", "torch.")):
            return
        if function in replaced:  # an earlier one came to no forward
            restore(function)
        forward = function.forward

        def observed_forward(*args: Any) -> Any:
            if threading.get_ident() == thread:
                restore(function)
                dead, dead_arguments[:] = dead_arguments[:], []
                with torch.set_grad_enabled(differentiates):
                    callback(function, [*dead, *(x for x in args if x is not context)])
                del dead  # what is kept longer is gathered again
            return forward(*args)

        replaced[function], function.forward = function.__dict__.get("forward"), staticmethod(observed_forward)

    module.unwrap_dead_wrappers, kind.__init__ = unwrap_dead_wrappers, begin
    try:
        yield
    finally:
        module.unwrap_dead_wrappers, kind.__init__ = unwrap, init
        for function in list(replaced):
            restore(function)


def applied_to(func: Any, args: Sequence[Any]) -> Any:
    """The Function that a call of torch applies inside of transforms, where modes see it; None if it does not."""
    return args[0] if func is custom_function_call else None


@functools.cache
def is_forward(code: CodeType) -> bool:
    """Whether this is the forward of a custom autograd function, whose `apply` has no frame since torch 2.14."""
    kinds = [torch.autograd.Function]
    for kind in kinds:  # grows
        kinds += kind.__subclasses__()
    return any(getattr(inspect.unwrap(kind.forward), "__code__", None) is code for kind in kinds)


def once_differentiable(function: Any) -> bool:
    """Whether a Function's backward is marked with `once_differentiable`."""
    return getattr(function.backward, "__code__", None) is _ONCE


_ONCE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without the wrappers of any transform."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def alive(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without the wrappers of transforms that have ended."""
    return torch._C._functorch.unwrap_if_dead(x)


def in_ended_transform(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the wrapper of a transform that has ended, to which autograd may attach a graph."""
    functorch = torch._C._functorch
    level = functorch._grad_increment_nesting()
    try:
        return functorch._wrap_for_grad(x, level)
    finally:
        functorch._grad_decrement_nesting()


def layers(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, and what the wrappers of transforms around it hold, from the outermost to the plain one."""
    yield x
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        yield x


def lost(x: torch.Tensor) -> bool:
    """Whether a tensor had a gradient in a transform that has ended, in which it has none any more."""
    return any(torch._C._functorch.unwrap_if_dead(y) is not y and y.requires_grad for y in layers(x))


def constant_in(x: torch.Tensor) -> bool:
    """Whether a tensor has neither a gradient nor a tangent in any transform, batches apart."""
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None or top.key() != torch._C._functorch.TransformType.Vmap:
        return all(kind == "batch" for _, kind in followed(x))
    is_wrapped_here = torch._C._functorch.is_batchedtensor(x) and torch._C._functorch.maybe_get_level(x) == top.level()
    with temporarily_pop_interpreter_stack():
        return constant_in(torch._C._functorch.get_unwrapped(x) if is_wrapped_here else x)


def untracked(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing takes a derivative of what is computed from tensors here, nor a batch: it may be in place."""
    return not inside_transform() and not any(
        wrapped(x) or tangent_of(x) is not None or (x.requires_grad and torch.is_grad_enabled())
        for x in tensors
        if x is not None
    )


def batched(x: torch.Tensor) -> bool:
    """Whether a tensor is a batch made by `torch.autograd.grad(is_grads_batched=True)`."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def wrapped(x: Any) -> bool:
    """Whether a tensor belongs to an active torch.func transform."""
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def unpacked(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a tensor without its tangent in forward mode, and the tangent."""
    if forward_ad._current_level < 0:
        return x, None
    pair = forward_ad.unpack_dual(x)
    return pair.primal, pair.tangent


def tangent_of(x: torch.Tensor) -> torch.Tensor | None:
    """Returns a tensor's tangent in forward mode; None if it has none."""
    return unpacked(x)[1]


def dual(x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with this tangent in forward mode."""
    return forward_ad.make_dual(x, tangent)


def forward_mode_on() -> Any:
    """A context in which operations follow tangents, as they do outside of a Function."""
    return forward_ad._set_fwd_grad_enabled(True)


def inside_forward_mode() -> bool:
    """Whether tensors may carry tangents here."""
    return forward_ad._current_level >= 0


# --- a vmap that is entered and left by hand ---


@contextlib.contextmanager
def mapping(rows: int) -> Iterator[int]:
    """A context of `torch.func.vmap` over so many rows, in which each draws its own random numbers; gives its level.

    What has no rule of torch's is computed row by row, without a warning.
    """
    global _mappings
    warn = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    _mappings += 1
    warn(False)
    try:
        with vmap_increment_nesting(rows, "different") as level:
            yield level
    finally:
        _mappings -= 1
        warn(not _mappings)


_mappings = 0


def level() -> int:
    """The level of the innermost transform that is running here; 0 if there is none."""
    top = torch._C._functorch.peek_interpreter_stack()
    return 0 if top is None else top.level()


def as_row(x: torch.Tensor, level: int) -> torch.Tensor:
    """Returns a tensor with a first dimension of rows as one row of it, inside of the vmap at this level."""
    return torch._C._functorch._add_batch_dim(x, 0, level)


def is_mapped(x: torch.Tensor, level: int) -> bool:
    """Whether a tensor is one row of several in the vmap at this level."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == level


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Returns all rows of a tensor that `is_mapped`, in its first dimension. Called in `below`."""
    functorch = torch._C._functorch
    return functorch.get_unwrapped(x).movedim(functorch.maybe_get_bdim(x), 0)


def below() -> Any:
    """A context outside of the innermost transform that is running here."""
    return temporarily_pop_interpreter_stack()
