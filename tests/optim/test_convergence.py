"""Few bits learn what float32 does: a small model of text, trained with each recipe, on data that it has not seen."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so

CONTEXT, WIDTH, HIDDEN, STEPS, BATCH = 8, 16, 128, 200, 128


@functools.cache
def text() -> Tensor:
    """Bytes of modules of the standard library."""
    names = ("argparse.py", "ast.py", "inspect.py", "typing.py", "tarfile.py")
    every = b"".join((Path(os.__file__).parent / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(every), dtype=torch.uint8).long()


def rows(seed: int, n: int, held_out: bool) -> Tensor:
    """`[n, CONTEXT + 1]` bytes; the last tenth of the text is held out."""
    split = len(text()) * 9 // 10
    low, high = (split, len(text()) - CONTEXT - 1) if held_out else (0, split - CONTEXT - 1)
    start = torch.randint(low, high, (n,), generator=torch.Generator().manual_seed(seed))
    return text()[start[:, None] + torch.arange(CONTEXT + 1)]


def loss(p: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(p["embed"][x[:, :-1]].flatten(1) @ p["in"] + p["bias"])
    return F.cross_entropy((hidden @ p["out"]).float(), x[:, -1])


def drawn() -> Any:
    normal = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return {
        "embed": normal(256, WIDTH) / 4,
        "in": normal(CONTEXT * WIDTH, HIDDEN) / (CONTEXT * WIDTH) ** 0.5,
        "bias": torch.zeros(HIDDEN),
        "out": normal(HIDDEN, 256) / HIDDEN**0.5,
    }


def final(optimizer: so.Optimizer, dtype: torch.dtype) -> float:
    """The loss on what is held out, in float32, after training."""
    ps = optree.tree_map(lambda x: x.to(dtype), drawn())
    state = optimizer.init(ps)
    for step in range(STEPS):
        grads = sf.grad(loss)(ps, rows(step, BATCH, held_out=False))
        ps, state = optimizer.step(ps, grads, state)
    return loss(optree.tree_map(torch.Tensor.float, ps), rows(1_000_000, 8192, held_out=True)).item()


def rate(step: int) -> float:
    return 3e-3 * min(1.0, 2 - 2 * step / (STEPS + 1))


@functools.cache
def in_float32(kind: str) -> float:
    return final(so.lion(lambda step: rate(step) * 2 / 3) if kind == "lion" else so.adamw(rate), torch.float32)


RECIPES: dict[str, tuple[Callable[[], so.Optimizer], torch.dtype]] = {
    "adamw8bit": (lambda: so.adamw8bit(rate), torch.float32),
    "lion8bit": (lambda: so.lion8bit(lambda step: rate(step) * 2 / 3), torch.float32),
    "adamw, state in bfloat16": (lambda: so.adamw(rate, state_dtype=torch.bfloat16), torch.float32),
    "a master": (lambda: so.fp32_master_weights(so.adamw(rate)), torch.bfloat16),
    "a master of 8 bits": (lambda: so.fp32_master_weights(so.adamw8bit(rate)), torch.bfloat16),
    "all in bfloat16": (lambda: so.stochastic_rounding(so.adamw(rate, state_dtype=torch.bfloat16)), torch.bfloat16),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_final_loss_is_within_half_a_percent_of_that_in_float32(name: str) -> None:
    make, dtype = RECIPES[name]
    want = in_float32("lion" if "lion" in name else "adamw")
    assert want < 3.0, "of 5.5 at first"
    assert final(make(), dtype) < want * 1.005


def test_without_either_bfloat16_parameters_learn_less() -> None:
    assert final(so.adamw(rate), torch.bfloat16) > in_float32("adamw") * 1.005
