"""Fused attention kernels that also return the log-sum-exp of the scores.

On CUDA torch chooses between its kernels, as for `scaled_dot_product_attention`, and `sdpa_kernel` narrows its choice.
What a kernel returns as log-sum-exp, and what its backward expects, is not promised by torch, so each one is compared
with the plain formulas when a device first uses it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch import Tensor
from torch.nn.attention import SDPBackend

from shardfn.compat import dispatch
from shardfn.compat.norms import ReplacedFunctions
from shardfn.compat.replacing import replaced
from shardfn.compat.trusted import trusted

_aten: Any = torch.ops.aten


class AttentionKernel(NamedTuple):
    """One way to compute attention and its gradients.

    Attributes:
        name: for messages.
        forward: `(q, k, v, causal, scale) -> (out, lse)`, with shapes as in `attention_with_lse`.
        backward: `(ct, q, k, v, out, lse, causal, scale) -> (dq, dk, dv)`, with shapes as in `attention_backward`.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores.

    `[b, h, t, d], [b, g, s, d], [b, g, s, d] -> [b, h, t, d], [b, h, t]`, with `h` heads in `g` groups. Not
    recorded by autograd. Uses torch's fused kernels for tensors that they accept.
    """
    width, (q, k, v) = v.shape[-1], _of_one_width(q, k, v)
    out, lse = _kernel(q, k, v, causal, scale).forward(q, k, v, causal, scale)
    return (out if out.shape[-1] == width else out[..., :width]), lse


def attention_backward(
    ct: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Gradients for `q`, `k` and `v`; `out` and `lse` may be of attention to these keys and further ones."""
    widths = [x.shape[-1] for x in (q, k, v)]
    q, k, v, ct, out = _of_one_width(q, k, v, ct, out)
    gradients = _kernel(q, k, v, causal, scale).backward(ct, q, k, v, out, lse, causal, scale)
    return tuple([g if g.shape[-1] == n else g[..., :n] for g, n in zip(gradients, widths, strict=True)])


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As `attention_with_lse`, by the plain formulas, to the keys of which `visible`, `[b or 1, 1, t, s]`, is True.

    A query that sees none has zeros, and -inf as log-sum-exp.
    """
    scores = _masked_scores(q, k, visible, scale, softcap)[0]
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return by_group(weights.to(v.dtype), v), lse


def masked_attention_backward(
    ct: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, ...]:
    """As `attention_backward`, for `masked_attention`; `lse` is inf for queries that see no key at all."""
    scores, slope = _masked_scores(q, k, visible, scale, softcap)
    return _attention_gradients(
        ct, q, k, v, out, (scores - lse[..., None]).exp(), scale if slope is None else scale * slope
    )


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention by differentiable formulas, with `sinks` as further scores, `[h]`; zeros for a query without keys."""
    scores = by_group(q, k.mT) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    blind = None if visible is None else ~visible.any(-1, keepdim=True)
    if visible is not None and blind is not None:
        scores = scores.masked_fill(~(visible | blind), -torch.inf)  # a row of -inf alone would have no derivative
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    y = by_group(scores.softmax(-1)[..., : k.shape[2]], v)
    return y if blind is None else y.masked_fill(blind, 0)


def _masked_scores(
    q: Tensor, k: Tensor, visible: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """The scores, -inf for hidden keys, and what a soft cap multiplies their gradients with."""
    scores, slope = by_group(q, k.mT).to(_wide_dtype(q.dtype)) * scale, None
    if softcap is not None:
        fraction = (scores / softcap).tanh()
        scores, slope = fraction * softcap, 1 - fraction.square()
    return (scores if visible is None else scores.masked_fill(~visible, -torch.inf)), slope


def _of_one_width(*rows: Tensor) -> tuple[Tensor, ...]:
    """Pads narrower rows with zeros, which change neither scores nor what is left of the results."""
    width = max(x.shape[-1] for x in rows)
    pad = torch.nn.functional.pad
    return tuple([x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in rows])


# --- the choice ---


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> AttentionKernel:
    kind = q.device.type
    if kind in pretended and min(q.numel(), k.numel()):
        return FLASH if _fits_flash(q) else EFFICIENT
    if min(q.numel(), k.numel()) == 0 or kind not in ("cpu", "cuda"):
        return PLAIN
    if kind == "cpu":
        return CPU
    if torch.compiler.is_compiling():
        return FLASH if _has_flash(q) else PLAIN
    chosen, heads = _chosen_kernel(q, k, v, causal, scale), q.shape[1] // k.shape[1]
    if chosen is PLAIN or not dispatch.plain(q):
        return chosen
    for kernel in (chosen, FLASH) if _has_flash(q) else (chosen,):
        description = (
            f"torch's {kernel.name} attention ({q.dtype}, {q.shape[-1]} wide, {heads} to a key, causal={causal})"
        )
        if trusted(description, q.device, functools.partial(_differs, kernel, q, heads, causal)):
            return kernel
    return PLAIN


def _chosen_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> AttentionKernel:
    """The kernel that torch chooses for such tensors."""
    q, k, v = map(_even_rows, (q, k, v))
    heads = q.shape[1] // k.shape[1]
    choose = functools.partial(torch._fused_sdp_choice, attn_mask=None, dropout_p=0.0, is_causal=causal, scale=scale)
    kernel = _CUDA.get(choose(q, k, v, enable_gqa=heads > 1), PLAIN)
    if kernel is PLAIN and heads > 1:  # some kernels want as many heads of keys as of queries
        kernel = _CUDA.get(choose(q, *(x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))), PLAIN)
    return kernel


def _has_flash(q: Tensor) -> bool:
    """Whether the device has the flash kernels, for tensors like this."""
    return _fits_flash(q) and _flash_on(q.device)


def _fits_flash(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256


@functools.cache
def _flash_on(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _differs(kernel: AttentionKernel, query: Tensor, heads: int, causal: bool) -> str:
    """Says which of a kernel's results is not that of the plain formulas; empty if all are."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 2 * heads, 40), (2, 2, 80), (2, 2, 80), (2, 2 * heads, 40)]
    samples = (torch.randn(*shape, query.shape[-1], generator=draw, device="cpu") for shape in shapes)
    inputs = [x.to(query.device, query.dtype) for x in samples]
    q, k, v, _ = (x.to(torch.float64) for x in inputs)
    scale = query.shape[-1] ** -0.5
    full = PLAIN.forward(q, k, v, False, scale)  # as in a ring: the kernel has the first half of the keys

    def results(kernel: AttentionKernel, kind: torch.dtype) -> list[Tensor]:
        q, k, v, ct = (x.to(kind) for x in inputs)
        k, v, out, lse = k[:, :, :40], v[:, :, :40], full[0].to(kind), full[1].to(_wide_dtype(kind))
        return [*kernel.forward(q, k, v, causal, scale), *kernel.backward(ct, q, k, v, out, lse, causal, scale)]

    tolerance = (
        0.01 if query.dtype == torch.float32 else 0.05
    )  # TF32, and formats with 8 bits; a wrong formula is far off
    pairs = zip(results(kernel, query.dtype), results(PLAIN, torch.float64), strict=True)
    for name, (x, y) in zip(("output", "log-sum-exp", "dq", "dk", "dv"), pairs, strict=True):
        if x.shape != y.shape:
            return f"{name} has shape {tuple(x.shape)} instead of {tuple(y.shape)}"
        error = float((x - y).abs().max() / y.abs().max())
        if not error < tolerance:
            return f"{name} is wrong by {error:.2g}"
    return ""


pretended: set[str] = set()
"""Kinds of devices without kernels that are taken to have CUDA's."""


@contextlib.contextmanager
def pretending(kind: str) -> Iterator[None]:
    """A context in which devices of this kind are taken to have CUDA's kernels, also by torch's own function."""
    pretended.add(kind)
    try:
        with replaced(torch.nn.functional, scaled_dot_product_attention=torchs_own):
            yield
    finally:
        pretended.discard(kind)


def torchs_own(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` as on CUDA, for tensors of pretended devices."""
    kind = ReplacedFunctions.active()
    if kind is not None and _sdpa in kind.table:
        return kind.table[_sdpa](query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.device.type not in pretended or query.ndim != 4:
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    width = value.shape[-1]
    query, key, value = map(_even_rows, (query, key, value))
    if attn_mask is None and _fits_flash(query):
        flash = _aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    else:
        if enable_gqa:
            key, value = _repeated(query, key, value)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        efficient = _aten._scaled_dot_product_efficient_attention
        out = efficient(query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale)[0]
    return out if out.shape[-1] == width else out[..., :width]


_sdpa = torch.nn.functional.scaled_dot_product_attention


# --- the plain formulas ---


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    return by_group(scores.softmax(-1).to(v.dtype), v), scores.logsumexp(-1)


def _plain_backward(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    return _attention_gradients(ct, q, k, v, out, (_scores(q, k, causal, scale) - lse[..., None]).exp(), scale)


def _attention_gradients(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, p: Tensor, scale: float | Tensor
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values, from the weights `p`; `scale` multiplies those of scores."""
    d = (ct * out).sum(-1, keepdim=True).to(p.dtype)
    ds = (p * (by_group(ct, v.mT).to(p.dtype) - d) * scale).to(q.dtype)
    return by_group(ds, k), _over_group(ds, q, k), _over_group(p.to(ct.dtype), ct, v)


def _grouped(x: Tensor, y: Tensor) -> Tensor:
    """Concatenates the rows of a group's heads: `[b, h, t, n] -> [b, g, h/g*t, n]`."""
    rows = x.shape[1] // max(1, y.shape[1]) * x.shape[2]
    return x if x.shape[1] == y.shape[1] else x.reshape(*y.shape[:2], rows, x.shape[-1])


def _over_group(x: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """The sum over the heads of each group of `x.mT @ y`, in the shape of `k`."""
    return _grouped(x, k).mT @ _grouped(y, k)


def by_group(x: Tensor, y: Tensor) -> Tensor:
    """Multiplies each head with its group's matrix: `[b, h, t, n], [b, g, n, m] -> [b, h, t, m]`."""
    return (_grouped(x, y) @ y).reshape(*x.shape[:-1], y.shape[-1])


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = by_group(q, k.mT).to(_wide_dtype(q.dtype)) * scale
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


PLAIN = AttentionKernel("plain", _plain_attention, _plain_backward)


# --- the kernels of torch ---


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_contiguous_rows, (q, k, v)), 0.0, causal, scale=scale
    )


def _cpu_backward(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    rows = map(_contiguous_rows, (ct, q, k, v, out))
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, lse, 0.0, causal, scale=scale)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    rows = map(_even_rows, (q, k, v))
    out, lse = _aten._scaled_dot_product_flash_attention(*rows, 0.0, causal, False, scale=scale)[:2]
    return out[..., : v.shape[-1]], lse


def _flash_backward(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    lengths = None, None, q.shape[2], k.shape[2]
    rows, seed = map(_even_rows, (ct, q, k, v, out)), _seed(q)
    padded = _aten._scaled_dot_product_flash_attention_backward(
        *rows, lse.contiguous(), *lengths, 0.0, causal, seed, seed, scale=scale
    )  # the kernel ignores the strides of `lse`
    return tuple(g[..., : q.shape[-1]] for g in padded)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    rows = map(_even_rows, (q, k, v))
    out, lse = _aten._scaled_dot_product_cudnn_attention(*rows, None, True, 0.0, causal, False, scale=scale)[:2]
    return out[..., : v.shape[-1]], lse.view(q.shape[:3])


def _cudnn_backward(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    rows, seed = map(_even_rows, (ct, q, k, v, out)), _seed(q)
    rest = seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal
    padded = _aten._scaled_dot_product_cudnn_attention_backward(*rows, lse[..., None].contiguous(), *rest, scale=scale)
    return tuple(g[..., : q.shape[-1]] for g in padded)


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    rows = map(_even_rows, (q, *_repeated(q, k, v)))
    out, lse = _aten._scaled_dot_product_efficient_attention(*rows, None, True, 0.0, causal, scale=scale)[:2]
    return out[..., : v.shape[-1]], lse[..., : q.shape[2]]


def _efficient_backward(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    keys, values = _repeated(q, k, v)
    rows, seed = map(_even_rows, (ct, q, keys, values, out)), _seed(q)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # as its forward returns them
    ct, q_, keys, values, out = rows
    rest = out, lse.contiguous(), seed, seed, 0.0, (True, True, True, False), causal
    padded = _aten._scaled_dot_product_efficient_attention_backward(ct, q_, keys, values, None, *rest, scale=scale)
    dq, *both = (g[..., : q.shape[-1]] for g in padded[:3])
    dk, dv = (g.unflatten(1, (k.shape[1], -1)).sum(2) for g in both)
    return dq, dk, dv


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each head of queries."""
    heads = q.shape[1] // k.shape[1]
    return (k, v) if heads == 1 else (k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1))


def _seed(q: Tensor) -> Tensor:
    """The random seed, or its offset, of attention without dropout."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


def _contiguous_rows(x: Tensor) -> Tensor:
    """Makes rows contiguous, which the kernels assume without a check."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _even_rows(x: Tensor) -> Tensor:
    """Pads and aligns rows: contiguous, with a length and starts that are multiples of 8 elements."""
    if x.shape[-1] % 8:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
    even = x.stride(-1) == 1 and not any(n % 8 for n in (x.storage_offset(), *x.stride()[:-1]))
    return x if even else x.clone(memory_format=torch.contiguous_format)


CPU = AttentionKernel("CPU", _cpu, _cpu_backward)
FLASH = AttentionKernel("flash", _flash, _flash_backward)
EFFICIENT = AttentionKernel("efficient", _efficient, _efficient_backward)
CUDNN = AttentionKernel("cuDNN", _cudnn, _cudnn_backward)
_CUDA = {
    SDPBackend.FLASH_ATTENTION.value: FLASH,
    SDPBackend.EFFICIENT_ATTENTION.value: EFFICIENT,
    SDPBackend.CUDNN_ATTENTION.value: CUDNN,
}
