"""Parameters as an optimizer sees them: as the elements that this rank holds, and whose they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Self

import optree
import torch
from torch import Tensor

from shardfn.compat import dynamo, process_groups, pytrees
from shardfn.mesh.scope import mesh_of
from shardfn.mesh.spec import dotted
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.placement import Tiers
from shardfn.tiers import copying, placing
from shardfn.tiers.streaming import in_place


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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copying.deepcopy(self.values, memo), *self.place)

    @property
    def place(self) -> tuple[Layout, tuple[int, ...], int, int]:
        """All but the values."""
        return self.layout, self.entries, self.start, self.stop


def node(kind: type[Piece]) -> None:
    """Makes a kind of piece a pytree node with one leaf."""

    def flatten(piece: Piece) -> tuple[tuple[Any], Any, tuple[str]]:
        return (piece.values,), (piece.layout, piece.entries, piece.start, piece.stop), ("values",)

    def unflatten(place: Any, children: Any) -> Piece:
        (values,) = children
        return kind(values, *place)

    pytrees.register(kind, flatten, unflatten, optree.GetAttrEntry)


node(Piece)


class Unit(NamedTuple):
    """One leaf of a tree of parameters.

    Attributes:
        values: its elements on this rank.
        segments: whose they are.
        layout: of the flat shard that it is, or is a part of; None for a plain tensor.
        entries: numbers of its parameters in the layout, on whatever rank they are.
        start: where in that shard it begins.
        stop: where in that shard it ends; of a plain tensor, how many elements it has.
        trainable: whether it is trained.
    """

    values: Tensor
    segments: tuple[Segment, ...]
    layout: Layout | None
    entries: tuple[int, ...]
    start: int
    stop: int
    trainable: bool

    @property
    def filled(self) -> list[Segment]:
        """The segments that have elements."""
        return [one for one in self.segments if one.start < one.stop]

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
        held, n, _ = _constants(self.layout)
        if (self.start, self.stop, len(self.entries)) == (0, held, n):
            return FlatShard(values, self.layout)
        return Piece(values, self.layout, self.entries, self.start, self.stop)


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
        segments = _segments_of(leaf.layout, leaf.entries, leaf.start, leaf.stop)
        return Unit(leaf.values, segments, leaf.layout, leaf.entries, leaf.start, leaf.stop, leaf.layout.trainable)
    if is_flat(leaf):
        if torch.compiler.is_compiling():
            return _traced_unit(leaf)
        return Unit(leaf.values, *_of_layout(leaf.layout, process_groups.global_rank()))
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{path or 'the tree'} is {type(leaf).__name__}; parameters are tensors")
    if leaf.layout is not torch.strided:
        raise TypeError(f"{path or 'the tree'} is {leaf.layout}; an optimizer takes dense tensors: pass its to_dense()")
    shape = tuple(leaf.shape)
    whole = Segment(path, shape, shape, (0,) * len(shape), 0, 0, leaf.numel())
    return Unit(leaf, (whole,), None, (), 0, leaf.numel(), leaf.is_floating_point() or leaf.is_complex())


def _traced_unit(flat: FlatShard) -> Unit:
    """The unit of a flat shard in a graph, which takes what is known of the layout as constants."""
    held, n, trainable = _constants(flat.layout)
    every = tuple(range(n))
    return Unit(flat.values, _segments_of(flat.layout, every, 0, held), flat.layout, every, 0, held, trainable)


@dynamo.constant_when_traced
def _constants(layout: Layout) -> tuple[int, int, bool]:
    return layout.held(process_groups.global_rank()), len(layout.entries), layout.trainable


def _segments_of(layout: Layout, entries: tuple[int, ...], start: int, stop: int) -> tuple[Segment, ...]:
    if torch.compiler.is_compiling():
        return tuple([Segment(*row) for row in _rows(layout, entries, start, stop)])
    return _segments(layout, process_groups.global_rank(), entries, start, stop)


@dynamo.constant_when_traced
def _rows(layout: Layout, entries: tuple[int, ...], start: int, stop: int) -> tuple[Any, ...]:
    found = _segments(layout, process_groups.global_rank(), entries, start, stop)
    return tuple(map(astuple, found))


@functools.lru_cache(maxsize=4096)
def _of_layout(layout: Layout, rank: int) -> tuple[tuple[Segment, ...], Layout, tuple[int, ...], int, int, bool]:
    """All that is known of a flat shard on a rank but its numbers, as `Unit` takes it."""
    every, held = tuple(range(len(layout.entries))), layout.held(rank)
    return _segments(layout, rank, every, 0, held), layout, every, 0, held, layout.trainable


@functools.lru_cache(maxsize=4096)
def _segments(layout: Layout, rank: int, entries: tuple[int, ...], start: int, stop: int) -> tuple[Segment, ...]:
    found = []
    for number, low, high, at in cuts_within(layout, rank, entries, start, stop):
        entry, whole = layout.entries[number], layout.whole_shape(number)
        found.append(Segment(entry.path, whole, entry.shape, layout.corner(number, rank), low, at, at + high - low))
    return tuple(found)


def cuts_within(
    layout: Layout, rank: int, entries: Collection[int], start: int, stop: int
) -> list[tuple[int, int, int, int]]:
    """What elements `start` to `stop` of a rank's piece hold of these parameters: as `layout.cuts`, from `start` on."""
    if not layout.here(rank):
        return []
    return [
        (number, low, high, at - start)
        for number, low, high, at in layout.cuts[layout.index(rank)]
        if number in entries and start <= at and at + high - low <= stop
    ]


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
    begin = layout.index(process_groups.global_rank()) * layout.piece + unit.start

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
        found.append((layout.cut_axes(number), layout.entries[number].path, layout.whole_shape(number)))
    return found


def refuse_complex(known: Units, name: str) -> None:
    """Raises TypeError for a parameter of complex numbers."""
    for unit in known.each:
        if unit.trainable and unit.values.is_complex():
            raise TypeError(f"{name}: {unit.name} is {unit.values.dtype}; train complex parameters by adamw, say")


def zeros_like(tree: Any) -> Any:
    """Zeros for every trained parameter, None for the others."""
    known = units(tree)
    return known.like(slot(unit) if unit.trainable else None for unit in known.each)


def home(unit: Unit) -> torch.device:
    """Where ranks talk about a unit, which may be kept elsewhere."""
    if unit.layout is None or unit.layout.placement.tiers == Tiers():
        return unit.values.device
    return torch.empty(0, device=mesh_of(unit.layout.grid, "a tree").device_type).device


def slot(unit: Unit, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, fill: int = 0) -> Tensor:
    """What an optimizer remembers of a unit at first: zeros like its elements, or a number, where its state is kept."""
    x, layout = unit.values, unit.layout
    if layout is None or torch.compiler.is_compiling() or layout.placement.tiers == Tiers() or not placing.plain(x):
        simple = shape is None and dtype is None and not fill
        made = zeros(x) if simple else x.new_full(x.shape if shape is None else shape, fill, dtype=dtype)
        if layout is not None and x.is_meta and not torch.compiler.is_compiling():
            placing.intend(made, layout.placement.tiers.state)
        return made
    mesh, tier = mesh_of(layout.grid, f"the state of {layout.stage!r}"), layout.placement.tiers.state
    made = placing.new(tuple(x.shape) if shape is None else shape, dtype or x.dtype, tier, "state", mesh)
    if fill:
        in_place([made], lambda x: x.fill_(fill))
    return made


def copied(unit: Unit, dtype: torch.dtype | None = None) -> Tensor:
    """A unit's elements once more, in a dtype of their own say, where its state is kept."""
    x, dtype = unit.values, dtype or unit.values.dtype
    if unit.layout is None or unit.layout.placement.tiers == Tiers() or not placing.plain(x):
        made = x.detach().to(dtype, copy=True)
        if unit.layout is not None and x.is_meta and not torch.compiler.is_compiling():
            placing.intend(made, unit.layout.placement.tiers.state)
        return made
    made = slot(unit, dtype=dtype)
    copying.copy_(made, x.detach())
    return made


def zeros(x: Tensor) -> Tensor:
    """Zeros like a tensor; on the meta device, where there are no numbers, without what torch would import for them."""
    return x.new_empty(x.shape) if x.is_meta else torch.zeros_like(x)


def pairs(known: Units, grads: Any) -> list[tuple[Unit, Tensor | None]]:
    """Each unit with its gradient, in the parameter's dtype; None where there is none.

    Raises:
        ValueError: a gradient of another shape.
    """
    found: list[tuple[Unit, Tensor | None]] = []
    for unit, node in zip(known.each, known.tree.flatten_up_to(grads), strict=True):
        grad = node.values if is_unit(node) else node
        if not unit.trainable or grad is None:
            found.append((unit, None))
            continue
        layout = node.layout if is_unit(node) else None
        if layout is not unit.layout and layout != unit.layout and grad.shape == unit.values.shape:
            raise ValueError(
                f"{unit.name}: the gradient is of {layout or 'a plain tensor'}, and the parameter is {unit.layout}"
            )
        if grad.shape != unit.values.shape:
            raise ValueError(
                f"{unit.name}: the gradient has shape {tuple(grad.shape)}, the parameter {tuple(unit.values.shape)}; a "
                f"gradient that is cut further than its parameter goes through shard_state"
            )
        dtype = unit.values.dtype
        found.append((unit, grad if grad.dtype == dtype else grad.to(dtype)))
    return found


def dense(x: Tensor) -> bool:
    """Whether a tensor's elements are each others' neighbours in memory, in whatever order, and none is there twice."""
    if x.is_contiguous():
        return True
    wanted = 1
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and stride != wanted:
            return False
        wanted *= n
    return True


def joined(parts: Sequence[Tensor], unit: Unit, spans: Sequence[tuple[int, int]]) -> Tensor:
    """A unit's values with these stretches of them replaced, as a new tensor."""
    if len(parts) == 1 and spans[0] == (0, unit.values.numel()):
        return parts[0]
    flat, rows, at = unit.values, [], 0
    for part, (start, stop) in zip(parts, spans, strict=True):
        rows += [flat[at:start], part]
        at = stop
    return torch.cat([*rows, flat[at:]])
