"""Flattens a tree of training state to named tensors of whole shapes, of which ranks hold parts, and numbers."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.checkpoint.tensor_bytes import most_of
from shardfn.compat import process_groups
from shardfn.mesh.grid import Grid
from shardfn.mesh.spec import is_dtensor, joined, keys_of
from shardfn.quant.packed import Packed, is_packed
from shardfn.quoting import findings
from shardfn.shards import blocks
from shardfn.shards.blocks import Blocks
from shardfn.shards.boxes import Box, Ints, full_box, steps
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.pieces import Piece, is_unit, split_keys
from shardfn.tiers import copying

Scalar = bool | int | float | complex | str | tuple[Any, ...] | list[Any] | None
SCALARS = (bool, int, float, complex, str)
FEW = 2**16  # a part smaller than so many bytes per copy is written by one rank alone


class ByRank:
    """Marks a value that differs between ranks: a tensor, number or string, or a pytree of them.

    A value that happens to be equal on all ranks is saved once, and can be loaded on any number of ranks; others only
    on as many as saved them. Generators are always treated like this. Of flat shards, each copy along the axes over
    which they are replicated is saved whole: islands of local SGD, on any number of ranks in each.

    Args:
        value: this rank's.

    Example:
        ``save(path, {"params": ByRank(params), "rows read": ByRank(count)})``
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"ByRank({self.value!r})"


optree.register_pytree_node(
    ByRank,
    lambda node: ((node.value,), None, ("value",)),
    lambda _, children: ByRank(*children),
    path_entry_type=optree.GetAttrEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


@dataclass(frozen=True, eq=False)
class Value:
    """A leaf for other small values in torch's checkpoints: None, or a tuple or list of numbers."""

    value: Any


@dataclass(frozen=True, eq=False)
class Single:
    """A leaf for one parameter of a flat shard, by its number in the layout, under its own name."""

    node: FlatShard | Piece
    number: int


@dataclass(frozen=True)
class TensorType:
    """Dtype and shape of a named tensor.

    Attributes:
        dtype: of its elements.
        shape: of the whole tensor.
        meant: for the bytes of a quantized parameter, its format and shape.
    """

    dtype: torch.dtype
    shape: Ints
    meant: str = ""

    @property
    def bytes(self) -> int:
        """Size of all elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        return f"{text}, {self.meant}" if self.meant else text


@dataclass(frozen=True)
class LocalBox:
    """A box of a named tensor in this rank's memory; `values` has the shape of the box."""

    name: str
    box: Box
    values: Tensor

    def copy_from(self, box: Box, values: Tensor) -> None:
        """Copies the intersection with another box, whose elements are `values`."""
        both = self.box.common(box)
        if both is not None:
            copying.copy_(self.values[both.slices_in(self.box)], values[both.slices_in(box)])


@dataclass(frozen=True)
class ReplicatedCopy:
    """This rank's copy of a parameter of a flat shard of which ranks hold several.

    Attributes:
        index: of the copy, along the axes over which the parameter is replicated.
        count: number of copies.
        place: the axes over which it is cut, with the mesh, and this rank's index along them.
        parts: the elements that this rank holds.
    """

    index: int
    count: int
    place: tuple[str, int]
    parts: list[Tensor] = field(default_factory=list)


@dataclass
class Contents:
    """A flattened tree.

    Attributes:
        tensors: by name, the same on all ranks, including tensors of which this rank holds nothing.
        boxes: parts of cut tensors that this rank holds or, for writing, its share of them.
        plain: tensors that are whole on every rank.
        numbers: numbers and strings.
        by_rank: names whose values may differ between ranks.
        optional: names in `numbers` that files may lack, where those are 0.
        copies: this rank's copy of each parameter of a flat shard that is replicated.
        packed: quantized parameters.
        keys: for each name the keys from the root of the tree.
        grids: the meshes.
        exact: the number of parts of a batch that are added exactly; see `Placement.exact`.
    """

    tensors: dict[str, TensorType] = field(default_factory=dict)
    boxes: list[LocalBox] = field(default_factory=list)
    plain: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Scalar] = field(default_factory=dict)
    by_rank: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    copies: dict[str, ReplicatedCopy] = field(default_factory=dict)
    packed: dict[str, Packed] = field(default_factory=dict)
    keys: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    exact: int = 0


def contents(state: Any, *, shared: bool) -> Contents:
    """Flattens a tree.

    Args:
        state: a pytree of flat shards, tensors, numbers, strings and generators.
        shared: whether ranks that hold the same part of a tensor each take a share of it, as for writing.

    Raises:
        TypeError: there are leaves of another kind.
        ValueError: two leaves have the same name.
    """
    result = Contents()
    unsupported: list[str] = []
    for tokens, leaf, by_rank in _leaves(state, (), False):
        name = _name(tokens)
        if type(leaf) in (Single, Value) and not shared:
            raise TypeError(
                f"{name} is part of what torch_optimizer made, which is for save: load_torch_optimizer(path, state) "
                f"reads it"
            )
        node, index = (leaf.node, leaf.number) if type(leaf) is Single else (leaf, None)
        if is_unit(node) and not (isinstance(node.values, Tensor) and lack(node.values)):
            _add_flat(result, tokens, node, shared, by_rank, index)
            continue
        if type(leaf) is Blocks and isinstance(leaf.values, Tensor) and not lack(leaf.values):
            _add_blocks(result, tokens, leaf, shared, by_rank)
            continue
        meant = ""
        if is_packed(leaf):
            result.packed[name], meant = leaf, leaf.meant
        if is_unit(leaf) or is_packed(leaf) or type(leaf) is Blocks:
            leaf = leaf.values
        if isinstance(leaf, torch.Generator):
            leaf, by_rank = leaf.get_state(), True
        if isinstance(leaf, Tensor) and (problem := lack(leaf)):
            unsupported.append(f"{name} is a tensor {problem}")
            continue
        if isinstance(leaf, Tensor) and not is_dtensor(leaf):
            _add_name(result, name, tokens)
            result.tensors[name] = TensorType(leaf.dtype, tuple(leaf.shape), meant)
            result.plain[name] = leaf.detach()
        elif type(leaf) in SCALARS or type(leaf) is Value:
            _add_name(result, name, tokens)
            result.numbers[name] = leaf.value if type(leaf) is Value else leaf
        else:
            unsupported.append(f"{name} is {type(leaf).__module__}.{type(leaf).__qualname__}")
            continue
        if by_rank:
            result.by_rank.add(name)
    if unsupported:
        raise TypeError(
            f"a checkpoint holds flat shards, tensors, numbers, strings and generators; {findings(unsupported)}: "
            f"convert them (`.item()`, `str()`, `torch.as_tensor()`), or leave them out"
        )
    return result


def parameters(tree: Any) -> Iterator[tuple[str, Any, Ints]]:
    """Yields each parameter of a tree: its name, a leaf for it alone, and its whole shape."""
    for tokens, leaf, _ in _leaves(tree, (), False):
        leaf = leaf.values if is_packed(leaf) else leaf
        if isinstance(leaf, Tensor):
            yield _name(tokens), leaf, tuple(leaf.shape)
        elif is_unit(leaf) and leaf.values is not None:
            for number, keys in _keys_by_number(tokens, leaf).items():
                yield _name(keys), Single(leaf, number), leaf.layout.whole_shape(number)


def rebuilt(state: Any, values: dict[str, Any]) -> Any:
    """The tree with the given numbers and strings, and its own tensors and generators."""
    accessors, leaves, tree = optree.tree_flatten_with_accessor(state, is_leaf=is_unit)
    named = zip(map(_tokens, accessors), leaves, strict=True)
    return tree.unflatten(values.get(_name(tokens), leaf) if type(leaf) in SCALARS else leaf for tokens, leaf in named)


def generators(state: Any) -> dict[str, torch.Generator]:
    """The generators of a tree, by name."""
    return {_name(tokens): leaf for tokens, leaf, _ in _leaves(state, (), False) if isinstance(leaf, torch.Generator)}


def _name(tokens: Iterable[Any]) -> str:
    return joined(*tokens) or "value"


def lack(x: Tensor) -> str:
    """Why a tensor's elements cannot be read as one dense array; "" if they can."""
    if x.device.type == "meta":
        return "on the device meta, which has no values"
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        return "that is not dense: pass its to_dense() or dequantize(), or its parts"
    if hasattr(x, "__tensor_flatten__") and not is_dtensor(x):
        return f"made of others, {type(x).__name__}: pass those"
    return ""


def _leaves(state: Any, tokens: tuple[Any, ...], by_rank: bool) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    accessors, leaves, _ = optree.tree_flatten_with_accessor(
        state, is_leaf=lambda x: is_unit(x) or type(x) in (ByRank, Blocks, Packed)
    )
    for accessor, leaf in zip(accessors, leaves, strict=True):
        keys = (*tokens, *_tokens(accessor))
        if type(leaf) is ByRank:
            yield from _leaves(leaf.value, keys, True)
        else:
            yield keys, leaf, by_rank


def _tokens(accessor: Iterable[Any]) -> tuple[Any, ...]:
    """The keys of an accessor, without `ByRank` and `Packed` nodes, which do not show in names."""
    entries = (entry for entry in accessor if getattr(entry, "type", None) not in (ByRank, Packed))
    return keys_of(entries)


def _add_name(result: Contents, name: str, tokens: tuple[Any, ...]) -> None:
    if name in result.keys:
        raise ValueError(f"two things in the tree have the name {name!r}: {result.keys[name]} and {tokens}")
    result.keys[name] = tokens


def _add_copy(result: Contents, name: str, layout: Layout, number: int, by_rank: bool) -> ReplicatedCopy | None:
    same = layout.same_axes(number)
    if (count := layout.grid.size(same)) == 1:
        return None
    grid, rank, cut = layout.grid, process_groups.global_rank(), layout.cut_axes(number)
    line = f"{cut} of {grid}, ranks {zlib.crc32(repr(grid.ranks).encode())}", grid.index(rank, cut)
    result.copies[name] = copy = ReplicatedCopy(grid.index(rank, same), count, line)
    if by_rank:
        result.by_rank.add(name)
    return copy


def _add_flat(
    result: Contents,
    tokens: tuple[Any, ...],
    node: FlatShard | Piece,
    shared: bool,
    by_rank: bool,
    single: int | None = None,
) -> None:
    layout: Layout = node.layout
    first = 0 if is_flat(node) else node.start  # type: ignore[union-attr]
    result.grids.append(layout.grid)
    result.exact = result.exact or layout.placement.exact
    if node.values is None:
        return
    names, values, rank = {}, node.values.detach(), process_groups.global_rank()
    for index, keys in (_keys_by_number(tokens, node) if single is None else {single: tokens}).items():
        name = names[index] = _name(keys)
        _add_name(result, name, keys)
        packed = layout.packed_at(index)
        result.tensors[name] = TensorType(values.dtype, layout.whole_shape(index), packed.meant if packed else "")
        _add_copy(result, name, layout, index, by_rank)
        if packed is not None:
            result.packed[name] = packed
    copies = {index: result.copies[name] for index, name in names.items() if name in result.copies}
    for index, start, stop, offset in layout.cuts_of(rank) if copies else ():
        if index in copies:
            copies[index].parts.append(values[offset - first : offset - first + stop - start])
    for index, box, offset in _piece_boxes(
        layout, rank, shared and not by_rank, values.element_size(), most_of(values)
    ):
        if index in names:
            part = values[offset - first : offset - first + box.numel].view(box.sizes)
            result.boxes.append(LocalBox(names[index], box, part))


def _add_blocks(result: Contents, tokens: tuple[Any, ...], node: Blocks, shared: bool, by_rank: bool) -> None:
    layout, rank = node.layout, process_groups.global_rank()
    result.grids.append(layout.grid)
    result.exact = result.exact or layout.placement.exact
    keys = _keys_by_number(tokens, node)
    shapes = {number: blocks.whole_shape(layout, number) for number in keys}
    copies: dict[int, ReplicatedCopy | None] = {}
    for number, tokens_of in keys.items():
        _add_name(result, _name(tokens_of), tokens_of)
        result.tensors[_name(tokens_of)] = TensorType(node.values.dtype, shapes[number])
        copies[number] = _add_copy(result, _name(tokens_of), layout, number, by_rank)
    values = node.values.detach()
    for number, offsets, start, stop in blocks.parts(node, rank, shared):
        writes = True
        if (copy := copies[number]) is not None:
            copy.parts.append(values[start:stop])
            turn = zlib.crc32(layout.entries[number].path.encode()) % copy.count
            writes = by_rank or not shared or copy.index == turn
        if (start < stop or shapes[number][-1] == 0) and writes:
            box = Box(offsets, (*(1 for _ in offsets[:-1]), stop - start))
            result.boxes.append(LocalBox(_name(keys[number]), box, values[start:stop].view(box.sizes)))


def _keys_by_number(tokens: tuple[Any, ...], node: FlatShard | Piece | Blocks) -> dict[int, tuple[Any, ...]]:
    """The parameters of a node by number, each with its keys from the root."""
    layout: Layout = node.layout
    numbers = range(len(layout.entries)) if is_flat(node) else node.entries  # type: ignore[union-attr]
    prefix, stage = split_keys(tokens, layout)
    inside = _parameter_keys(layout)
    return {number: (*prefix, *stage, *inside[number]) for number in numbers}


@functools.lru_cache(maxsize=4096)
def _parameter_keys(layout: Layout) -> list[tuple[Any, ...]]:
    """The keys of each parameter in its stage's tree."""
    accessors = optree.treespec_accessors(layout.tree)
    return [_tokens(accessors[entry.leaves[0]]) for entry in layout.entries]


@functools.lru_cache(maxsize=4096)
def _piece_boxes(layout: Layout, rank: int, shared: bool, width: int, max_bytes: int) -> list[tuple[int, Box, int]]:
    """A rank's piece as boxes of at most `max_bytes`: parameter index, box, and offset in the piece, for each."""
    numbers = {entry.path: index for index, entry in enumerate(layout.entries)}
    begin = layout.index(rank) * layout.piece
    cuts = []
    for part in layout.ranges(rank):
        entry, start, stop = layout.entries[numbers[part.path]], part.start, part.stop
        if shared:
            start, stop = _share(layout, numbers[part.path], rank, start, stop, width)
        if entry.numel == 0:
            if layout.grid.index(rank, layout.same_axes(numbers[part.path])) == 0:
                cuts.append((numbers[part.path], full_box(entry.shape), 0))
            continue
        offset = entry.offset - begin + start
        for box in steps(full_box(entry.shape), max_bytes // width, start, stop):
            cuts.append((numbers[part.path], box.translated(part.corner), offset))
            offset += box.numel
    return cuts


def _share(layout: Layout, number: int, rank: int, low: int, high: int, width: int) -> tuple[int, int]:
    axes = layout.same_axes(number)
    index, size = layout.grid.index(rank, axes), layout.grid.size(axes)
    if (high - low) * width < FEW * size:
        writer = zlib.crc32(layout.entries[number].path.encode()) % size
        return (low, high) if index == writer else (low, low)
    length = -(-(high - low) // size)
    return min(low + index * length, high), min(low + (index + 1) * length, high)
