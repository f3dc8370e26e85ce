"""Batch normalization with statistics over the batch of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfn.collectives.functional import psum, pvary
from shardfn.mesh.grid import AxisName
from shardfn.mesh.scope import bound_axis


def is_batch_norm(m: nn.Module) -> bool:
    """Whether a module normalizes with statistics of the batch."""
    return isinstance(m, nn.modules.batchnorm._BatchNorm)


def keeps_statistics(m: nn.Module) -> bool:
    """Whether a module updates running statistics in its buffers in training, as batch and some instance norms do."""
    return isinstance(m, nn.modules.batchnorm._NormBase)


def synchronized(m: Any, axis: AxisName) -> Callable[..., Tensor]:
    """A forward for a batch norm that uses mean and variance over all ranks along `axis`, which hold different rows.

    The module's own forward runs, in which `F.batch_norm` is replaced, so that a subclass keeps what it does besides.
    """
    synced = getattr(m.forward, "__func__", None) is nn.SyncBatchNorm.forward  # needs an accelerator, and communicates
    module_forward = in_one_dtype(m, nn.BatchNorm1d.forward.__get__(m) if synced else m.forward)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with SyncedStatistics(m, axis) as statistics:
            out = module_forward(*args, **kwargs)
        if (m.training or m.running_mean is None) and not statistics.found:
            raise TypeError(
                f"sync_batch_norm: {type(m).__name__} must normalize by torch.nn.functional.batch_norm, got a forward "
                f"without it. Let its forward call that, or leave sync_batch_norm out, by which ranks keep their own "
                f"statistics"
            )
        return out

    return forward


def in_one_dtype(m: Any, base_forward: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """A forward with weights cast to the dtype of the statistics, as torch requires after `gather_dtype`."""
    run = m.forward if base_forward is None else base_forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        weights, statistics = m._parameters, m.running_mean
        if statistics is None or m.weight is None or m.weight.dtype == statistics.dtype:
            return run(*args, **kwargs)
        before = dict(weights)
        weights.update((name, value.to(statistics.dtype)) for name, value in before.items() if value is not None)
        try:
            return run(*args, **kwargs)
        finally:
            weights.update(before)

    return forward


class SyncedStatistics(TorchFunctionMode):
    """A context in which `F.batch_norm` takes its statistics over all ranks along an axis.

    It makes two all-reduces of one number per channel, in forward and in backward; the second sums squared distances
    from the mean, as on one process, which does not cancel where the mean is large.

    Source: Ioffe and Szegedy, Batch Normalization (2015), with the batch sharded over ranks.

    Attributes:
        found: whether it was called.
    """

    def __init__(self, m: nn.Module, axis: AxisName) -> None:
        super().__init__()
        self.m, self.axis, self.found = m, axis, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.found = True
        return _normalised(self.axis, *args, **(kwargs or {}))


def _normalised(
    axis: AxisName,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `F.batch_norm`."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    bound_axis(axis, "sync_batch_norm")  # raises here, where the name was given, for an axis that the mesh lacks
    x = input
    dims = [d for d in range(x.ndim) if d != 1]
    channel = [1, -1] + [1] * (x.ndim - 2)
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    values = x.numel() // x.shape[1]
    count = psum(values, axis)
    if values < 2 and int(count) < 2:
        raise ValueError(
            f"a batch norm that trains got one value for each channel on all ranks along {axis!r} together, which has "
            f"no variance: the input has shape {tuple(x.shape)}"
        )
    mean = psum(x_wide.sum(dims), axis) / count
    centered = x_wide - pvary(mean, axis).view(channel)
    var = psum(centered.square().sum(dims), axis) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.add_((mean.detach() - running_mean) * momentum)
            running_var.add_((var.detach() * count / (count - 1) - running_var) * momentum)
    out = centered * torch.rsqrt(pvary(var, axis) + eps).view(channel)
    if weight is not None:
        out = out * weight.view(channel)
    if bias is not None:
        out = out + bias.view(channel)
    return out.to(x.dtype)
