"""Attention whose scores exist for some rows at a time, and are computed again where a derivative needs them.

It takes the place of `scaled_dot_product_attention` in forward mode. torch's kernels that keep no scores have no
tangents, and its plain formulas keep all of them several times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.compat import functorch
from shardfn.compat.devices import elements_at_a_time

SCORES = 2**19  # at a time, on a CPU
_torchs = F.scaled_dot_product_attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, which computes what has dropout or a learned mask."""
    q, k, v = query, key, value
    if enable_gqa and q.ndim > 2 and k.ndim > 2 and k.shape[-3] and q.shape[-3] % k.shape[-3] == 0:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    plain = (
        all(type(x) is Tensor and x.layout is torch.strided and x.numel() for x in (q, k, v))
        and q.is_floating_point()
        and q.dtype == k.dtype == v.dtype
        and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and q.shape[-1:] == k.shape[-1:]
        and k.shape[-2:-1] == v.shape[-2:-1]
        and not torch.is_autocast_enabled(q.device.type)
    )
    if not plain or dropout_p or (attn_mask is not None and (is_causal or _moves(attn_mask))):
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    bias = None
    if attn_mask is not None:
        zero = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        bias = torch.where(attn_mask, zero, -math.inf) if attn_mask.dtype == torch.bool else attn_mask.to(zero.dtype)
        bias = bias.expand(*q.shape[:-1], k.shape[-2])
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    y: Tensor = _Attention.apply(q, k, v, bias, is_causal, factor)  # type: ignore[no-untyped-call]
    return y


def _moves(mask: Tensor) -> bool:
    """Whether a mask may have a derivative."""
    return type(mask) is not Tensor or any(kind != "batch" for _, kind in functorch.followed(mask))


def _wide(x: Tensor) -> Tensor:
    """In float32 at least, and contiguous: otherwise each product of matrices would copy it."""
    return (x.float() if x.dtype.itemsize < 4 else x).contiguous()


class _Attention(torch.autograd.Function):
    """`(q [..., l, d], k [..., s, d], v [..., s, e], bias [..., l, s] or None, causal, scale) -> [..., l, e]`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
        k_, v_ = _wide(k), _wide(v)
        found = [p @ v_ for _, p, _ in _blocks(q, k_, bias, causal, scale)]
        return torch.cat(found, -2).to(q.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        k_, v_, ct_ = _wide(k), _wide(v), _wide(ct)
        dq, dk, dv = [], torch.zeros_like(k_), torch.zeros_like(v_)
        for at, p, rows in _blocks(q, k_, bias, ctx.causal, ctx.scale):
            c = ct_[..., at, :]
            ds = _along(p, c @ v_.mT)
            dq.append(ds @ k_ * ctx.scale)
            dk = dk + ds.mT @ rows
            dv = dv + p.mT @ c
        return torch.cat(dq, -2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, tq: Tensor | None, tk: Tensor | None, tv: Tensor | None, *_: Any) -> Tensor:
        q, k, v, bias = ctx.saved_tensors
        k_, v_ = _wide(k), _wide(v)
        tq_, tk_, tv_ = (None if t is None else _wide(t) for t in (tq, tk, tv))
        found = []
        for at, p, rows in _blocks(q, k_, bias, ctx.causal, ctx.scale):
            parts = [] if tv_ is None else [p @ tv_]
            if tq_ is not None or tk_ is not None:
                ds = [] if tq_ is None else [tq_[..., at, :] * ctx.scale @ k_.mT]
                ds += [] if tk_ is None else [rows @ tk_.mT]
                dp = p * functools.reduce(torch.add, ds)
                parts += [dp @ v_, -dp.sum(-1, keepdim=True) * (p @ v_)]
            found.append(functools.reduce(torch.add, parts or [torch.zeros_like(p @ v_)]))
        return torch.cat(found, -2).to(q.dtype)


def _blocks(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows of queries at a time: where they are, their weights `[..., rows, s]`, and they by the scale."""
    length, count = q.shape[-2], k.shape[-2]
    many = max(1, elements_at_a_time(q.device, SCORES) // max(1, q[..., 0, 0].numel() * count))
    for start in range(0, length, many):
        at = slice(start, min(length, start + many))
        rows = q[..., at, :].to(k.dtype) * scale
        scores, hidden = rows @ k.mT, None
        if causal:
            hidden = torch.arange(count, device=q.device) > torch.arange(at.start, at.stop, device=q.device)[:, None]
        elif bias is not None:
            scores = scores + bias[..., at, :]
            hidden = (bias[..., at, :] == -math.inf).all(-1, keepdim=True)  # torch gives rows that see nothing zeros
        yield at, _Weights.apply(scores, hidden, causal), rows  # type: ignore[no-untyped-call]


class _Weights(torch.autograd.Function):
    """`(scores [..., s], hidden, causal) -> [..., s]`: a softmax, in which what is hidden has no weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, hidden: Tensor | None, causal: bool) -> Tensor:
        if hidden is None:
            return torch.softmax(scores, -1)
        seen = torch.softmax(scores.masked_fill(hidden, -math.inf if causal else 0), -1)
        return seen if causal else seen.masked_fill(hidden, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor, None, None]:
        return _along(ctx.saved_tensors[0], ct), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _along(ctx.saved_tensors[0], tangent)


def _along(weights: Tensor, x: Tensor) -> Tensor:
    """The Jacobian of a softmax, which is symmetric, times a tensor."""
    weighted = weights * x
    return weighted - weights * weighted.sum(-1, keepdim=True)
