"""States that belong to other parameters than those of the step: names tell them apart where shapes do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import World

OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "adamw": lambda: so.adamw(0.1),
    "adamw8bit": lambda: so.adamw8bit(0.1),
    "lamb": lambda: so.lamb(0.1),
    "adafactor": lambda: so.adafactor(0.1),
    "shampoo": lambda: so.shampoo(0.1),
    "muon": lambda: so.muon(0.1),
    "accumulate": lambda: so.multi_steps(so.sgd(0.1), 3),
    "masked": lambda: so.masked(so.adamw(0.1), ".*"),
    "ema": lambda: so.ema(so.sgd(0.1), 0.9),
    "torch's": lambda: so.from_torch(torch.optim.RMSprop, lr=0.1),
}


def tree(how: str, names: str) -> Any:
    whole = {name: torch.ones(4, 4) for name in names}
    if how == "plain":
        return whole
    mesh, strategy = sf.make_mesh(shard=-1, device="cpu"), sf.full_shard("shard")
    return sf.shard({"s": whole} if how == "in one stage" else whole, mesh, strategy)


def refused(name: str, how: str) -> str:
    optimizer, params = OPTIMIZERS[name](), tree(how, "ab")
    params, state = optimizer.step(params, tree(how, "ab"), optimizer.init(params))
    try:
        optimizer.step(tree(how, "cd"), tree(how, "cd"), state)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["plain", "in stages of their own", "in one stage"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_parameters_of_other_names_is_an_error(world: World, name: str, how: str) -> None:
    for message in world.run(refused, name, how):
        assert "of other parameters" in message
        assert "a" in message.partition("of other parameters")[2]
