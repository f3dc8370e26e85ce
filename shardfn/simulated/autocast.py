"""The dtypes in which `torch.autocast` runs operations on the simulated device: as on CUDA.

The lists are those of ATen/autocast_mode.h, which torch compiles into the kernels of its own devices only.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import dispatch


def _known_ops(text: str) -> tuple[str, ...]:
    """The ops in this list that the installed torch has."""
    return tuple(name for name in text.split() if hasattr(torch.ops.aten, name.partition(".")[0]))


LOWER = _known_ops("""
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
""")
"""Those that run in the dtype of the context."""

FLOAT = _known_ops("""
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa linalg_matrix_sqrth
""")
"""Those that run in float32."""

RETURNS_FLOAT = _known_ops("""
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
""")
"""Those that read what they are given, and return float32 if no dtype is asked for."""

WIDEST = _known_ops("""
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
"""Those that run in the widest dtype among their arguments."""

_casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # of parameters, by id, until the outermost context ends


def register_autocast(device: str) -> torch.library.Library:
    """Makes autocast work on the device of this name, which is torch's spare one."""
    rules: dict[str, Callable[..., Any]] = dict.fromkeys(
        LOWER, functools.partial(_in, lambda device, _: torch.get_autocast_dtype(device))
    )
    rules |= dict.fromkeys(FLOAT, functools.partial(_in, lambda *_: torch.float32))
    rules |= dict.fromkeys(RETURNS_FLOAT, _returns_float) | dict.fromkeys(WIDEST, functools.partial(_in, _widest))
    rules |= {"binary_cross_entropy": _refused}
    return dispatch.autocasting({name: functools.partial(rule, device) for name, rule in rules.items()})


def drop_casts() -> None:
    """Drops the casts of parameters."""
    _casts.clear()


def _widest(device: str, given: Any) -> torch.dtype:
    wide = any(_narrows(x, device) and x.dtype is torch.float32 for x in optree.tree_leaves(given))
    return torch.float32 if wide else torch.get_autocast_dtype(device)


def _returns_float(device: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    if not _narrows(args[0], device):
        return op(*args, **kwargs)
    arguments = op._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= dict(zip([argument.name for argument in arguments], args, strict=False)) | kwargs
    given["dtype"] = given.get("dtype") or torch.float32
    return _IN_DTYPE.get(op, op)(**given)


_IN_DTYPE = {
    torch.ops.aten.norm.Scalar: torch.ops.aten.norm.ScalarOpt_dtype,
    torch.ops.aten.norm.ScalarOpt_dim: torch.ops.aten.norm.ScalarOpt_dim_dtype,
}


def _refused(device: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
        "binary_cross_entropy_with_logits, or disable autocast around it"
    )


def _in(dtype_of: Callable[[str, Any], torch.dtype], device: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    cast = functools.partial(_cast, device=device, dtype=dtype_of(device, (args, kwargs)))
    args, kwargs = optree.tree_map(cast, (args, kwargs), none_is_leaf=True)
    return op(*args, **kwargs)


def _narrows(x: Any, device: str) -> bool:
    return isinstance(x, Tensor) and x.device.type == device and x.is_floating_point() and x.dtype is not torch.float64


def _cast(x: Any, device: str, dtype: torch.dtype) -> Any:
    """A tensor in a dtype; a parameter's is kept, as torch does."""
    if not _narrows(x, device) or x.dtype is dtype:
        return x
    keeps = (
        torch.is_autocast_cache_enabled() and x.requires_grad and x.is_leaf and not x._is_view()
        and x.dtype is torch.float32 and dtype is torch.get_autocast_dtype(device)
    )  # fmt: skip
    if not keeps:
        return x.to(dtype)
    known = _casts.get(id(x))
    if known is None or known[0]() is not x:
        known = _casts[id(x)] = weakref.ref(x), x.to(dtype)
    return known[1]
