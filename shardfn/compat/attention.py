"""Fused attention kernels that also return the log-sum-exp of the scores."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional

_fused_cpu: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


_fused_cpu_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


_fused_cuda: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention", None)


_fused_cuda_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", None)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[b, h, t, d], [b, g, s, d], ... -> [b, h, t, d]` and the log-sum-exp of its scores, `[b, h, t]`.

    Not recorded by autograd. Uses torch's fused kernels for tensors that they accept.
    """
    if _fits_cpu(q, k):
        return _fused_cpu(*map(_rows, (q, k, v)), 0.0, causal, scale=scale)
    if _fits_cuda(q, k):
        out, lse = _fused_cuda(*map(_even_rows, (q, k, v)), 0.0, causal, False, scale=scale)[:2]
        return out[..., : v.shape[-1]], lse
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return by_group((scores - lse[..., None]).exp().to(v.dtype), v), lse


def attention_backward(
    ct: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for `q`, `k` and `v`; `out` and `lse` may be of attention to these keys and further ones."""
    if _fits_cpu(q, k):
        return _fused_cpu_backward(*map(_rows, (ct, q, k, v, out)), lse, 0.0, causal, scale=scale)
    if _fits_cuda(q, k):
        lse = lse.contiguous()  # the kernel ignores its strides
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        options = None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed
        padded = _fused_cuda_backward(*map(_even_rows, (ct, q, k, v, out)), lse, *options, scale=scale)
        dq, dk, dv = (g[..., : q.shape[-1]] for g in padded)
        return dq, dk, dv
    p = (_scores(q, k, causal, scale) - lse[..., None]).exp()
    d = (ct * out).sum(-1, keepdim=True).to(p.dtype)
    ds = (p * (by_group(ct, v.mT).to(p.dtype) - d) * scale).to(q.dtype)
    return by_group(ds, k), _over_group(ds, q, k), _over_group(p.to(ct.dtype), ct, v)


def _grouped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rows of all heads of a group, one after another: `[b, h, t, n] -> [b, g, h / g * t, n]`."""
    return x if x.shape[1] == y.shape[1] else x.reshape(*y.shape[:2], -1, x.shape[-1])


def _over_group(x: torch.Tensor, y: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The sum over the heads of each group of `x.mT @ y`, in the shape of `k`."""
    return _grouped(x, k).mT @ _grouped(y, k)


def by_group(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiplies the rows of each head with the matrix of its group: `[b, h, t, n], [b, g, n, m] -> [b, h, t, m]`."""
    return (_grouped(x, y) @ y).reshape(*x.shape[:-1], y.shape[-1])


def _fits_cpu(q: torch.Tensor, k: torch.Tensor) -> bool:
    available = _fused_cpu is not None and _fused_cpu_backward is not None
    return available and q.device.type == "cpu" and min(q.numel(), k.numel()) > 0


def _fits_cuda(q: torch.Tensor, k: torch.Tensor) -> bool:
    available = _fused_cuda is not None and _fused_cuda_backward is not None
    narrow = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    return available and narrow and min(q.numel(), k.numel()) > 0 and _has_flash(q.device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether both torch and the device have the flash kernels."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Makes rows contiguous, which the kernels assume without a check."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _even_rows(x: torch.Tensor) -> torch.Tensor:
    """Pads and aligns rows: contiguous, with a length and starts that are multiples of 8 elements."""
    if x.shape[-1] % 8:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
    even = x.stride(-1) == 1 and not any(n % 8 for n in (x.storage_offset(), *x.stride()[:-1]))
    return x if even else x.clone(memory_format=torch.contiguous_format)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores = by_group(q, k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores
