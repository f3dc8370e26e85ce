"""Functions written out in elementary operations, whose derivatives of any order are right.

torch's own have formulas for two derivatives in reverse mode, and for a forward-mode derivative of one in reverse mode.
In other orders (a derivative of a tangent, a third one, one of a batch of gradients), the formulas take the statistics
of the input for constants, and results are silently wrong (torch 2.13). So is the tangent of an embedding's padding,
which has no gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_thread = threading.local()


class ReplacedFunctions(TorchFunctionMode):
    """A context in which functions of torch are replaced by those in `table`."""

    table: ClassVar[dict[Any, Any]] = {}

    @staticmethod
    def active() -> type[ReplacedFunctions] | None:
        """The kind of the innermost of these contexts on this thread."""
        kinds = getattr(_thread, "kinds", [])
        return kinds[-1] if kinds else None

    def __enter__(self) -> ReplacedFunctions:
        _thread.kinds = [*getattr(_thread, "kinds", []), type(self)]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _thread.kinds = _thread.kinds[:-1]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.table.get(func, func)(*args, **(kwargs or {}))


class Padded(ReplacedFunctions):
    """A context in which an embedding's row of padding has no tangent, as it has no gradient."""


class WrittenOut(Padded):
    """As `Padded`, and layer, batch, instance and weight norms are composed of elementary operations."""


def _embedding_with_padding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if padding_idx is None or padding_idx < -len(weight) or max_norm is not None or scale_grad_by_freq or sparse:
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    y = F.embedding(input, weight)
    return torch.where((input == padding_idx % len(weight))[..., None], y.detach(), y)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    shape = tuple(normalized_shape)
    if (
        not shape
        or tuple(input.shape[-len(shape) :]) != shape
        or any(p is not None and tuple(p.shape) != shape for p in (weight, bias))
    ):
        raise RuntimeError(f"layer_norm: normalized_shape={shape}, and the input has shape {tuple(input.shape)}")
    x = _standard(_as_float(input), tuple(range(-len(shape), 0)), eps)[0]
    autocast = input.is_cuda and torch.is_autocast_enabled("cuda")  # where torch returns float32
    return _affine(x, weight, bias, shape).to(torch.float32 if autocast else input.dtype)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    shape = (1, -1, *(1,) * (input.ndim - 2))
    if not training and (running_mean is None or running_var is None):
        raise RuntimeError("batch_norm: running_mean and running_var must be given in evaluation mode")
    if training and input.numel() == input.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    if training or running_mean is None or running_var is None:
        x, mean, var = _standard(_as_float(input), (0, *range(2, input.ndim)), eps)
        _follow(running_mean, running_var, mean, var, momentum, input.numel() // input.shape[1])
    else:
        x = (_as_float(input) - running_mean.view(shape)) * (running_var.view(shape) + eps).rsqrt()
    return _affine(x, weight, bias, shape).to(input.dtype)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x, mean, var = _standard(_as_float(input), tuple(range(2, input.ndim)), eps)
    _follow(running_mean, running_var, mean.mean(0), var.mean(0), momentum, input[0, 0].numel())
    return _affine(x, weight, bias, (1, -1, *(1,) * (input.ndim - 2))).to(input.dtype)


def _as_torch_orders(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of torch.nn.functional with its arguments in the order of the one in torch."""

    def ordered(input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *more: Any) -> Tensor:
        return f(input, mean, var, weight, bias, *more[:3])  # the last, if there is one, chooses a kernel

    return ordered


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    dims = tuple(i for i in range(v.ndim) if i != dim % v.ndim) if dim != -1 else tuple(range(v.ndim))
    x = _as_float(v)
    return (x * (_as_float(g) / x.square().sum(dims, keepdim=True).sqrt())).to(v.dtype)


def _standard(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of mean 0 and variance 1, and the mean and the variance that they had."""
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square().mean(dims, keepdim=True)
    return (x - mean) * (var + eps).rsqrt(), mean, var


def _follow(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, momentum: float, count: int
) -> None:
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, var * (count / max(count - 1, 1)))):
            if running is not None:
                running.lerp_(new.detach().view(-1).to(running.dtype), momentum)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _as_float(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


Padded.table = {F.embedding: _embedding_with_padding}
WrittenOut.table = Padded.table | {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _as_torch_orders(_batch_norm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _as_torch_orders(_instance_norm),
    torch._weight_norm: _weight_norm,
}
