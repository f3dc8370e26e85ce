"""Rings, experts, pipelines, and losses over the rows of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P, parallel
from tests.check.programs.setting import ROWS, D, Made, On, block, embed, head, layers, plainly, right, tokens_of
from tests.models import drawn, tensors


@right(context=2)
def ring_attention(on: On) -> Made:
    q, k, v = tensors(50, (2, 2, 8, D), (2, 2, 8, D), (2, 2, 8, D))

    def loss(q: Tensor, k: Tensor, v: Tensor, c: Any = ()) -> Tensor:
        out = parallel.ring_attention(q, k, v, c, balanced=True)
        return sf.psum((out * parallel.positions(8, c, balanced=True)[:, None]).square().sum(), c)

    places = [torch.tensor(x) for x in ([0, 1, 6, 7], [2, 3, 4, 5])][on.index("context")]
    spec = P(None, None, "context")
    step = on(lambda *args: sf.value_and_grad(loss, (0, 1, 2))(*args, "context"), spec, (P(), spec))
    value, gradients = plainly(loss, q, k, v, argnums=(0, 1, 2))
    return lambda: step(*(x[:, :, places] for x in (q, k, v))), (value, tuple(g[:, :, places] for g in gradients))


@right(context=2)
def attention_over_what_a_spec_cuts(on: On) -> Made:
    q, k, v = tensors(51, (2, 2, 8, D), (2, 2, 8, D), (2, 2, 8, D))

    def loss(q: Tensor, k: Tensor, v: Tensor, c: Any = ()) -> Tensor:
        out = parallel.ulysses_attention(q, k, v, c) + 2 * parallel.ring_attention(q, k, v, c)
        return sf.psum(out.square().sum(), c)

    spec = P(None, None, "context")
    step = on(lambda *args: sf.value_and_grad(loss, (0, 1, 2))(*args, "context"), spec, (P(), spec))
    value, gradients = plainly(loss, q, k, v, argnums=(0, 1, 2))
    return lambda: step(*on.cut((q, k, v), None, None, "context")), (value, on.cut(gradients, None, None, "context"))


@right(context=2)
def sequences_in_both_orders(on: On) -> Made:
    """Keys of one order and of the other, each for the attention that masks by it; and heads without a mask."""
    x = drawn(53)(2, 2, 8, D)

    def total(x: Tensor, c: Any = ()) -> Tensor:
        a, b = (x[:, :, parallel.positions(8, c, balanced=balanced)] for balanced in (True, False))
        outs = [
            parallel.ring_attention(a, a, a, c, balanced=True),
            parallel.ulysses_attention(a, a, a, c, mask=parallel.Mask(causal=False)),
            parallel.ring_attention(b, b, b, c),
            parallel.ulysses_attention(b, b, b, c),
        ]
        return sf.psum(torch.stack(outs).square().sum(), c)

    return lambda: on(lambda x: total(x, "context"), P(), P())(x), plainly(total, x)[0]


@right(context=2)
def balanced_places_without_a_mask(on: On) -> Made:
    x = drawn(54)(2, 2, 8, D)

    def total(x: Tensor, c: Any = ()) -> Tensor:
        own = x[:, :, parallel.positions(8, c, balanced=True)]
        return sf.psum(parallel.ulysses_attention(own, own, own, c, mask=parallel.Mask(causal=False)).square().sum(), c)

    return lambda: on(lambda x: total(x, "context"), P(), P())(x), plainly(total, x)[0]


@right(context=2)
def a_ring_by_hand(on: On) -> Made:
    """Attention without a mask: keys and values go around, with weights by the running sum of exponentials."""
    q, k, v = tensors(52, (6, D), (6, D), (6, D))

    def attended(q: Tensor, k: Tensor, v: Tensor, c: Any) -> Tensor:
        size = sf.axis_size(c)
        above: Any = 0
        below: Any = 0
        for step in range(size):
            e = (q @ k.T).exp()
            above, below = above + e @ v, below + e.sum(1, keepdim=True)
            if step < size - 1:
                k, v = sf.ppermute((k, v), c, [(i, (i + 1) % size) for i in range(size)])
        return above / below

    def loss(q: Tensor, k: Tensor, v: Tensor, c: Any = ()) -> Tensor:
        return sf.psum(attended(q, k, v, c).square().sum(), c)

    step = on(lambda *args: sf.value_and_grad(loss, (0, 1, 2))(*args, "context"), P("context"), (P(), P("context")))
    wanted = plainly(lambda q, k, v: ((q @ k.T).softmax(1) @ v).square().sum(), q, k, v, argnums=(0, 1, 2))
    return lambda: step(*on.cut((q, k, v), "context")), (wanted[0], on.cut(wanted[1], "context"))


@right(space=2)
def a_convolution_with_the_edges_of_neighbors(on: On) -> Made:
    x, kernel = tensors(53, (1, 1, 12), (1, 1, 3))

    def convolved(x: Tensor, kernel: Tensor) -> Tensor:
        left = sf.ppermute(x[..., -1:], "space", [(0, 1)])
        right = sf.ppermute(x[..., :1], "space", [(1, 0)])
        return F.conv1d(torch.cat((left, x, right), -1), sf.pvary(kernel, "space"))

    def loss(x: Tensor, kernel: Tensor) -> Tensor:
        return sf.psum(convolved(x, kernel).square().sum(), "space")

    spec = P(None, None, "space")
    step = on(lambda *args: (convolved(*args), sf.grad(loss, (0, 1))(*args)), (spec, P()), (spec, (spec, P())))

    def whole(x: Tensor, kernel: Tensor) -> Tensor:
        return F.conv1d(x, kernel, padding=1)

    a, b = plainly(lambda *args: whole(*args).square().sum(), x, kernel, argnums=(0, 1))[1]
    wanted = on.cut(whole(x, kernel), None, None, "space"), (on.cut(a, None, None, "space"), b)
    return lambda: step(on.cut(x, None, None, "space"), kernel), wanted


def _expert(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["up"]) @ p["down"]


def _mixture(on: On, capacity: int | None) -> Made:
    draw = drawn(54)
    whole = {"moe": {"router": draw(D, 4), "experts": {"up": draw(4, D, 6), "down": draw(4, 6, D)}}}
    x = draw(8, 4, D)
    rows = ("shard", "expert")

    @sf.stage
    def mixed(p: Any, x: Tensor, e: Any = (), data: Any = ()) -> Any:
        routing = parallel.route(x, p["router"], k=2)
        y = parallel.mixture_of_experts(_expert, p["experts"], x, routing, e, capacity=capacity)
        return x + y, parallel.balance_loss(routing, data) + parallel.router_loss(routing, data)

    def loss(params: Any, x: Tensor, e: Any = (), data: Any = ()) -> Tensor:
        y, besides = mixed(params["moe"], x, e, data)
        return sf.psum(y.square().sum(), data) + 0.01 * besides

    def placed(path: str, shape: tuple[int, ...]) -> sf.Placement:
        return sf.full_shard("shard" if ".experts." in path else rows)

    specs = sf.by_path([(r".*\.experts\..*", P("expert"))], strict=False)
    params = sf.shard(whole, on.mesh, placed, specs=specs)
    step = on(lambda p, x: sf.value_and_grad(loss, (0, 1))(p, x, "expert", rows), (..., P(rows)), (P(), (..., P(rows))))

    def run() -> Any:
        value, (gradient, of_x) = step(params, on.cut(x, rows))
        return value, sf.unshard(gradient), of_x

    value, (gradient, of_x) = plainly(loss, whole, x, argnums=(0, 1))
    return run, (value, gradient, on.cut(of_x, rows))


@right("processes", shard=2, expert=2)
def a_mixture_of_experts_with_a_capacity(on: On) -> Made:
    return _mixture(on, 3)


@right("processes", shard=2, expert=2)
def a_mixture_of_experts_that_drops_nothing(on: On) -> Made:
    return _mixture(on, None)


def _experts(on: On, experts: Tensor, gate: Tensor, x: Tensor) -> Made:
    """Each rank has one expert, and all have the same tokens; the other's part is added by psum."""

    def loss(experts: Tensor, gate: Tensor, x: Tensor, e: Any = ()) -> Tensor:
        weights = sf.pvary((x @ gate).softmax(1), e)
        first = sf.axis_index(e) * len(experts)
        parts = [weights[:, first + i, None] * (sf.pvary(x, e) @ w) for i, w in enumerate(experts)]
        return sf.psum(torch.stack(parts).sum(0), e).square().sum()

    specs = P("expert"), P(), P()
    step = on(lambda *args: sf.value_and_grad(loss, (0, 1))(*args, "expert"), specs, (P(), specs[:2]))
    value, (a, b) = plainly(loss, experts, gate, x, argnums=(0, 1))
    return lambda: step(on.cut(experts, "expert"), gate, x), (value, (on.cut(a, "expert"), b))


@right(expert=2)
def experts_by_hand(on: On) -> Made:
    draw = drawn(55)
    return _experts(on, draw(2, D, D), draw(D, 2), draw(ROWS, D))


@right(expert=2)
def experts_that_begin_alike(on: On) -> Made:
    """A dense layer, copied to each rank as its expert: a cut input that has the same bits everywhere."""
    draw = drawn(133)
    return _experts(on, draw(D, D)[None].repeat(2, 1, 1), draw(D, 2), draw(ROWS, D))


def _piped(on: On, schedule: Any) -> Made:
    whole, tokens = layers(56), tokens_of(56)

    def part(params: Any, x: Any, tokens: Tensor, pipe: Any = ()) -> Tensor:
        index, size = sf.axis_index(pipe), sf.axis_size(pipe)
        if index == 0:
            x = sf.stage(embed)(params["embed"], tokens[:, :-1])
        for i in parallel.split_layers(2, size)[index]:
            x = sf.stage(block)(params["blocks"][i], x)
        if index < size - 1:
            return x
        logits = sf.stage(head)(params["head"], x).flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / (ROWS * 4)

    def loss(params: Any, tokens: Tensor, pipe: Any = ()) -> Tensor:
        return parallel.pipeline(functools.partial(part, pipe=pipe), params, tokens.chunk(4), pipe, schedule=schedule)

    def at(path: str, shape: tuple[int, ...]) -> sf.Placement:
        stage, number, *_ = path.split(".")
        place = int(number) if stage == "blocks" else {"embed": 0, "head": 1}[stage]
        return sf.full_shard(()).only_on(pipe=place)

    params = sf.shard(whole, on.mesh, at)
    step = on(lambda p, t: sf.value_and_grad(loss)(p, t, "pipe"), (..., P()), (P(), ...))

    def run() -> Any:
        value, gradient = step(params, tokens)
        return value, sf.unshard(gradient)

    return run, plainly(loss, whole, tokens)


@right("processes", pipe=2)
def a_pipeline_one_forward_one_backward(on: On) -> Made:
    return _piped(on, "1f1b")


@right("processes", pipe=2)
def a_pipeline_forward_first(on: On) -> Made:
    return _piped(on, "gpipe")


@right(data=2)
def a_contrastive_loss_over_the_rows_of_all_ranks(on: On) -> Made:
    w, x, y = tensors(57, (3, D), (ROWS, 3), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, y: Tensor, data: Any = ()) -> Tensor:
        w = sf.pvary(w, data)
        a, b = F.normalize(x @ w, dim=1), F.normalize(y @ w, dim=1)
        scores = a @ sf.all_gather(b, data).T
        targets = torch.arange(len(a)) + sf.axis_index(data) * len(a)
        return sf.psum(F.cross_entropy(scores, targets, reduction="sum"), data) / ROWS

    step = on(lambda *args: sf.value_and_grad(loss)(*args, "data"), (P(), P("data"), P("data")), P())
    return lambda: step(w, *on.cut((x, y), "data")), plainly(loss, w, x, y)


@right(data=2)
def a_contrastive_loss_of_which_each_rank_computes_all(on: On) -> Made:
    """Features are gathered to be the same on all ranks, and so is everything after."""
    w, x, y = tensors(58, (3, D), (ROWS, 3), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, y: Tensor, data: Any = ()) -> Tensor:
        w = sf.pvary(w, data)
        a, b = (F.normalize(sf.all_gather(z @ w, data, to="invariant"), dim=1) for z in (x, y))
        return F.cross_entropy(a @ b.T, torch.arange(ROWS))

    step = on(lambda *args: sf.value_and_grad(loss)(*args, "data"), (P(), P("data"), P("data")), P())
    return lambda: step(w, *on.cut((x, y), "data")), plainly(loss, w, x, y)
