"""What an optimizer notices of its calls: arguments in each other's place, and a state that is used again.

It keeps no tensors alive; which trees belong together `checks` says.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.compat import dynamo
from shardfn.optim.checks import gradients_differ, moves, state_differs
from shardfn.optim.state_offload import NOWHERE, placed, placed_together, refuse_elsewhere, released
from shardfn.shards.layout import FlatShard
from shardfn.shards.pieces import Piece, is_unit

Init = Callable[[Any], Any]
Step = Callable[[Any, Any, Any], tuple[Any, Any]]

Places = tuple[int | None, int | None, list[int]]


@dataclass(frozen=True)
class Use:
    """A state as a step got it, by what differs in the one that the step returns. It keeps no memory alive.

    Attributes:
        state: its `id`. Of two states that follow each other both are alive for a moment, so theirs differ.
        counts: the ints in it.
        param: the first trained parameter.
        slot: the first tensor in it that is more than a number.
        kept: the state, if it has none, so that no other one gets its `id`.
        version: of the parameter, before the step, or after it.
        times: how many steps got it, one after another, if this one is made.
    """

    state: int
    counts: list[int]
    param: weakref.ref[Tensor]
    slot: weakref.ref[Tensor] | None
    kept: Any
    version: int
    times: int = 1

    def again(self, before: Use | None) -> bool:
        """Whether it is that very state, with nothing written to parameters since."""
        if before is None or (self.state, self.counts, self.version) != (before.state, before.counts, before.version):
            return False
        slots = [None if use.slot is None else use.slot() for use in (self, before)]
        return self.param() is before.param() and slots[0] is slots[1]


class Guard:
    """Compares what a step gets. Trees of the same structure as before, and tensors of the same shapes, it lets pass.

    It keeps no tensors: of the parameters that were last seen as such it knows one, weakly, by which it notices
    gradients in their place; and of the state that was last used one, by which it notices that this is used again.
    """

    def __init__(self, name: str, init: Init) -> None:
        self.name, self.init, self._takes = name, init, f"{name} takes (params, grads, state)"
        self.away = False  # whether anything is kept elsewhere than on the device
        self._passed: tuple[Any, list[Any], int, int, Places] | None = None
        self._used: Use | None = None
        self._known: Callable[[], Any] = lambda: None

    def keep(self, params: Any) -> None:
        """Remembers what the parameters are."""
        if torch.compiler.is_compiling():
            return
        first: Any = next(optree.tree_iter(params, is_leaf=is_unit), None)
        values = _values(first)
        if isinstance(values, Tensor) and values.is_meta:  # which only stand for those that it knows
            return
        self._known = weakref.ref(values) if isinstance(values, Tensor) else lambda: None

    def compare(self, params: Any, grads: Any, state: Any) -> tuple[list[Any], Places] | None:
        """The leaves of all three, and where among them is what `use` looks at; None in a graph, which has no memory.

        Raises:
            ValueError, TypeError: they do not belong together.
        """
        if torch.compiler.is_compiling():
            dynamo.trace_dicts()
            return None
        leaves, spec = optree.tree_flatten((params, grads, state), is_leaf=is_unit)
        kinds = [_kind(leaf) for leaf in leaves]
        passed = self._passed
        if passed is None or passed[1] != kinds or passed[0] != spec:
            self._refuse(params, grads, state)
            own, others, _ = (child.num_leaves for child in spec.children())
            self.away = any(is_unit(leaf) and leaf.layout.placement.tiers != NOWHERE for leaf in leaves)
            passed = self._passed = spec, kinds, own, own + others, _places(leaves, own, own + others)
        self._refuse_swapped(leaves, *passed[2:4], spec)
        return leaves, passed[4]

    def pairs(self, leaves: list[Any]) -> list[tuple[Tensor, Tensor, tuple[str, ...] | None]]:
        """The parameters among these leaves, each with its gradient and the axes that cut both, if they are flat."""
        assert self._passed is not None, "they were compared"
        _, _, own, others, _ = self._passed
        both = zip(leaves[:own], leaves[own:others], strict=False)
        found: list[tuple[Tensor, Tensor, tuple[str, ...] | None]] = []
        for p, g in both:
            if isinstance(_values(p), Tensor) and isinstance(_values(g), Tensor):
                found.append((_values(p), _values(g), tuple(p.layout.placement.axes) if is_unit(p) else None))
        return found

    def _refuse_swapped(self, leaves: list[Any], first: int, last: int, spec: Any) -> None:
        known = self._known()
        if known is None or not leaves or _values(leaves[0]) is known:
            return
        tensors = [*map(_values, leaves)]
        if any(x is known for x in tensors[:first]):
            return
        alike = spec.child(0) == spec.child(2)  # a state that is like the parameters may come in their place
        for place, others in (("grads", tensors[first:last]), ("state", tensors[last:] if alike else [])):
            if any(x is known for x in others):
                raise ValueError(
                    f"{self._takes}: the parameters came as {place} here; if they are meant as that, pass a copy"
                )

    def use(self, leaves: list[Any], places: Places, state: Any) -> Use | None:
        """The state that a step gets.

        Raises:
            ValueError: it was used by the two steps before, which have overwritten parameters. By one, it may be a new
                one that looks like it.
        """
        param, slot, counts = places
        p = None if param is None else _values(leaves[param])
        if p is None or p.is_inference():
            return None
        s = None if slot is None else weakref.ref(_values(leaves[slot]))
        kept = state if s is None else None
        made = Use(id(state), [leaves[i] for i in counts], weakref.ref(p), s, kept, p._version)
        if not made.again(self._used):
            return made
        assert self._used is not None, "there is one that it is equal to"
        if self._used.times > 1:
            raise ValueError(
                f"{self.name}: this state was already used by the {self._used.times} steps before, whose results were "
                f"dropped: parameters have moved, and the state has not counted it. Write params, state = "
                f"optimizer.step(params, grads, state)"
            )
        return replace(made, times=self._used.times + 1)

    def used(self, use: Use | None, same: bool) -> None:
        """Remembers the state of a step that was made, if it has overwritten parameters and returned another one."""
        p = None if use is None else use.param()
        self._used = None
        if use is not None and p is not None and p._version != use.version and not same:
            self._used = replace(use, version=p._version)

    def _refuse(self, params: Any, grads: Any, state: Any) -> None:
        wrong = gradients_differ(params, grads)
        if wrong is None and (expected := self._expected(params)) is not None:
            wrong = state_differs(*expected, state)
        if wrong is not None:
            raise self._order(params, grads, state) or type(wrong)(f"{self.name}: {wrong}")

    def _order(self, params: Any, grads: Any, state: Any) -> Exception | None:
        """What is wrong with the arguments' order, if something else than that is not."""
        if type(grads) is tuple and len(grads) == 2 and gradients_differ(params, grads[1]) is None:
            return TypeError(
                f"{self.name}: the gradients are a pair, (value, gradients), as value_and_grad returns it: pass the "
                f"second of it"
            )
        given = {"params": params, "grads": grads, "state": state}
        place = {"params": "first", "grads": "second", "state": "third"}
        for p, g, s in list(itertools.permutations(given))[1:]:
            if self._fit(given[p], given[g], given[s]):
                if s == "state":
                    where = f"the {place[g]} argument has gradients, the {place[p]} parameters"
                    return TypeError(f"{self._takes}: {where}")
                optax = ", which is where optax's update takes it" if s == "grads" else ""
                return TypeError(f"{self._takes}: the state came as the {place[s]} argument{optax}")
        return None

    def _fit(self, params: Any, grads: Any, state: Any) -> bool:
        with contextlib.suppress(Exception):  # a state is not parameters
            expected = self._expected(params)
            if expected is not None and gradients_differ(params, grads) is None:
                return state_differs(*expected, state) is None
        return False

    def _expected(self, params: Any) -> tuple[Any] | None:
        """A state for such parameters, without numbers; None where `init` needs their values."""
        with contextlib.suppress(Exception):
            return (self.init(optree.tree_map(_hollow, params)),)
        return None


def guarded(name: str, init: Init, step: Step) -> tuple[Init, Step]:
    """An optimizer's two functions, of which the second compares its arguments."""
    guard = Guard(name, init)

    @functools.wraps(init)
    def first(params: Any) -> Any:
        state = init(params) if torch.compiler.is_compiling() else placed_together(name, init, params)
        guard.keep(params)
        return state

    @functools.wraps(step)
    def checked(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        found = guard.compare(params, grads, state)
        use = None if found is None else guard.use(*found, state)
        if found is not None and (recorder := recording.current()) is not None:
            recorder.used(guard.pairs(found[0]))
        if guard.away and found is not None:
            refuse_elsewhere(name, state)
        made = step(params, grads, state)
        if guard.away and found is not None:
            made = placed(made[0], "params"), placed(made[1])
            released(grads, made)
        guard.keep(made[0])
        guard.used(use, made[1] is state)
        return made

    return first, checked


def guarded_update(init: Init, update: Callable[..., tuple[Any, Any]]) -> tuple[Init, Step]:
    """A transform's two functions, of which the second compares its arguments where it gets parameters."""
    guard = Guard("update", init)

    @functools.wraps(init)
    def first(params: Any) -> Any:
        state = init(params)
        guard.keep(params)
        return state

    @functools.wraps(update)
    def checked(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        if params is not None:
            guard.compare(params, grads, state)
            guard.keep(params)
        return update(params=params, grads=grads, state=state)

    return first, checked


def _places(leaves: list[Any], own: int, others: int) -> Places:
    """Where the first trained parameter is, the first tensor of the state, and the ints of the state."""
    values = [*map(_values, leaves)]
    trained = (
        i
        for i, leaf in enumerate(leaves[:own])
        if isinstance(values[i], Tensor) and (leaf.layout.trainable if is_unit(leaf) else moves(leaf))
    )
    state = range(others, len(leaves))
    slots = (i for i in state if isinstance(values[i], Tensor) and values[i].ndim)
    return next(trained, None), next(slots, None), [i for i in state if type(leaves[i]) is int]


def _values(leaf: Any) -> Any:
    return leaf.values if is_unit(leaf) else leaf


def _kind(leaf: Any) -> Any:
    """What a leaf must be like to pass again."""
    if type(leaf) is FlatShard:
        return leaf.layout, leaf.values is None or leaf.values.shape
    if type(leaf) is Piece:
        return leaf.layout, leaf.entries, leaf.start, leaf.stop, leaf.values is None or leaf.values.shape
    return (leaf.shape, leaf.layout) if isinstance(leaf, Tensor) else None


def _hollow(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf
