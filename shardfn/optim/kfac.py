"""K-FAC: preconditions gradients by Kronecker factors of the Fisher matrix, estimated every few steps.

A matrix, and all that is remembered of it but its momentum, is on one rank, as for `shampoo`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import optree
import torch
from torch import Tensor

from shardfn.collectives.agree import agree
from shardfn.mesh.selectors import Which
from shardfn.optim.differentiable import times
from shardfn.optim.elementwise import adamw
from shardfn.optim.hyperparameters import Hyperparameter, begun, check, check_integer, constants, kind, made_of_numbers
from shardfn.optim.norms import dots
from shardfn.optim.optimizer import Optimizer
from shardfn.optim.owners import (
    OwnedBlock,
    all_remembered,
    as_matrix,
    as_owner,
    blocks,
    handed,
    on_owner,
    owned,
    updated_values,
    work,
)
from shardfn.optim.shampoo import inverse_power, refuse_derivative
from shardfn.optim.state_offload import on_whole, placed, tree_on_device
from shardfn.optim.wrappers import split
from shardfn.quoting import listed
from shardfn.shards.layout import is_flat
from shardfn.shards.parts import refuse_parts
from shardfn.shards.pieces import Units, pairs, refuse_complex, units, zeros_like
from shardfn.transforms.fitting import program_ranks


class Moments(Protocol):
    """The result of `curvature.second_moments(outputs=True)`, as a protocol."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """By path, the mean over vectors of inputs' outer products."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """By path, the mean over vectors of those of gradients of outputs."""

    @property
    def kinds(self) -> Mapping[str, Any]:
        """By path, `"linear"` for `[outputs, inputs]`, or `"product"` for `[inputs, outputs]`."""

    @property
    def tokens(self) -> Mapping[str, float]:
        """By path, the number of vectors."""

    @property
    def rows(self) -> float:
        """The number of rows."""


_ALIKE = "the arguments", "Each rank updates its part of the parameters: pass the same numbers"


def _compared_state(moments: Any, state: Any, numbers: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the chosen parameters' state and hyperparameters, after all ranks have compared them.

    Raises:
        TypeError: these are no moments and no state.
        ValueError: ranks have other numbers.
    """
    if not isinstance(state, dict) or "chosen" not in state or not hasattr(moments, "tokens"):
        raise TypeError(
            f"kfac: estimate(moments, state) takes what curvature.second_moments returns, and then the state of this "
            f"optimizer, in a chain the last one: these are {kind(moments)} and {kind(state)}"
        )
    hparams = numbers | state["chosen"]["numbers"]
    lines = [f"{key}: {value!r}" for key, value in hparams.items() if isinstance(value, Real)]
    agree(lines, program_ranks(moments.inputs), "kfac", subject=_ALIKE)
    return state["chosen"], hparams


@dataclass(frozen=True)
class Kfac(Optimizer):
    """An `Optimizer` that also takes estimates of the Fisher matrix.

    Attributes:
        estimate: `(moments, state) -> state`, before the first step and every few steps after it, with
            `curvature.second_moments(losses, params, batches, outputs=True)`. `state` is that of this optimizer: inside
            of `chain`, the last.
    """

    estimate: Callable[[Moments, Any], Any]


@made_of_numbers
def kfac(
    lr: Hyperparameter | Tensor,
    *,
    momentum: Hyperparameter = 0.9,
    b2: float = 0.95,
    damping: Hyperparameter = 1e-3,
    clip: float | None = 1e-3,
    every: int = 10,
    weight_decay: Hyperparameter = 0.0,
    which: Which = lambda path, shape: len(shape) > 1,
    fallback: Optimizer | None = None,
    donate: bool = True,
) -> Kfac:
    r"""K-FAC, to which you pass second moments; overwrites parameters and state unless `donate=False`.

    For each matrix, :math:`L \leftarrow \beta_2 L + (1 - \beta_2) \bar L` by each estimate, and R alike: one of them is
    the mean over tokens of outer products of inputs, and the other one, over rows, the mean of sums over tokens of
    those of gradients of outputs. Then :math:`d = (\hat L + \pi \sqrt\lambda I)^{-1} G (\hat R + \sqrt\lambda / \pi
    I)^{-1}`, where :math:`\pi^2` is the mean eigenvalue of :math:`\hat L` over that of :math:`\hat R`, and hats divide
    by :math:`1 - \beta_2^k` after k estimates. :math:`m \leftarrow \mu m + \nu d`, with :math:`\nu = \min(1, \sqrt{c /
    \eta^2 \sum g^\top d})`, a sum over all these matrices; :math:`p \leftarrow (1 - \eta \lambda_w) p - \eta m`. A
    tensor of more dimensions is a matrix of its first and all others. All other parameters are updated by `fallback`.

    The gradient is that of the mean loss of rows. The labels of the batch give the *empirical* Fisher matrix, and
    `curvature.SampledLabels` those of the model.

    State: one number a parameter, and for a matrix `[m, n]` :math:`2 (m^2 + n^2)`, in float32 or wider, on the rank
    that works on it.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        momentum: :math:`\mu`, from 0 to 1, or a schedule or rule.
        b2: :math:`\beta_2`, from 0 to below 1: decay of factors.
        damping: :math:`\lambda`, above 0, or a schedule or rule.
        clip: c, above 0: a bound of the step's square in the norm of the Fisher matrix; None for none.
        every: steps from one computation of inverses to the next; the first step computes them.
        weight_decay: :math:`\lambda_w`, 0 or more, or a schedule or rule.
        which: the matrices, as for `masked`; by default all parameters of two or more dimensions.
        fallback: for all other parameters; None for ``adamw(1e-3)``.
        donate: as for `shampoo`.

    Returns:
        An `Optimizer` for parameters of real floating-point dtypes, with `estimate`.

    Raises:
        TypeError, ValueError, RuntimeError: as for `shampoo`; by `estimate` for moments that lack one of these
            matrices, such as an embedding, which no product uses; by `step` before the first estimate.

    Sources: Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature (2015),
        section 6.3; for :math:`\nu`, Ba, Grosse and Martens, Distributed second-order optimization using
        Kronecker-factored approximations (2017), section 5; for tokens and convolutions, as `curvature.ekfac`.

    Example:
        ``state = optimizer.estimate(sc.second_moments(losses, params, [batch], outputs=True), state)``, then
        as any optimizer
    """
    numbers = {"lr": lr, "momentum": momentum, "b2": b2, "damping": damping, "weight_decay": weight_decay}
    numbers |= {} if clip is None else {"clip": clip}
    check("kfac", numbers | {"donate": donate}, ("lr", "momentum", "damping", "weight_decay"))
    check_integer("kfac", "every", every, 1)

    def init(params: Any) -> Any:
        leaves = units(params)
        refuse_complex(leaves, "kfac")
        refuse_parts("kfac", leaves)
        trained = [unit for unit in leaves.each if unit.trainable]
        if flat := [block.path for unit in trained for block in blocks(unit) if len(block.whole) < 2]:
            raise ValueError(f"kfac: which= chose {listed(flat)}, of fewer than two dimensions: matrices have factors")
        block_states = all_remembered(trained, _factor_shapes, work)
        counts = {"step": 0, "estimates": 0}
        return counts | {"numbers": constants(numbers), "momentum": zeros_like(params), "blocks": block_states}

    def estimate(moments: Moments, state: Any) -> Any:
        chosen_state, hparams = _compared_state(moments, state, numbers | {"every": every})
        count, decay = chosen_state["estimates"] + 1, hparams["b2"]
        blocks_of = chosen_state["blocks"] if donate else optree.tree_map(torch.clone, chosen_state["blocks"])
        block_states = tree_on_device(blocks_of)
        with torch.no_grad():
            new = iter(handed(_pairs_with_state(moments, block_states)))
            for name, block in block_states.items():
                scale = moments.tokens[name] / moments.rows
                for i, side in enumerate(_sides(moments, name)):
                    moment = next(new)
                    if moment is not None:
                        factor = as_owner(block)["factors"][i]
                        factor.lerp_((moment * scale if side == "outputs" else moment).to(factor), 1 - decay)
        return state | {"chosen": chosen_state | {"estimates": count, "blocks": placed(block_states)}}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, hparams = begun(numbers, state)
        leaves = units(params)
        refuse_parts("kfac", leaves)
        refuse_derivative("kfac", count, params, grads, state)
        if not state["estimates"]:
            raise RuntimeError(
                "kfac: there are no factors before the first estimate: state = "
                "optimizer.estimate(curvature.second_moments(losses, params, [batch], outputs=True), state)"
            )
        momenta, values = leaves.values_in(state["momentum"]), [unit.values for unit in leaves.each]
        gradients = {i: g for i, (unit, g) in enumerate(pairs(leaves, grads)) if unit.trainable}
        present = {i: g for i, g in gradients.items() if g is not None}
        with torch.no_grad():
            block_states = state["blocks"] if donate else optree.tree_map(torch.clone, state["blocks"])
            if (count - 1) % every == 0:
                bias, damping = 1 - hparams["b2"] ** state["estimates"], hparams["damping"]
                for block in (b for unit in leaves.each if unit.trainable for b in blocks(unit)):
                    # On every rank: the error of its owner alone would leave the others waiting.
                    amount = damping(block.path, block.whole) if callable(damping) else damping
                    if owned(block_states[block.name]):
                        _invert(as_owner(block_states[block.name]), bias, amount)
            precondition = functools.partial(_preconditioned, block_states)
            directions = on_owner([leaves.each[i] for i in gradients], list(gradients.values()), precondition, work)
            if "clip" in hparams and present:
                directions = _clipped(leaves, present, directions, hparams["lr"], hparams["clip"])
            for i, d in zip(present, directions, strict=True):
                m = times(leaves.each[i], momenta[i], hparams["momentum"])
                momenta[i] = (momenta[i].copy_(m) if donate else m).add_(d)
                values[i] = updated_values(leaves.each[i], momenta[i], hparams, donate)
        new = params if donate else leaves.with_values(values)
        return new, state | {"step": count, "momentum": leaves.with_values(momenta), "blocks": block_states}

    rest = adamw(1e-3, donate=donate) if fallback is None else fallback
    combined = split("kfac", Optimizer(init, on_whole(step)), which, rest)
    return Kfac(combined.init, combined.step, estimate)


def _factor_shapes(block: OwnedBlock) -> dict[str, Any]:
    """The shapes of a block's state: a square for each dimension of the matrix."""
    square = [(n, n) for n in as_matrix(block.box.sizes)]
    return {"factors": square, "inverses": square}


def _sides(moments: Moments, name: str) -> tuple[str, str]:
    """Returns which dimension of a matrix is its inputs, and which its outputs."""
    return ("outputs", "inputs") if moments.kinds[name] == "linear" else ("inputs", "outputs")


def _pairs_with_state(moments: Moments, blocks: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Pairs each moment of these matrices with the state of its matrix.

    Raises:
        ValueError: there is none, or one of another length.
    """
    if missing := [name for name in blocks if name not in moments.kinds]:
        raise ValueError(
            f"kfac: these moments have no factors of {listed(missing)}, which no product of this batch uses, or which "
            f"is also used in another way: choose other matrices by which=; the rest is updated by fallback="
        )
    if not moments.outputs and blocks:
        raise ValueError("kfac: these moments are of inputs alone: pass outputs=True to curvature.second_moments")
    matches = []
    for name, block in blocks.items():
        for i, side in enumerate(_sides(moments, name)):
            moment = getattr(moments, side)[name]
            if is_flat(moment) != is_flat(block):
                in_state, in_moments = ("a flat shard" if is_flat(x) else "a plain tensor" for x in (block, moment))
                raise ValueError(
                    f"kfac: the moment of {side} of {name} is of {in_moments}, and the state of {in_state}"
                )
            in_state, in_moments = (_length(x, n) for x, n in ((block, i), (moment, 0)))
            if in_state != in_moments:
                raise ValueError(f"kfac: the moment of {side} of {name} is {in_moments}, and {in_state} in the state")
            matches.append((moment, block))
    return matches


def _length(tree: Any, index: int) -> Any:
    return tree.layout.whole_shape(index) if is_flat(tree) else tuple(optree.tree_leaves(tree)[index].shape)


def _invert(block_state: dict[str, list[Tensor]], bias: float, damping: float) -> None:
    """Writes the inverses of both factors, with damping that each gets by its mean eigenvalue."""
    factors = [factor / bias for factor in block_state["factors"]]
    left, right = (factor.diagonal().mean() for factor in factors)
    pi = torch.where((left > 0) & (right > 0), left / right, torch.ones_like(left)).sqrt()
    for inverse, factor, share in zip(block_state["inverses"], factors, (pi, 1 / pi), strict=True):
        inverse.copy_(inverse_power(factor, 1.0, damping**0.5 * share))


def _preconditioned(blocks: Mapping[str, Any], block: OwnedBlock, g: Tensor) -> Tensor:
    left, right = as_owner(blocks[block.name])["inverses"]
    return (left @ g.to(left.dtype).view(len(left), len(right)) @ right).view(g.shape)


def _clipped(
    leaves: Units, present: dict[int, Tensor], directions: list[Tensor], rate: Any, max_square: float
) -> list[Tensor]:
    """The directions, scaled so that the step's square in the norm of the Fisher matrix is at most `max_square`."""
    chosen = [leaves.each[i] for i in present]
    zipped = (zip(chosen, values, strict=True) for values in (present.values(), directions))
    g, d = (
        leaves._replace(each=[unit._replace(values=times(unit, x, rate)) for unit, x in pairs_of])
        for pairs_of in zipped
    )
    size = dots([g], d)[0]
    scale = (max_square / size.clamp(min=max_square)).sqrt()
    return [d * scale.to(d.device, d.dtype) for d in directions]
