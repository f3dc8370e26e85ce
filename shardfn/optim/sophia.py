"""Sophia: the mean of gradients, divided by an estimate of the Hessian's diagonal, and clipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.optim.elementwise import Schedule
from shardfn.optim.optimizer import Optimizer, Rule
from shardfn.optim.stepping import Elementwise, optimizer


@dataclass(frozen=True)
class Sophia(Optimizer):
    """An `Optimizer` that is also told of the Hessian's diagonal.

    Attributes:
        estimate: `(params, diagonal, state) -> state`, before a step, every few steps. The diagonal is a tree like the
            parameters, with the layouts of a gradient. `state` is that of this optimizer: inside of `chain`, the last.
    """

    estimate: Callable[[Any, Any, Any], Any]


def _step_in_place(ps: list[Tensor], gs: list[Tensor], slots: Any, _: int, n: dict[str, Any]) -> None:
    ms, hs = slots
    torch._foreach_lerp_(ms, gs, 1 - n["b1"])
    divisors = torch._foreach_mul(hs, n["gamma"])
    torch._foreach_clamp_min_(divisors, max(n["eps"], torch.finfo(divisors[0].dtype).tiny))
    moves = torch._foreach_div(ms, divisors)
    torch._foreach_clamp_min_(moves, -1.0)
    torch._foreach_clamp_max_(moves, 1.0)
    torch._foreach_mul_(ps, 1 - n["lr"] * n["weight_decay"])
    torch._foreach_mul_(moves, n["lr"])
    torch._foreach_sub_(ps, moves)


def _step_pure(p: Tensor, g: Tensor, slots: Any, _: int, n: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    m, h = n["b1"] * slots[0] + (1 - n["b1"]) * g, slots[1]
    move = (m / (n["gamma"] * h).clamp(min=max(n["eps"], torch.finfo(p.dtype).tiny))).clamp(-1, 1)
    return p * (1 - n["lr"] * n["weight_decay"]) - n["lr"] * move, (m, h)


def _estimate_in_place(_: list[Tensor], estimates: list[Tensor], slots: Any, __: int, n: dict[str, Any]) -> None:
    torch._foreach_lerp_(slots[1], estimates, 1 - n["b2"])


def _estimate_pure(p: Tensor, x: Tensor, slots: Any, _: int, n: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    return p, (slots[0], n["b2"] * slots[1] + (1 - n["b2"]) * x)


SLOTS = "mean", "diagonal"
STEP = Elementwise(SLOTS, _step_in_place, _step_pure)
ESTIMATE = Elementwise(SLOTS, _estimate_in_place, _estimate_pure)


def sophia(
    lr: float | Tensor | Schedule,
    *,
    b1: float | Rule = 0.96,
    b2: float | Rule = 0.99,
    gamma: float | Rule = 0.01,
    eps: float | Rule = 1e-12,
    weight_decay: float | Rule = 0.0,
    donate: bool = True,
) -> Sophia:
    r"""Sophia, to which you pass estimates of a diagonal; overwrites parameters and state unless `donate=False`.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`, then
    :math:`p \leftarrow (1 - \eta \lambda) p - \eta\, \mathrm{clip}(m / \max(\gamma h, \epsilon), 1)`, each element
    between -1 and 1. Every few steps, ten in the paper, and before the first, call `state = optimizer.estimate(params,
    diagonal, state)`: :math:`h \leftarrow \beta_2 h + (1 - \beta_2) \hat h`. Where h is 0 or negative, and so before
    the first estimate, a step moves by the sign of m.

    Sophia-H takes Hutchinson's estimate, `curvature.diag(curvature.hvp(loss, params, [batch]), 1, seed=step)`. Sophia-G
    takes that of Gauss, Newton and Bartlett: the gradient of the mean loss of a batch with labels that are drawn from
    the model, squared, times the rows of the batch on all ranks.

    State: two numbers a parameter.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, or a function of the step number, which begins at 1.
        b1: :math:`\beta_1`, from 0 to below 1, or a rule: decay of the mean of gradients.
        b2: :math:`\beta_2`, from 0 to below 1, or a rule: decay of the mean of estimates.
        gamma: :math:`\gamma`, above 0, or a rule: the smaller, the more elements are clipped.
        eps: :math:`\epsilon`, 0 or more, or a rule: keeps the divisor above 0.
        weight_decay: :math:`\lambda`, 0 or more, or a rule `(path, shape) -> number`.
        donate: whether to overwrite parameters, gradients and state. If not, they stay as they are, and the step can
            be differentiated.

    Returns:
        An `Optimizer` for parameters of any floating-point dtype, with `estimate`; its state has the same dtype.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range.

    Sources: Liu et al., Sophia: a scalable stochastic second-order optimizer for language model pre-training (2023),
        algorithm 3.

    Example:
        ``state = optimizer.estimate(params, h, state); params, state = optimizer.step(params, grads, state)``
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "gamma": gamma, "eps": eps, "weight_decay": weight_decay}
    moving = optimizer("sophia", STEP, numbers, donate)
    noting = optimizer("sophia", ESTIMATE, numbers, donate)

    def estimate(params: Any, diagonal: Any, state: Any) -> Any:
        _, new = noting.step(params, diagonal, state)
        return new | {"step": state["step"]}

    return Sophia(moving.init, moving.step, estimate)
