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
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # which leaves float64 as it is
        lower = torch.get_autocast_dtype(kind)
        q, k, v = (_lowered(x, lower) for x in (q, k, v))
        mask = None if attn_mask is None else _lowered(attn_mask, lower)
        with torch.autocast(kind, enabled=False):
            return attention(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    if enable_gqa and q.ndim > 2 and k.ndim > 2 and k.shape[-3] and q.shape[-3] % k.shape[-3] == 0:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    plain = (
        all(type(x) is Tensor and x.layout is torch.strided and x.numel() for x in (q, k, v))
        and q.is_floating_point()
        and q.dtype == k.dtype == v.dtype
        and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and q.shape[-1:] == k.shape[-1:]
        and k.shape[-2:-1] == v.shape[-2:-1]
    )
    if attn_mask is not None:
        fits = _broadcasts(attn_mask, (*q.shape[:-1], k.shape[-2])) and attn_mask.dtype in (torch.bool, q.dtype)
        plain = plain and fits and not is_causal and not _moves(attn_mask)
    if not plain or dropout_p:
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    batch, factor = q.shape[:-2], 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    bias = at = None
    if attn_mask is not None:
        bias = attn_mask.reshape(-1, *((1,) * (2 - attn_mask.ndim) + attn_mask.shape)[-2:])
        at = torch.arange(len(bias), device=q.device).view(attn_mask.shape[:-2]).expand(batch).flatten()
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    y: Tensor = _Attention.apply(*flat, bias, at, is_causal, factor)  # type: ignore[no-untyped-call]
    return y.view(*batch, *y.shape[-2:])


def _lowered(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = (1,) * (len(shape) - mask.ndim) + mask.shape
    return len(sizes) == len(shape) and all(a in (1, b) for a, b in zip(sizes, shape, strict=True))


def _moves(mask: Tensor) -> bool:
    """Whether a mask may have a derivative."""
    return type(mask) is not Tensor or not functorch.constant_in(mask)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least, and contiguous: otherwise each product of matrices would copy it."""
    return (x.float() if x.dtype.itemsize < 4 else x).contiguous()


class _Attention(torch.autograd.Function):
    """`(q [n, l, d], k [n, s, d], v [n, s, e], bias [m, l or 1, s or 1], at [n], causal, scale) -> [n, l, e]`.

    Head `i` has the bias `at[i]`; there may be none.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, at: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        found = [p @ _wide(v[n]) for n, _, p, _, _ in _blocks(q, k, bias, at, causal, scale)]
        return _joined(found, q)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, at = ctx.saved_tensors
        dq: list[Tensor] = []
        sums: list[list[Tensor]] = [[], []]
        for n, rows, p, x, k_ in _blocks(q, k, bias, at, ctx.causal, ctx.scale):
            c = _wide(ct[n, rows])
            ds = _along(p, c @ _wide(v[n]).mT)
            dq.append(ds @ k_ * ctx.scale)
            for total, new in zip(sums, (ds.mT @ x, p.mT @ c), strict=True):
                if rows.start:
                    total[-1] = total[-1] + new
                else:
                    total.append(new)
        dk, dv = (torch.cat(total) for total in sums)
        return _joined(dq, q), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tq: Tensor | None, tk: Tensor | None, tv: Tensor | None, *_: Any) -> Tensor:
        q, k, v, bias, at = ctx.saved_tensors
        found = []
        for n, rows, p, x, k_ in _blocks(q, k, bias, at, ctx.causal, ctx.scale):
            v_ = _wide(v[n])
            parts = [] if tv is None else [p @ _wide(tv[n])]
            if tq is not None or tk is not None:
                ds = [] if tq is None else [_wide(tq[n, rows]) * ctx.scale @ k_.mT]
                ds += [] if tk is None else [x @ _wide(tk[n]).mT]
                dp = p * functools.reduce(torch.add, ds)
                parts += [dp @ v_, -dp.sum(-1, keepdim=True) * (p @ v_)]
            found.append(functools.reduce(torch.add, parts or [torch.zeros_like(p @ v_)]))
        return _joined(found, q)


def _blocks(
    q: Tensor, k: Tensor, bias: Tensor | None, at: Tensor | None, causal: bool, scale: float
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Some heads at a time, or rows of one head: which, their weights, their queries by the scale, and their keys."""
    count, length, keys = len(q), q.shape[-2], k.shape[-2]
    most = elements_at_a_time(q.device, SCORES)
    heads, many = max(1, most // (length * keys)), min(length, max(1, most // keys))
    for first in range(0, count, heads):
        n = slice(first, min(count, first + heads))
        k_ = _wide(k[n])
        for start in range(0, length, many):
            rows = slice(start, min(length, start + many))
            x = _wide(q[n, rows]) * scale
            scores, hidden = x @ k_.mT, None
            if causal:
                hidden = (
                    torch.arange(keys, device=q.device) > torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                )
            elif bias is not None and at is not None:
                added = bias[at[n]]
                added = added if added.shape[1] == 1 else added[:, rows]
                if added.dtype == torch.bool:
                    added = torch.zeros_like(added, dtype=scores.dtype).masked_fill(~added, -math.inf)
                scores = scores + added
                hidden = (added == -math.inf).all(-1, keepdim=True)  # torch gives rows that see nothing zeros
            yield n, rows, _Weights.apply(scores, hidden, causal), x, k_  # type: ignore[no-untyped-call]


def _joined(blocks: list[Tensor], q: Tensor) -> Tensor:
    """Blocks of heads, or as many blocks of rows for each head, as one tensor `[n, l, ...]`."""
    each = max(1, len(blocks) // len(q))
    whole = blocks if each == 1 else [torch.cat(blocks[i : i + each], 1) for i in range(0, len(blocks), each)]
    return torch.cat(whole).to(q.dtype)


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
