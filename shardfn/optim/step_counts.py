"""Each parameter's own count of steps, by which optimizers correct their means; learning rates go by the step number.

A state has under `"missed"`, by path, in how many of its steps a parameter had no gradient. Parameters that had one in
every step are left out: while all train together there is nothing in it, and it costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from shardfn.shards.pieces import Unit, runs, spread

Missed = dict[str, Any]


def missed_after(missed: Missed, rows: Iterable[tuple[Unit, Tensor | None]]) -> Missed:
    """The steps that parameters have missed, after a step with these gradients."""
    without = [path for unit, grad in rows if unit.trainable and grad is None for _, path, _ in spread(unit)]
    return missed | {path: missed.get(path, 0) + 1 for path in without} if without else missed


def missed_key(missed: Missed, path: str) -> int | str:
    """A key that is equal for parameters that are known to have missed as many steps: the number, or else the path."""
    number = missed.get(path, 0)
    return path if isinstance(number, Tensor) else number  # to compare tensors the host would wait for the device


def count_spans(unit: Unit, count: Any, missed: Missed) -> list[tuple[Any, int, int]]:
    """The fewest ranges of a unit in which all parameters have made as many steps: `(count, start, stop)`."""
    if not missed:
        return [(count, 0, unit.values.numel())]
    ranges = runs(unit, lambda segment: missed_key(missed, segment.path))
    return [(count - (missed[key] if isinstance(key, str) else key), start, stop) for key, start, stop in ranges]
