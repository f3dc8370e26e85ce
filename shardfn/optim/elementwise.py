"""Elementwise optimizers: SGD, Adam, AdamW, Lion, Sophia.

Such a rule does not depend on where a parameter ends, so it runs on flat shards as they are, in place, with torch's
fused kernels. With `donate=False` the same rule is differentiable arithmetic on new tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.optim.fused import AdamW
from shardfn.optim.hyperparameters import Hyperparameter, check, made_of_numbers
from shardfn.optim.optimizer import Optimizer
from shardfn.optim.state_dtype import Coded, Rounded
from shardfn.optim.stepping import Elementwise, optimizer

Number = float | Tensor


# --- the rules ---


def _sgd_in_place(ps: Any, gs: Any, slots: Any, step: int, n: dict[str, Any]) -> None:
    if ps[0].device.type == "cpu" and ps[0].element_size() < 4:
        # On a CPU torch's kernel (2.13) leaves most 16-bit numbers unchanged, and their momenta undefined.
        return _one_by_one(_sgd_pure, torch.float32, ps, gs, slots, step, n)
    if _too_exact(n["lr"], ps[0]):
        return _one_by_one(_sgd_pure, torch.float64, ps, gs, slots, step, n)
    if slots and not n["momentum"]:  # torch's kernel then takes no momenta, which the next step may need
        return _one_by_one(_sgd_pure, ps[0].dtype, ps, gs, slots, step, n)
    kw = {"momentum": 0.0, "nesterov": False} | n | {"lr": _rate(n["lr"], ps[0])}
    torch._fused_sgd_(ps, gs, slots[0] if slots else [], dampening=0.0, maximize=False, is_first_step=False, **kw)


def _sgd_pure(p: Tensor, g: Tensor, slots: Any, _: int, n: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    g = g + n["weight_decay"] * p
    if not slots:
        return p - n["lr"] * g, ()
    m = n["momentum"] * slots[0] + g
    return p - n["lr"] * (g + n["momentum"] * m if n["nesterov"] else m), (m,)


def _adam_in_place(kernel: Any, pure: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]) -> Callable[..., None]:
    def run(ps: list[Tensor], gs: list[Tensor], slots: Any, step: Any, n: dict[str, Any]) -> None:
        if _too_exact(n["lr"], ps[0]):
            return _one_by_one(pure, torch.float64, ps, gs, slots, step, n)
        step = _own_count(step, n)
        # `full` writes the number on the device; copying it from the host's memory would make the host wait.
        if isinstance(step, Tensor):
            steps = [step.to(torch.float32)] * len(ps)
        else:
            steps = [torch.full((), float(step), dtype=torch.float32, device=ps[0].device)] * len(ps)
        kw = {"beta1": n["b1"], "beta2": n["b2"], "weight_decay": n["weight_decay"], "eps": n["eps"]}
        kernel(ps, gs, *slots, [], steps, lr=_rate(n["lr"], ps[0]), amsgrad=False, maximize=False, **kw)

    return run


def _own_count(step: Any, n: dict[str, Any]) -> Any:
    """The number of steps that the parameters with these numbers have made."""
    return step - n["missed"] if "missed" in n else step


def _rate(lr: Number, p: Tensor) -> Number:
    """A learning rate as fused kernels take it: those of CUDA read a tensor as float32."""
    return lr.to(torch.float32) if isinstance(lr, Tensor) and p.device.type == "cuda" else lr


def _too_exact(lr: Number, p: Tensor) -> bool:
    """Whether a fused kernel would round a learning rate that float64 parameters do not."""
    exact = isinstance(lr, Tensor) and lr.dtype == torch.float64 and lr.device.type == "cuda"
    return exact and p.dtype == torch.float64


def _one_by_one(
    pure: Callable[..., Any], dtype: torch.dtype, ps: Any, gs: Any, slots: Any, step: Any, n: dict[str, Any]
) -> None:
    """Updates each parameter and its slots by a rule that computes in a dtype."""
    for row in zip(ps, gs, *slots, strict=True):
        p, g, *slot_values = (x.to(dtype) for x in row)
        new, new_slots = pure(p, g, slot_values, step, n)
        for x, value in zip((row[0], *row[2:]), (new, *new_slots), strict=True):
            x.copy_(value)


def _adam_pure(decoupled: bool) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    def run(p: Tensor, g: Tensor, slots: Any, step: Any, n: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
        lr, b1, b2 = n["lr"], n["b1"], n["b2"]
        step = _own_count(step, n)
        step = step.double() if isinstance(step, Tensor) else step
        if decoupled:
            p = p * (1 - lr * n["weight_decay"])
        else:
            g = g + n["weight_decay"] * p
        m = b1 * slots[0] + (1 - b1) * g
        v = b2 * slots[1] + (1 - b2) * g * g
        # The root of zero has no derivative; where v is zero, so is m, and nothing moves.
        root = torch.where(v > 0, v, 1).sqrt() * (v > 0) / (1 - b2**step) ** 0.5
        return p - lr / (1 - b1**step) * m / (root + n["eps"]), (m, v)

    return run


def _lion_in_place(ps: list[Tensor], gs: list[Tensor], slots: Any, _: int, n: dict[str, Any]) -> None:
    (ms,) = slots
    moves = torch._foreach_lerp(ms, gs, 1 - n["b1"])
    torch._foreach_sign_(moves)
    torch._foreach_mul_(ps, 1 - n["lr"] * n["weight_decay"])
    if isinstance(n["lr"], Tensor):  # as `alpha` it would be read by the host, which waits for the device
        torch._foreach_mul_(moves, n["lr"])
        torch._foreach_sub_(ps, moves)
    else:
        torch._foreach_add_(ps, moves, alpha=-n["lr"])
    torch._foreach_lerp_(ms, gs, 1 - n["b2"])


def _lion_pure(p: Tensor, g: Tensor, slots: Any, _: int, n: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    (m,) = slots
    move = torch.sign(n["b1"] * m + (1 - n["b1"]) * g)
    return p * (1 - n["lr"] * n["weight_decay"]) - n["lr"] * move, (n["b2"] * m + (1 - n["b2"]) * g,)


def _sophia_in_place(ps: list[Tensor], gs: list[Tensor], slots: Any, _: int, n: dict[str, Any]) -> None:
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


def _sophia_pure(p: Tensor, g: Tensor, slots: Any, _: int, n: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    m, h = n["b1"] * slots[0] + (1 - n["b1"]) * g, slots[1]
    move = (m / (n["gamma"] * h).clamp(min=max(n["eps"], torch.finfo(p.dtype).tiny))).clamp(-1, 1)
    return p * (1 - n["lr"] * n["weight_decay"]) - n["lr"] * move, (m, h)


def _slot_storage(name: str, dtype: torch.dtype | None) -> Rounded | None:
    """Returns the storage of slots for a `state_dtype`; None for the parameter's dtype."""
    if dtype is None:
        return None
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"{name}: state_dtype must be torch.bfloat16, torch.float32, or None for the parameter's dtype, got "
            f"{dtype!r}. For 8 bits there are adamw8bit and lion8bit"
        )
    return Rounded(dtype)


_ADAM_PURE, _ADAMW_PURE = _adam_pure(decoupled=False), _adam_pure(decoupled=True)
ADAM = Elementwise(("mean", "square"), _adam_in_place(torch._fused_adam_, _ADAM_PURE), _ADAM_PURE, counts=True)
_ADAMW = _adam_in_place(torch._fused_adamw_, _ADAMW_PURE)
ADAMW = Elementwise(("mean", "square"), _ADAMW, _ADAMW_PURE, AdamW(_ADAMW), counts=True)
LION = Elementwise(("mean",), _lion_in_place, _lion_pure)
SOPHIA = Elementwise(("mean", "diagonal"), _sophia_in_place, _sophia_pure)
ESTIMATE = Elementwise(
    SOPHIA.slots,
    lambda _, estimates, slots, step, n: torch._foreach_lerp_(slots[1], estimates, 1 - n["b2"]),
    lambda p, x, slots, step, n: (p, (slots[0], n["b2"] * slots[1] + (1 - n["b2"]) * x)),
)


# --- what users call ---


@made_of_numbers
def sgd(
    lr: Hyperparameter | Tensor,
    *,
    momentum: Hyperparameter = 0.0,
    nesterov: bool = False,
    weight_decay: Hyperparameter = 0.0,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
    donate: bool = True,
) -> Optimizer:
    r"""Stochastic gradient descent; overwrites parameters and state unless `donate=False`.

    :math:`m \leftarrow \mu m + g`, :math:`p \leftarrow p - \eta m`, or with Nesterov's momentum
    :math:`p - \eta (g + \mu m)`; :math:`g` has :math:`\lambda p` added to it.

    State: one number a parameter with momentum, none without.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        momentum: :math:`\mu`, from 0 to 1.
        nesterov: whether to use Nesterov's momentum, which needs `momentum` above 0.
        weight_decay: :math:`\lambda`, 0 or more, or a schedule or rule.
        state_dtype: dtype of the state: bfloat16 (rounded stochastically) or float32; None for the parameter's dtype.
        seed: seed of the random numbers for bfloat16, the same on every rank.
        donate: whether to overwrite parameters, gradients and state. If not, they stay unchanged, and the step can
            be differentiated.

    Returns:
        An `Optimizer` for parameters of any floating-point or complex dtype; its state has the same dtype by default.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range.

    Sources: Sutskever et al., On the importance of initialization and momentum in deep learning (2013).

    Example:
        ``opt = sgd(0.1, momentum=0.9); state = opt.init(params); params, state = opt.step(params, grads, state)``
    """
    check("sgd", {"nesterov": nesterov, "momentum": momentum}, ("momentum",))
    if nesterov and not momentum:
        raise ValueError("sgd: nesterov=True needs a momentum above 0")
    numbers: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if momentum:
        numbers |= {"momentum": momentum, "nesterov": nesterov}
    rule = Elementwise(("momentum",) if momentum else (), _sgd_in_place, _sgd_pure)
    return optimizer("sgd", rule, numbers, donate, _slot_storage("sgd", state_dtype), seed)


@made_of_numbers
def adam(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
    donate: bool = True,
) -> Optimizer:
    r"""Adam; overwrites parameters and state unless `donate=False`.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) g^2`,
    :math:`p \leftarrow p - \eta \hat m / (\sqrt{\hat v} + \epsilon)`, where hats divide by :math:`1 - \beta^t`;
    :math:`g` has :math:`\lambda p` added to it.

    State: two numbers a parameter.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        b1: :math:`\beta_1`, from 0 to below 1, a schedule or a rule: decay of the mean of gradients.
        b2: :math:`\beta_2`, from 0 to below 1, a schedule or a rule: decay of the mean of squared gradients.
        eps: :math:`\epsilon`, 0 or more, a schedule or a rule: keeps the divisor above 0.
        weight_decay: :math:`\lambda`, 0 or more, or a schedule or rule.
        state_dtype: dtype of the state: bfloat16 (rounded stochastically) or float32; None for the parameter's dtype.
        seed: seed of the random numbers for bfloat16, the same on every rank.
        donate: whether to overwrite parameters, gradients and state. If not, they stay unchanged, and the step can
            be differentiated.

    Returns:
        An `Optimizer` for parameters of any floating-point or complex dtype; its state has the same dtype by default.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range.

    Sources: Kingma and Ba, Adam: a method for stochastic optimization (2015), algorithm 1.

    Example:
        ``adam(warmup_cosine(3e-4, warmup=100, steps=10_000), b2=0.95)``
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    return optimizer("adam", ADAM, numbers, donate, _slot_storage("adam", state_dtype), seed)


@made_of_numbers
def adamw(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.01,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
    donate: bool = True,
) -> Optimizer:
    r"""Adam with decoupled weight decay; overwrites parameters and state unless `donate=False`.

    :math:`p \leftarrow (1 - \eta \lambda) p`, then the update of `adam` with :math:`\lambda = 0`.

    State: two numbers a parameter.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        b1: :math:`\beta_1`, from 0 to below 1, a schedule or a rule: decay of the mean of gradients.
        b2: :math:`\beta_2`, from 0 to below 1, a schedule or a rule: decay of the mean of squared gradients.
        eps: :math:`\epsilon`, 0 or more, a schedule or a rule: keeps the divisor above 0.
        weight_decay: :math:`\lambda`, 0 or more, or a schedule or rule.
        state_dtype: dtype of the state: bfloat16 (rounded stochastically) or float32; None for the parameter's dtype.
        seed: seed of the random numbers for bfloat16, the same on every rank.
        donate: whether to overwrite parameters, gradients and state. If not, they stay unchanged, and the step can
            be differentiated.

    Returns:
        An `Optimizer` for parameters of any floating-point or complex dtype; its state has the same dtype by default.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range.

    Sources: Loshchilov and Hutter, Decoupled weight decay regularization (2019), algorithm 2.

    Example:
        ``adamw(3e-4, weight_decay=lambda path, shape: 0.1 if len(shape) > 1 else 0.0)``
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    return optimizer("adamw", ADAMW, numbers, donate, _slot_storage("adamw", state_dtype), seed)


@made_of_numbers
def lion(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    weight_decay: Hyperparameter = 0.0,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
    donate: bool = True,
) -> Optimizer:
    r"""Lion; overwrites parameters and state unless `donate=False`.

    :math:`p \leftarrow (1 - \eta \lambda) p - \eta\, \mathrm{sign}(\beta_1 m + (1 - \beta_1) g)`, then
    :math:`m \leftarrow \beta_2 m + (1 - \beta_2) g`.

    State: one number a parameter.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        b1: :math:`\beta_1`, from 0 to below 1, a schedule or a rule: weight of the mean in the update.
        b2: :math:`\beta_2`, from 0 to below 1, a schedule or a rule: decay of the mean of gradients.
        weight_decay: :math:`\lambda`, 0 or more, or a schedule or rule.
        state_dtype: dtype of the state: bfloat16 (rounded stochastically) or float32; None for the parameter's dtype.
        seed: seed of the random numbers for bfloat16, the same on every rank.
        donate: whether to overwrite parameters, gradients and state. If not, they stay unchanged, and the step can
            be differentiated.

    Returns:
        An `Optimizer` for parameters of any floating-point or complex dtype; its state has the same dtype by default.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range.

    Sources: Chen et al., Symbolic discovery of optimization algorithms (2023), algorithm 2.

    Example:
        ``lion(1e-4, weight_decay=1.0)``: a learning rate of about a tenth of AdamW's, and ten times its weight decay
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    return optimizer("lion", LION, numbers, donate, _slot_storage("lion", state_dtype), seed)


@made_of_numbers
def adamw8bit(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.01,
    donate: bool = True,
) -> Optimizer:
    r"""`adamw` with its state in 8 bits; overwrites parameters and state unless `donate=False`.

    Every 256 elements of a parameter, in row-major order, form a block. A block has a scale, its largest magnitude;
    each element is the nearest 8-bit dynamic code: signed for means, unsigned for squares, of which none above 0 is
    rounded to 0, since steps divide by it. A step computes in float32 and rounds the new state, not the update. Blocks
    begin where the parameter begins, so results are the same on any number of ranks; one small all-reduce a step agrees
    on the scales of the few blocks that several ranks share.

    State: 2.03 bytes a parameter: under `codes`, uint8, and `scales`, float32, a tree for `mean` and one for
    `square`.

    Args:
        lr: as for `adamw`, like the arguments that follow.
        b1: decay of the mean of gradients.
        b2: decay of the mean of squared gradients.
        eps: keeps the divisor above 0.
        weight_decay: 0 or more, or a schedule or rule.
        donate: whether to overwrite parameters, gradients and state. If not, they stay unchanged. A derivative
            through one step is exact; one through the state of several steps raises NotImplementedError, as rounding
            has no derivative.

    Returns:
        An `Optimizer` for parameters of real floating-point dtypes.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range; `init` also for complex parameters.

    Sources: Dettmers et al., 8-bit optimizers via block-wise quantization (2022).

    Example:
        ``masked(adamw8bit(3e-4), lambda path, shape: "embed" not in path, adamw(3e-4))``
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    return optimizer("adamw8bit", ADAMW, numbers, donate, Coded())


@made_of_numbers
def lion8bit(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    weight_decay: Hyperparameter = 0.0,
    donate: bool = True,
) -> Optimizer:
    r"""`lion` with its state in 8 bits, as in `adamw8bit`; overwrites parameters and state unless `donate=False`.

    State: 1.02 bytes a parameter: under `codes`, uint8, and `scales`, float32, a tree for `mean`.

    Args:
        lr: as for `lion`, like the arguments that follow.
        b1: weight of the mean in the update.
        b2: decay of the mean of gradients.
        weight_decay: 0 or more, or a schedule or rule.
        donate: as for `adamw8bit`.

    Returns:
        An `Optimizer` for parameters of real floating-point dtypes.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range; `init` also for complex parameters.

    Sources: Chen et al., Symbolic discovery of optimization algorithms (2023); Dettmers et al. (2022).

    Example:
        ``lion8bit(1e-4, weight_decay=1.0)``
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    return optimizer("lion8bit", LION, numbers, donate, Coded())


@dataclass(frozen=True)
class Sophia(Optimizer):
    """An `Optimizer` that also takes estimates of the Hessian's diagonal.

    Attributes:
        estimate: `(params, diagonal, state) -> state`, before a step, every few steps. The diagonal is a tree like the
            parameters, with the layouts of a gradient. `state` is that of this optimizer: inside of `chain`, the last.
    """

    estimate: Callable[[Any, Any, Any], Any]


@made_of_numbers
def sophia(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.96,
    b2: Hyperparameter = 0.99,
    gamma: Hyperparameter = 0.01,
    eps: Hyperparameter = 1e-12,
    weight_decay: Hyperparameter = 0.0,
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
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        b1: :math:`\beta_1`, from 0 to below 1, a schedule or a rule: decay of the mean of gradients.
        b2: :math:`\beta_2`, from 0 to below 1, a schedule or a rule: decay of the mean of estimates.
        gamma: :math:`\gamma`, above 0, a schedule or a rule: the smaller, the more elements are clipped.
        eps: :math:`\epsilon`, 0 or more, a schedule or a rule: keeps the divisor above 0.
        weight_decay: :math:`\lambda`, 0 or more, or a schedule or rule.
        donate: whether to overwrite parameters, gradients and state. If not, they stay unchanged, and the step can
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
    moving = optimizer("sophia", SOPHIA, numbers, donate)
    noting = optimizer("sophia", ESTIMATE, numbers, donate)

    def estimate(params: Any, diagonal: Any, state: Any) -> Any:
        _, new = noting.step(params, diagonal, state)
        return new | {"step": state["step"]}

    return Sophia(moving.init, moving.step, estimate)
