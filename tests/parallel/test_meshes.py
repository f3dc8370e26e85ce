"""One model on every mesh of four ranks or fewer: the loss and its gradient are those of one process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from examples import train_nd
from examples.train_nd import AXES, SIX, SPECS, Config, loss_fn
from shardfn.testing import World

CONFIG = Config(
    vocabulary=24, width=16, heads=4, layers=4, hidden=8, experts=4, capacity=3, group=2, context=16, batch=8, micro=2,
    dtype=torch.float64,
)  # fmt: skip
VARIANTS = {
    "experts with a capacity, ring": CONFIG,
    "experts without, Ulysses": replace(CONFIG, capacity=None, ring=False),
    "dense, sequence parallel": replace(CONFIG, experts=0, sequence=True),
}


def meshes(ranks: int) -> list[dict[str, int]]:
    """All meshes of the six axes with so many ranks."""
    every = itertools.product((1, 2, 4), repeat=len(AXES))
    return [dict(zip(AXES, sizes, strict=True)) for sizes in every if torch.tensor(sizes).prod() == ranks]


def batch(config: Config) -> Tensor:
    shape = (config.micro, config.batch // config.micro, config.context + 1)
    return torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(1))


def rows(tokens: Tensor) -> Tensor:
    return sf.local_slice(tokens, SIX.rows, dim=1)


def furthest(got: Any, wanted: Any) -> float:
    """The largest difference between two trees, relative to the largest number of each leaf."""
    pairs = zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


def gradients(ranks: int) -> dict[Any, Any]:
    """For each variant and mesh: how far loss, gradients, and parameters after a step, are from one process."""
    found: dict[Any, Any] = {}
    opt = so.chain(so.clip_by_global_norm(0.5), so.adamw(1e-2, weight_decay=0.1))
    plain = {}
    for name, config in VARIANTS.items():
        whole = sf.init(train_nd.init(config), 0)
        grads, loss = torch.func.grad_and_value(loss_fn)(whole, batch(config), config)
        trained, _ = opt.step(*optree.tree_map(torch.clone, (whole, grads)), opt.init(whole))
        plain[name] = loss.item(), grads, trained
    for sizes in meshes(ranks):
        mesh = sf.make_mesh(device="cpu", **sizes)
        for name, config in VARIANTS.items():
            placed = train_nd.strategy(config, mesh)
            params = sf.init_sharded(train_nd.init(config), 0, mesh, placed, specs=SPECS)

            @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
            def run(params: Any, tokens: Tensor, config: Config = config) -> Any:
                return sf.value_and_grad(loss_fn)(params, rows(tokens), config, SIX)

            loss, grads = run(params, batch(config))
            back = sf.unshard(grads)
            params, _ = opt.step(params, grads, opt.init(params))
            wanted = plain[name]
            found[name, str(sizes)] = (
                abs(loss.item() / wanted[0] - 1), furthest(back, wanted[1]), furthest(sf.unshard(params), wanted[2])
            )  # fmt: skip
    return found


@pytest.mark.parametrize("world", [(n, "processes") for n in (1, 2, 4)], indirect=True, ids=["1", "2", "4"])
def test_the_loss_and_its_gradient_do_not_depend_on_the_mesh(world: World) -> None:
    for found in world.within(300).run(gradients, world.size):
        assert len(found) == len(VARIANTS) * {1: 1, 2: 6, 4: 21}[world.size]
        wrong = {cell: worst for cell, worst in found.items() if not max(worst) < 1e-12}
        assert not wrong
