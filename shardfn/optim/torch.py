"""Optimizers of torch, and others made like them, on the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.optim.hyperparameters import at_step, check, constants, kind, whole
from shardfn.optim.optimizer import Optimizer
from shardfn.optim.state_offload import NOWHERE, on_whole
from shardfn.quoting import listed
from shardfn.shards.layout import Layout
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
            one parameter together, for which a shard is not enough; by `init`, parameters that several ranks hold, for
            an optimizer that draws random numbers, such as torchao's with `bf16_stochastic_round=True`, or whose state
            is kept on the host or on disk, for blocks of more than 1.

    Example:
        ``from_torch(torch.optim.RMSprop, lr=1e-3, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1))``
    """
    whole("from_torch", "block", block, 1)
    if not callable(make):
        raise TypeError(f"from_torch takes an optimizer's class, such as torch.optim.RMSprop, not {kind(make)}")
    if "lr" in options:
        check("from_torch", {"lr": options["lr"]})
    name = getattr(make, "__name__", str(make))
    _refuse_coupled(name, make, options, block)
    draws = _draws(make, options, block)
    rules = {name: value for name, value in options.items() if callable(value) and name != "lr"}

    def init(params: Any) -> Any:
        known = units(params)
        for unit in known.each:
            if unit.layout and unit.trainable:
                _refuse_placed(name, unit, unit.layout, block, draws)
        memory: list[dict[str, Any]] = [{} for _ in known.each]
        return {"step": 0, "numbers": constants(options), "memory": memory}

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
                variable = _variable(unit.values, grad, one)
                if not dense(_cut(unit.values, one.start, one.stop)):
                    moved.append((unit.values, variable))
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
                if unit.layout and block == 1 and isinstance(x, Tensor) and x.shape == variable.shape
                else x
                for name, x in optimizer.state[variable].items()
            }
        return params, state | {"step": count, "memory": memory}

    return Optimizer(init, on_whole(step))


def comes_later(state: Any) -> bool:
    """Whether a state, or one inside of it, is this module's, to which the first step adds what torch's remember."""
    found = optree.tree_leaves(state, is_leaf=_without_memory)
    return any(map(_without_memory, found))


def _without_memory(node: Any) -> bool:
    return type(node) is dict and set(node) == {"step", "numbers", "memory"} and not any(node["memory"])


def _variable(values: Tensor, grad: Tensor, stretch: _Stretch) -> Tensor:
    """A stretch of a unit with its gradient, as an optimizer takes it: one memory, or a copy where it is not dense."""
    variable = _cut(values, stretch.start, stretch.stop).detach()
    if not dense(variable):  # kernels may go through memory in order
        variable = variable.contiguous()
    variable.requires_grad_()
    own = _cut(grad, stretch.start, stretch.stop).detach()
    same = own.stride() == variable.stride()
    variable.grad = own if same else torch.empty_like(variable, requires_grad=False).copy_(own)
    return variable


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


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """The options for a parameter of which no rule says anything, at the first step."""
    return constants(options) | ({"lr": at_step(options["lr"], 1)} if callable(options.get("lr")) else {})


def _draws(make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], block: int) -> bool:
    """Whether steps draw random numbers, on parameters in float32 or bfloat16."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.linspace(-1.0, 2.0, 8 * block, dtype=torch.float32, device="cpu").to(dtype).requires_grad_()
            x.grad = torch.ones_like(x)
            with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError):  # not for this dtype
                make([x], **_plain(options)).step()
        return not torch.equal(before, torch.get_rng_state())


def _refuse_placed(name: str, unit: Unit, layout: Layout, block: int, draws: bool) -> None:
    """Raises ValueError for parameters whose copies would drift apart, or whose state could not leave the device."""
    replicas, tier = layout.placement.replicas, layout.placement.tiers.state
    if draws and layout.grid.size(replicas) > 1:
        raise ValueError(
            f"from_torch: {name} draws random numbers, which are others on each rank, and {unit.name} is the same over "
            f"{listed(map(repr, replicas), separator=' and ')}: its copies would drift apart. Round by "
            f"stochastic_rounding(from_torch(...)), or take a strategy that cuts the state there"
        )
    if block > 1 and tier != NOWHERE.state:  # a state in blocks is not made of plain tensors
        raise ValueError(
            f"from_torch: with block={block} its state stays on the device, and the strategy keeps that of "
            f"{unit.name} on {'disk' if tier == 'disk' else 'the host'}: take adamw8bit or lion8bit, which can, or "
            f"leave state= out of the strategy's on()"
        )


def _refuse_coupled(name: str, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], block: int) -> None:
    """Raises ValueError unless a vector is trained as its parts are, which are whole blocks."""
    plain = _plain(options)
    start = torch.linspace(-1.0, 2.0, 8 * block, dtype=torch.float32, device="cpu")
    found = []
    for parts in ([start.clone()], [start[: 3 * block].clone(), start[3 * block :].clone()]):
        variables = [x.requires_grad_() for x in parts]
        optimizer = make(variables, **plain)
        for factor in (1.0, 3.0):
            for x in variables:
                x.grad = factor * (x.detach() ** 3 + 1)
            try:
                optimizer.step()
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                raise ValueError(f"from_torch: {name} does not step on vectors: {error}") from error
        found.append(torch.cat([x.detach() for x in variables]))
    whole, halves = found
    if not torch.allclose(whole, halves, rtol=1e-5, atol=1e-7):
        raise ValueError(
            f"from_torch: {name} moves an element by what its neighbours are, and a shard has not all of them. "
            f"shardfn.optim has adafactor and muon, which know of shards"
        )
