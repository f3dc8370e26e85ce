"""Adafactor on flat shards: sums over the rows and columns of matrices whose pieces lie on several ranks."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardfn.optim.differentiable import filled, numbered, refuse_overwriting, shared_values
from shardfn.optim.hyperparameters import Hyperparameter, begun, check, constants, made_of_numbers
from shardfn.optim.norms import squares, totals, wide
from shardfn.optim.optimizer import Optimizer, of_rule
from shardfn.optim.state_offload import on_whole
from shardfn.optim.step_counts import Missed, count_spans, missed_after
from shardfn.optim.wrappers import by_numbers, masked
from shardfn.shards.parts import refuse_parts
from shardfn.shards.pieces import Segment, Unit, Units, home, joined, pairs, refuse_complex, spread, units, zeros


@made_of_numbers
def adafactor(
    lr: Hyperparameter | Tensor,
    *,
    decay: Hyperparameter = -0.8,
    clip: Hyperparameter = 1.0,
    eps: Hyperparameter | None = None,
    least: Hyperparameter = 1e-3,
    weight_decay: Hyperparameter = 0.0,
    donate: bool = True,
) -> Optimizer:
    r"""Adafactor: keeps only the row and column means of a matrix's second moments; overwrites parameters and state.

    :math:`V \leftarrow (1 - t^{\gamma}) V + t^{\gamma} G^2` is kept as the means :math:`R` of its rows and :math:`C` of
    its columns, and estimated as :math:`R C^\top / \bar R`. With :math:`U = G / \sqrt V` and
    :math:`\alpha = \max(\epsilon_2, \mathrm{rms}(P)) \min(\eta, 1 / \sqrt t)`, the step is
    :math:`P \leftarrow (1 - \eta \lambda) P - \alpha\, U / \max(1, \mathrm{rms}(U) / d)`. In a tensor of more than two
    dimensions the last two form the matrices; vectors keep :math:`V` itself.

    State: :math:`r + c` numbers for an :math:`r \times c` matrix, on every rank; one for each element of a vector.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        decay: :math:`\gamma`, 0 or less.
        clip: :math:`d`, above 0: the largest root mean square of an update.
        eps: lower bound for the root of a second moment; None for the machine epsilon of the gradient's dtype.
        least: :math:`\epsilon_2`, 0 or more: lower bound for the root mean square of a parameter.
        weight_decay: :math:`\lambda`, 0 or more.
        donate: as for `sgd`.

    Each number may also be a schedule or a rule; the state then has a part for each set of numbers that rules return.

    Returns:
        An `Optimizer` for parameters of real floating-point dtypes.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range; `init` also for complex parameters.

    Sources: Shazeer and Stern, Adafactor: adaptive learning rates with sublinear memory cost (2018), algorithms 4, 6.

    Example:
        ``adafactor(1e-2, weight_decay=0.0)``
    """
    numbers = {"lr": lr, "decay": decay, "clip": clip, "least": least, "weight_decay": weight_decay}
    numbers |= {} if eps is None else {"eps": eps}
    check("adafactor", {"donate": donate})

    def make(numbers: dict[str, Any]) -> Optimizer:
        matrices, vectors = (_adafactor_with(moments, numbers, donate) for moments in (_Factored(), _Whole()))
        return masked(matrices, lambda path, shape: len(shape) > 1, vectors)

    return by_numbers("adafactor", make, numbers)


class _Whole:
    """Keeps the second moment of every element."""

    def init(self, leaves: Units) -> Any:
        return leaves.with_values(zeros(unit.values) if unit.trainable else None for unit in leaves.each)

    def updated(self, leaves: Units, state: Any, grads: list[Tensor | None], weights: _Powers) -> Any:
        def updated_unit(unit: Unit, old: Tensor, grad: Tensor) -> Tensor:
            spans = weights.spans(unit)
            if len(spans) == 1:
                return old.lerp(grad.square(), spans[0][0])
            parts = [old[start:stop].lerp(grad[start:stop].square(), weight) for weight, start, stop in spans]
            return joined(parts, unit._replace(values=old), [(start, stop) for _, start, stop in spans])

        rows = zip(leaves.each, leaves.values_in(state), grads, strict=True)
        return leaves.with_values(old if grad is None else updated_unit(unit, old, grad) for unit, old, grad in rows)

    def moments_of(self, leaves: Units, state: Any, i: int, minimum: float) -> Tensor:
        del minimum
        moments: Tensor = leaves.values_in(state)[i]
        return moments


class _Factored:
    """Keeps the means of each matrix's rows, followed by those of its columns, by path; the same on every rank."""

    def init(self, leaves: Units) -> Any:
        return {
            path: torch.zeros(_length(full_shape), dtype=wide(unit.values), device=home(unit))
            for unit in leaves.each
            if unit.trainable
            for _, path, full_shape in spread(unit)
        }

    def updated(self, leaves: Units, state: Any, grads: list[Tensor | None], weights: _Powers) -> Any:
        local = {
            segment.path: unit.by_piece(segment, functools.partial(_sums_in, segment, grad))
            for unit, grad in zip(leaves.each, grads, strict=True)
            if grad is not None
            for segment in unit.filled
        }
        shapes = {path: full_shape for unit in leaves.each for _, path, full_shape in spread(unit)}
        sums = totals(leaves, local, _length, [grad for grad in grads if grad is not None])
        pairs = zip(leaves.each, grads, strict=True)
        moving = {path for unit, grad in pairs if grad is not None for _, path, _ in spread(unit)}
        new = {}
        for path in [path for path in state if path in moving]:
            old, weight = state[path], weights.for_path(path)
            weight = weight.to(old.dtype) if isinstance(weight, Tensor) else weight
            new[path] = old.lerp(sums[path] / _mean_counts(shapes[path], old), weight)
        return state | new

    def moments_of(self, leaves: Units, state: Any, i: int, minimum: float) -> Tensor:
        unit = leaves.each[i]
        ones = torch.ones_like(unit.values)
        means_by_path, ties = shared_values(state, unit)
        return filled(
            ones, unit, (_estimate(s, means_by_path[s.path], minimum).to(ones.dtype) for s in unit.filled), ties
        )


class _Powers:
    """A power of each parameter's step count."""

    def __init__(self, count: Any, missed: Missed, exponent: float) -> None:
        self.count, self.missed, self.exponent = count, missed, exponent
        self.usual = _real_count(count) ** exponent

    def for_path(self, path: str) -> Any:
        """The power for a parameter."""
        has_missed = path in self.missed
        return _real_count(self.count - self.missed.get(path, 0)) ** self.exponent if has_missed else self.usual

    def spans(self, unit: Unit) -> list[tuple[Any, int, int]]:
        """Ranges of a unit with the same power: `(power, start, stop)`."""
        if not self.missed:
            return [(self.usual, 0, unit.values.numel())]
        spans = count_spans(unit, self.count, self.missed)
        return [(_real_count(count) ** self.exponent, start, stop) for count, start, stop in spans]


def _adafactor_with(moments: Any, numbers: dict[str, Any], donate: bool) -> Optimizer:
    """Adafactor with one of the two ways to keep second moments: `_Whole` or `_Factored`."""

    def init(params: Any) -> Any:
        leaves = units(params)
        refuse_complex(leaves, "adafactor")
        refuse_parts("adafactor", leaves)
        return {"step": 0, "numbers": constants(numbers), "missed": {}, "square": moments.init(leaves)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, hparams = begun(numbers, state)
        leaves = units(params)
        refuse_parts("adafactor", leaves)
        rows = pairs(leaves, grads)
        gs = [grad for _, grad in rows]
        missed = missed_after(state["missed"], rows)
        if donate:
            refuse_overwriting("adafactor", params, grads, state)
        with torch.set_grad_enabled(not donate and torch.is_grad_enabled()):
            square = moments.updated(leaves, state["square"], gs, _Powers(count, missed, hparams["decay"]))
            updates: list[Tensor | None] = []
            for i, grad in enumerate(gs):
                if grad is not None:
                    root_bound = hparams.get("eps", torch.finfo(grad.dtype).eps)
                    mean_square = moments.moments_of(leaves, square, i, root_bound).clamp(min=root_bound * root_bound)
                    grad = mean_square.rsqrt() * grad
                updates.append(grad)
            moving = [
                unit._replace(values=unit.values if x is None else x, trainable=x is not None)
                for unit, x in zip(leaves.each, updates, strict=True)
            ]
            bounds = _Powers(count, missed, -0.5)
            sizes = squares(leaves), squares(Units(moving, leaves.tree))
            values = [unit.values for unit in leaves.each]
            for i, (unit, update) in enumerate(zip(leaves.each, updates, strict=True)):
                if update is not None:
                    new = _adafactor_values(unit, update, sizes, hparams, bounds)
                    values[i] = unit.values.copy_(new) if donate else new
        return params if donate else leaves.with_values(values), state | {
            "step": count,
            "missed": missed,
            "square": square,
        }

    return Optimizer(init, on_whole(step))


def _adafactor_values(unit: Unit, update: Tensor, sizes: Any, hparams: dict[str, Any], bounds: _Powers) -> Tensor:
    """Returns a unit's values after the step; each parameter is scaled by its own norms."""
    (of_params, ties), (of_updates, update_ties) = (shared_values(sums, unit) for sums in sizes)
    rates, lr_ties = numbered(hparams["lr"], unit)
    flat, parts = unit.values.reshape(-1), []
    for segment in unit.filled:
        max_rate = bounds.for_path(segment.path)
        n, p = math.prod(segment.whole), flat[segment.start : segment.stop]
        lr = rates[segment.path]
        bounded = (
            lr.clamp(max=max_rate)
            if isinstance(lr, Tensor)
            else max_rate.clamp(max=lr)
            if isinstance(max_rate, Tensor)
            else min(lr, max_rate)
        )
        rate = (of_params[segment.path] / n).sqrt().clamp(min=hparams["least"]) * bounded
        rate = rate / ((of_updates[segment.path] / n).sqrt() / hparams["clip"]).clamp(min=1.0)
        keep = 1 - lr * of_rule(hparams["weight_decay"], segment)
        parts.append(p * keep - rate.to(p.dtype) * update.reshape(-1)[segment.start : segment.stop])
    return filled(unit.values, unit, parts, [update, *ties, *update_ties, *lr_ties])


# --- rows and columns of a matrix, or of a stack of matrices, of which this rank has a range of elements ---


def _length(full_shape: tuple[int, ...]) -> int:
    """The number of means: one for each row and each column."""
    return math.prod(full_shape[:-1]) + math.prod(full_shape[:-2]) * full_shape[-1]


def _real_count(count: Any) -> Any:
    """A step count for powers, which are float32 if it is a tensor of integers."""
    return count.double() if isinstance(count, Tensor) else count


def _mean_counts(full_shape: tuple[int, ...], template: Tensor) -> Tensor:
    """The number of elements in each mean: first for each row, then for each column."""
    counts = torch.full_like(template, max(1, full_shape[-2]))
    counts[: math.prod(full_shape[:-1])] = max(1, full_shape[-1])
    return counts


def _sums_in(segment: Segment, grad: Tensor, start: int, stop: int) -> Tensor:
    """The sums of squares of elements `start` to `stop` of a unit's gradient."""
    elements = replace(segment, first=segment.first + start - segment.start, start=start, stop=stop)
    return _sums(elements, grad.reshape(-1)[start:stop].to(wide(grad)).square())


def _sums(segment: Segment, squared: Tensor) -> Tensor:
    """This rank's terms of the sums over the parameter's rows and columns, as one vector."""
    # Zeros pad this rank's elements to whole rows.
    columns = segment.shape[-1]
    first, before = divmod(segment.first, columns)
    rows = torch.nn.functional.pad(squared, (before, -(before + squared.numel()) % columns)).view(-1, columns)
    row_ids = torch.arange(first, first + len(rows), device=squared.device)
    of_rows = squared.new_zeros(math.prod(segment.shape[:-1])).index_add(0, row_ids, rows.sum(1))
    of_columns = squared.new_zeros(math.prod(segment.shape[:-2]), segment.shape[-1])
    of_columns = of_columns.index_add(0, row_ids // segment.shape[-2], rows)
    margins = [
        (start, n - start - size) for start, size, n in zip(segment.corner, segment.shape, segment.whole, strict=True)
    ]
    spread_rows = _padded(of_rows.view(segment.shape[:-1]), margins[:-1])
    spread_columns = _padded(of_columns.view(*segment.shape[:-2], segment.shape[-1]), [*margins[:-2], margins[-1]])
    return torch.cat([spread_rows.reshape(-1), spread_columns.reshape(-1)])


def _padded(x: Tensor, margins: list[tuple[int, int]]) -> Tensor:
    return torch.nn.functional.pad(x, [n for pair in reversed(margins) for n in pair])


def _estimate(seg: Segment, row_column_means: Tensor, minimum: float) -> Tensor:
    """The second moments of this rank's elements, estimated from the means of rows and columns."""
    split = math.prod(seg.whole[:-1])
    of_rows = row_column_means[:split].view(seg.whole[:-1])
    of_columns = row_column_means[split:].view(*seg.whole[:-2], seg.whole[-1])
    of_rows = of_rows / of_rows.mean(-1, keepdim=True).clamp(min=minimum)
    local = tuple(slice(start, start + n) for start, n in zip(seg.corner, seg.shape, strict=True))
    of_rows = of_rows[local[:-1]].reshape(-1)
    of_columns = of_columns[(*local[:-2], local[-1])].reshape(-1, seg.shape[-1])
    n, (first, lead) = seg.stop - seg.start, divmod(seg.first, seg.shape[-1])
    row_ids = torch.arange(first, first - (-(lead + n) // seg.shape[-1]), device=row_column_means.device)
    return (of_rows[row_ids, None] * of_columns[row_ids // seg.shape[-2]]).reshape(-1)[lead : lead + n]
