"""Muon on flat shards: each matrix is orthogonalised on the one rank that owns it for a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfn.optim.differentiable import lerped, refuse_overwriting
from shardfn.optim.hyperparameters import Hyperparameter, begun, check, check_integer, constants, made_of_numbers
from shardfn.optim.optimizer import Optimizer
from shardfn.optim.owners import on_everyone, on_owner, updated_values
from shardfn.optim.state_offload import on_whole
from shardfn.optim.wrappers import by_numbers
from shardfn.shards.boxes import Ints
from shardfn.shards.parts import refuse_parts
from shardfn.shards.pieces import pairs, refuse_complex, units, zeros_like


@made_of_numbers
def muon(
    lr: Hyperparameter | Tensor,
    *,
    momentum: Hyperparameter = 0.95,
    nesterov: bool = True,
    weight_decay: Hyperparameter = 0.1,
    iterations: int = 5,
    dtype: torch.dtype | None = torch.bfloat16,
    donate: bool = True,
) -> Optimizer:
    r"""Muon, for matrices only; overwrites parameters and state unless `donate=False`.

    :math:`m \leftarrow \mu m + (1 - \mu) g`, then :math:`u = (1 - \mu) g + \mu m` with Nesterov's momentum or else
    :math:`m`; :math:`p \leftarrow (1 - \eta \lambda) p - \eta \sqrt{\max(1, r / c)}\, \mathrm{orth}(u)` for a matrix of
    :math:`r` rows and :math:`c` columns, where :math:`\mathrm{orth}` makes all singular values about 1 by a quintic
    Newton-Schulz iteration.

    State: one number a parameter.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        momentum: :math:`\mu`, from 0 to 1, or a schedule or rule.
        nesterov: whether to use Nesterov's momentum.
        weight_decay: :math:`\lambda`, 0 or more, or a schedule or rule.
        iterations: number of Newton-Schulz iterations, 1 or more.
        dtype: dtype of the iteration and of what ranks exchange; None for the gradient's. A CPU without instructions
            for bfloat16 takes about 80 times as long in it as in float32.
        donate: as for `sgd`. If False, matrices are gathered on every rank, differentiably.

    Returns:
        An `Optimizer` for parameters of two dimensions.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range; `init` also for a parameter that is
            not a real matrix.

    Sources: Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).

    Example:
        ``masked(muon(0.02), lambda path, shape: len(shape) == 2 and "embed" not in path, adamw(3e-4))``
    """
    numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    check("muon", {"nesterov": nesterov, "donate": donate})
    check_integer("muon", "iterations", iterations, 1)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"muon: dtype must be a floating dtype, or None for the gradient's, got {dtype!r}")
    return by_numbers("muon", lambda numbers: _optimizer(numbers, nesterov, iterations, dtype, donate), numbers)


def _optimizer(
    numbers: dict[str, Any], nesterov: bool, iterations: int, dtype: torch.dtype | None, donate: bool
) -> Optimizer:
    def init(params: Any) -> Any:
        leaves = units(params)
        refuse_complex(leaves, "muon")
        refuse_parts("muon", leaves)
        for unit in leaves.each:
            entries = [unit.layout.entries[i] for i in unit.entries] if unit.layout else unit.segments
            for e in entries:
                if unit.trainable and len(e.shape) != 2:
                    raise ValueError(
                        f"muon: {e.path} has shape {e.shape}, and only matrices can be orthogonalised; give the others "
                        f"to another optimizer: masked(muon(...), lambda path, shape: len(shape) == 2, adamw(...))"
                    )
        return {"step": 0, "numbers": constants(numbers), "momentum": zeros_like(params)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, hparams = begun(numbers, state)
        leaves = units(params)
        refuse_parts("muon", leaves)
        momenta = leaves.values_in(state["momentum"])
        present = {i: grad for i, (_, grad) in enumerate(pairs(leaves, grads)) if grad is not None}
        moving, gs = list(present), list(present.values())
        if not moving:
            return params, state | {"step": count}
        if donate:
            refuse_overwriting("muon", params, grads, state)
        with torch.set_grad_enabled(not donate and torch.is_grad_enabled()):
            ms = [momenta[i] for i in moving]
            averages = lerped(ms, gs, 1 - hparams["momentum"], donate)
            updates = lerped(gs, averages, hparams["momentum"]) if nesterov else list(averages)
            chosen = [leaves.each[i] for i in moving]
            with_whole = on_owner if donate else on_everyone
            orthogonal = with_whole(chosen, updates, lambda _, x: orthogonalised(x, iterations, dtype), cost, dtype)
            values = [unit.values for unit in leaves.each]
            for i, unit, o, m in zip(moving, chosen, orthogonal, averages, strict=True):
                values[i] = updated_values(unit, o, hparams, donate, lambda s: max(1.0, s[0] / s[1]) ** 0.5)
                momenta[i] = m
        new_params = params if donate else leaves.with_values(values)
        return new_params, state | {"step": count, "momentum": leaves.with_values(momenta)}

    return Optimizer(init, on_whole(step))


def orthogonalised(x: Tensor, iterations: int, dtype: torch.dtype | None) -> Tensor:
    """`[..., r, c]` matrices with the same singular vectors, and singular values of about 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.to(dtype or x.dtype)
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.mT if tall else y


def cost(shape: Ints) -> int:
    """The number of operations of a Newton-Schulz iteration: three matrix products."""
    smaller = min(shape)
    return 4 * shape[0] * shape[1] * smaller + 2 * smaller**3
