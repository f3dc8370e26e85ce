"""Checks on an optimizer's calls: trees that do not belong together or are in the wrong order, a state used twice.

A guard checks before a step changes anything, and keeps no tensors alive.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.compat import dynamo, process_groups
from shardfn.mesh.spec import dotted, joined
from shardfn.optim.state_offload import NOWHERE, Init, Step, placed, placed_together, refuse_elsewhere, released
from shardfn.quoting import listed
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.pieces import Piece, is_unit

Places = tuple[int | None, int | None, list[int]]


@dataclass(frozen=True)
class StateUse:
    """Identifies the state that a step received, by what differs in the state that it returns; keeps no memory alive.

    Attributes:
        state: `id` of the state. Two successive states are alive at the same time for a moment, so their ids differ.
        counts: the ints in the state.
        param: the first trained parameter.
        slot: the first tensor in the state that is not 0-d; None if there is none.
        kept: the state itself if `slot` is None, so that no other state gets its `id`.
        version: version counter of the parameter, before the step or after it.
        times: how many steps in a row received this state, counting the present one.
    """

    state: int
    counts: list[int]
    param: weakref.ref[Tensor]
    slot: weakref.ref[Tensor] | None
    kept: Any
    version: int
    times: int = 1

    def continues(self, before: StateUse | None) -> bool:
        """Whether this is the same state as `before`, and no parameter was written to since."""
        if before is None or (self.state, self.counts, self.version) != (before.state, before.counts, before.version):
            return False
        slots = [None if use.slot is None else use.slot() for use in (self, before)]
        return self.param() is before.param() and slots[0] is slots[1]


class Guard:
    """Checks the arguments of a step; trees with the structure and shapes of the last call that passed are let through.

    It keeps weak references only: to one tensor of the last known parameters, to notice parameters that are passed as
    gradients or state, and to the last used state, to notice when it is used again.
    """

    def __init__(self, name: str, init: Init) -> None:
        self.name, self.init, self._takes = name, init, f"{name} takes (params, grads, state)"
        self.away = False  # whether anything is kept on the host or on disk
        self._passed: tuple[Any, list[Any], int, int, Places] | None = None
        self._used: StateUse | None = None
        self._seen: Callable[[], Any] = lambda: None

    def keep(self, params: Any) -> None:
        """Remembers which tensor is a parameter, by a weak reference."""
        first: Any = next(optree.tree_iter(params, is_leaf=is_unit), None)
        values = _value_of(first)
        if isinstance(values, Tensor) and values.is_meta:  # a placeholder for the parameters already remembered
            return
        self._seen = weakref.ref(values) if isinstance(values, Tensor) else lambda: None

    def compare(self, params: Any, grads: Any, state: Any) -> tuple[list[Any], Places]:
        """Returns the leaves of all three trees, and the places of those that `use` needs.

        Raises:
            ValueError, TypeError: the trees do not belong together.
        """
        leaves, spec = optree.tree_flatten((params, grads, state), is_leaf=is_unit)
        kinds = [_fixed_properties(leaf) for leaf in leaves]
        passed = self._passed
        if passed is None or passed[1] != kinds or passed[0] != spec:
            self._refuse(params, grads, state)
            num_params, num_grads, _ = (child.num_leaves for child in spec.children())
            self.away = any(is_unit(leaf) and leaf.layout.placement.tiers != NOWHERE for leaf in leaves)
            passed = self._passed = (
                spec,
                kinds,
                num_params,
                num_params + num_grads,
                _guarded_places(leaves, num_params, num_params + num_grads),
            )
        self._refuse_swapped(leaves, *passed[2:4], spec)
        return leaves, passed[4]

    def pairs(self, leaves: list[Any]) -> list[tuple[Tensor, Tensor, tuple[str, ...] | None]]:
        """Each parameter among these leaves with its gradient, and the axes that shard both if they are flat shards."""
        assert self._passed is not None, "they were compared"
        _, _, grads_start, state_start, _ = self._passed
        zipped = zip(leaves[:grads_start], leaves[grads_start:state_start], strict=False)
        pairs: list[tuple[Tensor, Tensor, tuple[str, ...] | None]] = []
        for p, g in zipped:
            if isinstance(_value_of(p), Tensor) and isinstance(_value_of(g), Tensor):
                pairs.append((_value_of(p), _value_of(g), tuple(p.layout.placement.axes) if is_unit(p) else None))
        return pairs

    def _refuse_swapped(self, leaves: list[Any], first: int, last: int, spec: Any) -> None:
        """Raises ValueError if the remembered parameter is among the gradients or the state."""
        param = self._seen()
        if param is None or not leaves or _value_of(leaves[0]) is param:
            return
        tensors = [*map(_value_of, leaves)]
        if any(x is param for x in tensors[:first]):
            return
        # A state that is like the parameters may come in their place.
        state_like_params = spec.child(0) == spec.child(2)
        for role, leaves_of in (("grads", tensors[first:last]), ("state", tensors[last:] if state_like_params else [])):
            if any(x is param for x in leaves_of):
                raise ValueError(
                    f"{self._takes}: the parameters came as {role} here; if they are meant as that, pass a copy"
                )

    def use(self, leaves: list[Any], places: Places, state: Any) -> StateUse | None:
        """Identifies the state that a step receives; None where there is nothing to identify it by.

        Raises:
            ValueError: the two steps before used the same state and have overwritten parameters. After a single such
                step it may be a new state that looks the same.
        """
        param, slot, counts = places
        p = None if param is None else _value_of(leaves[param])
        if p is None or p.is_inference():
            return None
        s = None if slot is None else weakref.ref(_value_of(leaves[slot]))
        kept_state = state if s is None else None
        use = StateUse(id(state), [leaves[i] for i in counts], weakref.ref(p), s, kept_state, p._version)
        if not use.continues(self._used):
            return use
        assert self._used is not None, "there is one that it is equal to"
        if self._used.times > 1:
            raise ValueError(
                f"{self.name}: this state was already used by the {self._used.times} steps before, whose results were "
                f"dropped: parameters have moved, and the state has not counted it. Write params, state = "
                f"optimizer.step(params, grads, state)"
            )
        return replace(use, times=self._used.times + 1)

    def used(self, use: StateUse | None, same: bool) -> None:
        """Remembers the state of a finished step, if the step overwrote parameters and returned another state."""
        p = None if use is None else use.param()
        self._used = None
        if use is not None and p is not None and p._version != use.version and not same:
            self._used = replace(use, version=p._version)

    def _refuse(self, params: Any, grads: Any, state: Any) -> None:
        """Raises the error in what belongs together, or one about the order of the arguments if that explains it."""
        error = gradients_differ(params, grads)
        if error is None and (expected := self._expected(params)) is not None:
            error = state_differs(*expected, state)
        if error is not None:
            raise self._order(params, grads, state) or type(error)(f"{self.name}: {error}")

    def _order(self, params: Any, grads: Any, state: Any) -> Exception | None:
        """The error for arguments in the wrong order; None if no other order would fit either."""
        if type(grads) is tuple and len(grads) == 2 and gradients_differ(params, grads[1]) is None:
            return TypeError(
                f"{self.name}: the gradients are a pair, (value, gradients), as value_and_grad returns it: pass the "
                f"second of it"
            )
        trees = {"params": params, "grads": grads, "state": state}
        position = {"params": "first", "grads": "second", "state": "third"}
        for p, g, s in list(itertools.permutations(trees))[1:]:
            if self._fit(trees[p], trees[g], trees[s]):
                if s == "state":
                    message = f"the {position[g]} argument has gradients, the {position[p]} parameters"
                    return TypeError(f"{self._takes}: {message}")
                optax = ", which is where optax's update takes it" if s == "grads" else ""
                return TypeError(f"{self._takes}: the state came as the {position[s]} argument{optax}")
        return None

    def _fit(self, params: Any, grads: Any, state: Any) -> bool:
        """Whether the three trees belong together in these roles."""
        with contextlib.suppress(Exception):  # `init`, and comparisons, may raise anything for a tree in the wrong role
            expected = self._expected(params)
            if expected is not None and gradients_differ(params, grads) is None:
                return state_differs(*expected, state) is None
        return False

    def _expected(self, params: Any) -> tuple[Any] | None:
        """A state for such parameters, made on the meta device; None where `init` needs their values."""
        with contextlib.suppress(Exception):
            return (self.init(optree.tree_map(_hollow, params)),)
        return None


def guarded(name: str, init: Init, step: Step) -> tuple[Init, Step]:
    """An optimizer's `init` and `step`; the returned `step` checks its arguments first."""
    guard = Guard(name, init)

    @functools.wraps(init)
    def first(params: Any) -> Any:
        dynamo.refuse_compiling(f"the optimizer {name}")
        state = placed_together(name, init, params)
        guard.keep(params)
        return state

    @functools.wraps(step)
    def checked(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        dynamo.refuse_compiling(f"the optimizer {name}")
        leaves, places = guard.compare(params, grads, state)
        use = guard.use(leaves, places, state)
        if (recorder := recording.current()) is not None:
            recorder.used(guard.pairs(leaves))
            for path, number in _shared_numbers(leaves, state):
                if not any(known.endswith(path) for known, _ in recorder.stated):  # by what this is a part of
                    recorder.stated.append((f"the optimizer's {path}", number))
        if guard.away:
            refuse_elsewhere(name, state)
        new = step(params, grads, state)
        if guard.away:
            new = placed(new[0], "params"), placed(new[1])
            released(grads, new)
        guard.keep(new[0])
        guard.used(use, use is not None and new[1] is state)
        return new

    return first, checked


def _shared_numbers(params: list[Any], state: Any) -> list[tuple[str, float]]:
    """The numbers of a state, which must be equal on all ranks that train the same stages."""
    if any(is_unit(x) and x.layout.placement.only_at_axes for x in params):
        return []
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state)
    pairs = zip(accessors, leaves, strict=True)
    return [(dotted(accessor), x) for accessor, x in pairs if type(x) in (int, float, bool)]


def guarded_update(init: Init, update: Callable[..., tuple[Any, Any]]) -> tuple[Init, Step]:
    """A transform's `init` and `update`; the returned `update` checks its arguments if it gets parameters."""
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


def _guarded_places(leaves: list[Any], grads_start: int, state_start: int) -> Places:
    """Places of the first trained parameter, of the first non-0-d tensor of the state, and of the ints of the state."""
    values = [*map(_value_of, leaves)]
    trained = (
        i
        for i, leaf in enumerate(leaves[:grads_start])
        if isinstance(values[i], Tensor) and (leaf.layout.trainable if is_unit(leaf) else moves(leaf))
    )
    state = range(state_start, len(leaves))
    slots = (i for i in state if isinstance(values[i], Tensor) and values[i].ndim)
    return next(trained, None), next(slots, None), [i for i in state if type(leaves[i]) is int]


def _value_of(leaf: Any) -> Any:
    return leaf.values if is_unit(leaf) else leaf


def _fixed_properties(leaf: Any) -> Any:
    """Returns the properties of a leaf that must not change for it to pass unchecked."""
    if type(leaf) is FlatShard:
        return leaf.layout, leaf.values is None or leaf.values.shape
    if type(leaf) is Piece:
        return leaf.layout, leaf.entries, leaf.start, leaf.stop, leaf.values is None or leaf.values.shape
    return (leaf.shape, leaf.layout) if isinstance(leaf, Tensor) else None


def _hollow(leaf: Any) -> Any:
    """A tensor of the same shape and dtype without memory."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf


# --- gradients and parameters ---


def gradients_differ(params: Any, grads: Any) -> Exception | None:
    """Returns an error that says how gradients do not fit these parameters; None if they fit."""
    for path, p, g in _side_by_side(params, grads):
        name = path or "the tree"
        if is_unit(p):
            message = _unit_differs(path or p.layout.stage or name, p, g)
        elif isinstance(p, Tensor):
            message = _plain_differs(name, p, g)
        elif p is None and g is None:
            continue
        elif p is None or g is None or is_unit(g):
            message = _whole_or_cut(name, p, g)
        else:
            message = f"the gradients' structure is not the parameters': {_structures(path, p, g)}"
        if message:
            return ValueError(message)
    return None


def _unit_differs(name: str, p: Any, g: Any) -> str:
    """Describes a mismatch in the gradient of a flat shard, or of a piece; empty if none."""
    if not is_unit(g):
        if _has_units(g):
            return (
                f"these parameters are only a part of what there are gradients of: at {name} there is {_label(p)}, "
                f"and {_label(g)} of {_keys_of(_branches(g) or {})} among the gradients. Pass the parameters whole, or "
                f"their part of the gradients and a state of their own"
            )
        return "" if g is None else (
            f"these gradients are whole, the parameters are cut: at {name} there is {_label(g)} for {_label(p)}. Take "
            f"them with respect to the sharded parameters"
        )  # fmt: skip
    if p.values is None and g.values is not None:
        return (
            f"{name} has no values among the parameters, but some among the gradients: are these in each other's place?"
        )
    if p.layout.trainable and not isinstance(p.values, Tensor):
        return f"{name}: the parameters are {_label(p.values)}, not a tensor"
    if not belongs(g, p):
        return f"{name}: the gradient is of other parameters: of {g.layout}, and the parameter is {p.layout}"
    if not p.layout.trainable or g.values is None:
        return ""
    local_numel = p.stop - p.start if type(p) is Piece else p.layout.num_elements_on(process_groups.global_rank())
    if tuple(p.values.shape) != (local_numel,):
        return f"{name}: the parameters are {_label(p.values)}, but the layout {p.layout} says ({local_numel},)"
    offloaded = p.layout.placement.tiers != NOWHERE
    if isinstance(g.values, Tensor) and (message := _place_differs(name, p.values, g.values, offloaded)):
        return message
    if not isinstance(g.values, Tensor) or (g.layout == p.layout and g.values.shape != p.values.shape):
        return f"{name}: the gradient is {_label(g.values)}, the parameter {_label(p.values)}"
    return ""


def belongs(grad: Any, param: Any) -> bool:
    """Whether a gradient belongs to a parameter: its layout cuts it in the same way, or further."""
    if type(grad) is not type(param):
        return False
    if type(param) is Piece and (grad.entries, grad.start, grad.stop) != (param.entries, param.start, param.stop):
        return False
    return grad.layout is param.layout or grad.layout == param.layout or _finer(grad.layout, param.layout)


def _finer(layout: Layout, than: Layout) -> bool:
    """Whether `layout` is `than`, cut further along axes over which `than` has replicas."""
    fine, coarse = layout.placement, than.placement
    return (
        layout.placed(coarse) == than
        and fine.axes[: len(coarse.axes)] == coarse.axes
        and set(fine.axes) <= {*coarse.axes, *coarse.replicas}
        and fine.only_at == coarse.only_at
    )


def _plain_differs(name: str, p: Tensor, g: Any) -> str:
    if g is None or (isinstance(g, Tensor) and not moves(p)):
        return ""
    if isinstance(g, Tensor):
        if g.shape == p.shape:
            return _place_differs(name, p, g)
        return f"{name}: the gradient has shape {tuple(g.shape)}, the parameter {tuple(p.shape)}"
    return _whole_or_cut(name, p, g)


def _place_differs(name: str, p: Tensor, g: Tensor, offloaded: bool = False) -> str:
    """Describes a mismatch of the tensors' layouts or devices; if `offloaded`, devices may differ."""
    for role, x in (("parameter", p), ("gradient", g)):
        if x.layout is not torch.strided:
            return f"{name}: the {role} is {x.layout}; optimizers take dense tensors: pass its to_dense()"
    if g.device != p.device and not offloaded:
        return f"{name}: the gradient is on {g.device}, the parameter on {p.device}"
    return ""


def _whole_or_cut(name: str, p: Any, g: Any) -> str:
    """The message for a flat shard where the other tree has another structure or a plain tensor."""
    if is_unit(g) and _has_units(p):
        return (
            f"these gradients are only a part of what there are parameters of: at {name} there is {_label(g)} for "
            f"{_label(p)} of {_keys_of(_branches(p) or {})}. Pass the whole tree that grad returns; None "
            f"stands for what has no gradient"
        )
    if is_unit(g):
        return f"these gradients are cut, the parameters are whole: at {name} there is {_label(g)} for {_label(p)}"
    return f"the gradients' structure is not the parameters': at {name} there is {_label(g)} for {_label(p)}"


def _has_units(node: Any) -> bool:
    return any(map(is_unit, optree.tree_leaves(node, is_leaf=is_unit)))


def moves(x: Tensor) -> bool:
    """Whether a plain tensor is trained."""
    return x.is_floating_point() or x.is_complex()


# --- a state and the one that `init` makes ---


def state_differs(want: Any, state: Any) -> Exception | None:
    """Returns an error that says how a state differs from `want`, which `init` returned; None if it does not."""
    if state is None and want is not None:
        return TypeError("the state is None; it is what init makes of the parameters: state = optimizer.init(params)")
    for path, w, s in _side_by_side(want, state):
        name = path or "the state"
        if is_unit(w) and is_unit(s) and not (belongs(s, w) and s.layout == w.layout):
            message = other_parameters(s.layout, w.layout) or _difference_text(s.layout, w.layout)
            return ValueError(f"this state is of other parameters: {name} {message}")
        if is_unit(w) and is_unit(s):
            w, s = w.values, s.values
        if isinstance(w, Tensor) and isinstance(s, Tensor) and w.shape != s.shape:
            return ValueError(
                f"this state is of other parameters: {name} has shape {tuple(s.shape)}, where init(params) has "
                f"{tuple(w.shape)}"
            )
        if is_unit(w) != is_unit(s):
            inside = _has_units(w) and _has_units(s)
            reason = "one is a part of the other's tree" if inside else "one is whole, and the other is cut"
            return ValueError(
                f"this state is of other parameters: {name} is {_label(s)}, where init(params) has {_label(w)}: "
                f"{reason}"
            )
        if not _interchangeable(w, s):
            difference = _structures(name, w, s, "init(params)", "it")
            return ValueError(f"this state is of another optimizer, or of other parameters: {difference}")
    return None


def other_parameters(layout: Layout, expected: Layout | None) -> str:
    """Describes how a state's layout differs from that of the parameters; empty if it does not."""
    if layout is expected or layout == expected or expected is None:
        return ""
    pairs = zip(layout.entries, expected.entries, strict=False)
    return _difference_text(*next(((a.path, b.path) for a, b in pairs if a.path != b.path), (layout, expected)))


def _difference_text(actual: Any, expected: Any) -> str:
    advice = "make one by init(params), or load it from a checkpoint like that one"
    return f"is of {actual}, and the parameter is {expected}: {advice}"


def _interchangeable(w: Any, s: Any) -> bool:
    """Whether two nodes, which are not containers of the same kind and length, can stand for each other."""
    if is_unit(w) or is_unit(s):
        return is_unit(w) and is_unit(s)
    if isinstance(w, Tensor) and w.ndim:
        return isinstance(s, Tensor)
    if w is None or s is None:
        return w is s
    return not _branches(w) and not _branches(s)


# --- two trees, side by side ---


def _side_by_side(first: Any, second: Any) -> Iterable[tuple[str, Any, Any]]:
    """Yields the path and both trees' nodes at each leaf, or wherever the trees' structures differ."""
    leaves, tree = optree.tree_flatten(first, is_leaf=is_unit)
    with contextlib.suppress(ValueError, TypeError):
        return zip((dotted(accessor) for accessor in tree.accessors()), leaves, tree.flatten_up_to(second), strict=True)
    return ((joined(*path), *both) for path, *both in _descended(first, second, ()))


def _descended(first: Any, second: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """As `_side_by_side`, for trees of different structure."""
    first_children = None if is_unit(first) else _branches(first)
    if first_children is None:
        yield path, first, second
        return
    if first_children == {} and isinstance(first, dict) and isinstance(second, dict) and path:
        return  # steps fill this dict, such as the state of torch's optimizers
    second_children = None if is_unit(second) else _branches(second)
    if second_children is None or type(first) is not type(second) or first_children.keys() != second_children.keys():
        yield path, first, second
        return
    for name, child in first_children.items():
        yield from _descended(child, second_children[name], (*path, name))


def _branches(node: Any) -> dict[str, Any] | None:
    """A node's children by name; None for a leaf."""
    if node is None or optree.tree_is_leaf(node):
        return None
    accessors, children, _ = optree.tree_flatten_with_accessor(node, lambda x: x is not node, none_is_leaf=True)
    return dict(zip(map(dotted, accessors), children, strict=True))


def _structures(name: str, first: Any, second: Any, a: str = "the parameters", b: str = "the gradients") -> str:
    """Describes how two nodes at the same place differ; `a` and `b` are what to call them."""
    first_children, second_children = _branches(first), _branches(second)
    place = f" at {name}" if name and name != "the state" else ""
    same_type = (
        first_children is not None
        and second_children is not None
        and type(first) is type(second)
        and not is_unit(first)
    )
    shown = (
        (_keys_of(second_children or {}), _keys_of(first_children or {}))
        if same_type
        else (_label(second), _label(first))
    )
    return f"{b} {'have' if b.endswith('s') else 'has'} {shown[0]}{place}, {a} {shown[1]}"


def _keys_of(children: dict[str, Any]) -> str:
    return f"[{listed(children, 6)}]"


def _label(value: Any) -> str:
    if is_flat(value) or type(value) is Piece:
        return f"a flat shard of {value.layout.stage or 'the tree'}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
