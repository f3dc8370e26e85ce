"""Checks of the numbers that an optimizer is given."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Container
from numbers import Real
from typing import Any

import torch
from torch import Tensor

# Lower bound, upper bound, and whether each bound is included, as interval brackets.
NOT_NEGATIVE = "lr", "eps", "weight_decay", "least", "peak", "end", "tolerance"
POSITIVE = "gamma", "ridge", "exponent", "damping", "initial", "clip", "limit", "scale", "rate"
RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(NOT_NEGATIVE, (0, math.inf, "[)")),
    **dict.fromkeys(POSITIVE, (0, math.inf, "()")),
    **dict.fromkeys(("b1", "b2"), (0, 1, "[)")),
    "momentum": (0, 1, "[]"),
    "growth": (1, math.inf, "[)"),
    "backoff": (0, 1, "(]"),
}
DECAYS = {"adafactor": (-math.inf, 0.0, "(]"), "ema": (0.0, 1.0, "[]")}


def check(name: str, numbers: dict[str, Any], rules: Container[str] = ("weight_decay",)) -> None:
    """Raises TypeError for a value that is not a number, ValueError for one out of its range.

    Args:
        name: the function that was given the numbers.
        numbers: by argument name. The learning rate may also be a 0-d tensor, or a function of the step.
        rules: the arguments that may be functions of a parameter's path and shape.
    """
    for key, value in numbers.items():
        if key in ("nesterov", "graft", "donate"):
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
    """Raises TypeError for a value that is not a number, ValueError for one out of its range."""
    low, high, ends = DECAYS.get(name, RANGES["eps"]) if key == "decay" else RANGES[key]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {key}={_short(value)} is {kind(value)}; it is {_allowed(key, low, high, ends)}")
    x = float(value)
    if not (low <= x <= high) or (x == low and ends[0] == "(") or (x == high and ends[1] == ")"):
        raise ValueError(f"{name}: {key}={value!r}; it is {_allowed(key, low, high, ends)}")


def whole(name: str, key: str, value: Any, least: int) -> None:
    """Raises TypeError for a value that is not an integer, ValueError for one below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {key}={_short(value)} is {kind(value)}; it is an integer of {least} or more")
    if value < least:
        raise ValueError(f"{name}: {key}={value!r}; it is {least} or more")


@functools.lru_cache(maxsize=4096)
def check_rule(name: str, numbers: tuple[tuple[str, Any], ...]) -> None:
    """As `in_range`, for the numbers that rules return for a parameter."""
    for key, value in numbers:
        in_range(f"{name}: a rule for a parameter", key, value)


def constants(numbers: dict[str, Any]) -> dict[str, Any]:
    """The numbers that are neither schedules nor rules; a state keeps these."""
    return {name: value for name, value in numbers.items() if not callable(value)}


def begun(numbers: dict[str, Any], state: Any) -> tuple[Any, dict[str, Any]]:
    """The number of the step that begins, and its numbers: rules, what the state keeps, and this step's rate."""
    count, now = state["step"] + 1, numbers | state["numbers"]
    return count, now | {"lr": at_step(now["lr"], count)}


def at_step(value: Any, step: Any) -> Any:
    """A learning rate, or what a schedule returns for a step; one that is a tensor it gets as float64.

    Raises:
        TypeError: the step is a tensor, and the schedule returns a number all the same.
        ValueError: the rate is out of its range.
    """
    if not callable(value):
        return value
    rate = value(step.double() if isinstance(step, Tensor) else step)
    if isinstance(rate, Tensor):
        return rate
    if isinstance(step, Tensor):  # the number belongs to this step, and a captured step would keep it
        raise TypeError(
            f"the schedule was given the step number as a tensor, and returned {kind(rate)}: compute the rate by "
            f"operations of torch, such as torch.where in place of if, or take a schedule of shardfn.optim; for a rate "
            f"that never changes, pass the number itself"
        )
    in_range(f"the schedule at step {step}", "lr", rate)
    return rate


def _allowed(key: str, low: float, high: float, ends: str) -> str:
    """Describes the values that an argument may have."""
    first = f"above {low:g}" if ends[0] == "(" else f"{low:g} or more"
    last = f"below {high:g}" if ends[1] == ")" else f"at most {high:g}"
    bounds = [part for part, end in ((first, low), (last, high)) if math.isfinite(end)]
    text = f"a number, {' and '.join(bounds)}"
    if key == "lr":
        return f"{text}, a tensor of one, or a function of the step"
    return f"{text}, or a function of a parameter's path and shape" if key == "weight_decay" else text


def kind(value: Any) -> str:
    """Describes a value's type."""
    if inspect.isfunction(value) or isinstance(value, torch.optim.Optimizer):
        name = value.__name__ if inspect.isfunction(value) else type(value).__name__
        return f"the function {name}" if inspect.isfunction(value) else f"torch's own {name}: see from_torch"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"of type {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, (str, bool, bytes, complex, float)) or value is None else "..."
