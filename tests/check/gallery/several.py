"""Values that are made of several parts, row by row or in a loop, and what is to be written for each."""

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
    IN,
    LABELS,
    OUT,
    REAL,
    ROWS,
    X,
    Y,
    error,
    graded,
    linear,
    masked,
    normal,
    part,
    sgd,
    squares,
    train,
    trained,
    valued,
    weights,
    wrong,
)
from tests.check.programs.setting import folded


def by_rows(p: Any) -> Tensor:
    return (linear(p) - Y).square().sum(-1).mean()


@wrong("output", "data", "result", AS_FIXED, valued(by_rows, "w"))
def mean_of_what_is_summed_in_each_row(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, y):
        each = (x @ params["w"] - y).square().sum(-1)
        # fix: return sf.pmean(each.mean(), "data")
        return each.mean()  # here

    return evaluate(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def near_top(p: Any) -> Tensor:
    return (linear(p).topk(1).indices == LABELS[:, None]).any(-1).double().mean()


@wrong("output", "data", "result", AS_FIXED, valued(near_top, "w"))
def mean_of_what_is_chosen_in_each_row(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, labels):
        found = ((x @ params["w"]).topk(1).indices == labels[:, None]).any(-1)
        # fix: return sf.pmean(found.double().mean(), "data")
        return found.double().mean()  # here

    return evaluate(weights("w"), part(X, mesh, "data"), part(LABELS, mesh, "data"))


def confused(p: Any) -> Tensor:
    return torch.bincount(LABELS * OUT + linear(p).argmax(-1), minlength=OUT * OUT).double()


@wrong("output", "data", "result", AS_FIXED, valued(confused, "w"))
def counts_of_each_kind(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, labels):
        pairs = labels * OUT + (x @ params["w"]).argmax(-1)
        # fix: return sf.psum(torch.bincount(pairs, minlength=9), "data").double()
        return torch.bincount(pairs, minlength=9).double()  # here

    return evaluate(weights("w"), part(X, mesh, "data"), part(LABELS, mesh, "data"))


def both(p: Any) -> Tensor:
    return F.cross_entropy(linear(p), LABELS) + 0.1 * torch.logsumexp(linear(p), -1).square().mean()


@wrong("output", "data", "result", AS_FIXED, valued(both, "w"))
def two_means_in_a_line(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def evaluate(params, x, labels):
        out = x @ params["w"]
        # fix: return sf.pmean(F.cross_entropy(out, labels) + 0.1 * torch.logsumexp(out, -1).square().mean(), 'data')
        return F.cross_entropy(out, labels) + 0.1 * torch.logsumexp(out, -1).square().mean()  # here

    return evaluate(weights("w"), part(X, mesh, "data"), part(LABELS, mesh, "data"))


@wrong("losses", "data", "", AS_FIXED, trained(both, "w"))
def psum_forgotten_of_two_means(shard_map, mesh):
    def loss_fn(params, x, labels):
        out = x @ sf.pvary(params["w"], "data")
        # fix: return sf.pmean(F.cross_entropy(out, labels) + 0.1 * torch.logsumexp(out, -1).square().mean(), 'data')
        return F.cross_entropy(out, labels) + 0.1 * torch.logsumexp(out, -1).square().mean()  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, LABELS)


def balanced(p: Any) -> Tensor:
    out = linear(p).softmax(-1)
    return OUT * (F.one_hot(out.argmax(-1), OUT).double().mean(0) * out.mean(0)).sum()


@wrong("output", "data", "result", AS_FIXED, valued(balanced, "w"))
def product_of_means_made_by_one_line(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data")), out_specs=P())
    def balance(params, x):
        def share(t):
            # fix: return sf.pmean(t.mean(0), "data")
            return t.mean(0)  # here

        out = (x @ params["w"]).softmax(-1)
        return OUT * (share(F.one_hot(out.argmax(-1), OUT).double()) * share(out)).sum()

    return balance(weights("w"), part(X, mesh, "data"))


def losses_of_steps() -> Any:
    params, found = weights("w"), []
    for _ in range(3):
        grads, loss = torch.func.grad_and_value(error)(params)
        params = sgd(params, grads)
        found.append(loss)
    return torch.stack(found)


@wrong("output", "data", "result", AS_FIXED, losses_of_steps)
def losses_of_a_loop(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def steps(params, x, y):
        found = []
        for _ in range(3):
            # fix: loss, grads = sf.value_and_grad(lambda p: sf.pmean(F.mse_loss(x @ p["w"], y), "data"))(params)
            loss, grads = sf.value_and_grad(lambda p: F.mse_loss(x @ p["w"], y))(params)  # here
            # fix: params = sgd(params, sf.psum(grads, "data"))
            params = sgd(params, sf.pmean(grads, "data"))
            found.append(loss)
        return torch.stack(found)

    return steps(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


QUEUE = normal(6, OUT, seed=6)


@wrong("output", "data", "result", AS_FIXED, valued(lambda p: torch.cat([QUEUE, linear(p)])[-6:], "w"))
def queue_of_this_ranks_keys(shard_map, mesh):
    @shard_map(in_specs=(P(), P(), P("data")), out_specs=P())
    def enqueue(params, queue, x):
        # fix: keys = sf.all_gather(x @ params["w"], "data", to="invariant")
        keys = x @ params["w"]  # here
        return torch.cat([queue, keys])[-6:]

    return enqueue(weights("w"), QUEUE, part(X, mesh, "data"))


def compared(p: Any) -> Tensor:
    logits = p["scale"].exp() * linear(p) @ Y.T
    return F.cross_entropy(logits, torch.arange(ROWS))


@wrong("losses", "data", "", AS_FIXED, trained(compared, "w", "scale"))
def loss_of_gathered_logits_and_of_what_pvary_gave(shard_map, mesh):
    def loss_fn(params, x, y):
        params = sf.pvary(params, "data")
        out, y = sf.all_gather((x @ params["w"], y), "data")
        logits = params["scale"].exp() * out @ y.T
        # fix: return sf.pmean(F.cross_entropy(logits, torch.arange(len(y))), 'data')
        return F.cross_entropy(logits, torch.arange(len(y)))  # here

    return train(shard_map, mesh, loss_fn, weights("w", "scale"), X, Y)


def mean_of_columns(p: Any) -> Tensor:
    return (X @ p["first"]).mean(0)


@wrong("means", "data", "", AS_FIXED, valued(mean_of_columns, "first"))
def sum_of_square_rows_over_this_ranks_count(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data")), out_specs=P())
    def center(params, x):
        out = x @ params["first"]  # as many columns as rows
        # fix: return sf.psum(out.sum(0), "data") / sf.psum(len(x), 'data')
        return sf.psum(out.sum(0), "data") / len(x)  # here

    return center(weights("first"), part(X, mesh, "data"))


def two_losses() -> Any:
    params = trained(error, "w")()[0]
    return params, linear(params).square().mean()


@wrong("means", "data", "", AS_FIXED, two_losses)
def psum_of_a_mean_before_a_pmean_of_another(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        def loss_fn(p):
            loss = F.mse_loss(x @ sf.pvary(p["w"], "data"), y)
            # fix: return sf.pmean(loss, "data")
            return sf.psum(loss, "data")  # here

        params = sgd(params, sf.grad(loss_fn)(params))
        return params, sf.pmean((x @ params["w"]).square().mean(), "data")

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def centered_by(p: Any) -> Tensor:
    h = X @ p["first"]
    return squares((h - h.mean(0)) @ p["w"], Y) / COUNT


@wrong("gradient", "data", "", AS_FIXED, trained(centered_by, "first", "w"))
def mean_of_a_lambda_meets_rows(shard_map, mesh):
    def loss_fn(params, x, y):
        params = sf.pvary(params, "data")
        center = lambda h: sf.pmean(h.mean(0), "data")  # noqa: E731
        h = x @ params["first"]
        # fix: return sf.psum(squares((h - sf.pvary(center(h), "data")) @ params["w"], y), "data") / COUNT
        return sf.psum(squares((h - center(h)) @ params["w"], y), "data") / COUNT  # here

    return train(shard_map, mesh, loss_fn, weights("first", "w"), X, Y)


def drawn_by(seed: int, columns: int = OUT) -> Tensor:
    return torch.cat([torch.randn(ROWS // 2, columns, generator=folded(seed, 0, r), dtype=X.dtype) for r in range(2)])


@wrong(
    "same", "data", "", "generator=shardfn.fold_in(seed, 'data')",
    trained(lambda p: F.mse_loss(linear(p), drawn_by(8)), "w"),
)  # fmt: skip
def one_noise_to_be_found_by_all_ranks(shard_map, mesh):
    def loss_fn(params, x):
        # fix: generator = sf.fold_in(8, 0, "data")
        generator = sf.fold_in(8, 0)
        noise = torch.randn(len(x), OUT, generator=generator, dtype=x.dtype)  # here
        return sf.pmean(F.mse_loss(x @ sf.pvary(params["w"], "data"), noise), "data")

    return train(shard_map, mesh, loss_fn, weights("w"), X)


@wrong(
    "same", "data", "", "generator=shardfn.fold_in(seed, 'data')",
    trained(lambda p: squares(torch.cat([X[:, :2], drawn_by(9, IN - 2)], -1) @ p["w"], Y) / COUNT, "w"),
)  # fmt: skip
def one_noise_beside_the_rows_of_all_ranks(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: generator = sf.fold_in(9, 0, "data")
        generator = sf.fold_in(9, 0)
        noise = torch.randn(len(x), IN - 2, generator=generator, dtype=x.dtype)  # here
        out = torch.cat([x[:, :2], noise], -1) @ sf.pvary(params["w"], "data")
        return sf.psum(squares(out, y), "data") / COUNT

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


def clustered(p: Any) -> Tensor:
    share = linear(p).softmax(-1)
    return share.T @ X / share.sum(0).clamp(min=1)[:, None]


@wrong(
    "output", "data", "result", "shardfn.psum(share.T @ x, 'data') and shardfn.psum(share.sum(0), 'data')",
    valued(clustered, "w"),
)  # fmt: skip
def two_sums_of_this_ranks_rows(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data")), out_specs=P())
    def centers(params, x):
        share = (x @ params["w"]).softmax(-1)
        # fix: total, count = sf.psum(share.T @ x, "data"), sf.psum(share.sum(0), "data")
        total, count = share.T @ x, share.sum(0)  # here
        return total / count.clamp(min=1)[:, None]

    return centers(weights("w"), part(X, mesh, "data"))


@wrong("output", "tensor", "result", AS_FIXED, valued(lambda p: (X @ p["up"]).exp().sum(-1).log().mean(), "up"), GRID)
def log_of_a_sum_over_the_columns_of_a_rank(shard_map, mesh):
    @shard_map(in_specs=(P(None, "tensor"), P()), out_specs=P())
    def entropy(up, x):
        # fix: total = sf.psum((x @ up).exp().sum(-1), "tensor")
        total = (x @ up).exp().sum(-1)  # here
        return total.log().mean()

    return entropy(part(weights("up")["up"], mesh, "tensor", dim=1), X)


@wrong("sum", "data", "", AS_FIXED, graded(error, "w"))
def psum_of_the_gradients_of_pieces(shard_map, mesh):
    @shard_map(in_specs=(P("data"), P("data"), P("data")), out_specs=P())
    def gradient(w, x, y):
        def loss_fn(w):
            return sf.psum(squares(x @ sf.all_gather(w, "data"), y), "data") / COUNT

        grads = sf.grad(loss_fn)(w)
        # fix: # leave psum out: grads
        grads = sf.psum(grads, "data")  # here
        return {"w": sf.all_gather(grads, "data", to="invariant")}

    return gradient(part(weights("w")["w"], mesh, "data"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("means", "replica", "", AS_FIXED, trained(error, "w"), HYBRID)
def psum_of_a_pmean_along_another_axis(shard_map, mesh):
    def loss_fn(params, x, y):
        loss = F.mse_loss(x @ sf.pvary(params["w"], BOTH), y)
        # fix: return sf.pmean(sf.pmean(loss, 'shard'), "replica")
        return sf.psum(sf.pmean(loss, "shard"), "replica")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y, axes=BOTH)


def after_a_step(p: Any) -> Tensor:
    total = torch.zeros((), dtype=X.dtype)
    for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
        own = sgd(p, torch.func.grad(lambda p: F.mse_loss(x[:1] @ p["w"], y[:1]))(p))  # noqa: B023
        total = total + F.mse_loss(x[1:] @ own["w"], y[1:])
    return total / 2


@wrong("means", "data", "", AS_FIXED, trained(after_a_step, "w"))
def psum_of_a_mean_after_a_step(shard_map, mesh):
    def loss_fn(params, x, y):
        own = sf.pvary(params, "data")
        own = sgd(own, sf.grad(lambda p: F.mse_loss(x[:1] @ p["w"], y[:1]))(own))
        loss = F.mse_loss(x[1:] @ own["w"], y[1:])
        # fix: return sf.pmean(loss, "data")
        return sf.psum(loss, "data")  # here

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


def slope(p: Any) -> Tensor:
    return X.T @ (linear(p) - Y) / ROWS + 0.1 * p["w"]


@wrong("whole", "data", "", AS_FIXED, valued(slope, "w"))
def decay_beside_a_product_over_all_rows(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def gradient(params, x, y):
        w, rows = params["w"], sf.psum(len(x), "data")
        # fix: return sf.psum(x.T @ (x @ w - y) / rows, 'data') + 0.1 * w
        return sf.psum(x.T @ (x @ w - y) / rows + 0.1 * w, "data")  # here

    return gradient(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("sum", "replica", "", AS_FIXED, lambda: {"layer": graded(error, "w", "b")()}, HYBRID)
def psum_along_replica_of_each_flat_gradient(shard_map, mesh):
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    @shard_map(in_specs=(..., P(BOTH), P(BOTH)), out_specs=...)
    def gradient(params, x, y):
        grads = sf.grad(lambda p: sf.psum(squares(layer(p["layer"], x), y), BOTH) / COUNT)(params)
        # fix: return optree.tree_map(lambda g: g, grads)  # leave psum out: g
        return optree.tree_map(lambda g: sf.psum(g, "replica"), grads)  # here

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    return gradient(params, part(X, mesh, *BOTH), part(Y, mesh, *BOTH))


def stepped_alone() -> Any:
    params, found = weights("w"), []
    for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
        grads = torch.func.grad(lambda p: F.mse_loss(x @ p["w"], y))(params)  # noqa: B023
        found.append(sgd(params, grads)["w"])
    return {"w": (found[0] + found[1]) / 2}


@wrong("gradient", "data", "params['w']", "", stepped_alone, says="average what they lead to, by shardfn.pmean")
def steps_of_each_ranks_own_returned(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def steps(params, x, y):
        own = sf.pvary(params, "data")  # here
        # fix: return sf.pmean(sgd(own, sf.grad(lambda p: F.mse_loss(x @ p["w"], y))(own)), "data")
        # fix: # shardfn.pvary(params['w'], 'data') inside of the function that is differentiated
        return sgd(own, sf.grad(lambda p: F.mse_loss(x @ p["w"], y))(own))

    return steps(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def centered(p: Any) -> Tensor:
    h = torch.tanh(X @ p["layer"]["w"])
    return squares(h - h.mean(0), Y) / COUNT


def graded_step(loss: Any) -> Any:
    params = {"layer": weights("w")}
    return sgd(params, torch.func.grad(loss)(params))


def centred_behind(shard_map: Any, mesh: Any, loss_fn: Any, placement: Any, axes: Any) -> Any:
    @shard_map(in_specs=(..., P(axes), P(axes)), out_specs=...)
    def step(params, x, y):
        return sgd(params, sf.grad(loss_fn)(params, x, y))

    params = sf.shard({"layer": weights("w")}, mesh, placement)
    return step(params, part(X, mesh, *axes), part(Y, mesh, *axes))


@wrong("gradient", "data", "", AS_FIXED, lambda: graded_step(centered))
def mean_of_what_a_stage_returns(shard_map, mesh):
    layer = sf.stage(lambda p, x: torch.tanh(x @ p["w"]))

    def loss_fn(params, x, y):
        h = layer(params["layer"], x)
        mean = sf.psum(h.sum(0), "data") / ROWS
        # fix: h = h - sf.pvary(mean, "data")
        h = h - mean  # here
        return sf.psum(squares(h, y), "data") / COUNT

    return centred_behind(shard_map, mesh, loss_fn, sf.full_shard("data"), ("data",))


@wrong("gradient", BOTH, "", AS_FIXED, lambda: graded_step(centered), HYBRID)
def mean_of_what_a_stage_returns_that_runs_again(shard_map, mesh):
    layer = sf.stage(lambda p, x: torch.tanh(x @ p["w"]), remat=True)

    def loss_fn(params, x, y):
        h = layer(params["layer"], x)
        mean = sf.psum(h.sum(0), ("replica", "shard")) / ROWS
        # fix: h = h - sf.pvary(mean, ("replica", "shard"))
        h = h - mean  # here
        return sf.psum(squares(h, y), ("replica", "shard")) / COUNT

    placement = sf.hybrid_shard(shard="shard", replica="replica")
    return centred_behind(shard_map, mesh, loss_fn, placement, BOTH)


@wrong("losses", "shard", "", AS_FIXED, lambda: {"layer": graded(error, "w", "b")()}, {"shard": 4})
def psum_forgotten_micro_batches_fsdp(shard_map, mesh):
    layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])

    def loss_fn(params, x, y):
        # fix: return sf.pmean((layer(params["layer"], x) - y).square().mean(), "shard") / 2
        return (layer(params["layer"], x) - y).square().mean() / 2  # here

    @shard_map(in_specs=(..., P("shard"), P("shard")), out_specs=...)
    def gradients(params, x, y):
        return sf.accumulate(loss_fn, list(zip(x.split(1), y.split(1), strict=True)))(params)[1]

    params = sf.shard({"layer": weights("w", "b")}, mesh, sf.full_shard("shard"))
    return gradients(params, part(X, mesh, "shard"), part(Y, mesh, "shard"))


@wrong("parts", "data", "params", AS_FIXED, graded(error, "w", "b"), says="params, in all its tensors, is the same")
def plain_parameters_in_place_of_shards(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: params = sf.pvary(params, "data")
        # fix: out = x @ params["w"] + params["b"]
        out = x @ params["w"] + params["b"]  # here
        return sf.psum((out - y).square().sum(), "data") / COUNT

    @shard_map(in_specs=(..., P("data"), P("data")), out_specs=...)
    def gradients(params, x, y):
        return sf.grad(loss_fn)(params, x, y)

    return gradients(weights("w", "b"), part(X, mesh, "data"), part(Y, mesh, "data"))


def halved() -> Any:
    grads = graded(error, "w")()["w"]
    return {"w": grads / (2 * grads.norm())}, grads.norm()


@wrong("parts", "data", "params['w']", AS_FIXED, halved, says="goes into result[0]['w'] varies there")
def parts_that_are_clipped_before_they_leave(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(..., P("data"), P("data")), out_specs=...)
    def gradients(params, x, y):
        grads = sf.grad(loss_fn)(params, x, y)
        norm = grads["w"].norm()
        return {"w": grads["w"] / (2 * norm)}, norm

    return gradients(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("parts", "data", "params['w']", AS_FIXED, halved, says="goes into result[0]['w'] varies there")
def parts_that_are_clipped_by_the_norm_of_all_ranks(shard_map, mesh):
    """A sum of squares over ranks is none of the parts; `fix` makes the gradient, and its norm, the same on all."""

    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(..., P("data"), P("data")), out_specs=...)
    def gradients(params, x, y):
        grads = sf.grad(loss_fn)(params, x, y)
        norm = sf.pmean(grads["w"].square().sum(), "data").sqrt()
        return {"w": grads["w"] / (2 * norm)}, norm

    return gradients(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("means", (), "", "return (total, count)", trained(error, "w"))
def micro_batches_of_other_sizes(shard_map, mesh):
    """The mean over 3 rows and the mean over 1, of which each counts for one half."""

    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        # fix: return sf.psum((out - y).square().sum(), "data") / COUNT
        return sf.pmean((out - y).square().mean(), "data") / 2  # here

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.accumulate(loss_fn, list(zip(x.split(3), y.split(3), strict=True)))(params)
        return sgd(params, grads), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("means", (), "", "return (total, count)", trained(masked, "w"))
def micro_batches_of_global_means(shard_map, mesh):
    """The mean over all ranks' real rows, as README has it; of micro-batches it is a sum of means."""

    def loss_fn(params, x, y, real):
        each = (x @ sf.pvary(params["w"], "data") - y).square().mean(1)
        # fix: return sf.psum((each * real).sum(), "data"), sf.psum(real.sum(), "data")
        return sf.psum((each * real).sum(), "data") / sf.psum(real.sum(), "data")  # here

    @shard_map(in_specs=(P(), P("data"), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y, real):
        loss, grads = sf.accumulate(loss_fn, (x, y, real), micro=2)(params)
        return sgd(params, grads), loss

    batch = (part(whole, mesh, "data") for whole in (X, Y, REAL))
    return step(weights("w"), *batch)


def averaged(p: Any) -> Tensor:
    return squares(linear(p), Y) / ROWS


def train_in_parts(shard_map: Any, mesh: Any, loss_fn: Any, micro: int) -> Any:
    """A step of SGD by hand, whose batch is cut into micro-batches: new parameters and the loss."""

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.accumulate(loss_fn, (x, y), micro=micro)(params)
        return sgd(params, grads), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("means", (), "", "return (total, count)", trained(averaged, "w"))
def micro_batches_of_means_over_all_rows(shard_map, mesh):
    def loss_fn(params, x, y):
        total = squares(x @ sf.pvary(params["w"], "data"), y)
        # fix: return sf.psum(total, "data"), sf.psum(len(x), "data")
        return sf.psum(total, "data") / sf.psum(len(x), "data")  # here

    return train_in_parts(shard_map, mesh, loss_fn, 4)


@wrong("means", "data", "", AS_FIXED, trained(averaged, "w"))
def micro_batches_over_the_count_of_this_rank(shard_map, mesh):
    def loss_fn(params, x, y):
        total = squares(x @ sf.pvary(params["w"], "data"), y)
        count = len(x)
        # fix: return (sf.psum(total, "data"), sf.psum(count, "data"))
        return sf.psum(total, "data"), count  # here

    return train_in_parts(shard_map, mesh, loss_fn, 2)


def ones() -> Any:
    return {"w": torch.ones(IN, OUT, dtype=torch.float64)}


@wrong("gradient", "data", "state['params']['w']", AS_FIXED, lambda: sgd(ones(), torch.func.grad(error)(ones())))
def missing_pvary_of_a_constant_under_dots(shard_map, mesh):
    opt = sf.optim.sgd(0.1)

    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(..., P("data"), P("data")), out_specs=...)
    def step(state, x, y):
        grads = sf.grad(loss_fn)(state["params"], x, y)
        params, moments = opt.step(state["params"], grads, state["opt"])
        return {"params": params, "opt": moments}

    state = {"params": ones(), "opt": opt.init(ones())}
    return step(state, part(X, mesh, "data"), part(Y, mesh, "data"))["params"]


@wrong("gradient", "data", "a tensor of shape", AS_FIXED, graded(error, "w"))
def gradient_outside_of_what_is_closed_over(shard_map, mesh):
    def loss_fn(params):
        @shard_map(in_specs=P("data"), out_specs=P())
        def loss(x, y):
            # fix: out = x @ sf.pvary(params["w"], "data")
            out = x @ params["w"]  # here
            return sf.psum(squares(out, y), "data") / COUNT

        return loss(part(X, mesh, "data"), part(Y, mesh, "data"))

    return sf.grad(loss_fn)(weights("w"))


@wrong("gradient", "data", "a tensor of shape", AS_FIXED, graded(error, "w"))
def transform_outside_of_what_is_closed_over(shard_map, mesh):
    def loss_fn(params):
        @shard_map(in_specs=P("data"), out_specs=P())
        def loss(x, y):
            # fix: out = x @ sf.pvary(params["w"], "data")
            out = x @ params["w"]  # here
            return sf.psum(squares(out, y), "data") / COUNT

        return loss(part(X, mesh, "data"), part(Y, mesh, "data"))

    return torch.func.grad(loss_fn)(weights("w"))


@wrong("means", "data", "", AS_FIXED, trained(averaged, "w"))
def micro_batches_of_mean_totals_over_a_sum_of_counts(shard_map, mesh):
    def loss_fn(params, x, y):
        total, count = squares(x @ sf.pvary(params["w"], "data"), y), len(x)
        # fix: return (sf.psum(total, "data"), sf.psum(count, "data"))
        return sf.pmean(total, "data"), sf.psum(count, "data")  # here

    return train_in_parts(shard_map, mesh, loss_fn, 2)


@wrong("means", "data", "", AS_FIXED, trained(masked, "w"))
def micro_batches_of_totals_over_a_mean_of_counts(shard_map, mesh):
    def loss_fn(params, x, y, real):
        total = ((x @ sf.pvary(params["w"], "data") - y).square().mean(1) * real).sum()
        count = real.sum()
        # fix: return (sf.psum(total, "data"), sf.psum(count, "data"))
        return sf.psum(total, "data"), sf.pmean(count, "data")  # here

    @shard_map(in_specs=(P(), P("data"), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y, real):
        loss, grads = sf.accumulate(loss_fn, (x, y, real), micro=2)(params)
        return sgd(params, grads), loss

    batch = (part(whole, mesh, "data") for whole in (X, Y, REAL))
    return step(weights("w"), *batch)


@wrong("means", (), "", "return (total, count)", trained(averaged, "w"))
def micro_batches_of_a_mean_for_each_count(shard_map, mesh):
    def loss_fn(params, x, y):
        each = (x @ sf.pvary(params["w"], "data") - y).square().sum(1)
        # fix: return sf.pmean(each.sum(), "data"), len(x)
        return sf.pmean(each.mean(), "data"), len(x)  # here

    return train_in_parts(shard_map, mesh, loss_fn, 2)
