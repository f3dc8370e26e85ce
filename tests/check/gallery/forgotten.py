"""A sum over ranks that is forgotten."""

from __future__ import annotations

from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P
from tests.check.gallery.setting import (
    AS_FIXED,
    BOTH,
    COUNT,
    HYBRID,
    LABELS,
    OUT,
    REAL,
    ROWS,
    SHARD,
    X,
    Y,
    error,
    graded,
    linear,
    masked,
    part,
    sgd,
    squares,
    staged,
    train,
    train_stage,
    trained,
    valued,
    weights,
    wrong,
)


@wrong("output", "data", "result[1]", AS_FIXED, trained(error, "w"))
def psum_forgotten_loss_returned(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        # fix: return sf.psum((out - y).square().sum(), "data") / COUNT
        return (out - y).square().sum() / COUNT  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("losses", "shard", "", AS_FIXED, lambda: train_stage()[0], SHARD)
def psum_forgotten_loss_not_returned_fsdp(shard_map, mesh):
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        # fix: return sf.pmean((layer(params["layer"], x) - y).square().mean(), "shard")
        return (layer(params["layer"], x) - y).square().mean()  # here

    @shard_map(in_specs=(..., P("shard"), P("shard")), out_specs=...)
    def step(params, x, y):
        return sgd(params, sf.grad(loss_fn)(params, x, y))

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.full_shard("shard"))
    return step(params, part(X, mesh, "shard"), part(Y, mesh, "shard"))


@wrong("losses", "data", "", AS_FIXED, graded(lambda p: squares(linear(p), Y) / ROWS, "w"))
def sum_over_the_rows_of_one_rank(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        # fix: return sf.pmean((out - y).square().sum() / len(x), "data")
        return (out - y).square().sum() / len(x)  # here

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        return sf.grad(loss_fn)(params, x, y)

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("losses", "data", "", AS_FIXED, graded(lambda p: F.cross_entropy(linear(p), LABELS), "w"))
def cross_entropy_over_the_rows_of_one_rank(shard_map, mesh):
    def loss_fn(params, x, labels):
        total = F.cross_entropy(x @ sf.pvary(params["w"], "data"), labels, reduction="sum")
        # fix: return sf.pmean(total / labels.numel(), "data")
        return total / labels.numel()  # here

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, labels):
        return sf.grad(loss_fn)(params, x, labels)

    return step(weights("w"), part(X, mesh, "data"), part(LABELS, mesh, "data"))


@wrong("losses", "replica", "", AS_FIXED, train_stage, HYBRID)
def psum_forgotten_hybrid(shard_map, mesh):
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        total = squares(layer(params["layer"], x), y)
        # fix: return sf.psum(total, BOTH) / sf.psum(y.numel(), BOTH)
        return sf.psum(total, "shard") / sf.psum(y.numel(), "shard")  # here

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    return train(shard_map, mesh, loss_fn, params, X, Y, axes=BOTH, specs=...)


@wrong("losses", ("replica", "shard"), "", AS_FIXED, lambda: train_stage()[0], HYBRID)
def psum_forgotten_hfsdp_with_an_optimizer(shard_map, mesh):
    layer = sf.stage(lambda p, x: F.linear(x, p["w"].T, p["b"]))
    opt = sf.optim.sgd(0.1)

    def loss_fn(params, x, y):
        # fix: return sf.pmean(F.mse_loss(layer(params["layer"], x), y), BOTH)
        return F.mse_loss(layer(params["layer"], x), y)  # here

    @shard_map(in_specs=(..., ..., P(BOTH), P(BOTH)), out_specs=...)
    def step(params, state, x, y):
        grads = sf.grad(loss_fn)(params, x, y)
        return opt.step(params, grads, state)[0]

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.strategies.hfsdp(shard="shard", replica="replica"))
    return step(params, opt.init(params), part(X, mesh, *BOTH), part(Y, mesh, *BOTH))


@wrong("losses", "shard", "", AS_FIXED, train_stage, SHARD)
def psum_forgotten_ddp_strategy(shard_map, mesh):
    """As under torch's DDP, which divides by the number of ranks."""
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        # fix: return sf.pmean(F.mse_loss(layer(params["layer"], x), y), "shard")
        return F.mse_loss(layer(params["layer"], x), y)  # here

    @shard_map(in_specs=(..., P("shard"), P("shard")), out_specs=(..., P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        # fix: return sgd(params, grads), loss
        return sgd(params, grads), sf.pmean(loss, "shard")

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.ddp("shard"))
    return step(params, part(X, mesh, "shard"), part(Y, mesh, "shard"))


@wrong("output", "shard", "result[1]", AS_FIXED, lambda: normed_stage(), SHARD)
def grad_norm_of_local_shards(shard_map, mesh):
    """Clipping by hand, as before one had heard of shards."""
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        return sf.psum(squares(layer(params["layer"], x), y), "shard") / COUNT

    @shard_map(in_specs=(..., P("shard"), P("shard")), out_specs=(..., P()))
    def step(params, x, y):
        grads = sf.grad(loss_fn)(params, x, y)
        # fix: norm = sum(sf.psum(g.square().sum(), "shard") for g in optree.tree_leaves(grads)).sqrt()
        norm = sum(g.square().sum() for g in optree.tree_leaves(grads)).sqrt()  # here
        return sgd(params, optree.tree_map(lambda g: g / norm, grads)), norm

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.full_shard("shard"))
    return step(params, part(X, mesh, "shard"), part(Y, mesh, "shard"))


def normed_stage() -> Any:
    params = {"layer": weights("w", "b")}
    grads = torch.func.grad(staged)(params)
    norm = torch.stack([g.square().sum() for g in optree.tree_leaves(grads)]).sum().sqrt()
    return sgd(params, optree.tree_map(lambda g: g / norm, grads)), norm


@wrong("gradient", "data", "params['w']", AS_FIXED, graded(error, "w"))
def local_gradient_returned_replicated(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return squares(out, y) / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def gradient(params, x, y):
        return sf.grad(loss_fn)(params, x, y)

    return gradient(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("output", "data", "result", AS_FIXED, valued(lambda p: torch.tanh(linear(p)), "w"))
def out_specs_too_replicated_activations(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data")), out_specs=P())
    def predict(params, x):
        # fix: return sf.all_gather(torch.tanh(x @ params["w"]), "data", to="invariant")
        return torch.tanh(x @ params["w"])  # here

    return predict(weights("w"), part(X, mesh, "data"))


def pairs(p: Any) -> Tensor:
    h = torch.tanh(X @ p["w"])
    return (h @ h.T).square().sum() / COUNT


@wrong("losses", "data", "", AS_FIXED, trained(pairs, "w"))
def all_gather_returned_replicated(shard_map, mesh):
    def loss_fn(params, x):
        h = torch.tanh(x @ sf.pvary(params["w"], "data"))
        # fix: every = sf.all_gather(h, "data", to="invariant")
        every = sf.all_gather(h, "data")  # here
        return (every @ every.T).square().sum() / COUNT

    return train(shard_map, mesh, loss_fn, weights("w"), X)


def correct(p: Any) -> Tensor:
    return (linear(p).argmax(1) == LABELS).double().mean()


@wrong("output", "data", "result", AS_FIXED, valued(correct, "w"))
def local_metric_returned(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def accuracy(params, x, labels):
        right = (x @ params["w"]).argmax(1) == labels
        # fix: return sf.pmean(right.double().mean(), "data")
        return right.double().mean()  # here

    return accuracy(weights("w"), part(X, mesh, "data"), part(LABELS, mesh, "data"))


def counts(p: Any) -> Any:
    return {"right": (linear(p).argmax(1) == LABELS).sum(), "seen": torch.tensor(ROWS)}


@wrong("output", "data", "result['right']", AS_FIXED, valued(counts, "w"))
def local_counts_returned(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, labels):
        # fix: right = sf.psum(((x @ params["w"]).argmax(1) == labels).sum(), "data")
        right = ((x @ params["w"]).argmax(1) == labels).sum()  # here
        return {"right": right, "seen": sf.psum(torch.tensor(len(x)), "data")}

    return evaluate(weights("w"), part(X, mesh, "data"), part(LABELS, mesh, "data"))


@wrong("output", "data", "result[1]", AS_FIXED, trained(masked, "w"))
def psum_forgotten_count(shard_map, mesh):
    def loss_fn(params, x, y, real):
        each = (x @ sf.pvary(params["w"], "data") - y).square().mean(1)
        # fix: return sf.psum((each * real).sum(), "data") / sf.psum(real.sum(), "data")
        return sf.psum((each * real).sum(), "data") / real.sum()  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y, REAL)


def routed(p: Any) -> Tensor:
    probabilities = (X @ p["gate"]).softmax(1)
    return squares(probabilities @ p["first"][:, :OUT], Y) / COUNT + 0.1 * probabilities.mean(0).square().sum()


@wrong("output", "data", "result[1]", AS_FIXED, trained(routed, "gate", "first"))
def moe_router_aux_loss_local(shard_map, mesh):
    def loss_fn(params, x, y):
        params = sf.pvary(params, "data")
        probabilities = (x @ params["gate"]).softmax(1)
        out = probabilities @ params["first"][:, :OUT]
        # fix: load = sf.pmean(probabilities.mean(0), "data")
        load = probabilities.mean(0)  # here
        return sf.psum(squares(out, y), "data") / COUNT + 0.1 * load.square().sum()

    return train(shard_map, mesh, loss_fn, weights("gate", "first"), X, Y)


def plateau() -> Any:
    params = weights("w")
    grads, loss = torch.func.grad_and_value(error)(params)
    return sgd(params, grads, 0.1 / (1 + loss)), loss


@wrong("output", "data", "result[0]['w']", AS_FIXED, lambda: plateau()[0])
def lr_from_local_loss(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        # fix: return sf.psum((out - y).square().sum(), "data") / COUNT
        return (out - y).square().sum() / COUNT  # here

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(),))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return (sgd(params, grads, 0.1 / (1 + loss)),)

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))[0]


def switched() -> Any:
    params = weights("w")
    grads, loss = torch.func.grad_and_value(error)(params)
    return sgd(params, grads, 0.1 if loss > 0.5 else 0.5)


@wrong("output", "data", "result['w']", AS_FIXED, switched)
def lr_switched_by_a_local_number(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        # fix: return sf.psum((out - y).square().sum(), "data") / COUNT
        return (out - y).square().sum() / COUNT  # here

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        lr = 0.1 if loss.item() > 0.5 else 0.5
        return sgd(params, grads, lr)

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def centered() -> Any:
    return 0.9 * weights("center")["center"] + 0.1 * linear(weights("w")).mean(0)


@wrong("output", "data", "result", AS_FIXED, centered)
def ema_of_local_batch_stats(shard_map, mesh):
    @shard_map(in_specs=(P(), P(), P("data")), out_specs=P())
    def update(params, center, x):
        out = x @ params["w"]
        # fix: mean = sf.pmean(out.mean(0), "data")
        mean = out.mean(0)  # here
        return 0.9 * center + 0.1 * mean

    return update(weights("w"), weights("center")["center"], part(X, mesh, "data"))


@wrong("output", "data", "result[1][1]", AS_FIXED, lambda: aided())
def local_aux_returned(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        # fix: largest = sf.pmax(out.detach().abs().max(), "data")
        largest = out.detach().abs().max()  # here
        return sf.psum(squares(out, y), "data") / COUNT, largest

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn, has_aux=True)(params, x, y)
        return sgd(params, grads), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def aided() -> Any:
    params, loss = trained(error, "w")()
    return params, loss, linear(weights("w")).abs().max()


@wrong("output", "data", "result", AS_FIXED, lambda: error(weights("w")).item())
def local_item_returned(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, y):
        total = 0.0
        for rows, wanted in zip(x.split(2), y.split(2), strict=True):
            # fix: each = sf.psum((rows @ params["w"] - wanted).square().sum(), "data")
            each = (rows @ params["w"] - wanted).square().sum()  # here
            total += each.item() / COUNT
        return total

    return evaluate(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))
