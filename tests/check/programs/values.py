"""What goes in and comes out: dtypes, ragged pieces, mapped functions inside others, batch statistics."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import grad

import shardfn as sf
from shardfn import P, interop
from tests.check.programs.setting import (
    DATA,
    ROWS,
    D,
    Made,
    On,
    language,
    layers,
    mlp,
    mlp_setting,
    plainly,
    right,
    tokens_of,
)
from tests.models import drawn, tensors


@right(shard=2)
def integers_booleans_and_complex_numbers(on: On) -> Made:
    draw = drawn(100)
    w, x = torch.complex(draw(3, D), draw(3, D)), torch.complex(draw(ROWS, 3), draw(ROWS, 3))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum((x @ sf.pvary(w, data)).abs().square().sum(), data)

    def step(w: Tensor, x: Tensor) -> Any:
        value, gradient = sf.value_and_grad(loss)(w, x, "shard")
        large = x.abs() > 1
        counts = sf.psum(large.sum(0), "shard")
        flags = sf.pmax(large.any(), "shard"), sf.pmin(large.all(), "shard")
        return value, gradient, sf.psum(x.sum(), "shard"), counts, flags, large, sf.all_gather(large, "shard")

    mapped = on(step, (P(), P("shard")), (P(), P(), P(), P(), P(), P("shard"), ...))
    large = x.abs() > 1
    value, gradient = sf.value_and_grad(loss)(w, x)
    wanted = value, gradient, x.sum(), large.sum(0), (large.any(), large.all()), on.cut(large, "shard"), large
    return lambda: mapped(w, on.cut(x, "shard")), wanted


@right(shard=2)
def gathered_to_be_the_same_on_all_ranks(on: On) -> Made:
    x = drawn(101)(ROWS, D)

    def gathered(x: Tensor) -> Any:
        every = sf.all_gather(torch.tanh(x), "shard", to="invariant")
        return every, every.argmax(1), every.sort(0).values, {"mean": every.mean(), "list": [every[0], every[-1]]}

    mapped = on(gathered, P("shard"), P())
    y = torch.tanh(x)
    wanted = y, y.argmax(1), y.sort(0).values, {"mean": y.mean(), "list": [y[0], y[-1]]}
    return lambda: mapped(on.cut(x, "shard")), wanted


@right(shard=2)
def ragged_pieces(on: On) -> Made:
    """As many rows as each rank happens to have, under `...`, whose sums and counts are of all."""
    draw = drawn(102)
    w, pieces = draw(3, D), [draw(2, 3), draw(5, 3)]

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return sf.psum((x @ sf.pvary(w, "shard")).square().sum(), "shard") / sf.psum(len(x), "shard")

    step = on(lambda w, x: (*sf.value_and_grad(loss)(w, x), x + 1), (P(), ...), (P(), P(), ...))
    x = torch.cat(pieces)
    value, gradient = plainly(lambda w: (x @ w).square().sum() / len(x), w)
    own = pieces[on.index("shard")]
    return lambda: step(w, own), (value, gradient, own + 1)


@right(shard=2)
def pieces_of_any_length_that_travel(on: On) -> Made:
    """Rows go to the rank of their kind and come back changed, each to its place."""
    w, x = drawn(103)(D, D), drawn(104)(ROWS, D)
    x[:, 0] = torch.tensor([1.0, -1, -1, -1, 1, 1, 1, -1])

    def loss(w: Tensor, x: Tensor) -> Tensor:
        kind = (x[:, 0] > 0).long()
        order = kind.argsort(stable=True)
        counts = torch.bincount(kind, minlength=2).tolist()
        there = sf.collectives.ragged_all_to_all(x[order], "shard", counts)
        back = sf.all_to_all(torch.tensor(counts), "shard", split_dim=0, concat_dim=0).tolist()
        y = sf.collectives.ragged_all_to_all(torch.tanh(there @ w[0]), "shard", back, counts)
        return sf.psum(y[order.argsort()].square().sum(), "shard")

    step = on(sf.value_and_grad(loss), (P("shard"), P("shard")), (P(), P("shard")))
    ws = torch.stack((w, 2 * w))

    def plain(ws: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("rd,rde->re", x, ws[(x[:, 0] > 0).long()])).square().sum()

    value, gradient = plainly(plain, ws)
    return lambda: step(*on.cut((ws, x), "shard")), (value, on.cut(gradient, "shard"))


@right(replica=2, shard=2)
def a_mapped_function_inside_another(on: On) -> Made:
    """An inner one on the mesh in scope, another on the mesh by name."""
    params, _, x = mlp_setting(105)

    def outer(params: Any, x: Tensor) -> Any:
        inner = on(lambda p, x: sf.grad(mlp)(p, x, DATA), (P(), P(DATA)), P(), mesh=None)
        total = on(lambda x: sf.psum(x.sum(0), "shard"), P(DATA), P("replica"))
        return inner(params, x), sf.psum(total(x), "replica")

    mapped = on(outer, (P(), P(DATA)), P())
    return lambda: mapped(params, on.cut(x, DATA)), (plainly(mlp, params, x)[1], x.sum(0))


@right(shard=2)
def several_mapped_functions_in_a_row(on: On) -> Made:
    """State goes from one to the next, and through ordinary code in between."""
    params, _, x = mlp_setting(106)
    normed = on(lambda x: (x - sf.pmean(x.mean(0), "shard"), len(x)), P("shard"), (P("shard"), P()))
    slopes = on(lambda p, x: sf.grad(mlp)(p, x, "shard"), (P(), P("shard")), P())
    local = on(lambda p, x: sf.grad(mlp)(p, x), (P(), P("shard")), ...)
    totals = on(lambda g: sf.psum(g, "shard"), P("shard"), P())

    def run() -> Any:
        rows, count = normed(on.cut(x, "shard"))
        own = local(params, rows)  # of this rank's rows: to the next it is a piece of what is cut
        summed = totals(optree.tree_map(lambda g: g[None], own))
        return count, slopes(params, rows), optree.tree_map(lambda g: g[0], summed)

    slope = plainly(mlp, params, x - x.mean(0))[1]
    return run, (ROWS // 2, slope, slope)


@right(shard=2)
def state_on_each_rank_between_calls(on: On) -> Made:
    """Error feedback: what a rank has not sent yet stays with it, cut along the ranks."""
    w, x = drawn(107)(3, D), drawn(108)(ROWS, 3)

    def step(w: Tensor, left: Tensor, x: Tensor) -> Any:
        g = grad(lambda w: (x @ w).square().sum())(w) + left[0]
        sent = g.round(decimals=1)
        return w - 0.01 * sf.psum(sent, "shard"), (g - sent)[None]

    mapped = on(step, (P(), P("shard"), P("shard")), (P(), P("shard")))

    def run() -> Any:
        now, left = w, torch.zeros(1, 3, D, dtype=w.dtype)
        for _ in range(3):
            now, left = mapped(now, left, on.cut(x, "shard"))
        return now, left

    def wanted() -> Any:
        now, left = w, torch.zeros(2, 3, D, dtype=w.dtype)
        for _ in range(3):
            g = torch.stack([2 * rows.T @ (rows @ now) for rows in x.chunk(2)]) + left
            sent = g.round(decimals=1)
            now, left = now - 0.01 * sent.sum(0), g - sent
        return now, on.cut(left, "shard")

    return run, wanted()


@right(shard=2)
def statistics_over_the_rows_of_all_ranks(on: On) -> Made:
    """Batch norm by hand: mean and variance by sums and a count, with a gradient through them."""
    w, x = tensors(109, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        y = x @ sf.pvary(w, data)
        count = sf.psum(len(y), data)
        mean = sf.psum(y.sum(0), data) / count
        away = y - sf.pvary(mean, data)
        var = sf.psum(away.square().sum(0), data) / count
        return sf.psum((away / sf.pvary(var + 1e-5, data).sqrt()).exp().sum(), data) / count

    step = on(lambda w, x: sf.value_and_grad(loss)(w, x, "shard"), (P(), P("shard")), P())
    return lambda: step(w, on.cut(x, "shard")), sf.value_and_grad(loss)(w, x)


def _network(seed: int) -> torch.nn.Module:
    g = torch.Generator().manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype))
    return net


@right(shard=2)
def batch_norms_of_a_module_over_all_ranks(on: On) -> Made:
    x = drawn(110)(ROWS, 3)
    model = interop.functional(_network(110), sync_batch_norm="shard")
    params = sf.shard(model.tree, on.mesh, sf.full_shard("shard"))

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        y, buffers = model(params, x, buffers=buffers)
        return sf.psum(y.square().sum(), "shard") / ROWS, buffers

    step = on(sf.value_and_grad(loss, has_aux=True), (..., P(), P("shard")), ((P(), P()), ...))

    def run() -> Any:
        (value, buffers), gradient = step(params, model.buffers, on.cut(x, "shard"))
        return value, buffers, model.state_dict(gradient)

    alone = _network(110)
    value = alone(x).square().sum() / ROWS
    value.backward()
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    return run, (value.detach(), dict(alone.named_buffers()), gradients)


@right(shard=2)
def batch_norms_in_evaluation(on: On) -> Made:
    x = drawn(111)(ROWS, 3)
    model = interop.functional(_network(111))
    model.module.eval()
    params = sf.shard(model.tree, on.mesh, sf.full_shard("shard"))

    def loss(params: Any, x: Tensor) -> Any:
        return sf.psum(model(params, x).square().sum(), "shard") / ROWS

    mapped = on(loss, (..., P("shard")), P())
    return lambda: mapped(params, on.cut(x, "shard")), _network(111).eval()(x).square().sum().detach() / ROWS


@right(shard=2)
def values_that_are_no_tensors(on: On) -> Made:
    """Numbers, words and None, in and out; metrics that were read."""
    params, _, x = mlp_setting(112)

    def step(params: Any, x: Tensor, scale: float, name: str, *, nothing: Any = None) -> Any:
        value = mlp(params, x, "shard") * scale
        return {name: value, "number": value.item(), "rows": len(x), "none": nothing, "name": name}

    mapped = on(step, (P(), P("shard"), P(), P(), P()), P())
    value = 2 * mlp(params, x)
    wanted = {"loss": value, "number": value.item(), "rows": ROWS // 2, "none": None, "name": 0}
    return lambda: mapped(params, on.cut(x, "shard"), 2, "loss", nothing=None) | {"name": 0}, wanted


@right(shard=2)
def pieces_that_come_as_dtensors(on: On) -> Made:
    w, x = drawn(113)(3, D), drawn(114)(ROWS, 3)

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum((x @ sf.pvary(w, data)).square().sum(), data)

    step = on(lambda w, x: sf.value_and_grad(loss)(w, x, "shard"), (P(), P("shard")), P())

    def run() -> Any:
        rows = DTensor.from_local(on.cut(x, "shard"), on.mesh, [Shard(0)])
        return step(DTensor.from_local(w, on.mesh, [Replicate()]), rows)

    return run, plainly(loss, w, x)


@right(shard=2, tensor=1)
def an_axis_of_one_rank(on: On) -> Made:
    """Along it nothing varies, so that a program for more ranks runs as it is, and one for fewer too."""
    w, x = tensors(115, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, t: Any = ("tensor",), data: Any = ("shard",)) -> Tensor:
        y = sf.psum(sf.psum(sf.pvary(sf.pvary(x, t) @ sf.pvary(w, data), t), t), t)
        return sf.psum(sf.pmean(y.square().sum(), t), data)

    step = on(sf.value_and_grad(loss), (P(None, "tensor"), P("shard")), P())
    return lambda: step(w, on.cut(x, "shard")), plainly(lambda w: loss(w, x, (), ()), w)


@right(shard=1)
def a_mesh_of_one_rank(on: On) -> Made:
    whole, tokens = layers(116), tokens_of(116)
    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))
    step = on(lambda p, t: sf.value_and_grad(language)(p, t, "shard"), (..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = step(flat, tokens)
        return value, sf.unshard(gradient)

    return run, plainly(language, whole, tokens)


@right(shard=2)
def a_value_that_is_cut_in_another_way(on: On) -> Made:
    x = drawn(117)(ROWS, D)

    def turned(x: Tensor) -> Any:
        columns = sf.collectives.redistribute(x, "row/shard d -> row d/shard")
        return columns.softmax(0), sf.collectives.redistribute(x.square(), "row d +shard -> row d")

    mapped = on(turned, P("shard"), (P(None, "shard"), P()))
    total = x.square().view(2, -1, D).sum(0)
    return lambda: mapped(on.cut(x, "shard")), (on.cut(x.softmax(0), None, "shard"), total)
