"""Tensor parallelism: layers whose matrices are cut over an axis, the first by columns and the second by rows.

Between the two, each rank computes with its own columns. `to_parallel` and `from_parallel` are Megatron's `f` and `g`;
with `sequence=` they are those of its sequence parallelism, where activations between layers are cut too.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.collectives.capturing import capturing
from shardfn.collectives.functional import all_gather, axis_index, axis_size, psum, pvary, reduce_scatter
from shardfn.collectives.late_checks import late_checks
from shardfn.compat import dispatch, functorch
from shardfn.mesh.grid import AxisName


def to_parallel(x: Tensor, axis: AxisName, *, sequence: int | None = None) -> Tensor:
    """Makes `x` whole on every rank, for matrices that are cut by columns: `x @ w`, `w: [d, f / size]`.

    It is `pvary`, `I -> V`, whose transpose sums the gradients. With `sequence`, the dimension along which `x` is cut
    between layers, it is `all_gather` along it; weights that are used on such pieces, a norm's say, then need
    `pvary(weights, axis)`.

    Bytes a rank sends for `n` bytes of the whole `x`: none forward and `2 n (s - 1) / s` backward; with `sequence`
    `n (s - 1) / s` each.

    Sources: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing Activation Recomputation in
    Large Transformer Models (2022), section 4.2.2.
    """
    return pvary(x, axis) if sequence is None else all_gather(x, axis, dim=sequence)


def from_parallel(x: Tensor, axis: AxisName, *, sequence: int | None = None) -> Tensor:
    """The sum of what ranks computed with matrices that are cut by rows: `h @ w`, `w: [f / size, d]`.

    It is `psum`, `V -> I`; with `sequence`, the dimension along which the result is cut, `reduce_scatter` along it.

    Bytes a rank sends for `n` bytes of the whole sum: `2 n (s - 1) / s` forward and none backward; with `sequence`
    `n (s - 1) / s` each.

    Source: as `to_parallel`.
    """
    return psum(x, axis) if sequence is None else reduce_scatter(x, axis, dim=sequence)


def embedding(tokens: Tensor, table: Tensor, axis: AxisName = (), *, sequence: int | None = None) -> Tensor:
    """Rows of a table that is cut by rows over `axis`: `[...], [v / size, d] -> [..., d]`.

    Args:
        tokens: integers from 0 to `v - 1`, the same on all ranks along `axis`.
        table: this rank's rows.
        axis: the axis that cuts the table; `()` if nothing does.
        sequence: the dimension along which the result is cut; by default the result is the same on all ranks, `V -> I`.

    Raises:
        IndexError: a token is outside the table. On an accelerator it is a RuntimeError at a later call, of a stage or
            of this function, as the host does not wait for the tokens; in a compiled graph there is none.
        TypeError: the tokens are not integers.
        ValueError: the table is not a matrix.
    """
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(
            f"embedding: tokens are {tokens.dtype} {tuple(tokens.shape)}; they are integers, and come first"
        )
    if table.ndim != 2:
        raise ValueError(
            f"embedding: the table has shape {tuple(table.shape)}; it is [v, d], cut by rows over {axis!r}"
        )
    size, rows = axis_size(axis), table.shape[0]
    check_range("embedding", "tokens", tokens, rows * size)
    own = tokens - axis_index(axis) * rows
    here = (own >= 0) & (own < rows)
    vectors = F.embedding(own.where(here, 0), table)  # another rank's token looks up row 0, and its result is masked
    return from_parallel(vectors * here[..., None], axis, sequence=sequence) if size > 1 else vectors


def check_range(caller: str, what: str, indices: Tensor, n: int) -> None:
    """Raises IndexError unless indices are from 0 to `n - 1`; on an accelerator it is RuntimeError, at a later call.

    There an operation that finds a wrong index would end the context of the device, so indices must be masked, too.
    """
    if indices.device.type in ("cpu", "meta"):
        F.embedding(indices, torch.empty((), device=indices.device).expand(n, 1))
    elif indices.numel() and not torch.compiler.is_compiling() and not dispatch.in_graph():
        wrong = functools.partial(_outside, caller, what, n)
        with functorch.outside_transforms():
            ends = torch.stack(functorch.unwrapped(indices).aminmax())
            if (watch := capturing()) is not None:
                watch.late.append((ends, wrong))
                return
            checks = late_checks()
            checks.read()
            checks.add(ends, wrong)
            checks.close()  # without stages, nothing else would


def _outside(caller: str, what: str, n: int, ends: Tensor) -> str | None:
    low, high = ends.tolist()
    return None if low >= 0 and high < n else f"{caller}: {what} are from {low} to {high}; they are from 0 to {n - 1}"
