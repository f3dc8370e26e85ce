"""Optimizers made of optimizers: for some of the parameters, with averages, over several steps, or only when finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.compat import autograd
from shardfn.mesh.scope import mesh_of, scope
from shardfn.mesh.selectors import Which, chosen
from shardfn.optim.differentiable import differentiable
from shardfn.optim.hyperparameters import check, whole
from shardfn.optim.optimizer import Optimizer, Rule, must_be_optimizer
from shardfn.quoting import listed
from shardfn.shards.pieces import Units, copied, is_unit, joined, pairs, spread, stretches, units, zeros_like


def masked(optimizer: Optimizer, rule: Which, otherwise: Optimizer | None = None) -> Optimizer:
    """Steps some parameters by one optimizer, the rest by another, or leaves them as they are.

    Args:
        optimizer: for the parameters that `rule` chooses.
        rule: which parameters: a regular expression that matches their whole path, such as `blocks.0.attn.q`, several
            of them, or a function of a parameter's path and whole shape.
        otherwise: for the rest; None leaves them as they are.

    Returns:
        An `Optimizer`; its state is that of both, under `"chosen"` and `"others"`.

    Raises:
        TypeError: what is not an optimizer, or a rule that is neither.
        ValueError: at `init`, a pattern that matches nothing.

    Example:
        ``masked(muon(0.02), lambda path, shape: len(shape) == 2 and "embed" not in path, adamw(3e-4))``
    """
    for one in (optimizer, *([] if otherwise is None else [otherwise])):
        must_be_optimizer("masked", one)
    which = chosen(rule, "masked: the rule")
    parts = {"chosen": (True, optimizer)} | ({"others": (False, otherwise)} if otherwise else {})

    def init(params: Any) -> Any:
        known = units(params)
        names = [path for unit in known.each for _, path, _ in spread(unit)]
        if unused := which.unused(names):
            raise ValueError(f"masked: nothing matches {listed(sorted(unused))}; there are {listed(names)}")
        return {name: part.init(_part(known, _values(known), which, yes)[0]) for name, (yes, part) in parts.items()}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        known = units(params)
        given: list[Any] = [grad for _, grad in pairs(known, grads)]
        changed: dict[int, list[tuple[int, int, Tensor]]] = {}
        state = dict(state)
        for name, (yes, part) in parts.items():
            mine, places = _part(known, _values(known), which, yes)
            made, state[name] = part.step(mine, _part(known, given, which, yes)[0], state[name])
            for key, spans in places.items():
                nodes = made[key] if isinstance(made[key], list) else [made[key]]
                for (i, start, stop), node in zip(spans, nodes, strict=True):
                    new = node.values if is_unit(node) else node
                    if start < stop or differentiable(new):
                        changed.setdefault(i, []).append((start, stop, new))
        values = _values(known)
        for i, found in changed.items():
            found.sort(key=lambda one: one[:2])
            if any(autograd.storage_of(new) != autograd.storage_of(values[i]) for *_, new in found):  # else in place
                values[i] = joined([new for *_, new in found], known.each[i], [(a, b) for a, b, _ in found])
        return known.like(values), state

    return Optimizer(init, step)


def _values(known: Units) -> list[Any]:
    return [unit.values for unit in known.each]


def _part(
    known: Units, values: Sequence[Any], rule: Rule, yes: bool
) -> tuple[dict[str, Any], dict[str, list[tuple[int, int, int]]]]:
    """The parameters for which the rule says so, as a tree of stages, `@` and their paths; and where each node of it
    comes from: a unit, and where in it.
    """
    tree: dict[str, Any] = {}
    places: dict[str, list[tuple[int, int, int]]] = {}
    for i, (unit, x) in enumerate(zip(known.each, values, strict=True)):
        if not unit.trainable:
            continue
        if unit.layout is None:
            (one,) = unit.segments
            if bool(rule(one.path, one.whole)) is yes:
                tree[unit.name], places[unit.name] = x, [(i, 0, unit.values.numel())]
            continue
        chosen = [run[1:] for run in stretches(unit, lambda path, shape: bool(rule(path, shape))) if run[0] is yes]
        if chosen:
            key = f"@{unit.name}"
            parts = [unit.part(*run, x if x is None else x.reshape(-1)[run[1] : run[2]]) for run in chosen]
            tree.setdefault(key, []).extend(parts)
            places.setdefault(key, []).extend((i, start, stop) for _, start, stop in chosen)
    return tree, places


def ema(optimizer: Optimizer, decay: float, *, donate: bool = True) -> Optimizer:
    r"""The optimizer with a moving average of its parameters in its state, overwritten unless `donate=False`.

    :math:`a \leftarrow d a + (1 - d) p`, an exponential one, from the first parameters on. It is under `"average"`, a
    tree like the parameters, which runs in the same stages.

    State: one number a parameter more.

    Args:
        optimizer: any.
        decay: :math:`d`, from 0 to 1.
        donate: overwrite the average; if not, the step can be differentiated.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError, ValueError: what is not an optimizer; a decay out of its range.

    Sources: Polyak and Juditsky, Acceleration of stochastic approximation by averaging (1992).

    Example:
        ``opt = ema(adamw(3e-4), 0.999)``, and to evaluate ``model(state["average"], tokens)``
    """
    must_be_optimizer("ema", optimizer)
    check("ema", {"decay": decay, "donate": donate})

    def init(params: Any) -> Any:
        known = units(params)
        copies = [(copied(u) if donate else u.values.clone()) if u.trainable else u.values for u in known.each]
        return {"optimizer": optimizer.init(params), "decay": decay, "average": known.like(copies)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        params, inner = optimizer.step(params, grads, state["optimizer"])
        known = units(params)
        averages = known.beside(state["average"])
        moving = [i for i, unit in enumerate(known.each) if unit.trainable]
        if not moving:
            return params, state | {"optimizer": inner}
        with torch.set_grad_enabled(not donate and torch.is_grad_enabled()):
            old = [averages[i] for i in moving]
            now = [known.each[i].values.to(average.dtype) for i, average in zip(moving, old, strict=True)]
            new = old if donate else torch._foreach_lerp(old, now, 1 - state["decay"])
            if donate:
                torch._foreach_lerp_(old, now, 1 - state["decay"])
        for i, average in zip(moving, new, strict=True):
            averages[i] = average
        return params, state | {"optimizer": inner, "average": known.like(averages)}

    return Optimizer(init, step)


def accumulate(optimizer: Optimizer, every: int) -> Optimizer:
    """The optimizer at every so many steps, with the sum of their gradients; parameters stay as they are in between.

    Also called `multi_steps`. Sums, not means: a loss that is divided by what the whole batch has gives the whole
    batch's gradient. Where the micro-batches are available at once, `shardfn.accumulate` moves less.

    State: one number a parameter more.

    Args:
        optimizer: any.
        every: steps, 1 or more.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError, ValueError: what is not an optimizer; a number of steps that is not one.

    Example:
        ``multi_steps(adamw(3e-4), 8)``
    """
    must_be_optimizer("accumulate", optimizer)
    whole("accumulate", "every", every, 1)

    def init(params: Any) -> Any:
        return {"optimizer": optimizer.init(params), "count": 0, "sum": zeros_like(params)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        known = units(params)
        sums = known.beside(state["sum"])
        total = [s if g is None or s is None else s + g for s, (_, g) in zip(sums, pairs(known, grads), strict=True)]
        count = state["count"] + 1
        if count < every:
            return params, state | {"count": count, "sum": known.like(total)}
        params, inner = optimizer.step(params, known.like(total), state["optimizer"])
        return params, {"optimizer": inner, "count": 0, "sum": zeros_like(params)}

    return Optimizer(init, step)


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """The optimizer, which skips a step where a gradient is not finite on some rank: nothing changes then.

    The state counts the steps that were skipped, under `"skipped"`. The host waits for the gradients at every step.

    Args:
        optimizer: any.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError: what is not an optimizer.

    Example:
        ``skip_nonfinite(chain(clip_by_global_norm(1.0), adamw(3e-4)))``
    """
    must_be_optimizer("skip_nonfinite", optimizer)

    def init(params: Any) -> Any:
        return {"optimizer": optimizer.init(params), "skipped": 0}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        if not finite(grads):
            return params, state | {"skipped": state["skipped"] + 1}
        params, inner = optimizer.step(params, grads, state["optimizer"])
        return params, state | {"optimizer": inner}

    return Optimizer(init, step)


def finite(tree: Any) -> bool:
    """Whether all elements of a tree are finite on all ranks of its mesh. All ranks call it together.

    Args:
        tree: parameters, gradients or anything shaped like them; integers, frozen parameters and None are left out.

    Returns:
        A bool, the same on every rank; the host waits for it.

    Example:
        ``assert finite(params), "training has diverged"``
    """
    known = units(tree)
    by_device: dict[torch.device, list[Tensor]] = {}
    for unit in known.each:
        if unit.trainable and unit.values is not None:
            by_device.setdefault(unit.values.device, []).append(unit.values.detach().isfinite().all())
    bad = [(~torch.stack(good)).any().float() for good in by_device.values()]
    for grid in dict.fromkeys(unit.layout.grid for unit in known.each if unit.layout):
        mesh = mesh_of(grid, "a tree")
        here = torch.zeros((), device=mesh.device_type)
        for one in bad:
            here = here + one.to(here.device, non_blocking=here.device.type != "cpu")
        with scope(mesh), torch.no_grad():
            bad = [functional.psum(here, tuple(name for name, _ in grid.sizes))]
    return not any(one.item() for one in bad)  # all that the host waits for
