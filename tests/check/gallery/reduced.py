"""Losses and results that are reduced by the wrong one of two collectives, at the wrong place, or twice."""

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
    GRID,
    HYBRID,
    LABELS,
    OUT,
    ROWS,
    SHARD,
    X,
    Y,
    decayed,
    error,
    graded,
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
from tests.check.programs.setting import folded


def classified(p: Any) -> Tensor:
    return F.cross_entropy(linear(p), LABELS)


def distances(p: Any) -> Tensor:
    return F.l1_loss(linear(p), Y)


@wrong("means", "data", "", AS_FIXED, trained(error, "w"))
def psum_of_mse_loss(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: return sf.pmean(F.mse_loss(x @ sf.pvary(params['w'], 'data'), y), 'data')
        return sf.psum(F.mse_loss(x @ sf.pvary(params["w"], "data"), y), "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("means", "data", "", AS_FIXED, trained(classified, "w"))
def psum_of_cross_entropy(shard_map, mesh):
    def loss_fn(params, x, labels):
        loss = F.cross_entropy(x @ sf.pvary(params["w"], "data"), labels)
        # fix: return sf.pmean(loss, "data")
        return sf.psum(loss, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, LABELS)


@wrong("means", BOTH, "", AS_FIXED, trained(distances, "w"), HYBRID)
def psum_of_l1_loss_over_two_axes(shard_map, mesh):
    def loss_fn(params, x, y):
        loss = F.l1_loss(x @ sf.pvary(params["w"], BOTH), y)
        # fix: return sf.pmean(loss, BOTH)
        return sf.psum(loss, BOTH)  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y, axes=BOTH)


@wrong("means", "shard", "", AS_FIXED, train_stage, SHARD)
def psum_of_a_mean_of_shards(shard_map, mesh):
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        each = (layer(params["layer"], x) - y).square().sum() / y.numel()
        # fix: return sf.pmean(each, "shard")
        return sf.psum(each, "shard")  # here

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.full_shard("shard"))
    return train(shard_map, mesh, loss_fn, params, X, Y, axes="shard", specs=...)


@wrong("means", "data", "", AS_FIXED, valued(classified, "w"))
def psum_of_a_mean_at_the_end_of_an_epoch(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, labels):
        loss = -(x @ params["w"]).log_softmax(-1).gather(1, labels[:, None]).mean()
        # fix: return sf.pmean(loss, "data")
        return sf.psum(loss, "data")  # here

    return evaluate(weights("w"), part(X, mesh, "data"), part(LABELS, mesh, "data"))


@wrong("means", "data", "", AS_FIXED, trained(error, "w"), GRID)
def psum_of_a_mean_differentiated_by_torch(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        def loss_fn(p):
            loss = (x @ sf.pvary(p["w"], "data") - y).square().mean()
            # fix: return sf.pmean(loss, "data")
            return sf.psum(loss, "data")  # here

        grads, loss = torch.func.grad_and_value(loss_fn)(params)
        return sgd(params, grads), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def both_losses(p: Any) -> Tensor:
    return error(p) + 0.3 * distances(p)


@wrong("means", "data", "", AS_FIXED, trained(both_losses, "w"))
def psum_of_several_means(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        loss = 0.3 * F.l1_loss(out, y) + F.mse_loss(out, y)
        # fix: return sf.pmean(loss, "data")
        return sf.psum(loss, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("means", "data", "", AS_FIXED, trained(error, "w"))
def sum_over_this_ranks_count(shard_map, mesh):
    def loss_fn(params, x, y):
        total = sf.psum(squares(x @ sf.pvary(params["w"], "data"), y), "data")
        # fix: return total / sf.psum(y.numel(), 'data')
        return total / y.numel()  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("means", "data", "", "shardfn.psum(len(x), 'data')", trained(classified, "w"))
def sum_of_cross_entropies_over_this_ranks_count(shard_map, mesh):
    def loss_fn(params, x, labels):
        each = F.cross_entropy(x @ sf.pvary(params["w"], "data"), labels, reduction="sum")
        # fix: return sf.psum(each, "data") / sf.psum(len(x), 'data')
        return sf.psum(each, "data") / len(x)  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, LABELS)


@wrong(
    "means",
    "data",
    "",
    "shardfn.psum(count, 'data')",
    valued(lambda p: (linear(p).argmax(1) != LABELS).double().mean(), "w"),
)
def errors_over_this_ranks_count(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, labels):
        misses = sf.psum(((x @ params["w"]).argmax(1) != labels).double().sum(), "data")
        # fix: return misses / sf.psum(len(x), 'data')
        return misses * (1 / len(x))  # here

    return evaluate(weights("w"), part(X, mesh, "data"), part(LABELS, mesh, "data"))


@wrong("means", "data", "", AS_FIXED, trained(error, "w"))
def pmean_of_sums_over_all_rows(shard_map, mesh):
    def loss_fn(params, x, y):
        total = squares(x @ sf.pvary(params["w"], "data"), y)
        # fix: return sf.psum(total, "data") / COUNT
        return sf.pmean(total, "data") / COUNT  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("means", "data", "", AS_FIXED, trained(error, "w"))
def pmean_of_sums_over_a_sum_of_counts(shard_map, mesh):
    def loss_fn(params, x, y):
        total = squares(x @ sf.pvary(params["w"], "data"), y)
        # fix: return sf.psum(total, "data") / sf.psum(y.numel(), "data")
        return sf.pmean(total, "data") / sf.psum(y.numel(), "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


def totaled(p: Any) -> Tensor:
    return squares(linear(p), Y)


@wrong(
    "means",
    "data",
    "",
    "shardfn.psum(total, 'data'), or shardfn.psum(total, 'data') / ",
    trained(totaled, "w"),
    says="for the mean:",
)
def pmean_of_sums(shard_map, mesh):
    def loss_fn(params, x, y):
        total = squares(x @ sf.pvary(params["w"], "data"), y)
        # fix: return sf.psum(total, "data")
        return sf.pmean(total, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("whole", "data", "", AS_FIXED, trained(classified, "w"))
def psum_of_a_gathered_loss(shard_map, mesh):
    def loss_fn(params, x, labels):
        logits = sf.all_gather(x @ sf.pvary(params["w"], "data"), "data")
        loss = F.cross_entropy(logits, sf.all_gather(labels, "data"))
        # fix: return sf.pmean(loss, "data")
        return sf.psum(loss, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, LABELS)


@wrong("whole", "data", "", AS_FIXED, valued(lambda p: (linear(p).argmax(1) != LABELS).double().sum(), "w"))
def psum_of_gathered_misses(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P()), out_specs=P())
    def evaluate(params, x, labels):
        misses = (sf.all_gather(x @ params["w"], "data").argmax(1) != labels).double().sum()
        # fix: return sf.pmean(misses, 'data')
        return sf.psum(misses, "data")  # here

    return evaluate(weights("w"), part(X, mesh, "data"), LABELS)


@wrong("sum", "data", "", AS_FIXED, trained(decayed, "w"))
def weight_decay_inside_of_a_psum(shard_map, mesh):
    def loss_fn(params, x, y):
        each = squares(x @ sf.pvary(params["w"], "data"), y) / COUNT
        decay = 0.1 * params["w"].square().sum()
        # fix: return sf.psum(each, "data") + decay
        return sf.psum(each + decay, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("whole", "data", "", AS_FIXED, trained(decayed, "w"))
def weight_decay_of_what_pvary_gave_inside_of_a_psum(shard_map, mesh):
    def loss_fn(params, x, y):
        w = sf.pvary(params["w"], "data")
        each, decay = squares(x @ w, y) / COUNT, 0.1 * w.square().sum()
        # fix: return sf.psum(each, "data") + sf.pmean(decay, "data")
        return sf.psum(each + decay, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("whole", "tensor", "", AS_FIXED, valued(linear, "w", "b"), {"tensor": 2})
def bias_inside_of_a_psum(shard_map, mesh):
    @shard_map(in_specs=({"w": P("tensor"), "b": P()}, P(None, "tensor")), out_specs=P())
    def forward(params, x):
        # fix: return sf.psum(x @ params['w'], 'tensor') + params['b']
        return sf.psum(x @ params["w"] + params["b"], "tensor")  # here

    params = weights("w", "b")
    params["w"] = part(params["w"], mesh, "tensor")
    return forward(params, part(X, mesh, "tensor", dim=1))


def penalized(p: Any) -> Tensor:
    return squares(linear(p), Y) + 0.1 * p["w"].square().sum()


@wrong("output", "data", "result", AS_FIXED, valued(penalized, "w"))
def decay_added_to_this_ranks_loss(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, y):
        # fix: return sf.psum((x @ params['w'] - y).square().sum(), 'data') + 0.1 * params['w'].square().sum()
        return (x @ params["w"] - y).square().sum() + 0.1 * params["w"].square().sum()  # here

    return evaluate(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("output", "data", "result", AS_FIXED, lambda: X.sum() + weights("w")["w"].sum() + X.square().sum())
def terms_of_which_one_is_the_same_everywhere(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data")), out_specs=P())
    def evaluate(w, x):
        # fix: return sf.psum(x.sum(), 'data') + w.sum() + sf.psum(x.square().sum(), 'data')
        return x.sum() + w.sum() + x.square().sum()  # here

    return evaluate(weights("w")["w"], part(X, mesh, "data"))


@wrong("output", "data", "result", AS_FIXED, lambda: 0.9 * weights("norm")["norm"] + 0.1 * X.var(0))
def running_variance(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data")), out_specs=P())
    def update(running, x):
        # fix: return 0.9 * running + 0.1 * sf.all_gather(x, 'data', to="invariant").var(0)
        return 0.9 * running + 0.1 * x.var(0)  # here

    return update(weights("norm")["norm"], part(X, mesh, "data"))


@wrong("output", "data", "result", AS_FIXED, lambda: X.norm())
def norm_of_this_ranks_rows(shard_map, mesh):
    @shard_map(in_specs=P("data"), out_specs=P())
    def size(x):
        # fix: return sf.all_gather(x, 'data', to="invariant").norm()
        return x.norm()  # here

    return size(part(X, mesh, "data"))


@wrong("output", "data", "result", AS_FIXED, lambda: (X[:, 0] * X[:, 1]).sum() / X[:, 1].sum())
def ratio_of_sums(shard_map, mesh):
    @shard_map(in_specs=P("data"), out_specs=P())
    def weighted(x):
        a, b = x[:, 0] * x[:, 1], x[:, 1]
        # fix: return sf.psum(a.sum(), 'data') / sf.psum(b.sum(), 'data')
        return a.sum() / b.sum()  # here

    return weighted(part(X, mesh, "data"))


@wrong(
    "gradient",
    "data",
    "w",
    AS_FIXED,
    lambda: 0.9 * normal(4, OUT, seed=5) + graded(error, "w")()["w"],
    says="shardfn.pmean(F.mse_loss(x @ w, y), 'data')",
)
def momentum_of_local_gradients(shard_map, mesh):
    @shard_map(in_specs=(P(), P(), P("data"), P("data")), out_specs=P())
    def update(moment, w, x, y):
        def loss_fn(w):
            # fix: return sf.pmean(F.mse_loss(x @ sf.pvary(w, 'data'), y), 'data')
            return F.mse_loss(x @ w, y)  # here

        return 0.9 * moment + sf.grad(loss_fn)(w)

    return update(normal(4, OUT, seed=5), weights("w")["w"], part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("sum", "shard", "", "leave psum out: g", lambda: train_stage()[0], SHARD)
def psum_of_the_values_of_flat_shards(shard_map, mesh):
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        return sf.psum(squares(layer(params["layer"], x), y), "shard") / COUNT

    @shard_map(in_specs=(..., P("shard"), P("shard")), out_specs=...)
    def step(params, x, y):
        grads = sf.grad(loss_fn)(params, x, y)
        # fix: return sgd(params, grads)
        return sgd(params, optree.tree_map(lambda g: sf.psum(g, "shard"), grads))  # here

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.full_shard("shard"))
    return step(params, part(X, mesh, "shard"), part(Y, mesh, "shard"))


@wrong("sum", "shard", "", "leave pmean out: v", lambda: {"layer": weights("w", "b")}, SHARD)
def pmean_of_parameters_in_flat_shards(shard_map, mesh):
    @shard_map(in_specs=..., out_specs=...)
    def averaged(params):
        # fix: return optree.tree_map(lambda v: v, params)
        return optree.tree_map(lambda v: sf.pmean(v, "shard"), params)  # here

    return averaged(sf.shard({"layer": weights("w", "b")}, mesh, sf.full_shard("shard")))


@wrong("sum", "data", "", "leave psum out: count", trained(error, "w"))
def psum_twice_of_a_count(shard_map, mesh):
    def loss_fn(params, x, y):
        count = sf.psum(y.numel(), "data")
        total = sf.psum(squares(x @ sf.pvary(params["w"], "data"), y), "data")
        # fix: return total / count
        return total / sf.psum(count, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


def drawn_alone(generator: torch.Generator) -> Tensor:
    return torch.rand(ROWS // 2, OUT, generator=generator, dtype=torch.float64)


def dropped(p: Any) -> Tensor:
    keep = torch.cat([drawn_alone(folded(3, 0, rank)) for rank in range(2)]) < 0.5
    return squares(linear(p) * keep, Y) / COUNT


@wrong("same", "data", "", "generator=shardfn.fold_in(seed, 'data')", trained(dropped, "w"))
def one_dropout_for_all_ranks(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: generator = sf.fold_in(3, 0, "data")
        generator = torch.Generator().manual_seed(3)
        keep = torch.rand(len(x), OUT, generator=generator, dtype=x.dtype) < 0.5  # here
        return sf.psum(squares(x @ sf.pvary(params["w"], "data") * keep, y), "data") / COUNT

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


def noisy() -> Tensor:
    return X[:, :OUT] + torch.cat([drawn_alone(folded(4, 0, rank)) for rank in range(2)])


@wrong("same", "data", "", "generator=shardfn.fold_in(seed, 'data')", noisy)
def one_noise_for_all_ranks(shard_map, mesh):
    @shard_map(in_specs=P("data"), out_specs=P())
    def augmented(x):
        # fix: generator = sf.fold_in(4, 0, "data")
        generator = torch.Generator().manual_seed(4)
        noise = torch.rand(len(x), OUT, generator=generator, dtype=x.dtype)  # here
        return sf.all_gather(x[:, :OUT] + noise, "data", to="invariant")

    return augmented(part(X, mesh, "data"))


def two_tasks(p: Any) -> Tensor:
    """A step on the first half of each task's rows, and what it does to the second half."""
    total = torch.zeros((), dtype=X.dtype)
    for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
        inner = torch.func.grad(lambda q, x=x, y=y: F.mse_loss(x[:2] @ q["w"] + q["b"], y[:2]))(p["layer"])
        q = sgd(p["layer"], inner, 0.3)
        total = total + F.mse_loss(x[2:] @ q["w"] + q["b"], y[2:]) / 2
    return total


def two_tasks_trained() -> Any:
    params = {"layer": weights("w", "b")}
    grads, loss = torch.func.grad_and_value(two_tasks)(params)
    return sgd(params, grads), loss


@wrong("inner", "shard", "", "shardfn.pvary(shardfn.unshard(params), 'shard')", two_tasks_trained, SHARD)
def a_task_on_each_rank_by_shards(shard_map, mesh):
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        # fix: own = sf.pvary(sf.unshard(params), "shard")
        own = params

        def inner(p):
            return F.mse_loss(layer(p["layer"], x[:2]), y[:2])  # here

        adapted = sgd(own, sf.grad(inner)(own), 0.3)
        return sf.pmean(F.mse_loss(layer(adapted["layer"], x[2:]), y[2:]), "shard")

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.full_shard("shard"))
    return train(shard_map, mesh, loss_fn, params, X, Y, axes="shard", specs=...)


def first_alone(p: Any) -> Tensor:
    first, second = (half.sum() for half in linear(p).chunk(2))
    return first.square() + (first + second).square()


@wrong("branch", "data", "", "torch.where(condition, other, shardfn.pvary(total, 'data'))", graded(first_alone, "w"))
def a_sum_that_the_first_rank_drops(shard_map, mesh):
    def loss_fn(params, x):
        own = (x @ sf.pvary(params["w"], "data")).sum()
        total = sf.psum(own, "data")  # here
        # fix: total = torch.where(torch.tensor(sf.axis_index("data") == 0), own, sf.pvary(total, "data"))
        total = own if sf.axis_index("data") == 0 else total
        return sf.psum(total.square(), "data")

    return shard_map(sf.grad(loss_fn), in_specs=(P(), P("data")), out_specs=P())(weights("w"), part(X, mesh, "data"))


def shifted(p: Any) -> Tensor:
    first, second = linear(p).chunk(2)
    return first.square().sum() + (first * second).sum()


@wrong(
    "collectives",
    "data",
    "",
    "call the same collectives",
    graded(shifted, "w"),
    says="drops what a collective gave",
    hangs=True,
)
def received_rows_that_the_first_rank_drops(shard_map, mesh):
    def loss_fn(params, x):
        own = x @ sf.pvary(params["w"], "data")
        received = sf.ppermute(own, "data", [(0, 1), (1, 0)])
        # fix: received = torch.where(torch.tensor(sf.axis_index("data") == 0), own, received)
        received = own if sf.axis_index("data") == 0 else received
        return sf.psum((own * received).sum(), "data")

    return shard_map(sf.grad(loss_fn), in_specs=(P(), P("data")), out_specs=P())(weights("w"), part(X, mesh, "data"))
