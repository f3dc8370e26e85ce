"""Values that go through several stages, and losses that ranks compute in full and divide by their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from tests.check.programs.setting import ROWS, D, Made, On, plainly, right
from tests.models import drawn, tensors


def _encode(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def _head(p: Any, h: Tensor) -> Tensor:
    return h @ p["v"]


def _two(
    on: On, loss: Callable[..., Tensor], alone: Callable[..., Tensor], strategy: Any = None, rows: Any = "shard"
) -> Made:
    """Value and gradient of a loss of an encoder and a head, each a stage."""
    w, v, x = tensors(71, (3, D), (D, 4), (ROWS, 3))
    whole = {"encoder": {"w": w}, "head": {"v": v}}
    params = sf.shard(whole, on.mesh, strategy or sf.full_shard("shard"))
    encoder, head = sf.stage(_encode), sf.stage(_head)
    mapped = on(sf.value_and_grad(lambda p, x: loss(encoder, head, p, x)), (..., P(rows)), ...)
    mine = x.chunk(on.mesh["shard"].size())[on.index("shard")].clone() if rows else x

    def run() -> Any:
        value, gradient = mapped(params, mine)
        return value, sf.unshard(gradient)

    return run, plainly(lambda p: alone(_encode, _head, p, x), whole)


def _centered(mean: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(encoder: Any, head: Any, p: Any, x: Tensor) -> Tensor:
        h = encoder(p["encoder"], x)
        return total(head(p["head"], torch.tanh(h - mean(h.mean(0)))).square().sum())

    return loss


@right(shard=2)
def rows_centered_before_a_stage(on: On) -> Made:
    mean, total = lambda h: sf.pvary(sf.pmean(h, "shard"), "shard"), lambda y: sf.psum(y, "shard")
    return _two(on, _centered(mean, total), _centered(lambda h: h, lambda y: y))


@right(shard=2)
def rows_centered_by_a_teacher_before_a_stage(on: On) -> Made:
    """As in DINO: the center has no gradient."""
    mean, total = lambda h: sf.pmean(h.detach(), "shard"), lambda y: sf.psum(y, "shard")
    return _two(on, _centered(mean, total), _centered(lambda h: h.detach(), lambda y: y))


def _matched(gather: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """As in SwAV and CLIP: outputs of stages are compared with those of all ranks, which a stage projects."""

    def loss(encoder: Any, head: Any, p: Any, x: Tensor) -> Tensor:
        h = encoder(p["encoder"], x)
        everybody = head(p["head"], gather(h))
        return total((head(p["head"], h) @ everybody.T).square().sum())

    return loss


@right(shard=2)
def rows_compared_with_those_of_all_ranks(on: On) -> Made:
    gather, total = lambda h: sf.all_gather(h, "shard"), lambda y: sf.psum(y, "shard")
    return _two(on, _matched(gather, total), _matched(lambda h: h, lambda y: y))


def _of_all(gather: Callable[[Tensor], Tensor], mean: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(encoder: Any, head: Any, p: Any, x: Tensor) -> Tensor:
        out = head(p["head"], gather(encoder(p["encoder"], x)))
        return mean((out @ out.T).square().mean())

    return loss


@right(shard=2)
def a_loss_in_full_on_each_rank_and_its_mean(on: On) -> Made:
    gather, mean = lambda h: sf.all_gather(h, "shard"), lambda y: sf.pmean(y, "shard")
    return _two(on, _of_all(gather, mean), _of_all(lambda h: h, lambda y: y))


@right(replica=2, shard=2)
def rows_over_one_axis_of_two(on: On) -> Made:
    def loss(encoder: Any, head: Any, p: Any, x: Tensor) -> Tensor:
        total = head(p["head"], encoder(p["encoder"], x)).square().sum()
        return sf.psum(total, ("replica", "shard")) / sf.psum(len(x), ("replica", "shard"))

    def alone(encoder: Any, head: Any, p: Any, x: Tensor) -> Tensor:
        return head(p["head"], encoder(p["encoder"], x)).square().sum() / len(x)

    return _two(on, loss, alone, sf.full_shard(("replica", "shard")))


@right(replica=2, shard=2)
def rows_over_one_axis_divided_by_hand(on: On) -> Made:
    def loss(encoder: Any, head: Any, p: Any, x: Tensor) -> Tensor:
        total = head(p["head"], encoder(p["encoder"], x)).square().sum()
        mean = sf.psum(total, "shard") / sf.psum(len(x), "shard")
        return mean / sf.axis_size("replica") + mean.detach() / 2

    def alone(encoder: Any, head: Any, p: Any, x: Tensor) -> Tensor:
        return head(p["head"], encoder(p["encoder"], x)).square().sum() / len(x)

    return _two(on, loss, alone, sf.hybrid_shard(shard="shard", replica="replica"))


@right(shard=2)
def a_penalty_of_a_stage_divided_by_the_ranks(on: On) -> Made:
    penalty = sf.stage(lambda p: p["v"].square().sum())

    def loss(encoder: Any, head: Any, p: Any, x: Tensor) -> Tensor:
        total = head(p["head"], encoder(p["encoder"], x)).square().sum()
        return sf.psum(total + penalty(p["head"]) / 2, "shard")

    def alone(encoder: Any, head: Any, p: Any, x: Tensor) -> Tensor:
        return head(p["head"], encoder(p["encoder"], x)).square().sum() + p["head"]["v"].square().sum()

    return _two(on, loss, alone)


@right(shard=2)
def a_layer_of_each_ranks_own_whose_bias_begins_at_zero(on: On) -> Made:
    """As in a pipeline or an ensemble: weights differ, and so equal zeros are meant to."""
    rank, draw = on.index("shard"), drawn(72)
    layers = [{"w": draw(3, D), "b": torch.zeros(D, dtype=torch.float64)} for _ in range(2)]
    x = draw(ROWS, 3)

    def loss(p: Any, x: Tensor) -> Tensor:
        return sf.psum(torch.tanh(x @ p["w"] + p["b"]).square().sum(), "shard")

    mapped = on(sf.grad(loss), (..., P()), ...)
    wanted = plainly(lambda p: torch.tanh(x @ p["w"] + p["b"]).square().sum(), layers[rank])[1]
    return lambda: mapped(layers[rank], x), wanted
