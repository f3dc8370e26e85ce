"""Modules that are built without memory for their parameters."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

LARGE = 2**24  # bytes
_MAP_NORESERVE = 0x4000  # of Linux; Python 3.11 has no name for it
_DRAWS = {
    Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_, Tensor.normal_,
    Tensor.random_, Tensor.uniform_,
}  # fmt: skip


class _Cheap(TorchFunctionMode):
    """Draws no numbers for tensors that cannot have them, and takes no memory for large ones until it is written to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and sys.platform == "linux":
            return _promised(func, args, kwargs)
        if func in _DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


def _promised(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Zeros, or anything; a large one in memory that the system has not promised, as it would refuse to do."""
    if set(kwargs) - {"size", "dtype", "requires_grad"} or torch.get_default_device().type != "cpu":
        return func(*args, **kwargs)
    like = func(*args, **kwargs, device="meta")
    if like.nbytes < LARGE:
        return func(*args, **kwargs)
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    made = torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
    return made.requires_grad_(like.requires_grad)


@contextlib.contextmanager
def meta() -> Iterator[None]:
    """Inside the block, modules that this thread builds have their parameters on the device `meta`.

    A module of any kind, torch's own, one of `transformers` or yours, then knows shapes and dtypes, but takes neither
    memory nor time for random numbers. Buffers that `__init__` computes, such as rotary frequencies and position
    indices, are real, which they would not be inside `torch.device("meta")`. A parameter has memory only until it is
    assigned to its module, and not even then if it is made by `torch.empty` or `torch.zeros`, as most of them are.

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
        with _Cheap():
            yield
    finally:
        hook.remove()
