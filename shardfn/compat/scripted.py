"""Functions of TorchScript, in whose gradients torch leaves tangents out.

It does so from their second call on, without an error (torch 2.13).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_PLAIN: Any = {kind: kind.__call__ for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)}
_lock = threading.Lock()
_inside: list[None] = []  # one for each context that threads are in; the last ends it


@contextlib.contextmanager
def written_in_python() -> Iterator[None]:
    """A context in which the function that was scripted is called in place of the script, as no mode sees the call.

    What has no such function, a method or a trace, raises RuntimeError where its gradient is taken.
    """
    with _lock:
        _inside.append(None)
        for kind, original_call in _PLAIN.items():
            kind.__call__ = _calling(original_call)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            for kind, original_call in _PLAIN.items() if not _inside else ():
                kind.__call__ = original_call


def _calling(original_call: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (function := getattr(self, "_torchdynamo_inline", None)) is not None:
            return function(*args, **kwargs)
        moving = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.requires_grad)
        if torch.is_grad_enabled() and any(True for _ in moving):
            raise RuntimeError(
                f"a gradient inside of shardfn.jvp, as in a Hessian-vector product, goes through {self.name}, of "
                f"TorchScript: torch leaves tangents out of its gradient. Call the function or module that was "
                f"scripted or traced"
            )
        return original_call(self, *args, **kwargs)

    return call
