"""What ranks start with, what comes past the arguments, and what a branch does."""

from __future__ import annotations

from typing import Any

import optree
import torch

import shardfn as sf
from shardfn import P
from shardfn.shards.random import mixed
from tests.check.gallery.setting import (
    BOTH,
    COUNT,
    GRID,
    HYBRID,
    IN,
    OUT,
    ROWS,
    X,
    Y,
    decayed,
    error,
    linear,
    normal,
    part,
    sgd,
    squares,
    train,
    train_stage,
    trained,
    valued,
    weights,
    wrong,
)


@wrong("replica", "data", "params['w']", "start all ranks from one seed", trained(error, "w"))
def replicas_initialised_differently(shard_map, mesh):
    def loss_fn(params, x, y):
        return sf.psum(squares(x @ sf.pvary(params["w"], "data"), y), "data") / COUNT

    # fix: params = weights("w", seed=0)
    params = weights("w", seed=mesh.get_rank())
    return train(shard_map, mesh, loss_fn, params, X, Y)


@wrong("replica", "replica", "params['layer']", "start all ranks from one seed", train_stage, HYBRID)
def replicas_initialised_differently_hybrid(shard_map, mesh):
    """Shards that each node made by itself."""
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        return sf.psum(squares(layer(params["layer"], x), y), BOTH) / COUNT

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    # fix: pass
    params = optree.tree_map(lambda values: values * (1 + mesh.get_local_rank("replica")), params)
    return train(shard_map, mesh, loss_fn, params, X, Y, axes=BOTH, specs=...)


@wrong("replica", "tensor", "x", "start all ranks from one seed", trained(error, "w"), GRID)
def rows_by_rank_on_a_tensor_mesh(shard_map, mesh):
    """A loader that cuts by rank, where ranks along `tensor` are to have the same rows."""

    def loss_fn(params, x, y):
        return sf.psum(squares(x @ sf.pvary(params["w"], "data"), y), "data") / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    # fix: share, shares = mesh.get_local_rank("data"), mesh["data"].size()
    share, shares = mesh.get_rank(), mesh.size()
    return step(weights("w"), X.chunk(shares)[share].clone(), Y.chunk(shares)[share].clone())


@wrong("replica", "data", "state['mean']['w']", "start all ranks from one seed", lambda: momentum())
def optimizer_state_of_another_run(shard_map, mesh):
    """A rank that did not find its checkpoint."""
    opt = sf.optim.adam(0.1)
    specs = {"step": ..., "missed": ..., "numbers": ..., "mean": P(), "square": P()}

    def loss_fn(params, x, y):
        return sf.psum(squares(x @ sf.pvary(params["w"], "data"), y), "data") / COUNT

    @shard_map(in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), ...))
    def step(params, state, x, y):
        return opt.step(params, sf.grad(loss_fn)(params, x, y), state)

    params = weights("w")
    state = opt.init(params)
    # fix: found = True
    found = mesh.get_rank() == 1
    if found:
        state["mean"]["w"] += 1
    return step(params, state, part(X, mesh, "data"), part(Y, mesh, "data"))[0]


def momentum() -> Any:
    params, opt = weights("w"), sf.optim.adam(0.1)
    state = opt.init(params)
    state["mean"]["w"] += 1
    return opt.step(params, torch.func.grad(error)(params), state)[0]


@wrong("same", "data", "x", "pass each rank its own rows along 'data'", trained(error, "w"))
def same_batch_everywhere(shard_map, mesh):
    def loss_fn(params, x, y):
        return sf.psum(squares(x @ sf.pvary(params["w"], "data"), y), "data") / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    # fix: rows = torch.arange(ROWS)[4 * mesh.get_rank() : 4 * mesh.get_rank() + 4]
    rows = torch.arange(ROWS)[:4]
    return step(weights("w"), X[rows], Y[rows])


def counted() -> torch.Tensor:
    rates = X.exp().chunk(2)
    drawn = [torch.poisson(x, torch.Generator().manual_seed(mixed(0, f"data={i}"))) for i, x in enumerate(rates)]
    return torch.cat(drawn).sum()


@wrong("same", "data", "", "generator=shardfn.fold_in(seed, 'data')", counted)
def one_seed_for_the_noise_of_all_rows(shard_map, mesh):
    @shard_map(in_specs=P("data"), out_specs=P())
    def counts(x):
        seed = 0
        # fix: generator = sf.fold_in(seed, 'data')
        generator = torch.Generator().manual_seed(seed)
        return sf.psum(torch.poisson(x.exp(), generator=generator).sum(), "data")  # here

    return counts(part(X, mesh, "data"))


@wrong("output", "data", "result['w']", "shardfn.fold_in(seed) without 'data'", lambda: noisy(), says="random")
def noise_differs_on_replicated_weights(shard_map, mesh):
    @shard_map(in_specs=P(), out_specs=P())
    def perturb(params):
        # fix: noise = torch.randn(params["w"].shape, generator=sf.fold_in(0), dtype=torch.float64)
        noise = torch.randn(params["w"].shape, generator=sf.fold_in(0, "data"), dtype=torch.float64)  # here
        return {"w": params["w"] + 0.1 * noise}

    return perturb(weights("w"))


def noisy() -> Any:
    return {"w": weights("w")["w"] + 0.1 * normal(IN, OUT, seed=mixed(0))}


@wrong("closure", "data", "", "pass it as an argument", valued(lambda p: linear(p).square().sum() / COUNT, "w"))
def closure_differs_between_ranks(shard_map, mesh):
    # fix: teacher = weights("w", seed=0)["w"]
    teacher = weights("w", seed=mesh.get_rank())["w"]

    @shard_map(in_specs=P(), out_specs=P())
    def loss(x):
        return (x @ teacher).square().sum() / COUNT  # here

    return loss(X)


@wrong("closure", "data", "", "pass it as an argument", valued(lambda p: linear(p).mean(0) - weights("b")["b"], "w"))
def closure_leaked_from_another_shard_map(shard_map, mesh):
    kept = []

    @shard_map(in_specs=(P(), P("data")), out_specs=P("data"))
    def features(params, x):
        out = x @ params["w"]
        # fix: kept.append(sf.pmean(out.mean(0), "data"))
        kept.append(out.mean(0))
        return out

    @shard_map(in_specs=P(), out_specs=P())
    def shifted(b):
        return kept[0] - b  # here

    features(weights("w"), part(X, mesh, "data"))
    return shifted(weights("b")["b"])


@wrong("output", "data", "result", "the same number on all ranks along 'data'", lambda: X.sum() * 1.5)
def axis_index_scales_output(shard_map, mesh):
    @shard_map(in_specs=P(), out_specs=P())
    def weighted(x):
        # fix: return x.sum() * sf.psum((1 + sf.axis_index("data")) / 2, "data").double()
        return x.sum() * (1 + sf.axis_index("data"))  # here

    return weighted(X)


@wrong("output", "data", "result", "the same number on all ranks along 'data'", valued(decayed, "w"))
def python_rank_branch_on_value(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def loss_fn(params, x, y):
        loss = sf.psum(squares(x @ params["w"], y), "data") / COUNT
        # fix: decay = 0.1 * params["w"].square().sum()
        decay = 0.1 * params["w"].square().sum() if sf.axis_index("data") == 0 else 0.0  # here
        return loss + decay

    return loss_fn(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def limited() -> Any:
    return X / X.abs().max()


@wrong("collectives", "data", "", "call the same collectives on all ranks", lambda: limited().sum(), hangs=True)
def branch_issues_other_collectives(shard_map, mesh):
    limit = X.abs().max(1).values.sort().values[-1].item() - 1e-3  # which one rank's rows exceed

    @shard_map(in_specs=P("data"), out_specs=P())
    def total(x):
        # fix: if sf.pmax(x.abs().max(), "data") > limit:
        if x.abs().max() > limit:
            x = x / sf.pmax(x.abs().max(), "data")  # here
        return sf.psum(x.sum(), "data")

    return total(part(X, mesh, "data"))


def halved() -> Any:
    total, scale = torch.zeros(()), 1.0
    while scale * X.abs().max() > 0.1:
        scale = scale / 2
        total = total + (scale * X).sum()
    return total


@wrong("collectives", "data", "", "call the same collectives on all ranks", halved, hangs=True)
def loop_ends_by_a_local_number(shard_map, mesh):
    @shard_map(in_specs=P("data"), out_specs=P())
    def total(x):
        total, scale = torch.zeros(()), 1.0
        # fix: while scale * sf.pmax(x.abs().max(), "data") > 0.1:
        while scale * x.abs().max() > 0.1:
            scale = scale / 2
            total = total + sf.psum((scale * x).sum(), "data")  # here
        return total

    return total(part(X, mesh, "data"))
