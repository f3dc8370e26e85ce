"""Steps with parameters, gradients and state in the memory of a pretended accelerator's host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.shards.pieces import is_unit
from shardfn.testing import simulated, world
from tests.models import layer
from tests.optimizers import optimizers_named

ALL = ("params", "grads", "state")
OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    **optimizers_named("adamw, adamw in bfloat16, adamw8bit, muon, soap, adafactor, lamb"),
    "torch's": lambda: so.from_torch(torch.optim.RMSprop, lr=1e-2),
}


staged = sf.stage(layer)


def loss(ps: Any, x: Tensor) -> Tensor:
    for p in sf.layers(ps["blocks"]):
        x = staged(p, x)
    return x.sum()


def steps(kinds: tuple[str, ...], name: str) -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """On which devices parameters, gradients and state are after three steps; what the host waited for in the last."""
    with simulated(ranks=8) as device:
        where = kept(device, kinds, OPTIMIZERS[name]())
        return where, {(wait.kind, wait.where.split("/")[-1].split(":")[0]) for wait in device.synchronizations}


def kept(device: Any, kinds: tuple[str, ...], optimizer: so.Optimizer) -> dict[str, set[str]]:
    mesh = sf.make_mesh(shard=8, device=device.name)
    whole = {"blocks": [{"w": torch.randn(64, 64), "b": torch.zeros(64)} for _ in range(4)]}
    tiers: dict[str, Any] = dict.fromkeys(kinds, "host")
    params = sf.shard(whole, mesh, sf.full_shard("shard").with_tiers(**tiers))
    state, x, grads = optimizer.init(params), torch.randn(8, 64, device=device.name), None
    for number in range(3):
        if number == 2:
            device.reset_counts()
        _, grads = sf.value_and_grad(loss)(params, x)
        params, state = optimizer.step(params, grads, state)
    found = {"params": params, "grads": grads, "state": state}
    return {
        kind: {node.values.device.type for node in optree.tree_leaves(tree, is_leaf=is_unit) if is_unit(node)}
        for kind, tree in found.items()
    }


@pytest.mark.parametrize("kinds", [("params",), ("grads",), ("state",), ALL], ids="+".join)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_kept_on_the_host_is_there_after_steps(name: str, kinds: tuple[str, ...]) -> None:
    ((where, _),) = world(1, "alone").run(steps, kinds, name)
    for kind, devices in where.items():
        assert devices <= {"cpu" if kind in kinds else "sim"}, kind


WAITS = {
    "params": {"transfers.py", "streaming.py"},  # copies of what the step overwrites; new parameters
    "grads": {"offload.py", "streaming.py"},
    "state": {"streaming.py"},
    "params+grads+state": {"transfers.py", "offload.py"},  # the step is the host's own
}


@pytest.mark.parametrize("kinds", WAITS)
def test_the_host_waits_for_what_it_reads_and_for_nothing_else(kinds: str) -> None:
    ((_, waits),) = world(1, "alone").run(steps, tuple(kinds.split("+")), "adamw")
    assert waits == {("synchronize", file) for file in WAITS[kinds]}
