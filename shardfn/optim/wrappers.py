"""Optimizers made of other optimizers: for some parameters, with averages, over several steps, only if finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.collectives.capturing import capturing, preparing
from shardfn.compat import dynamo
from shardfn.mesh.axes import device_of
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import mesh_of, scope
from shardfn.mesh.selectors import Which, chosen
from shardfn.optim.differentiable import differentiable, lerped, refuse_overwriting, share_memory
from shardfn.optim.hyperparameters import Rule, check, check_integer, is_rule
from shardfn.optim.norms import roots
from shardfn.optim.optimizer import Optimizer, must_be_optimizer
from shardfn.quoting import listed
from shardfn.shards.parts import refuse_parts
from shardfn.shards.pieces import Unit, Units, copied, is_unit, joined, pairs, slot, spread, stretches, units


def masked(optimizer: Optimizer, rule: Which, fallback: Optimizer | None = None) -> Optimizer:
    """Updates some parameters with one optimizer, the rest with another, or not at all.

    Args:
        optimizer: for the parameters that `rule` chooses.
        rule: which parameters: a regular expression that matches the whole path, such as `blocks.0.attn.q`, several of
            them, or a function of a parameter's path and whole shape.
        fallback: for the rest; None leaves them unchanged.

    Returns:
        An `Optimizer`; its state has those of both, under `"chosen"` and `"others"`.

    Raises:
        TypeError: an argument is not an optimizer, or the rule is of another type.
        ValueError: by `init`, for a pattern that matches nothing.

    Example:
        ``masked(muon(0.02), lambda path, shape: len(shape) == 2 and "embed" not in path, adamw(3e-4))``
    """
    return split("masked", optimizer, rule, fallback)


def split(name: str, optimizer: Optimizer, rule: Which, fallback: Optimizer | None) -> Optimizer:
    """As `masked`, with the caller's name for messages."""
    for opt in (optimizer, *([] if fallback is None else [fallback])):
        must_be_optimizer(name, opt)
    which = chosen(rule, f"{name}: the rule")
    parts = {"chosen": (True, optimizer)} | ({"others": (False, fallback)} if fallback else {})

    def init(params: Any) -> Any:
        leaves = units(params)
        names = [path for unit in leaves.each for _, path, _ in spread(unit)]
        if unused := which.unused(names):
            raise ValueError(
                f"{name}: no parameter has a path that as a whole matches {listed(map(repr, sorted(unused)))}; there "
                f"are {listed(names)}"
            )
        return {name: part.init(_part(leaves, _values(leaves), which, want)[0]) for name, (want, part) in parts.items()}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        leaves = units(params)
        gs: list[Any] = [grad for _, grad in pairs(leaves, grads)]
        changed: dict[int, list[tuple[int, int, Tensor]]] = {}
        state = dict(state)
        for name, (want, part) in parts.items():
            subtree, places = _part(leaves, _values(leaves), which, want)
            stepped, state[name] = part.step(subtree, _part(leaves, gs, which, want)[0], state[name])
            for key, spans in places.items():
                nodes = stepped[key] if isinstance(stepped[key], list) else [stepped[key]]
                for (i, start, stop), node in zip(spans, nodes, strict=True):
                    new = node.values if is_unit(node) else node
                    if start < stop or differentiable(new):
                        changed.setdefault(i, []).append((start, stop, new))
        values = _values(leaves)
        for i, pieces in changed.items():
            pieces.sort(key=lambda piece: piece[:2])
            if any(not share_memory(new, values[i]) for *_, new in pieces):  # else it was overwritten in place
                values[i] = joined([new for *_, new in pieces], leaves.each[i], [(a, b) for a, b, _ in pieces])
        return leaves.with_values(values), state

    return Optimizer(init, step)


def by_numbers(name: str, make: Callable[[dict[str, Any]], Optimizer], numbers: dict[str, Any]) -> Optimizer:
    """An optimizer for each set of numbers that rules return, or the one of `make` if there are no rules.

    Args:
        name: of the function, for messages.
        make: makes the optimizer for parameters that share all numbers but `lr` and `weight_decay`.
        numbers: hyperparameters by name.

    Returns:
        An `Optimizer`; with rules, its state is that of `masked` for the first set and all others.
    """
    check(name, numbers, numbers)
    rules = {key: x for key, x in numbers.items() if key not in ("lr", "weight_decay") and is_rule(key, x)}
    if not rules:
        return make(numbers)

    @functools.cache  # schedules are compared by identity, and a rule may make a new one each time
    def set_of(path: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(rule(path, shape) for rule in rules.values())

    @functools.lru_cache(maxsize=16)
    def combined(sets: tuple[tuple[Any, ...], ...]) -> Optimizer:
        constant = dict(zip(rules, sets[0], strict=True))
        check(name, constant, constant)
        first = make(numbers | constant)
        if len(sets) == 1:
            return first
        return split(name, first, lambda path, shape: set_of(path, shape) == sets[0], combined(sets[1:]))

    def optimizer_for(params: Any) -> Optimizer:
        trained = [unit for unit in units(params).each if unit.trainable]
        sets = dict.fromkeys(set_of(path, shape) for unit in trained for _, path, shape in spread(unit))
        return combined(tuple(sets)) if sets else make(numbers)

    return Optimizer(
        lambda params: optimizer_for(params).init(params),
        lambda params, grads, state: optimizer_for(params).step(params, grads, state),
    )


def _values(leaves: Units) -> list[Any]:
    return [unit.values for unit in leaves.each]


def _part(
    leaves: Units, values: Sequence[Any], rule: Rule, want: bool
) -> tuple[dict[str, Any], dict[str, list[tuple[int, int, int]]]]:
    """The parameters for which the rule returns `want`, and their places.

    Returns:
        A tree by stage, `@` and its path, or by a plain tensor's path; and for each node of it, the index of the unit
        that it comes from, and the range in that unit.
    """
    tree: dict[str, Any] = {}
    places: dict[str, list[tuple[int, int, int]]] = {}
    for i, (unit, x) in enumerate(zip(leaves.each, values, strict=True)):
        if not unit.trainable:
            continue
        if unit.layout is None:
            (segment,) = unit.segments
            if bool(rule(segment.path, segment.whole)) is want:
                tree[unit.name], places[unit.name] = x, [(i, 0, unit.values.numel())]
            continue
        chosen = [run[1:] for run in stretches(unit, lambda path, shape: bool(rule(path, shape))) if run[0] is want]
        if chosen:
            key = f"@{unit.name}"
            parts = [unit.part(*run, x if x is None else x.reshape(-1)[run[1] : run[2]]) for run in chosen]
            tree.setdefault(key, []).extend(parts)
            places.setdefault(key, []).extend((i, start, stop) for _, start, stop in chosen)
    return tree, places


def ema(optimizer: Optimizer, decay: float, *, donate: bool = True) -> Optimizer:
    r"""The optimizer with a moving average of its parameters in its state, overwritten unless `donate=False`.

    :math:`a \leftarrow d a + (1 - d) p`, an exponential average that starts at the initial parameters. It is under
    `"average"`, a tree like the parameters, which can be used in the same stages.

    State: one number a parameter more, in its dtype. A bfloat16 average stays where it is unless the parameter is
    farther away than :math:`|a| / (512 (1 - d))`: ``fp32_master_weights(ema(...))`` keeps float32 averages of 16-bit
    parameters.

    Args:
        optimizer: any optimizer.
        decay: :math:`d`, from 0 to 1.
        donate: whether to overwrite the average; if not, the step can be differentiated.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError, ValueError: `optimizer` is not an optimizer; the decay is out of its range.

    Sources: Polyak and Juditsky, Acceleration of stochastic approximation by averaging (1992).

    Example:
        ``opt = ema(adamw(3e-4), 0.999)``, and to evaluate ``model(state["average"], tokens)``
    """
    must_be_optimizer("ema", optimizer)
    check("ema", {"decay": decay, "donate": donate})

    def init(params: Any) -> Any:
        leaves = units(params)
        copies = [(copied(u) if donate else u.values.clone()) if u.trainable else u.values for u in leaves.each]
        return {"optimizer": optimizer.init(params), "decay": decay, "average": leaves.with_values(copies)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        params, inner = optimizer.step(params, grads, state["optimizer"])
        leaves = units(params)
        averages = leaves.values_in(state["average"])
        moving = [i for i, unit in enumerate(leaves.each) if unit.trainable]
        if not moving:
            return params, state | {"optimizer": inner}
        if donate:
            refuse_overwriting("ema", params, state)
        with torch.set_grad_enabled(not donate and torch.is_grad_enabled()):
            old = [averages[i] for i in moving]
            current = [leaves.each[i].values.to(average.dtype) for i, average in zip(moving, old, strict=True)]
            new = lerped(old, current, 1 - state["decay"], donate)
        for i, average in zip(moving, new, strict=True):
            averages[i] = average
        return params, state | {"optimizer": inner, "average": leaves.with_values(averages)}

    return Optimizer(init, step)


def multi_steps(optimizer: Optimizer, every: int, *, accumulator_dtype: torch.dtype | None = None) -> Optimizer:
    """The optimizer at every `every`-th step, with the sum of the gradients; parameters are unchanged in between.

    A parameter whose gradient is None in all of these steps is left out.

    Gradients are summed, not averaged: divide each loss by the size of the whole batch to
    get the whole batch's gradient. Where the micro-batches are available at once, `shardfn.accumulate` moves less.

    State: one number a parameter more.

    Args:
        optimizer: any optimizer, which gets the sum in the dtype of its parameters.
        every: steps, 1 or more.
        accumulator_dtype: dtype of the sums of real parameters; None for float32 where parameters have 16 bits, which
            lose small terms, and else for the parameter's dtype.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError, ValueError: `optimizer` is not an optimizer; `every` is not an integer of 1 or more;
            `accumulator_dtype` is not a real floating-point dtype.

    Example:
        ``multi_steps(adamw(3e-4), 8)``
    """
    must_be_optimizer("multi_steps", optimizer)
    check_integer("multi_steps", "every", every, 1)
    if accumulator_dtype is not None and not getattr(accumulator_dtype, "is_floating_point", False):
        raise TypeError(
            f"multi_steps: accumulator_dtype must be a real floating-point dtype, or None, got {accumulator_dtype!r}. "
            "Pass for example torch.float32"
        )

    def sum_of(unit: Unit) -> Tensor:
        param_dtype = unit.values.dtype
        dtype = accumulator_dtype or torch.promote_types(param_dtype, torch.float32)
        dtype = param_dtype if param_dtype.is_complex else dtype
        return slot(unit, dtype=None if dtype == param_dtype else dtype)

    def init(params: Any) -> Any:
        return {"optimizer": optimizer.init(params), "count": 0} | nothing(params)

    def nothing(params: Any) -> dict[str, Any]:
        leaves = units(params)
        paths = [path for unit in leaves.each if unit.trainable for path in _paths(unit)]
        sums = leaves.with_values(sum_of(unit) if unit.trainable else None for unit in leaves.each)
        return {"sum": sums, "given": dict.fromkeys(paths, 0)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        leaves = units(params)
        sums = leaves.values_in(state["sum"])
        sum_units = [unit if s is None else unit._replace(values=s) for unit, s in zip(leaves.each, sums, strict=True)]
        gradient_pairs = pairs(leaves._replace(each=sum_units), grads)  # in the dtype of the sums
        total = [s if g is None or s is None else s + g for s, (_, g) in zip(sums, gradient_pairs, strict=True)]
        received = state["given"] | {path: 1 for unit, g in gradient_pairs if g is not None for path in _paths(unit)}
        count = state["count"] + 1
        if count < every:
            return params, state | {"count": count, "sum": leaves.with_values(total), "given": received}
        # What got no gradient in any of the steps gets none, and not zeros: it stays, without weight decay.
        have_gradient = [unit.trainable and any(received[path] for path in _paths(unit)) for unit in leaves.each]
        grads = leaves.with_values(s if present else None for s, present in zip(total, have_gradient, strict=True))
        params, inner = optimizer.step(params, grads, state["optimizer"])
        return params, {"optimizer": inner, "count": 0} | nothing(params)

    return Optimizer(init, step)


def _paths(unit: Unit) -> list[str]:
    return [path for _, path, _ in spread(unit)]


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """The optimizer, which skips a step if a gradient on any rank is not finite: nothing changes then.

    The state counts skipped steps under `"skipped"`, a 0-d tensor. The host waits for the gradients at every step. In a
    compiled or graphed step it does not: there the optimizer runs in any case, and what it changes is kept or not.

    Args:
        optimizer: any optimizer.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError: `optimizer` is not an optimizer.

    Example:
        ``skip_nonfinite(chain(clip_by_global_norm(1.0), adamw(3e-4)))``
    """
    must_be_optimizer("skip_nonfinite", optimizer)

    def init(params: Any) -> Any:
        return {"optimizer": optimizer.init(params), "skipped": number(params, 0)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        dynamo.refuse_compiling("skip_nonfinite")
        params, inner, steps = step_if_finite(optimizer, params, grads, lambda: grads, state["optimizer"])
        skipped = counted(params, state["skipped"])
        if steps is not True:
            skipped = skipped + (1 if steps is False else ~steps)
        return params, state | {"optimizer": inner, "skipped": skipped}

    return Optimizer(init, step)


def number(params: Any, value: float) -> Tensor:
    """A counter of a state, as a 0-d tensor on the parameters' device."""
    device = next((unit.values.device for unit in units(params).each if unit.values is not None), torch.device("cpu"))
    dtype = torch.int64 if type(value) is int else torch.float64
    return torch.full((), value, dtype=dtype, device=device)  # not by a copy, which no graph may hold


def counted(params: Any, value: Tensor | float) -> Tensor:
    """Returns a state's counter as a tensor; a loaded state may have a plain number."""
    return value if isinstance(value, Tensor) else number(params, value)


def step_if_finite(
    optimizer: Optimizer, params: Any, grads: Any, passed: Callable[[], Any], state: Any
) -> tuple[Any, Any, bool | Tensor]:
    """The optimizer's step on passed gradients, if they are finite; and whether they are.

    In a program, and in calls before it is made, that is a 0-d tensor, and the host does not decide: so the step is
    made, and each tensor then gets what it was before, if they are not.
    """
    if capturing() is None and not preparing():
        decided = all_finite(grads)
        return (*(optimizer.step(params, passed(), state) if decided else (params, state)), decided)
    is_finite: Any = sum(_summed(grads), number(params, 0)) == 0
    frozen = {id(unit.values) for unit in units(params).each if not unit.trainable}
    leaves = optree.tree_leaves((params, state))
    copies = {id(x): x.clone() for x in leaves if isinstance(x, Tensor) and id(x) not in frozen}

    def selected(new: Any, old: Any) -> Any:
        if id(old) in frozen or (not isinstance(new, Tensor) and new == old):
            return new
        value = new if isinstance(new, Tensor) else number(params, new)
        chosen = torch.where(is_finite, value, copies.get(id(old), old))
        return new.copy_(chosen) if isinstance(old, Tensor) and share_memory(new, old) else chosen

    before = params, state
    with torch.no_grad():
        after = optimizer.step(params, passed(), state)
        if optree.tree_structure(after) == optree.tree_structure(before):
            return (*optree.tree_map(selected, after, before), is_finite)
        if capturing() is not None:
            raise RuntimeError(
                "skip_nonfinite, dynamic_loss_scale: the optimizer's state has other parts after the step than before "
                "it, as after a first one, so a program cannot keep what was there: make a step with finite gradients "
                "first"
            )
        if not is_finite:
            for x in leaves:
                if id(x) in copies:
                    x.copy_(copies[id(x)])
    return (*(after if is_finite else before), is_finite)


def all_finite(tree: Any) -> bool:
    """Whether all elements of a tree are finite on all ranks of its mesh. All ranks call it together.

    Args:
        tree: parameters, gradients or a tree of the same structure; integers, frozen parameters and None are left out.

    Returns:
        A bool, the same on every rank; the host waits for it.

    Example:
        ``assert all_finite(params), "training has diverged"``
    """
    return not any(flag.item() for flag in _summed(tree)) or bool(planned())  # the only wait of the host


def _summed(tree: Any) -> list[Tensor]:
    """Returns nonfinite flags of a tree's tensors, summed over all ranks; empty without tensors."""
    leaves = units(tree)
    refuse_parts("all_finite", leaves)
    kinds: dict[Any, list[Tensor]] = {}
    for unit in leaves.each:
        if unit.trainable and unit.values is not None and unit.values.numel():
            x = unit.values.detach()
            x = torch.view_as_real(x) if x.is_complex() else x
            kinds.setdefault((x.device, x.dtype), []).extend(_without_padding(unit, x))
    flags = [(~torch.stack(roots(tensors, math.inf)).isfinite()).any().float() for tensors in kinds.values() if tensors]
    for grid in dict.fromkeys(unit.layout.grid for unit in leaves.each if unit.layout):
        mesh = mesh_of(grid, "a tree")
        total = torch.zeros((), device=device_of(mesh))
        for flag in flags:
            total = total + flag.to(total.device, non_blocking=total.device.type != "cpu")
        with scope(mesh), torch.no_grad():
            flags = [functional.psum(total, tuple(name for name, _ in grid.sizes))]
    return flags


def _without_padding(unit: Unit, x: Tensor) -> list[Tensor]:
    """A unit's values in ranges between which there is no padding, which may hold anything, such as 0/0."""
    if unit.layout is None:
        return [x]
    ranges: list[list[int]] = []
    for segment in unit.filled:
        if ranges and ranges[-1][1] == segment.start:
            ranges[-1][1] = segment.stop
        else:
            ranges.append([segment.start, segment.stop])
    return [x[start:stop] for start, stop in ranges]
