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


OPTIMIZER = so.chain(so.clip_by_global_norm(0.5), so.adamw(1e-2, weight_decay=0.1))


def a_step_on(sizes: Sizes, params: Any, state: Any) -> tuple[dict[str, float], Any, Any]:
    """A step of training on a mesh, from whole parameters and state, and back to whole ones.

    And how far from one process: whether what came is there bit for bit, loss, gradient, parameters and state after.
    """
    tokens, mesh = batch(CONFIG), sf.make_mesh(device="cpu", **sizes)
    grads, loss = torch.func.grad_and_value(loss_fn)(params, tokens, CONFIG)
    local, clip, adam = placed(params, CONFIG, mesh), state[0], dict(state[1])
    for name in ("mean", "square"):
        adam[name] = placed(adam[name], CONFIG, mesh)
    same = all(map(torch.equal, *map(tensors, (sf.unshard((local, adam)), (params, state[1])))))
    value, gradient = mapped(lambda p: sf.value_and_grad(loss_here)(p, tokens, CONFIG), mesh)(local)
    found = {
        "came": float(not same),
        "loss": abs(value.item() / loss.item() - 1),
        "gradient": furthest(sf.unshard(gradient), grads),
    }
    wanted = OPTIMIZER.step(*(optree.tree_map(copied, tree) for tree in (params, grads, state)))
    params, state = sf.unshard(OPTIMIZER.step(local, gradient, (clip, adam)))
    found["after"] = furthest(tensors((params, state[1])), tensors((wanted[0], wanted[1][1])))
    return found, params, state


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@pytest.mark.parametrize("world", [(n, "processes") for n in (1, 2, 4)], indirect=True, ids=["1", "2", "4"])
def test_training_goes_on_from_mesh_to_mesh(world: World) -> None:
    params = sf.init(train_nd.init(CONFIG), 0)
    state: Any = OPTIMIZER.init(params)
    every = meshes(world.size)
    assert len(every) == {1: 1, 2: 6, 4: 21}[world.size]
    for sizes in every:
        ranks = world.run(a_step_on, sizes, params, state)
        for found, *_ in ranks:
            assert not {what: worst for what, worst in found.items() if not worst < 1e-12}, sizes
        _, params, state = ranks[0]


def gradients(sizes: Sizes, config: Config) -> float:
    whole, mesh = sf.init(train_nd.init(config), 0), sf.make_mesh(device="cpu", **sizes)
    wanted = torch.func.grad(loss_fn)(whole, batch(config), config)
    gradient = mapped(lambda p: sf.grad(loss_here)(p, batch(config), config), mesh)(placed(whole, config, mesh))
    return furthest(sf.unshard(gradient), wanted)


def assert_all(world: World, f: Any, config: Config, every: list[Sizes], count: int) -> None:
    assert len(every) == count
    for sizes in every:  # one a run, which ends its process groups: those of all at once are thousands of threads
        assert max(world.run(f, sizes, config)) < 1e-12, sizes


@pytest.mark.world(4)
def test_experts_without_a_capacity_and_exchanged_heads_on_every_mesh_that_has_any(world: World) -> None:
    config = replace(CONFIG, capacity=None, ring=False)
    assert_all(world, gradients, config, with_any(4, "context", "expert"), 11)


@pytest.mark.world(4)
def test_sequence_parallelism_on_every_mesh_that_cuts_matrices(world: World) -> None:
    config = replace(CONFIG, experts=0, sequence=True)
    assert_all(world, gradients, config, with_any(4, "tensor"), 6)


def curvature(sizes: Sizes, config: Config) -> float:
    """Hessian-vector products."""
    whole, along = sf.init(train_nd.init(config), 0), sf.init(train_nd.init(config), 1)
    tokens, mesh = batch(config), sf.make_mesh(device="cpu", **sizes)

    def product(loss: Any, params: Any, along: Any) -> Any:
        return torch.func.jvp(lambda p: sf.grad(loss)(p, tokens, config), (params,), (along,))[1]

    got = mapped(lambda p, v: product(loss_here, p, v), mesh)(*(placed(x, config, mesh) for x in (whole, along)))
    return furthest(sf.unshard(got), product(loss_fn, whole, along))


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_hessian_vector_products(world: World) -> None:
    pairs = [{"tensor", "pipe"}, {"context", "expert"}, {"shard", "pipe"}, {"replica", "tensor"}]
    every = meshes(2) if world.size == 2 else [s for s in meshes(4) if {a for a in AXES if s[a] > 1} in pairs]
    assert_all(world, curvature, replace(CONFIG, micro=1, batch=4), every, {2: 6, 4: 4}[world.size])


def of_each_sample(sizes: Sizes, config: Config) -> float:
    whole, samples = sf.init(train_nd.init(config), 0), batch(config)[0]
    mesh = sf.make_mesh(device="cpu", **sizes)

    def each(loss: Any, params: Any) -> Any:
        return torch.func.vmap(lambda row: sf.grad(loss)(params, row[None, None], config))(samples)

    got = mapped(lambda p: each(loss_here, p), mesh)(placed(whole, config, mesh))
    return furthest(torch.func.vmap(sf.unshard)(got), each(loss_fn, whole))


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_gradients_of_each_sample_where_all_ranks_work_on_the_same_samples(world: World) -> None:
    every = only(world.size, "tensor", "context", "pipe")
    assert_all(world, of_each_sample, replace(CONFIG, micro=1, batch=3), every, {2: 3, 4: 6}[world.size])
