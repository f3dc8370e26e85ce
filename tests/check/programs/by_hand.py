"""Data parallelism by hand: parameters that all ranks have, and rows that each has of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

import shardfn as sf
from shardfn import P
from tests.check.programs.setting import DATA, ROWS, D, Made, On, plainly, right
from tests.models import drawn, tensors


@right(shard=2)
def ddp_by_pvary(on: On) -> Made:
    w, x = tensors(1, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return sf.psum((x @ sf.pvary(w, "shard")).square().sum(), "shard") / ROWS

    step = on(sf.value_and_grad(loss), (P(), P("shard")), P())
    return lambda: step(w, on.cut(x, "shard")), plainly(lambda w: (x @ w).square().sum() / ROWS, w)


@right(shard=2)
def ddp_by_pvary_of_a_tree_and_pmean(on: On) -> Made:
    draw = drawn(2)
    params, x, y = {"w": draw(3, D), "b": draw(D)}, draw(ROWS, 3), draw(ROWS, D)

    def loss(p: Any, x: Tensor, y: Tensor, data: Any = ()) -> Tensor:
        p = sf.pvary(p, data)
        return sf.pmean(F.mse_loss(torch.tanh(x @ p["w"] + p["b"]), y), data)

    step = on(lambda p, x, y: sf.value_and_grad(loss)(p, x, y, "shard"), (P(), P("shard"), P("shard")), P())
    return lambda: step(params, *on.cut((x, y), "shard")), plainly(loss, params, x, y)


@right(shard=2)
def ddp_by_the_sum_of_gradients(on: On) -> Made:
    draw = drawn(3)
    params, x = {"w": draw(3, D), "b": draw(D)}, draw(ROWS, 3)

    def loss(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"] + p["b"]).square().sum() / ROWS

    def step(p: Any, x: Tensor) -> Any:
        value, grads = sf.value_and_grad(loss)(p, x)
        return sf.psum(value, "shard"), sf.psum(grads, "shard")

    mapped = on(step, (P(), P("shard")), P())
    return lambda: mapped(params, on.cut(x, "shard")), plainly(loss, params, x)


@right(shard=2)
def ddp_by_the_mean_of_gradients(on: On) -> Made:
    w, x = tensors(4, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w).square().mean()

    mapped = on(lambda w, x: sf.pmean(sf.value_and_grad(loss)(w, x), "shard"), (P(), P("shard")), P())
    return lambda: mapped(w, on.cut(x, "shard")), plainly(loss, w, x)


def _reduced(on: On, loss: Any, reduce: Any) -> Made:
    """The gradient of the mean over all rows, by a loss of this rank's and one call on its gradient."""
    w, x = tensors(40, (3, D), (ROWS, 3))

    def step(w: Tensor, x: Tensor) -> Any:
        return reduce(sf.grad(lambda w: loss((x @ w).tanh().square()))(w))

    mapped = on(step, (P(), P("shard")), P())
    return lambda: mapped(w, on.cut(x, "shard")), plainly(lambda w: (x @ w).tanh().square().mean(), w)[1]


@right(shard=2)
def the_sum_of_gradients_of_means_over_the_ranks(on: On) -> Made:
    return _reduced(on, lambda y: y.mean() / sf.axis_size("shard"), lambda g: sf.psum(g, "shard"))


@right(shard=2)
def the_sum_of_gradients_of_means_divided_at_the_end(on: On) -> Made:
    return _reduced(on, lambda y: y.mean(), lambda g: (sf.psum(g, "shard").t() / 2).t())


@right(shard=2)
def the_sum_of_gradients_of_a_mean_of_all(on: On) -> Made:
    return _reduced(on, lambda y: sf.pmean(y.mean(), "shard"), lambda g: sf.psum(g, "shard"))


@right(shard=2)
def the_mean_of_gradients_of_the_sum_of_means(on: On) -> Made:
    return _reduced(on, lambda y: sf.psum(y.mean(), "shard"), lambda g: sf.pmean(g, "shard"))


@right(shard=2)
def the_mean_of_gradients_of_a_sum_over_as_many_rows(on: On) -> Made:
    return _reduced(on, lambda y: sf.psum(y.sum(), "shard") / y.numel(), lambda g: sf.pmean(g, "shard"))


@right(replica=2, shard=2)
def the_sums_of_gradients_of_means_along_two_axes(on: On) -> Made:
    w, x = tensors(41, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh().square().mean()

    def step(w: Tensor, x: Tensor) -> Any:
        return sf.psum(sf.psum(sf.grad(loss)(w, x), "shard"), "replica") / sf.axis_size(DATA)

    mapped = on(step, (P(), P(DATA)), P())
    return lambda: mapped(w, on.cut(x, DATA)), plainly(loss, w, x)[1]


@right(shard=2)
def ddp_by_one_bucket_and_backward(on: On) -> Made:
    """As DDP does it: `backward`, gradients copied into one buffer, one sum, and the buffer copied back."""
    draw = drawn(5)
    ws, x = [draw(3, D), draw(D, D), draw(D)], draw(ROWS, 3)

    def loss(ws: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ ws[0]) @ ws[1] + ws[2]).square().mean()

    def step(ws: Any, x: Tensor) -> Any:
        leaves = [w.detach().clone().requires_grad_() for w in ws]
        loss(leaves, x).backward()
        bucket = torch.cat([w.grad.flatten() for w in leaves])
        bucket = sf.psum(bucket, "shard").div_(sf.axis_size("shard"))
        pieces = bucket.split([w.numel() for w in leaves])
        return [piece.view_as(w) for piece, w in zip(pieces, leaves, strict=True)]

    mapped = on(step, (P(), P("shard")), P())
    return lambda: mapped(ws, on.cut(x, "shard")), plainly(loss, ws, x)[1]


@right(shard=2)
def ddp_update_by_hand_with_momentum(on: On) -> Made:
    w, x = tensors(6, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w).square().mean()

    def step(w: Tensor, speed: Tensor, x: Tensor, data: Any = ()) -> Any:
        with torch.no_grad():
            gradient = sf.pmean(sf.grad(loss)(w, x), data)
            speed.mul_(0.9).add_(gradient)
            w.sub_(speed, alpha=0.1)
        return w, speed

    mapped = on(lambda w, v, x: step(w, v, x, "shard"), (P(), P(), P("shard")), P())

    def run(mapped: Any, x: Tensor) -> Any:
        state = (w.clone(), torch.zeros_like(w))
        for _ in range(3):
            state = mapped(*state, x)
        return state

    return lambda: run(mapped, on.cut(x, "shard")), run(step, x)


@right(shard=2)
def the_gradient_of_a_mapped_function(on: On) -> Made:
    """`grad` and `backward` outside of shard_map, of what it returned."""
    w, x = tensors(7, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        return sf.pmean(torch.tanh(x @ sf.pvary(w, data)).square().mean(), data)

    mapped = on(lambda w, x: loss(w, x, "shard"), (P(), P("shard")), P())

    def run() -> Any:
        leaf = w.clone().requires_grad_()
        mapped(leaf, on.cut(x, "shard")).backward()
        return leaf.grad, sf.grad(mapped)(w, on.cut(x, "shard")), grad(mapped)(w, on.cut(x, "shard"))

    return run, (plainly(loss, w, x)[1],) * 3


@right(shard=2)
def whole_arguments_differentiated_outside(on: On) -> Made:
    w, x = tensors(8, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum((x @ sf.pvary(w, data)).square().sum(), data) / ROWS

    mapped = on(lambda w, x: loss(w, x, "shard"), (P(), P("shard")), P(), inputs="global")
    return lambda: sf.value_and_grad(mapped, (0, 1))(w, x), plainly(loss, w, x, argnums=(0, 1))


@right(shard=2)
def whole_arguments_differentiated_inside(on: On) -> Made:
    w, x = tensors(9, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum((x @ sf.pvary(w, data)).square().sum(), data) / ROWS

    step = on(lambda w, x: sf.grad(loss)(w, x, "shard"), (P(), P("shard")), P(), inputs="global")
    return lambda: step(w, x), plainly(loss, w, x)[1]


@right(replica=2, shard=2)
def rows_over_two_axes_reduced_one_after_another(on: On) -> Made:
    w, x = tensors(10, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).square().sum() / ROWS

    def step(w: Tensor, x: Tensor) -> Any:
        value, gradient = sf.value_and_grad(loss)(w, x)
        gradient = sf.psum(sf.psum(gradient, "shard"), "replica")
        return sf.psum(value, DATA), gradient

    mapped = on(step, (P(), P(DATA)), P())
    return lambda: mapped(w, on.cut(x, DATA)), plainly(loss, w, x)


@right(shard=2)
def zero1_by_hand(on: On) -> Made:
    """Gradients scattered, an update on this rank's piece, and the pieces gathered for all."""
    w, x = tensors(11, (D, 3), (ROWS, D))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w).square().sum() / ROWS

    def step(w: Tensor, x: Tensor) -> Tensor:
        piece = sf.reduce_scatter(sf.grad(loss)(w, x), "shard")
        return sf.all_gather(sf.collectives.local_slice(w, "shard") - 0.1 * piece, "shard", to="invariant")

    mapped = on(step, (P(), P("shard")), P())
    return lambda: mapped(w, on.cut(x, "shard")), w - 0.1 * plainly(loss, w, x)[1]


@right(shard=2)
def fsdp_by_hand(on: On) -> Made:
    w, x = tensors(12, (D, 3), (ROWS, D))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum((x @ sf.all_gather(w, data)).square().sum(), data) / ROWS

    step = on(lambda w, x: sf.value_and_grad(loss)(w, x, "shard"), (P("shard"), P("shard")), (P(), P("shard")))
    value, gradient = plainly(loss, w, x)
    return lambda: step(*on.cut((w, x), "shard")), (value, on.cut(gradient, "shard"))
