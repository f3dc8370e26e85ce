"""Means and statistics of unequal numbers of rows, or of this rank's rows alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P
from tests.check.gallery.setting import (
    AS_FIXED,
    COUNT,
    LABELS,
    REAL,
    X,
    Y,
    error,
    linear,
    masked,
    part,
    sgd,
    squares,
    train,
    trained,
    weights,
    wrong,
)


def shortened(whole: Tensor, mesh: Any) -> Tensor:
    """Five rows on the first rank, three on the second."""
    return whole.split([5, 3])[mesh.get_local_rank("data")].clone()


@wrong("means", "data", "", "shardfn.psum(total, 'data') / shardfn.psum(count, 'data')", trained(error, "w"))
def mean_of_means_ragged(shard_map, mesh):
    def loss_fn(params, x, y):
        each = (x @ sf.pvary(params["w"], "data") - y).square()
        # fix: return sf.psum(each.sum(), "data") / sf.psum(each.numel(), "data")
        return sf.pmean(each.mean(), "data")  # here

    @shard_map(in_specs=(P(), ..., ...), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    return step(weights("w"), shortened(X, mesh), shortened(Y, mesh))


@wrong("means", "data", "", "shardfn.psum(total, 'data') / shardfn.psum(count, 'data')", trained(masked, "w"))
def mean_of_means_masked(shard_map, mesh):
    def loss_fn(params, x, y, real):
        each = (x @ sf.pvary(params["w"], "data") - y).square().mean(1)
        # fix: return sf.psum((each * real).sum(), "data") / sf.psum(real.sum(), "data")
        return sf.pmean((each * real).sum() / real.sum(), "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y, REAL)


@wrong("means", "data", "", "shardfn.psum(total, 'data') / shardfn.psum(count, 'data')", trained(masked, "w"))
def mean_of_selected_rows(shard_map, mesh):
    def loss_fn(params, x, y, real):
        each = (x @ sf.pvary(params["w"], "data") - y).square().mean(1)
        chosen = each[real > 0]
        # fix: return sf.psum(chosen.sum(), "data") / sf.psum(chosen.numel(), "data")
        return sf.pmean(chosen.mean(), "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y, REAL)


@wrong("means", "data", "", AS_FIXED, trained(error, "w"))
def sum_of_gathered_means(shard_map, mesh):
    def loss_fn(params, x, y):
        loss = (x @ sf.pvary(params["w"], "data") - y).square().mean()
        # fix: return sf.pmean(loss, "data")
        return sf.all_gather(loss[None], "data", to="invariant").sum()  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("means", "data", "", "shardfn.psum(total, 'data') / shardfn.psum(count, 'data')", trained(masked, "w"))
def mean_of_gathered_means_masked(shard_map, mesh):
    def loss_fn(params, x, y, real):
        each = (x @ sf.pvary(params["w"], "data") - y).square().mean(1)
        mean = (each * real).sum() / real.sum()
        # fix: return sf.psum((each * real).sum(), "data") / sf.psum(real.sum(), "data")
        return sf.all_gather(mean[None], "data", to="invariant").mean()  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y, REAL)


def contrasted(p: Any) -> Tensor:
    z = X @ p["w"]
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


@wrong("means", "data", "", AS_FIXED, trained(contrasted, "w"))
def psum_of_means_against_gathered_rows(shard_map, mesh):
    def loss_fn(params, x, y):
        z = x @ sf.pvary(params["w"], "data")
        own = len(z) * sf.axis_index("data") + torch.arange(len(z))
        loss = F.cross_entropy(z @ sf.all_gather(z, "data").T, own)
        # fix: return sf.pmean(loss, "data")
        return sf.psum(loss, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("means", "data", "", "shardfn.pmean(grads, 'data')", trained(error, "w"))
def psum_of_gradients_of_means(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(lambda p: (x @ p["w"] - y).square().mean())(params)
        # fix: grads = sf.pmean(grads, "data")
        grads = sf.psum(grads, "data")  # here
        return sgd(params, grads), sf.pmean(loss, "data")

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def averaged(shard_map, mesh, loss_fn, reduce):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, reduce(grads)), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("means", "data", "", "shardfn.psum(grads, 'data')", trained(error, "w"))
def pmean_of_gradients_of_the_mean(shard_map, mesh):
    def loss_fn(params, x, y):
        return sf.pmean((x @ params["w"] - y).square().mean(), "data")

    def reduce(grads):
        # fix: return sf.psum(grads, "data")
        return sf.pmean(grads, "data")  # here

    return averaged(shard_map, mesh, loss_fn, reduce)


@wrong("means", "data", "", "shardfn.psum(grads, 'data')", trained(error, "w"))
def pmean_of_gradients_of_a_sum_over_all_rows(shard_map, mesh):
    def loss_fn(params, x, y):
        return sf.psum(squares(x @ params["w"], y), "data") / COUNT

    def reduce(grads):
        # fix: return sf.psum(grads, "data")
        return sf.pmean(grads, "data")  # here

    return averaged(shard_map, mesh, loss_fn, reduce)


IGNORED = torch.where(REAL > 0, LABELS, -100)


def ignoring(p: Any) -> Tensor:
    return F.cross_entropy(linear(p), IGNORED)


@wrong("means", "data", "", "shardfn.psum(total, 'data') / shardfn.psum(count, 'data')", trained(ignoring, "w"))
def mean_of_means_ignore_index(shard_map, mesh):
    def loss_fn(params, x, labels):
        logits = x @ sf.pvary(params["w"], "data")
        # fix: total = F.cross_entropy(logits, labels, reduction="sum")
        # fix: return sf.psum(total, "data") / sf.psum((labels != -100).sum(), "data")
        return sf.pmean(F.cross_entropy(logits, labels), "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, IGNORED)


@wrong("means", "data", "", "shardfn.psum(total, 'data') / shardfn.psum(count, 'data')", trained(masked, "w"))
def grad_accumulation_local_scale(shard_map, mesh):
    """Each micro-batch is divided by the tokens of this rank's whole batch, and the ranks' means are averaged."""

    def loss_fn(params, x, y, real, count):
        each = (x @ sf.pvary(params["w"], "data") - y).square().mean(1)
        # fix: return sf.psum((each * real).sum(), "data") / sf.psum(count, "data")
        return sf.psum((each * real).sum() / count, "data") / 2  # here

    @shard_map(in_specs=(P(), P("data"), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y, real):
        micro = [(*rows, real.sum()) for rows in zip(x.split(2), y.split(2), real.split(2), strict=True)]
        loss, grads = sf.accumulate(loss_fn, micro)(params)
        return sgd(params, grads), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"), part(REAL, mesh, "data"))


def batch_normed(p: Any) -> Tensor:
    return squares(F.batch_norm(X, None, None, training=True) @ p["w"], Y) / COUNT


@wrong("batch_norm", "data", "", "shardfn.psum of the sums along 'data'", trained(batch_normed, "w"))
def batch_norm_local_statistics(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: mean = sf.psum(x.sum(0), "data") / sf.psum(len(x), "data")
        # fix: variance = sf.psum((x - mean).square().sum(0), "data") / sf.psum(len(x), "data")
        # fix: h = F.batch_norm(x, mean, variance, training=False)
        h = F.batch_norm(x, None, None, training=True)  # here
        return sf.psum(squares(h @ sf.pvary(params["w"], "data"), y), "data") / COUNT

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


def running() -> Any:
    return 0.9 * weights("norm")["norm"] + 0.1 * X.mean(0)


@wrong("output", "data", "result", AS_FIXED, running)
def batch_norm_running_stats_returned(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data")), out_specs=P())
    def update(running, x):
        # fix: return torch.lerp(running, sf.pmean(x.mean(0), "data"), 0.1)
        return torch.lerp(running, x.mean(0), 0.1)  # here

    return update(weights("norm")["norm"], part(X, mesh, "data"))
