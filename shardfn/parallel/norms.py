"""Normalisation of vectors that are cut over an axis."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.collectives.functional import axis_size, psum, pvary
from shardfn.compat import functorch
from shardfn.mesh.grid import AxisName
from shardfn.transforms.custom_vjp import custom_vjp


def rms_norm(x: Tensor, weight: Tensor, axis: AxisName = (), *, eps: float | None = None) -> Tensor:
    """Vectors divided by their root mean square, times a weight: `[..., d / size], [d / size] -> [..., d / size]`.

    If `axis` cuts the vectors, ranks exchange one number a vector, forward and backward. Without an axis it is
    `torch.nn.functional.rms_norm`, with fewer passes over memory on a CPU.

    Args:
        x: this rank's columns; if its dtype is narrower than float32, it is computed in float32.
        weight: this rank's part.
        axis: the axis that cuts the vectors; `()` if nothing does.
        eps: added to the mean of squares; default: the machine epsilon of the dtype that it is computed in.

    Raises:
        ValueError: the shapes do not fit.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019), equation 4.
    """
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)}; they are [..., d] and [d]")
    eps = torch.finfo(_wide(x)).eps if eps is None else eps
    alike = x.dtype == weight.dtype and not functorch.inside_batching_or_forward()
    if alike and x.device.type != "cpu" and axis_size(axis) == 1:
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel
    out: Tensor = _rule(axis, eps)(x, weight)[0]
    return out


@functools.lru_cache(maxsize=64)
def _rule(axis: AxisName, eps: float) -> custom_vjp:
    def width(x: Tensor) -> int:
        return x.shape[-1] * axis_size(axis)

    def pure(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = x.to(_wide(x))
        mean = pvary(psum(wide.square().sum(-1, keepdim=True), axis), axis) / width(x)
        return ((wide * (mean + eps).rsqrt() * weight).to(x.dtype),)

    def fwd(x: Tensor, weight: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x)).square_()
        scale = psum(squares, axis).div_(width(x)).add_(eps).rsqrt_()
        out = x * scale
        out = out.mul_(weight) if out.dtype == torch.promote_types(out.dtype, weight.dtype) else out * weight
        return (out.to(x.dtype),), (x, weight, scale)

    def bwd(
        residuals: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        (x, weight, scales), (ct,) = residuals, cotangents
        if ct is None:
            return [None, None]
        scale = scales.view(-1, 1)
        rows, grads = (each.reshape(-1, x.shape[-1]).to(scale.dtype) for each in (x, ct))
        weights = weight.to(scale.dtype)
        products = grads * rows
        dx = dw = None
        if needs[0]:
            along = psum(products @ weights, axis)[:, None]
            dx = (grads * weights).mul_(scale).addcmul_(rows, along * scale**3 / -width(x))
            dx = dx.to(x.dtype).view(x.shape)
        if needs[1]:
            dw = (scale.mT @ products)[0].to(weight.dtype)
        return [dx, dw]

    return custom_vjp(pure, fwd, bwd)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
