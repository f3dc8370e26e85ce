"""Optimizers that users write: what has no gradient is left out, together with what is remembered of it."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import world
from tests.models import distance
from tests.reference import worst

OWN = so.Optimizer(lambda params: (), lambda params, grads, state: (so.map_trained(torch.sub, params, grads), state))


def with_momentum() -> so.Optimizer:
    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        params, m = so.map_trained(lambda p, g, m: (p - 0.1 * (m + g), m + g + p), params, grads, state["m"])
        return params, {"m": m, "step": state["step"] + 1}

    return so.Optimizer(lambda params: {"m": optree.tree_map(torch.ones_like, params), "step": 0}, step)


def whole() -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, Any] = {"a": {"w": (5, 3), "b": (3,)}, "frozen": {"w": (4,)}, "none": {"w": (3, 3)}}
    return {
        stage: {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in own.items()}
        for stage, own in shapes.items()
    } | {"ids": {"n": torch.arange(4)}}


def trained(momentum: bool, plain: bool) -> tuple[float, bool]:
    optimizer = with_momentum() if momentum else OWN
    params = whole()
    if not plain:
        mesh = sf.make_mesh(shard=-1, device="cpu")
        params = sf.shard(params, mesh, sf.full_shard("shard"), frozen=["frozen.*"])
    state = optimizer.init(params)
    for _ in range(3):
        grads = optree.tree_map(lambda x: x.sin() if x.is_floating_point() else None, params)
        for name in ("frozen", "none"):
            grads[name] = optree.tree_map(lambda _: None, grads[name])
        params, state = optimizer.step(params, grads, state)
    read = (lambda tree: tree) if plain else sf.unshard
    found, want = read(params), whole()
    stayed = all(found[name]["w"].equal(want[name]["w"]) for name in ("frozen", "none"))
    if momentum:
        stayed &= bool(read(state["m"])["none"]["w"].eq(1).all())
    m = optree.tree_map(torch.ones_like, want["a"])
    for _ in range(3):
        for name, p in want["a"].items():
            g = p.sin()
            want["a"][name] = p - 0.1 * (m[name] + g) if momentum else p - g
            m[name] = m[name] + g + p
    return distance(found["a"], want["a"]), stayed and found["ids"]["n"].equal(torch.arange(4))


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_rule_leaves_out_what_has_no_gradient(momentum: bool, plain: bool) -> None:
    for ranks in (1, 2):
        found = world(ranks).run(trained, momentum, plain)
        assert worst(distance for distance, _ in found) < 1e-15
        assert all(stayed for _, stayed in found)
