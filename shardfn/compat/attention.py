"""Fused attention kernels, which give the logarithms of the sums of exponentials too."""

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
    """Attention `[b, h, t, d], [b, h, s, d], ... -> [b, h, t, d]` and the logarithm of its sums `[b, h, t]`.

    No autograd. By torch's fused kernels where they take such tensors.
    """
    if _fits_cpu(q, k):
        return _fused_cpu(*map(_rows, (q, k, v)), 0.0, causal, scale=scale)
    if _fits_cuda(q, k):
        out, lse = _fused_cuda(*map(_even_rows, (q, k, v)), 0.0, causal, False, scale=scale)[:2]
        return out[..., : v.shape[-1]], lse
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp().to(v.dtype) @ v), lse


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
    """Gradients by `q`, `k` and `v`, where `out` and `lse` are of attention to these keys and maybe to others too."""
    if _fits_cpu(q, k):
        return _fused_cpu_backward(*map(_rows, (ct, q, k, v, out)), lse, 0.0, causal, scale=scale)
    if _fits_cuda(q, k):
        lse = lse.contiguous()  # as the kernel reads it, whatever its strides
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)
        more = None, None, q.shape[2], k.shape[2], 0.0, causal, nothing, nothing
        found = _fused_cuda_backward(*map(_even_rows, (ct, q, k, v, out)), lse, *more, scale=scale)
        dq, dk, dv = (g[..., : q.shape[-1]] for g in found)
        return dq, dk, dv
    p = (_scores(q, k, causal, scale) - lse[..., None]).exp()
    d = (ct * out).sum(-1, keepdim=True).to(p.dtype)
    ds = (p * ((ct @ v.mT).to(p.dtype) - d) * scale).to(q.dtype)
    return ds @ k, ds.mT @ q, p.to(ct.dtype).mT @ ct


def _fits_cpu(q: torch.Tensor, k: torch.Tensor) -> bool:
    known = _fused_cpu is not None and _fused_cpu_backward is not None
    return known and q.device.type == "cpu" and min(q.numel(), k.numel()) > 0


def _fits_cuda(q: torch.Tensor, k: torch.Tensor) -> bool:
    known = _fused_cuda is not None and _fused_cuda_backward is not None
    narrow = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    return known and narrow and min(q.numel(), k.numel()) > 0 and _has_flash(q.device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether torch and the device have the kernels."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """With the numbers of a row side by side, as kernels take for granted, and none of them asks."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _even_rows(x: torch.Tensor) -> torch.Tensor:
    """With rows, side by side, of a multiple of 8 numbers, each of which begins at a multiple of 8 numbers."""
    if x.shape[-1] % 8:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
    even = x.stride(-1) == 1 and not any(n % 8 for n in (x.storage_offset(), *x.stride()[:-1]))
    return x if even else x.clone(memory_format=torch.contiguous_format)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores
