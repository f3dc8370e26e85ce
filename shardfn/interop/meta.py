"""Modules that are built without memory for their parameters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

_DRAWS = {
    Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_, Tensor.normal_,
    Tensor.random_, Tensor.uniform_,
}  # fmt: skip


class _NothingDrawn(TorchFunctionMode):
    """Leaves out drawing numbers for tensors that cannot have them, which torch takes milliseconds for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


@contextlib.contextmanager
def meta() -> Iterator[None]:
    """Inside the block, modules that this thread builds have their parameters on the device `meta`.

    A module of any kind, torch's own, one of `transformers` or yours, then knows shapes and dtypes, but takes neither
    memory nor time for random numbers. Buffers that `__init__` computes, such as rotary frequencies and position
    indices, are real, which they would not be inside `torch.device("meta")`. A parameter may have memory only until it
    is assigned to its module; `torch.empty`, which makes most of them, takes none until it is written to.

    A module that reads the values of its parameters while it is built cannot be built here: torch raises an error.
    Buffers that are computed from parameters are on `meta` too, until `load` finds them in the files. What is built
    after the block is as usual: a new head, say, whose values `load(..., strict=False)` keeps.

    Example:
        ``with interop.meta(): module = transformers.LlamaForCausalLM(config)``
    """
    thread, known = threading.get_ident(), WeakTensorKeyDictionary()

    def without_values(module: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or p.is_meta or type(p) is not nn.Parameter:
            return None  # among these are lazy ones, of which nothing is known yet
        if p not in known:  # two names for one parameter stay one
            made = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            vars(made).update(vars(p))
            known[p] = made
        return known[p]

    hook = register_module_parameter_registration_hook(without_values)  # type: ignore[arg-type]
    try:
        with _NothingDrawn():
            yield
    finally:
        hook.remove()
