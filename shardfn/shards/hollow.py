"""Tensors without data from functions that would make some with data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Shapes(TorchFunctionMode):
    """A mode in which new tensors have no data, on the meta device, and random ops need no generator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        if arguments.get("device") is not None:
            arguments["device"] = "meta"
        return func(*args, **arguments)


def drawn(make: Callable[[torch.Generator], Any], what: str, caller: str) -> Any:
    """Returns what a maker returns, on the device meta.

    Raises:
        ValueError: the maker reads data.
    """
    try:
        with torch.device("meta"), _Shapes():
            return make(torch.Generator())
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{caller}: the maker of {what} cannot run without numbers ({str(error).partition(chr(10))[0]}): pass "
            f"tensors of the shapes and dtypes that it makes, torch.empty(..., device='meta')"
        ) from error
