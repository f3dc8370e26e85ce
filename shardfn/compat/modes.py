"""Dispatch modes: Python classes that see each op."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _pop_mode_temporarily, _push_mode

_POLICIES = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


class DispatchMode(TorchDispatchMode):
    """A mode that torch.compile does not trace; torch's own class would load all of torch.compile at the first op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        plain = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if plain is not None:
            cls.__torch_dispatch__ = _kept_out(plain, cls.__torch_dispatch__)  # type: ignore[method-assign]


class Watching(DispatchMode):
    """A mode that sees each op and changes nothing: code inside takes the same path as outside.

    Attributes:
        supports_higher_order_operators: True: such operators run as they would without the mode.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch.compile goes on compiling inside."""
        return True

    def __enter__(self) -> Any:
        _push_mode(self)  # the base class sets process-wide flags, which threads would overwrite
        return self

    def __exit__(self, *_: Any) -> None:
        _pop_mode()


def innermost_unseen() -> Any:
    """Returns a context in which the mode that is first to see ops does not see them."""
    return _pop_mode_temporarily()


def policies_unseen() -> Any:
    """Returns a context in which torch's policies of what a checkpoint keeps see no ops, which they count."""
    return _policies_unseen() if type(innermost()) in _POLICIES else contextlib.nullcontext()


@contextlib.contextmanager
def _policies_unseen() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        while type(innermost()) in _POLICIES:
            stack.enter_context(_pop_mode_temporarily())
        yield


def visible_to_modes() -> Any:
    """Returns a context in which modes see ops, also where torch's own code has hidden them."""
    hidden = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.PythonTLSSnapshot
    )
    excluded = torch._C._dispatch_tls_local_exclude_set() - hidden
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def functions_unseen() -> Any:
    """Returns a context in which no mode, such as that of a default device, sees calls of torch's functions."""
    return torch._C.DisableTorchFunction()


def functions_seen() -> Any:
    """Returns a context in which such modes see them, also inside of `functions_unseen`."""
    return torch._C._EnableTorchFunction()


def innermost() -> Any:
    """Returns the mode that sees ops here first; None if there is none."""
    count = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(count - 1) if count else None


def _kept_out(plain: Any, disabled: Any) -> Any:
    """Returns a dispatch function: `plain`, or torch's own wrapping of it if torch.compile may trace here."""

    @functools.wraps(plain)
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(type_, "refuses_operations", False) for type_ in types):
            return NotImplemented  # its own dispatch raises
        return (disabled if _compiles() else plain)(self, func, types, args, kwargs)

    return dispatch


def _compiles() -> bool:
    """Whether torch.compile may trace here: all of it is loaded, and it looks at calls."""
    if torch.compiler.is_compiling():  # a constant where it traces this itself, after a break in its graph
        return True
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None or getattr(compiler.__spec__, "_initializing", False):
        return False
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
