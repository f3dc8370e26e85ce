"""Stages that call stages inside: each is gathered once in forward and once in backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import World
from tests.models import distance, normal

WIDTH, BLOCKS, INSIDE = 4, 3, 3


def dense(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"]) @ p["w"]


def stacked(tree: Any, x: Tensor, stage: Any = lambda f: f) -> Tensor:
    """A loss of blocks with layers inside; `tree` has the weights of each by name."""
    inner = stage(dense)

    def block(p: Any, x: Tensor, i: int) -> Tensor:
        x = torch.tanh(x @ p["w"])
        for j in range(INSIDE):
            x = inner(tree[f"{i}.{j}"], x)
        return x @ p["w"]

    outer = stage(block)
    for i in range(BLOCKS):
        x = outer(tree[f"{i}"], x, i)
    return x.square().mean()


def gathers(prefetch: int, remat: bool) -> tuple[Counter[bool], float]:
    """How often stages were gathered in forward and in backward, and the distance of the gradient from one process."""
    mesh = sf.make_mesh(shard=2)
    names = [f"{i}{inside}" for i in range(BLOCKS) for inside in ("", *(f".{j}" for j in range(INSIDE)))]
    whole = {name: {"w": normal(WIDTH, WIDTH, seed=k)} for k, name in enumerate(names)}
    params = {name: sf.shard({name: w}, mesh, sf.full_shard("shard"))[name] for name, w in whole.items()}
    x = normal(2, WIDTH, seed=99)

    def loss(params: Any) -> Tensor:
        return sf.pmean(stacked(params, x, lambda f: sf.stage(f, prefetch=prefetch, remat=remat)), "shard")

    step = sf.shard_map(sf.grad(loss), mesh=mesh, in_specs=..., out_specs=...)
    for _ in range(2):
        step(params)
    with sf.collectives.ledger() as log:
        gradient = step(params)
    counts = Counter((record.stage, record.backward) for record in log.records if "gather" in record.op)
    assert max(counts.values()) == 1 or remat, counts  # a function that runs again calls its stages again
    want = torch.func.grad(lambda tree: stacked(tree, x))(whole)
    return Counter(backward for _, backward in counts), distance(sf.unshard(gradient, mesh), want)


@pytest.mark.world(2, "threads")
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("remat", [False, True])
def test_nested_stages_are_gathered_once_each_way(world: World, prefetch: int, remat: bool) -> None:
    for counts, apart in world.run(gathers, prefetch, remat):
        assert apart < 1e-12
        assert counts[False] == BLOCKS * (1 + INSIDE)
        assert counts[True] <= counts[False] or remat
