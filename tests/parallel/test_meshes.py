"""One model on every mesh of four ranks or fewer: loss, derivatives and training are those of one process."""

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
Sizes = dict[str, int]


def meshes(ranks: int) -> list[Sizes]:
    """All meshes of the six axes with so many ranks."""
    every = itertools.product((1, 2, 4), repeat=len(AXES))
    return [dict(zip(AXES, sizes, strict=True)) for sizes in every if torch.tensor(sizes).prod() == ranks]


def with_any(ranks: int, *axes: str) -> list[Sizes]:
    """Those that cut one of these axes."""
    return [sizes for sizes in meshes(ranks) if any(sizes[axis] > 1 for axis in axes)]


def only(ranks: int, *axes: str) -> list[Sizes]:
    """Those that cut no other axis."""
    return [sizes for sizes in meshes(ranks) if all(sizes[axis] == 1 for axis in AXES if axis not in axes)]


def batch(config: Config) -> Tensor:
    shape = (config.micro, config.batch // config.micro, config.context + 1)
    return torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(1))


def rows(tokens: Tensor) -> Tensor:
    return sf.local_slice(tokens, SIX.rows, dim=1)


def loss_here(params: Any, tokens: Tensor, config: Config) -> Tensor:
    return loss_fn(params, rows(tokens), config, SIX)


def placed(whole: Any, config: Config, mesh: Any) -> Any:
    return sf.shard(whole, mesh, train_nd.strategy(config, mesh), specs=SPECS)


def mapped(f: Any, mesh: Any) -> Any:
    return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)


def furthest(got: Any, wanted: Any) -> float:
    """The largest difference between two trees, relative to the largest number of each leaf."""
    pairs = zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


def from_mesh_to_mesh(ranks: int) -> dict[str, tuple[float, ...]]:
    """A training run that goes on to another mesh after each step.

    For each: whether what came is there bit for bit, and how far loss, gradient, parameters and optimizer state are
    from what one process makes of the same.
    """
    opt = so.chain(so.clip_by_global_norm(0.5), so.adamw(1e-2, weight_decay=0.1))
    params, tokens = sf.init(train_nd.init(CONFIG), 0), batch(CONFIG)
    state: Any = opt.init(params)
    found: dict[str, tuple[float, ...]] = {}
    for sizes in meshes(ranks):
        grads, loss = torch.func.grad_and_value(loss_fn)(params, tokens, CONFIG)
        mesh = sf.make_mesh(device="cpu", **sizes)
        local, clip, adam = placed(params, CONFIG, mesh), state[0], dict(state[1])
        for name in ("mean", "square"):
            adam[name] = placed(adam[name], CONFIG, mesh)
        came = sf.unshard((local, adam))
        same = all(map(torch.equal, *map(tensors, (came, (params, state[1])))))
        value, gradient = mapped(lambda p, t: sf.value_and_grad(loss_here)(p, t, CONFIG), mesh)(local, tokens)
        difference = furthest(sf.unshard(gradient), grads)
        wanted = opt.step(*(optree.tree_map(copied, tree) for tree in (params, grads, state)))
        params, state = sf.unshard(opt.step(local, gradient, (clip, adam)))
        found[str(sizes)] = (
            float(not same),
            abs(value.item() / loss.item() - 1),
            difference,
            furthest(tensors((params, state[1])), tensors((wanted[0], wanted[1][1]))),
        )
    return found


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@pytest.mark.parametrize("world", [(n, "processes") for n in (1, 2, 4)], indirect=True, ids=["1", "2", "4"])
def test_training_goes_on_from_mesh_to_mesh(world: World) -> None:
    for found in world.within(200).run(from_mesh_to_mesh, world.size):
        assert len(found) == {1: 1, 2: 6, 4: 21}[world.size]
        wrong = {cell: worst for cell, worst in found.items() if not max(worst) < 1e-12}
        assert not wrong


def gradients(config: Config, every: list[Sizes]) -> dict[str, float]:
    whole = sf.init(train_nd.init(config), 0)
    wanted = torch.func.grad(loss_fn)(whole, batch(config), config)
    found = {}
    for sizes in every:
        mesh = sf.make_mesh(device="cpu", **sizes)
        gradient = mapped(lambda p: sf.grad(loss_here)(p, batch(config), config), mesh)(placed(whole, config, mesh))
        found[str(sizes)] = furthest(sf.unshard(gradient), wanted)
    return found


@pytest.mark.world(4)
def test_experts_without_a_capacity_and_exchanged_heads_on_every_mesh_that_has_any(world: World) -> None:
    config = replace(CONFIG, capacity=None, ring=False)
    for found in world.within(100).run(gradients, config, with_any(4, "context", "expert")):
        assert len(found) == 11
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


@pytest.mark.world(4)
def test_sequence_parallelism_on_every_mesh_that_cuts_matrices(world: World) -> None:
    config = replace(CONFIG, experts=0, sequence=True)
    for found in world.within(100).run(gradients, config, with_any(4, "tensor")):
        assert len(found) == 6
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


def curvature(config: Config, every: list[Sizes]) -> dict[str, float]:
    """Hessian-vector products."""
    whole, along = sf.init(train_nd.init(config), 0), sf.init(train_nd.init(config), 1)
    tokens, found = batch(config), {}

    def product(loss: Any, params: Any, along: Any) -> Any:
        return torch.func.jvp(lambda p: sf.grad(loss)(p, tokens, config), (params,), (along,))[1]

    wanted = product(loss_fn, whole, along)
    for sizes in every:
        mesh = sf.make_mesh(device="cpu", **sizes)
        got = mapped(lambda p, v: product(loss_here, p, v), mesh)(*(placed(x, config, mesh) for x in (whole, along)))
        found[str(sizes)] = furthest(sf.unshard(got), wanted)
    return found


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_hessian_vector_products(world: World) -> None:
    pairs = [{"tensor", "pipe"}, {"context", "expert"}, {"shard", "pipe"}, {"replica", "tensor"}]
    every = meshes(2) if world.size == 2 else [s for s in meshes(4) if {a for a in AXES if s[a] > 1} in pairs]
    for found in world.within(100).run(curvature, replace(CONFIG, micro=1, batch=4), every):
        assert len(found) == (6 if world.size == 2 else 4)
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


def of_each_sample(config: Config, every: list[Sizes]) -> dict[str, float]:
    whole, samples = sf.init(train_nd.init(config), 0), batch(config)[0]
    found = {}

    def each(loss: Any, params: Any) -> Any:
        return torch.func.vmap(lambda row: sf.grad(loss)(params, row[None, None], config))(samples)

    wanted = each(loss_fn, whole)
    for sizes in every:
        mesh = sf.make_mesh(device="cpu", **sizes)
        got = mapped(lambda p: each(loss_here, p), mesh)(placed(whole, config, mesh))
        back = torch.func.vmap(sf.unshard)(got)
        found[str(sizes)] = furthest(back, wanted)
    return found


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_gradients_of_each_sample_where_all_ranks_work_on_the_same_samples(world: World) -> None:
    every = only(world.size, "tensor", "context", "pipe")
    for found in world.within(100).run(of_each_sample, replace(CONFIG, micro=1, batch=3), every):
        assert len(found) == (3 if world.size == 2 else 6)
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}
