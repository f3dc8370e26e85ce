"""Cross-entropy without the full logits: columns are sharded over an axis, rows computed in chunks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardfn.collectives import ops
from shardfn.collectives.functional import axis_index, axis_size, pmax, psum
from shardfn.compat.devices import elements_at_a_time
from shardfn.mesh.grid import AxisName
from shardfn.parallel.linear import EQUAL, as_indices, check_range, to_parallel, wide_dtype
from shardfn.transforms.custom_vjp import custom_vjp

LOGITS = 2**23, 2**26  # computed at a time by default: on a CPU, and elsewhere


def cross_entropy(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    axis: AxisName = (),
    *,
    vocabulary: int | None = None,
    ignore: int = -100,
    chunk: int | None = None,
    sequence: int | None = None,
) -> Tensor:
    """The cross-entropy of the logits `x @ w` at each position: `[..., d], [d, v / size], [...] -> [...]`, in nats.

    At most `chunk` rows of the logits `[rows, v / size]` exist at a time; if there are more rows, backward computes
    them again. Ranks exchange three numbers a row.

    Args:
        x: the same on all ranks along `axis` (`to_parallel` is applied here), in any floating dtype; if it is narrower
            than float32, the loss is float32.
        w: this rank's columns.
        targets: integers from 0 to `vocabulary - 1`, of any integer dtype, or `ignore`.
        axis: the axis that cuts `w` by columns; `()` if nothing does.
        vocabulary: the number of columns of the whole `w` that are not padding; padding has no probability.
        ignore: the target that has no loss and no gradient.
        chunk: rows at a time; default: as many as make 8 million logits on a CPU, and 64 million elsewhere.
        sequence: the dimension along which `axis` cuts `x`, as for `to_parallel`; the targets are whole.

    Returns:
        One loss a target, the same on all ranks along `axis`; 0 at ignored targets.

    Raises:
        IndexError: a target is outside the vocabulary. On an accelerator it is a RuntimeError at a later call, of a
            stage or of this function, as the host does not wait for the targets; in a compiled graph there is none.
        TypeError: the targets are not integers.
        ValueError: the shapes do not fit; the vocabulary is larger than `w`; the chunk is not positive.

    Source: Shoeybi et al., Megatron-LM (2019), section 3, for the cut. Chunks are activation checkpointing.
    """
    x = to_parallel(x, axis, sequence=sequence)
    if x.shape[:-1] != targets.shape or w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(
            f"cross_entropy: x {tuple(x.shape)}, w {tuple(w.shape)}, targets {tuple(targets.shape)}; they are "
            f"[..., d], [d, v] and [...]"
        )
    tensors, sizes = {"x": x, "w": w, "targets": targets}, {"vocabulary": vocabulary, "ignore": ignore, "chunk": chunk}
    ops.compare_arguments("cross_entropy", axis, x, lambda: ops.describe_arguments(tensors, **sizes), EQUAL)
    size = axis_size(axis)
    columns = w.shape[1] * size if vocabulary is None else vocabulary
    if not 0 < columns <= w.shape[1] * size:
        raise ValueError(
            f"cross_entropy: vocabulary={vocabulary}, but w has {w.shape[1]} columns on each of {size} ranks"
        )
    rows = max(1, elements_at_a_time(x.device, *LOGITS) // max(1, w.shape[1])) if chunk is None else chunk
    if rows < 1:
        raise ValueError(f"cross_entropy: chunk must be a number of rows, 1 or more, got {chunk}")
    flat_x, labels = x.reshape(-1, x.shape[-1]), as_indices("cross_entropy", "targets", targets).reshape(-1)
    check_range("cross_entropy", "targets", labels, columns, ignore)
    losses = _rule(axis, columns, ignore, rows)(flat_x, w, labels)[0]
    return losses.view(targets.shape)


def _added(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Returns `total + a @ b`, at least in float32 so that errors stay small; may overwrite `total`."""
    if total is None:
        return a @ b
    return (
        total.addmm_(a, b) if total.dtype == b.dtype == wide_dtype(total) else total.to(wide_dtype(total)).add_(a @ b)
    )


@functools.lru_cache(maxsize=256)
def _rule(axis: AxisName, columns: int, ignore: int, rows: int) -> custom_vjp:
    def logits(x: Tensor, w: Tensor) -> Tensor:
        logits = (x @ w).to(wide_dtype(x))
        first = axis_index(axis) * w.shape[1]
        if columns < first + w.shape[1]:
            padding = torch.arange(first, first + w.shape[1], device=w.device) >= columns
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)  # a row of -inf would make nan
        return logits

    def of_rows(logits: Tensor, top: Tensor, total: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Losses, and the probability of all columns of this rank.

        `top` are the largest of this rank's logits, and `total` the sums of `exp(logits - top)`. A loss is the
        difference of two numbers that are as small as it is: what logits have in common would cost its digits.
        """
        column, is_local = _local_column(targets, logits.shape[1], axis)
        largest = pmax(top, axis)
        chosen = (logits[_row_indices(column), column] - largest).where(is_local, 0)
        part = (top - largest).exp() * total
        denominator, chosen = psum(torch.stack((part, chosen)), axis).unbind(0)
        return (denominator.log() - chosen).where(targets != ignore, 0), part / denominator

    def pure(x: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        own_logits = logits(x, w)
        top = own_logits.detach().amax(1)
        return (of_rows(own_logits, top, (own_logits - top[:, None]).exp().sum(1), targets)[0],)

    def fwd(x: Tensor, w: Tensor, targets: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        results = []
        for chunk in _chunks(len(x), rows):
            own_logits = logits(x[chunk], w)
            shares = own_logits.softmax(1)  # the largest is exp(0), divided by the sum
            results.append(of_rows(own_logits, own_logits.amax(1), shares.amax(1).reciprocal(), targets[chunk]))
        losses, parts = (torch.cat(pieces) for pieces in zip(*results, strict=True))
        return (losses,), (x, w, targets, parts, *([shares] if len(results) == 1 else ()))

    def bwd(
        residuals: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        (x, w, targets, parts, *saved), (ct,) = residuals, cotangents
        if ct is None:
            return [None, None, None]
        ct = ct.where(targets != ignore, 0)
        dx = torch.empty_like(x) if needs[0] else None
        dw: Tensor | None = None
        for chunk in _chunks(len(x), rows):
            shares = saved[0] if saved else logits(x[chunk], w).softmax(1)
            p = shares * (parts[chunk] * ct[chunk])[:, None]
            column, is_local = _local_column(targets[chunk], p.shape[1], axis)
            p[_row_indices(column), column] -= ct[chunk].where(is_local, 0)
            p = p.to(x.dtype)
            if dx is not None:
                dx[chunk] = p @ w.mT
            dw = _added(dw, x[chunk].mT, p) if needs[1] else None
        return [dx, None if dw is None else dw.to(w.dtype), None]

    return custom_vjp(pure, fwd, bwd)


def _local_column(targets: Tensor, n: int, axis: AxisName) -> tuple[Tensor, Tensor]:
    """Each target's column on this rank, which has `n`, and whether this rank has it; otherwise any column."""
    column = targets - axis_index(axis) * n
    inside = column.clamp(0, n - 1)
    return inside, column == inside


def _row_indices(column: Tensor) -> Tensor:
    return torch.arange(len(column), device=column.device)


def _chunks(n: int, rows: int) -> Iterator[slice]:
    for start in range(0, max(n, 1), rows):
        yield slice(start, min(start + rows, n))
