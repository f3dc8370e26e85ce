"""Modules that are built without memory for their parameters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary


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
        yield
    finally:
        hook.remove()
