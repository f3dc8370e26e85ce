"""Traces and diagonals of operators, from products with random vectors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from shardfn.curvature.lanczos import unit
from shardfn.curvature.operators import Operator, must_be_operator
from shardfn.curvature.vectors import Vector, subtract_
from shardfn.optim.hyperparameters import whole
from shardfn.shards.random import int_seed


class Estimate(NamedTuple):
    """An estimate by random vectors, and its standard error.

    The error is nan if a single draw was left to tell it, and 0 if nothing was left to chance.
    """

    value: float
    error: float


def trace(A: Operator, products: int = 30, *, sketch: int | None = None, seed: int = 0) -> Estimate:
    """The trace: exact on a space that a sketch finds, and estimated by Hutchinson's method outside of it.

    The estimate has no bias, and its error falls as 1 / products rather than as its root.

    Args:
        A: the operator.
        products: how many.
        sketch: how many vectors are kept; the sketch takes twice as many products, and what is left draws. Default: a
            third of the products, which is Hutch++. 0 keeps none: Hutchinson's method.
        seed: of the random vectors.

    Returns:
        `Estimate`: `value` and `error`, two floats.

    Raises:
        TypeError, ValueError: an argument is out of its range; no product is left for draws.
        FloatingPointError: a product is not finite.

    Sources: Meyer, Musco, Musco and Woodruff, Hutch++: optimal stochastic trace estimation (2021); Hutchinson (1990).

    Example:
        ``value, error = trace(H, products=60)``
    """
    must_be_operator("trace", A)
    A.space.agree("trace", products=products, sketch=sketch, seed=seed)
    whole("trace", "products", products, 1)
    if sketch is not None:
        whole("trace", "sketch", sketch, 0)
    kept, seed = products // 3 if sketch is None else sketch, int_seed(seed)
    draws = products - 2 * kept
    if draws < 1:
        raise ValueError(
            f"trace: products={products}, sketch={kept}: the sketch takes {2 * kept} products, and one at least must "
            f"be left"
        )
    space, found = A.space, list[Vector]()
    kept = min(kept, space.size())
    for number in range(kept):
        v = A.of(space.drawn("normal", seed, number))
        before = space.norm(v)
        if before and space.norm(outside(A, v, found)) > space.rounding * before:
            found.append(unit(space, v, found))
    exact = sum(float(space.dots([q], A.of(q))[0]) for q in found)
    if len(found) == space.size() and math.isfinite(exact):
        return Estimate(exact, 0.0)
    each = torch.zeros(draws, dtype=torch.float64, device="cpu")
    for number in range(draws):
        v = outside(A, space.drawn("signs", seed, kept + number), found)
        each[number] = space.dots([v], A.of(v))[0]
    value = exact + float(each.mean())
    if not torch.isfinite(torch.tensor(value, device="cpu")):
        raise FloatingPointError(f"{A.name}: a product is not finite, and so is its trace, {value}")
    return Estimate(value, float(each.std()) / draws**0.5 if draws > 1 else float("nan"))


def outside(A: Operator, v: Vector, found: list[Vector]) -> Vector:
    """The part of a vector that is orthogonal to others, in its place."""
    return subtract_(v, found, A.space.dots(found, v)) if found else v


def diag(A: Operator, products: int = 30, *, seed: int = 0) -> Any:
    r"""The diagonal, estimated as the mean of :math:`v \odot A v` over random signs :math:`v`.

    It is exact for a diagonal operator. The variance of an element is the sum of the squares of the others in its row,
    over the number of products.

    Args:
        A: the operator.
        products: how many.
        seed: of the random vectors.

    Returns:
        A tree like the gradient.

    Raises:
        TypeError, ValueError: an argument is out of its range.

    Sources: Bekas, Kokiopoulou and Saad, An estimator for the diagonal of a matrix (2007).

    Example:
        ``importance = diag(fisher(model, likelihood, params, batches), 100)``
    """
    must_be_operator("diag", A)
    A.space.agree("diag", products=products, seed=seed)
    whole("diag", "products", products, 1)
    space, seed = A.space, int_seed(seed)
    total = space.zeros()
    for number in range(products):
        v = space.drawn("signs", seed, number)
        for into, x, y in zip(total, v, A.of(v), strict=True):
            into.addcmul_(x, y, value=1 / products)
    space.norm(total)  # which compares ranks
    return space.written(total)
