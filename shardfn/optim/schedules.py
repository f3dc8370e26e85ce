"""Learning rates as functions of the step number, which begins at 1.

A step number may be a 0-d tensor, as in a captured step; then the rate is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.optim.hyperparameters import check, whole

Schedule = Callable[[Any], Any]


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
    _check("warmup_cosine", peak, end, {"warmup": warmup, "steps": steps})

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


def linear(peak: float, *, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """A schedule: linear from 0 to `peak` over `warmup` steps, then linear down to `end` at step `steps`.

    Also called `warmup_linear`. Arguments, result and errors are those of `warmup_cosine`.

    Example:
        ``adamw(warmup_linear(3e-4, warmup=100, steps=10_000, end=3e-5))``
    """
    _check("linear", peak, end, {"warmup": warmup, "steps": steps})
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
    _check("wsd", peak, end, {"warmup": warmup, "decay": decay, "steps": steps})

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


def _check(name: str, peak: float, end: float, counts: dict[str, int]) -> None:
    check(name, {"peak": peak, "end": end})
    for key, value in counts.items():
        whole(name, key, value, 0)
    *parts, steps = counts.values()
    if sum(parts) > steps:
        kinds = " and ".join(list(counts)[:-1])
        raise ValueError(f"{name}: {sum(parts)} steps of {kinds} do not fit into steps={steps}")
