"""Context parallelism: attention over a sequence sharded over an axis, as a ring or by exchanging heads.

In the ring each rank keeps its queries, and keys and values go around. With causal attention the rank with the
beginning of the sequence would have little to do and the last one much, so sequences may be cut *balanced*: into two
pieces a rank, of which the first rank has the first and the last, the second rank the next ones inwards, and so on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.callers import api_name
from shardfn.check import recording
from shardfn.collectives import ops
from shardfn.collectives.functional import all_gather, all_to_all, axis_index, axis_size
from shardfn.compat import attention as kernels
from shardfn.mesh.grid import AxisName, as_names
from shardfn.mesh.scope import bound_axis
from shardfn.parallel.linear import wide
from shardfn.transforms.custom_vjp import custom_vjp

Block = tuple[slice, slice, bool]  # queries, the keys that they attend to, and whether causally


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
    """Softmax attention: `[b, h, t, d], [b, g, s, d], [b, g, s, d] -> [b, h, t, d]`.

    The value and the first derivative use torch's fused kernels. It works under every transform.

    Args:
        q: queries.
        k: keys; `g` heads, of which `h` is a multiple: each serves `h / g` heads of queries, one after another.
        v: values.
        causal: a query sees the keys up to its own position; `t` and `s` must be equal.
        scale: factor of the scores; default: `d ** -0.5`.
    """
    return ring_attention(q, k, v, (), causal=causal, scale=scale)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: AxisName,
    *,
    causal: bool = True,
    balanced: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention over a sequence sharded over `axis`, as a ring.

    Shapes are `[b, h, t / c, d], [b, g, t / c, d], ... -> [b, h, t / c, d]`.

    Keys and values go around the ring in `c - 1` steps; in backward they go again, and their gradients in `c` steps.
    While they travel, each rank computes with those that it has. Second derivatives, tangents (jvp) and batches (vmap)
    gather keys and values instead.

    Args:
        q: this rank's queries.
        k: its keys, as for `attention`.
        v: its values.
        axis: the axis that cuts the sequence; `()` if nothing does.
        causal: a query sees the keys up to its own position.
        balanced: the sequence is sharded as `positions(..., balanced=True)` says, so that with `causal` all ranks have
            equal work; otherwise it is cut in order, as a spec cuts it, and the last rank has almost twice the mean.
        scale: factor of the scores; default: `d ** -0.5`.

    Raises:
        ValueError: the shapes do not fit; in a checked call also: ranks pass other shapes or options.
        TypeError: the dtypes differ.

    Sources: Liu et al., Ring Attention with Blockwise Transformers (2023), algorithm 1; Brandon et al., Striped
    Attention (2023), for the imbalance; Llama 3 (2024), section 3.3.2, for the split into two pieces a rank.
    """
    _check(q, k, v, causal)
    _check_same_pieces("ring_attention", axis, {"k": k}, causal=causal, balanced=balanced, scale=scale)
    size = axis_size(axis)
    balanced = balanced and causal and size > 1
    _ordered("ring_attention", axis, balanced, causal)
    if balanced and q.shape[2] % 2:
        raise ValueError(
            f"ring_attention: this rank has {q.shape[2]} positions; balanced=True needs two equal pieces. Make "
            f"the sequence a multiple of {2 * size}, or pass balanced=False"
        )
    rule = _ring(axis, causal, balanced, q.shape[-1] ** -0.5 if scale is None else scale)
    out: Tensor = rule(q, k, v)[0]
    return out


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: AxisName, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Like `ring_attention` on a sequence that is cut in order, but each rank computes some heads over the whole of it.

    Four all-to-alls bring queries, keys and values to the ranks of their heads, and the results back.

    Raises:
        ValueError: the size of `axis` does not divide the heads; the shapes do not fit, or, in a checked call, differ.
        TypeError: the dtypes differ.

    Source: Jacobs et al., DeepSpeed Ulysses (2023), section 3.
    """
    size = axis_size(axis)
    _ordered("ulysses_attention", axis, False, causal)
    for name, x in (("q", q), ("k and v", k)):
        if x.shape[1] % size:
            raise ValueError(
                f"ulysses_attention: {name} have {x.shape[1]} heads, which the {size} ranks along {axis!r} cannot "
                f"share: use ring_attention, or an axis whose size divides {x.shape[1]}"
            )
    _check_same_pieces("ulysses_attention", axis, {"q": q, "k": k}, causal=causal, scale=scale)
    q, k, v = (all_to_all(x, axis, split_dim=1, concat_dim=2) for x in (q, k, v))
    return all_to_all(attention(q, k, v, causal=causal, scale=scale), axis, split_dim=2, concat_dim=1)


def positions(length: int, axis: AxisName, *, balanced: bool = False, device: torch.device | None = None) -> Tensor:
    """The positions of a sequence of `length` that this rank has, in the order that it holds them: `[length / size]`.

    Balanced, rank `i` of `c` has pieces `i` and `2 c - 1 - i` of `2 c` equal ones; otherwise it has piece `i` of `c`.

    Raises:
        ValueError: the length does not divide into these pieces.
    """
    size = axis_size(axis)
    pieces = 2 * size if balanced and size > 1 else size
    if length % pieces:
        raise ValueError(
            f"positions: a sequence of {length} does not divide into {pieces} pieces"
            + (f" (two for each of the {size} ranks along {axis!r})" if pieces > size else f" along {axis!r}")
            + f": pad it to {-(-length // pieces) * pieces}"
        )
    local_positions = _places(length // size, axis_index(axis), size, balanced, device)
    if not torch.compiler.is_compiling() and (recorder := recording.current()) is not None:
        recorder.declared(local_positions, recorder.trace.mask(as_names(axis)), (), "positions")
    _ordered("positions", axis, balanced)
    return local_positions


def _ordered(name: str, axis: AxisName, balanced: bool, causal: bool = True) -> None:
    """Tells a checked call in which order a sequence is sharded, where that matters."""
    if causal and not torch.compiler.is_compiling() and (recorder := recording.current()) is not None:
        recorder.ordered(name, as_names(axis), balanced)


def _places(local_length: int, index: int, size: int, balanced: bool, device: torch.device | None) -> Tensor:
    if not balanced or size == 1:
        return torch.arange(index * local_length, (index + 1) * local_length, device=device)
    half = local_length // 2
    pieces = index, 2 * size - 1 - index
    return torch.cat([torch.arange(piece * half, (piece + 1) * half, device=device) for piece in pieces])


def _check_same_pieces(name: str, axis: AxisName, tensors: dict[str, Tensor], **options: Any) -> None:
    """Raises on all ranks, in a checked call, if their pieces differ in shape, or their options differ."""
    advice = "Every rank passes the same, and as many places of the sequence: pad it to one length before it is cut"
    ops.compare_arguments(name, axis, tensors["k"], lambda: ops.arguments(tensors, **options), advice)


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    if not q.dtype == k.dtype == v.dtype:
        kinds = f"q is {q.dtype}, k {k.dtype} and v {v.dtype}"
        raise TypeError(f"{api_name('attention')}: {kinds}; they have one dtype: write k.to(q.dtype)")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"{api_name('attention')}: {shapes}; they are [b, h, t, d], [b, g, s, d] and [b, g, s, d]")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{api_name('attention')}: {shapes}: {q.shape[1]} heads of queries are not a multiple of "
            f"{k.shape[1]} of keys"
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{api_name('attention')}: {shapes}: causal=True, but {q.shape[2]} queries and {k.shape[2]} keys"
        )


@functools.lru_cache(maxsize=256)
def _ring(axis: AxisName, causal: bool, balanced: bool, scale: float) -> custom_vjp:
    def pure(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k, v = (all_gather(x, axis, dim=2) for x in (k, v))
        scores = kernels.by_group(q, k.mT) * scale
        if causal:
            places = [_places(q.shape[2], i, axis_size(axis), balanced, q.device) for i in range(axis_size(axis))]
            later = torch.cat(places)[None, :] > places[axis_index(axis)][:, None]  # keys of all ranks, for each query
            scores = scores.masked_fill(later, -torch.inf)
        return (kernels.by_group(scores.softmax(-1), v),)

    def fwd(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        size, index = axis_size(axis), axis_index(axis)
        if size == 1:
            out, lse = kernels.attention(q, k, v, causal, scale)
            return (out,), (q, k, v, out, lse)
        out = torch.zeros_like(q, dtype=wide(q))
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide(q), device=q.device)
        travelling = torch.stack((k, v))
        for step in range(size):
            coming = _sent(travelling, axis) if step + 1 < size else None
            for rows, columns, masked in _parts(index, (index - step) % size, q.shape[2], causal, balanced):
                keys, values = (x[:, :, columns] for x in travelling)
                part, part_lse = kernels.attention(q[:, :, rows], keys, values, masked, scale)
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
            if coming is not None:
                travelling = coming()
        out = out.to(q.dtype)
        return (out,), (q, k, v, out, lse)

    def bwd(
        residuals: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        (q, k, v, out, lse), (ct,) = residuals, cotangents
        size, index = axis_size(axis), axis_index(axis)
        ct = torch.zeros_like(out) if ct is None else ct  # the ring needs every rank, with a cotangent or not
        if size == 1:
            return list(kernels.attention_backward(ct, q, out, lse, k, v, causal, scale))
        dq = torch.zeros_like(q, dtype=wide(q))
        travelling = torch.stack((k, v))
        arriving: Callable[[], Tensor] = lambda: travelling  # noqa: E731
        for step in range(size):
            coming = _sent(travelling, axis) if step + 1 < size else None
            kv_grads = torch.zeros_like(travelling, dtype=wide(q))
            for rows, columns, masked in _parts(index, (index - step) % size, q.shape[2], causal, balanced):
                keys, values = (x[:, :, columns] for x in travelling)
                own_ct, own_q, own_out, own_lse = (x[:, :, rows] for x in (ct, q, out, lse))
                new_q, new_k, new_v = kernels.attention_backward(
                    own_ct, own_q, own_out, own_lse, keys, values, masked, scale
                )
                dq[:, :, rows] += new_q
                kv_grads[0, :, :, columns] += new_k
                kv_grads[1, :, :, columns] += new_v
            arriving = _sent(kv_grads if step == 0 else arriving() + kv_grads, axis)
            if coming is not None:
                travelling = coming()
        dk, dv = arriving().to(k.dtype).unbind(0)
        return [dq.to(q.dtype), dk, dv]

    return custom_vjp(pure, fwd, bwd)


def _parts(index: int, source: int, length: int, causal: bool, balanced: bool) -> list[Block]:
    """Which of a rank's queries attend to which of the keys that came from `source`."""
    full, half = slice(None), length // 2
    if not causal:
        return [(full, full, False)]
    if index == source:
        return [(full, full, True)]
    if not balanced:
        return [(full, full, False)] if source < index else []
    return [(full, slice(0, half), False)] if source < index else [(slice(half, None), full, False)]


def _sent(x: Tensor, axis: AxisName) -> Callable[[], Tensor]:
    """Starts to send `x` to the next rank of the ring; the function returned waits for what the previous one sends."""
    bound = bound_axis(axis, "ring_attention")
    if bound.size == 1:
        return lambda: x
    return ops.shifted(x, bound.index, bound.size, bound.group)


def _merge(out: Tensor, lse: Tensor, new: Tensor, logs: Tensor) -> None:
    """Merges attention to further keys into `out` and `lse`, in place; `logs` are log-sum-exps, like `lse`."""
    merged = torch.logaddexp(lse, logs)
    out.mul_((lse - merged).exp()[..., None].to(out.dtype)).add_(new * (logs - merged).exp()[..., None].to(out.dtype))
    lse.copy_(merged)
