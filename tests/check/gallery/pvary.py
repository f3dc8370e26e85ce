"""A parameter that is the same on all ranks meets rows that are not, without `pvary`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import P
from tests.check.gallery.setting import (
    AS_FIXED,
    BOTH,
    COUNT,
    HYBRID,
    IN,
    LABELS,
    ROWS,
    SEQUENCES,
    SHARD,
    TARGETS,
    TOKENS,
    X,
    Y,
    error,
    graded,
    part,
    sgd,
    squares,
    stepped,
    train,
    trained,
    weights,
    wrong,
)


@wrong("gradient", "data", "params['w']", AS_FIXED, trained(error, "w"))
def missing_pvary_ddp(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def normed(p: Any) -> Tensor:
    return squares(F.rms_norm(X, (IN,), p["norm"]) @ p["w"], Y) / COUNT


@wrong("gradient", "data", "params['norm']", AS_FIXED, trained(normed, "norm", "w"))
def missing_pvary_norm_weight(shard_map, mesh):
    def loss_fn(params, x, y):
        w = sf.pvary(params["w"], "data")
        # fix: h = F.rms_norm(x, (IN,), sf.pvary(params["norm"], "data"))
        h = F.rms_norm(x, (IN,), params["norm"])  # here
        return sf.psum(squares(h @ w, y), "data") / COUNT

    return train(shard_map, mesh, loss_fn, weights("norm", "w"), X, Y)


@wrong("gradient", "data", "params['b']", AS_FIXED, trained(error, "w", "b"))
def missing_pvary_bias_only(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        # fix: out = out + sf.pvary(params["b"], "data")
        out = out + params["b"]  # here
        return sf.psum(squares(out, y), "data") / sf.psum(y.numel(), "data")

    return train(shard_map, mesh, loss_fn, weights("w", "b"), X, Y)


def adapted() -> Any:
    params, opt = weights("w"), sf.optim.adamw(0.1)
    grads, loss = torch.func.grad_and_value(error)(params)
    return opt.step(params, grads, opt.init(params))[0], loss


@wrong("gradient", "data", "params['w']", AS_FIXED, adapted)
def missing_pvary_with_optim_step(shard_map, mesh):
    opt = sf.optim.adamw(0.1)

    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), ..., P("data"), P("data")), out_specs=(P(), ..., P()))
    def step(params, state, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        params, state = opt.step(params, grads, state)
        return params, state, loss

    params = weights("w")
    params, _, loss = step(params, opt.init(params), part(X, mesh, "data"), part(Y, mesh, "data"))
    return params, loss


@wrong("gradient", "data", "params['w']", AS_FIXED, trained(error, "w"))
def missing_pvary_under_dots(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=..., out_specs=...)
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def clipped() -> Any:
    params = weights("w")
    grads = torch.func.grad(error)(params)
    norm = grads["w"].norm()
    return {"w": params["w"] - 0.1 * grads["w"] / norm.clamp(min=0.5) * 0.5}, norm


@wrong("gradient", "data", "params['w']", AS_FIXED, clipped)
def missing_pvary_clip(shard_map, mesh):
    clip = sf.optim.clip_by_global_norm(0.5)

    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), ..., P("data"), P("data")), out_specs=(P(), P()))
    def step(params, state, x, y):
        grads = sf.grad(loss_fn)(params, x, y)
        grads, state = clip.update(params, grads, state)
        return sgd(params, grads), state["norm"]

    params = weights("w")
    return step(params, clip.init(params), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("gradient", "data", "params['w']", AS_FIXED, stepped(error, "w"))
def missing_pvary_torch_func_grad(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        grads = torch.func.grad(loss_fn)(params, x, y)
        return sgd(params, grads)

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("gradient", "data", "params['w']", AS_FIXED, stepped(error, "w"))
def missing_pvary_autograd_grad(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        w = params["w"].requires_grad_()
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        loss = sf.psum(squares(out, y), "data") / COUNT
        (grad,) = torch.autograd.grad(loss, w)
        return {"w": (w - 0.1 * grad).detach()}

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("gradient", "data", "params['w']", AS_FIXED, stepped(error, "w"))
def missing_pvary_backward_dot_grad(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        params["w"].requires_grad_()
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        loss = sf.psum(squares(out, y), "data") / COUNT
        loss.backward()
        return {"w": params["w"].detach() - 0.1 * params["w"].grad}

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("gradient", "data", "w", AS_FIXED, lambda: graded(error, "w")()["w"])
def missing_pvary_leaf_made_inside(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(w, x, y):
        w = w.detach().requires_grad_()
        # fix: out = x @ sf.pvary(w, "data")
        out = x @ w  # here
        loss = sf.psum(squares(out, y), "data") / COUNT
        loss.backward()
        return w.grad

    return step(weights("w")["w"], part(X, mesh, "data"), part(Y, mesh, "data"))


def moment() -> Any:
    params = weights("w")
    return 0.1 * torch.func.grad(error)(params)["w"].square()


@wrong("gradient", "data", "w", AS_FIXED, moment)
def missing_pvary_in_a_moment(shard_map, mesh):
    @shard_map(in_specs=(P(), P(), P("data"), P("data")), out_specs=P())
    def moments(w, before, x, y):
        def loss_fn(w):
            # fix: return sf.psum(squares(x @ sf.pvary(w, "data"), y), "data") / COUNT
            return sf.psum(squares(x @ w, y), "data") / COUNT  # here

        return before.mul_(0.9).add_(torch.func.grad(loss_fn)(w).square(), alpha=0.1)

    w = weights("w")["w"]
    return moments(w, torch.zeros_like(w), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("gradient", "data", "params['w']", AS_FIXED, graded(error, "w"))
def missing_pvary_differentiated_outside(shard_map, mesh):
    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    params = weights("w")
    params["w"].requires_grad_()
    loss = loss_fn(params, part(X, mesh, "data"), part(Y, mesh, "data"))
    loss.backward()
    return {"w": params["w"].grad}


def recurrent(p: Any) -> Tensor:
    h = torch.zeros(ROWS, IN, dtype=torch.float64)
    for t in range(4):
        h = torch.tanh(h @ p["first"] + SEQUENCES[:, t])
    return squares(h, TARGETS[:, 0]) / h.numel()


@wrong(
    "gradient", "data", "params['first']", AS_FIXED, trained(recurrent, "first")
)  # fmt: skip
def missing_pvary_in_scan(shard_map, mesh):
    def loss_fn(params, x, y):
        h = torch.zeros_like(y)
        for t in range(x.shape[1]):
            # fix: h = torch.tanh(h @ sf.pvary(params["first"], "data") + x[:, t])
            h = torch.tanh(h @ params["first"] + x[:, t])  # here
        return sf.psum(squares(h, y), "data") / sf.psum(y.numel(), "data")

    return train(shard_map, mesh, loss_fn, weights("first"), SEQUENCES, TARGETS[:, 0])


@wrong("gradient", "data", "params['w']", AS_FIXED, trained(error, "w"))
def missing_pvary_vmap(shard_map, mesh):
    def loss_of_one(w, x, y):
        out = x @ w  # here
        return squares(out, y)

    def loss_fn(params, x, y):
        # fix: losses = vmap(loss_of_one, (None, 0, 0))(sf.pvary(params["w"], "data"), x, y)
        losses = vmap(loss_of_one, (None, 0, 0))(params["w"], x, y)
        return sf.psum(losses.sum(), "data") / COUNT

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


def private() -> Any:
    params = weights("w")
    each = vmap(torch.func.grad(lambda w, x, y: squares(x @ w, y)), (None, 0, 0))(params["w"], X, Y)
    short = each / each.flatten(1).norm(dim=1).clamp(min=1.0)[:, None, None]
    return {"w": params["w"] - 0.1 * short.sum(0) / ROWS}


@wrong("output", "data", "result['w']", AS_FIXED, private)
def psum_forgotten_per_sample_gradients(shard_map, mesh):
    def loss_of_one(params, x, y):
        return squares(x @ params["w"], y)

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        each = vmap(sf.grad(loss_of_one), (None, 0, 0))(params, x, y)["w"]
        clipped = each / each.flatten(1).norm(dim=1).clamp(min=1.0)[:, None, None]
        # fix: total = sf.psum(clipped.sum(0), "data")
        total = clipped.sum(0)  # here
        return {"w": params["w"] - 0.1 * total / ROWS}

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


class Scaled(torch.autograd.Function):
    """`x * weight`, with a backward of its own, as a fused kernel has."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, ct):
        x, weight = ctx.saved_tensors
        return ct * weight, (ct * x).sum(0)


def scaled(p: Any) -> Tensor:
    return squares((X * p["norm"]) @ p["w"], Y) / COUNT


@wrong("gradient", "data", "params['norm']", AS_FIXED, trained(scaled, "norm", "w"))
def missing_pvary_custom_function(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: h = Scaled.apply(x, sf.pvary(params["norm"], "data"))
        h = Scaled.apply(x, params["norm"])  # here
        return sf.psum(squares(h @ sf.pvary(params["w"], "data"), y), "data") / COUNT

    return train(shard_map, mesh, loss_fn, weights("norm", "w"), X, Y)


@wrong("gradient", "data", "params['w']", AS_FIXED, trained(error, "w"))
def missing_pvary_checkpoint(shard_map, mesh):
    def layer(w, x):
        return x @ w  # here

    def loss_fn(params, x, y):
        # fix: out = checkpoint(layer, sf.pvary(params["w"], "data"), x, use_reentrant=False)
        out = checkpoint(layer, params["w"], x, use_reentrant=False)
        return sf.psum(squares(out, y), "data") / COUNT

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


@wrong("gradient", "data", "params['b']", AS_FIXED, trained(error, "w", "b"))
def missing_pvary_in_place(shard_map, mesh):
    def loss_fn(params, x, y):
        out = x @ sf.pvary(params["w"], "data")
        # fix: out.add_(sf.pvary(params["b"], "data"))
        out.add_(params["b"])  # here
        return sf.psum(squares(out, y), "data") / COUNT

    return train(shard_map, mesh, loss_fn, weights("w", "b"), X, Y)


def placed(p: Any) -> Tensor:
    return squares(p["table"][TOKENS] + p["place"], TARGETS[:4]) / TARGETS[:4].numel()


@wrong("gradient", "data", "params['place']", AS_FIXED, trained(placed, "table", "place"))
def missing_pvary_positions(shard_map, mesh):
    def loss_fn(params, tokens, y):
        x = F.embedding(tokens, sf.pvary(params["table"], "data"))
        # fix: x = x + sf.pvary(params["place"], "data")
        x = x + params["place"]  # here
        return sf.psum(squares(x, y), "data") / sf.psum(y.numel(), "data")

    return train(shard_map, mesh, loss_fn, weights("table", "place"), TOKENS, TARGETS[:4])


def heated(p: Any) -> Tensor:
    return F.cross_entropy(X @ p["w"] * p["scale"].exp(), LABELS)


@wrong("gradient", "data", "params['scale']", AS_FIXED, trained(heated, "w", "scale"))
def missing_pvary_temperature(shard_map, mesh):
    def loss_fn(params, x, labels):
        temperature = params["scale"].exp()
        # fix: logits = x @ sf.pvary(params["w"], "data") * sf.pvary(temperature, "data")
        logits = x @ sf.pvary(params["w"], "data") * temperature  # here
        return sf.psum(F.cross_entropy(logits, labels, reduction="sum"), "data") / ROWS

    return train(shard_map, mesh, loss_fn, weights("w", "scale"), X, LABELS)


def tied(p: Any) -> Tensor:
    h = p["table"][TOKENS[:, :-1]]
    return F.cross_entropy((h @ p["table"].T).flatten(0, 1), TOKENS[:, 1:].flatten())


@wrong("gradient", "data", "params['table']", AS_FIXED, trained(tied, "table"))
def weight_tying_one_use_without_pvary(shard_map, mesh):
    def loss_fn(params, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        h = F.embedding(inputs, sf.pvary(params["table"], "data"))
        # fix: logits = h @ sf.pvary(params["table"], "data").T
        logits = h @ params["table"].T  # here
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return sf.psum(total, "data") / sf.psum(targets.numel(), "data")

    return train(shard_map, mesh, loss_fn, weights("table"), TOKENS)


@wrong("gradient", "replica", "params['w']", AS_FIXED, trained(error, "w"), HYBRID)
def missing_pvary_one_of_two_axes(shard_map, mesh):
    def loss_fn(params, x, y):
        w = sf.all_gather(params["w"], "shard")
        # fix: out = x @ sf.pvary(w, "replica")
        out = x @ w  # here
        return sf.psum(squares(out, y), BOTH) / COUNT

    @shard_map(in_specs=({"w": P("shard")}, P(BOTH), P(BOTH)), out_specs=({"w": P("shard")}, P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    params = {"w": part(weights("w")["w"], mesh, "shard")}
    params, loss = step(params, part(X, mesh, *BOTH), part(Y, mesh, *BOTH))
    whole = shard_map(lambda w: sf.all_gather(w, "shard", to="invariant"), in_specs=P("shard"), out_specs=P())
    return {"w": whole(params["w"])}, loss


@wrong("gradient", "data", "params['w']", AS_FIXED, trained(error, "w"))
def missing_pvary_accumulate(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        loss, grads = sf.accumulate(loss_fn, list(zip(x.split(2), y.split(2), strict=True)))(params)
        return sgd(params, grads), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


def adapter(p: Any) -> Tensor:
    return squares(X @ weights("w")["w"] + X @ p["low"] @ p["high"], Y) / COUNT


@wrong("gradient", "data", "params['low']", AS_FIXED, trained(adapter, "low", "high"))
def missing_pvary_adapter(shard_map, mesh):
    def loss_fn(params, base, x, y):
        # fix: h = x @ sf.pvary(params["low"], "data")
        h = x @ params["low"]  # here
        out = x @ base + h @ sf.pvary(params["high"], "data")
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, base, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, base, x, y)
        return sgd(params, grads), loss

    return step(weights("low", "high"), weights("w")["w"], part(X, mesh, "data"), part(Y, mesh, "data"))


def product() -> Any:
    along = weights("w", seed=1)
    return torch.func.jvp(torch.func.grad(bent), (weights("w"),), (along,))[1]


def bent(p: Any) -> Tensor:
    return squares(torch.tanh(X @ p["w"]), Y) / COUNT


@wrong("gradient", "data", "params['w']", AS_FIXED, product)
def missing_pvary_hessian_vector_product(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: out = torch.tanh(x @ sf.pvary(params["w"], "data"))
        out = torch.tanh(x @ params["w"])  # here
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), P(), P("data"), P("data")), out_specs=P())
    def product(params, along, x, y):
        def slope(params):
            return (sf.grad(loss_fn)(params, x, y)["w"] * along["w"]).sum()

        return sf.grad(slope)(params)

    return product(weights("w"), weights("w", seed=1), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong(
    "gradient",
    "data",
    "params['w']",
    "inside of the function that is differentiated",
    trained(error, "w"),
    says="outside of what is differentiated",
)
def pvary_outside_the_differentiated_function(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: out = x @ sf.pvary(params["w"], "data")
        out = x @ params["w"]
        return sf.psum(squares(out, y), "data") / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(params, x, y):
        # fix: pass
        params = sf.pvary(params, "data")  # here
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    return step(weights("w"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("gradient", "data", "params['b']", AS_FIXED, stepped(error, "w", "b"))
def psum_by_hand_forgets_the_bias(shard_map, mesh):
    def loss_fn(params, x, y):
        # fix: out = x @ params["w"] + sf.pvary(params["b"], "data")
        out = x @ params["w"] + params["b"]  # here
        return squares(out, y) / COUNT

    @shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, x, y):
        grads = sf.grad(loss_fn)(params, x, y)
        grads["w"] = sf.psum(grads["w"], "data")
        return sgd(params, grads)

    return step(weights("w", "b"), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("gradient", "shard", "", AS_FIXED, trained(error, "w"), SHARD)
def all_gather_invariant_meets_rows(shard_map, mesh):
    def loss_fn(params, x, y):
        w = sf.all_gather(params["w"], "shard", to="invariant")
        # fix: out = x @ sf.pvary(w, "shard")
        out = x @ w  # here
        return sf.psum(squares(out, y), "shard") / COUNT

    @shard_map(in_specs=({"w": P("shard")}, P("shard"), P("shard")), out_specs=({"w": P("shard")}, P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    params = {"w": part(weights("w")["w"], mesh, "shard")}
    params, loss = step(params, part(X, mesh, "shard"), part(Y, mesh, "shard"))
    whole = shard_map(lambda w: sf.all_gather(w, "shard", to="invariant"), in_specs=P("shard"), out_specs=P())
    return {"w": whole(params["w"])}, loss


def standardized(p: Any) -> Tensor:
    h = X @ p["w"]
    return squares(h - h.mean(0), Y) / COUNT


@wrong("gradient", "data", "", AS_FIXED, trained(standardized, "w"))
def mean_of_the_batch_meets_its_rows(shard_map, mesh):
    """A batch norm by hand: the mean is of all rows, but each rank has its own rows' part of its derivative alone."""

    def loss_fn(params, x, y):
        h = x @ sf.pvary(params["w"], "data")
        mean = sf.psum(h.sum(0), "data") / ROWS
        # fix: h = h - sf.pvary(mean, "data")
        h = h - mean  # here
        return sf.psum(squares(h, y), "data") / COUNT

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)


def normalized(p: Any) -> Tensor:
    scores = (X @ p["w"])[:, 0].exp()
    return ((scores / scores.sum())[:, None] * Y).square().sum()


@wrong("gradient", "data", "", AS_FIXED, trained(normalized, "w"))
def softmax_over_all_rows(shard_map, mesh):
    """Attention to a sequence of which each rank has a part."""

    def loss_fn(params, x, y):
        scores = (x @ sf.pvary(params["w"], "data"))[:, 0].exp()
        total = sf.psum(scores.sum(), "data")
        # fix: shares = scores / sf.pvary(total, "data")
        shares = scores / total  # here
        return sf.psum((shares[:, None] * y).square().sum(), "data")

    return train(shard_map, mesh, loss_fn, weights("w"), X, Y)
