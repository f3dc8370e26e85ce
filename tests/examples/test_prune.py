"""Pruning is the same on any number of ranks, and second moments of inputs make it better."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from examples import prune, train_lm
from shardfn.testing import world

TINY = train_lm.Config(width=16, heads=2, layers=2, hidden=24, context=16, batch=8, warmup=3, dtype=torch.float64)


def pruned(shard: int) -> dict[str, float]:
    text = torch.frombuffer(bytearray(b"def f(x):\n    return x + 1\n" * 40), dtype=torch.uint8)
    mesh = sf.make_mesh(device="cpu", replica=1, shard=shard)
    return prune.run(TINY, mesh, (text, text), 20, sf.full_shard("shard"))


def test_losses_of_pruned_models_do_not_depend_on_the_mesh() -> None:
    wanted = world(1).with_deadline(100).run(pruned, 1)[0]
    assert wanted["trained"] < wanted["sparse_gpt"] < wanted["wanda"] < wanted["magnitude"]
    for found in world(2).with_deadline(100).run(pruned, 2):
        assert found == pytest.approx(wanted, rel=1e-8)


def test_a_quarter_of_a_row_is_left() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(5, 32, generator=draw).double(), torch.randn(100, 32, generator=draw).double()
    gram = inputs.T @ inputs / 100
    for way in (prune.magnitude, prune.wanda, prune.sparse_gpt):
        assert ((way(weight, gram) != 0).sum(1) == 8).all()
