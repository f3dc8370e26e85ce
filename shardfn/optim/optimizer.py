"""Defines an optimizer: two functions, `state = init(params)` and `params, state = step(params, grads, state)`.

Everything it remembers is in the state, a pytree, and so are the numbers that it was given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardfn.mesh.grid import AxisName, as_names
from shardfn.mesh.spec import leaves_by_path
from shardfn.optim.guard import guarded, guarded_update
from shardfn.optim.hyperparameters import kind
from shardfn.optim.sharded_state import divides_init, divides_step
from shardfn.quant.packed import is_packed
from shardfn.quoting import listed
from shardfn.shards.layout import Layout
from shardfn.shards.pieces import Segment, is_unit, pairs, units
from shardfn.tracebacks import api_boundary


@dataclass(frozen=True)
class Optimizer:
    """Two functions, `state = init(params)` and `params, state = step(params, grads, state)`.

    They remember nothing between calls except weak references, by which they notice arguments in the wrong order. Where
    a strategy cuts optimizer state further than parameters, the given functions see only this rank's part, and the new
    parameters are gathered.

    Args:
        init: `params -> state`: any pytree of tensors, numbers and flat shards.
        step: `(params, grads, state) -> (params, state)`. Gradients are a pytree like the parameters, with the same
            shapes; parameters whose gradient is None, and frozen ones, are left out, as `map_trained` does.

    Raises:
        ValueError, TypeError: by `step`, if the three trees do not belong together, before anything has changed.

    Example:
        ``Optimizer(lambda params: (), lambda params, grads, state: (map_trained(torch.sub, params, grads), state))``
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __post_init__(self) -> None:
        init, step = guarded("step", divides_init(_each_once(self.init)), divides_step(self.step))
        object.__setattr__(self, "init", init)
        object.__setattr__(self, "step", step)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"an Optimizer has no .{name}: {_INSTEAD.get(name, 'it has init and step')}")


_RATES = "its numbers are arguments, and lr may be a function of the step, such as warmup_cosine(1e-3, warmup=100, ...)"
_INSTEAD = {
    "zero_grad": "gradients are values, of which none is kept: leave the call out",
    "param_groups": f"{_RATES}; others a function of a parameter's path and shape",
    "add_param_group": "make a state for all parameters, init(params), and mask some of them by optim.masked",
    **dict.fromkeys(("state", "state_dict"), "its state is a value, what init and step give: save that with params"),
    "load_state_dict": "its state is a value: checkpoint.load gives one, which step takes",
    "update": "call step(params, grads, state), which gives new parameters, not updates",
}


@dataclass(frozen=True)
class Transform:
    """A change to gradients before an optimizer gets them: `grads, state = update(params, grads, state)`.

    Args:
        init: `params -> state`, a pytree.
        update: `(params, grads, state) -> (grads, state)`. It is called by keyword, so its arguments must have these
            names, in any order.

    Raises:
        TypeError: `update` has arguments of other names.
        ValueError, TypeError: by `update`, if the three trees do not belong together, or are in the wrong order.

    Example:
        ``Transform(lambda params: (), lambda params, grads, state: (tree_map(torch.sign, grads), state))``
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]

    def __post_init__(self) -> None:
        _refuse_other_names(self.update)
        init, update = guarded_update(self.init, self.update)
        object.__setattr__(self, "init", init)
        object.__setattr__(self, "update", update)


def map_trained(rule: Callable[..., Any], params: Any, grads: Any, *slots: Any) -> Any:
    """Applies a rule to each parameter that has a gradient; the others, and what is remembered of them, stay.

    Args:
        rule: `(param, grad, *slots) -> (param, *slots)`, or `(param, grad) -> param` without slots, for tensors that
            are this rank's elements of one or several parameters. It must treat all elements equally.
        params: the parameters.
        grads: their gradients.
        *slots: trees like the parameters.

    Returns:
        The new parameters; with slots a tuple of these and the new slots.

    Raises:
        ValueError: a gradient of another shape or layout.

    Example:
        ``params, m = map_trained(lambda p, g, m: (p - 0.1 * (m + g), m + g), params, grads, m)``
    """
    leaves = units(params)
    columns = [[unit.values for unit in leaves.each], *map(leaves.values_in, slots)]
    for i, (unit, grad) in enumerate(pairs(leaves, grads)):
        if grad is not None:
            slot_values = [column[i] for column in columns[1:]]
            new = rule(unit.values, grad, *slot_values)
            for column, x in zip(columns, new if slots else (new,), strict=True):
                column[i] = x
    trees = tuple(map(leaves.with_values, columns))
    return trees if slots else trees[0]


def _refuse_other_names(update: Callable[..., Any]) -> None:
    """Raises TypeError for a function without these keywords: a call by position could mix arguments up."""
    try:
        signature = inspect.signature(update)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return
    try:
        signature.bind(params=None, grads=None, state=None)
    except TypeError:
        raise TypeError(
            f"Transform: update is called as update(params=..., grads=..., state=...), but this one takes "
            f"{signature}: name its arguments params, grads and state, in any order"
        ) from None


def _each_once(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`init`, with ValueError for a tensor at two places of the tree, where each would apply its own gradient."""

    @functools.wraps(init)
    def checked(params: Any) -> Any:
        visited: set[int] = set()
        leaves = units(params)
        trains = any(unit.trainable for unit in leaves.each)
        untrained = {} if trains else leaves_by_path(params, lambda x: is_unit(x) or is_packed(x))
        for path, leaf in untrained.items():
            layout = leaf.layout if is_unit(leaf) else None
            entries = layout.entries if layout else ()
            names = [entry.path for entry in entries if layout and entry.leaves[0] in layout.packed]
            if names or is_packed(leaf):
                raise ValueError(
                    f"init: there is nothing to train: {(names or [path])[0]} is quantized, and all else is frozen. "
                    f"Make the state of adapters, optimizer.init(lora.init(model, 'all-linear', rank=8)), or do not "
                    f"quantize all parameters"
                )
        for unit in leaves.each:
            if unit.trainable and id(unit.values) in visited:
                raise ValueError(
                    f"{unit.name} is at two places of the tree, and each would be moved by its own gradient: keep "
                    f"it at one, and pass it to both functions from there"
                )
            visited.add(id(unit.values))
        return init(params)

    return checked


@api_boundary
def shard_state(optimizer: Optimizer, axis: AxisName) -> Optimizer:
    """The optimizer with its state sharded over the replica axis `axis` too; ZeRO-1 for any strategy.

    A rank updates its part of each parameter with its part of the gradient, which is sliced if every rank has all of
    it; then the parts of all stages are gathered at once. `zero1` and `hfsdp` do this by themselves, and reduce-scatter
    their gradients in the first place. Plain tensors are updated on every rank.

    Args:
        optimizer: any optimizer.
        axis: one or several axes over which each strategy replicates parameters.

    Returns:
        An `Optimizer`.

    Raises:
        ValueError: by `init` and `step`, for an axis over which a parameter is not replicated.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020), 5.1.
    """
    must_be_optimizer("shard_state", optimizer)
    names = as_names(axis)

    def finer(layout: Layout) -> Layout:
        placement = layout.placement
        unknown = [name for name in names if name not in placement.replicas + placement.axes]
        if unknown:
            raise ValueError(
                f"shard_state: stage {layout.stage!r} is not the same over {unknown[0]!r}, but over "
                f"{listed(map(repr, placement.replicas), separator=' and ') or 'no axis'}: pass one of "
                f"those, or another strategy"
            )
        return layout.placed(placement.dividing(names)).state_layout

    return Optimizer(divides_init(optimizer.init, finer), divides_step(optimizer.step, finer))


def chain(*parts: Any) -> Optimizer:
    """Passes gradients through transforms, one after another, and the result to an optimizer.

    Args:
        *parts: any number of `Transform`, then one `Optimizer`.

    Returns:
        An `Optimizer`, whose state is the tuple of the parts' states.

    Raises:
        TypeError: the arguments are something else, or in another order.

    Example:
        ``chain(clip_by_global_norm(1.0), adamw(3e-4))``
    """
    *transforms, last = parts or (None,)
    if not all(isinstance(part, Transform) for part in transforms) or not isinstance(last, Optimizer):
        kinds = listed(map(kind, parts)) or "nothing"
        raise TypeError(
            f"chain: it takes any number of transforms and then one optimizer, chain(clip_by_global_norm(1.0), "
            f"adamw(3e-4)) say, but was given {kinds}"
        )

    def init(params: Any) -> Any:
        return tuple(part.init(params) for part in parts)

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        states = []
        for part, inner in zip(transforms, state[:-1], strict=True):
            grads, inner = part.update(params, grads, inner)
            states.append(inner)
        params, inner = last.step(params, grads, state[-1])
        return params, (*states, inner)

    return Optimizer(init, step)


def must_be_optimizer(name: str, value: Any) -> None:
    """Raises TypeError if `value` is not an `Optimizer`."""
    if not isinstance(value, Optimizer):
        raise TypeError(f"{name} takes an optimizer, such as shardfn.optim.adamw(3e-4), got {kind(value)}")


def of_rule(value: Any, segment: Segment) -> Any:
    """A number, or what a rule returns for a parameter."""
    return value(segment.path, segment.whole) if callable(value) else value
