"""Steps for tests of programs, graphed and compiled: on stages, and of one rank on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from tests.models import drawn

WIDTH, LAYERS = 8, 3


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"] + p["b"]) @ p["down"]


def whole(dtype: torch.dtype = torch.float64) -> Any:
    draw = drawn(0, 0.5)
    shapes = {"up": (WIDTH, 5), "b": (5,), "down": (5, WIDTH)}
    return {"blocks": [{name: draw(*shape).to(dtype) for name, shape in shapes.items()} for _ in range(LAYERS)]}


def data(i: int = 0, rows: int = WIDTH, device: str = "cpu") -> Tensor:
    return (torch.arange(rows, dtype=torch.float64) / 10 + i).to(device)


def spoiled(*steps: int) -> so.Transform:
    """Makes gradients infinite in these steps, counted from 0."""

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        device = optree.tree_leaves(grads)[0].device
        bad = torch.stack([torch.as_tensor(state, device=device) == k for k in steps]).any()
        factor = torch.where(bad, math.inf, 1.0)
        return optree.tree_map(lambda g: g * factor, grads), state + 1

    return so.Transform(lambda params: 0, update)


def toy(
    wrap: Any, device: str, more: Callable[..., Any] = lambda w, x: 0, optimizer: so.Optimizer | None = None
) -> tuple[Any, Any, Any]:
    """A step on plain tensors, `(params, state, x, ...) -> (params, state, loss)`, with parameters and state."""
    made = optimizer or so.sgd(0.1)
    params = {"w": torch.full((WIDTH,), 0.5, dtype=torch.float64).to(device)}

    def step(params: Any, state: Any, x: Tensor, *rest: Any) -> Any:
        value, grads = sf.value_and_grad(lambda p, x: (p["w"] * x).square().sum())(params, x)
        value = value + more(params["w"], x, *rest)
        params, state = made.step(params, grads, state)
        return params, state, value

    return wrap(step, mesh=sf.make_mesh(shard=1, device=device)), params, made.init(params)


def repeated(
    wrap: Any, device: str, more: Callable[..., Any], rest: Callable[[int], tuple[Any, ...]] = lambda i: (),
    calls: int = 6, **options: Any,
) -> Any:  # fmt: skip
    """The losses of several steps, or the error."""
    step, params, state = toy(wrap, device, more, **options)
    losses = []
    for i in range(calls):
        params, state, value = step(params, state, data(i, device=device), *rest(i))
        losses.append(value)
    return [x.item() for x in losses]


# --- what no program can hold ---


def counter(wrap: Any, device: str = "cpu") -> Any:
    calls: list[int] = []

    def more(w: Tensor, x: Tensor) -> Any:
        calls.append(1)
        return w.sum() * (0.1 * len(calls))

    return repeated(wrap, device, more)


def alternating(wrap: Any, device: str = "cpu") -> Any:
    calls: list[int] = []

    def more(w: Tensor, x: Tensor) -> Any:
        calls.append(1)
        return w.sin().sum() if len(calls) % 2 else w.cos().sum()

    return repeated(wrap, device, more)


def powers(wrap: Any, device: str = "cpu") -> Any:
    run = wrap(lambda w, n: (w * 2**-n, n + 1), mesh=sf.make_mesh(shard=1, device=device))
    w, n = data(device=device), 1
    for _ in range(5):
        w, n = run(w, n)


def used_again(wrap: Any, device: str = "cpu") -> Any:
    step, params, state = toy(wrap, device, optimizer=so.sgd(0.1, momentum=0.9))
    for i in range(4):
        old = params
        params, state, _ = step(params, state, data(i, device=device))
    return old["w"] + 1
