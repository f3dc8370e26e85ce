"""Errors for `nn.Module` arguments where a pure function of parameters is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def refuse_module(where: str, f: Any) -> None:
    """Raises TypeError for a module with trainable parameters, which a step would not train."""
    if isinstance(f, nn.Module) and any(p.requires_grad for p in f.parameters()):
        raise TypeError(_not_a_function(where, f))


def module_told(where: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a module so that a failing call explains that a function of parameters is needed; returns others unchanged.

    A module may be differentiated with respect to its inputs, and its forward may take parameters. So it is an error
    only if the call fails.
    """
    if not isinstance(f, nn.Module) or not any(True for _ in f.parameters()):
        return f

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return f(*args, **kwargs)
        try:
            return f(*args, **kwargs)
        except (TypeError, AttributeError, KeyError) as error:
            raise TypeError(f"{_not_a_function(where, f)}. The call raised {type(error).__name__}: {error}") from error

    return call


def _not_a_function(where: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return (
        f"{where}: {kind} is a module, which has parameters of its own, and not a function of its parameters: write "
        f"model = shardfn.interop.functional(module), and pass a function that calls model(params, x)"
    )
