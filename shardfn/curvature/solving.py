"""Linear systems with operators."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from shardfn.curvature.operators import Operator, must_be_operator
from shardfn.curvature.vectors import Vector, add_, scale_
from shardfn.optim.hyperparameters import check_integer, in_range, kind

Method = Literal["cg", "lsmr", "neumann"]


@dataclass(frozen=True)
class Solution:
    """The result of `solve`.

    Attributes:
        x: a tree like the gradient.
        residual: the norm of `b - (A + damping) x`, over that of `b`.
        products: how many it took.
        converged: whether the tolerance was reached.
    """

    x: Any
    residual: float
    products: int
    converged: bool


def solve(
    A: Operator,
    b: Any,
    by: Method = "cg",
    *,
    damping: float = 0.0,
    tolerance: float = 1e-5,
    products: int = 200,
    scale: float | None = None,
) -> Solution:
    r"""Solves :math:`(A + \lambda) x = b`.

    Args:
        A: the operator.
        b: a tree like the gradient or the parameters.
        by: `"cg"`: conjugate gradients, if `A` and the damping together are positive definite. `"lsmr"`: for any
            symmetric `A`; of a singular system, the smallest `x` whose residual is smallest. `"neumann"`: the series
            :math:`\sigma \sum_k (1 - \sigma (A + \lambda))^k b`, if it converges: :math:`\sigma` is below two over
            the largest eigenvalue, and all are above 0. Cut off early, it is damped too.
        damping: :math:`\lambda`, a number that is added to the diagonal.
        tolerance: iteration ends when the residual is at most this times the norm of `b`, for `"lsmr"` also when its
            product with the operator is at most this, relative to both norms.
        products: it also ends after so many, and one for the residual. Look at `converged` then.
        scale: :math:`\sigma`, for `"neumann"` only.

    Returns:
        `Solution`.

    Raises:
        TypeError, ValueError: an argument is out of its range; with `"cg"`, the operator is not positive definite.
        FloatingPointError: a product is not finite, or the series diverges.

    Sources: Hestenes and Stiefel (1952); Fong and Saunders, LSMR: an iterative algorithm for sparse least-squares
        problems (2011).

    Example:
        The natural gradient: ``solve(fisher(model, likelihood, params, batches) / rows, gradient, damping=1e-3).x``
    """
    must_be_operator("solve", A, by=by, damping=damping, tolerance=tolerance, products=products, scale=scale)
    if by not in get_args(Method):
        raise ValueError(f"solve: by must be one of {', '.join(map(repr, get_args(Method)))}, got {by!r}")
    if (scale is None) is (by == "neumann"):
        raise ValueError(f"solve: scale={scale}, by={by!r}: 'neumann' needs a scale, others have none")
    check_integer("solve", "products", products, 1)
    in_range("solve", "tolerance", tolerance)
    if scale is not None:
        in_range("solve", "scale", scale)
    if not isinstance(damping, Real):
        raise TypeError(f"solve: damping must be a number, got {damping!r}, {kind(damping)}")
    system = _System(A, damping, products)
    right = A.space.read(b)
    right = [x.to(z.dtype, copy=True) for x, z in zip(right, A.space.zeros(), strict=True)]
    size = A.space.norm(right)
    if not math.isfinite(size):
        raise FloatingPointError(f"solve: b is not finite: its norm is {size}")
    if not size:
        return Solution(A.space.written(right), 0.0, 0, converged=True)
    method: Any = {"cg": _cg, "lsmr": _lsmr, "neumann": _neumann}[by]
    remainder = [x.clone() for x in right]
    x, estimate, reached = method(system, right, size, tolerance, *([] if scale is None else [scale]))
    residual = system.norm(add_(remainder, system.matvec(x), -1.0)) / size
    # What the methods tell drifts from what is, where rounding is coarser than the tolerance.
    converged = reached and residual <= 1.1 * estimate / size + 10 * tolerance
    return Solution(A.space.written(x), residual, system.done, converged)


@dataclass
class _System:
    """An operator with damping, which counts its products."""

    A: Operator
    damping: float
    most: int
    done: int = 0

    @property
    def ended(self) -> bool:
        return self.done >= self.most

    def matvec(self, x: Vector) -> Vector:
        self.done += 1
        return add_(self.A.matvec(x), x, self.damping)

    def norm(self, x: Vector) -> float:
        size = self.A.space.norm(x)
        if not math.isfinite(size):
            raise FloatingPointError(
                f"solve: after {self.done} products of {self.A.name} the norm of a vector is {size}"
            )
        return size

    def dot(self, x: Vector, y: Vector) -> float:
        return float(self.A.space.dots([x], y)[0])


def _cg(system: _System, b: Vector, size: float, tolerance: float) -> tuple[Vector, float, bool]:
    x, r, p = system.A.space.zeros(), b, [y.clone() for y in b]
    square = size**2
    while not system.ended:
        Ap = system.matvec(p)
        curvature = system.dot(p, Ap)
        if not curvature > 0:
            if not math.isfinite(curvature):
                raise FloatingPointError(f"solve: a product of {system.A.name} is not finite")
            raise ValueError(
                f"solve: {system.A.name} with damping={system.damping} is not positive definite: after {system.done} "
                f"products a vector has v.Av = {curvature:.3g} and v.v = {system.dot(p, p):.3g}. Add damping, take ggn "
                f"or fisher, or by='lsmr'"
            )
        step = square / curvature
        add_(x, p, step)
        add_(r, Ap, -step)
        square, last = system.norm(r) ** 2, square
        if square**0.5 <= tolerance * size:
            return x, square**0.5, True
        add_(scale_(p, square / last), r)
    return x, square**0.5, False


def _neumann(system: _System, b: Vector, size: float, tolerance: float, scale: float) -> tuple[Vector, float, bool]:
    x, term = system.A.space.zeros(), b  # the term is the residual before it is added
    residual = size
    while not system.ended:
        add_(x, term, scale)
        add_(term, system.matvec(term), -scale)
        residual = system.norm(term)
        if residual <= tolerance * size:
            return x, residual, True
        if residual > 1e6 * size:
            raise FloatingPointError(
                f"solve: the series diverges: after {system.done} products the residual is {residual / size:.1e} times "
                f"b's. scale={scale} must be below two over the largest eigenvalue, and all of them above 0"
            )
    return x, residual, False


def _lsmr(system: _System, b: Vector, size: float, tolerance: float) -> tuple[Vector, float, bool]:
    """Golub-Kahan bidiagonalization, and two rotations a step: names are the paper's."""
    u, beta = scale_(b, 1 / size), size
    v = system.matvec(u)
    alpha = system.norm(v)
    x = system.A.space.zeros()
    if not alpha:
        return x, size, True  # b is orthogonal to all that A reaches
    scale_(v, 1 / alpha)
    zeta_bar, alpha_bar, rho, rho_bar, c_bar, s_bar = alpha * beta, alpha, 1.0, 1.0, 1.0, 0.0
    h, h_bar = [y.clone() for y in v], system.A.space.zeros()
    square, done = alpha**2, False
    # For the norm of the residual, section 5.1 of the paper.
    beta_dd, beta_d, rho_d_old, tau_old, theta_tilde, zeta = beta, 0.0, 1.0, 0.0, 0.0, 0.0
    residual = beta
    while not done and system.done + 2 <= system.most:
        u = add_(scale_(u, -alpha), system.matvec(v))
        beta = system.norm(u)
        if beta:
            scale_(u, 1 / beta)
            v = add_(scale_(v, -beta), system.matvec(u))
            alpha = system.norm(v)
            if alpha:
                scale_(v, 1 / alpha)
        rho_old, rho = rho, math.hypot(alpha_bar, beta)
        c, s = alpha_bar / rho, beta / rho
        theta, alpha_bar = s * alpha, c * alpha
        rho_bar_old, zeta_old = rho_bar, zeta
        theta_bar, rho_temp = s_bar * rho, c_bar * rho
        rho_bar = math.hypot(rho_temp, theta)
        c_bar, s_bar = rho_temp / rho_bar, theta / rho_bar
        zeta, zeta_bar = c_bar * zeta_bar, -s_bar * zeta_bar
        add_(scale_(h_bar, -theta_bar * rho / (rho_old * rho_bar_old)), h)
        add_(x, h_bar, zeta / (rho * rho_bar))
        add_(scale_(h, -theta / rho), v)
        square += beta**2 + alpha**2
        beta_hat, beta_dd = c * beta_dd, -s * beta_dd
        theta_tilde_old = theta_tilde
        rho_tilde = math.hypot(rho_d_old, theta_bar)
        c_tilde, s_tilde = rho_d_old / rho_tilde, theta_bar / rho_tilde
        theta_tilde, rho_d_old = s_tilde * rho_bar, c_tilde * rho_bar
        beta_d = -s_tilde * beta_d + c_tilde * beta_hat
        tau_old = (zeta_old - theta_tilde_old * tau_old) / rho_tilde
        tau = (zeta - theta_tilde * tau_old) / rho_d_old
        residual = math.hypot(beta_d - tau, beta_dd)
        normal = abs(zeta_bar)  # the norm of A r
        done = residual <= tolerance * size or normal <= tolerance * square**0.5 * residual or not alpha or not beta
    return x, residual, done
