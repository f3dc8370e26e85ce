"""Shampoo, KL-Shampoo and SOAP on flat shards; one rank holds the state of a block.

So a step moves gradients there and directions back, as Muon's does, and the factors, of `d x d` numbers for a dimension
of length `d`, never travel. In a checkpoint they have names and shapes that do not depend on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.optim.differentiable import refuse_overwriting
from shardfn.optim.elementwise import adamw
from shardfn.optim.hyperparameters import (
    Hyperparameter,
    begun,
    check,
    check_integer,
    constants,
    made_of_numbers,
)
from shardfn.optim.optimizer import Optimizer
from shardfn.optim.owners import OwnedBlock, all_remembered, as_owner, eigh, exact, on_owner, updated_values
from shardfn.optim.state_offload import on_whole
from shardfn.optim.wrappers import masked
from shardfn.shards.boxes import Ints
from shardfn.shards.parts import refuse_parts
from shardfn.shards.pieces import Unit, Units, pairs, refuse_complex, spread, units

Direction = Callable[[Tensor, dict[str, Any], int, dict[str, float]], Tensor]
"""From the gradient of a block, what is remembered of it (overwritten), its count of steps, and its numbers."""


@made_of_numbers
def shampoo(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    ridge: Hyperparameter = 1e-12,
    exponent: float | None = None,
    graft: bool = True,
    every: int = 10,
    block: int = 1024,
    weight_decay: Hyperparameter = 0.0,
    donate: bool = True,
) -> Optimizer:
    r"""Shampoo, grafted to Adam; overwrites parameters and state unless `donate=False`.

    A factor :math:`L_i \leftarrow \beta_2 L_i + (1 - \beta_2) G_i G_i^\top` for each dimension of a tensor, where
    :math:`G_i` is the gradient as a matrix whose rows are along it. The direction is Adam's mean :math:`\hat m`, each
    dimension of which is multiplied by :math:`(\hat L_i + \epsilon_L I)^{-1 / 2k}` for :math:`k` dimensions, and scaled
    to the norm of Adam's step :math:`\hat m / (\sqrt{\hat v} + \epsilon)`; hats divide by :math:`1 - \beta^t`. Then
    :math:`p \leftarrow (1 - \eta \lambda) p - \eta d`. Dimensions of length 1 do not count, longer ones than `block`
    are cut, and each block is a tensor of its own. Vectors are updated by `adamw`.

    State: two numbers a parameter, and :math:`2 d^2` for each dimension of a block, in float32 or wider; on the rank
    that works on the block.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        b1: :math:`\beta_1`, from 0 to below 1, or a rule: decay of the mean of gradients, the momentum.
        b2: :math:`\beta_2`, from 0 to below 1, or a rule: decay of factors and of the mean of squared gradients.
        eps: :math:`\epsilon`, 0 or more, or a rule: keeps Adam's divisor above 0.
        ridge: :math:`\epsilon_L`, above 0, or a rule: is added to the eigenvalues of factors, each of which is at least
            what rounding adds to the largest.
        exponent: power of the factors' inverses; None for :math:`1 / 2k`.
        graft: whether to scale directions to Adam's.
        every: steps from one computation of the roots to the next; the first step computes them.
        block: longest dimension of a block.
        weight_decay: :math:`\lambda`, 0 or more, or a schedule or rule.
        donate: whether to overwrite parameters and state. The step has no derivative in either case.

    Returns:
        An `Optimizer` for parameters of real floating-point dtypes.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range; `init` also for complex parameters, and
            `step` for a step count that is a tensor.
        RuntimeError: by `step`, where it would be differentiated or compiled.

    Sources: Gupta et al., Shampoo: preconditioned stochastic tensor optimization (2018), algorithm 2; Shi et al., A
        distributed data-parallel PyTorch implementation of the distributed Shampoo optimizer (2023), algorithm 2.

    Example:
        ``shampoo(warmup_cosine(3e-4, warmup=100, steps=10_000), every=50)``
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "ridge": ridge, "weight_decay": weight_decay}
    check("shampoo", numbers | ({} if exponent is None else {"exponent": exponent}) | {"graft": graft}, numbers)

    def direction(g: Tensor, block_state: dict[str, Any], t: int, n: dict[str, float]) -> Tensor:
        mean, square = _moments(block_state, g, g, t, n)
        for i, (factor, root) in enumerate(zip(block_state["factors"], block_state["bases"], strict=True)):
            factor.lerp_(_gram(g, i), 1 - n["b2"])
            if (t - 1) % every == 0:
                root.copy_(inverse_power(factor / (1 - n["b2"] ** t), exponent or 1 / (2 * g.ndim), n["ridge"]))
        update = _contracted(mean, block_state["bases"], 0)
        if not graft:
            return update
        adams = (mean / (square.sqrt() + n["eps"])).norm()
        return update * (adams / update.norm().clamp(min=torch.finfo(update.dtype).tiny))

    return _directed_optimizer("shampoo", direction, numbers, every, block, donate)


@made_of_numbers
def kl_shampoo(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.98,
    eps: Hyperparameter = 1e-8,
    ridge: Hyperparameter = 1e-12,
    initial: Hyperparameter = 0.1,
    every: int = 10,
    block: int = 8192,
    weight_decay: Hyperparameter = 0.01,
    donate: bool = True,
) -> Optimizer:
    r"""KL-Shampoo, which needs no grafting; overwrites parameters and state unless `donate=False`.

    Shampoo with factors that estimate the covariance of gradients as a Kronecker product :math:`\bigotimes_i L_i`, by
    minimizing its Kullback-Leibler divergence. So each factor's update whitens by the others: of a matrix
    :math:`L_1 \leftarrow \beta_2 L_1 + (1 - \beta_2) G L_2^{-1} G^\top / d_2` and
    :math:`L_2 \leftarrow \beta_2 L_2 + (1 - \beta_2) G^\top L_1^{-1} G / d_1`, and of a tensor with all other factors,
    divided by the product of their lengths. The direction is the mean of gradients :math:`\hat m`, each dimension of
    which is multiplied by :math:`(L_i + \epsilon_L I)^{-1/2}`; the hat divides by :math:`1 - \beta_1^t`. Then
    :math:`p \leftarrow (1 - \eta \lambda) p - \eta d`. Blocks are as in `shampoo`. Vectors are updated by `adamw`.

    Both factors' updates use the inverses of the last decomposition. The paper's fast variant, which follows
    eigenvectors by QR decompositions and averages eigenvalues by themselves, is not this one.

    State: one number a parameter, and :math:`2 d^2` for each dimension of a block, in float32 or wider; on the rank
    that works on the block.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        b1: :math:`\beta_1`, from 0 to below 1, or a rule: decay of the mean of gradients, the momentum.
        b2: :math:`\beta_2`, from 0 to below 1, or a rule: decay of factors.
        eps: of `adamw`, for vectors: 0 or more, or a rule.
        ridge: :math:`\epsilon_L`, above 0, or a rule: is added to the eigenvalues of factors, each of which is at least
            what rounding adds to the largest.
        initial: above 0, or a rule: factors begin as this number times the identity.
        every: steps from one decomposition to the next; the first step decomposes.
        block: longest dimension of a block.
        weight_decay: :math:`\lambda`, 0 or more, or a schedule or rule.
        donate: as for `shampoo`.

    Returns:
        An `Optimizer` for parameters of real floating-point dtypes.

    Raises:
        TypeError, ValueError, RuntimeError: as for `shampoo`.

    Sources: Lin et al., Understanding and improving Shampoo and SOAP via Kullback-Leibler minimization (2025), claim 2
        and the moving average that follows it.

    Example:
        ``kl_shampoo(warmup_cosine(1e-3, warmup=100, steps=10_000))``
    """
    numbers = {
        "lr": lr, "b1": b1, "b2": b2, "eps": eps, "ridge": ridge, "initial": initial, "weight_decay": weight_decay,
    }  # fmt: skip
    check("kl_shampoo", numbers, numbers)

    def direction(g: Tensor, block_state: dict[str, Any], t: int, n: dict[str, float]) -> Tensor:
        factors, roots = block_state["factors"], block_state["bases"]
        if t == 1:
            for factor, root in zip(factors, roots, strict=True):
                factor.zero_().fill_diagonal_(n["initial"])
                root.zero_().fill_diagonal_(n["initial"] ** -0.5)
        for i, factor in enumerate(factors):
            whitened = _contracted(g, [root if j != i else None for j, root in enumerate(roots)], 0)
            factor.lerp_(_gram(whitened, i) * (len(factor) / g.numel()), 1 - n["b2"])
        if (t - 1) % every == 0:
            for factor, root in zip(factors, roots, strict=True):
                root.copy_(inverse_power(factor, 0.5, n["ridge"]))
        return _contracted(block_state["mean"].lerp_(g, 1 - n["b1"]) / (1 - n["b1"] ** t), roots, 0)

    return _directed_optimizer("kl_shampoo", direction, numbers, every, block, donate, squares=False)


@made_of_numbers
def soap(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.95,
    eps: Hyperparameter = 1e-8,
    every: int = 10,
    block: int = 8192,
    weight_decay: Hyperparameter = 0.01,
    donate: bool = True,
) -> Optimizer:
    r"""SOAP: Adam in the eigenbases of Shampoo's factors; overwrites parameters and state unless `donate=False`.

    Shampoo's factors :math:`L_i` have the eigenbases :math:`Q_i`. Adam's mean of gradients and each gradient are
    multiplied by :math:`Q_i^\top` along each dimension, Adam's step is computed there, and multiplied by :math:`Q_i`.
    Then :math:`p \leftarrow (1 - \eta \lambda) p - \eta d`. The first step computes the bases and moves nothing;
    every `every` steps after it, one step of power iteration, :math:`Q_i \leftarrow \mathrm{QR}(L_i Q_i)`, follows the
    factors. Eigenvectors for eigenvalues that are 0 up to rounding, of which there are many at first, are chosen alike
    on any number of ranks. Vectors are updated by `adamw`, from the first step on.

    State: as Shampoo's.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        b1: :math:`\beta_1`, from 0 to below 1, or a rule: decay of the mean of gradients.
        b2: :math:`\beta_2`, from 0 to below 1, or a rule: decay of factors and of the mean of squared gradients.
        eps: :math:`\epsilon`, 0 or more, or a rule: keeps Adam's divisor above 0.
        every: steps from one power iteration to the next.
        block: longest dimension of a block.
        weight_decay: :math:`\lambda`, 0 or more, or a schedule or rule.
        donate: as for `shampoo`.

    Returns:
        An `Optimizer` for parameters of real floating-point dtypes.

    Raises:
        TypeError, ValueError, RuntimeError: as for `shampoo`.

    Sources: Vyas et al., SOAP: improving and stabilizing Shampoo using Adam (2024), algorithm 3.

    Example:
        ``soap(3e-3, weight_decay=lambda path, shape: 0.01 if len(shape) > 1 else 0.0)``
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    check("soap", numbers, numbers)

    def direction(g: Tensor, block_state: dict[str, Any], t: int, n: dict[str, float]) -> Tensor:
        bases, factors, update = block_state["bases"], block_state["factors"], torch.zeros_like(g)
        if t > 1:
            mean, square = _moments(block_state, g, _contracted(g, bases, 0), t - 1, n)
            update = _contracted(_contracted(mean, bases, 0) / (square.sqrt() + n["eps"]), bases, 1)
        for i, (factor, basis) in enumerate(zip(factors, bases, strict=True)):
            factor.lerp_(_gram(g, i), 1 - n["b2"])
            if t == 1:
                basis.copy_(_eigenbasis(factor))
        if t > 1 and (t - 1) % every == 0:
            _iterate(factors, bases, block_state["square"])
        return update

    return _directed_optimizer("soap", direction, numbers, every, block, donate, rests=1)


# --- one step, of any direction ---


def _directed_optimizer(
    name: str,
    direction: Direction,
    numbers: dict[str, Any],
    every: int,
    max_size: int,
    donate: bool,
    rests: int = 0,
    squares: bool = True,
) -> Optimizer:
    """An optimizer by a direction for each block, and `adamw` for vectors; the first `rests` steps move no block.

    With `squares` a mean of squares is remembered too.
    """
    check_integer(name, "every", every, 1)
    check_integer(name, "block", max_size, 1)
    check(name, {"donate": donate})

    def init(params: Any) -> Any:
        refuse_complex(leaves := units(params), name)
        refuse_parts(name, leaves)
        trained_units = _trained(leaves)
        blocks = all_remembered(trained_units, lambda block: _state_shapes(block, squares), cost, max_size)
        counts = {path: 0 for unit in trained_units for _, path, _ in spread(unit)}
        return {"step": 0, "numbers": constants(numbers), "counts": counts, "blocks": blocks}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, hparams = begun(numbers, state)
        leaves = units(params)
        refuse_parts(name, leaves)
        refuse_derivative(name, count, params, grads, state)
        trained_units = _trained(leaves)
        gs = [grad for unit, grad in pairs(leaves, grads) if unit.trainable]
        counts, rates = dict(state["counts"]), {}
        for unit, g in zip(trained_units, gs, strict=True):
            for _, path, shape in spread(unit):  # of all ranks, as a rule's error on one rank would hang the others
                counts[path] += g is not None
                rates[path] = {k: v(path, shape) if callable(v) else v for k, v in hparams.items() if k != "lr"}
        with torch.no_grad():
            blocks = state["blocks"] if donate else optree.tree_map(torch.clone, state["blocks"])

            def of_block(block: OwnedBlock, g: Tensor) -> Tensor:
                block_state = as_owner(blocks[block.name])
                x = g.to(block_state["mean"].dtype).view(block_state["mean"].shape)
                return direction(x, block_state, counts[block.path], rates[block.path]).view(g.shape)

            directions = iter(on_owner(trained_units, gs, of_block, cost, max_size=max_size))
            has = iter(g is not None for g in gs)
            hparams["weight_decay"] = lambda path, _: rates[path]["weight_decay"] * (counts[path] > rests)
            values = [
                updated_values(unit, next(directions), hparams, donate) if unit.trainable and next(has) else unit.values
                for unit in leaves.each
            ]
        new = params if donate else leaves.with_values(values)
        return new, state | {"step": count, "counts": counts, "blocks": blocks}

    vector_numbers = {key: numbers[key] for key in ("lr", "b1", "b2", "eps", "weight_decay")}
    matrices = Optimizer(init, on_whole(step))
    return masked(matrices, lambda path, shape: sum(n != 1 for n in shape) > 1, adamw(**vector_numbers, donate=donate))


def _trained(leaves: Units) -> list[Unit]:
    return [unit for unit in leaves.each if unit.trainable]


def refuse_derivative(name: str, count: Any, *trees: Any) -> None:
    """Raises an error where the step would be differentiated or captured."""
    if isinstance(count, Tensor):
        raise TypeError(
            f"{name}: the host must know the step number, on which the decomposition of matrices depends. Take the "
            f"optimizer's step out of the captured graph"
        )
    refuse_overwriting(name, *trees, does="has no derivative", instead="call its step outside of that")


# --- what is remembered of a block, and where ---


def _state_shapes(block: OwnedBlock, squares: bool) -> dict[str, Any]:
    """The shapes of a block's state: of its elements, and of each dimension."""
    shape = tuple(n for n, length in zip(block.box.sizes, block.whole, strict=True) if length != 1)
    square = [(n, n) for n in shape]
    return {"mean": shape} | ({"square": shape} if squares else {}) | {"factors": square, "bases": square}


def cost(shape: Ints) -> int:
    """Operations for a block: three products with each dimension's matrix, and in every tenth step its eigenvectors."""
    return sum(6 * math.prod(shape) * n + 3 * n**3 for n in shape if n > 1)


# --- arithmetic of a block ---


def _moments(
    block_state: dict[str, Any], g: Tensor, of_square: Tensor, t: int, n: dict[str, float]
) -> tuple[Tensor, Tensor]:
    """Adam's means of gradients and of squares after this step, without their bias."""
    mean = block_state["mean"].lerp_(g, 1 - n["b1"])
    square = block_state["square"].lerp_(of_square.square(), 1 - n["b2"])
    return mean / (1 - n["b1"] ** t), square / (1 - n["b2"] ** t)


def _gram(g: Tensor, i: int) -> Tensor:
    """Products of the slices of a tensor along dimension `i`, `[d, d]`."""
    rows = g.movedim(i, 0).flatten(1)
    return rows @ rows.mT


def _contracted(x: Tensor, matrices: Sequence[Tensor | None], dim: int) -> Tensor:
    """A tensor whose every dimension is contracted with dimension `dim` of its matrix; or stays, if that is None."""
    for matrix in matrices:  # each puts the first dimension last, so all of them restore the order
        x = x.movedim(0, -1) if matrix is None else torch.tensordot(x, matrix, dims=([0], [dim]))
    return x


@exact()
def inverse_power(factor: Tensor, exponent: float, ridge: float) -> Tensor:
    """The power `-exponent` of a factor whose eigenvalues are 0 or more up to rounding.

    Those that rounding alone could have made count as this rounding, so that it chooses no direction.
    """
    values, vectors = eigh(factor)
    values = values.maximum(_eigenvalue_error(values)) + ridge
    return vectors * values**-exponent @ vectors.mT


@exact()
def _eigenbasis(factor: Tensor) -> Tensor:
    """Eigenvectors of a factor as columns, by falling eigenvalue.

    In the space of eigenvalues that are 0 up to rounding any basis would do, and rounding would choose it. There it is
    that of a fixed matrix without equal eigenvalues.
    """
    values, vectors = eigh(factor)
    zero = vectors * (values <= _eigenvalue_error(values)) @ vectors.mT
    fixed = 2 + torch.arange(1.0, len(factor) + 1, dtype=factor.dtype, device=factor.device).cos()
    return eigh(factor - values[-1] * (zero * fixed) @ zero)[1].flip(1)


def _iterate(factors: Sequence[Tensor], bases: Sequence[Tensor], square: Tensor) -> None:
    """A step of power iteration; overwrites bases, and Adam's squares, which it sorts along each dimension.

    A basis begins again where `_next_basis` leaves rounding alone twice; for that the host waits once, or twice.
    """
    followed = [_next_basis(factor, basis) for factor, basis in zip(factors, bases, strict=True)]
    well = torch.stack([sure.all() for *_, sure in followed]).tolist()
    for i, (factor, basis, (new, order, sure)) in enumerate(zip(factors, bases, followed, strict=True)):
        if not well[i]:
            new, order, sure = _next_basis(factor, basis, sure)
        if well[i] or sure.all():
            square.copy_(square.index_select(i, order))
        else:  # squares of what is uncorrelated
            new = _eigenbasis(factor)
            shares = (new.mT @ basis).square()
            square.copy_(_contracted(square, [shares if j == i else None for j in range(square.ndim)], 1))
        basis.copy_(new)


@exact()
def _next_basis(factor: Tensor, basis: Tensor, moves: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The next basis, the old places of its vectors, and which of the old ones lead to more than rounding.

    Vectors with eigenvalues that are 0 up to rounding stay, up to orthogonalisation: the product is rounding alone. So
    is what orthogonalisation leaves of products that depend on each other, as those with a factor of low rank do: these
    vectors are found, and stay where they are left out of `moves`.
    """
    product = factor @ basis
    values = (basis * product).sum(0)
    threshold, half = _eigenvalue_error(values), torch.finfo(values.dtype).eps ** 0.5
    known = values > threshold if moves is None else moves & (values > threshold)
    order = values.where(known, 0).argsort(descending=True, stable=True)
    new, left = torch.linalg.qr(torch.where(known, product, basis)[:, order])
    sure = left.diagonal().abs() > torch.where(known, threshold + half * values, half)[order]
    return new, order, torch.empty_like(sure).index_copy_(0, order, sure)


def _eigenvalue_error(values: Tensor) -> Tensor:
    """The rounding error of eigenvalues."""
    return values.max() * len(values) ** 0.5 * torch.finfo(values.dtype).eps
