"""Writing in place into what a stage's backward needs: an error, as in plain torch, or no harm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn.testing import World
from tests.models import block, distance, everyone
from tests.stages.setting import Setting, on_threads, rows_of, staged

pytestmark = pytest.mark.usefixtures("threads_on_one_core")

# --- in place ---


def refused_or(call: Callable[[], Any], right: Callable[[], bool] = lambda: False) -> bool:
    """Whether a call is refused in torch's words, or else everything is right."""
    try:
        call()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return right()


def overwritten_input() -> Any:
    """Writing into a tensor that a stage's backward needs is an error, as in plain torch, or does no harm."""
    s, found = Setting(), []
    joint = everyone(lambda p, k: block(p, rows_of(k)).square().sum(), s.n)
    want = torch.func.grad(joint)(s.plain["blocks"][0])
    for options in ({}, {"remat": True}):
        x = rows_of(s.rank).requires_grad_() * 1
        y = staged(block, **options)(s.leaves["blocks"][0], x)
        x.mul_(3)
        found.append(refused_or(y.square().sum().backward, lambda: distance(s.collected()["blocks"][0], want) < 1e-12))
        found.append(s.clean_step() < 1e-12)
    return found


@on_threads
def test_an_input_that_is_overwritten_before_backward(world: World) -> None:
    for found in world.run(overwritten_input):
        assert all(found), found


def overwritten_output() -> Any:
    """Of a stage whose backward needs its output, as tanh does."""
    s, found = Setting(), []
    joint = everyone(lambda p, k: (3 * torch.tanh(rows_of(k) @ p["w"])).square().sum(), s.n)
    want = torch.func.grad(joint)(s.plain["blocks"][0])

    def tripled(y: Tensor) -> None:
        y.mul_(3).square().sum().backward()

    for options in ({}, {"remat": True}):
        f = staged(lambda p, x: torch.tanh(x @ p["w"]), **options)
        y = f(s.leaves["blocks"][0], rows_of(s.rank))
        found.append(refused_or(partial(tripled, y), lambda: distance(s.collected()["blocks"][0], want) < 1e-12))
        s.collected()
        found.append(s.clean_step() < 1e-12)
    return found


@on_threads
def test_an_output_that_is_overwritten(world: World) -> None:
    for found in world.run(overwritten_output):
        assert all(found), found
