"""Tensor parallelism: layers whose matrices are sharded over an axis, by columns and then by rows.

Between the two, each rank computes with its own columns. `to_parallel` and `from_parallel` are Megatron's `f` and `g`;
with `sequence=` they are those of its sequence parallelism, where activations between layers are cut too. `rms_norm` is
of vectors that are cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.collectives import ops
from shardfn.collectives.capturing import capturing
from shardfn.collectives.functional import all_gather, axis_index, axis_size, psum, pvary, reduce_scatter
from shardfn.collectives.late_checks import late_checks
from shardfn.collectives.scheduled import Scheduled, run_in_graph
from shardfn.compat import dispatch, functorch
from shardfn.mesh.grid import AxisName
from shardfn.transforms.custom_vjp import custom_vjp


def to_parallel(x: Tensor, axis: AxisName, *, sequence: int | None = None) -> Tensor:
    """Makes `x` whole on every rank, for matrices that are sharded by columns: `x @ w`, `w: [d, f / size]`.

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
    """The sum of what ranks computed with matrices that are sharded by rows: `h @ w`, `w: [f / size, d]`.

    It is `psum`, `V -> I`; with `sequence`, the dimension along which the result is sharded, `reduce_scatter` along it.

    Bytes a rank sends for `n` bytes of the whole sum: `2 n (s - 1) / s` forward and none backward; with `sequence`
    `n (s - 1) / s` each.

    Source: as `to_parallel`.
    """
    return psum(x, axis) if sequence is None else reduce_scatter(x, axis, dim=sequence)


def embedding(tokens: Tensor, table: Tensor, axis: AxisName = (), *, sequence: int | None = None) -> Tensor:
    """Rows of a table that is sharded by rows over `axis`: `[...], [v / size, d] -> [..., d]`.

    Args:
        tokens: integers from 0 to `v - 1`, of any integer dtype, the same on all ranks along `axis`.
        table: this rank's rows.
        axis: the axis that cuts the table; `()` if nothing does.
        sequence: the dimension along which the result is sharded; by default the result is replicated, `V -> I`.

    Raises:
        IndexError: a token is outside the table. On an accelerator it is a RuntimeError at a later call, of a stage or
            of this function, as the host does not wait for the tokens; in a compiled graph there is none.
        TypeError: the tokens are not integers.
        ValueError: the table is not a matrix.
    """
    tokens = as_indices("embedding", "tokens", tokens)
    if table.ndim != 2:
        raise ValueError(
            f"embedding: table must have shape [v, d], with rows sharded over {axis!r}, got {tuple(table.shape)}"
        )
    ops.compare_arguments(
        "embedding", axis, table, lambda: ops.describe_arguments({"tokens": tokens, "table": table}), EQUAL
    )
    size, rows = axis_size(axis), table.shape[0]
    check_range("embedding", "tokens", tokens, rows * size)
    local_ids = tokens - axis_index(axis) * rows
    is_local = (local_ids >= 0) & (local_ids < rows)
    vectors = F.embedding(local_ids.where(is_local, 0), table)  # another rank's token looks up row 0, and is masked
    return from_parallel(vectors * is_local[..., None], axis, sequence=sequence) if size > 1 else vectors


EQUAL = "Every rank passes the same, of what the axis cuts equal pieces: pad that to a multiple of the number of ranks"
_INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def as_indices(caller: str, name: str, x: Tensor) -> Tensor:
    """`x` in a dtype that torch takes for indices, int32 or int64; raises TypeError unless it has integers."""
    if x.dtype not in _INTEGERS:
        raise TypeError(
            f"{caller}: {name} are {x.dtype} {tuple(x.shape)}; they are integers: write {name}.long(), if this is the "
            f"right argument"
        )
    return x if x.dtype in (torch.int32, torch.int64) else x.long()


def check_range(caller: str, name: str, indices: Tensor, n: int, ignore: int | None = None) -> None:
    """Raises IndexError unless indices are from 0 to `n - 1`, or `ignore`; on an accelerator RuntimeError, later.

    There an operation that finds a wrong index would end the context of the device, so indices must be masked, too.
    """
    if not indices.numel() or torch.compiler.is_compiling():
        return
    if dispatch.in_graph():
        watch = capturing()
        if watch is not None and watch.traces and not functorch.inside_transform():
            run_in_graph(
                _InRange(functools.partial(_out_of_range, caller, name, n, indices.numel())),
                [_ends(indices, n, ignore)],
            )
        return
    with functorch.outside_transforms():
        values = functorch.unwrapped(indices)
        wrong = functools.partial(_out_of_range, caller, name, n, values.numel())
        if values.device.type == "cpu" and type(values).__torch_dispatch__ is Tensor.__torch_dispatch__:
            with dispatch.outside_modes():
                message = wrong(_ends(values, n, ignore))
            if message is not None:
                raise IndexError(message)
        elif values.device.type not in ("cpu", "meta"):
            ends = _ends(values, n, ignore)
            if (watch := capturing()) is not None:
                watch.late.append((ends, wrong))
                return
            checks = late_checks()
            checks.read()
            checks.add(ends, wrong)
            checks.close()  # without stages, nothing else would


class _InRange(Scheduled):
    """A check of indices in a traced step."""

    def __init__(self, wrong: Callable[[Tensor], str | None]) -> None:
        super().__init__()
        self.wrong = wrong

    def __str__(self) -> str:
        return "a check of indices"

    def empty_results(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """None."""
        return []

    def start(self, inputs: Sequence[Tensor | None]) -> None:
        """Raises IndexError on a CPU, and RuntimeError on an accelerator, later."""
        (ends,) = inputs
        assert ends is not None, "it has been computed"
        if ends.device.type != "cpu":
            late_checks().add(ends, self.wrong)
        elif (message := self.wrong(ends)) is not None:
            raise IndexError(message)

    def finish(self, started: Any) -> list[Tensor]:
        """Nothing."""
        return []


def _ends(indices: Tensor, n: int, ignore: int | None) -> Tensor:
    """The smallest and the largest index, and how many are outside."""
    indices = indices if ignore is None else indices.where(indices != ignore, 0)
    outside = (indices != indices.clamp(0, n - 1)).sum(dtype=indices.dtype)
    return torch.stack((*indices.aminmax(), outside))


def _out_of_range(caller: str, name: str, n: int, total: int, ends: Tensor) -> str | None:
    low, high, number = ends.tolist()
    if low >= 0 and high < n:
        return None
    return f"{caller}: {name} are from {low} to {high}; they are from 0 to {n - 1}, and {number} of {total} are not"


# --- normalization of vectors that are sharded over an axis ---


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
    eps = torch.finfo(wide_dtype(x)).eps if eps is None else eps
    ops.compare_arguments("rms_norm", axis, x, lambda: ops.describe_arguments({"x": x}, eps=eps), EQUAL)
    same_dtype = x.dtype == weight.dtype and not functorch.inside_batching_or_forward()
    if same_dtype and x.device.type != "cpu" and axis_size(axis) == 1:
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel
    out: Tensor = _rms_rule(axis, eps)(x, weight)[0]
    return out


@functools.lru_cache(maxsize=64)
def _rms_rule(axis: AxisName, eps: float) -> custom_vjp:
    def width(x: Tensor) -> int:
        return x.shape[-1] * axis_size(axis)

    def pure(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        numbers = x.to(wide_dtype(x))
        mean = pvary(psum(numbers.square().sum(-1, keepdim=True), axis), axis) / width(x)
        return ((numbers * (mean + eps).rsqrt() * weight).to(x.dtype),)

    def fwd(x: Tensor, weight: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide_dtype(x)).square_()
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
        rows, grads = (values.reshape(-1, x.shape[-1]).to(scale.dtype) for values in (x, ct))
        weights = weight.to(scale.dtype)
        products = grads * rows
        dx = dw = None
        if needs[0]:
            projections = psum(products @ weights, axis)[:, None]
            dx = (grads * weights).mul_(scale).addcmul_(rows, projections * scale**3 / -width(x))
            dx = dx.to(x.dtype).view(x.shape)
        if needs[1]:
            dw = (scale.mT @ products)[0].to(weight.dtype)
        return [dx, dw]

    return custom_vjp(pure, fwd, bwd)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which numbers of a tensor are computed: float32, or wider."""
    return torch.promote_types(x.dtype, torch.float32)
