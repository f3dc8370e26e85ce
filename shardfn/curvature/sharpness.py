"""Sharpness of a minimum, for the metrics of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from shardfn.curvature.operators import Operator, check_batches, each_of, hvp, must_be_operator
from shardfn.curvature.spectra import top_eig
from shardfn.curvature.vectors import Space, Vector, draws_restored
from shardfn.optim.hyperparameters import check_integer, in_range
from shardfn.optim.step_counts import count_spans
from shardfn.shards.pieces import joined
from shardfn.transforms.autodiff import name_of
from shardfn.transforms.shortage import RandomNumbers


def sharpness(
    f: Callable[..., Any],
    params: Any,
    batches: Iterable[Any] | None = None,
    *,
    state: Any = None,
    tolerance: float = 1e-2,
    products: int = 100,
    seed: int = 0,
) -> float:
    """The largest eigenvalue of the Hessian of a loss, for the metrics of a run.

    Gradient descent is stable while it is below 2 / rate, and Adam while the preconditioned one is below
    (2 + 2 b1) / ((1 - b1) rate), 38 / rate for b1 = 0.9.

    Args:
        f: as for `hvp`. With collectives in it, it is under a `shard_map`, or all of this is.
        params: as for `hvp`.
        batches: as for `hvp`; often one batch, the same each time.
        state: that of `adam` or `adamw`, or of a chain with one: of the Hessian that it preconditions, as by
            `preconditioned`.
        tolerance: relative.
        products: it ends after so many, and is then a lower bound.
        seed: of the first vector.

    Raises:
        As `hvp`, `top_eig` and `preconditioned`.

    Sources: Cohen et al., Gradient descent on neural networks typically occurs at the edge of stability (2021), and
        Adaptive gradient methods at the edge of stability (2022).

    Example:
        ``run.loop(step, state, batches, steps=1000, evaluate=(lambda s: {"sharpness": sharpness(loss, s[0], [batch])},
        50))``
    """
    settings = {"state": state is not None, "tolerance": tolerance, "products": products, "seed": seed}
    A = hvp(f, params, batches)
    A.space.agree("sharpness", **settings)
    if state is not None:
        A = preconditioned(A, state)
    return float(top_eig(A, which="LA", tolerance=tolerance, products=products, seed=seed).values[0])


def preconditioned(A: Operator, state: Any) -> Operator:
    r""":math:`D^{-1/2} A D^{-1/2}`, with the eigenvalues of :math:`D^{-1} A`.

    Args:
        A: the operator.
        state: :math:`D`, a tree like the parameters with positive numbers; or a state of `adam` or `adamw`, or of a
            chain with one, after its first step, whose :math:`D = (1 - \beta_1^t) (\sqrt{\hat v} + \epsilon)` divides
            the mean of gradients.

    Returns:
        An `Operator`.

    Raises:
        ValueError, TypeError: the state has no such numbers, or they are not positive.

    Example:
        ``top_eig(preconditioned(hvp(loss, params, batches), opt_state), 3)``
    """
    must_be_operator("preconditioned", A)
    space = A.space
    states = [node for node in _dicts(state) if {"square", "step", "numbers"} <= set(node)]
    if len(states) > 1:
        raise ValueError(f"preconditioned: the state has {len(states)} states of adam or adamw: pass one of them")
    try:
        D = _of_adam(space, states[0]) if states else space.read(state)
    except ValueError as error:
        if states:
            raise
        raise ValueError(
            f"preconditioned: there is no state of adam or adamw in this, and it is no D: {error}"
        ) from None
    nonpositive = [(~(x > 0)).to(torch.float64) for x in D]
    if count := round(float(space.dots([nonpositive], nonpositive)[0])):
        raise ValueError(f"preconditioned: {count} numbers of D are not above 0")
    roots = [torch.where(x > 0, x.rsqrt(), 0) for x in D]  # 0 where a rank's piece has no parameter

    def apply(tree: Any) -> Any:
        v = [x * r for x, r in zip(space.read(tree), roots, strict=True)]
        return space.written([x * r for x, r in zip(A.matvec(v), roots, strict=True)])

    return Operator(apply, A.params, f"preconditioned {A.name}")


def _dicts(tree: Any) -> list[dict[str, Any]]:
    """All dicts in nested dicts, lists and tuples."""
    if isinstance(tree, dict):
        return [tree, *(child for node in tree.values() for child in _dicts(node))]
    return [child for node in tree for child in _dicts(node)] if isinstance(tree, (list, tuple)) else []


def _of_adam(space: Space, state: dict[str, Any]) -> Vector:
    step, numbers = float(state["step"]), state["numbers"]
    if step < 1 or not {"b1", "b2", "eps"} <= set(numbers):
        raise ValueError(
            f"preconditioned: the state of adam at step {step:g} has numbers {', '.join(map(str, numbers))}. It must "
            f"have made a step, with b1, b2 and eps as numbers, not as rules for parameters; else pass D itself"
        )
    b1, b2, eps = (float(numbers[name]) for name in ("b1", "b2", "eps"))

    def divisor(x: torch.Tensor, t: Any) -> torch.Tensor:
        return (1 - b1 ** float(t)) * ((x / (1 - b2 ** float(t))).sqrt() + eps)

    D = []
    for unit, x in zip(space.moving, space.read(state["square"]), strict=True):
        spans = count_spans(unit, step, state.get("missed", {}))
        parts = [divisor(x[start:stop], t) if t else torch.zeros_like(x[start:stop]) for t, start, stop in spans]
        D.append(joined(parts, unit._replace(values=x), [(start, stop) for _, start, stop in spans]))
    return D


class CriticalRate(NamedTuple):
    """The learning rate from which on a step increases the loss.

    `sharpness` is 2 over it, nan if it was not found; `low` the largest rate that was tried and does not increase the
    loss, 0 for none; `high` the smallest that increases it, infinity for none; `forwards` how often the loss was
    computed.
    """

    sharpness: float
    low: float
    high: float
    forwards: int


def critical_sharpness(
    f: Callable[..., Any],
    params: Any,
    update: Any,
    batches: Iterable[Any] | None = None,
    *,
    rate: float = 1.0,
    tolerance: float = 0.1,
    forwards: int = 9,
) -> CriticalRate:
    """The sharpness along a step, from fewer than ten values of the loss: no derivative.

    For a quadratic loss and its gradient `g` it is the curvature along it, `g.Hg / g.g`.

    Args:
        f: as for `hvp`.
        params: as for `hvp`; in bfloat16 small steps vanish in rounding.
        update: the direction of the step: it goes from `params` to `params - rate * update`.
        batches: as for `hvp`.
        rate: where to begin: the learning rate, or 2 over the last sharpness.
        tolerance: relative, of the critical rate.
        forwards: the most values of the loss.

    Returns:
        `CriticalRate`.

    Raises:
        ValueError: an argument is out of its range; the loss is not finite at `params`, or differs between ranks.
        As `hvp`.

    Sources: A scalable measure of loss landscape curvature for analyzing the training dynamics of LLMs (2026).

    Example:
        ``critical_sharpness(loss, params, gradient, [batch], rate=1e-2).sharpness``
    """
    name = f"critical_sharpness of {name_of(f)}"
    space = Space(params, name)
    space.agree("critical_sharpness", rate=rate, tolerance=tolerance, forwards=forwards)
    in_range(name, "rate", rate)
    in_range(name, "tolerance", tolerance)
    check_integer(name, "forwards", forwards, 2)
    check_batches(batches, params, name)
    direction = space.tangents(space.read(update))
    values = [x.detach() for x in space.variables.values]
    random = RandomNumbers(values)

    def loss(rate: float) -> float:
        trial = [x - rate * u for x, u in zip(values, direction, strict=True)] if rate else values
        with draws_restored(values), torch.no_grad():
            random.restore()
            return sum(space.same(f(space.variables.tree(trial), *batch)) for batch in each_of(batches, name, f))

    start = loss(0.0)
    if not math.isfinite(start):
        raise ValueError(f"{name}: the loss at the parameters is not finite")
    low, high, factor, count = 0.0, math.inf, 2.0, 1
    while count < forwards and (not low or high > (1 + tolerance) * low):
        if low and high < math.inf:
            rate = (low * high) ** 0.5
        elif low or high < math.inf:
            rate, factor = (rate * factor if low else rate / factor), factor**2
        count += 1
        if loss(rate) > start:
            high = rate
        else:
            low = rate
    critical = (low * high) ** 0.5 if low and high < math.inf else math.nan
    return CriticalRate(2 / critical, low, high, count)
