"""A step at a realistic size launches no more than its budget: a billion parameters a rank, by shape only."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import simulated, world
from tests.models import STRATEGIES

SIZES = {"replica": 2, "shard": 4}
LAYERS, TOKENS, PER_RANK = 4, 4096, 2**30

BUDGET = {
    "ddp": 130, "zero1": 119, "shard_grad_op": 127, "full_shard": 131, "hybrid_shard": 131, "hybrid_shard_zero2": 127,
    "hfsdp": 131, "hpz": 135, "mics": 131,
}  # fmt: skip
"""Operations on the device in a step of 4 stages of 3 parameters and clipped AdamW; a view or an allocation is none."""


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def width(placement: sf.Placement) -> int:
    """That of layers of which each rank holds a billion parameters."""
    cut = math.prod(SIZES[axis] for axis in placement.axes)
    return math.isqrt(PER_RANK * cut // (8 * LAYERS)) // 64 * 64


def launches() -> dict[str, dict[str, int]]:
    """Of each strategy: operations of a steady step, by name."""
    found = {}
    # Comparing whole parameters between ranks takes many operations, but not in a step.
    with (
        simulated(ranks=8) as device,
        mock.patch("shardfn.shards.sharding.checksum", return_value=0),
        sf.debug(memory=False),
    ):
        mesh = sf.make_mesh(**SIZES, device=device.name)
        for name, strategy in STRATEGIES.items():
            d = width(strategy)

            def empty(*shape: int) -> Tensor:
                return torch.empty(shape, device=device.name, dtype=torch.bfloat16)

            def layer(_: torch.Generator, d: int = d, empty: Any = empty) -> dict[str, Tensor]:
                return {"up": empty(d, 4 * d), "bias": empty(4 * d), "down": empty(4 * d, d)}

            params = sf.init_sharded([layer] * LAYERS, 0, mesh, strategy)
            optimizer = so.chain(so.clip_by_global_norm(1.0), so.adamw(1e-3))
            held = sum(p.values.numel() for p in params)
            assert 0.9 < held / PER_RANK < 1.1, (name, held)
            stage, state, x = sf.stage(block, remat=True), optimizer.init(params), empty(TOKENS, d)

            def loss(params: Any, x: Tensor, stage: Any = stage) -> Tensor:
                for p in sf.layers(params):
                    x = stage(p, x)
                return sf.pmean(x.float().square().mean(), ("replica", "shard"))

            run = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=...)
            for _ in range(3):
                device.reset_counts()
                params, state = optimizer.step(params, run(params, x)[1], state)
            found[name] = dict(device.operations)
    return found


def test_a_step_launches_no_more_than_its_budget() -> None:
    (found,) = world(1, "alone").with_deadline(120).run(launches)
    over = {name: ops for name, ops in found.items() if sum(ops.values()) > BUDGET[name]}
    assert not over, {name: (sum(ops.values()), BUDGET[name], ops) for name, ops in over.items()}
    assert set(found) == set(BUDGET)
