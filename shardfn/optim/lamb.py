"""LAMB on flat shards: Adam's steps, each scaled by norms of its parameter, whose pieces lie on several ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import dispatch, functorch
from shardfn.optim.differentiable import filled, lerped, numbered, refuse_overwriting, shared_values
from shardfn.optim.hyperparameters import Hyperparameter, begun, check, constants, made_of_numbers
from shardfn.optim.norms import squares
from shardfn.optim.optimizer import Optimizer, of_rule
from shardfn.optim.state_offload import on_whole
from shardfn.optim.step_counts import count_spans, missed_after
from shardfn.optim.wrappers import by_numbers
from shardfn.shards.parts import refuse_parts
from shardfn.shards.pieces import Unit, Units, joined, pairs, refuse_complex, units, zeros_like


@made_of_numbers
def lamb(
    lr: Hyperparameter | Tensor,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-6,
    min_trust_ratio: Hyperparameter = 0.0,
    max_trust_ratio: Hyperparameter | None = None,
    weight_decay: Hyperparameter = 0.0,
    donate: bool = True,
) -> Optimizer:
    r"""LAMB, for large batches; overwrites parameters and state unless `donate=False`.

    With the means :math:`\hat m` and :math:`\hat v` of Adam and :math:`u = \hat m / (\sqrt{\hat v} + \epsilon) +
    \lambda p`, the step is :math:`p \leftarrow p - \eta\, u\, \|p\| / \|u\|`, with norms of one parameter on all ranks.
    The quotient is clamped, or 1 where one of the norms is 0.

    State: two numbers a parameter.

    Args:
        lr: :math:`\eta`: a number, a 0-d floating-point tensor, a schedule or a rule.
        b1: :math:`\beta_1`, from 0 to below 1: decay of the mean of gradients.
        b2: :math:`\beta_2`, from 0 to below 1: decay of the mean of squared gradients.
        eps: :math:`\epsilon`, 0 or more.
        min_trust_ratio: lower bound of the quotient, 0 or more; DeepSpeed has 0.01.
        max_trust_ratio: upper bound of the quotient, at least `min_trust_ratio`; None for no bound. DeepSpeed has 10.
        weight_decay: :math:`\lambda`, 0 or more.
        donate: as for `sgd`.

    Each number may also be a schedule or a rule; the state then has a part for each set of numbers that rules return.

    Returns:
        An `Optimizer` for parameters of real floating-point dtypes.

    Raises:
        TypeError, ValueError: an argument is not a number, or out of its range; `init` also for complex parameters.

    Source: You et al., Large batch optimization for deep learning: training BERT in 76 minutes (2019), algorithm 2.

    Example:
        ``lamb(warmup_cosine(2e-3, warmup=500, steps=10_000), weight_decay=0.01)``
    """
    numbers = {
        "lr": lr,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "min_trust_ratio": min_trust_ratio,
        "weight_decay": weight_decay,
    }
    numbers |= {} if max_trust_ratio is None else {"max_trust_ratio": max_trust_ratio}
    check("lamb", {"donate": donate})
    return by_numbers("lamb", lambda numbers: _optimizer(numbers, donate), numbers)


def _optimizer(numbers: dict[str, Any], donate: bool) -> Optimizer:
    minimum, maximum = numbers["min_trust_ratio"], numbers.get("max_trust_ratio", math.inf)
    if not (callable(minimum) or callable(maximum)) and maximum < minimum:
        raise ValueError(
            f"lamb: max_trust_ratio={maximum!r} is below min_trust_ratio={minimum!r}. Pass a max_trust_ratio of "
            f"{minimum!r} or more"
        )

    def init(params: Any) -> Any:
        leaves = units(params)
        refuse_complex(leaves, "lamb")
        refuse_parts("lamb", leaves)
        moments = {name: zeros_like(params) for name in ("mean", "square")}
        return {"step": 0, "numbers": constants(numbers), "missed": {}, **moments}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, hparams = begun(numbers, state)
        leaves = units(params)
        refuse_parts("lamb", leaves)
        rows = pairs(leaves, grads)
        gs = [grad for _, grad in rows]
        counts = {"step": count, "missed": missed_after(state["missed"], rows)}
        if donate:
            refuse_overwriting("lamb", params, grads, state)
            if not (dispatch.in_graph() or functorch.inside_transform()):  # which have no rules for lists
                _overwrite(leaves, gs, [leaves.values_in(state[name]) for name in ("mean", "square")], hparams, counts)
                return params, state | counts
        with torch.set_grad_enabled(not donate and torch.is_grad_enabled()):
            slots = {name: leaves.values_in(state[name]) for name in ("mean", "square")}
            moving = [unit._replace(trainable=g is not None) for unit, g in zip(leaves.each, gs, strict=True)]
            for i, g in enumerate(gs):
                if g is not None:
                    for name, target, decay in (("mean", g, "b1"), ("square", g * g, "b2")):
                        slots[name][i] = lerped([slots[name][i]], [target], 1 - hparams[decay], donate)[0]
                    moments = slots["mean"][i], slots["square"][i]
                    moving[i] = moving[i]._replace(values=_direction(leaves.each[i], *moments, hparams, counts))
            quotients = _quotients(
                squares(leaves),
                squares(Units(moving, leaves.tree)),
                hparams["min_trust_ratio"],
                hparams.get("max_trust_ratio"),
            )
            values = [unit.values for unit in leaves.each]
            for i, move in enumerate(moving):
                if move.trainable:
                    new = _lamb_values(leaves.each[i], move.values, quotients, hparams["lr"])
                    values[i] = values[i].copy_(new) if donate else new
        new_state = state if donate else state | {name: leaves.with_values(slot) for name, slot in slots.items()}
        return params if donate else leaves.with_values(values), new_state | counts

    return Optimizer(init, on_whole(step))


@torch.no_grad()
def _overwrite(
    leaves: Units, gs: list[Tensor | None], slots: list[list[Any]], hparams: dict[str, Any], counts: dict[str, Any]
) -> None:
    """Overwrites parameters and moments: the same step by few kernels, however many parameters a stage has."""
    moving: list[Unit] = []
    ps, ms, paths = list[Tensor](), list[Tensor](), list[str]()
    copies: list[tuple[Tensor, Tensor]] = []
    for unit, g, mean, square in zip(leaves.each, gs, *slots, strict=True):
        if g is None:
            moving.append(unit._replace(trainable=False))
            continue
        mean.lerp_(g, 1 - hparams["b1"])
        square.lerp_(g * g, 1 - hparams["b2"])
        flat, moves = unit.values.reshape(-1), _adams(unit, mean, square, hparams, counts).reshape(-1)
        param_views, move_views = ([x[s.start : s.stop] for s in unit.filled] for x in (flat, moves))
        decays = [of_rule(hparams["weight_decay"], s) for s in unit.filled]
        for decay in sorted({*decays} - {0}):
            indices = [k for k, other in enumerate(decays) if other == decay]
            torch._foreach_add_([move_views[k] for k in indices], [param_views[k] for k in indices], alpha=decay)
        moving.append(unit._replace(values=moves))
        ps, ms, paths = ps + param_views, ms + move_views, paths + [s.path for s in unit.filled]
        if not unit.values.is_contiguous():
            copies.append((unit.values, flat.view(unit.values.shape)))
    quotients = _quotients(
        squares(leaves), squares(Units(moving, leaves.tree)), hparams["min_trust_ratio"], hparams.get("max_trust_ratio")
    )
    if paths:
        rates = hparams["lr"]
        if callable(rates):
            by_path = {path: rate for unit in moving for path, rate in numbered(rates, unit)[0].items()}
            rates = [by_path[path] for path in paths]
        torch._foreach_mul_(ms, torch._foreach_mul([quotients[path] for path in paths], rates))
        torch._foreach_sub_(ps, ms)
    for dst, new in copies:
        dst.copy_(new)


def _adams(unit: Unit, mean: Tensor, square: Tensor, hparams: dict[str, Any], counts: dict[str, Any]) -> Tensor:
    """Adam's step of a unit for a rate of 1, the other way."""
    spans = count_spans(unit, counts["step"], counts["missed"])
    if len(spans) == 1:
        return _adams_after(mean, square, hparams, spans[0][0])
    parts = [_adams_after(mean[start:stop], square[start:stop], hparams, count) for count, start, stop in spans]
    return joined(parts, unit._replace(values=mean), [(start, stop) for _, start, stop in spans])


def _adams_after(mean: Tensor, square: Tensor, hparams: dict[str, Any], count: Any) -> Tensor:
    count = count.double() if isinstance(count, Tensor) else count
    # The root of zero has no derivative; where a square is zero, so is the mean, and nothing moves.
    root = torch.where(square > 0, square, 1).sqrt() * (square > 0) / (1 - hparams["b2"] ** count) ** 0.5
    return (mean / (1 - hparams["b1"] ** count) / (root + hparams["eps"])).to(mean.dtype)


def _direction(unit: Unit, mean: Tensor, square: Tensor, hparams: dict[str, Any], counts: dict[str, Any]) -> Tensor:
    """Adam's step, and the weight decay."""
    adams = _adams(unit, mean, square, hparams, counts)
    flat, moves = unit.values.reshape(-1), adams.reshape(-1)
    parts = [
        moves[s.start : s.stop] + of_rule(hparams["weight_decay"], s) * flat[s.start : s.stop] for s in unit.filled
    ]
    return filled(adams, unit, parts, [adams])


def _quotients(
    of_params: dict[str, Tensor], of_moves: dict[str, Tensor], minimum: float, maximum: float | None
) -> dict[str, Tensor]:
    """The norm of each parameter over that of its move, given their squares; 1 where one of them is 0."""
    groups: dict[Any, list[str]] = {}
    for path, squared in of_moves.items():
        groups.setdefault((squared.dtype, squared.device), []).append(path)
    quotients: dict[str, Tensor] = {}
    for paths in groups.values():
        param_squares, move_squares = (torch.stack([sums[path] for path in paths]) for sums in (of_params, of_moves))
        both = (param_squares > 0) & (move_squares > 0)
        ratios = torch.where(
            both,
            (torch.where(both, param_squares, 1) / torch.where(both, move_squares, 1)).sqrt().clamp(minimum, maximum),
            1,
        )
        quotients |= dict(zip(paths, ratios.unbind(), strict=True))
    return quotients


def _lamb_values(unit: Unit, move: Tensor, quotients: dict[str, Tensor], lr: Any) -> Tensor:
    """Returns a unit's values after the step; each parameter has its own rate."""
    (shared, ties), (rates, lr_ties) = shared_values(quotients, unit), numbered(lr, unit)
    flat, moves = unit.values.reshape(-1), move.reshape(-1)
    parts = [
        flat[s.start : s.stop] - (rates[s.path] * shared[s.path]).to(flat.dtype) * moves[s.start : s.stop]
        for s in unit.filled
    ]
    return filled(unit.values, unit, parts, [move, *ties, *lr_ties])
