"""Mistakes on whose way to the loss a stage lies, and losses that every rank computes in full from its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from tests.check.gallery.setting import (
    AS_FIXED,
    COUNT,
    GRID,
    HYBRID,
    ROWS,
    SHARD,
    X,
    Y,
    graded,
    part,
    sgd,
    squares,
    train,
    weights,
    wrong,
)


def encode(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["first"])


def head(p: Any, h: Tensor) -> Tensor:
    return h @ p["w"]


def whole() -> dict[str, Any]:
    return {"encoder": weights("first"), "head": weights("w")}


def trained(loss: Callable[[Any], Tensor]) -> Callable[[], Any]:
    """New parameters of both stages, and the loss."""

    def reference() -> Any:
        grads, value = torch.func.grad_and_value(loss)(whole())
        return sgd(whole(), grads), value

    return reference


def centered(p: Any) -> Tensor:
    h = encode(p["encoder"], X)
    return squares(head(p["head"], h - h.mean(0)), Y) / COUNT


@wrong("gradient", "shard", "", AS_FIXED, trained(centered), SHARD)
def mean_of_all_rows_before_a_stage(shard_map, mesh):
    encoder, last = sf.stage(encode), sf.stage(head)

    def loss_fn(params, x, y):
        h = encoder(params["encoder"], x)
        center = sf.pmean(h.mean(0), "shard")
        # fix: h = h - sf.pvary(center, 'shard')
        h = h - center  # here
        return sf.psum(squares(last(params["head"], h), y), "shard") / COUNT

    params = sf.shard(whole(), mesh, sf.full_shard("shard"))
    return train(shard_map, mesh, loss_fn, params, X, Y, axes="shard", specs=...)


def bounded(p: Any) -> Tensor:
    h = encode(p["encoder"], X)
    return squares(head(p["head"], torch.tanh(h - h.mean(0))), Y) / COUNT


@wrong("gradient", "shard", "", AS_FIXED, trained(bounded), SHARD)
def mean_of_all_rows_before_a_stage_that_recomputes(shard_map, mesh):
    encoder, last = sf.stage(encode, remat=True), sf.stage(head, remat=True)

    def loss_fn(params, x, y):
        h = encoder(params["encoder"], x)
        center = sf.pmean(h.mean(0), "shard")
        # fix: h = torch.tanh(h - sf.pvary(center, 'shard'))
        h = torch.tanh(h - center)  # here
        return sf.psum(squares(last(params["head"], h), y), "shard") / COUNT

    params = sf.shard(whole(), mesh, sf.full_shard("shard"))
    return train(shard_map, mesh, loss_fn, params, X, Y, axes="shard", specs=...)


def mapped(p: Any) -> Tensor:
    return squares(head(weights("w"), X @ p["first"]), Y) / COUNT


@wrong("gradient", "shard", "p['first']", AS_FIXED, graded(mapped, "first"), SHARD)
def missing_pvary_before_a_stage(shard_map, mesh):
    last = sf.stage(head)

    @shard_map(in_specs=(P(), ..., P("shard"), P("shard")), out_specs=P())
    def gradient(p, params, x, y):
        def loss_fn(p):
            # fix: h = x @ sf.pvary(p["first"], "shard")
            h = x @ p["first"]  # here
            return sf.psum(squares(last(params["head"], h), y), "shard") / COUNT

        return sf.grad(loss_fn)(p)

    params = sf.shard(whole(), mesh, sf.full_shard("shard"))
    return gradient(weights("first"), params, part(X, mesh, "shard"), part(Y, mesh, "shard"))


def gated(p: Any) -> Tensor:
    h = torch.tanh(X @ p["first"] @ weights("up")["up"]) @ weights("narrow")["narrow"]
    return torch.tanh(h @ weights("gate")["gate"]).square().sum()


@wrong("gradient", "tensor", "", AS_FIXED, graded(gated, "first"), GRID)
def sum_of_row_parallel_results_before_a_stage_of_columns(shard_map, mesh):
    last = sf.stage(lambda p, h: torch.tanh(h @ p["gate"]))
    matrices = {"up": P(None, "tensor"), "narrow": P("tensor")}

    @shard_map(in_specs=(P(), matrices, ..., P("data")), out_specs=P())
    def gradient(p, cut, params, x):
        def loss_fn(p):
            h = torch.tanh(x @ sf.pvary(p["first"], ("data", "tensor")) @ cut["up"])
            h = sf.psum(h @ cut["narrow"], "tensor")
            # fix: out = last(params["last"], sf.pvary(h, "tensor"))
            out = last(params["last"], h)
            return sf.psum(out.square().sum(), ("data", "tensor"))

        return sf.grad(loss_fn)(p)

    columns = {"last": {"gate": P(None, "tensor")}}
    params = sf.shard({"last": weights("gate")}, mesh, sf.full_shard("data"), specs=columns)
    up, narrow = part(weights("up")["up"], mesh, "tensor", dim=1), part(weights("narrow")["narrow"], mesh, "tensor")
    return gradient(weights("first"), {"up": up, "narrow": narrow}, params, part(X, mesh, "data"))


def plain(p: Any) -> Tensor:
    return squares(head(p["head"], encode(p["encoder"], X)), Y) / COUNT


@wrong("losses", "replica", "", AS_FIXED, trained(plain), HYBRID)
def rows_over_fewer_axes_than_parameters(shard_map, mesh):
    """Ranks along `replica` have the same rows; their gradients, which are equal, are added up all the same."""
    encoder, last = sf.stage(encode), sf.stage(head)

    def loss_fn(params, x, y):
        total = squares(last(params["head"], encoder(params["encoder"], x)), y)
        # fix: return sf.pmean(sf.psum(total, "shard") / sf.psum(y.numel(), "shard"), "replica")
        return sf.psum(total, "shard") / sf.psum(y.numel(), "shard")  # here

    @shard_map(in_specs=(..., P("shard"), P("shard")), out_specs=...)
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    params = sf.shard(whole(), mesh, sf.full_shard(("replica", "shard")))
    return step(params, part(X, mesh, "shard"), part(Y, mesh, "shard"))


@wrong("losses", "replica", "", AS_FIXED, trained(plain), HYBRID)
def mean_over_fewer_axes_than_replicas(shard_map, mesh):
    """The number by which `pmean` divides along `shard` is also that of the replicas."""
    encoder, last = sf.stage(encode), sf.stage(head)

    def loss_fn(params, x, y):
        out = last(params["head"], encoder(params["encoder"], x))
        # fix: return sf.pmean(sf.pmean((out - y).square().mean(), "shard"), "replica")
        return sf.pmean((out - y).square().mean(), "shard")  # here

    params = sf.shard(whole(), mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    return train(shard_map, mesh, loss_fn, params, X, Y, axes="shard", specs=...)


@wrong("whole", "replica", "", AS_FIXED, trained(plain), HYBRID)
def sum_over_more_axes_than_rows(shard_map, mesh):
    """The count is that of the rows, and the sum has each row twice."""
    encoder, last = sf.stage(encode), sf.stage(head)

    def loss_fn(params, x, y):
        total = squares(last(params["head"], encoder(params["encoder"], x)), y)
        # fix: total = sf.psum(sf.pmean(total, "replica"), "shard")
        total = sf.psum(total, ("replica", "shard"))  # here
        return total / sf.psum(y.numel(), "shard")

    params = sf.shard(whole(), mesh, sf.full_shard(("replica", "shard")))
    return train(shard_map, mesh, loss_fn, params, X, Y, axes="shard", specs=...)


def penalized(p: Any) -> Tensor:
    return plain(p) + 0.1 * p["head"]["w"].square().sum()


@wrong("whole", "shard", "", AS_FIXED, trained(penalized), SHARD)
def penalty_of_a_stage_in_a_sum(shard_map, mesh):
    """Each rank has the stage's parameters in full, and so the whole penalty."""
    encoder, last, penalty = sf.stage(encode), sf.stage(head), sf.stage(lambda p: p["w"].square().sum())

    def loss_fn(params, x, y):
        total = squares(last(params["head"], encoder(params["encoder"], x)), y) / COUNT
        # fix: return sf.psum(total, "shard") + sf.pmean(0.1 * penalty(params["head"]), "shard")
        return sf.psum(total + 0.1 * penalty(params["head"]), "shard")  # here

    params = sf.shard(whole(), mesh, sf.full_shard("shard"))
    return train(shard_map, mesh, loss_fn, params, X, Y, axes="shard", specs=...)


def contrasted(p: Any) -> Tensor:
    h = encode(p["encoder"], X)
    return (head(p["head"], h) @ head(p["head"], h).T).square().sum() / ROWS**2


@wrong("losses", "shard", "", AS_FIXED, lambda: trained(contrasted)()[0], SHARD)
def projection_after_all_rows_are_gathered(shard_map, mesh):
    encoder, last = sf.stage(encode), sf.stage(head)

    def loss_fn(params, x):
        h = sf.all_gather(encoder(params["encoder"], x), "shard")
        out = last(params["head"], h)
        # fix: return sf.pmean((out @ out.T).square().mean(), "shard")
        return (out @ out.T).square().mean()  # here

    @shard_map(in_specs=(..., P("shard")), out_specs=...)
    def step(params, x):
        return sgd(params, sf.grad(loss_fn)(params, x))

    params = sf.shard(whole(), mesh, sf.full_shard("shard"))
    return step(params, part(X, mesh, "shard"))


@wrong("losses", "replica", "", AS_FIXED, trained(plain), HYBRID)
def rows_over_fewer_axes_than_parameters_by_a_number(shard_map, mesh):
    """The number of all rows, which is also that of one rank's rows times the ranks along `replica`."""
    encoder, last = sf.stage(encode), sf.stage(head)

    def loss_fn(params, x, y):
        total = squares(last(params["head"], encoder(params["encoder"], x)), y)
        # fix: return sf.pmean(sf.psum(total, "shard") / COUNT, "replica")
        return sf.psum(total, "shard") / COUNT  # here

    @shard_map(in_specs=(..., P("shard"), P("shard")), out_specs=...)
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    params = sf.shard(whole(), mesh, sf.full_shard(("replica", "shard")))
    return step(params, part(X, mesh, "shard"), part(Y, mesh, "shard"))


def twice(p: Any) -> Tensor:
    x = X
    for _ in range(2):
        x = x + torch.tanh(x @ p["first"] @ p["up"]) @ p["narrow"] + p["norm"]
    return x.square().sum()


@wrong("gradient", "tensor", "", AS_FIXED, graded(twice, "first", "up", "narrow", "norm"), GRID)
def missing_pvary_in_a_stage_that_is_called_twice(shard_map, mesh):
    """The bias of the first call meets what varies in the second, through the product that the message names."""

    def block(p, x):
        h = x @ p["first"]
        # fix: up = sf.pvary(h, 'tensor') @ p["up"]
        up = h @ p["up"]  # here
        return x + sf.psum(torch.tanh(up) @ p["narrow"], "tensor") + p["norm"]

    layer = sf.stage(block)

    @shard_map(in_specs=(..., P("data")), out_specs=...)
    def gradient(params, x):
        def loss_fn(params):
            return sf.psum(layer(params["layer"], layer(params["layer"], x)).square().sum(), "data")

        return sf.grad(loss_fn)(params)["layer"]

    specs = {"layer": {"first": P(), "up": P(None, "tensor"), "narrow": P("tensor"), "norm": P()}}
    whole = {"layer": weights("first", "up", "narrow", "norm")}
    return gradient(sf.shard(whole, mesh, sf.full_shard("data"), specs=specs), part(X, mesh, "data"))
