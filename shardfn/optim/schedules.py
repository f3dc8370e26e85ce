"""Learning rates as functions of the step, which begins at 1."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardfn.optim.ranges import check, whole

Schedule = Callable[[int], float]


def warmup_cosine(peak: float, *, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """From 0 up to `peak` in a line over `warmup` steps, then down to `end` in half a cosine, reached at `steps`.

    Sources: Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts (2017), equation 5.
    """
    _check("warmup_cosine", peak, end, {"warmup": warmup, "steps": steps})

    def rate(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        done = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return end + (peak - end) * (1 + math.cos(math.pi * done)) / 2

    return rate


def linear(peak: float, *, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """From 0 up to `peak` in a line over `warmup` steps, then down to `end` in a line, reached at `steps`."""
    _check("linear", peak, end, {"warmup": warmup, "steps": steps})
    return wsd(peak, warmup=warmup, decay=steps - warmup, steps=steps, end=end)


def wsd(peak: float, *, warmup: int, decay: int, steps: int, end: float = 0.0) -> Schedule:
    """Warm up, stay, decay: up to `peak` over `warmup` steps, and down to `end` over the last `decay` of `steps`.

    Sources: Hu et al., MiniCPM (2024), section 4.2.
    """
    _check("wsd", peak, end, {"warmup": warmup, "decay": decay, "steps": steps})

    def rate(step: int) -> float:
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
        raise ValueError(
            f"{name}: {sum(parts)} steps of {' and '.join(list(counts)[:-1])} do not fit into steps={steps}"
        )
