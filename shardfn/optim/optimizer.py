"""What an optimizer is: two functions, `state = init(params)` and `params, state = step(params, grads, state)`.

Whatever it remembers is in the state, a pytree; so is every number that it was given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree

from shardfn.mesh.grid import AxisName, as_names
from shardfn.mesh.spec import dotted
from shardfn.optim.guard import guarded, guarded_update
from shardfn.optim.hyperparameters import kind
from shardfn.optim.sharded_state import divides_init, divides_step
from shardfn.quant.packed import is_packed
from shardfn.quoting import listed, short_errors
from shardfn.shards.layout import Layout
from shardfn.shards.pieces import Segment, is_unit, units

Rule = Callable[[str, tuple[int, ...]], Any]
"""Something that depends on a parameter: a function of its path, `blocks.0.attn.q`, and its whole shape."""


@dataclass(frozen=True)
class Optimizer:
    """Two functions, `state = init(params)` and `params, state = step(params, grads, state)`.

    Neither has a memory of its own, but for weak references by which it notices arguments in each other's place. Where
    a strategy cuts optimizer state further than parameters, the two functions that it is made of get this rank's part
    only, and new parameters are gathered.

    Args:
        init: `params -> state`: any pytree of tensors, numbers and flat shards.
        step: `(params, grads, state) -> (params, state)`. Gradients are a pytree like the parameters, of the same
            shapes; None, or a frozen parameter's, is left out.

    Raises:
        ValueError, TypeError: by `step`, where the three do not belong together, before anything has changed.

    Example:
        ``Optimizer(lambda params: (), lambda params, grads, state: (tree_map(torch.sub, params, grads), state))``
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __post_init__(self) -> None:
        init, step = guarded("step", divides_init(_each_once(self.init)), divides_step(self.step))
        object.__setattr__(self, "init", init)
        object.__setattr__(self, "step", step)


@dataclass(frozen=True)
class Transform:
    """What is done to gradients before an optimizer gets them: `grads, state = update(params, grads, state)`.

    Args:
        init: `params -> state`, a pytree.
        update: `(params, grads, state) -> (grads, state)`. It is called by keyword, so its arguments have these names
            and may stand in any order.

    Raises:
        TypeError: `update` has arguments of other names.
        ValueError, TypeError: by `update`, where the three do not belong together, or are in each other's place.

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


def _refuse_other_names(update: Callable[..., Any]) -> None:
    """Raises TypeError for a function that cannot be called with these keywords, and would mix up positions."""
    try:
        signature = inspect.signature(update)
    except (TypeError, ValueError):  # of a function that is not Python's
        return
    try:
        signature.bind(params=None, grads=None, state=None)
    except TypeError:
        raise TypeError(
            f"Transform: update is called as update(params=..., grads=..., state=...), but this one takes "
            f"{signature}: name its arguments params, grads and state, in any order"
        ) from None


def _each_once(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`init`, but not for a tree that has one tensor at two places: each would be moved by a gradient of its own."""

    @functools.wraps(init)
    def checked(params: Any) -> Any:
        seen: set[int] = set()
        known = units(params)
        if not any(unit.trainable for unit in known.each):
            _refuse_few_bits(params)
        for unit in known.each:
            if unit.trainable and id(unit.values) in seen:
                raise ValueError(
                    f"{unit.name} is at two places of the tree, and each would be moved by a gradient of its own: keep "
                    f"it at one, and pass it to both functions from there"
                )
            seen.add(id(unit.values))
        return init(params)

    return checked


def _refuse_few_bits(params: Any) -> None:
    """Raises ValueError for parameters in few bits, where there are no others to train."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(params, is_leaf=lambda x: is_unit(x) or is_packed(x))
    for accessor, leaf in zip(accessors, leaves, strict=True):
        layout = leaf.layout if is_unit(leaf) else None
        entries = layout.entries if layout else ()
        names = [entry.path for entry in entries if layout and entry.leaves[0] in layout.packed]
        if names or is_packed(leaf):
            raise ValueError(
                f"init: there is nothing to train: {(names or [dotted(accessor)])[0]} is in few bits, which have no "
                f"gradient, and all else is frozen. Make the state of adapters, optimizer.init(lora.init(model, "
                f"'all-linear', rank=8)), or leave what is to be trained out of quantize"
            )


@short_errors
def shard_state(optimizer: Optimizer, axis: AxisName) -> Optimizer:
    """The optimizer with its state cut along `axis` too, over which parameters are the same; ZeRO-1 for any strategy.

    A rank updates its part of each parameter with its part of the gradient, which is sliced if every rank has all of
    it, and the parts are gathered, those of all stages at once. `zero1` and `hfsdp` do this by themselves, and their
    gradients are scattered in the first place. Plain tensors are updated everywhere.

    Args:
        optimizer: any.
        axis: one or several of each strategy's replicas.

    Returns:
        An `Optimizer`; its `init` and `step` raise what follows.

    Raises:
        ValueError: an axis over which a parameter is not the same.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020), 5.1.
    """
    must_be_optimizer("shard_state", optimizer)
    names = as_names(axis)

    def finer(layout: Layout) -> Layout:
        placement = layout.placement
        wrong = [name for name in names if name not in placement.replicas + placement.axes]
        if wrong:
            raise ValueError(
                f"shard_state: stage {layout.stage!r} is not the same over {wrong[0]!r}, but over "
                f"{listed(map(repr, placement.replicas), separator=' and ') or 'no axis'}: pass one of "
                f"those, or another strategy"
            )
        return layout.placed(placement.dividing(names)).state_layout

    return Optimizer(divides_init(optimizer.init, finer), divides_step(optimizer.step, finer))


def chain(*parts: Any) -> Optimizer:
    """Transforms gradients one after another, and gives what comes out to an optimizer.

    Args:
        *parts: any number of `Transform`, then one `Optimizer`.

    Returns:
        An `Optimizer`, whose state is the tuple of theirs.

    Raises:
        TypeError: other things, or another order.

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
        for part, known in zip(transforms, state[:-1], strict=True):
            grads, known = part.update(params, grads, known)
            states.append(known)
        params, known = last.step(params, grads, state[-1])
        return params, (*states, known)

    return Optimizer(init, step)


def must_be_optimizer(name: str, value: Any) -> None:
    """Raises TypeError for what is not an optimizer."""
    if not isinstance(value, Optimizer):
        raise TypeError(f"{name} takes an optimizer, such as shardfn.optim.adamw(3e-4), not {kind(value)}")


def of_rule(value: Any, segment: Segment) -> Any:
    """A number, or what a rule says of a parameter."""
    return value(segment.path, segment.whole) if callable(value) else value
