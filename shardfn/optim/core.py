"""What an optimizer is, and how it sees parameters: as the elements that this rank holds, and whose they are.

An optimizer is two functions, `state = init(params)` and `params, state = step(params, grads, state)`. Whatever it
remembers is in the state, a pytree; so is every number that it was given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardfn import collectives, compat
from shardfn.layout import FlatShard, Layout, is_flat
from shardfn.mesh import AxisName, as_names, mesh_of, scope
from shardfn.optim.division import divides_init, divides_step
from shardfn.spec import dotted

Rule = Callable[[str, tuple[int, ...]], Any]
"""Something that depends on a parameter: a function of its path, `blocks.0.attn.q`, and its whole shape."""


@dataclass(frozen=True)
class Optimizer:
    """Two functions; neither has a memory of its own.

    Where a strategy cuts optimizer state further than parameters, they meet this rank's part only, and new parameters
    are gathered.

    Attributes:
        init: `params -> state`.
        step: `(params, grads, state) -> (params, state)`. Gradients are a pytree like the parameters; None, or a
            frozen parameter's, is left out.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "init", divides_init(_apart(self.init)))
        object.__setattr__(self, "step", divides_step(self.step))


@dataclass(frozen=True)
class Transform:
    """What is done to gradients before an optimizer gets them.

    Attributes:
        init: `params -> state`.
        update: `(grads, state, params) -> (grads, state)`.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


def _apart(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`init`, but not for a tree that has one tensor at two places: each would be moved by a gradient of its own."""

    @functools.wraps(init)
    def checked(params: Any) -> Any:
        seen: set[int] = set()
        for unit in units(params).each:
            if unit.trainable and id(unit.values) in seen:
                raise ValueError(
                    f"{unit.name} is at two places of the tree, and each would be moved by a gradient of its own: keep "
                    f"it at one, and pass it to both functions from there"
                )
            seen.add(id(unit.values))
        return init(params)

    return checked


def shard_state(optimizer: Optimizer, axis: AxisName) -> Optimizer:
    """The optimizer with its state cut along `axis` too, over which parameters are the same; ZeRO-1 for any strategy.

    A rank updates its part of each parameter with its part of the gradient, which is sliced if every rank has all of
    it, and the parts are gathered, those of all stages at once. `zero1` and `hfsdp` do this by themselves, and their
    gradients are scattered in the first place. Plain tensors are updated everywhere.

    Args:
        optimizer: any.
        axis: one or several of each strategy's replicas.

    Raises:
        ValueError: an axis over which a parameter is not the same.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020), 5.1.
    """
    names = as_names(axis)

    def finer(layout: Layout) -> Layout:
        placement = layout.placement
        wrong = [name for name in names if name not in placement.replicas + placement.axes]
        if wrong:
            raise ValueError(
                f"shard_state: stage {layout.stage!r} is not the same over {wrong[0]!r}, but over "
                f"{' and '.join(map(repr, placement.replicas)) or 'no axis'}: pass one of those, or another strategy"
            )
        return layout.placed(placement.dividing(names)).divided

    return Optimizer(divides_init(optimizer.init, finer), divides_step(optimizer.step, finer))


def chain(*parts: Any) -> Optimizer:
    """Transforms of gradients one after another, and the optimizer that gets what comes out.

    Example:
        ``chain(clip_by_global_norm(1.0), adamw(3e-4))``
    """
    *transforms, last = parts
    if not all(isinstance(part, Transform) for part in transforms) or not isinstance(last, Optimizer):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(f"chain: ({kinds}); it takes any number of Transform, then one Optimizer")

    def init(params: Any) -> Any:
        return tuple(part.init(params) for part in parts)

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        states = []
        for part, known in zip(transforms, state[:-1], strict=True):
            grads, known = part.update(grads, known, params)
            states.append(known)
        params, known = last.step(params, grads, state[-1])
        return params, (*states, known)

    return Optimizer(init, step)


# --- parameters as an optimizer sees them ---


@dataclass(frozen=True)
class Segment:
    """Elements of one parameter, as they stand in a vector.

    Attributes:
        path: of the parameter.
        whole: shape of the parameter.
        shape: of the value that they are part of, which tensor-parallel axes may have cut from it.
        corner: where in the parameter that value begins.
        first: number of the first of them in that value, row by row.
        start: where in the vector they begin.
        stop: where they end.
    """

    path: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    corner: tuple[int, ...]
    first: int
    start: int
    stop: int


class Piece:
    """Some parameters of a flat shard: elements `start` to `stop` of its piece, a pytree node with one leaf.

    Attributes:
        values: the elements.
        layout: of the flat shard.
        entries: numbers of the parameters in the layout, on whatever rank they are.
        start: first element.
        stop: behind the last; the same as `start` where this rank holds none.
    """

    __slots__ = ("entries", "layout", "start", "stop", "values")

    def __init__(self, values: Any, layout: Layout, entries: tuple[int, ...], start: int, stop: int) -> None:
        self.values, self.layout, self.entries, self.start, self.stop = values, layout, entries, start, stop

    def __repr__(self) -> str:
        names = ", ".join(self.layout.entries[i].path for i in self.entries)
        return f"Piece({self.values!r}, {self.start}:{self.stop} of {self.layout}, of {names})"


def _flat_piece(piece: Piece) -> tuple[tuple[Any], Any, tuple[str]]:
    return (piece.values,), (piece.layout, piece.entries, piece.start, piece.stop), ("values",)


def _piece(known: Any, children: Any) -> Piece:
    (values,) = children
    return Piece(values, *known)


optree.register_pytree_node(
    Piece, _flat_piece, _piece, path_entry_type=optree.GetAttrEntry, namespace=optree.registry.__GLOBAL_NAMESPACE
)
compat.register_in_torch(
    Piece,
    lambda piece: ([piece.values], _flat_piece(piece)[1]),
    lambda children, known: _piece(known, children),
)


@dataclass(frozen=True)
class Unit:
    """One leaf of a tree of parameters.

    Attributes:
        values: its elements on this rank.
        segments: whose they are.
        layout: of the flat shard that it is, or is a part of; None for a plain tensor.
        entries: numbers of its parameters in the layout, on whatever rank they are.
        start: where in that shard it begins.
        trainable: whether it is trained.
    """

    values: Tensor
    segments: tuple[Segment, ...]
    layout: Layout | None
    entries: tuple[int, ...]
    start: int
    trainable: bool

    @property
    def name(self) -> str:
        """The stage's path, or the plain tensor's."""
        return self.layout.stage if self.layout else self.segments[0].path

    def part(self, entries: tuple[int, ...], start: int, stop: int, values: Any) -> Any:
        """A node for these parameters, of which elements `start` to `stop` are here, with these values."""
        assert self.layout is not None, "a plain tensor has no parts"
        if entries == self.entries and (start, stop) == (0, self.values.numel()):
            return self.like(values)
        return Piece(values, self.layout, entries, self.start + start, self.start + stop)

    def like(self, values: Any) -> Any:
        """A node of the same kind as the leaf was."""
        if self.layout is None:
            return values
        n = self.values.numel()
        if (self.start, n, len(self.entries)) == (0, self.layout.piece, len(self.layout.entries)):
            return FlatShard(values, self.layout)
        return Piece(values, self.layout, self.entries, self.start, self.start + n)


def is_unit(node: Any) -> bool:
    """Whether a node of a tree is one leaf to an optimizer."""
    return type(node) is Piece or is_flat(node)


class Units(NamedTuple):
    """A tree of parameters, taken apart."""

    each: list[Unit]
    tree: optree.PyTreeSpec

    def rebuilt(self, leaves: Iterable[Any]) -> Any:
        """A tree of the same structure, with other leaves."""
        return optree.tree_unflatten(self.tree, list(leaves))

    def like(self, values: Iterable[Any]) -> Any:
        """A tree of the same structure, with other numbers."""
        return self.rebuilt(unit.like(x) for unit, x in zip(self.each, values, strict=True))

    def beside(self, tree: Any) -> list[Any]:
        """The numbers at the same places of a tree of this structure; None for what is not there."""
        leaves = self.tree.flatten_up_to(tree)
        return [leaf.values if is_unit(leaf) else leaf for leaf in leaves]


def units(tree: Any) -> Units:
    """A tree of flat shards and plain tensors as an optimizer sees it."""
    leaves, spec = optree.tree_flatten(tree, is_leaf=is_unit)
    if all(map(is_unit, leaves)):  # these know their names
        return Units([_unit("", leaf) for leaf in leaves], spec)
    paths = [dotted(accessor) for accessor in optree.tree_accessors(tree, is_leaf=is_unit)]
    return Units([_unit(path, leaf) for path, leaf in zip(paths, leaves, strict=True)], spec)


def _unit(path: str, leaf: Any) -> Unit:
    if type(leaf) is Piece:
        segments = _segments(leaf.layout, leaf.entries, leaf.start, leaf.stop)
        return Unit(leaf.values, segments, leaf.layout, leaf.entries, leaf.start, leaf.layout.trainable)
    if is_flat(leaf):
        layout = leaf.layout
        every = tuple(range(len(layout.entries)))
        return Unit(leaf.values, _segments(layout, every, 0, layout.piece), layout, every, 0, layout.trainable)
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{path or 'the tree'} is {type(leaf).__name__}; parameters are tensors")
    shape = tuple(leaf.shape)
    whole = Segment(path, shape, shape, (0,) * len(shape), 0, 0, leaf.numel())
    return Unit(leaf, (whole,), None, (), 0, leaf.is_floating_point() or leaf.is_complex())


@functools.lru_cache(maxsize=4096)
def _segments(layout: Layout, entries: tuple[int, ...], start: int, stop: int) -> tuple[Segment, ...]:
    rank = compat.global_rank()
    corners = {one.path: one.corner for one in layout.ranges(rank)}
    found = []
    for number, low, high, at in layout.cuts[layout.grid.index(rank, layout.placement.axes)]:
        entry = layout.entries[number]
        if number in entries and start <= at and at + high - low <= stop:
            place = low, at - start, at + high - low - start
            found.append(Segment(entry.path, layout.whole_shape(number), entry.shape, corners[entry.path], *place))
    return tuple(found)


def runs(unit: Unit, key: Callable[[Segment], Any]) -> list[tuple[Any, int, int]]:
    """The fewest stretches of a unit in which all parameters have the same key: `(key, start, stop)`."""
    found: list[tuple[Any, int, int]] = []
    for one in unit.segments:
        k = key(one)
        if found and found[-1][0] == k:
            found[-1] = (k, found[-1][1], one.stop)
        else:
            found.append((k, one.start, one.stop))
    if len(found) == 1:
        return [(found[0][0], 0, unit.values.numel())]  # and what lies between them
    return found


def stretches(unit: Unit, key: Callable[[str, tuple[int, ...]], Any]) -> list[tuple[Any, tuple[int, ...], int, int]]:
    """The fewest runs of parameters with the same key: `(key, entries, start, stop)`, the same runs on every rank.

    Elements `start` to `stop` of the unit are here; none, where this rank holds nothing of them.
    """
    layout, n = unit.layout, unit.values.numel()
    assert layout is not None, "a plain tensor has no parts"
    found: list[tuple[Any, list[int]]] = []
    for number in unit.entries:
        k = key(layout.entries[number].path, layout.whole_shape(number))
        if found and found[-1][0] == k:
            found[-1][1].append(number)
        else:
            found.append((k, [number]))
    if len(found) == 1:
        return [(found[0][0], unit.entries, 0, n)]  # and what lies between them
    begin = layout.grid.index(compat.global_rank(), layout.placement.axes) * layout.piece + unit.start

    def here(offset: int) -> int:
        return min(max(offset - begin, 0), n)

    runs = []
    for k, numbers in found:
        first, last = layout.entries[numbers[0]], layout.entries[numbers[-1]]
        runs.append((k, tuple(numbers), here(first.offset), here(last.offset + last.numel)))
    return runs


def spread(unit: Unit) -> list[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """Each parameter of a unit, wherever it is: the axes that cut it, its path, and its whole shape."""
    if unit.layout is None:
        (one,) = unit.segments
        return [((), one.path, one.whole)]
    layout, found = unit.layout, []
    for number in unit.entries:
        cut = {*layout.placement.axes, *layout.entries[number].spec.axes}
        axes = tuple(name for name, _ in layout.grid.sizes if name in cut)
        found.append((axes, layout.entries[number].path, layout.whole_shape(number)))
    return found


def lent(known: dict[str, Tensor], unit: Unit) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What all ranks have of each parameter of a unit, by path, for use with elements that some of them have.

    Its gradient is then the sum of what those ranks say: `pvary`, whose transpose all of them take part in. So the
    result depends on the second value returned, of no elements, also where a rank has nothing of a parameter.
    """
    if not any(differentiable(known[path]) for _, path, _ in spread(unit)) or unit.layout is None:
        return known, []
    groups: dict[tuple[str, ...], list[str]] = {}
    for axes, path, _ in spread(unit):
        groups.setdefault(axes, []).append(path)
    found, ties = dict(known), []
    with scope(mesh_of(unit.layout.grid, f"stage {unit.name!r}")):
        for axes, paths in groups.items():
            rows = [known[path].reshape(-1) for path in paths]
            every = collectives.pvary(torch.cat(rows), axes) if axes else torch.cat(rows)
            ties.append(every[:0])
            for path, row in zip(paths, every.split([len(row) for row in rows]), strict=True):
                found[path] = row.view(known[path].shape)
    return found, ties


def tied(x: Tensor, others: Iterable[Tensor]) -> Tensor:
    """`x`, as a result of the others too, of whose elements it has none.

    A rank that has nothing of some parameters shall still take part in what derivatives through them communicate.
    """
    rest = [other.reshape(-1)[:0].to(x.dtype) for other in others if differentiable(other)]
    return torch.cat([x.reshape(-1), *rest]).view(x.shape) if rest else x


def numbered(number: Any, unit: Unit) -> tuple[dict[str, Any], list[Tensor]]:
    """A number that all ranks have, for use with each parameter of a unit; as `lent`, if it may be differentiated."""
    each = {path: number for _, path, _ in spread(unit)}
    return lent(each, unit) if isinstance(number, Tensor) else (each, [])


def plain_but_rate(name: str, numbers: dict[str, Any]) -> None:
    """Raises TypeError for a tensor that is not the learning rate, by which the rule has no derivative."""
    for key, value in numbers.items():
        if isinstance(value, Tensor) and key != "lr":
            raise TypeError(f"{name}: {key} is a tensor; only lr may be one, and have a gradient: pass {key}.item()")


def varied(number: Any, unit: Unit) -> Any:
    """The same for all elements of a unit: the number itself, or if it may be differentiated, a vector."""
    if not isinstance(number, Tensor) or unit.layout is None or not differentiable(number):
        return number
    each, ties = numbered(number, unit)
    rows, last = [], 0
    for one in unit.segments:
        rows += [number.detach().expand(one.start - last), each[one.path].expand(one.stop - one.start)]
        last = one.stop
    return torch.cat([*rows, number.detach().expand(unit.values.numel() - last), *ties]).view(unit.values.shape)


def differentiable(x: Tensor) -> bool:
    """Whether somebody may want a derivative by it."""
    return compat.inside_transform() or compat.inside_forward_mode() or (torch.is_grad_enabled() and x.requires_grad)


def of_rule(value: Any, segment: Segment) -> Any:
    """A number, or what a rule says of a parameter."""
    return value(segment.path, segment.whole) if callable(value) else value


def at_step(value: Any, step: int) -> Any:
    """A number, or what a schedule says of a step."""
    return value(step) if callable(value) else value


def zeros_like(tree: Any) -> Any:
    """Zeros for every trained parameter, None for the others."""
    known = units(tree)
    return known.like(torch.zeros_like(unit.values) if unit.trainable else None for unit in known.each)


def pairs(known: Units, grads: Any) -> list[tuple[Unit, Tensor | None]]:
    """Each unit with its gradient, in the parameter's dtype; None where there is none.

    Raises:
        ValueError: a gradient of another shape.
    """
    found: list[tuple[Unit, Tensor | None]] = []
    for unit, grad in zip(known.each, known.beside(grads), strict=True):
        if not unit.trainable or grad is None:
            found.append((unit, None))
            continue
        if grad.shape != unit.values.shape:
            raise ValueError(
                f"{unit.name}: the gradient has shape {tuple(grad.shape)}, the parameter {tuple(unit.values.shape)}; a "
                f"gradient that is cut further than its parameter goes through shard_state"
            )
        found.append((unit, grad.to(unit.values.dtype)))
    return found


def joined(parts: Sequence[Tensor], unit: Unit, spans: Sequence[tuple[int, int]]) -> Tensor:
    """A unit's values with these stretches of them replaced, as a new tensor."""
    if len(parts) == 1 and spans[0] == (0, unit.values.numel()):
        return parts[0]
    flat, rows, at = unit.values, [], 0
    for part, (start, stop) in zip(parts, spans, strict=True):
        rows += [flat[at:start], part]
        at = stop
    return torch.cat([*rows, flat[at:]])
