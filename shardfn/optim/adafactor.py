"""Adafactor on flat shards: sums over rows and columns of matrices whose pieces lie on several ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardfn.optim.differentiable import filled, lent, numbered
from shardfn.optim.elementwise import Schedule
from shardfn.optim.hyperparameters import at_step, check, constants
from shardfn.optim.norms import squares, totals, wide
from shardfn.optim.optimizer import Optimizer, Rule, of_rule
from shardfn.optim.state_offload import on_whole
from shardfn.optim.wrappers import masked
from shardfn.shards.pieces import Segment, Unit, Units, home, pairs, refuse_complex, spread, units, zeros


def adafactor(
    lr: float | Tensor | Schedule,
    *,
    decay: float = -0.8,
    clip: float = 1.0,
    eps: float | None = None,
    least: float = 1e-3,
    weight_decay: float | Rule = 0.0,
    donate: bool = True,
) -> Optimizer:
    r"""Adafactor, which of a matrix's second moments keeps only row and column means; overwrites parameters and state.

    :math:`V \leftarrow (1 - t^{\gamma}) V + t^{\gamma} G^2`, kept as the means :math:`R` of its rows and :math:`C` of
    its columns, for which it stands as :math:`R C^\top / \bar R`; then with :math:`U = G / \sqrt V` and
    :math:`\alpha = \max(\epsilon_2, \mathrm{rms}(P)) \min(\eta, 1 / \sqrt t)`, the step is
    :math:`P \leftarrow (1 - \eta \lambda) P - \alpha\, U / \max(1, \mathrm{rms}(U) / d)`. Of more than two dimensions
    the last two are the matrix; vectors keep :math:`V` itself.

    State: :math:`r + c` numbers for a matrix, on every rank; one for each element of a vector.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, or a function of the number of the step, which begins
            at 1.
        decay: :math:`\gamma`, 0 or less.
        clip: :math:`d`, above 0: the largest root mean square of an update.
        eps: the least root that second moments count as; None for the machine epsilon of the gradient's dtype.
        least: :math:`\epsilon_2`, 0 or more: the least root mean square that a parameter counts as.
        weight_decay: :math:`\lambda`, 0 or more, or a rule `(path, shape) -> number`.
        donate: as for `sgd`.

    Returns:
        An `Optimizer` for parameters of real floating-point dtypes.

    Raises:
        TypeError, ValueError: an argument that is not a number, or out of its range; by `init`, complex parameters.

    Sources: Shazeer and Stern, Adafactor: adaptive learning rates with sublinear memory cost (2018), algorithms 4, 6.

    Example:
        ``adafactor(1e-2, weight_decay=0.0)``
    """
    numbers = {"lr": lr, "decay": decay, "clip": clip, "least": least, "weight_decay": weight_decay}
    check("adafactor", numbers | ({} if eps is None else {"eps": eps}) | {"donate": donate})
    matrices, vectors = (_optimizer(kind, numbers, eps, donate) for kind in (_Factored(), _Whole()))
    return masked(matrices, lambda path, shape: len(shape) > 1, vectors)


class _Whole:
    """Second moments of every element."""

    def init(self, known: Units) -> Any:
        return known.like(zeros(unit.values) if unit.trainable else None for unit in known.each)

    def updated(self, known: Units, state: Any, grads: list[Tensor | None], mixed: float) -> Any:
        old = known.beside(state)
        return known.like(v if g is None else v.lerp(g.square(), mixed) for v, g in zip(old, grads, strict=True))

    def of(self, known: Units, state: Any, i: int, least: float) -> Tensor:
        del least
        found: Tensor = known.beside(state)[i]
        return found


class _Factored:
    """The means of their rows, and behind these of their columns, by path; the same on every rank."""

    def init(self, known: Units) -> Any:
        return {
            path: torch.zeros(_length(whole), dtype=wide(unit.values), device=home(unit))
            for unit in known.each
            if unit.trainable
            for _, path, whole in spread(unit)
        }

    def updated(self, known: Units, state: Any, grads: list[Tensor | None], mixed: float) -> Any:
        here = {
            one.path: _sums(one, grad.reshape(-1)[one.start : one.stop].to(wide(grad)).square())
            for unit, grad in zip(known.each, grads, strict=True)
            if grad is not None
            for one in unit.filled
        }
        shapes = {path: whole for unit in known.each for _, path, whole in spread(unit)}
        found = totals(known, here, _length, [grad for grad in grads if grad is not None])
        return {path: old.lerp(found[path] / _counts(shapes[path], old), mixed) for path, old in state.items()}

    def of(self, known: Units, state: Any, i: int, least: float) -> Tensor:
        unit = known.each[i]
        ones = torch.ones_like(unit.values)
        means, ties = lent(state, unit)
        return filled(ones, unit, (_estimate(one, means[one.path], least).to(ones.dtype) for one in unit.filled), ties)


def _optimizer(kind: Any, numbers: dict[str, Any], eps: float | None, donate: bool) -> Optimizer:

    def init(params: Any) -> Any:
        known = units(params)
        refuse_complex(known, "adafactor")
        return {"step": 0, "numbers": constants(numbers), "square": kind.init(known)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, known = state["step"] + 1, units(params)
        now = numbers | state["numbers"]
        now["lr"] = at_step(now["lr"], count)
        given = [grad for _, grad in pairs(known, grads)]
        with torch.set_grad_enabled(not donate and torch.is_grad_enabled()):
            square = kind.updated(known, state["square"], given, count ** now["decay"])
            updates: list[Tensor | None] = []
            for i, grad in enumerate(given):
                if grad is not None:
                    least = torch.finfo(grad.dtype).eps if eps is None else eps
                    grad = kind.of(known, square, i, least).clamp(min=least * least).rsqrt() * grad
                updates.append(grad)
            moving = [
                unit._replace(values=unit.values if x is None else x, trainable=x is not None)
                for unit, x in zip(known.each, updates, strict=True)
            ]
            sizes = squares(known), squares(Units(moving, known.tree))
            values = [unit.values for unit in known.each]
            for i, (unit, update) in enumerate(zip(known.each, updates, strict=True)):
                if update is not None:
                    made = _moved(unit, update, sizes, now, count)
                    values[i] = unit.values.copy_(made) if donate else made
        return params if donate else known.like(values), state | {"step": count, "square": square}

    return Optimizer(init, on_whole(step))


def _moved(unit: Unit, update: Tensor, sizes: Any, now: dict[str, Any], count: int) -> Tensor:
    """A unit's values after the step, each parameter's by its own sizes."""
    (of_params, some), (of_updates, more) = (lent(known, unit) for known in sizes)
    rates, others = numbered(now["lr"], unit)
    flat, parts = unit.values.reshape(-1), []
    for one in unit.filled:
        n, p = math.prod(one.whole), flat[one.start : one.stop]
        lr = rates[one.path]
        most = lr.clamp(max=count**-0.5) if isinstance(lr, Tensor) else min(lr, count**-0.5)
        rate = (of_params[one.path] / n).sqrt().clamp(min=now["least"]) * most
        rate = rate / ((of_updates[one.path] / n).sqrt() / now["clip"]).clamp(min=1.0)
        keep = 1 - lr * of_rule(now["weight_decay"], one)
        parts.append(p * keep - rate.to(p.dtype) * update.reshape(-1)[one.start : one.stop])
    return filled(unit.values, unit, parts, [update, *some, *more, *others])


# --- rows and columns of a matrix, or of a stack of them, of which a stretch of elements is here ---


def _length(whole: tuple[int, ...]) -> int:
    return math.prod(whole[:-1]) + math.prod(whole[:-2]) * whole[-1]


def _counts(whole: tuple[int, ...], like: Tensor) -> Tensor:
    """How many elements each row has, and each column."""
    counts = torch.full_like(like, max(1, whole[-2]))
    counts[: math.prod(whole[:-1])] = max(1, whole[-1])
    return counts


def _as_rows(one: Segment, x: Tensor) -> tuple[int, Tensor]:
    """Elements as the rows that they are in, zeros around them, and the number of the first row."""
    first, columns = divmod(one.first, one.shape[-1]), one.shape[-1]
    behind = -(first[1] + x.numel()) % columns
    return first[0], torch.nn.functional.pad(x, (first[1], behind)).view(-1, columns)


def _sums(one: Segment, squared: Tensor) -> Tensor:
    """What these elements add to the sums of the parameter's rows and columns."""
    first, rows = _as_rows(one, squared)
    number = torch.arange(first, first + len(rows), device=squared.device)
    of_rows = squared.new_zeros(math.prod(one.shape[:-1])).index_add(0, number, rows.sum(1))
    of_columns = squared.new_zeros(math.prod(one.shape[:-2]), one.shape[-1])
    of_columns = of_columns.index_add(0, number // one.shape[-2], rows)
    inside = [(at, n - at - own) for at, own, n in zip(one.corner, one.shape, one.whole, strict=True)]
    spread_rows = _padded(of_rows.view(one.shape[:-1]), inside[:-1])
    spread_columns = _padded(of_columns.view(*one.shape[:-2], one.shape[-1]), [*inside[:-2], inside[-1]])
    return torch.cat([spread_rows.reshape(-1), spread_columns.reshape(-1)])


def _padded(x: Tensor, around: list[tuple[int, int]]) -> Tensor:
    return torch.nn.functional.pad(x, [n for pair in reversed(around) for n in pair])


def _estimate(one: Segment, means: Tensor, least: float) -> Tensor:
    """The second moments of these elements, from the means of rows and columns."""
    split = math.prod(one.whole[:-1])
    of_rows, of_columns = means[:split].view(one.whole[:-1]), means[split:].view(*one.whole[:-2], one.whole[-1])
    of_rows = of_rows / of_rows.mean(-1, keepdim=True).clamp(min=least)
    own = tuple(slice(at, at + n) for at, n in zip(one.corner, one.shape, strict=True))
    of_rows, of_columns = of_rows[own[:-1]].reshape(-1), of_columns[(*own[:-2], own[-1])].reshape(-1, one.shape[-1])
    n, (first, lead) = one.stop - one.start, divmod(one.first, one.shape[-1])
    number = torch.arange(first, first - (-(lead + n) // one.shape[-1]), device=means.device)
    return (of_rows[number, None] * of_columns[number // one.shape[-2]]).reshape(-1)[lead : lead + n]
