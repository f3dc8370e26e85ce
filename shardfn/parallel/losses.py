"""Cross-entropy of logits that nobody has whole: columns are cut over an axis, and rows made a few at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.collectives.functional import axis_index, axis_size, pmax, psum
from shardfn.mesh.grid import AxisName
from shardfn.parallel.linear import to_parallel
from shardfn.transforms.custom_vjp import custom_vjp

LOGITS = 2**23  # that are made at a time by default


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
    """The cross-entropy of `x @ w` at each place: `[..., d], [d, v / size], [...] -> [...]`, in nats.

    Of the logits `[rows, v / size]` only `chunk` rows exist at a time, where there are more; backward makes them again.
    Ranks exchange three numbers a row.

    Args:
        x: the same on all ranks along `axis` (`to_parallel` is in here), in any floating dtype; the loss of one
            narrower than float32 is float32.
        w: this rank's columns.
        targets: integers from 0 to `vocabulary - 1`, or `ignore`.
        axis: that cuts `w` by columns; `()` where nothing does.
        vocabulary: how many columns of the whole `w` are meant, where it is padded; those behind have no probability.
        ignore: a target with no loss and no gradient.
        chunk: rows; default: as many as make 8 million logits.
        sequence: the dimension along which `axis` cuts `x`, as `to_parallel` says; targets are whole.

    Returns:
        Losses, the same on all ranks along `axis`; 0 at ignored targets. Nothing is averaged.

    Raises:
        IndexError: a target outside of the vocabulary.
        ValueError: shapes that do not fit; a vocabulary larger than `w` is.

    Source: Shoeybi et al., Megatron-LM (2019), section 3, for the cut; the chunks are checkpointing.
    """
    x = to_parallel(x, axis, sequence=sequence)
    if x.shape[:-1] != targets.shape or w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(
            f"cross_entropy: x {tuple(x.shape)}, w {tuple(w.shape)}, targets {tuple(targets.shape)}; they are "
            f"[..., d], [d, v] and [...]"
        )
    size = axis_size(axis)
    columns = w.shape[1] * size if vocabulary is None else vocabulary
    if not 0 < columns <= w.shape[1] * size:
        raise ValueError(
            f"cross_entropy: vocabulary={vocabulary}, but w has {w.shape[1]} columns on each of {size} ranks"
        )
    rows = max(1, LOGITS // max(1, w.shape[1])) if chunk is None else chunk
    if rows < 1:
        raise ValueError(f"cross_entropy: chunk={chunk}; it is a number of rows, 1 or more")
    flat, wanted = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    F.embedding((wanted.where(wanted != ignore, 0)), w.new_empty(()).expand(columns, 1).detach())  # refuses others
    losses = _rule(axis, columns, ignore, rows)(flat, w, wanted)[0]
    return losses.view(targets.shape)


@functools.lru_cache(maxsize=256)
def _rule(axis: AxisName, columns: int, ignore: int, rows: int) -> custom_vjp:
    def logits(x: Tensor, w: Tensor) -> Tensor:
        made = (x @ w).to(torch.promote_types(x.dtype, torch.float32))
        first = axis_index(axis) * w.shape[1]
        if columns < first + w.shape[1]:
            behind = torch.arange(first, first + w.shape[1], device=w.device) >= columns
            made = made.masked_fill(behind, torch.finfo(made.dtype).min)  # a whole row of infinities has no softmax
        return made

    def own(targets: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Each target's column here, and whether it is here."""
        column = targets - axis_index(axis) * n
        here = (column >= 0) & (column < n)
        return column.where(here, 0), here

    def of_rows(made: Tensor, sums: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Losses, and the logarithms of the sums of exponentials over all columns; `sums` is that of those here."""
        column, here = own(targets, made.shape[1])
        top = pmax(sums.detach(), axis)
        picked = made.gather(1, column[:, None])[:, 0].where(here, 0)
        total, picked = psum(torch.stack(((sums - top).exp(), picked)), axis).unbind(0)
        every = total.log() + top
        return (every - picked).where(targets != ignore, 0), every

    def pure(x: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        made = logits(x, w)
        return (of_rows(made, made.logsumexp(1), targets)[0],)

    def fwd(x: Tensor, w: Tensor, targets: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        found = []
        for some in _chunks(len(x), rows):
            made = logits(x[some], w)
            parts = _shares(made)
            found.append(of_rows(made, parts[1], targets[some]))
        losses, every = (torch.cat(each) for each in zip(*found, strict=True))
        return (losses,), (x, w, targets, every, *(parts if len(found) == 1 else ()))

    def bwd(
        residuals: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        (x, w, targets, every, *parts), (ct,) = residuals, cotangents
        if ct is None:
            return [None, None, None]
        ct = ct.where(targets != ignore, 0)
        dx = torch.empty_like(x) if needs[0] else None
        dw: Tensor | None = None
        for some in _chunks(len(x), rows):
            found, sums = parts or _shares(logits(x[some], w))
            p = found * ((sums - every[some]).exp() * ct[some])[:, None]
            column, here = own(targets[some], p.shape[1])
            p = p.scatter_add_(1, column[:, None], -ct[some, None].where(here[:, None], 0)).to(x.dtype)
            if dx is not None:
                dx[some] = p @ w.mT
            if needs[1]:
                dw = x[some].mT @ p if dw is None else dw.addmm_(x[some].mT, p)
        return [dx, dw, None]

    return custom_vjp(pure, fwd, bwd)


def _shares(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the columns here, and the logarithm of its sums."""
    shares = logits.softmax(1)
    return shares, logits.amax(1) - shares.amax(1).log()


def _chunks(n: int, rows: int) -> Iterator[slice]:
    for start in range(0, max(n, 1), rows):
        yield slice(start, min(start + rows, n))
