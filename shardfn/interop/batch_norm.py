"""Batch normalisation with statistics over the batch of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.collectives.functional import psum, pvary
from shardfn.mesh.grid import AxisName
from shardfn.mesh.scope import bound_axis


def is_batch_norm(m: nn.Module) -> bool:
    """Whether a module normalises with statistics of the batch."""
    return isinstance(m, nn.modules.batchnorm._BatchNorm)


def keeps_statistics(m: nn.Module) -> bool:
    """Whether a module updates running statistics in its buffers in training, as batch and some instance norms do."""
    return isinstance(m, nn.modules.batchnorm._NormBase)


def synchronised(m: Any, axis: AxisName) -> Callable[[Tensor], Tensor]:
    """A forward for a batch norm that uses mean and variance over all ranks along `axis`, which hold different rows.

    It makes two all-reduces of one number per channel, in forward and in backward; the second sums squared distances
    from the mean, as on one process, which does not cancel where the mean is large.

    Source: Ioffe and Szegedy, Batch Normalization (2015), with the batch cut over ranks.
    """
    return functools.partial(_forward, m, in_one_dtype(m), axis)


def in_one_dtype(m: Any) -> Callable[[Tensor], Tensor]:
    """A forward with weights cast to the dtype of the statistics, as torch requires after `gather_dtype`."""
    own: Callable[[Tensor], Tensor] = m.forward

    def forward(x: Tensor) -> Tensor:
        weights, statistics = m._parameters, m.running_mean
        if statistics is None or m.weight is None or m.weight.dtype == statistics.dtype:
            return own(x)
        before = dict(weights)
        weights.update((name, value.to(statistics.dtype)) for name, value in before.items() if value is not None)
        try:
            return own(x)
        finally:
            weights.update(before)

    return forward


def _forward(m: Any, alone: Callable[[Tensor], Tensor], axis: AxisName, x: Tensor) -> Tensor:
    if not m.training and m.running_mean is not None:
        return alone(x)
    m._check_input_dim(x)
    bound_axis(axis, "sync_batch_norm")  # raises here, where the name was given, for an axis that the mesh lacks
    dims = [d for d in range(x.ndim) if d != 1]
    channel = [1, -1] + [1] * (x.ndim - 2)
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    values = x.numel() // x.shape[1]
    count = psum(values, axis)
    if values < 2 and m.training and int(count) < 2:
        raise ValueError(
            f"a batch norm that trains got one value for each channel on all ranks along {axis!r} together, which has "
            f"no variance: the input has shape {tuple(x.shape)}"
        )
    mean = psum(x_wide.sum(dims), axis) / count
    centred = x_wide - pvary(mean, axis).view(channel)
    var = psum(centred.square().sum(dims), axis) / count
    if m.training and m.track_running_stats and m.running_mean is not None:
        m.num_batches_tracked.add_(1)
        factor = 1.0 / m.num_batches_tracked.to(x_wide.dtype) if m.momentum is None else m.momentum
        with torch.no_grad():
            m.running_mean.add_((mean.detach() - m.running_mean) * factor)
            m.running_var.add_((var.detach() * count / (count - 1) - m.running_var) * factor)
    out = centred * torch.rsqrt(pvary(var, axis) + m.eps).view(channel)
    if m.weight is not None:
        out = out * m.weight.view(channel)
    if m.bias is not None:
        out = out + m.bias.view(channel)
    return out.to(x.dtype)
