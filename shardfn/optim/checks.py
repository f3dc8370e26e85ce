"""Whether parameters, gradients and state belong together, found out before a step changes any of them."""

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
    """What is wrong with gradients of these parameters; None if nothing is."""
    for path, p, g in _side_by_side(params, grads):
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
    away = p.layout.placement.tiers != Tiers()
    if isinstance(g.values, Tensor) and (wrong := _place_differs(name, p.values, g.values, away)):
        return wrong
    if not isinstance(g.values, Tensor) or (g.layout == p.layout and g.values.shape != p.values.shape):
        return f"{name}: the gradient is {_shown(g.values)}, the parameter {_shown(p.values)}"
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
    if g is None or (isinstance(g, Tensor) and not moves(p)):
        return ""
    if isinstance(g, Tensor):
        if g.shape == p.shape:
            return _place_differs(name, p, g)
        return f"{name}: the gradient has shape {tuple(g.shape)}, the parameter {tuple(p.shape)}"
    return _whole_or_cut(name, p, g)


def _place_differs(name: str, p: Tensor, g: Tensor, away: bool = False) -> str:
    """What is wrong with where they are; `away`, they may be on several devices."""
    for what, x in (("parameter", p), ("gradient", g)):
        if x.layout is not torch.strided:
            return f"{name}: the {what} is {x.layout}; optimizers take dense tensors: pass its to_dense()"
    if g.device != p.device and not away:
        return f"{name}: the gradient is on {g.device}, the parameter on {p.device}"
    return ""


def _whole_or_cut(name: str, p: Any, g: Any) -> str:
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
    """What is wrong with a state, which should be like this one; None if nothing is."""
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
    """Whether two things that are not containers of the same kind and length can stand for each other."""
    if is_unit(w) or is_unit(s):
        return is_unit(w) and is_unit(s)
    if isinstance(w, Tensor) and w.ndim:
        return isinstance(s, Tensor)
    if w is None or s is None:
        return w is s
    return not _inside(w) and not _inside(s)


# --- two trees, side by side ---


def _side_by_side(one: Any, other: Any) -> Iterable[tuple[str, Any, Any]]:
    """Where a tree has leaves, or another differs in structure: the path, and what each has there."""
    leaves, tree = optree.tree_flatten(one, is_leaf=is_unit)
    with contextlib.suppress(ValueError, TypeError):
        return zip((dotted(accessor) for accessor in tree.accessors()), leaves, tree.flatten_up_to(other), strict=True)
    return ((joined(*path), *both) for path, *both in _descended(one, other, ()))


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
    alike = mine is not None and theirs is not None and type(one) is type(other) and not is_unit(one)
    shown = (_names(theirs or {}), _names(mine or {})) if alike else (_shown(other), _shown(one))
    return f"{that} {'have' if that.endswith('s') else 'has'} {shown[0]}{where}, {this} {shown[1]}"


def _names(found: dict[str, Any]) -> str:
    return f"[{listed(found, 6)}]"


def _shown(value: Any) -> str:
    if is_flat(value) or type(value) is Piece:
        return f"a flat shard of {value.layout.stage or 'the tree'}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
