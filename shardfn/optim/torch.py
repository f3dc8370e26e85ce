"""Optimizers of torch, and others made like them, on the shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.optim.optimizer import Optimizer
from shardfn.optim.ranges import at_step, check, kind, whole
from shardfn.shards.pieces import Unit, dense, is_unit, pairs, stretches, units


def from_torch(make: Callable[..., torch.optim.Optimizer], *, block: int = 1, **options: Any) -> Optimizer:
    """An elementwise optimizer of torch's kind, as an `Optimizer` on the shards; its steps overwrite parameters.

    State: a pytree, for each leaf of the parameters what the optimizer remembers of it, by name.

    Args:
        make: its class, such as `torch.optim.RMSprop` or `bitsandbytes.optim.AdamW8bit`.
        block: stretches of so many elements are handed over together, and what remains of a shard by itself: 256 for
            `torchao.optim.AdamW8bit`, which otherwise does not compress.
        **options: what the class takes. `lr` may be a function of the step, any other number a rule
            `(path, shape) -> number`.

    Returns:
        An `Optimizer`; its steps cannot be differentiated.

    Raises:
        TypeError, ValueError: not a class of optimizers; a block of less than 1; an optimizer that treats elements of
            one parameter together, for which a shard is not enough.

    Example:
        ``from_torch(torch.optim.RMSprop, lr=1e-3, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1))``
    """
    whole("from_torch", "block", block, 1)
    if not callable(make):
        raise TypeError(f"from_torch takes an optimizer's class, such as torch.optim.RMSprop, not {kind(make)}")
    if "lr" in options:
        check("from_torch", {"lr": options["lr"]})
    _refuse_coupled(make, options)
    rules = {name: value for name, value in options.items() if callable(value) and name != "lr"}
    constant = {name: value for name, value in options.items() if not callable(value)}

    def init(params: Any) -> Any:
        memory: list[dict[str, Any]] = [{} for _ in units(params).each]
        return {"step": 0, "numbers": dict(constant), "memory": memory}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, known = state["step"] + 1, units(params)
        now = dict(state["numbers"])
        if callable(options.get("lr")):
            now["lr"] = at_step(options["lr"], count)
        groups: dict[Any, list[Tensor]] = {}
        work: list[tuple[Tensor, Unit, dict[str, Any], _Stretch]] = []
        memory = [*map(dict, state["memory"])]
        moved: list[tuple[Tensor, Tensor]] = []
        for i, (unit, grad) in enumerate(pairs(known, grads)):
            if grad is None:
                continue
            for one in _stretches(unit, rules, block):
                variable = _cut(unit.values, one.start, one.stop).detach()
                if not dense(variable):  # kernels may go through memory in order
                    variable = variable.contiguous()
                    moved.append((unit.values, variable))
                variable.requires_grad_()
                own = _cut(grad, one.start, one.stop).detach()
                same = own.stride() == variable.stride()
                variable.grad = own if same else torch.empty_like(variable, requires_grad=False).copy_(own)
                groups.setdefault(one.options, []).append(variable)
                work.append((variable, unit, memory[i], one))
        if not groups:
            return params, state | {"step": count}
        optimizer = make([{"params": members, **dict(key)} for key, members in groups.items()], **now)
        for variable, _, known_of, one in work:
            if one.name in known_of:
                kept = known_of[one.name]
                optimizer.state[variable] = {name: x.values if is_unit(x) else x for name, x in kept.items()}
        optimizer.step()
        torch.autograd.graph.increment_version([variable for variable, *_ in work])  # fused kernels do not
        with torch.no_grad():
            for x, made in moved:
                x.copy_(made)
        for variable, unit, known_of, one in work:
            known_of[one.name] = {
                name: unit.part(one.entries, one.start, one.stop, x)
                if unit.layout and isinstance(x, Tensor) and x.shape == variable.shape
                else x
                for name, x in optimizer.state[variable].items()
            }
        return params, state | {"step": count, "memory": memory}

    return Optimizer(init, step)


@dataclass(frozen=True)
class _Stretch:
    """Elements `start` to `stop` of a unit, which an optimizer gets as one tensor."""

    options: Any
    entries: tuple[int, ...]
    start: int
    stop: int
    name: str


def _stretches(unit: Unit, rules: dict[str, Any], block: int) -> list[_Stretch]:
    """Those with the same options, each in whole blocks and a rest."""

    def options(path: str, whole: tuple[int, ...]) -> Any:
        return tuple((name, rule(path, whole)) for name, rule in rules.items())

    if unit.layout is None:
        (one,) = unit.segments
        runs: Any = [(options(one.path, one.whole), (), 0, unit.values.numel())]
    else:
        runs = stretches(unit, options)
    found = []
    for number, (key, entries, start, stop) in enumerate(runs):
        middle = start + (stop - start) // block * block if unit.layout else stop
        found.append(_Stretch(key, entries, start, middle, str(number)))
        found.append(_Stretch(key, entries, middle, stop, f"{number}, rest"))
    return [one for one in found if one.start < one.stop]


def _cut(x: Tensor, start: int, stop: int) -> Tensor:
    return x if (start, stop) == (0, x.numel()) else x[start:stop]


def _refuse_coupled(make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Raises ValueError unless a vector is trained as its halves are."""
    plain = {name: value for name, value in options.items() if not callable(value)}
    if callable(options.get("lr")):
        plain["lr"] = at_step(options["lr"], 1)
    start = torch.linspace(-1.0, 2.0, 8)
    found = []
    for parts in ([start.clone()], [start[:3].clone(), start[3:].clone()]):
        variables = [x.requires_grad_() for x in parts]
        optimizer = make(variables, **plain)
        for factor in (1.0, 3.0):
            for x in variables:
                x.grad = factor * (x.detach() ** 3 + 1)
            try:
                optimizer.step()
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                name = getattr(make, "__name__", str(make))
                raise ValueError(f"from_torch: {name} does not step on vectors: {error}") from error
        found.append(torch.cat([x.detach() for x in variables]))
    whole, halves = found
    if not torch.allclose(whole, halves, rtol=1e-5, atol=1e-7):
        name = getattr(make, "__name__", str(make))
        raise ValueError(
            f"from_torch: {name} moves an element by what its neighbours are, and a shard has not all of them. "
            f"shardfn.optim has adafactor and muon, which know of shards"
        )
