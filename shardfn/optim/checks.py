"""Checks that parameters, gradients and state belong together, before a step changes any of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import process_groups
from shardfn.mesh.spec import dotted, joined
from shardfn.quoting import listed
from shardfn.shards.layout import Layout, is_flat
from shardfn.shards.pieces import Piece, is_unit
from shardfn.shards.placement import Tiers

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
    """What is wrong with the gradient of a flat shard or a piece of one; empty if nothing is."""
    if not is_unit(g):
        if _has_units(g):
            return (
                f"these parameters are only a part of what there are gradients of: at {name} there is {_shown(p)}, "
                f"and {_shown(g)} of {_names(_inside(g) or {})} among the gradients. Pass the parameters whole, or "
                f"their part of the gradients and a state of their own"
            )
        return "" if g is None else (
            f"these gradients are whole, the parameters are cut: at {name} there is {_shown(g)} for {_shown(p)}. Take "
            f"them with respect to the sharded parameters"
        )  # fmt: skip
    if p.values is None and g.values is not None:
        return (
            f"{name} has no values among the parameters, but some among the gradients: are these in each other's place?"
        )
    if p.layout.trainable and not isinstance(p.values, Tensor):
        return f"{name}: the parameters are {_shown(p.values)}, not a tensor"
    if not belongs(g, p):
        return f"{name}: the gradient is of other parameters: of {g.layout}, and the parameter is {p.layout}"
    if not p.layout.trainable or g.values is None:
        return ""
    held = p.stop - p.start if type(p) is Piece else p.layout.held(process_groups.global_rank())
    if tuple(p.values.shape) != (held,):
        return f"{name}: the parameters are {_shown(p.values)}, but the layout {p.layout} says ({held},)"
    offloaded = p.layout.placement.tiers != Tiers()
    if isinstance(g.values, Tensor) and (message := _place_differs(name, p.values, g.values, offloaded)):
        return message
    if not isinstance(g.values, Tensor) or (g.layout == p.layout and g.values.shape != p.values.shape):
        return f"{name}: the gradient is {_shown(g.values)}, the parameter {_shown(p.values)}"
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
    """What is wrong with the tensors' layout or device; if `offloaded`, devices may differ."""
    for role, x in (("parameter", p), ("gradient", g)):
        if x.layout is not torch.strided:
            return f"{name}: the {role} is {x.layout}; optimizers take dense tensors: pass its to_dense()"
    if g.device != p.device and not offloaded:
        return f"{name}: the gradient is on {g.device}, the parameter on {p.device}"
    return ""


def _whole_or_cut(name: str, p: Any, g: Any) -> str:
    """The message for a flat shard beside a plain tensor or another structure."""
    if is_unit(g) and _has_units(p):
        return (
            f"these gradients are only a part of what there are parameters of: at {name} there is {_shown(g)} for "
            f"{_shown(p)} of {_names(_inside(p) or {})}. Pass the whole tree that grad returns; None "
            f"stands for what has no gradient"
        )
    if is_unit(g):
        return f"these gradients are cut, the parameters are whole: at {name} there is {_shown(g)} for {_shown(p)}"
    return f"the gradients' structure is not the parameters': at {name} there is {_shown(g)} for {_shown(p)}"


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
            return ValueError(
                f"this state is of other parameters: {name} is of {s.layout}, and the parameter is {w.layout}: make "
                f"one by init(params), or load it from a checkpoint like that one"
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
                f"this state is of other parameters: {name} is {_shown(s)}, where init(params) has {_shown(w)}: {why}"
            )
        if not _like(w, s):
            how = _structures(name, w, s, "init(params)", "it")
            return ValueError(f"this state is of another optimizer, or of other parameters: {how}")
    return None


def _like(w: Any, s: Any) -> bool:
    """Whether two nodes, which are not containers of the same kind and length, can stand for each other."""
    if is_unit(w) or is_unit(s):
        return is_unit(w) and is_unit(s)
    if isinstance(w, Tensor) and w.ndim:
        return isinstance(s, Tensor)
    if w is None or s is None:
        return w is s
    return not _inside(w) and not _inside(s)


# --- two trees, side by side ---


def _side_by_side(first: Any, second: Any) -> Iterable[tuple[str, Any, Any]]:
    """Yields the path and both trees' nodes at each leaf, or wherever the trees' structures differ."""
    leaves, tree = optree.tree_flatten(first, is_leaf=is_unit)
    with contextlib.suppress(ValueError, TypeError):
        return zip((dotted(accessor) for accessor in tree.accessors()), leaves, tree.flatten_up_to(second), strict=True)
    return ((joined(*path), *both) for path, *both in _descended(first, second, ()))


def _descended(first: Any, second: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """As `_side_by_side`, for trees of different structure."""
    ours = None if is_unit(first) else _inside(first)
    if ours is None:
        yield path, first, second
        return
    if ours == {} and isinstance(first, dict) and isinstance(second, dict) and path:
        return  # steps fill this dict, such as the state of torch's optimizers
    theirs = None if is_unit(second) else _inside(second)
    if theirs is None or type(first) is not type(second) or ours.keys() != theirs.keys():
        yield path, first, second
        return
    for name, child in ours.items():
        yield from _descended(child, theirs[name], (*path, name))


def _inside(node: Any) -> dict[str, Any] | None:
    """A node's children by name; None for a leaf."""
    if node is None or optree.tree_is_leaf(node):
        return None
    accessors, children, _ = optree.tree_flatten_with_accessor(node, lambda x: x is not node, none_is_leaf=True)
    return {dotted(accessor): child for accessor, child in zip(accessors, children, strict=True)}


def _structures(name: str, first: Any, second: Any, a: str = "the parameters", b: str = "the gradients") -> str:
    """Describes how two nodes at the same place differ; `a` and `b` are what to call them."""
    ours, theirs = _inside(first), _inside(second)
    place = f" at {name}" if name and name != "the state" else ""
    alike = ours is not None and theirs is not None and type(first) is type(second) and not is_unit(first)
    shown = (_names(theirs or {}), _names(ours or {})) if alike else (_shown(second), _shown(first))
    return f"{b} {'have' if b.endswith('s') else 'has'} {shown[0]}{place}, {a} {shown[1]}"


def _names(children: dict[str, Any]) -> str:
    return f"[{listed(children, 6)}]"


def _shown(value: Any) -> str:
    if is_flat(value) or type(value) is Piece:
        return f"a flat shard of {value.layout.stage or 'the tree'}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
