"""Hyperparameters of optimizers: range checks, schedules (functions of the step) and rules (functions of a parameter).

The step number begins at 1. It may be a 0-d tensor, as in a captured step; then what a schedule returns is one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Container, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.quoting import advised

Schedule = Callable[[Any], Any]
"""A hyperparameter for each step: a function of the step number, which begins at 1."""
Rule = Callable[[str, tuple[int, ...]], Any]
"""A value for each parameter: a function of its path, such as `blocks.0.attn.q`, and its whole shape. As a
hyperparameter it returns a number or a schedule."""
Hyperparameter = float | Schedule | Rule
# Lower bound, upper bound, and whether each bound is included, as interval brackets.
NOT_NEGATIVE = "lr", "eps", "weight_decay", "least", "min_trust_ratio", "peak", "end", "tolerance"
POSITIVE = "gamma", "ridge", "exponent", "damping", "initial", "clip", "max_trust_ratio", "limit", "scale", "rate"
RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(NOT_NEGATIVE, (0, math.inf, "[)")),
    **dict.fromkeys(POSITIVE, (0, math.inf, "()")),
    **dict.fromkeys(("b1", "b2"), (0, 1, "[)")),
    "momentum": (0, 1, "[]"),
    "growth_factor": (1, math.inf, "[)"),
    "backoff_factor": (0, 1, "(]"),
}
_CALLS = "state = optimizer.init(params), and params, state = optimizer.step(params, grads, state)"
_OTHER = "write shardfn.optim.from_torch(torch.optim.AdamW, lr=1e-3, ...), which takes what that class takes"
made_of_numbers = advised(
    {
        "params": f"an optimizer is made without parameters, and gets them by {_CALLS}",
        "betas": "betas=(0.9, 0.95) is b1=0.9, b2=0.95 here",
        "learning_rate": "write lr=",
        **dict.fromkeys(("fused", "foreach", "capturable"), "leave it out: fused kernels are used where there are any"),
        **dict.fromkeys(("amsgrad", "maximize", "dampening", "differentiable"), _OTHER),
    },
    f"an optimizer is made of numbers by name, as in adamw(1e-3, weight_decay=0.1), and gets parameters by {_CALLS}",
)
"""Wraps a function that makes an optimizer, for errors about the arguments that torch's have."""
DECAYS = {"adafactor": (-math.inf, 0.0, "(]"), "ema": (0.0, 1.0, "[]")}


def check(name: str, numbers: dict[str, Any], functions: Container[str] = ("lr", "weight_decay")) -> None:
    """Raises TypeError for a value that is not a number, ValueError for one out of its range.

    Args:
        name: the function that was given the numbers.
        numbers: by argument name. The learning rate may also be a 0-d tensor.
        functions: the arguments that may be functions of the step, or of a parameter's path and shape.
    """
    for key, value in numbers.items():
        if key in ("nesterov", "graft", "donate"):
            if not isinstance(value, bool):
                raise TypeError(f"{name}: {key} must be True or False, got {_typed_text(value)}")
        elif callable(value) and not isinstance(value, (type, nn.Module)) and key in functions:
            if not (is_rule(key, value) or _takes(value, 1)):
                raise _no_number(f"{name}: ", key, f"a function of {inspect.signature(value)}")
        elif key == "lr" and isinstance(value, Mapping):
            raise _no_number(f"{name}: ", key, kind(value))
        elif not isinstance(value, Tensor):
            in_range(name, key, value)
        elif key != "lr":
            raise TypeError(f"{name}: {key} is a tensor; only lr may be one, and have a gradient: pass {key}.item()")
        elif value.ndim or not value.is_floating_point():
            shape = tuple(value.shape)
            raise ValueError(f"{name}: lr must be one floating number, got a tensor of shape {shape}, {value.dtype}")


def is_rule(key: str, value: Any) -> bool:
    """Whether a value is a function of a parameter's path and shape, rather than a number or a function of the step.

    One that can be called in both ways is a schedule as a learning rate, and a rule as any other number.
    """
    return callable(value) and _takes(value, "", (), unknown=False) and not (key == "lr" and _takes(value, 1))


def _takes(function: Callable[..., Any], *args: Any, unknown: bool = True) -> bool:
    """Whether a function can be called with these arguments; one written in C may have no signature."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:
        return unknown
    return True


def _no_number(where: str, key: str, got: str) -> TypeError:
    return TypeError(
        f"{where}{key} must be a number{', a 0-d tensor' * (key == 'lr')}, a function of the step, or a function of a "
        f"parameter's path and shape, got {got}. For rates by parameter pass for example "
        f"lr=lambda path, shape: 1e-3 if 'head' in path else 1e-4"
    )


def in_range(name: str, key: str, value: Any) -> None:
    """Raises TypeError for a value that is not a number, ValueError for one out of its range."""
    low, high, ends = DECAYS.get(name, RANGES["eps"]) if key == "decay" else RANGES[key]
    if isinstance(value, bool) or not isinstance(value, Real):
        instead = f". The optimizer gets parameters by {_CALLS}" if key == "lr" and _short(value) == "..." else ""
        raise TypeError(f"{name}: {key} must be {_allowed(key, low, high, ends)}, got {_typed_text(value)}{instead}")
    x = float(value)
    if not (low <= x <= high) or (x == low and ends[0] == "(") or (x == high and ends[1] == ")"):
        raise ValueError(f"{name}: {key} must be {_allowed(key, low, high, ends)}, got {value!r}")


def check_integer(name: str, key: str, value: Any, minimum: int) -> None:
    """Raises TypeError for a value that is not an integer, ValueError for one below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {key} must be an integer of {minimum} or more, got {_typed_text(value)}")
    if value < minimum:
        raise ValueError(f"{name}: {key} must be an integer of {minimum} or more, got {value!r}")


@functools.lru_cache(maxsize=4096, typed=True)
def _check_rule(path: str, key: str, value: Any) -> None:
    """As `in_range`, for the number that a rule returns for a parameter."""
    in_range(f"{path}: a rule for a parameter", key, value)


def constants(numbers: dict[str, Any]) -> dict[str, Any]:
    """The numbers that are neither schedules nor rules; a state keeps these."""
    return {name: value for name, value in numbers.items() if not callable(value)}


def begun(numbers: dict[str, Any], state: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the next step's number and its hyperparameters; a rule is a function to the number of this step."""
    count = state["step"] + 1
    return count, {key: at_step(key, value, count) for key, value in (numbers | state["numbers"]).items()}


def at_step(key: str, value: Any, step: Any) -> Any:
    """A hyperparameter at a step: the number, what a schedule returns, or a rule whose schedules are called.

    A schedule gets a step that is a tensor as float64.

    Raises:
        TypeError: the step is a tensor, and a schedule returns a number all the same.
        ValueError: a schedule returns a number out of its range.
    """
    if not callable(value):
        return value
    return RuleAtStep(key, value, step) if is_rule(key, value) else _schedule_value(key, value, step)


class RuleAtStep:
    """A rule `(path, shape) -> number` at one step, which calls the schedules that the given rule returns."""

    def __init__(self, key: str, rule: Callable[..., Any], step: Any) -> None:
        self.key, self.rule, self.step = key, rule, step
        self._numbers: dict[Any, Any] = {}
        self._schedules: dict[int, tuple[Schedule, Any]] = {}  # by identity, as equal numbers share kernels

    def __call__(self, path: str, shape: Any) -> Any:
        """The number of a parameter."""
        if (path, shape) not in self._numbers:
            self._numbers[path, shape] = self._number(path, self.rule(path, shape))
        return self._numbers[path, shape]

    def scheduled(self, path: str, shape: Any) -> bool:
        """Whether the number of a parameter may change with the step."""
        return callable(self.rule(path, shape))

    def _number(self, path: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise TypeError(f"the rule of {self.key} must give a number or a schedule, got a tensor for {path}")
        if not callable(value):
            if self.key in RANGES and not isinstance(value, tuple):  # of torch's classes some take pairs
                _check_rule(path, self.key, value)
            return value
        if id(value) not in self._schedules:
            self._schedules[id(value)] = value, _schedule_value(self.key, value, self.step)
        number = self._schedules[id(value)][1]
        if isinstance(number, Tensor) and number.requires_grad:
            raise TypeError(
                f"the rule of {self.key} gives {path} a tensor that needs a gradient: only a learning rate that all "
                f"parameters share may have one. Pass number.item()"
            )
        return number


def _schedule_value(key: str, schedule: Schedule, step: Any) -> Any:
    try:
        number = schedule(step.double() if isinstance(step, Tensor) else step)
    except (TypeError, AttributeError) as error:
        if isinstance(step, Tensor):  # which a schedule of the step's number may not take
            raise
        raise _no_number("", key, f"{kind(schedule)}, which raised {type(error).__name__}: {error}") from error
    if isinstance(number, Tensor):
        return number
    if isinstance(step, Tensor):  # the number belongs to this step, and a captured step would keep it
        raise TypeError(
            f"the schedule was given the step number as a tensor, and returned {kind(number)}: compute the number by "
            f"operations of torch, such as torch.where, or pass a schedule of shardfn.optim or a number"
        )
    if key in RANGES:
        in_range(f"the schedule at step {step}", key, number)
    return number


def _allowed(key: str, low: float, high: float, ends: str) -> str:
    """Describes the values that an argument may have."""
    first = f"above {low:g}" if ends[0] == "(" else f"of {low:g} or more"
    last = f"below {high:g}" if ends[1] == ")" else f"at most {high:g}"
    bounds = [part for part, end in ((first, low), (last, high)) if math.isfinite(end)]
    text = f"a number {' and '.join(bounds)}"
    if key in ("lr", "weight_decay"):
        return (
            f"{text}, {'a 0-d tensor, ' * (key == 'lr')}or a function of the step, or of a parameter's path and shape"
        )
    return text


def kind(value: Any) -> str:
    """Describes a value's type."""
    if inspect.isfunction(value) or isinstance(value, torch.optim.Optimizer):
        name = value.__name__ if inspect.isfunction(value) else type(value).__name__
        return f"the function {name}" if inspect.isfunction(value) else f"torch's own {name}: see from_torch"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _typed_text(value: Any) -> str:
    """A value with its type; of a long value the type alone."""
    text = _short(value)
    return text if value is None else kind(value) if text == "..." else f"{text}, {kind(value)}"


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, (str, bool, bytes, complex, float)) or value is None else "..."


# --- learning rates as functions of the step number ---


def warmup_cosine(peak: float, *, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """A schedule: linear from 0 to `peak` over `warmup` steps, then half a cosine down to `end`.

    Args:
        peak: the learning rate at step `warmup`, 0 or more.
        warmup: steps, 0 or more.
        steps: steps of the whole run, at least `warmup`; after them the rate stays at `end`.
        end: the learning rate at step `steps`, 0 or more.

    Returns:
        A function of the step number.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range.

    Sources: Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts (2017), equation 5.

    Example:
        ``adamw(warmup_cosine(3e-4, warmup=100, steps=10_000))``
    """
    _check_schedule("warmup_cosine", peak, end, {"warmup": warmup, "steps": steps})

    def rate(step: Any) -> Any:
        if isinstance(step, Tensor):
            progress_there = ((step - warmup) / max(steps - warmup, 1)).clamp(max=1.0)
            falling = end + (peak - end) * (1 + torch.cos(math.pi * progress_there)) / 2
            return torch.where(step < warmup, peak * step / max(warmup, 1), falling)
        if step < warmup:
            return peak * step / warmup
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2

    return rate


def warmup_linear(peak: float, *, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """A schedule: linear from 0 to `peak` over `warmup` steps, then linear down to `end` at step `steps`.

    Arguments, result and errors are those of `warmup_cosine`.

    Example:
        ``adamw(warmup_linear(3e-4, warmup=100, steps=10_000, end=3e-5))``
    """
    _check_schedule("warmup_linear", peak, end, {"warmup": warmup, "steps": steps})
    return wsd(peak, warmup=warmup, decay=steps - warmup, steps=steps, end=end)


def wsd(peak: float, *, warmup: int, decay: int, steps: int, end: float = 0.0) -> Schedule:
    """A warmup-stable-decay schedule: linear to `peak`, constant, linear to `end` over the last `decay` steps.

    Args:
        peak: the learning rate between warmup and decay, 0 or more.
        warmup: steps, 0 or more.
        decay: steps, 0 or more.
        steps: steps of the whole run, at least `warmup + decay`; after them the rate stays at `end`.
        end: the last learning rate, 0 or more.

    Returns:
        A function of the step number.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range.

    Sources: Hu et al., MiniCPM (2024), section 4.2.

    Example:
        ``adamw(wsd(3e-4, warmup=100, decay=2000, steps=10_000))``
    """
    _check_schedule("wsd", peak, end, {"warmup": warmup, "decay": decay, "steps": steps})

    def rate(step: Any) -> Any:
        if isinstance(step, Tensor):
            rest = (steps - step).clamp(min=0)
            falling = torch.where(rest >= decay, peak, end + (peak - end) * rest / max(decay, 1))
            return torch.where(step < warmup, peak * step / max(warmup, 1), falling)
        if step < warmup:
            return peak * step / warmup
        left = max(steps - step, 0)
        return peak if left >= decay else end + (peak - end) * left / decay

    return rate


def _check_schedule(name: str, peak: float, end: float, counts: dict[str, int]) -> None:
    check(name, {"peak": peak, "end": end})
    for key, value in counts.items():
        check_integer(name, key, value, 0)
    *parts, steps = counts.values()
    if sum(parts) > steps:
        kinds = " and ".join(list(counts)[:-1])
        raise ValueError(f"{name}: {sum(parts)} steps of {kinds} do not fit into steps={steps}")
