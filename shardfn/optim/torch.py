"""Runs optimizers of torch, and others with the same interface, on the shards."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.mesh.planned import planned
from shardfn.optim.differentiable import refuse_overwriting
from shardfn.optim.guard import other_parameters
from shardfn.optim.hyperparameters import RuleAtStep, at_step, check, check_integer, constants, is_rule, kind
from shardfn.optim.optimizer import Optimizer
from shardfn.optim.state_offload import NOWHERE, on_whole
from shardfn.quoting import listed
from shardfn.shards.layout import Layout
from shardfn.shards.pieces import Unit, dense, is_unit, pairs, stretches, units


def from_torch(make: Callable[..., torch.optim.Optimizer], *, block: int = 1, **options: Any) -> Optimizer:
    """Makes an elementwise `torch.optim.Optimizer` class an `Optimizer` on the shards; its steps overwrite parameters.

    State: a pytree; for each leaf of the parameters, what the optimizer remembers of it, by name.

    Args:
        make: the optimizer's class, such as `torch.optim.RMSprop` or `bitsandbytes.optim.AdamW8bit`.
        block: a multiple of this many elements is passed as one tensor, and the rest of a shard as another: 256 for
            `torchao.optim.AdamW8bit`, which otherwise does not compress.
        **options: arguments of the class. Any number may be a function of the step, or a rule
            `(path, shape) -> number or function of the step`.

    Returns:
        An `Optimizer`; its steps cannot be differentiated.

    Raises:
        TypeError, ValueError: `make` is not an optimizer class; a block below 1; an optimizer that moves an element by
            other elements or by the parameter's dimensions, which a shard does not have, or that remembers something
            outside of its `state`, since each step makes a new one. By `init`: replicated parameters, if the optimizer
            draws random numbers, such as torchao's with `bf16_stochastic_round=True`; a strategy that keeps the state
            on the host or on disk, if `block` is above 1.

    Example:
        ``from_torch(torch.optim.RMSprop, lr=1e-3, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1))``
    """
    check_integer("from_torch", "block", block, 1)
    if not callable(make):
        raise TypeError(f"from_torch: make must be an optimizer's class, such as torch.optim.RMSprop, got {kind(make)}")
    if "lr" in options:
        check("from_torch", {"lr": options["lr"]})
    varying = [name for name, value in options.items() if is_rule(name, value)]
    name = getattr(make, "__name__", str(make))
    with _numbers_on_host():
        _refuse_coupled(name, make, options, block)
        draws = _draws(make, options, block)

    def init(params: Any) -> Any:
        leaves = units(params)
        for unit in leaves.each:
            if unit.layout and unit.trainable:
                _refuse_placed(name, unit, unit.layout, block, draws)
        return {"step": 0, "numbers": constants(options), "memory": {name: {} for name in _unit_names(leaves.each)}}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, leaves = state["step"] + 1, units(params)
        hparams = {name: at_step(name, value, count) for name, value in (options | state["numbers"]).items()}
        rules = {name: hparams.pop(name) for name in varying if callable(hparams[name])}
        groups: dict[Any, list[Tensor]] = {}
        work: list[tuple[Tensor, Unit, dict[str, Any], _ElementRange]] = []
        memory = {name: dict(known) for name, known in state["memory"].items()}
        copy_backs: list[tuple[Tensor, Tensor]] = []
        refuse_overwriting(name, params, grads, state, instead="take an optimizer of shardfn with donate=False")
        for key, (unit, grad) in zip(_unit_names(leaves.each), pairs(leaves, grads), strict=True):
            if grad is None:
                continue
            for stretch in _stretches(unit, rules, block):
                variable = _variable(unit.values, grad, stretch)
                if not (stretch.empty or dense(_range_of(unit.values, stretch.start, stretch.stop))):
                    copy_backs.append((unit.values, variable))
                groups.setdefault(stretch.options, []).append(variable)
                work.append((variable, unit, memory[key], stretch))
        if not groups:
            return params, state | {"step": count}
        defaults = hparams | dict(next(iter(groups)))  # a class may need an argument that all groups have
        optimizer = make([{"params": members, **dict(key)} for key, members in groups.items()], **defaults)
        for variable, unit, unit_memory, stretch in work:
            if stretch.name in unit_memory:
                slots = unit_memory[stretch.name].items()
                optimizer.state[variable] = {slot: _restored_slot(x, variable, unit, stretch) for slot, x in slots}
        with _numbers_on_host():
            optimizer.step()
        # Fused kernels do not increment versions, by which autograd and caches notice that a tensor has changed.
        torch.autograd.graph.increment_version([variable for variable, *_ in work])
        with torch.no_grad():
            for x, copy in copy_backs:
                x.copy_(copy)
        for variable, unit, unit_memory, stretch in work:
            unit_memory[stretch.name] = {
                name: unit.part(stretch.entries, stretch.start, stretch.stop, x[:0] if stretch.empty else x)
                if unit.layout and block == 1 and isinstance(x, Tensor) and x.shape == variable.shape
                else x
                for name, x in optimizer.state[variable].items()
            }
        return params, state | {"step": count, "memory": memory}

    return Optimizer(init, on_whole(step))


def _unit_names(members: Sequence[Unit]) -> list[str]:
    """The names of units; where a stage has several, the path of the first parameter of each."""
    counts = Counter(unit.name for unit in members)
    return [unit.name if counts[unit.name] == 1 else unit.path(unit.entries[0]) for unit in members]


def _numbers_on_host() -> Any:
    """A context that keeps the numbers in an optimizer's state on the host while planning."""
    return torch.device("cpu") if planned() else contextlib.nullcontext()


def comes_later(state: Any) -> bool:
    """Whether a state has a `from_torch` state whose memory the first step fills."""
    return any(map(_without_memory, optree.tree_leaves(state, is_leaf=_without_memory)))


def _without_memory(node: Any) -> bool:
    return type(node) is dict and set(node) == {"step", "numbers", "memory"} and not any(node["memory"].values())


def _variable(values: Tensor, grad: Tensor, stretch: _ElementRange) -> Tensor:
    """Returns a range of a unit with its gradient: a view, or a copy if it is not dense.

    For a range without elements it is two numbers, which are forgotten: CUDA starts no kernel for nothing, and what
    other libraries make of that is an error. (Of one, a state of one number would look like one of each element.)
    """
    if stretch.empty:
        variable = values.new_zeros(2).requires_grad_()
        variable.grad = values.new_zeros(2)
        return variable
    variable = _range_of(values, stretch.start, stretch.stop).detach()
    if not dense(variable):  # kernels may walk through memory in order, gaps included
        variable = variable.contiguous()
    variable.requires_grad_()
    g = _range_of(grad, stretch.start, stretch.stop).detach()
    same_strides = g.stride() == variable.stride()
    variable.grad = g if same_strides else torch.empty_like(variable, requires_grad=False).copy_(g)
    return variable


def _restored_slot(x: Any, variable: Tensor, unit: Unit, stretch: _ElementRange) -> Any:
    """Returns the remembered value of a range, as an optimizer takes it."""
    if not is_unit(x):
        return x
    if message := other_parameters(x.layout, unit.layout):
        raise ValueError(f"step: this state is of other parameters: its memory of {unit.name} {message}")
    return x.values.new_zeros(variable.shape) if stretch.empty else x.values


@dataclass(frozen=True)
class _ElementRange:
    """Elements `start` to `stop` of a unit, which an optimizer gets as one tensor."""

    options: Any
    entries: tuple[int, ...]
    start: int
    stop: int
    name: str

    @property
    def empty(self) -> bool:
        """Whether this rank has none of its elements."""
        return self.start == self.stop


def _stretches(unit: Unit, rules: dict[str, RuleAtStep], block: int) -> list[_ElementRange]:
    """Ranges with the same options, each split into whole blocks and a rest."""

    def options(path: str, shape: tuple[int, ...]) -> Any:
        # Where schedules decide, each parameter has its own range: what it remembers is found again at every step.
        separate = path if any(rule.scheduled(path, shape) for rule in rules.values()) else ""
        return tuple((name, rule(path, shape)) for name, rule in rules.items()), separate

    if unit.layout is None:
        (stretch,) = unit.segments
        runs: Any = [(options(stretch.path, stretch.whole), (), 0, unit.values.numel())]
    else:
        runs = stretches(unit, options)
    split = []
    for index, (key, entries, start, stop) in enumerate(runs):
        middle = start + (stop - start) // block * block if unit.layout else stop
        split.append(_ElementRange(key[0], entries, start, middle, str(index)))
        if unit.layout and block > 1:
            split.append(_ElementRange(key[0], entries, middle, stop, f"{index}, rest"))
    return split  # also those of which this rank has nothing, so that all ranks' states have one structure


def _range_of(x: Tensor, start: int, stop: int) -> Tensor:
    return x if (start, stop) == (0, x.numel()) else x[start:stop]


def _first_options(make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The options at the first step, for a parameter on the CPU; of rules only what the class needs, a small number."""
    needed = {name for name, x in inspect.signature(make).parameters.items() if x.default is inspect.Parameter.empty}
    plain = {name: at_step(name, value, 1) for name, value in options.items() if not is_rule(name, value)}
    plain |= dict.fromkeys((set(options) - set(plain)) & needed, 1e-3)
    plain.pop("capturable", None)  # what a step computes is the same, and torch refuses it on the CPU
    return dict(optree.tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, plain))


def _draws(make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], block: int) -> bool:
    """Whether steps draw random numbers, on parameters in float32 or bfloat16; found out by a step on the CPU."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.linspace(-1.0, 2.0, 8 * block, dtype=torch.float32, device="cpu").to(dtype).requires_grad_()
            x.grad = torch.ones_like(x)
            with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError):  # not for this dtype
                make([x], **_first_options(make, options)).step()
        return not torch.equal(before, torch.get_rng_state())


def _refuse_placed(name: str, unit: Unit, layout: Layout, block: int, draws: bool) -> None:
    """Raises ValueError for parameters whose replicas would diverge, or whose state could not be offloaded."""
    replicas, tier = layout.placement.replicas, layout.placement.tiers.state
    if draws and layout.grid.size(replicas) > 1:
        raise ValueError(
            f"from_torch: {name} draws random numbers, different ones on each rank, and {unit.name} is the same over "
            f"{listed(map(repr, replicas), separator=' and ')}: its copies would drift apart. Round by "
            f"stochastic_rounding(from_torch(...)), or use a strategy that shards the state there"
        )
    if block > 1 and tier != NOWHERE.state:  # a state in blocks has tensor subclasses, which tiers do not take
        raise ValueError(
            f"from_torch: with block={block} its state stays on the device, and the strategy keeps that of "
            f"{unit.name} on {'disk' if tier == 'disk' else 'the host'}. Use adamw8bit or lion8bit, or leave state= "
            f"out of the strategy's on()"
        )


def _refuse_coupled(name: str, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], block: int) -> None:
    """Raises ValueError unless an optimizer moves a matrix like its blocks in separate optimizers."""
    plain = _first_options(make, options)
    start = torch.linspace(-1.0, 2.0, 8 * block, dtype=torch.float32, device="cpu")
    halves = (start[: 3 * block], start[3 * block :])
    matrix = _three_steps(name, make, plain, [[start.view(4, -1)]])
    for split, reason in (  # from how torch runs it to how a step here does
        ([[start]], "how many dimensions its parameter has, and a shard is flat"),
        ([halves], "what its neighbors are, and a shard has not all of them"),
        ([[half] for half in halves], "what other elements are, and this rank has not all of them"),
    ):
        if not _same_result(matrix, _three_steps(name, make, plain, split)):
            raise ValueError(
                f"from_torch: {name} moves an element by {reason}. "
                "shardfn.optim has adafactor and muon, which know of shards"
            )
    if not _same_result(matrix, _three_steps(name, make, plain, [[half] for half in halves], recreate=True)):
        raise ValueError(
            f"from_torch: {name} remembers something outside of its `state`, as in `param_groups` or in an attribute: "
            f"it would be lost, as each step makes a new {name}. Write an Optimizer(init, step), whose state holds it"
        )


_Moved = tuple[Tensor, set[str]]


def _three_steps(
    name: str, make: Callable[..., torch.optim.Optimizer], plain: dict[str, Any], split: Any, recreate: bool = False
) -> _Moved:
    """Three steps of an optimizer for each list of tensors: where all elements are then, and the groups' options."""
    variable_lists = [[x.clone().requires_grad_() for x in parts] for parts in split]
    slopes = [[x.detach() ** 3 + 1 for x in parts] for parts in variable_lists]
    try:
        optimizers = [make(variables, **plain) for variables in variable_lists]
    except ValueError as error:
        if variable_lists[0][0].ndim > 1:  # of the options
            raise
        raise ValueError(f"from_torch: {name} takes no vectors, and a shard is one: {error}") from error
    for factor in (1.0, 3.0, 1000.0):
        for index, variables in enumerate(variable_lists):
            if recreate:
                optimizers[index], before = make(variables, **plain), optimizers[index]
                optimizers[index].state.update(before.state)
            for x, slope in zip(variables, slopes[index], strict=True):
                x.grad = factor * slope
            try:
                optimizers[index].step()
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                raise ValueError(f"from_torch: {name} does not step on vectors: {error}") from error
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    group_options = {str([(option, x) for option, x in group.items() if option != "params"]) for group in groups}
    return torch.cat([x.detach().flatten() for variables in variable_lists for x in variables]), group_options


def _same_result(first: _Moved, second: _Moved) -> bool:
    return first[1] == second[1] and torch.allclose(first[0], second[0], rtol=1e-5, atol=1e-7)
