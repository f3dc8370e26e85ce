"""The main job is the same training run on every mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardfn as sf
from examples import train_lm
from shardfn.testing import world

TINY = train_lm.Config(
    width=16, heads=2, layers=2, hidden=24, context=16, batch=8, warmup=3, dtype=torch.float64, clip=0.5
)
STEPS = 6


STRATEGIES = ["ddp", "zero1", "zero2", "full_shard", "hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz", "mics"]


def losses(sizes: dict[str, int], seed: int, strategy: str) -> list[float]:
    text = torch.frombuffer(bytearray(b"def f(x):\n    return x + 1\n" * 40), dtype=torch.uint8)
    mesh = sf.make_mesh(device="cpu", **sizes)
    run = train_lm.train(TINY, mesh, (text, text.flip(0)), STEPS, seed, placement(strategy))
    return [*run.losses, run.validation]


def placement(strategy: str) -> sf.Placement:
    return sf.strategy(strategy, shard="shard", replica="replica")


def on(sizes: dict[str, int], seed: int = 0, strategy: str = "hybrid_shard") -> list[float]:
    ranks = sizes["replica"] * sizes["shard"]
    first, *others = world(ranks).run(losses, sizes, seed, strategy)
    assert all(other == first for other in others), "an invariant loss is the same bits on every rank"
    return first


@pytest.mark.parametrize(("replica", "shard"), [(1, 2), (2, 1), (1, 4), (4, 1), (2, 2)])
def test_the_curve_does_not_depend_on_the_mesh(replica: int, shard: int) -> None:
    alone = torch.tensor(on({"replica": 1, "shard": 1}), dtype=torch.float64)
    cut = torch.tensor(on({"replica": replica, "shard": shard}), dtype=torch.float64)
    assert alone[STEPS - 1] < alone[0] - 0.1, "nothing was learnt"
    assert ((cut - alone).abs() / alone).max() < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_curve_does_not_depend_on_the_strategy(strategy: str) -> None:
    alone = torch.tensor(on({"replica": 1, "shard": 1}), dtype=torch.float64)
    cut = torch.tensor(on({"replica": 2, "shard": 2}, strategy=strategy), dtype=torch.float64)
    assert ((cut - alone).abs() / alone).max() < 1e-12


def test_the_seed_decides_the_curve() -> None:
    sizes = {"replica": 1, "shard": 2}
    assert on(sizes, seed=1) == on(sizes, seed=1)
    assert on(sizes, seed=1) != on(sizes, seed=2)


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    def body() -> tuple[float, float]:
        params = train_lm.init(TINY, 0)
        tokens = torch.randint(256, (8, TINY.context + 1), generator=torch.Generator().manual_seed(0))
        mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
        loss = sf.shard_map(
            lambda params, tokens: train_lm.loss_fn(params, tokens, TINY),
            mesh=mesh,
            in_specs=(..., sf.P(train_lm.DATA)),
            out_specs=sf.P(),
            inputs="global",
        )
        logits = train_lm.model(params, tokens[:, :-1], TINY)
        alone = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        cut = sf.shard(params, mesh, sf.hybrid_shard("shard", "replica"))
        return loss(cut, tokens).item(), alone.item()

    for sharded, alone in world(4).run(body):
        assert abs(sharded - alone) < 1e-12


def test_a_batch_that_the_mesh_does_not_divide_is_refused_on_every_rank() -> None:
    def body() -> None:
        mesh = sf.make_mesh(replica=1, shard=2, device="cpu")
        text = torch.zeros(500, dtype=torch.uint8)
        train_lm.train(replace(TINY, batch=3), mesh, (text, text), 1, 0, placement("hybrid_shard"))

    for error in world(2).errors(body):
        assert isinstance(error, ValueError)
        assert "3 does not divide by 2" in str(error)
