"""What is summed, or cut, once more than it should be."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn import P
from tests.check.gallery.setting import (
    AS_FIXED,
    BOTH,
    COUNT,
    GRID,
    HYBRID,
    SHARD,
    TENSOR,
    X,
    Y,
    columns_and_rows,
    decayed,
    error,
    megatron,
    part,
    sgd,
    squares,
    stepped,
    train,
    train_stage,
    trained,
    valued,
    weights,
    wrong,
)


@wrong("sum", "data", "", "leave psum out: loss", trained(error, "w"))
def psum_twice_loss(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        # fix: return sgd(params, grads), loss
        return sgd(params, grads), sf.psum(loss, "data")  # here

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("sum", "data", "", "leave psum out: grads", trained(error, "w"))
def psum_twice_gradient(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        # fix: return sgd(params, grads), loss
        return sgd(params, sf.psum(grads, "data")), loss  # here

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("sum", "data", "", "leave pmean out: loss", trained(error, "w"))
def pmean_of_invariant(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        loss = sf.psum(squares(out, y), "data") / COUNT
        # fix: return loss
        return sf.pmean(loss, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("sum", "data", "", "leave psum out: decay", trained(decayed, "w"))
def psum_of_weight_decay(shard_map, mesh):
    def loss_fn(params, x, y):
        total = squares(x @ sf.pvary(params["w"], "data"), y)
        decay = 0.1 * params["w"].square().sum()
        # fix: return sf.psum(total, "data") / COUNT + decay
        return sf.psum(total, "data") / COUNT + sf.psum(decay, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("sum", "data", "", AS_FIXED, stepped(error, "w"))
def reduce_scatter_of_invariant(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        grads = sf.grad(loss_fn)(params, x, y)
        # fix: grad = sf.collectives.local_slice(grads["w"], "data")
        grad = sf.reduce_scatter(grads["w"], "data")  # here
        w = sf.collectives.local_slice(params["w"], "data") - 0.1 * grad
        return {"w": sf.all_gather(w, "data", to="invariant")}

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("sum", "tensor", "", AS_FIXED, trained(error, "w"), GRID)
def psum_wrong_axis(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        # fix: return sf.psum(squares(out, y), "data") / COUNT
        return sf.psum(squares(out, y), "tensor") / COUNT  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("sum", "tensor", "", AS_FIXED, valued(megatron, "up", "down"), GRID)
def psum_over_all_axes(shard_map, mesh):
    @shard_map(in_specs=(TENSOR, P("data"), P("data")), out_specs=P())
    def evaluate(params, x, y):
        out = sf.parallel.from_parallel(torch.tanh(x @ params["up"]) @ params["down"], "tensor")
        # fix: return sf.psum(squares(out, y), "data") / COUNT
        return sf.psum(squares(out, y), ("data", "tensor")) / COUNT  # here

    return evaluate(columns_and_rows(mesh), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("sum", "replica", "", "leave psum out: grads", train_stage, HYBRID)
def psum_of_hybrid_gradients(shard_map, mesh):
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        return sf.psum(squares(layer(params["layer"], x), y), BOTH) / COUNT

    @shard_map(in_specs=(..., P(BOTH), P(BOTH)), out_specs=(..., P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        # fix: return sgd(params, grads), loss
        return sgd(params, sf.psum(grads, "replica")), loss  # here

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    return step(params, part(X, mesh, *BOTH), part(Y, mesh, *BOTH))


@wrong("sum", "shard", "", "leave pmean out: grads", train_stage, SHARD)
def pmean_of_flat_shards(shard_map, mesh):
    """As after a backward without shards: but each rank has another piece, and their mean is of no parameter."""
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        return sf.psum(squares(layer(params["layer"], x), y), "shard") / COUNT

    @shard_map(in_specs=(..., P("shard"), P("shard")), out_specs=(..., P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        # fix: return sgd(params, grads), loss
        return sgd(params, sf.pmean(grads, "shard")), loss  # here

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.full_shard("shard"))
    return step(params, part(X, mesh, "shard"), part(Y, mesh, "shard"))


@wrong("vary", "replica", "", AS_FIXED, trained(error, "w"), HYBRID)
def pvary_twice(shard_map, mesh):
    def loss_fn(params, x, y):
        w = sf.pvary(params["w"], "replica")
        # fix: out = x @ sf.pvary(w, "shard")
        out = x @ sf.pvary(w, BOTH)  # here
        return sf.psum(squares(out, y), BOTH) / COUNT

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y, axes=BOTH)


@wrong("vary", "data", "", "leave local_slice out: (x, y)", valued(error, "w"))
def local_slice_of_varying(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, y):
        # fix: pass
        x, y = sf.collectives.local_slice((x, y), "data")  # here
        return sf.psum(squares(x @ params["w"], y), "data") / COUNT

    return evaluate(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("vary", "data", "", AS_FIXED, stepped(error, "w"))
def local_slice_of_local_gradients(shard_map, mesh):
    """ZeRO-1 by hand."""

    def loss_fn(params, x, y):
        return squares(x @ params["w"], y) / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        grads = sf.grad(loss_fn)(params, x, y)
        # fix: grad = sf.reduce_scatter(grads["w"], "data")
        grad = sf.collectives.local_slice(grads["w"], "data")  # here
        w = sf.collectives.local_slice(params["w"], "data") - 0.1 * grad
        return {"w": sf.all_gather(w, "data", to="invariant")}

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))
