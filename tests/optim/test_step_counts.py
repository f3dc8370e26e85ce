"""Step counts that are tensors, as in captured steps: the same rates and updates as with numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn.optim as so
from tests.models import blocks, distance

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": so.warmup_cosine(3e-2, warmup=3, steps=9, end=1e-3),
    "cosine, no warmup": so.warmup_cosine(3e-2, warmup=0, steps=9),
    "linear": so.warmup_linear(3e-2, warmup=3, steps=9, end=1e-3),
    "wsd": so.wsd(3e-2, warmup=3, decay=4, steps=9),
    "wsd, no decay": so.wsd(3e-2, warmup=3, decay=0, steps=9),
    "own": lambda step: 0.1 / step,
}
OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "sgd": lambda: so.sgd(SCHEDULES["own"], momentum=0.9),
    "adam": lambda: so.adam(SCHEDULES["cosine"]),
    "adam, pure": lambda: so.adam(SCHEDULES["wsd"], donate=False),
    "adamw": lambda: so.adamw(SCHEDULES["linear"]),
    "lion": lambda: so.lion(SCHEDULES["cosine"]),
    "muon": lambda: so.masked(so.muon(SCHEDULES["own"]), lambda path, shape: len(shape) == 2, so.adamw(1e-2)),
    "adamw8bit": lambda: so.adamw8bit(SCHEDULES["cosine"]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_same_rate_for_a_tensor(name: str) -> None:
    schedule = SCHEDULES[name]
    for step in range(1, 14):
        rate = schedule(torch.tensor(float(step), dtype=torch.float64))
        assert rate.dtype == torch.float64
        assert rate.item() == pytest.approx(schedule(step), rel=1e-15, abs=1e-18)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_counted_by_a_tensor_are_the_same(name: str) -> None:
    optimizer, found = OPTIMIZERS[name](), []
    for count in (0, torch.tensor(0)):
        params = blocks(2)
        state = counted(optimizer.init(params), count)
        for i in range(5):
            params, state = optimizer.step(
                params, [{k: x.sin() * (i + 1) for k, x in p.items()} for p in params], state
            )
        found.append(params)
    assert distance(found[0], found[1]) < 1e-15


def counted(state: Any, count: Any) -> Any:
    """A state whose steps are counted from this."""
    if not isinstance(state, dict):
        return state
    return {key: count if key == "step" else counted(value, count) for key, value in state.items()}


def test_a_schedule_that_returns_a_number_for_a_tensor_is_refused() -> None:
    optimizer, params = so.sgd(lambda step: math.exp(-step)), blocks(1)
    optimizer.step(params, blocks(1), optimizer.init(params))
    with pytest.raises(TypeError, match="the schedule was given the step number as a tensor, and returned a float"):
        optimizer.step(params, blocks(1), counted(optimizer.init(params), torch.tensor(0)))


def test_random_rounding_is_refused_where_steps_are_counted_by_a_tensor() -> None:
    optimizer, params = so.adamw(1e-2, state_dtype=torch.bfloat16), blocks(1)
    with pytest.raises(TypeError, match="rounding at random draws from the step number, which the host must know"):
        optimizer.step(params, blocks(1), counted(optimizer.init(params), torch.tensor(0)))
