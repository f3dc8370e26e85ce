"""Whether the numbers that an optimizer is given make sense."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Container
from numbers import Real
from typing import Any

import torch
from torch import Tensor

# From which to which a number may be, and whether it may be the one and the other.
RANGES: dict[str, tuple[float, float, str]] = {
    "lr": (0, math.inf, "[)"),
    "momentum": (0, 1, "[]"),
    "b1": (0, 1, "[)"),
    "b2": (0, 1, "[)"),
    "eps": (0, math.inf, "[)"),
    "weight_decay": (0, math.inf, "[)"),
    "clip": (0, math.inf, "()"),
    "least": (0, math.inf, "[)"),
    "limit": (0, math.inf, "()"),
    "peak": (0, math.inf, "[)"),
    "end": (0, math.inf, "[)"),
    "scale": (0, math.inf, "()"),
    "growth": (1, math.inf, "[)"),
    "backoff": (0, 1, "(]"),
}
DECAYS = {"adafactor": (-math.inf, 0.0, "(]"), "ema": (0.0, 1.0, "[]")}


def check(name: str, numbers: dict[str, Any], rules: Container[str] = ("weight_decay",)) -> None:
    """Raises TypeError or ValueError for what is not a number, or is out of its range.

    Args:
        name: of what it is given to.
        numbers: by name. The learning rate may also be a tensor of one number, or a function of the step.
        rules: those that may be functions of a parameter's path and shape.
    """
    for key, value in numbers.items():
        if key in ("nesterov", "donate"):
            if not isinstance(value, bool):
                raise TypeError(f"{name}: {key}={_short(value)} is {kind(value)}; it is True or False")
        elif callable(value) and not isinstance(value, type) and (key == "lr" or key in rules):
            continue
        elif not isinstance(value, Tensor):
            in_range(name, key, value)
        elif key != "lr":
            raise TypeError(f"{name}: {key} is a tensor; only lr may be one, and have a gradient: pass {key}.item()")
        elif value.ndim or not value.is_floating_point():
            shape = tuple(value.shape)
            raise ValueError(f"{name}: lr is a tensor of shape {shape}, {value.dtype}; it is one floating number")


def in_range(name: str, key: str, value: Any) -> None:
    """Raises TypeError for what is not a number, ValueError for one that is out of its range."""
    low, high, ends = DECAYS.get(name, RANGES["eps"]) if key == "decay" else RANGES[key]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {key}={_short(value)} is {kind(value)}; it is {_said(key, low, high, ends)}")
    x = float(value)
    if not (low <= x <= high) or (x == low and ends[0] == "(") or (x == high and ends[1] == ")"):
        raise ValueError(f"{name}: {key}={value!r}; it is {_said(key, low, high, ends)}")


def whole(name: str, key: str, value: Any, least: int) -> None:
    """Raises TypeError for what is not an integer, ValueError for one below the least."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {key}={_short(value)} is {kind(value)}; it is an integer of {least} or more")
    if value < least:
        raise ValueError(f"{name}: {key}={value!r}; it is {least} or more")


@functools.lru_cache(maxsize=4096)
def check_rule(name: str, found: tuple[tuple[str, Any], ...]) -> None:
    """The same for what rules said of a parameter."""
    for key, value in found:
        in_range(f"{name}: a rule for a parameter", key, value)


def constants(numbers: dict[str, Any]) -> dict[str, Any]:
    """Those that are neither schedules nor rules, which a state keeps."""
    return {name: value for name, value in numbers.items() if not callable(value)}


def at_step(value: Any, step: int) -> Any:
    """A learning rate, or what a schedule says of a step."""
    if not callable(value):
        return value
    found = value(step)
    if isinstance(found, Tensor):
        return found
    in_range(f"the schedule at step {step}", "lr", found)
    return found


def _said(key: str, low: float, high: float, ends: str) -> str:
    first = f"above {low:g}" if ends[0] == "(" else f"{low:g} or more"
    last = f"below {high:g}" if ends[1] == ")" else f"at most {high:g}"
    both = [part for part, end in ((first, low), (last, high)) if math.isfinite(end)]
    found = f"a number, {' and '.join(both)}"
    if key == "lr":
        return f"{found}, a tensor of one, or a function of the step"
    return f"{found}, or a function of a parameter's path and shape" if key == "weight_decay" else found


def kind(value: Any) -> str:
    """What a value is, in words."""
    if inspect.isfunction(value) or isinstance(value, torch.optim.Optimizer):
        name = value.__name__ if inspect.isfunction(value) else type(value).__name__
        return f"the function {name}" if inspect.isfunction(value) else f"torch's own {name}: see from_torch"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"of type {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, (str, bool, bytes, complex)) or value is None else "..."
