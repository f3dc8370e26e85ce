"""Optimizers of torch, and others made like them, on the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.optim.core import Optimizer, Unit, at_step, is_unit, pairs, runs, units


def from_torch(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Optimizer:
    """An elementwise optimizer in torch's manner, as an `Optimizer` on the shards.

    Its state is a pytree: for each leaf of the parameters what the optimizer remembers of it, by name. Parameters are
    overwritten.

    Args:
        make: its class, such as `torch.optim.RMSprop` or `bitsandbytes.optim.AdamW8bit`.
        **options: what the class takes. `lr` may be a function of the step, any other number a rule
            `(path, shape) -> number`.

    Raises:
        ValueError: an optimizer that treats elements of one parameter together, for which a shard is not enough.

    Example:
        ``from_torch(torch.optim.RMSprop, lr=1e-3, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1))``
    """
    _refuse_coupled(make, options)
    rules = {name: value for name, value in options.items() if callable(value) and name != "lr"}
    constant = {name: value for name, value in options.items() if not callable(value)}

    def init(params: Any) -> Any:
        known = units(params)
        memory: list[dict[str, Any]] = [{} for _ in known.each]
        return {"step": 0, "numbers": constant, "memory": memory}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, known = state["step"] + 1, units(params)
        now = dict(state["numbers"])
        if callable(options.get("lr")):
            now["lr"] = at_step(options["lr"], count)
        groups: dict[Any, list[Tensor]] = {}
        stretches: list[tuple[Tensor, Unit, dict[str, Any], tuple[Any, int, int]]] = []
        memory = [dict(one) for one in state["memory"]]
        for i, (unit, grad) in enumerate(pairs(known, grads)):
            if grad is None:
                continue
            for span in _spans(unit, rules):
                key, start, stop = span
                variable = _cut(unit.values, start, stop).detach().requires_grad_()
                variable.grad = _cut(grad, start, stop).detach()
                groups.setdefault(key, []).append(variable)
                stretches.append((variable, unit, memory[i], span))
        if not groups:
            return params, state | {"step": count}
        optimizer = make([{"params": members, **dict(key)} for key, members in groups.items()], **now)
        for variable, _, known_of, (_, start, stop) in stretches:
            if f"{start}:{stop}" in known_of:
                kept = known_of[f"{start}:{stop}"]
                optimizer.state[variable] = {name: x.values if is_unit(x) else x for name, x in kept.items()}
        optimizer.step()
        for variable, unit, known_of, (key, start, stop) in stretches:
            entries = tuple(n for n in unit.entries if _key(rules, *_named(unit, n)) == key)
            known_of[f"{start}:{stop}"] = {
                name: unit.part(entries, start, stop, x, whole=False)
                if unit.layout and isinstance(x, Tensor) and x.shape == variable.shape
                else x
                for name, x in optimizer.state[variable].items()
            }
        return params, state | {"step": count, "memory": memory}

    return Optimizer(init, step)


def _spans(unit: Unit, rules: dict[str, Any]) -> list[tuple[Any, int, int]]:
    return runs(unit, lambda one: _key(rules, one.path, one.whole))


def _key(rules: dict[str, Any], path: str, whole: tuple[int, ...]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, rule(path, whole)) for name, rule in rules.items())


def _named(unit: Unit, number: int) -> tuple[str, tuple[int, ...]]:
    assert unit.layout is not None, "only a flat shard has numbers"
    return unit.layout.entries[number].path, unit.layout.whole_shape(number)


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
