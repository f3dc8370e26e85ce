"""Whether parameters, gradients and state belong together, found out before a step changes any of them."""

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

from shardfn.compat import dynamo, process_groups
from shardfn.mesh.spec import dotted
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.pieces import Piece, is_unit

Init = Callable[[Any], Any]
Step = Callable[[Any, Any, Any], tuple[Any, Any]]

Places = tuple[int | None, int | None, list[int]]

ORDERS = {"step": ("params", "grads", "state"), "update": ("grads", "state", "params")}


@dataclass(frozen=True)
class Use:
    """A state, as a step got it, by what tells it from the one that the step returns. No memory is kept by it.

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
        self.name, self.init = name, init
        self._passed: tuple[Any, list[Any], int, int, Places] | None = None
        self._used: Use | None = None
        self._known: Callable[[], Any] = _nothing

    def keep(self, params: Any) -> None:
        """Remembers what the parameters are."""
        if torch.compiler.is_compiling():
            return
        first: Any = next(optree.tree_iter(params, is_leaf=is_unit), None)
        values = first.values if is_unit(first) else first
        self._known = weakref.ref(values) if isinstance(values, Tensor) else _nothing

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
            passed = self._passed = spec, kinds, own, own + others, _places(leaves, own, own + others)
        self._refuse_swapped(leaves, *passed[2:4])
        return leaves, passed[4]

    def _refuse_swapped(self, leaves: list[Any], first: int, last: int) -> None:
        known = self._known()
        if known is None or not leaves or getattr(leaves[0], "values", leaves[0]) is known:
            return
        tensors = [leaf.values if is_unit(leaf) else leaf for leaf in leaves[:last]]
        own, others = tensors[:first], tensors[first:]
        if not any(x is known for x in own) and any(x is known for x in others):
            raise ValueError(
                f"{self._takes()}: the parameters came as grads here; if they are meant as gradients, pass a copy"
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
        if wrong is None:
            expected = self._expected(params)
            wrong = None if expected is None else state_differs(*expected, state)
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
        place = dict(zip(ORDERS[self.name], ("first", "second", "third"), strict=True))
        for p, g, s in list(itertools.permutations(given))[1:]:
            if self._fit(given[p], given[g], given[s]):
                if s == "state":
                    return TypeError(
                        f"{self._takes()}: the {place[g]} argument has gradients, the {place[p]} parameters"
                    )
                optax = ", which is where optax's update takes it" if (self.name, s) == ("step", "grads") else ""
                return TypeError(f"{self._takes()}: the state came as the {place[s]} argument{optax}")
        return None

    def _takes(self) -> str:
        return f"{self.name} takes ({', '.join(ORDERS[self.name])})"

    def _fit(self, params: Any, grads: Any, state: Any) -> bool:
        with contextlib.suppress(Exception):  # a state is no parameters
            expected = self._expected(params)
            return expected is not None and gradients_differ(params, grads) is None and (
                state_differs(*expected, state) is None
            )  # fmt: skip
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
        state = init(params)
        guard.keep(params)
        return state

    @functools.wraps(step)
    def checked(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        found = guard.compare(params, grads, state)
        use = None if found is None else guard.use(*found, state)
        made = step(params, grads, state)
        guard.keep(made[0])
        guard.used(use, made[1] is state)
        return made

    return first, checked


def guarded_update(init: Init, update: Step) -> Step:
    """A transform's update, which compares its arguments where it gets parameters."""
    guard = Guard("update", init)

    @functools.wraps(update)
    def checked(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if params is not None:
            guard.compare(params, grads, state)
        return update(grads, state, params)

    return checked


def _places(leaves: list[Any], own: int, others: int) -> Places:
    """Where the first trained parameter is, the first tensor of the state, and the ints of the state."""
    trained = (i for i in range(own) if _trained(leaves[i]))
    slots = (
        i for i in range(others, len(leaves)) if isinstance(_values(leaves[i]), Tensor) and _values(leaves[i]).ndim
    )
    return next(trained, None), next(slots, None), [i for i in range(others, len(leaves)) if type(leaves[i]) is int]


def _trained(leaf: Any) -> bool:
    values = _values(leaf)
    return isinstance(values, Tensor) and (leaf.layout.trainable if is_unit(leaf) else _moves(values))


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


def _nothing() -> None:
    return None


# --- gradients beside parameters ---


def gradients_differ(params: Any, grads: Any) -> Exception | None:
    """What is wrong with gradients of these parameters; None if nothing is."""
    for path, p, g in _beside(params, grads):
        name = path or "the tree"
        if is_unit(p):
            wrong = _unit_differs(path or p.layout.stage or name, p, g)
        elif isinstance(p, Tensor):
            wrong = _plain_differs(name, p, g)
        elif p is None and g is None:
            continue
        elif p is None or g is None or is_unit(g):
            wrong = _whole_or_cut(name, p, g)
        else:
            wrong = f"the gradients' structure is not the parameters': {_structures(path, p, g)}"
        if wrong:
            return ValueError(wrong)
    return None


def _unit_differs(name: str, p: Any, g: Any) -> str:
    if not is_unit(g):
        if _has_units(g):
            return (
                f"these parameters are only a part of what there are gradients of: at {name} there is {_told(p)} "
                f"beside {_told(g)} of {_names(_inside(g) or {})} among the gradients. Pass the parameters whole, or "
                f"their part of the gradients and a state of their own"
            )
        return "" if g is None else (
            f"these gradients are whole, the parameters are cut: at {name} there is {_told(g)} beside {_told(p)}. Take "
            f"them with respect to the sharded parameters"
        )  # fmt: skip
    if p.values is None and g.values is not None:
        return (
            f"{name} has no values among the parameters, but some among the gradients: are these in each other's place?"
        )
    if p.layout.trainable and not isinstance(p.values, Tensor):
        return f"{name}: the parameters are {_told(p.values)}, not a tensor"
    if not belongs(g, p):
        return f"{name}: the gradient is of other parameters: of {_of(g)}, and the parameter is {_of(p)}"
    if not p.layout.trainable or g.values is None:
        return ""
    held = p.stop - p.start if type(p) is Piece else p.layout.held(process_groups.global_rank())
    if tuple(p.values.shape) != (held,):
        return f"{name}: the parameters are {_told(p.values)}, but the layout {p.layout} says ({held},)"
    if isinstance(g.values, Tensor) and (wrong := _place_differs(name, p.values, g.values)):
        return wrong
    if not isinstance(g.values, Tensor) or (g.layout == p.layout and g.values.shape != p.values.shape):
        return f"{name}: the gradient is {_told(g.values)}, the parameter {_told(p.values)}"
    return ""


def belongs(grad: Any, param: Any) -> bool:
    """Whether a gradient is of these parameters: cut in the same way, or further."""
    if type(grad) is not type(param):
        return False
    if type(param) is Piece and (grad.entries, grad.start, grad.stop) != (param.entries, param.start, param.stop):
        return False
    return grad.layout is param.layout or grad.layout == param.layout or _finer(grad.layout, param.layout)


def _finer(layout: Layout, than: Layout) -> bool:
    cut, coarse = layout.placement, than.placement
    return (
        layout.placed(coarse) == than
        and cut.axes[: len(coarse.axes)] == coarse.axes
        and set(cut.axes) <= {*coarse.axes, *coarse.replicas}
        and cut.only_at == coarse.only_at
    )


def _plain_differs(name: str, p: Tensor, g: Any) -> str:
    if g is None or (isinstance(g, Tensor) and not _moves(p)):
        return ""
    if isinstance(g, Tensor):
        if g.shape == p.shape:
            return _place_differs(name, p, g)
        return f"{name}: the gradient has shape {tuple(g.shape)}, the parameter {tuple(p.shape)}"
    return _whole_or_cut(name, p, g)


def _place_differs(name: str, p: Tensor, g: Tensor) -> str:
    for what, x in (("parameter", p), ("gradient", g)):
        if x.layout is not torch.strided:
            return f"{name}: the {what} is {x.layout}; optimizers take dense tensors: pass its to_dense()"
    if g.device != p.device:
        return f"{name}: the gradient is on {g.device}, the parameter on {p.device}"
    return ""


def _whole_or_cut(name: str, p: Any, g: Any) -> str:
    if is_unit(g) and _has_units(p):
        return (
            f"these gradients are only a part of what there are parameters of: at {name} there is {_told(g)} beside "
            f"{_told(p)} of {_names(_inside(p) or {})}. Pass the whole tree that grad returns; None "
            f"stands for what has no gradient"
        )
    if is_unit(g):
        return f"these gradients are cut, the parameters are whole: at {name} there is {_told(g)} beside {_told(p)}"
    return f"the gradients' structure is not the parameters': at {name} there is {_told(g)} beside {_told(p)}"


def _has_units(node: Any) -> bool:
    return any(map(is_unit, optree.tree_leaves(node, is_leaf=is_unit)))


def _moves(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# --- a state beside that which `init` makes ---


def state_differs(want: Any, state: Any) -> Exception | None:
    """What is wrong with a state, which should be like this one; None if nothing is."""
    if state is None and want is not None:
        return TypeError("the state is None; it is what init makes of the parameters: state = optimizer.init(params)")
    for path, w, s in _beside(want, state):
        name = path or "the state"
        if is_unit(w) and is_unit(s) and not _same_place(w, s):
            return ValueError(
                f"this state is of other parameters: {name} is of {_of(s)}, and the parameter is {_of(w)}: make one by "
                f"init(params), or load it from a checkpoint like that one"
            )
        if is_unit(w) and is_unit(s):
            w, s = w.values, s.values
        if isinstance(w, Tensor) and isinstance(s, Tensor) and w.shape != s.shape:
            return ValueError(
                f"this state is of other parameters: {name} has shape {tuple(s.shape)}, where init(params) has "
                f"{tuple(w.shape)}"
            )
        if is_unit(w) != is_unit(s):
            why = (
                "one is a part of the other's tree"
                if _has_units(w) and _has_units(s)
                else "one is whole, and the other is cut"
            )
            return ValueError(
                f"this state is of other parameters: {name} is {_told(s)}, where init(params) has {_told(w)}: {why}"
            )
        if not _like(w, s):
            told = _structures(name, w, s, "init(params)", "it")
            return ValueError(f"this state is of another optimizer, or of other parameters: {told}")
    return None


def _same_place(w: Any, s: Any) -> bool:
    return belongs(s, w) and s.layout == w.layout


def _like(w: Any, s: Any) -> bool:
    """Whether two things that are no containers of the same kind and length can stand for each other."""
    if is_unit(w) or is_unit(s):
        return is_unit(w) and is_unit(s)
    if isinstance(w, Tensor) and w.ndim:
        return isinstance(s, Tensor)
    if w is None or s is None:
        return w is s
    return not _inside(w) and not _inside(s)


# --- two trees, side by side ---


def _beside(one: Any, other: Any) -> Iterable[tuple[str, Any, Any]]:
    """Where a tree has leaves, or another differs in structure: the path, and what each has there."""
    leaves, tree = optree.tree_flatten(one, is_leaf=is_unit)
    with contextlib.suppress(ValueError, TypeError):
        return zip((dotted(accessor) for accessor in tree.accessors()), leaves, tree.flatten_up_to(other), strict=True)
    return ((".".join(path), *both) for path, *both in _descended(one, other, ()))


def _descended(one: Any, other: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    inside = None if is_unit(one) else _inside(one)
    if inside is None:
        yield path, one, other
        return
    if inside == {} and isinstance(one, dict) and isinstance(other, dict) and path:
        return  # what is filled as steps go by
    theirs = None if is_unit(other) else _inside(other)
    if theirs is None or type(one) is not type(other) or inside.keys() != theirs.keys():
        yield path, one, other
        return
    for name, child in inside.items():
        yield from _descended(child, theirs[name], (*path, name))


def _inside(node: Any) -> dict[str, Any] | None:
    """A node's children by name; None of a leaf."""
    if node is None or optree.tree_is_leaf(node):
        return None
    accessors, children, _ = optree.tree_flatten_with_accessor(node, lambda x: x is not node, none_is_leaf=True)
    return {dotted(accessor): child for accessor, child in zip(accessors, children, strict=True)}


def _structures(name: str, one: Any, other: Any, this: str = "the parameters", that: str = "the gradients") -> str:
    """How two nodes at one place differ, in words."""
    mine, theirs = _inside(one), _inside(other)
    where = f" at {name}" if name and name != "the state" else ""
    if mine is None or theirs is None or type(one) is not type(other) or is_unit(one) or is_unit(other):
        return f"{that} has {_told(other)}{where}, {this} {_told(one)}".replace("gradients has", "gradients have")
    return f"{that} has {_names(theirs)}{where}, {this} {_names(mine)}".replace("gradients has", "gradients have")


def _names(found: dict[str, Any]) -> str:
    listed = list(found)
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    return f"[{', '.join(listed[:6])}{more}]"


def _told(value: Any) -> str:
    if is_flat(value) or type(value) is Piece:
        return f"a flat shard of {value.layout.stage or 'the tree'}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _of(unit: Any) -> str:
    return f"{unit.layout}"
