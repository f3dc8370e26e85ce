"""Every transform, inside and around, and derivatives that are written by hand."""

from __future__ import annotations

from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import P
from shardfn.transforms.custom_vjp import custom_vjp
from tests.check.programs.setting import (
    ROWS,
    D,
    Made,
    On,
    block,
    embed,
    head,
    language,
    layers,
    mlp,
    mlp_setting,
    plainly,
    right,
    tokens_of,
)
from tests.models import drawn, tensors


def _hvp(params: Any, direction: Any, x: Tensor, data: Any = ()) -> Any:
    return jvp(lambda p: grad(mlp)(p, x, data), (params,), (direction,))[1]


@right("processes", shard=2)
def torch_func_inside(on: On) -> Made:
    params, direction, x = mlp_setting(60)

    def derivatives(params: Any, direction: Any, x: Tensor, data: Any = ()) -> Any:
        value, pull = vjp(lambda p: mlp(p, x, data), params)[:2]
        return (
            grad(mlp)(params, x, data),
            pull(torch.ones_like(value))[0],
            jvp(lambda p: mlp(p, x, data), (params,), (direction,)),
            _hvp(params, direction, x, data),
            jacrev(lambda p: grad(mlp)(p, x, data)["v"])(params)["w"],
            jacfwd(lambda p: mlp(p, x, data))(params),
            hessian(lambda v: mlp({"w": params["w"], "v": v}, x, data))(params["v"]),
        )

    mapped = on(lambda p, d, x: derivatives(p, d, x, "shard"), (P(), P(), P("shard")), P())
    return lambda: mapped(params, direction, on.cut(x, "shard")), derivatives(params, direction, x)


@right("processes", shard=2)
def torch_func_around(on: On) -> Made:
    params, direction, x = mlp_setting(61)
    mapped = on(lambda p, x: mlp(p, x, "shard"), (P(), P("shard")), P())

    def derivatives(f: Any, x: Tensor) -> Any:
        value, pull = vjp(lambda p: f(p, x), params)[:2]
        product = jvp(lambda p: grad(f)(p, x), (params,), (direction,))[1]
        return pull(torch.ones_like(value))[0], jvp(lambda p: f(p, x), (params,), (direction,)), product

    return lambda: derivatives(mapped, on.cut(x, "shard")), derivatives(mlp, x)


@right(shard=2)
def a_product_with_the_hessian_by_backward_twice(on: On) -> Made:
    params, direction, x = mlp_setting(62)

    def product(params: Any, direction: Any, x: Tensor, data: Any = ()) -> Any:
        leaves = optree.tree_map(lambda p: p.detach().clone().requires_grad_(), params)
        flat = optree.tree_leaves(leaves)
        slopes = torch.autograd.grad(mlp(leaves, x, data), flat, create_graph=True)
        dot = sum((g * d).sum() for g, d in zip(slopes, optree.tree_leaves(direction), strict=True))
        return torch.autograd.grad(dot, flat)

    mapped = on(lambda p, d, x: product(p, d, x, "shard"), (P(), P(), P("shard")), P())
    return lambda: mapped(params, direction, on.cut(x, "shard")), product(params, direction, x)


@right("processes", shard=2)
def a_product_with_the_hessian_through_stages(on: On) -> Made:
    whole, tokens = layers(63), tokens_of(63)
    direction = layers(64)
    flat, v = (sf.shard(tree, on.mesh, sf.full_shard("shard")) for tree in (whole, direction))

    def product(params: Any, v: Any, tokens: Tensor, data: Any = ()) -> Any:
        return jvp(lambda p: sf.grad(language)(p, tokens, data), (params,), (v,))[1]

    mapped = on(lambda p, v, t: product(p, v, t, "shard"), (..., ..., P("shard")), ...)
    return lambda: sf.unshard(mapped(flat, v, on.cut(tokens, "shard"))), product(whole, direction, tokens)


@right(shard=2)
def gradients_of_single_samples(on: On) -> Made:
    params, _, x = mlp_setting(65)

    def each(params: Any, x: Tensor) -> Any:
        return vmap(grad(lambda p, row: mlp(p, row[None])), (None, 0))(params, x)

    def norms(params: Any, x: Tensor, data: Any = ()) -> Any:
        squares = sum(g.flatten(1).square().sum(1) for g in optree.tree_leaves(each(params, x)))
        return squares.sqrt(), sf.all_gather(squares, data, to="invariant")

    mapped = on(lambda p, x: norms(p, x, "shard"), (P(), P("shard")), (P("shard"), P()))
    own, every = norms(params, x)
    return lambda: mapped(params, on.cut(x, "shard")), (on.cut(own, "shard"), every)


@right(shard=2)
def clipped_gradients_of_single_samples(on: On) -> Made:
    """The sum of clipped gradients, by hand, and noise that is the same on all ranks."""
    params, _, x = mlp_setting(66)

    def step(params: Any, x: Tensor, data: Any = ()) -> Any:
        each = vmap(grad(lambda p, row: mlp(p, row[None])), (None, 0))(params, x)
        norms = sum(g.flatten(1).square().sum(1) for g in optree.tree_leaves(each)).sqrt()
        weights = (0.5 / norms).clamp(max=1)
        total = sf.psum(optree.tree_map(lambda g: torch.einsum("r,r...->...", weights, g), each), data)
        generator = sf.fold_in(3, 1)
        return optree.tree_map(lambda g: g + torch.randn(g.shape, generator=generator, dtype=g.dtype), total)

    mapped = on(lambda p, x: step(p, x, "shard"), (P(), P("shard")), P())
    return lambda: mapped(params, on.cut(x, "shard")), step(params, x)


@right(shard=2)
def an_ensemble_by_vmap(on: On) -> Made:
    draw = drawn(67)
    params, x = {"w": draw(5, 3, D), "v": draw(5, D, 2)}, draw(ROWS, 3)

    def gradients(params: Any, x: Tensor, data: Any = ()) -> Any:
        return vmap(lambda p: grad(mlp)(p, x, data))(params)

    mapped = on(lambda p, x: gradients(p, x, "shard"), (P(), P("shard")), P())
    return lambda: mapped(params, on.cut(x, "shard")), gradients(params, x)


@right(shard=2)
def a_jacobian_of_rows(on: On) -> Made:
    w, x = tensors(68, (3, D), (ROWS, 3))

    def rows(w: Tensor, x: Tensor) -> Tensor:
        return vmap(jacrev(lambda row: torch.tanh(row @ w)))(x)

    mapped = on(rows, (P(), P("shard")), P("shard"))
    return lambda: mapped(w, on.cut(x, "shard")), on.cut(rows(w, x), "shard")


@right(shard=2)
def an_update_that_is_differentiated(on: On) -> Made:
    """A step of SGD on one half of the rows, and the gradient of the loss on the other by the rate and the start."""
    params, _, x = mlp_setting(69)
    other = drawn(70)(ROWS, 3)

    def after(params: Any, rate: Tensor, x: Tensor, other: Tensor, data: Any = ()) -> Tensor:
        slope = grad(mlp)(params, x, data)
        return mlp(optree.tree_map(lambda p, g: p - rate * g, params, slope), other, data)

    rate = torch.tensor(0.1, dtype=torch.float64)
    specs = P(), P(), P("shard"), P("shard")
    mapped = on(lambda *args: sf.value_and_grad(after, (0, 1))(*args, "shard"), specs, P())
    wanted = plainly(after, params, rate, x, other, argnums=(0, 1))
    return lambda: mapped(params, rate, *on.cut((x, other), "shard")), wanted


class Times(Function):
    """A product with a weight that is cut by rows, whose gradient is written by hand, with collectives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, axis: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.axis = axis
        return x @ sf.all_gather(w, axis)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, w = ctx.saved_tensors
        whole = sf.all_gather(w, ctx.axis)
        return cotangents[0] @ whole.T, sf.reduce_scatter(x.T @ cotangents[0], ctx.axis), None


@right(shard=2)
def a_function_with_collectives_of_its_own(on: On) -> Made:
    w, x = tensors(71, (D, 3), (ROWS, D))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        out: Tensor = Times.apply(x, w, "shard")
        return sf.psum(out.square().sum(), "shard") / ROWS

    step = on(sf.value_and_grad(loss), (P("shard"), P("shard")), (P(), P("shard")))
    value, gradient = plainly(lambda w: (x @ w).square().sum() / ROWS, w)
    return lambda: step(*on.cut((w, x), "shard")), (value, on.cut(gradient, "shard"))


class Sharing(Function):
    """Megatron's f, as people write it: the identity, whose gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str) -> Tensor:
        ctx.axis = axis
        return sf.pvary(x, axis)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return sf.psum(cotangents[0], ctx.axis), None


class Adding(Function):
    """Megatron's g: a sum, whose gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str) -> Tensor:
        ctx.axis = axis
        return sf.psum(x, axis)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return sf.pvary(cotangents[0], ctx.axis), None


@right(tensor=2)
def f_and_g_of_megatron_by_hand(on: On) -> Made:
    draw = drawn(72)
    norm, up, down, x = 1 + draw(D), draw(D, 6), draw(6, D), draw(ROWS, D)

    def loss(norm: Tensor, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        h = Sharing.apply(F.rms_norm(x, (D,), norm, 1e-5), "tensor")
        return Adding.apply(torch.tanh(h @ up) @ down, "tensor").square().sum()

    def plain(norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (torch.tanh(F.rms_norm(x, (D,), norm, 1e-5) @ up) @ down).square().sum()

    specs = P(), P(None, "tensor"), P("tensor"), P()
    step = on(sf.value_and_grad(loss, (0, 1, 2)), specs, (P(), specs[:3]))
    value, (a, b, c) = plainly(plain, norm, up, down, argnums=(0, 1, 2))
    wanted = value, (a, on.cut(b, None, "tensor"), on.cut(c, "tensor"))
    return lambda: step(norm, on.cut(up, None, "tensor"), on.cut(down, "tensor"), x), wanted


@right("processes", shard=2)
def a_derivative_by_custom_vjp(on: On) -> Made:
    w, x = tensors(73, (3, D), (ROWS, 3))

    def product_of(data: Any) -> Any:
        def pure(w: Tensor, x: Tensor) -> Any:
            return (sf.psum((x @ sf.pvary(w, data)).sum(0), data),)

        def fwd(w: Tensor, x: Tensor) -> Any:
            return pure(w, x), (w, x)

        def bwd(residuals: Any, cotangents: Any, needs: Any) -> Any:
            w, x = residuals
            rows = cotangents[0].expand(len(x), -1)
            return [sf.psum(x.T @ rows, data), rows @ w.T]

        return custom_vjp(pure, fwd, bwd)

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        return product_of(data)(w, x)[0].square().sum()

    def derivatives(w: Tensor, x: Tensor, data: Any = ()) -> Any:
        return sf.grad(loss)(w, x, data), jvp(lambda w: grad(loss)(w, x, data), (w,), (w,))[1]

    mapped = on(lambda w, x: derivatives(w, x, "shard"), (P(), P("shard")), P())
    return lambda: mapped(w, on.cut(x, "shard")), derivatives(w, x)


@right(shard=2)
def torch_checkpoint_inside(on: On) -> Made:
    params, _, x = mlp_setting(74)

    def loss(params: Any, x: Tensor, data: Any = ()) -> Tensor:
        p = sf.pvary(params, data)
        h = checkpoint(lambda x, w: torch.tanh(x @ w), x, p["w"], use_reentrant=False)
        return sf.psum((h @ p["v"]).square().sum(), data) / ROWS

    step = on(lambda p, x: sf.value_and_grad(loss)(p, x, "shard"), (P(), P("shard")), P())
    return lambda: step(params, on.cut(x, "shard")), plainly(mlp, params, x)


@right("processes", shard=2)
def a_compiled_function(on: On) -> Made:
    params, _, x = mlp_setting(75)
    compiled = torch.compile(lambda p, x: mlp(p, x, "shard"), backend="aot_eager", fullgraph=True)
    step = on(lambda p, x: (compiled(p, x), sf.grad(compiled)(p, x)), (P(), P("shard")), P())
    return lambda: step(params, on.cut(x, "shard")), plainly(mlp, params, x)


@right("processes", shard=2)
def a_function_that_is_compiled_as_it_is_mapped(on: On) -> Made:
    params, _, x = mlp_setting(76)
    compiled = torch.compile(lambda p, x: mlp(p, x, "shard"), backend="aot_eager", fullgraph=True)
    mapped = on(compiled, (P(), P("shard")), P())
    return lambda: mapped(params, on.cut(x, "shard")), mlp(params, x)


@right("processes", shard=2)
def stages_that_are_compiled(on: On) -> Made:
    whole, tokens = layers(77), tokens_of(77)
    compiled = sf.stage(torch.compile(block, backend="aot_eager"))

    def loss(params: Any, tokens: Tensor, data: Any = (), block: Any = block) -> Tensor:
        x = sf.stage(embed)(params["embed"], tokens)
        for p in sf.layers(params["blocks"]):
            x = block(p, x)
        return sf.psum(sf.stage(head)(params["head"], x).square().sum(), data) / ROWS

    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))
    step = on(lambda p, t: sf.value_and_grad(loss)(p, t, "shard", compiled), (..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = step(flat, on.cut(tokens, "shard"))
        return value, sf.unshard(gradient)

    return run, sf.value_and_grad(loss)(whole, tokens)
