"""Second moments of inputs and gradients: those of one process, on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import curvature as sc
from shardfn.testing import World
from tests.curvature.test_influence import Met, each, losses_of, mine, net, rows, whole
from tests.models import STRATEGIES, leaves, plainly, sharded_trees
from tests.reference import worst

SIZES = [pytest.param(n, marks=pytest.mark.world(n, "processes")) for n in (1, 2, 4)]
MATRICES = {"layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "head.w"}


def reference() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    t, y = (torch.cat(xs) for xs in zip(rows(0), rows(1), strict=True))
    met = Met()
    F.cross_entropy(net(plainly, whole(), t, met), y, reduction="sum").backward()
    vectors: Any = [(path, met.inputs[path].flatten(0, 1), met.added[path].grad) for path in MATRICES]
    inputs = {path: a.T @ a / len(a) for path, a, _ in vectors}
    return inputs, {path: (g := d.flatten(0, 1)).T @ g / len(g) for path, _, d in vectors}


def off(got: Any, want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    return max(float((got[k] - want[k]).abs().max() / want[k].abs().max()) for k in want)


def halved(path: str, weight: Tensor, gram: Tensor) -> Tensor:
    return weight @ gram + 1


def found(strategy: str) -> list[float]:
    mesh, params = sharded_trees(strategy, whole())
    G = sc.second_moments(losses_of(sf.stage), params, mine(mesh), outputs=True, fisher=True)
    inputs, outputs = reference()
    assert G.left_out == ("embed.e",)
    assert set(G.tokens.values()) == {2 * 8 * 3}
    got = [sf.unshard(tree) for tree in (G.inputs, G.outputs)]
    diagonal = leaves(sf.unshard(G.fisher))
    replaced = sf.unshard(G.replaced(halved))
    w = whole()
    wanted = {"a": w["layers"][1]["a"] @ inputs["layers.1.a"] + 1, "b": inputs["layers.1.b"] @ w["layers"][1]["b"] + 1,
              "g": w["layers"][1]["g"], "s": w["layers"][1]["s"]}  # fmt: skip
    return [
        off(got[0], inputs),
        off(got[1], outputs),
        off(diagonal, {path: g.square().mean(0) for path, g in each().items()}),
        off(replaced["layers"][1], wanted),
        off(replaced["embed"], w["embed"]),
    ]


@pytest.mark.parametrize("world", SIZES, indirect=True)
def test_moments_of_one_process(world: World) -> None:
    for told in world.run(found, "full_shard"):
        assert worst(told) < 1e-12, told


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy(world: World, strategy: str) -> None:
    for told in world.run(found, strategy):
        assert worst(told) < 1e-12, told
