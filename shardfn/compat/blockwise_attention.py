"""Attention that computes its scores some rows at a time, and recomputes them where a derivative needs them.

It replaces `scaled_dot_product_attention` in forward mode. torch's kernels that keep no scores have no
tangents, and its plain formulas keep all of them several times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.compat import functorch
from shardfn.compat.devices import elements_at_a_time
from shardfn.compat.together import pairs_of

SCORES = 2**17  # at a time, on a CPU
ROWS = 64  # at least, of a block of queries that see no later keys
_torchs = F.scaled_dot_product_attention


def sdpa(
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
            return sdpa(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
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
        constant = type(attn_mask) is Tensor and functorch.constant_in(attn_mask)
        plain = plain and fits and not is_causal and constant
    if not plain or dropout_p:
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    batch, factor = q.shape[:-2], 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    bias = bias_index = None
    if attn_mask is not None:
        bias = attn_mask.reshape(-1, *((1,) * (2 - attn_mask.ndim) + attn_mask.shape)[-2:])
        bias_index = torch.arange(len(bias), device=q.device).view(attn_mask.shape[:-2]).expand(batch).flatten()
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    y: Tensor = _Attention.apply(*flat, bias, bias_index, is_causal, factor)  # type: ignore[no-untyped-call]
    return y.view(*batch, *y.shape[-2:])


def _lowered(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = (1,) * (len(shape) - mask.ndim) + mask.shape
    return len(sizes) == len(shape) and all(a in (1, b) for a, b in zip(sizes, shape, strict=True))


def _as_float(x: Tensor) -> Tensor:
    """In float32 at least, and contiguous: otherwise each product of matrices would copy it."""
    return (x.float() if x.dtype.itemsize < 4 else x).contiguous()


class _Attention(torch.autograd.Function):
    """Blockwise attention with rules for reverse and forward mode.

    `(q [n, l, d], k [n, s, d], v [n, s, e], bias [m, l or 1, s or 1], at [n], causal, scale) -> [n, l, e]`.
    Head `i` has the bias `at[i]`; there may be none. A value, its tangent, and a gradient with its tangent, of which
    nothing takes a derivative, are computed in place; all other derivatives are those of the formulas.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, bias_index: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        hidden = _Hidden(bias, bias_index, causal)
        if functorch.untracked(q, k, v, bias):
            return _in_place(q, k, v, hidden, scale)
        return _join_blocks([p @ v_ for *_, p, _, _, v_ in _attention_blocks(q, k, v, hidden, scale)], q, k, causal)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *masks = ctx.saved_tensors
        bias, bias_index = (None if x is None else functorch.alive(x) for x in masks)
        hidden, rest = _Hidden(bias, bias_index, ctx.causal), (None, None, None, None)
        if (pairs := pairs_of(q, k, v, ct)) is not None and functorch.untracked(bias):
            moving = [torch.zeros_like(x) if t is None else t for x, t in zip(*pairs, strict=True)]
            gradients = _gradients_in_place(pairs[0], moving, hidden, ctx.scale)
            return *map(functorch.dual, *gradients), *rest
        dq: list[Tensor] = []
        sums: list[list[Tensor]] = [[], []]
        for n, rows, p, x, k_, v_ in _attention_blocks(q, k, v, hidden, ctx.scale):
            c = _as_float(ct[n, rows])
            ds = _softmax_jvp(p, c @ v_.mT)
            dq.append(ds @ k_ * ctx.scale)
            for total, new in zip(sums, (ds.mT @ x, p.mT @ c), strict=True):
                padded = F.pad(new, (0, 0, 0, k.shape[-2] - new.shape[-2]))
                if rows.start:
                    total[-1] = total[-1] + padded
                else:
                    total.append(padded)
        dk, dv = (torch.cat(total) for total in sums)
        return _join_blocks(dq, q, k, ctx.causal), dk.to(k.dtype), dv.to(v.dtype), *rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        q, k, v, bias, bias_index = ctx.saved_tensors
        hidden, pairs = _Hidden(bias, bias_index, ctx.causal), zip((q, k, v), tangents, strict=False)
        tq, tk, tv = (torch.zeros_like(x) if t is None else t for x, t in pairs)
        if functorch.untracked(q, k, v, tq, tk, tv, bias):
            return _in_place(q, k, v, hidden, ctx.scale, (tq, tk, tv))
        outputs = []
        for n, rows, p, x, k_, v_ in _attention_blocks(q, k, v, hidden, ctx.scale):
            visible = slice(k_.shape[-2])
            ds = _as_float(tq[n, rows]) * ctx.scale @ k_.mT + x @ _as_float(tk[n])[:, visible].mT
            outputs.append(_softmax_jvp(p, ds) @ v_ + p @ _as_float(tv[n])[:, visible])
        return _join_blocks(outputs, q, k, ctx.causal)


class _Hidden(NamedTuple):
    """The mask: a bias for the scores of each head, or a causal mask."""

    bias: Tensor | None
    at: Tensor | None
    causal: bool

    def visible_keys(self, rows: slice, keys: int) -> slice:
        """The keys that any of these rows may see."""
        return slice(min(keys, rows.stop) if self.causal else keys)

    def mask_for(self, n: slice, rows: slice, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The bias of some rows of some heads, and a mask of the keys, or rows, without weight."""
        if self.causal:
            places = torch.arange(scores.shape[-1], device=scores.device)
            return None, places > torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        if self.bias is None or self.at is None:
            return None, None
        added = self.bias[self.at[n]]
        added = added if added.shape[1] == 1 else added[:, rows]
        if added.dtype == torch.bool:
            added = torch.zeros_like(added, dtype=scores.dtype).masked_fill(~added, -math.inf)
        return added, (added == -math.inf).all(-1, keepdim=True)  # torch gives rows that see nothing zeros


# --- blocks of scores ---


def _tiles(q: Tensor, k: Tensor, causal: bool) -> tuple[list[slice], list[slice]]:
    """Heads, and rows of each, whose scores are computed at a time: few rows, where they see no later keys."""
    count, length, keys = len(q), q.shape[-2], k.shape[-2]
    max_elements = elements_at_a_time(q.device, SCORES)
    rows = min(length, max(1, max_elements // keys), max(ROWS, -(-length // 8)) if causal else length)
    heads = max(1, max_elements // (rows * keys))
    head_slices, row_slices = (
        [slice(i, min(n, i + m)) for i in range(0, n, m)] for n, m in ((count, heads), (length, rows))
    )
    return head_slices, row_slices


def _attention_blocks(
    q: Tensor, k: Tensor, v: Tensor, hidden: _Hidden, scale: float
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Tensor]]:
    """Heads and rows, their weights, their queries by the scale, and the keys and values that they may see."""
    heads, blocks = _tiles(q, k, hidden.causal)
    for n in heads:
        k_, v_ = _as_float(k[n]), _as_float(v[n])
        for rows in blocks:
            visible = hidden.visible_keys(rows, k.shape[-2])
            x = _as_float(q[n, rows]) * scale
            scores = x @ k_[:, visible].mT
            added, without = hidden.mask_for(n, rows, scores)
            scores = scores if added is None else scores + added
            p = _Weights.apply(scores, without, hidden.causal)  # type: ignore[no-untyped-call]
            yield n, rows, p, x, k_[:, visible], v_[:, visible]


def _join_blocks(blocks: list[Tensor], q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Blocks of rows of some heads after another, as one tensor `[n, l, ...]`."""
    count = len(_tiles(q, k, causal)[1])
    heads = blocks if count == 1 else [torch.cat(blocks[i : i + count], 1) for i in range(0, len(blocks), count)]
    return torch.cat(heads).to(q.dtype)


# --- in place ---


class _Scratch:
    """Memory for blocks of scores, which later blocks use again."""

    def __init__(self, count: int, q: Tensor, k: Tensor, causal: bool) -> None:
        heads, rows = ([s.stop - s.start for s in parts[:1]] for parts in _tiles(q, k, causal))
        kind = torch.promote_types(q.dtype, torch.float32)
        self.each = q.new_empty(count, heads[0] * rows[0] * k.shape[-2], dtype=kind)

    def block(self, slot: int, x: Tensor, keys: Tensor) -> Tensor:
        shape = len(x), x.shape[-2], keys.shape[-2]
        return self.each[slot, : math.prod(shape)].view(shape)

    def products(self, slot: int, x: Tensor, keys: Tensor) -> Tensor:
        return torch.bmm(x, keys.mT, out=self.block(slot, x, keys))

    def weights(self, slot: int, n: slice, rows: slice, x: Tensor, keys: Tensor, hidden: _Hidden) -> Tensor:
        """A softmax of scores, for which the next block is used, too."""
        scores = self.products(slot + 1, x, keys)
        added, without = hidden.mask_for(n, rows, scores)
        if hidden.causal and without is not None:
            first = min(rows.start, scores.shape[-1])
            scores[..., first:].masked_fill_(without[:, first:], -math.inf)
        elif added is not None:
            scores += added
        weights = torch.softmax(scores, -1, out=self.block(slot, x, keys))
        return weights if without is None or hidden.causal else weights.masked_fill_(without, 0)


def _along_in_place(weights: Tensor, x: Tensor) -> Tensor:
    x *= weights
    return x.addcmul_(weights, x.sum(-1, keepdim=True), value=-1)


def _in_place(
    q: Tensor, k: Tensor, v: Tensor, hidden: _Hidden, scale: float, tangents: Sequence[Tensor] = ()
) -> Tensor:
    """Attention, or its tangent."""
    y, scratch = q.new_empty(*q.shape[:2], v.shape[-1]), _Scratch(2, q, k, hidden.causal)
    heads, blocks = _tiles(q, k, hidden.causal)
    for n in heads:
        k_, v_ = _as_float(k[n]), _as_float(v[n])
        tk, tv = (_as_float(t[n]) for t in tangents[1:]) if tangents else (k_, v_)
        keys = torch.cat([k_, tk], -1)
        for rows in blocks:
            visible = hidden.visible_keys(rows, k.shape[-2])
            x = _as_float(q[n, rows]) * scale
            p = scratch.weights(0, n, rows, x, k_[:, visible], hidden)
            if not tangents:
                y[n, rows] = p @ v_[:, visible]
                continue
            queries = torch.cat([_as_float(tangents[0][n, rows]) * scale, x], -1)
            dp = _along_in_place(p, scratch.products(1, queries, keys[:, visible]))
            y[n, rows] = (dp @ v_[:, visible]).baddbmm_(p, tv[:, visible])
    return y


def _gradients_in_place(
    values: Sequence[Tensor], tangents: Sequence[Tensor], hidden: _Hidden, scale: float
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of q, k and v, given these and a cotangent, and the tangents of the gradients."""
    (q, k, v, ct), (tq, tk, tv, tct) = values, tangents
    grads, grad_tangents = ([x.new_zeros(x.shape, dtype=_as_float(x[:0]).dtype) for x in (q, k, v)] for _ in range(2))
    scratch = _Scratch(5, q, k, hidden.causal)
    heads, blocks = _tiles(q, k, hidden.causal)
    for n in heads:
        k_, v_, tk_, tv_ = (_as_float(x[n]) for x in (k, v, tk, tv))
        keys, columns = torch.cat([k_, tk_], -1), torch.cat([v_, tv_], -1)
        for rows in blocks:
            visible = hidden.visible_keys(rows, k.shape[-2])
            x, tx = (_as_float(y[n, rows]) * scale for y in (q, tq))
            c, tc = (_as_float(y[n, rows]) for y in (ct, tct))
            p = scratch.weights(0, n, rows, x, k_[:, visible], hidden)
            dp = _along_in_place(p, scratch.products(1, torch.cat([tx, x], -1), keys[:, visible]))
            g = scratch.products(2, c, v_[:, visible])
            dg = scratch.products(3, torch.cat([tc, c], -1), columns[:, visible])
            product = torch.mul(p, g, out=scratch.block(4, x, k_[:, visible]))
            g -= product.sum(-1, keepdim=True)  # of which p times is the gradient of the scores
            torch.mul(dp, g, out=product)
            dg = _along_in_place(p, dg).add_(product)
            dg.addcmul_(p, product.sum(-1, keepdim=True), value=-1)
            g *= p
            for y, scores, weights in (
                (grads, [(g, k_, x)], [(p, c)]),
                (grad_tangents, [(dg, k_, x), (g, tk_, tx)], [(dp, c), (p, tc)]),
            ):
                dq, dk, dv = y[0][n, rows], y[1][n, visible], y[2][n, visible]
                for s, z, w in scores:
                    dq.baddbmm_(s, z[:, visible], alpha=scale)
                    dk.baddbmm_(s.mT, w)
                for s, w in weights:
                    dv.baddbmm_(s.mT, w)
    gradients, tangents_out = (
        [x.to(y.dtype) for x, y in zip(results, values, strict=False)] for results in (grads, grad_tangents)
    )
    return gradients, tangents_out


class _Weights(torch.autograd.Function):
    """`(scores [..., s], hidden, causal) -> [..., s]`: a softmax, in which what is hidden has no weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, hidden: Tensor | None, causal: bool) -> Tensor:
        if hidden is None:
            return torch.softmax(scores, -1)
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf if causal else 0), -1)
        return weights if causal else weights.masked_fill(hidden, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor, None, None]:
        return _softmax_jvp(ctx.saved_tensors[0], ct), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _softmax_jvp(ctx.saved_tensors[0], tangent)


def _softmax_jvp(weights: Tensor, x: Tensor) -> Tensor:
    """The Jacobian of a softmax, which is symmetric, times a tensor."""
    weighted = weights * x
    return weighted - weights * weighted.sum(-1, keepdim=True)
