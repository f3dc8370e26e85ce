"""Optimizers that treat every element alike: SGD, Adam, AdamW, Lion.

Such a rule does not care where a parameter ends, so it runs on flat shards as they are, with torch's fused kernels,
in place. With `donate=False` it is written out in differentiable arithmetic on new tensors instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import dynamo
from shardfn.optim.differentiable import tied, varied
from shardfn.optim.optimizer import Optimizer, Rule, of_rule
from shardfn.optim.ranges import at_step, check, check_rule
from shardfn.shards.pieces import Unit, dense, joined, pairs, runs, units, zeros_like

Number = float | Tensor
Schedule = Callable[[int], Any]


@dataclass(frozen=True)
class Elementwise:
    """A rule for elements.

    Attributes:
        slots: what it remembers of each element, zero at first.
        in_place: `(params, grads, slots, step, numbers)`, lists of tensors, which it overwrites.
        pure: `(param, grad, slots, step, numbers) -> (param, slots)`.
    """

    slots: tuple[str, ...]
    in_place: Callable[..., None]
    pure: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


def optimizer(name: str, rule: Elementwise, numbers: dict[str, Any], donate: bool) -> Optimizer:
    """An optimizer by a rule. A number may be a schedule, if it is the learning rate, or else a rule for parameters."""
    check(name, numbers | {"donate": donate}, numbers)
    constant = {name: value for name, value in numbers.items() if not callable(value)}
    varying = {name: value for name, value in numbers.items() if callable(value) and name != "lr"}

    def init(params: Any) -> Any:
        return {"step": 0, "numbers": dict(constant)} | {slot: zeros_like(params) for slot in rule.slots}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count = state["step"] + 1
        now = dict(state["numbers"])
        if callable(numbers["lr"]):
            now["lr"] = at_step(numbers["lr"], count)
        known = units(params)
        slots = [known.beside(state[slot]) for slot in rule.slots]
        work = [_Work(unit, grad, [slot[i] for slot in slots]) for i, (unit, grad) in enumerate(pairs(known, grads))]
        every = [(one, _spans(one.unit, varying)) for one in work if one.grad is not None]
        if donate:
            if torch.compiler.is_compiling():
                dynamo.refuse_in_graph(
                    f"{name}: donate=True overwrites parameters by fused kernels, which a graph of torch.compile "
                    f"cannot hold: pass donate=False to what is compiled"
                )
            _overwrite(rule, every, count, now)
            return params, state | {"step": count}
        for one, spans in every:
            _replace(rule, one, spans, count, now)
        made = known.like(one.values for one in work)
        return made, state | {"step": count} | {
            slot: known.like(one.slots[i] for one in work) for i, slot in enumerate(rule.slots)
        }

    return Optimizer(init, step)


class _Work:
    """One unit on its way through a step."""

    def __init__(self, unit: Unit, grad: Tensor | None, slots: list[Any]) -> None:
        self.unit, self.grad, self.slots, self.values = unit, grad, slots, unit.values


Span = tuple[tuple[tuple[str, Any], ...], int, int]


def _spans(unit: Unit, varying: dict[str, Rule]) -> list[Span]:
    """Stretches with the same numbers."""
    if not varying:
        return [((), 0, unit.values.numel())]
    found = runs(unit, lambda one: tuple((name, of_rule(rule, one)) for name, rule in varying.items()))
    for key, *_ in found:
        check_rule(unit.name, key)
    return found


def _overwrite(rule: Elementwise, work: list[tuple[_Work, list[Span]]], count: int, now: dict[str, Any]) -> None:
    groups: dict[Any, tuple[list[Tensor], list[Tensor], list[list[Tensor]]]] = {}
    moved: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for one, spans in work:
            for key, start, stop in spans:
                kind = (key, one.unit.values.dtype, one.unit.values.device)
                ps, gs, slots = groups.setdefault(kind, ([], [], [[] for _ in rule.slots]))
                whole = (start, stop) == (0, one.unit.values.numel())
                every = [_real(x if whole else x[start:stop]) for x in (one.unit.values, one.grad, *one.slots)]
                _refuse_dtypes(one)
                for into, x in zip((ps, gs, *slots), _in_order(every, moved), strict=True):
                    into.append(x)
        for (key, *_), (ps, gs, slots) in groups.items():
            rule.in_place(ps, gs, slots, count, now | dict(key))
            torch.autograd.graph.increment_version([*ps, *(x for slot in slots for x in slot)])  # fused kernels do not
        for x, made in moved:
            x.copy_(made)


def _in_order(every: list[Tensor], moved: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A parameter, its gradient and slots, all in one order in memory, in which fused kernels go through them.

    What lies in another order is copied, and but for the gradient to be copied back.
    """
    if all(x.is_contiguous() for x in every):
        return every
    p, _, *slots = every
    if all(x.stride() == p.stride() for x in every) and dense(p):
        return every
    found = [x.contiguous() for x in every]
    moved += [(x, made) for x, made in zip((p, *slots), (found[0], *found[2:]), strict=True) if x is not made]
    return found


def _refuse_dtypes(one: _Work) -> None:
    dtype = one.values.dtype
    for slot in one.slots:
        if slot.dtype != dtype:
            raise ValueError(
                f"{one.unit.name}: the parameter is {dtype}, but the state {slot.dtype}: cast both, or "
                f"make a new state by init(params)"
            )


def _replace(rule: Elementwise, one: _Work, spans: list[Span], count: int, now: dict[str, Any]) -> None:
    assert one.grad is not None
    now = {name: varied(number, one.unit) for name, number in now.items()}
    made: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    for key, start, stop in spans:
        whole = (start, stop) == (0, one.unit.values.numel())
        p, g, *slots = (_real(x if whole else x[start:stop]) for x in (one.unit.values, one.grad, *one.slots))
        own = {
            name: x[start:stop].view(-1, *(1,) * (p.ndim - 1)) if isinstance(x, Tensor) and x.ndim else x
            for name, x in now.items()
        }
        new, after = rule.pure(p, g, tuple(slots), count, own | dict(key))
        if one.unit.values.is_complex():
            new, after = torch.view_as_complex(new), tuple(map(torch.view_as_complex, after))
        made.append((new, after))
    where = [(start, stop) for _, start, stop in spans]
    inputs = [one.unit.values, one.grad, *one.slots, *(x for x in now.values() if isinstance(x, Tensor))]
    one.values = tied(joined([p for p, _ in made], one.unit, where), inputs)
    for i, old in enumerate(one.slots):
        stand = one.unit._replace(values=old)
        one.slots[i] = tied(joined([slots[i] for _, slots in made], stand, where), inputs)


def _real(x: Tensor) -> Tensor:
    """Complex numbers as pairs, each of which moves by itself."""
    return torch.view_as_real(x) if x.is_complex() else x


# --- the rules ---


def _sgd_in_place(ps: Any, gs: Any, slots: Any, step: int, n: dict[str, Any]) -> None:
    del step
    torch._fused_sgd_(
        ps,
        gs,
        slots[0] if slots else [],
        weight_decay=n["weight_decay"],
        momentum=n.get("momentum", 0.0),
        lr=n["lr"],
        dampening=0.0,
        nesterov=n.get("nesterov", False),
        maximize=False,
        is_first_step=False,
    )


def _sgd_pure(p: Tensor, g: Tensor, slots: Any, step: int, n: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    del step
    g = g + n["weight_decay"] * p
    if not slots:
        return p - n["lr"] * g, ()
    m = n["momentum"] * slots[0] + g
    return p - n["lr"] * (g + n["momentum"] * m if n["nesterov"] else m), (m,)


def _adam_in_place(kernel: Any) -> Callable[..., None]:
    def run(ps: list[Tensor], gs: list[Tensor], slots: Any, step: int, n: dict[str, Any]) -> None:
        # A number that is filled in; one that is copied from the host's memory would be waited for.
        steps = [torch.full((), float(step), dtype=torch.float32, device=ps[0].device)] * len(ps)
        kernel(
            ps,
            gs,
            *slots,
            [],
            steps,
            lr=n["lr"],
            beta1=n["b1"],
            beta2=n["b2"],
            weight_decay=n["weight_decay"],
            eps=n["eps"],
            amsgrad=False,
            maximize=False,
        )

    return run


def _adam_pure(decoupled: bool) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    def run(p: Tensor, g: Tensor, slots: Any, step: int, n: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
        lr, b1, b2 = n["lr"], n["b1"], n["b2"]
        if decoupled:
            p = p * (1 - lr * n["weight_decay"])
        else:
            g = g + n["weight_decay"] * p
        m = b1 * slots[0] + (1 - b1) * g
        v = b2 * slots[1] + (1 - b2) * g * g
        # The root of zero has no derivative; where v is zero, so is m, and nothing moves.
        root = torch.where(v > 0, v, 1).sqrt() * (v > 0) / math.sqrt(1 - b2**step)
        return p - lr / (1 - b1**step) * m / (root + n["eps"]), (m, v)

    return run


def _lion_in_place(ps: list[Tensor], gs: list[Tensor], slots: Any, step: int, n: dict[str, Any]) -> None:
    del step
    (ms,) = slots
    moves = torch._foreach_lerp(ms, gs, 1 - n["b1"])
    torch._foreach_sign_(moves)
    torch._foreach_mul_(ps, 1 - n["lr"] * n["weight_decay"])
    if isinstance(n["lr"], Tensor):  # which as alpha would be read by the host
        torch._foreach_mul_(moves, n["lr"])
        torch._foreach_sub_(ps, moves)
    else:
        torch._foreach_add_(ps, moves, alpha=-n["lr"])
    torch._foreach_lerp_(ms, gs, 1 - n["b2"])


def _lion_pure(p: Tensor, g: Tensor, slots: Any, step: int, n: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    del step
    (m,) = slots
    move = torch.sign(n["b1"] * m + (1 - n["b1"]) * g)
    return p * (1 - n["lr"] * n["weight_decay"]) - n["lr"] * move, (n["b2"] * m + (1 - n["b2"]) * g,)


# --- what users call ---


def sgd(
    lr: float | Tensor | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | Rule = 0.0,
    donate: bool = True,
) -> Optimizer:
    r"""Stochastic gradient descent; overwrites parameters and state unless `donate=False`.

    :math:`m \leftarrow \mu m + g`, :math:`p \leftarrow p - \eta m`, or with Nesterov's momentum
    :math:`p - \eta (g + \mu m)`; :math:`g` has :math:`\lambda p` added to it.

    State: one number a parameter with momentum, none without.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, or a function of the number of the step, which begins
            at 1.
        momentum: :math:`\mu`, from 0 to 1.
        nesterov: whether with Nesterov's momentum; this needs `momentum` above 0.
        weight_decay: :math:`\lambda`, 0 or more, or a rule `(path, shape) -> number`.
        donate: overwrite parameters, gradients and state. If not, they stay as they are, and the step can be
            differentiated.

    Returns:
        An `Optimizer` for parameters of any floating-point or complex dtype; its state is in theirs.

    Raises:
        TypeError, ValueError: an argument that is not a number, or out of its range.

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
    return optimizer("sgd", rule, numbers, donate)


def adam(
    lr: float | Tensor | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Rule = 0.0,
    donate: bool = True,
) -> Optimizer:
    r"""Adam; overwrites parameters and state unless `donate=False`.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) g^2`,
    :math:`p \leftarrow p - \eta \hat m / (\sqrt{\hat v} + \epsilon)`, where hats divide by :math:`1 - \beta^t`;
    :math:`g` has :math:`\lambda p` added to it.

    State: two numbers a parameter.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, or a function of the number of the step, which begins
            at 1.
        b1: :math:`\beta_1`, from 0 to below 1, or a rule; for the mean of gradients.
        b2: :math:`\beta_2`, from 0 to below 1, or a rule; for the mean of their squares.
        eps: :math:`\epsilon`, 0 or more, or a rule; keeps the divisor from 0.
        weight_decay: :math:`\lambda`, 0 or more, or a rule `(path, shape) -> number`.
        donate: overwrite parameters, gradients and state. If not, they stay as they are, and the step can be
            differentiated.

    Returns:
        An `Optimizer` for parameters of any floating-point or complex dtype; its state is in theirs.

    Raises:
        TypeError, ValueError: an argument that is not a number, or out of its range.

    Sources: Kingma and Ba, Adam: a method for stochastic optimization (2015), algorithm 1.

    Example:
        ``adam(warmup_cosine(3e-4, warmup=100, steps=10_000), b2=0.95)``
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    rule = Elementwise(("mean", "square"), _adam_in_place(torch._fused_adam_), _adam_pure(decoupled=False))
    return optimizer("adam", rule, numbers, donate)


def adamw(
    lr: float | Tensor | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Rule = 0.01,
    donate: bool = True,
) -> Optimizer:
    r"""Adam with decoupled weight decay; overwrites parameters and state unless `donate=False`.

    :math:`p \leftarrow (1 - \eta \lambda) p`, then the move of `adam` with :math:`\lambda = 0`.

    State: two numbers a parameter.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, or a function of the number of the step, which begins
            at 1.
        b1: :math:`\beta_1`, from 0 to below 1, or a rule; for the mean of gradients.
        b2: :math:`\beta_2`, from 0 to below 1, or a rule; for the mean of their squares.
        eps: :math:`\epsilon`, 0 or more, or a rule; keeps the divisor from 0.
        weight_decay: :math:`\lambda`, 0 or more, or a rule `(path, shape) -> number`.
        donate: overwrite parameters, gradients and state. If not, they stay as they are, and the step can be
            differentiated.

    Returns:
        An `Optimizer` for parameters of any floating-point or complex dtype; its state is in theirs.

    Raises:
        TypeError, ValueError: an argument that is not a number, or out of its range.

    Sources: Loshchilov and Hutter, Decoupled weight decay regularization (2019), algorithm 2.

    Example:
        ``adamw(3e-4, weight_decay=lambda path, shape: 0.1 if len(shape) > 1 else 0.0)``
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    rule = Elementwise(("mean", "square"), _adam_in_place(torch._fused_adamw_), _adam_pure(decoupled=True))
    return optimizer("adamw", rule, numbers, donate)


def lion(
    lr: float | Tensor | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float | Rule = 0.0,
    donate: bool = True,
) -> Optimizer:
    r"""Lion; overwrites parameters and state unless `donate=False`.

    :math:`p \leftarrow (1 - \eta \lambda) p - \eta\, \mathrm{sign}(\beta_1 m + (1 - \beta_1) g)`, then
    :math:`m \leftarrow \beta_2 m + (1 - \beta_2) g`.

    State: one number a parameter.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, or a function of the number of the step, which begins
            at 1.
        b1: :math:`\beta_1`, from 0 to below 1, or a rule; for the gradient's weight in a move.
        b2: :math:`\beta_2`, from 0 to below 1, or a rule; for the mean of gradients.
        weight_decay: :math:`\lambda`, 0 or more, or a rule `(path, shape) -> number`.
        donate: overwrite parameters, gradients and state. If not, they stay as they are, and the step can be
            differentiated.

    Returns:
        An `Optimizer` for parameters of any floating-point or complex dtype; its state is in theirs.

    Raises:
        TypeError, ValueError: an argument that is not a number, or out of its range.

    Sources: Chen et al., Symbolic discovery of optimization algorithms (2023), algorithm 2.

    Example:
        ``lion(1e-4, weight_decay=1.0)``: a learning rate of about a tenth of AdamW's, and ten times its weight decay
    """
    numbers = {"lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    return optimizer("lion", Elementwise(("mean",), _lion_in_place, _lion_pure), numbers, donate)
