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
from tests.models import distance

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


def axes_of(sizes: Sizes) -> set[str]:
    return {axis for axis in AXES if sizes[axis] > 1}


def batch(config: Config) -> Tensor:
    shape = (config.micro, config.batch // config.micro, config.context + 1)
    return torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(1))


def rows(tokens: Tensor) -> Tensor:
    return sf.collectives.local_slice(tokens, SIX.rows, dim=1)


def loss_here(params: Any, tokens: Tensor, config: Config) -> Tensor:
    return loss_fn(params, rows(tokens), config, SIX)


def placed(whole: Any, config: Config, mesh: Any) -> Any:
    return sf.shard(whole, mesh, train_nd.strategy(config, mesh), specs=SPECS)


def mapped(f: Any, mesh: Any) -> Any:
    return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)


def furthest(got: Any, wanted: Any) -> float:
    """The largest difference between two trees, relative to the largest number of each leaf."""
    return distance(optree.tree_leaves(got), optree.tree_leaves(wanted), floor=1e-3)


# With a large eps what is nearly nothing stays so: a smaller one would make its rounding as large as a step.
OPTIMIZER = so.chain(so.clip_by_global_norm(0.5), so.adamw(1e-2, eps=1e-5, weight_decay=0.1))


def a_step_on(sizes: Sizes, params: Any, state: Any) -> Any:
    """A step of training on a mesh, from whole parameters and state: what came, loss, gradient, and what is after."""
    tokens, mesh = batch(CONFIG), sf.make_mesh(device="cpu", **sizes)
    local, clip, adam = placed(params, CONFIG, mesh), state[0], dict(state[1])
    for name in ("mean", "square"):
        adam[name] = placed(adam[name], CONFIG, mesh)
    came = sf.unshard((local, adam))
    value, gradient = mapped(lambda p: sf.value_and_grad(loss_here)(p, tokens, CONFIG), mesh)(local)
    whole = sf.unshard(gradient)
    return came, value.item(), whole, sf.unshard(OPTIMIZER.step(local, gradient, (clip, adam)))


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
        gradient, loss = torch.func.grad_and_value(loss_fn)(params, batch(CONFIG), CONFIG)
        wanted = OPTIMIZER.step(*(optree.tree_map(copied, tree) for tree in (params, gradient, state)))
        ranks = world.run(a_step_on, sizes, params, state)
        for came, value, whole, after in ranks:
            assert all(map(torch.equal, *map(tensors, (came, (params, state[1]))))), sizes
            assert abs(value / loss.item() - 1) < 1e-12, sizes
            assert furthest(whole, gradient) < 1e-12, sizes
            assert furthest(*map(moving, (after, wanted))) < 1e-12, sizes
        params, state = ranks[0][3]


def moving(trained: Any) -> list[Tensor]:
    """Parameters and AdamW's memory."""
    params, (_, adam) = trained
    return tensors((params, adam))


def gradients(sizes: Sizes, config: Config) -> Any:
    whole, mesh = sf.init(train_nd.init(config), 0), sf.make_mesh(device="cpu", **sizes)
    return sf.unshard(mapped(lambda p: sf.grad(loss_here)(p, batch(config), config), mesh)(placed(whole, config, mesh)))


def assert_all(world: World, f: Any, config: Config, every: list[Sizes], count: int) -> None:
    """On each mesh what comes out on one process, whose mesh has one rank along each axis."""
    assert len(every) == count
    wanted = plain(f, config)
    for sizes in every:  # one a run, which ends its process groups: those of all at once are thousands of threads
        for got in world.run(f, sizes, config):
            assert furthest(got, wanted) < 1e-12, sizes


def plain(f: Any, config: Config) -> Any:
    """By torch.func alone, on whole parameters and without a mesh."""
    whole, along, tokens = sf.init(train_nd.init(config), 0), sf.init(train_nd.init(config), 1), batch(config)
    if f is gradients:
        return torch.func.grad(loss_fn)(whole, tokens, config)
    if f is curvature:
        return torch.func.jvp(lambda p: torch.func.grad(loss_fn)(p, tokens, config), (whole,), (along,))[1]
    return torch.func.vmap(lambda row: torch.func.grad(loss_fn)(whole, row[None, None], config))(tokens[0])


@pytest.mark.world(4)
def test_experts_without_a_capacity_and_exchanged_heads(world: World) -> None:
    config = replace(CONFIG, capacity=None, ring=False)
    pairs = [{"context"}, {"expert"}, {"context", "expert"}, {"tensor", "context"}, {"expert", "pipe"}]
    assert_all(world, gradients, config, [s for s in meshes(4) if axes_of(s) in pairs], 5)


@pytest.mark.world(4)
def test_sequence_parallelism_on_every_mesh_that_cuts_matrices(world: World) -> None:
    assert_all(world, gradients, replace(CONFIG, experts=0, sequence=True), with_any(4, "tensor"), 6)


def curvature(sizes: Sizes, config: Config) -> Any:
    """A Hessian-vector product."""
    whole, along = sf.init(train_nd.init(config), 0), sf.init(train_nd.init(config), 1)
    tokens, mesh = batch(config), sf.make_mesh(device="cpu", **sizes)

    def product(params: Any, along: Any) -> Any:
        return torch.func.jvp(lambda p: sf.grad(loss_here)(p, tokens, config), (params,), (along,))[1]

    return sf.unshard(mapped(product, mesh)(*(placed(x, config, mesh) for x in (whole, along))))


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_hessian_vector_products(world: World) -> None:
    pairs = [{"tensor", "pipe"}, {"context", "expert"}, {"shard", "pipe"}, {"replica", "tensor"}]
    every = meshes(2) if world.size == 2 else [s for s in meshes(4) if axes_of(s) in pairs]
    assert_all(world, curvature, replace(CONFIG, micro=1, batch=4), every, {2: 6, 4: 4}[world.size])


def of_each_sample(sizes: Sizes, config: Config) -> Any:
    whole, samples = sf.init(train_nd.init(config), 0), batch(config)[0]
    mesh = sf.make_mesh(device="cpu", **sizes)

    def each(params: Any) -> Any:
        return torch.func.vmap(lambda row: sf.grad(loss_here)(params, row[None, None], config))(samples)

    return torch.func.vmap(sf.unshard)(mapped(each, mesh)(placed(whole, config, mesh)))


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_gradients_of_each_sample_where_all_ranks_work_on_the_same_samples(world: World) -> None:
    every = only(world.size, "tensor", "context", "pipe")
    assert_all(world, of_each_sample, replace(CONFIG, micro=1, batch=3), every, {2: 3, 4: 6}[world.size])


# --- three axes at once ---

STEPS = 3


def trained(params: Any, gradient: Any) -> tuple[list[Any], Any]:
    """The loss and the gradient of each of a few steps, and what they leave: parameters, AdamW's memory."""
    state, found = OPTIMIZER.init(params), []
    for _ in range(STEPS):
        value, gradients = gradient(params)
        # A step may overwrite gradients.
        found.append((value.item(), optree.tree_map(torch.clone, gradients)))
        params, state = OPTIMIZER.step(params, gradients, state)
    return found, (params, state)


def trained_on(sizes: Sizes) -> tuple[list[Any], Any]:
    tokens, mesh = batch(CONFIG), sf.make_mesh(device="cpu", **sizes)
    params = placed(sf.init(train_nd.init(CONFIG), 0), CONFIG, mesh)
    found, (params, (clip, adam)) = trained(
        params, mapped(lambda p: sf.value_and_grad(loss_here)(p, tokens, CONFIG), mesh)
    )
    whole = [(loss, sf.unshard(gradients)) for loss, gradients in found]
    memory = {name: sf.unshard(adam[name]) for name in ("mean", "square")}
    return whole, (sf.unshard(params), (clip, adam | memory))


@pytest.mark.world(8)
def test_three_axes_at_once_train_as_one_process(world: World) -> None:
    def alone(params: Any) -> Any:
        gradient, loss = torch.func.grad_and_value(loss_fn)(params, batch(CONFIG), CONFIG)
        return loss, gradient

    steps, after = trained(sf.init(train_nd.init(CONFIG), 0), alone)
    for cut in (("replica", "shard", "tensor"), ("shard", "tensor", "pipe")):
        for found, left in world.with_deadline(120).run(trained_on, dict.fromkeys(AXES, 1) | dict.fromkeys(cut, 2)):
            for number, ((value, got), (loss, gradient)) in enumerate(zip(found, steps, strict=True)):
                assert abs(value / loss - 1) < 1e-12, (cut, number)
                assert furthest(got, gradient) < 1e-12, (cut, number)
            assert furthest(*map(moving, (left, after))) < 1e-12, cut
    world.close()  # no other test has as many ranks
