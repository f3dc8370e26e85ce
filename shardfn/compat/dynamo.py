"""Control over what torch.compile traces, and fake tensors."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

Function = TypeVar("Function", bound=Callable[..., Any])
FAKE: Any = FakeTensor
"""The class of tensors with shapes, dtypes and strides but no data."""
DEPENDS_ON_NUMBERS = DataDependentOutputException, DynamicOutputShapeException
"""Errors of operations on fake tensors that would have to look at data."""


def constant_when_traced(f: Function) -> Function:
    """Makes torch.compile run `f` once, while tracing, and treat its result as a constant."""
    assert isinstance(f, FunctionType), f"{f} is no plain function, and torch.compile would trace it all the same"
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's own way loads all of it
    return f


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` wraps this module, or its `compile()` was called."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


@constant_when_traced
def trace_dicts() -> None:
    """Makes torch.compile trace how optree flattens dicts of plain numbers, as it does for other dicts.

    Otherwise it would call optree for these, whose result it cannot hold and would confuse with its own.
    """
    from torch._dynamo.polyfills import pytree

    functions: list[Any] = [pytree.dict_flatten, pytree.dict_unflatten]
    for function in functions:
        function.__torch_dynamo_can_constant_fold_through__ = False


def free_graphs() -> None:
    """Collects the remains of graphs that were compiled since the last call.

    Otherwise the next thread that allocates would free them, and might wait there, holding the GIL, for a thread that
    needs it.
    """
    manager = getattr(sys.modules.get("torch._dynamo.utils"), "CleanupManager", None)
    count = getattr(manager, "count", 0)
    if count != _graphs[0]:
        gc.collect()
        _graphs[0] = getattr(manager, "count", 0)


_graphs = [0]


def one_graph() -> Any:
    """A context: while torch.compile traces, code inside that it cannot follow is an error instead of a graph break."""
    return torch._dynamo.error_on_graph_break(True) if torch.compiler.is_compiling() else nullcontext()


@constant_when_traced
def refuse_in_graph(message: str | None) -> None:
    """Ends tracing by torch.compile with this error, unless the message is None; for use inside `one_graph`.

    If traced code raised an exception itself, torch.compile would run it again uncompiled, in pieces.
    """
    if message is not None:
        raise torch._dynamo.exc.UserError(torch._dynamo.exc.UserErrorType.INVALID_INPUT, message)


def refuse_compiling(subject: str) -> None:
    """Ends tracing by torch.compile in code that works on shards: the schedule of stages is no part of its graphs."""
    if torch.compiler.is_compiling():
        with one_graph():
            refuse_in_graph(
                f"{subject} cannot be traced by torch.compile: shardfn.compile(step) compiles a whole step, and "
                f"torch.compile the function inside a stage, shardfn.stage(torch.compile(f))"
            )


@functools.cache
def fake_mode() -> Any:
    """Returns the process's mode under which ops make tensors with shapes, dtypes and strides but no data."""

    class OnThreads(FakeTensorMode):
        """Such a mode, which several threads can be in at once: each has its own of what changes meanwhile."""

        in_kernel_invocation = _of_thread("in_kernel_invocation", bool)
        enter_stack = _of_thread("enter_stack", list)

    mode = OnThreads(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # its keys hold storages that are arguments, such as those of `set_`, for ever
    return mode


def _of_thread(name: str, start: Callable[[], Any]) -> property:
    """An attribute that each thread has for itself."""
    local = threading.local()

    def get(_: Any) -> Any:
        if not hasattr(local, name):
            setattr(local, name, start())
        return getattr(local, name)

    return property(get, lambda _, value: setattr(local, name, value))


def fake_of(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor on the device meta as one of such tensors, on this device.

    It is made as their class makes it, whose own way takes several times as long, and has the attributes of a first.
    """
    if device not in _first:
        _first[device] = dict(vars(FakeTensor(fake_mode(), torch.empty(0, device="meta"), device)))
    fake = torch.Tensor._make_subclass(
        FakeTensor, x, x.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    vars(fake).update(_first[device])
    return fake


_first: dict[torch.device, dict[str, Any]] = {}


def redraws() -> tuple[Any, str]:
    """Returns where torch draws numbers again until none is too large: a module, and a name in it."""
    return torch.nn.init, "_no_grad_trunc_normal_"
