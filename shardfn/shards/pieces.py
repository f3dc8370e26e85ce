"""Parameters as an optimizer sees them: vectors of this rank's elements, with the parameters they belong to.

A `Unit` is one leaf of a tree of parameters: a flat shard, a `Piece` of one, or a plain tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import optree
import torch
from torch import Tensor

from shardfn.compat import dynamo, process_groups, pytrees
from shardfn.mesh.axes import device_of
from shardfn.mesh.scope import mesh_of
from shardfn.mesh.spec import P, keys_of
from shardfn.mesh.spec import joined as joined_path
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.placement import Tiers
from shardfn.tiers import copying, placing
from shardfn.tiers.streaming import in_place

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """Elements of one parameter within a vector.

    Attributes:
        path: path of the parameter.
        whole: shape of the full parameter.
        shape: shape of a rank's value of it, which is smaller under tensor parallelism.
        corner: index in the full parameter at which that value begins.
        first: row-major index of the first element in that value.
        start: first position in the vector.
        stop: one past the last position.
    """

    path: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    corner: tuple[int, ...]
    first: int
    start: int
    stop: int


class Piece:
    """Some parameters of a flat shard: elements `start` to `stop` of this rank's piece, a pytree node with one leaf.

    Attributes:
        values: the elements.
        layout: layout of the flat shard.
        entries: indices of the parameters in the layout, the same on every rank.
        start: first element.
        stop: one past the last element; equal to `start` where this rank holds none.
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
    def spec(self) -> P:
        """The spec for `shard_map`, as a flat shard's."""
        return P(self.layout.placement.axes)

    @property
    def place(self) -> tuple[Layout, tuple[int, ...], int, int]:
        """Everything but the values."""
        return self.layout, self.entries, self.start, self.stop


def node(kind: type[Piece]) -> None:
    """Registers a class of pieces as a pytree node with one leaf."""

    def flatten(piece: Piece) -> tuple[tuple[Any], Any, tuple[str]]:
        return (piece.values,), piece.place, ("values",)

    pytrees.register(kind, flatten, lambda place, children: kind(*children, *place), optree.GetAttrEntry)


node(Piece)


class Unit(NamedTuple):
    """One leaf of a tree of parameters.

    Attributes:
        values: its elements on this rank.
        segments: the parameters' elements within `values`.
        layout: layout of the flat shard that it is, or is a part of; None for a plain tensor.
        entries: indices of its parameters in the layout, on every rank the same.
        start: where in this rank's piece of that shard it begins.
        stop: where in that piece it ends; for a plain tensor, its number of elements.
        trainable: whether it is trained.
        name: path of its stage, or of the plain tensor, in the tree.
    """

    values: Tensor
    segments: tuple[Segment, ...]
    layout: Layout | None
    entries: tuple[int, ...]
    start: int
    stop: int
    trainable: bool
    name: str

    @property
    def filled(self) -> list[Segment]:
        """The segments that have elements."""
        return [segment for segment in self.segments if segment.start < segment.stop]

    @property
    def exact(self) -> int:
        """The number of pieces of its buffer over which sums are added by one tree; 0 if not; see `Placement.exact`."""
        return 0 if self.layout is None else self.layout.placement.exact

    def by_piece(self, segment: Segment, f: Callable[[int, int], Tensor]) -> dict[int, Tensor]:
        """The vectors `f(start, stop)` of a segment's ranges, by the number of the piece; see `exact_ranges`."""
        return {number: f(start, stop) for number, start, stop in self.exact_ranges(segment)}

    def exact_ranges(self, segment: Segment) -> list[tuple[int, int, int]]:
        """A segment's ranges `(number, start, stop)` in pieces of the buffer; without exact sums the segment."""
        if not self.exact or self.layout is None:
            return [(0, segment.start, segment.stop)]
        length = self.layout.padded // self.exact
        begin = self.layout.index(process_groups.global_rank()) * self.layout.piece + self.start
        first, last = (begin + segment.start) // length, (begin + max(segment.start, segment.stop - 1)) // length
        bounds = ((n, n * length - begin, (n + 1) * length - begin) for n in range(first, last + 1))
        return [(n, max(low, segment.start), min(high, segment.stop)) for n, low, high in bounds]

    def path(self, number: int) -> str:
        """Path of a parameter of its layout in the tree."""
        assert self.layout is not None, "a plain tensor has no layout"
        return path_in(self.layout, number, self.name)

    def part(self, entries: tuple[int, ...], start: int, stop: int, values: Any) -> Any:
        """A node for some of its parameters, with `values` for elements `start` to `stop` of this unit."""
        assert self.layout is not None, "a plain tensor has no parts"
        if entries == self.entries and (start, stop) == (0, self.values.numel()):
            return self.with_values(values)
        return Piece(values, self.layout, entries, self.start + start, self.start + stop)

    def with_values(self, values: Any) -> Any:
        """A node of the leaf's kind (flat shard, piece or tensor) with the given values."""
        if self.layout is None:
            return values
        local_length, n = self.layout.num_elements_on(process_groups.global_rank()), len(self.layout.entries)
        if (self.start, self.stop, len(self.entries)) == (0, local_length, n):
            return FlatShard(values, self.layout)
        return Piece(values, self.layout, self.entries, self.start, self.stop)


def is_unit(node: Any) -> bool:
    """Whether a node of a tree is a single leaf to an optimizer."""
    return type(node) is Piece or is_flat(node)


class Units(NamedTuple):
    """A flattened tree of parameters."""

    each: list[Unit]
    tree: optree.PyTreeSpec

    def rebuilt(self, leaves: Iterable[Any]) -> Any:
        """A tree of the same structure with the given leaves."""
        return optree.tree_unflatten(self.tree, list(leaves))

    def with_values(self, values: Iterable[Any]) -> Any:
        """A tree of the same structure, with leaves of the same kinds that have the given values."""
        return self.rebuilt(unit.with_values(x) for unit, x in zip(self.each, values, strict=True))

    def values_in(self, tree: Any) -> list[Any]:
        """The values at the same places of a tree of this structure; None where it has None."""
        leaves = self.tree.flatten_up_to(tree)
        return [leaf.values if is_unit(leaf) else leaf for leaf in leaves]


def units(tree: Any) -> Units:
    """Flattens a tree of flat shards and plain tensors."""
    dynamo.refuse_compiling("arithmetic of parameters")
    leaves, spec = optree.tree_flatten(tree, is_leaf=is_unit)
    return Units([_unit(name, leaf) for name, leaf in zip(names_of(leaves, spec), leaves, strict=True)], spec)


def names_of(leaves: Sequence[Any], spec: optree.PyTreeSpec) -> tuple[str, ...]:
    """The name of each leaf: the path of the stage that it belongs to, or its own path."""
    places = ((x.layout, x.entries if type(x) is Piece else None) if is_unit(x) else None for x in leaves)
    return _names(spec, tuple(places))


@functools.lru_cache(maxsize=4096)
def _names(
    spec: optree.PyTreeSpec, leaves: tuple[tuple[Layout, tuple[int, ...] | None] | None, ...]
) -> tuple[str, ...]:
    """The names of leaves, from the layout and parameters of each, or None for a leaf outside of stages.

    A stage keeps its path in the tree that was sharded. If that tree is a subtree of this one, the path to it is put in
    front. If two parameters would get the same name, leaves are named by their paths in this tree.
    """
    tokens = list(map(keys_of, spec.accessors()))
    names, parameters = [joined_path(*keys) for keys in tokens], []
    for i, (keys, leaf) in enumerate(zip(tokens, leaves, strict=True)):
        if leaf is None:
            parameters.append([names[i]])
            continue
        layout, entries = leaf
        names[i] = _stage_at(keys, layout)
        numbers = range(len(layout.entries)) if entries is None else entries
        parameters.append([path_in(layout, number, names[i]) for number in numbers])
    counts = Counter(path for paths in parameters for path in paths)
    return tuple(
        joined_path(*keys) if any(counts[path] > 1 for path in paths) else name
        for keys, name, paths in zip(tokens, names, parameters, strict=True)
    )


def _stage_at(keys: tuple[Any, ...], layout: Layout) -> str:
    """The path of a stage in a tree that has one of its buffers at `keys`."""
    before, stage_keys = split_keys(keys, layout)
    if not stage_keys and layout.stage:
        return layout.stage  # the tree is a part of the one that was sharded
    return joined_path(*before, *stage_keys)


def split_keys(keys: tuple[Any, ...], layout: Layout) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The keys before the node's stage, and those of the stage, without a key that names a buffer of the stage.

    If the keys do not contain the stage's path, all of them count as before it.
    """
    stage = layout.stage
    for i, key in enumerate(keys):
        if str(key).startswith("@"):  # where `masked` lists parts of a stage
            words, stage_keys = str(key)[1:].split("."), stage.split(".") if stage else []
            first = len(words) - len(stage_keys)
            return (*keys[:i], *words[:first]), tuple(words[first:])
    buffer = False
    if layout.partial and keys:  # keys that begin with a dtype distinguish the buffers of a stage
        buffer = isinstance(getattr(torch, str(keys[-1]).split(" ")[0].split(",")[0], None), torch.dtype)
    for end in (len(keys) - 1, len(keys)) if buffer else (len(keys),):
        for start in range(end, -1, -1):
            if joined_path(*keys[start:end]) == stage:
                return keys[:start], keys[start:end]
    return keys, ()


def _unit(name: str, leaf: Any) -> Unit:
    if type(leaf) is Piece:
        layout, part = leaf.layout, (leaf.entries, leaf.start, leaf.stop)
        return Unit(
            leaf.values,
            _segments(layout, process_groups.global_rank(), *part, name),
            layout,
            *part,
            layout.trainable,
            name,
        )
    if is_flat(leaf):
        return Unit(leaf.values, *_of_layout(leaf.layout, process_groups.global_rank(), name), name)
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{name or 'the tree'} is {type(leaf).__name__}; parameters are tensors")
    if leaf.layout is not torch.strided:
        raise TypeError(f"{name or 'the tree'} is {leaf.layout}; an optimizer takes dense tensors: pass its to_dense()")
    shape = tuple(leaf.shape)
    segment = Segment(name, shape, shape, (0,) * len(shape), 0, 0, leaf.numel())
    return Unit(leaf, (segment,), None, (), 0, leaf.numel(), leaf.is_floating_point() or leaf.is_complex(), name)


@functools.lru_cache(maxsize=4096)
def _of_layout(
    layout: Layout, rank: int, name: str
) -> tuple[tuple[Segment, ...], Layout, tuple[int, ...], int, int, bool]:
    """The arguments of `Unit` for a flat shard on a rank, without the values and the name."""
    entries, length = tuple(range(len(layout.entries))), layout.num_elements_on(rank)
    return _segments(layout, rank, entries, 0, length, name), layout, entries, 0, length, layout.trainable


@functools.lru_cache(maxsize=4096)
def _segments(
    layout: Layout, rank: int, entries: tuple[int, ...], start: int, stop: int, name: str
) -> tuple[Segment, ...]:
    segments = []
    for number, low, high, offset in cuts_within(layout, rank, entries, start, stop):
        path, shape, full = path_in(layout, number, name), layout.entries[number].shape, layout.whole_shape(number)
        segments.append(Segment(path, full, shape, layout.corner(number, rank), low, offset, offset + high - low))
    return tuple(segments)


def path_in(layout: Layout, number: int, name: str) -> str:
    """The path of a parameter in a tree that has its stage at `name`."""
    path = layout.entries[number].path
    return path if name == layout.stage else joined_path(name, path[len(layout.stage) :].removeprefix("."))


def cuts_within(
    layout: Layout, rank: int, entries: Collection[int], start: int, stop: int
) -> list[tuple[int, int, int, int]]:
    """`layout.cuts` of these parameters within elements `start` to `stop` of a rank's piece, counted from `start`."""
    if not layout.lives_on(rank):
        return []
    return [
        (number, low, high, position - start)
        for number, low, high, position in layout.cuts[layout.index(rank)]
        if number in entries and start <= position and position + high - low <= stop
    ]


def _neighbors_by_key(items: Iterable[T], key: Callable[[T], Any]) -> list[tuple[Any, list[T]]]:
    """Neighbors with equal keys, as `(key, items)`; keys compare tensors by identity, as the host knows no numbers."""
    return [
        (pairs[0][0], [item for _, item in pairs])
        for _, group in itertools.groupby(((key(item), item) for item in items), lambda pair: _identified(pair[0]))
        if (pairs := list(group))
    ]


def _identified(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_identified, key))
    return ("tensor", id(key)) if isinstance(key, Tensor) else key


def runs(unit: Unit, key: Callable[[Segment], Any]) -> list[tuple[Any, int, int]]:
    """The fewest ranges of a unit in which all parameters have the same key: `(key, start, stop)`."""
    groups = _neighbors_by_key(unit.segments, key)
    if len(groups) == 1:
        return [(groups[0][0], 0, unit.values.numel())]  # including the padding between parameters
    return [(k, segments[0].start, segments[-1].stop) for k, segments in groups]


def stretches(unit: Unit, key: Callable[[str, tuple[int, ...]], Any]) -> list[tuple[Any, tuple[int, ...], int, int]]:
    """The fewest runs of parameters with the same key: `(key, entries, start, stop)`, the same runs on every rank.

    This rank holds elements `start` to `stop` of the unit; `start == stop` where it holds nothing of the run.
    """
    layout, n = unit.layout, unit.values.numel()
    assert layout is not None, "a plain tensor has no parts"
    by_key = _neighbors_by_key(unit.entries, lambda number: key(unit.path(number), layout.whole_shape(number)))
    groups = [(k, tuple(numbers)) for k, numbers in by_key]
    if len(groups) == 1:
        return [(groups[0][0], unit.entries, 0, n)]  # including the padding between parameters
    begin = layout.index(process_groups.global_rank()) * layout.piece + unit.start

    def clamped(offset: int) -> int:
        return min(max(offset - begin, 0), n)

    runs = []
    for k, numbers in groups:
        first, last = layout.entries[numbers[0]], layout.entries[numbers[-1]]
        runs.append((k, numbers, clamped(first.offset), clamped(last.offset + last.numel)))
    return runs


def spread(unit: Unit) -> list[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """Each parameter of a unit on all ranks: the axes over which it is sharded, its path, and its full shape."""
    if unit.layout is None:
        (segment,) = unit.segments
        return [((), segment.path, segment.whole)]
    layout = unit.layout
    return [(layout.cut_axes(number), unit.path(number), layout.whole_shape(number)) for number in unit.entries]


def refuse_complex(leaves: Units, name: str) -> None:
    """Raises TypeError for a complex parameter."""
    for unit in leaves.each:
        if unit.trainable and unit.values.is_complex():
            raise TypeError(f"{name}: {unit.name} is {unit.values.dtype}; use an optimizer such as adamw")


def zeros_like(tree: Any) -> Any:
    """Zeros for every trained parameter, None for the others."""
    leaves = units(tree)
    return leaves.with_values(slot(unit) if unit.trainable else None for unit in leaves.each)


def home(unit: Unit) -> torch.device:
    """The device of a unit for collectives; the unit may be kept elsewhere, on the host or on disk."""
    if unit.layout is None or unit.layout.placement.tiers == Tiers():
        return unit.values.device
    return device_of(mesh_of(unit.layout.grid, "a tree"))


def slot(unit: Unit, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, fill: int = 0) -> Tensor:
    """The initial state of a unit: zeros like its elements, or `fill`, on the tier where its state is kept."""
    x, layout = unit.values, unit.layout
    if layout is None or layout.placement.tiers == Tiers() or not placing.plain(x):
        simple = shape is None and dtype is None and not fill
        new = zeros(x) if simple else x.new_full(x.shape if shape is None else shape, fill, dtype=dtype)
        if layout is not None and x.is_meta:
            placing.intend(new, layout.placement.tiers.state)
        return new
    mesh, tier = mesh_of(layout.grid, f"the state of {layout.stage!r}"), layout.placement.tiers.state
    new = placing.new(tuple(x.shape) if shape is None else shape, dtype or x.dtype, tier, "state", mesh)
    if fill:
        in_place([new], lambda xs: xs[0].fill_(fill))
    return new


def copied(unit: Unit, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a unit's elements, in `dtype` if given, on the tier where its state is kept."""
    x, dtype = unit.values, dtype or unit.values.dtype
    if unit.layout is None or unit.layout.placement.tiers == Tiers() or not placing.plain(x):
        copy = x.detach().to(dtype, copy=True)
        if unit.layout is not None and x.is_meta:
            placing.intend(copy, unit.layout.placement.tiers.state)
        return copy
    copy = slot(unit, dtype=dtype)
    copying.copy_(copy, x.detach())
    return copy


def zeros(x: Tensor) -> Tensor:
    """Zeros like a tensor; on the meta device an empty tensor, as `zeros_like` would import much of torch."""
    return x.new_empty(x.shape) if x.is_meta else torch.zeros_like(x)


def pairs(leaves: Units, grads: Any) -> list[tuple[Unit, Tensor | None]]:
    """Each unit with its gradient, in the parameter's dtype; None if there is none.

    Raises:
        ValueError: a gradient of a different shape or layout.
    """
    pairs: list[tuple[Unit, Tensor | None]] = []
    for unit, node in zip(leaves.each, leaves.tree.flatten_up_to(grads), strict=True):
        grad = node.values if is_unit(node) else node
        if not unit.trainable or grad is None:
            pairs.append((unit, None))
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
        pairs.append((unit, grad if grad.dtype == dtype else grad.to(dtype)))
    return pairs


def dense(x: Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory, in any order, each exactly once."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True


def joined(parts: Sequence[Tensor], unit: Unit, spans: Sequence[tuple[int, int]]) -> Tensor:
    """A unit's values with these ranges replaced, as a new tensor."""
    if len(parts) == 1 and spans[0] == (0, unit.values.numel()):
        return parts[0]
    flat, rows, end = unit.values, [], 0
    for part, (start, stop) in zip(parts, spans, strict=True):
        rows += [flat[end:start], part]
        end = stop
    return torch.cat([*rows, flat[end:]])
