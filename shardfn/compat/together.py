"""Replacements of torch functions that compute gradients together with the tangents of the gradients.

In forward mode around a gradient, torch's own formulas allocate memory for each product of a tangent, and decompose
activations. The rules here apply where nothing differentiates the result; all other derivatives use torch's formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.compat import autograd, functorch
from shardfn.compat.devices import elements_at_a_time

NUMBERS = 2**16  # at a time, on a CPU
_aten: Any = torch.ops.aten


def pairs_of(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]] | None:
    """Values and tangents, for a rule that computes in place; None if formulas are needed, or nothing has a tangent."""
    if functorch.inside_transform():  # a vmap, say, which has no rule for taking tangents off
        return None
    values, tangents = zip(*[functorch.unpacked(functorch.alive(x)) for x in tensors], strict=True)
    moves = any(t is not None for t in tangents)
    return (values, tangents) if moves and functorch.untracked(*values, *tangents) else None


# --- products with a matrix ---


def product(x: Tensor, w: Tensor) -> Any:
    """As `torch.matmul`: a product of rows with a matrix."""
    if not (_are_plain(x, w) and x.ndim >= 2 and w.ndim == 2 and x.shape[-1] == w.shape[0]):
        return torch.matmul(x, w)
    y: Tensor = _MatmulWithTangent.apply(x.reshape(-1, x.shape[-1]), w, _unread(w))  # type: ignore[no-untyped-call]
    return y if x.ndim == 2 else y.view(*x.shape[:-1], w.shape[-1])


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """As `torch.nn.functional.linear`."""
    rows = _are_plain(input, weight) and input.ndim >= 2 and weight.ndim == 2 and input.shape[-1] == weight.shape[1]
    if not rows or not (bias is None or _are_plain(input, bias)):
        return F.linear(input, weight, bias)
    w = weight.mT
    if hasattr(weight, _UNREAD):
        mark_unread(w, weight)
    y = product(input, w)
    return y if bias is None else y + bias


def _are_plain(*tensors: Any) -> bool:
    first = tensors[0]
    return not torch.compiler.is_compiling() and all(
        type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and x.is_floating_point()
        and (x.dtype, x.device) == (first.dtype, first.device)
        and x.numel() > 0
        and not torch.is_autocast_enabled(x.device.type)
        for x in tensors
    )


_UNREAD = "_shardfn_unread"  # an attribute of tensors


def mark_unread(x: Tensor, parameter: Tensor | None = None) -> None:
    """Notes that nothing but the tangent of the gradient is used of a parameter, or of a view of one."""
    setattr(x, _UNREAD, parameter)


def _unread(x: Tensor) -> Tensor | None:
    """The parameter that this is or shows, if its gradient is unread."""
    parameter: Tensor | None = getattr(x, _UNREAD, None)
    return x if parameter is None and hasattr(x, _UNREAD) else parameter


class _MatmulWithTangent(torch.autograd.Function):
    """A matrix product whose backward computes gradients together with their tangents.

    `(x [n, k], w [k, m]) -> x @ w`. If only the tangent of the gradient of `w` is used, the gradient is not computed.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, unread: Any) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, unread = inputs
        ctx.hooks = None if unread is None else autograd.hooks_of(unread)  # what is held is gathered memory
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        of_x, of_w, _ = ctx.needs_input_grad
        if (pairs := pairs_of(x, w, ct)) is None:
            return ct @ w.mT if of_x else None, x.mT @ ct if of_w else None, None
        (x, w, ct), (tx, tw, tct) = pairs
        dx = _maybe_dual(ct @ w.mT, _sum(((tct, _transpose(w)), (ct, _transpose(tw))))) if of_x else None
        if not of_w:
            return dx, None, None
        weight_tangent = _sum(((_transpose(tx), ct), (x.mT, tct)))
        # Hooks of a parameter may use its gradient.
        if weight_tangent is not None and ctx.hooks is not None and not ctx.hooks:
            nothing = torch.empty_like(weight_tangent)  # of which no page is touched but one
            nothing[0, 0] = math.nan  # a number that would be seen wherever it was used
            return dx, functorch.dual(nothing, weight_tangent), None
        return dx, _maybe_dual(x.mT @ ct, weight_tangent), None

    @staticmethod
    def jvp(ctx: Any, tx: Tensor | None, tw: Tensor | None, _: None) -> Tensor | None:
        x, w = ctx.saved_tensors
        terms = (tx, w), (x, tw)
        if functorch.untracked(x, w, tx, tw):
            return _sum(terms)
        products = [a @ b for a, b in terms if a is not None and b is not None]
        return products[0] if len(products) == 1 else products[0] + products[1]


def _transpose(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.mT


def _sum(terms: Sequence[tuple[Tensor | None, Tensor | None]]) -> Tensor | None:
    """The sum of products, in place; None if there is none."""
    total: Tensor | None = None
    for a, b in terms:
        if a is not None and b is not None:
            total = a @ b if total is None else total.addmm_(a, b)
    return total


def _maybe_dual(x: Tensor, tangent: Tensor | None) -> Tensor:
    return x if tangent is None else functorch.dual(x, tangent)


# --- activations ---


def silu(input: Tensor, inplace: bool = False) -> Any:
    """As `torch.nn.functional.silu`."""
    return F.silu(input, inplace) if inplace or not _are_plain(input) else _ActivationWithTangent.apply(input, "silu")  # type: ignore[no-untyped-call]


def gelu(input: Tensor, approximate: str = "none") -> Any:
    """As `torch.nn.functional.gelu`."""
    if approximate != "none" or not _are_plain(input):
        return F.gelu(input, approximate=approximate)
    return _ActivationWithTangent.apply(input, "gelu")  # type: ignore[no-untyped-call]


class _ActivationWithTangent(torch.autograd.Function):
    """`(x, kind) -> y`, of the same shape."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kind: str) -> Tensor:
        return F.silu(x) if kind == "silu" else F.gelu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.kind = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        formula, kernel, bend = _ACTIVATIONS[ctx.kind]
        if (pairs := pairs_of(x, ct)) is None:
            return ct * formula(x), None
        (x, ct), (tx, tct) = pairs
        tangent = torch.zeros_like(ct) if tct is None else kernel(tct, x).contiguous()
        if tx is not None:
            flat = tangent.view(-1)
            parts = [y.reshape(-1).split(elements_at_a_time(x.device, NUMBERS)) for y in (flat, x, ct, tx)]
            for total, *chunk in zip(*parts, strict=True):
                z, c, t = (y.float() if y.dtype.itemsize < 4 else y for y in chunk)
                total += (bend(z).mul_(c).mul_(t)).to(total.dtype)
        return functorch.dual(kernel(ct, x), tangent), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (x,) = ctx.saved_tensors
        formula, kernel = _ACTIVATIONS[ctx.kind][:2]
        return kernel(tangent, x) if functorch.untracked(x, tangent) else tangent * formula(x)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _silu_bend(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    bend = torch.addcmul(x, x, s, value=-2).add_(2)
    return bend.mul_(s.addcmul_(s, s, value=-1))


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_bend(x: Tensor) -> Tensor:
    square = x * x
    return torch.exp(square * -0.5).mul_(square.neg_().add_(2)).div_(math.sqrt(2 * math.pi))


_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]] = {
    # the first derivative, a kernel that multiplies by it, and the second derivative
    "silu": (_silu_slope, _aten.silu_backward, _silu_bend),
    "gelu": (_gelu_slope, _aten.gelu_backward, _gelu_bend),
}

TABLE: dict[Any, Callable[..., Any]] = {
    torch.matmul: product,
    Tensor.matmul: product,
    Tensor.__matmul__: product,
    F.linear: linear,
    F.silu: silu,
    F.gelu: gelu,
}
