"""Eigenvalues, spectral density, trace and diagonal of an operator, from products with vectors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from shardfn import checkpoint
from shardfn.curvature.operators import Operator, must_be_operator
from shardfn.curvature.resuming import begun, compare_fingerprints, made_of
from shardfn.curvature.vectors import Space, Vector, add_, combined_, scale_, subtract_
from shardfn.optim.hyperparameters import check_integer, in_range
from shardfn.shards.random import int_seed

Which = Literal["LM", "LA", "SA"]


@dataclass(frozen=True)
class Eigenpairs:
    """Outermost eigenvalues of an operator.

    Attributes:
        values: `[count]`, float64 on the CPU, the outermost first.
        vectors: their eigenvectors, trees of norm 1.
        errors: `[count]`: for each there is an eigenvalue that is not farther away than this, up to rounding. That it
            is the outermost is likely, not proven.
        products: how many products it took.
    """

    values: Tensor
    vectors: list[Any]
    errors: Tensor
    products: int


def top_eig(
    A: Operator,
    count: int = 1,
    *,
    which: Which = "LM",
    tolerance: float = 1e-3,
    max_basis: int | None = None,
    products: int = 1000,
    seed: int = 0,
) -> Eigenpairs:
    """The outermost eigenvalues and their eigenvectors, by Lanczos iteration with thick restarts.

    Of an eigenvalue that several eigenvectors share, it may find fewer copies.

    Args:
        A: the operator.
        count: how many.
        which: `"LM"`: the largest in magnitude, `"LA"`: the largest, `"SA"`: the smallest, as in scipy's `eigsh`.
        tolerance: iteration ends when the basis is full and each error is at most this times the largest eigenvalue in
            magnitude; for `"LA"` and `"SA"`, times the eigenvalue itself.
        max_basis: how many vectors are kept, at least `count + 2`. Default: `2 * count + 8`. Fewer take less memory and
            more products.
        products: it also ends after so many, at least `count`. Look at `errors` then.
        seed: of the first vector.

    Returns:
        `Eigenpairs`; fewer than `count` if the parameters have fewer elements.

    Raises:
        TypeError, ValueError: an argument is out of its range.
        FloatingPointError: a product is not finite.

    Sources: Wu and Simon, Thick-restart Lanczos method for large symmetric eigenvalue problems (2000).

    Example:
        ``values = top_eig(hvp(loss, params, batches), 3).values``
    """
    must_be_operator(
        "top_eig", A, count=count, which=which, tolerance=tolerance, max_basis=max_basis, products=products, seed=seed
    )
    check_integer("top_eig", "count", count, 1)
    if max_basis is not None:
        check_integer("top_eig", "max_basis", max_basis, count + 2)
    if which not in get_args(Which):
        raise ValueError(f"top_eig: which must be one of {', '.join(map(repr, get_args(Which)))}, got {which!r}")
    in_range("top_eig", "tolerance", tolerance)
    space, vectors, done, starts, seed = A.space, list[Vector](), 0, 0, int_seed(seed)
    size = space.size()
    check_integer("top_eig", "products", products, 1)
    if products < min(count, size):
        raise ValueError(
            f"top_eig: products={products}, count={count}, of {size} eigenvalues: each product finds one at most, so "
            f"pass products={min(count, size)} at least, or a smaller count"
        )
    largest_basis = min(2 * count + 8 if max_basis is None else max_basis, size)
    T = torch.zeros(largest_basis, largest_basis, dtype=torch.float64, device="cpu")
    following = unit(space, space.random_vector("normal", seed, 0), [])
    while True:
        j = len(vectors)
        vectors.append(following)
        w = A.matvec(following)
        done += 1
        T[: j + 1, j] = T[j, : j + 1] = _orthogonal(space, w, vectors)
        beta = space.norm(w)
        _refuse_nonfinite(A, T, beta)
        values, weights = torch.linalg.eigh(T[: j + 1, : j + 1])
        order = {"LM": values.abs(), "LA": values, "SA": -values}[which].argsort(descending=True)
        values, weights = values[order], weights[:, order]
        largest = values.abs().max().item()
        errors = (beta * weights[-1]).abs()
        # Before the basis is full, what is outermost may hardly be in it, and the bulk would seem to have converged.
        scales = values[:count].abs().clamp(min=space.rounding * largest) if which != "LM" else largest
        converged = len(vectors) == largest_basis and bool((errors[:count] <= tolerance * scales).all())
        if converged or done == products or len(vectors) == largest_basis == size:
            pairs = combined_(vectors, weights[:, :count])
            trees = [space.written(v) for v in pairs]
            return Eigenpairs(values[:count].clone(), trees, errors[:count].clone(), done)
        if beta > space.rounding * largest:
            following = scale_(w, 1 / beta)
        else:  # the basis spans an invariant subspace: continue outside of it
            starts += 1
            following = unit(space, space.random_vector("normal", seed, starts), vectors)
        if len(vectors) == largest_basis:
            num_kept = min(largest_basis - 2, count + (largest_basis - count) // 2)
            vectors = combined_(vectors, weights[:, :num_kept])
            T.zero_()
            T.diagonal()[:num_kept] = values[:num_kept]


def _orthogonal(space: Space, w: Vector, vectors: list[Vector]) -> Tensor:
    """Makes a vector orthogonal to others, in place; returns its inner products with them."""
    first = space.dots(vectors, w)
    subtract_(w, vectors, first)
    second = space.dots(vectors, w)  # once more, for what rounding left
    subtract_(w, vectors, second)
    return first + second


def unit(space: Space, v: Vector, vectors: list[Vector]) -> Vector:
    """A vector of norm 1 that is orthogonal to others."""
    if vectors:
        _orthogonal(space, v, vectors)
    return scale_(v, 1 / space.norm(v))


def _refuse_nonfinite(A: Operator, numbers: Tensor, beta: float) -> None:
    if not numbers.isfinite().all() or not math.isfinite(beta):
        raise FloatingPointError(
            f"{A.name}: a product is not finite: the loss or its derivatives overflow, or have nan"
        )


@dataclass(frozen=True)
class Spectrum:
    """An estimate of all eigenvalues of an operator: each draw stands for all of them.

    Attributes:
        values: `[draws, steps]`, float64 on the CPU.
        weights: `[draws, steps]`: the part of all eigenvalues that each value stands for; they sum to 1 in each draw.
        size: the number of eigenvalues.
    """

    values: Tensor
    weights: Tensor
    size: int

    def density(self, points: Tensor, width: float) -> Tensor:
        """The density of eigenvalues at points, smoothed by a normal distribution of this standard deviation."""
        x = (points.to(self.values)[:, None, None] - self.values) / width
        peaks = torch.exp(-0.5 * x**2) / (width * (2 * torch.pi) ** 0.5)
        return (peaks * self.weights).sum(-1).mean(-1)

    def trace(self, f: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[float, float]:
        """An estimate of the trace of a function of the operator, and its standard error, nan for one draw.

        Example:
            ``log_det, error = spectrum.trace(lambda x: (x + damping).log())``
        """
        estimates = self.size * (f(self.values) * self.weights).sum(-1)
        error = float(estimates.std() / len(estimates) ** 0.5) if len(estimates) > 1 else float("nan")
        return float(estimates.mean()), error


def spectrum(
    A: Operator,
    steps: int = 50,
    num_probes: int = 1,
    *,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    every: int = 10,
) -> Spectrum:
    """The density of an operator's eigenvalues, by stochastic Lanczos quadrature: `steps * num_probes` products.

    It keeps two vectors besides a product's own. Vectors are not made orthogonal to all earlier ones: a converged
    eigenvalue may appear several times, with parts of its weight.

    Args:
        A: the operator.
        steps: Lanczos steps of each draw: the density is exact for polynomials of degrees below twice as many.
        num_probes: random first vectors.
        seed: of the first vectors.
        folder: a checkpoint of its own for this call. If the same call is made again it goes on from there, also on
            another mesh, after one product that shows that the operator is the same.
        every: steps between writing it.

    Returns:
        `Spectrum`.

    Raises:
        ValueError: an argument is out of its range.
        CheckpointError: the checkpoint is of another call, or cannot be written.
        FloatingPointError: a product is not finite.

    Sources: Golub and Welsch (1969); Ubaru, Chen and Saad, Fast estimation of tr(f(A)) via stochastic Lanczos
        quadrature (2017); without orthogonalization: Chen, Trogdon and Ubaru, Analysis of stochastic Lanczos quadrature
        (2021).

    Example:
        ``density = spectrum(H, 80, num_probes=4, folder="runs/1/spectrum").density(torch.linspace(-1, 20, 500), 0.05)``
    """
    must_be_operator("spectrum", A)
    space, exists = A.space, begun(folder)
    name = None if folder is None else str(folder)
    space.agree("spectrum", steps=steps, num_probes=num_probes, seed=seed, folder=name, every=every, exists=exists)
    for key, value in {"steps": steps, "num_probes": num_probes, "every": every}.items():
        check_integer("spectrum", key, value, 1)
    size = space.size()
    steps = min(steps, size)
    settings = {"steps": steps, "num_probes": num_probes, "seed": int_seed(seed), "size": size}
    state = _initial_state(space, settings) | ({} if folder is None else {"of": made_of(space, "spectrum")})
    if exists:
        assert folder is not None, "it exists"
        first = space.read(state["v"])
        stored = checkpoint.load(folder, {k: state[k] for k in ("asked", "of")}, ignore=r"(?!(asked|of)\.).*")
        if stored["asked"] != settings:
            raise checkpoint.CheckpointError(
                f"spectrum: {folder} is of a call with {stored['asked']}; this call has {settings}"
            )
        compare_fingerprints(stored["of"], state["of"], f"spectrum: {folder}")
        state = checkpoint.load(folder, state, donate=False)
        alpha, stored_alpha = float(space.dots([first], A.matvec(first))[0]), float(state["alphas"][0, 0])
        scale = max(abs(alpha), abs(stored_alpha), float(state["betas"][0, 0]))
        if not abs(alpha - stored_alpha) <= 1e3 * space.rounding * scale:
            raise checkpoint.CheckpointError(
                f"spectrum: {folder} is of another operator, whose first number is {stored_alpha:.6g} and not "
                f"{alpha:.6g}: other batches or loss. Pass another folder"
            )
    while state["draw"] < num_probes:
        _lanczos_step(A, state)
        if folder is not None and (state["draw"] == num_probes or (state["done"] % every) == 0):
            checkpoint.save(folder, state, overwrite=True)
    pairs = [_quadrature(a, b) for a, b in zip(state["alphas"], state["betas"], strict=True)]
    values, weights = zip(*pairs, strict=True)
    return Spectrum(torch.stack(values), torch.stack(weights), size)


def _initial_state(space: Space, settings: dict[str, int]) -> dict[str, Any]:
    """Returns the state before the first product."""
    shape = settings["num_probes"], settings["steps"]
    numbers = {name: torch.zeros(shape, dtype=torch.float64, device="cpu") for name in ("alphas", "betas")}
    v, before = space.random_vector("normal", settings["seed"], 0), space.zeros()
    scale_(v, 1 / space.norm(v))
    return {"asked": settings, "draw": 0, "step": 0, "done": 0, **numbers, "v": space.written(v),
            "before": space.written(before)}  # fmt: skip


def _lanczos_step(A: Operator, state: dict[str, Any]) -> None:
    """Makes one Lanczos step; after the last step of a draw, begins the next draw."""
    space, draw, step = A.space, state["draw"], state["step"]
    v, before = space.read(state["v"]), space.read(state["before"])
    w = A.matvec(v)
    if step:
        add_(w, before, -float(state["betas"][draw, step - 1]))
    alpha = space.dots([v], w)[0]
    add_(w, v, -float(alpha))
    beta = space.norm(w)
    state["alphas"][draw, step], state["betas"][draw, step] = alpha, beta
    _refuse_nonfinite(A, state["alphas"], beta)
    state["done"] += 1
    last = step + 1 == state["asked"]["steps"]
    invariant = beta <= space.rounding * float(state["alphas"][draw].abs().max() + state["betas"][draw].max())
    if last or invariant:
        state["betas"][draw, step:] = 0
        state["draw"], state["step"] = draw + 1, 0
        w, v = space.random_vector("normal", state["asked"]["seed"], draw + 1), space.zeros()
        beta = space.norm(w)
    else:
        state["step"] = step + 1
    state["v"], state["before"] = space.written(scale_(w, 1 / beta)), space.written(v)


def _quadrature(alphas: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss quadrature for a tridiagonal matrix that ends at the first beta of 0."""
    n = int((betas == 0).nonzero()[0]) + 1
    off_diagonal, padding = betas[: n - 1], len(alphas) - n
    values, vectors = torch.linalg.eigh(alphas[:n].diag() + off_diagonal.diag(1) + off_diagonal.diag(-1))
    return torch.cat([values, values[-1:].expand(padding)]), torch.cat([vectors[0] ** 2, values.new_zeros(padding)])


# --- traces and diagonals, from products with random vectors ---


class Estimate(NamedTuple):
    """An estimate by random vectors, and its standard error.

    The error is nan if a single draw was left to tell it, and 0 if nothing was left to chance.
    """

    value: float
    error: float


def trace(A: Operator, num_matvecs: int = 30, *, sketch: int | None = None, seed: int = 0) -> Estimate:
    """The trace: exact on a space that a sketch finds, and estimated by Hutchinson's method outside of it.

    The estimate has no bias, and its error falls as 1 / products rather than as its root.

    Args:
        A: the operator.
        num_matvecs: how many products.
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
        ``value, error = trace(H, num_matvecs=60)``
    """
    must_be_operator("trace", A, num_matvecs=num_matvecs, sketch=sketch, seed=seed)
    check_integer("trace", "num_matvecs", num_matvecs, 1)
    if sketch is not None:
        check_integer("trace", "sketch", sketch, 0)
    sketch_size, seed = num_matvecs // 3 if sketch is None else sketch, int_seed(seed)
    draws = num_matvecs - 2 * sketch_size
    if draws < 1:
        raise ValueError(
            f"trace: num_matvecs={num_matvecs}, sketch={sketch_size}: the sketch takes {2 * sketch_size} products, and "
            f"one at least must be left"
        )
    space, basis = A.space, list[Vector]()
    sketch_size = min(sketch_size, space.size())
    for index in range(sketch_size):
        v = A.matvec(space.random_vector("normal", seed, index))
        before = space.norm(v)
        if before and space.norm(project_out(A, v, basis)) > space.rounding * before:
            basis.append(unit(space, v, basis))
    exact = sum(float(space.dots([q], A.matvec(q))[0]) for q in basis)
    if len(basis) == space.size() and math.isfinite(exact):
        return Estimate(exact, 0.0)
    estimates = torch.zeros(draws, dtype=torch.float64, device="cpu")
    for index in range(draws):
        v = project_out(A, space.random_vector("signs", seed, sketch_size + index), basis)
        estimates[index] = space.dots([v], A.matvec(v))[0]
    value = exact + float(estimates.mean())
    if not torch.isfinite(torch.tensor(value, device="cpu")):
        raise FloatingPointError(f"{A.name}: a product is not finite, and so is its trace, {value}")
    return Estimate(value, float(estimates.std()) / draws**0.5 if draws > 1 else float("nan"))


def project_out(A: Operator, v: Vector, basis: list[Vector]) -> Vector:
    """Projects a vector onto the orthogonal complement of a basis, in place."""
    return subtract_(v, basis, A.space.dots(basis, v)) if basis else v


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
    must_be_operator("diag", A, products=products, seed=seed)
    check_integer("diag", "products", products, 1)
    space, seed = A.space, int_seed(seed)
    total = space.zeros()
    for index in range(products):
        v = space.random_vector("signs", seed, index)
        for out, x, y in zip(total, v, A.matvec(v), strict=True):
            out.addcmul_(x, y, value=1 / products)
    space.norm(total)  # which compares ranks
    return space.written(total)
