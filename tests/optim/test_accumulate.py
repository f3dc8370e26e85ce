"""Sums of many gradients over several steps: in which dtype, and what the optimizer gets of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import world

EVERY, ONE = 256, 1.5 * 2.0**-8  # in 16 bits the sum stops growing long before all have been added
WRAPPED: dict[str, Callable[[], so.Optimizer]] = {
    "plain": lambda: so.multi_steps(so.sgd(1.0), EVERY),
    "of masters": lambda: so.multi_steps(so.fp32_master_weights(so.sgd(1.0)), EVERY),
    "within master": lambda: so.fp32_master_weights(so.multi_steps(so.sgd(1.0), EVERY)),
}


def summed(name: str, dtype: torch.dtype) -> float:
    mesh = sf.make_mesh(shard=-1, device="cpu")

    def made(x: float) -> Any:
        return sf.shard({"a": {"w": torch.full((4,), x, dtype=dtype)}}, mesh, sf.full_shard("shard"))

    optimizer, params, grads = WRAPPED[name](), made(0.0), made(ONE)
    state = optimizer.init(params)
    for _ in range(EVERY):
        params, state = optimizer.step(params, grads, state)
    return float(sf.unshard(params)["a"]["w"][3])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WRAPPED)
def test_sums_of_16_bit_gradients_are_exact(name: str, dtype: torch.dtype, ranks: int) -> None:
    assert world(ranks).run(summed, name, dtype) == [-EVERY * ONE] * ranks


@pytest.mark.parametrize(
    ("own", "asked", "kept"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.complex64, None, torch.complex64),
        (torch.complex64, torch.float64, torch.complex64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_dtype_of_sums(own: torch.dtype, asked: torch.dtype | None, kept: torch.dtype) -> None:
    optimizer = so.multi_steps(so.sgd(0.5), 2, accumulator_dtype=asked)
    params, grads = ({"w": torch.ones(2, 3, dtype=own)} for _ in range(2))
    state = optimizer.init(params)
    assert state["sum"]["w"].dtype == kept
    for _ in range(4):
        params, state = optimizer.step(params, grads, state)
        assert state["sum"]["w"].dtype == kept
    assert params["w"].dtype == own
    assert params["w"].equal(torch.full((2, 3), -1.0, dtype=own))


@pytest.mark.parametrize("wrong", [torch.int32, torch.complex64, "float32", 32])
def test_other_dtypes_of_sums_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="multi_steps: accumulator_dtype must be a real floating-point dtype"):
        so.multi_steps(so.sgd(0.5), 2, accumulator_dtype=wrong)
