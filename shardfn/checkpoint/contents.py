"""What a tree of training state holds, under true names: tensors of whole shapes, of which ranks have parts."""

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

from shardfn.checkpoint.boxes import Box, Ints, steps, whole
from shardfn.compat import process_groups
from shardfn.mesh.grid import Grid
from shardfn.mesh.spec import is_dtensor, joined
from shardfn.quant.packed import Packed, is_packed
from shardfn.quoting import findings
from shardfn.shards import blocks
from shardfn.shards.blocks import Blocks
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.pieces import Piece, is_unit
from shardfn.tiers import copying
from shardfn.tiers.copying import arrivals
from shardfn.tiers.tensors import on_disk

Scalar = bool | int | float | complex | str | tuple[Any, ...] | list[Any] | None
SCALARS = (bool, int, float, complex, str)
BUFFER = 2**25  # bytes of a part that is written or read at a time
FEW = 2**16  # bytes of a part that copies of it do not share


class ByRank:
    """Marks a value that each rank has its own of: a tensor, number or string, or a pytree of them.

    A value that is the same on all ranks is kept once, and can be loaded on any number of ranks; others only on as
    many as wrote them. Generators are always kept like this.

    Args:
        value: this rank's.

    Example:
        ``save(path, {"params": params, "rows read": ByRank(count)})``
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"ByRank({self.value!r})"


optree.register_pytree_node(
    ByRank,
    lambda one: ((one.value,), None, ("value",)),
    lambda _, children: ByRank(*children),
    path_entry_type=optree.GetAttrEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


class Value:
    """A leaf that is anything small of which torch's checkpoints have some: None, or a tuple or list of numbers."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Value({self.value!r})"


@dataclass(frozen=True, eq=False)
class Single:
    """A leaf that is one parameter of a flat shard, by its number, under a name of its own."""

    node: FlatShard | Piece
    number: int


@dataclass(frozen=True)
class Kind:
    """What a named tensor is.

    Attributes:
        dtype: of its elements.
        shape: of the whole.
        meant: what bytes stand for, if they are a parameter in few bits: its format and shape.
    """

    dtype: torch.dtype
    shape: Ints
    meant: str = ""

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        said = f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        return f"{said}, {self.meant}" if self.meant else said


@dataclass(frozen=True)
class LocalBox:
    """A box of a named tensor, in this rank's memory: `values` has the box's sizes."""

    name: str
    box: Box
    values: Tensor

    def take(self, box: Box, values: Tensor) -> None:
        """Copies what it has in common with another box, whose elements these are."""
        both = self.box.common(box)
        if both is not None:
            copying.copy_(self.values[both.within(self.box)], values[both.within(box)])


@dataclass
class Contents:
    """A tree, taken apart.

    Attributes:
        tensors: by name; the same on all ranks, also of what they hold nothing of.
        boxes: what this rank holds of those that are cut, or has to write of them.
        plain: tensors that are whole on every rank.
        numbers: and strings.
        by_rank: names of those in `plain` and `numbers` that may differ between ranks.
        packed: parameters in few bits.
        keys: each name as the keys from the root of the tree.
        grids: the meshes.
    """

    tensors: dict[str, Kind] = field(default_factory=dict)
    boxes: list[LocalBox] = field(default_factory=list)
    plain: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Scalar] = field(default_factory=dict)
    by_rank: set[str] = field(default_factory=set)
    packed: dict[str, Packed] = field(default_factory=dict)
    keys: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)


def contents(state: Any, *, shared: bool) -> Contents:
    """Takes a tree apart.

    Args:
        state: a pytree of flat shards, tensors, numbers, strings and generators.
        shared: whether ranks with the same part of a tensor each take a share of it, as for writing.

    Raises:
        TypeError: leaves of another kind.
        ValueError: a name twice.
    """
    found = Contents()
    wrong: list[str] = []
    for tokens, leaf, own in _leaves(state, (), False):
        name = _name(tokens)
        if type(leaf) in (Single, Value) and not shared:
            raise TypeError(
                f"{name} is part of what torch_optimizer made, which is for save: load_torch_optimizer(path, state) "
                f"reads it"
            )
        node, number = (leaf.node, leaf.number) if type(leaf) is Single else (leaf, None)
        if is_unit(node) and not (isinstance(node.values, Tensor) and lack(node.values)):
            _add_flat(found, tokens, node, shared, number)
            continue
        if type(leaf) is Blocks and isinstance(leaf.values, Tensor) and not lack(leaf.values):
            _add_blocks(found, tokens, leaf, shared)
            continue
        meant = ""
        if is_packed(leaf):
            found.packed[name], meant = leaf, leaf.meant
        if is_unit(leaf) or is_packed(leaf) or type(leaf) is Blocks:
            leaf = leaf.values
        if isinstance(leaf, torch.Generator):
            leaf, own = leaf.get_state(), True
        if isinstance(leaf, Tensor) and (why := lack(leaf)):
            wrong.append(f"{name} is a tensor {why}")
            continue
        if isinstance(leaf, Tensor) and not is_dtensor(leaf):
            _known(found, name, tokens)
            found.tensors[name] = Kind(leaf.dtype, tuple(leaf.shape), meant)
            found.plain[name] = leaf.detach()
        elif type(leaf) in SCALARS or type(leaf) is Value:
            _known(found, name, tokens)
            found.numbers[name] = leaf.value if type(leaf) is Value else leaf
        else:
            wrong.append(f"{name} is {type(leaf).__module__}.{type(leaf).__qualname__}")
            continue
        if own:
            found.by_rank.add(name)
    if wrong:
        raise TypeError(
            f"a checkpoint holds flat shards, tensors, numbers, strings and generators; {findings(wrong)}: convert "
            f"them (`.item()`, `str()`, `torch.as_tensor()`), or leave them out"
        )
    return found


def parameters(tree: Any) -> Iterator[tuple[str, Any, Ints]]:
    """Each parameter of a tree: its name, it alone as a leaf, and its whole shape."""
    for tokens, leaf, _ in _leaves(tree, (), False):
        leaf = leaf.values if is_packed(leaf) else leaf
        if isinstance(leaf, Tensor):
            yield _name(tokens), leaf, tuple(leaf.shape)
        elif is_unit(leaf) and leaf.values is not None:
            for number, keys in _keys(tokens, leaf).items():
                yield _name(keys), Single(leaf, number), leaf.layout.whole_shape(number)


def rebuilt(state: Any, values: dict[str, Any]) -> Any:
    """The tree with other numbers and strings; tensors and generators are those of the tree."""
    accessors, leaves, tree = optree.tree_flatten_with_accessor(state, is_leaf=is_unit)
    named = zip(map(_tokens, accessors), leaves, strict=True)
    return tree.unflatten(values.get(_name(tokens), leaf) if type(leaf) in SCALARS else leaf for tokens, leaf in named)


def generators(state: Any) -> dict[str, torch.Generator]:
    """The generators of a tree by name."""
    return {_name(tokens): leaf for tokens, leaf, _ in _leaves(state, (), False) if isinstance(leaf, torch.Generator)}


def crc(tensor: Tensor) -> int:
    """Of a tensor's bytes."""
    found = 0
    for part in arrivals(part for _, part in pieces(tensor, most_of(tensor))):
        found = zlib.crc32(memory(part), found)
    return found


def most_of(x: Tensor) -> int:
    """Bytes of a tensor that are written or read at a time."""
    return copying.PORTION if on_disk(x) else BUFFER


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's elements on the CPU, as a vector of bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.view(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)


def memory(tensor: Tensor) -> memoryview:
    """A tensor's bytes; those of a contiguous one on the CPU themselves, to read and to write."""
    found: Any = as_bytes(tensor).numpy()
    return memoryview(found)


def pieces(values: Tensor, most: int) -> Iterator[tuple[Box, Tensor]]:
    """A whole tensor in row-major order, in boxes of at most so many bytes; at least one."""
    for box in steps(whole(values.shape), most // values.element_size()):
        yield box, values[box.within(whole(values.shape))]


def _name(tokens: Iterable[Any]) -> str:
    return joined(*tokens) or "value"


def lack(x: Tensor) -> str:
    """Why the elements of a tensor are not all that it is, or are not there; "" of most."""
    if x.device.type == "meta":
        return "on the device meta, which has no values"
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        return "that is not dense: pass its to_dense() or dequantize(), or its parts"
    if hasattr(x, "__tensor_flatten__") and not is_dtensor(x):
        return f"made of others, {type(x).__name__}: pass those"
    return ""


def _leaves(state: Any, tokens: tuple[Any, ...], own: bool) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    accessors, leaves, _ = optree.tree_flatten_with_accessor(
        state, is_leaf=lambda x: is_unit(x) or type(x) in (ByRank, Blocks, Packed)
    )
    for accessor, leaf in zip(accessors, leaves, strict=True):
        here = (*tokens, *_tokens(accessor))
        if type(leaf) is ByRank:
            yield from _leaves(leaf.value, here, True)
        else:
            yield here, leaf, own


def _tokens(accessor: Iterable[Any]) -> tuple[Any, ...]:
    """The keys that an accessor goes by; a `ByRank` or `Packed` on the way has none in a name."""
    entries = (entry for entry in accessor if getattr(entry, "type", None) not in (ByRank, Packed))
    return tuple(getattr(entry, "field", entry.entry) for entry in entries)


def _known(found: Contents, name: str, tokens: tuple[Any, ...]) -> None:
    if name in found.keys:
        raise ValueError(f"two things in the tree have the name {name!r}: {found.keys[name]} and {tokens}")
    found.keys[name] = tokens


def _add_flat(
    found: Contents, tokens: tuple[Any, ...], node: FlatShard | Piece, shared: bool, single: int | None = None
) -> None:
    layout: Layout = node.layout
    first = 0 if is_flat(node) else node.start  # type: ignore[union-attr]
    found.grids.append(layout.grid)
    if node.values is None:
        return
    names, values = {}, node.values.detach()
    for number, keys in (_keys(tokens, node) if single is None else {single: tokens}).items():
        name = names[number] = _name(keys)
        _known(found, name, keys)
        packed = layout.packed_at(number)
        found.tensors[name] = Kind(values.dtype, layout.whole_shape(number), packed.meant if packed else "")
        if packed is not None:
            found.packed[name] = packed
    for number, box, at in _cut(layout, process_groups.global_rank(), shared, values.element_size(), most_of(values)):
        if number in names:
            own = values[at - first : at - first + box.numel].view(box.sizes)
            found.boxes.append(LocalBox(names[number], box, own))


def _add_blocks(found: Contents, tokens: tuple[Any, ...], node: Blocks, shared: bool) -> None:
    layout, rank = node.layout, process_groups.global_rank()
    found.grids.append(layout.grid)
    keys = _keys(tokens, node)
    shapes = {number: blocks.whole_shape(layout, number) for number in keys}
    for number, own in keys.items():
        _known(found, _name(own), own)
        found.tensors[_name(own)] = Kind(node.values.dtype, shapes[number])
    for number, offsets, start, stop in blocks.parts(node, rank, shared):
        axes = layout.same_axes(number)
        writer = zlib.crc32(layout.entries[number].path.encode()) % layout.grid.size(axes)
        if (start < stop or shapes[number][-1] == 0) and (not shared or layout.grid.index(rank, axes) == writer):
            sizes = (*(1 for _ in offsets[:-1]), stop - start)
            box = Box(offsets, sizes)
            found.boxes.append(LocalBox(_name(keys[number]), box, node.values.detach()[start:stop].view(sizes)))


def _keys(tokens: tuple[Any, ...], node: FlatShard | Piece | Blocks) -> dict[int, tuple[Any, ...]]:
    """The parameters of a node by number, each with the keys to it."""
    layout: Layout = node.layout
    numbers = range(len(layout.entries)) if is_flat(node) else node.entries  # type: ignore[union-attr]
    prefix, stage = _prefix(tokens, layout)
    inside = _inside(layout)
    return {number: (*prefix, *stage, *inside[number]) for number in numbers}


@functools.lru_cache(maxsize=4096)
def _inside(layout: Layout) -> list[tuple[Any, ...]]:
    """The keys of each parameter in its stage's tree."""
    accessors = optree.treespec_accessors(layout.tree)
    return [_tokens(accessors[entry.leaves[0]]) for entry in layout.entries]


@functools.lru_cache(maxsize=4096)
def _cut(layout: Layout, rank: int, shared: bool, width: int, most: int) -> list[tuple[int, Box, int]]:
    """A rank's piece as boxes of at most `most` bytes: a parameter, a box of it, and where in the piece it begins."""
    numbers = {entry.path: number for number, entry in enumerate(layout.entries)}
    begin = layout.index(rank) * layout.piece
    found = []
    for part in layout.ranges(rank):
        entry, low, high = layout.entries[numbers[part.path]], part.start, part.stop
        if shared:
            low, high = _share(layout, numbers[part.path], rank, low, high, width)
        if entry.numel == 0:
            if layout.grid.index(rank, layout.same_axes(numbers[part.path])) == 0:
                found.append((numbers[part.path], whole(entry.shape), 0))
            continue
        at = entry.offset - begin + low
        for box in steps(whole(entry.shape), most // width, low, high):
            found.append((numbers[part.path], box.moved(part.corner), at))
            at += box.numel
    return found


def _prefix(tokens: tuple[Any, ...], layout: Layout) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The keys before a stage's own, and these; together those of the node, without the one that marks a buffer."""
    stage = layout.stage
    marked = [i for i, token in enumerate(tokens) if str(token).startswith("@")]
    if marked:
        return tokens[: marked[0]], tuple(stage.split(".")) if stage else ()
    buffer = False
    if layout.partial and tokens:  # a key that begins with a dtype tells a stage's buffers apart
        buffer = isinstance(getattr(torch, str(tokens[-1]).split(" ")[0].split(",")[0], None), torch.dtype)
    for end in (len(tokens) - 1, len(tokens)) if buffer else (len(tokens),):
        for start in range(end, -1, -1):
            if joined(*tokens[start:end]) == stage:
                return tokens[:start], tokens[start:end]
    return tokens, ()


def _share(layout: Layout, number: int, rank: int, low: int, high: int, width: int) -> tuple[int, int]:
    axes = layout.same_axes(number)
    index, size = layout.grid.index(rank, axes), layout.grid.size(axes)
    if (high - low) * width < FEW * size:
        chosen = zlib.crc32(layout.entries[number].path.encode()) % size
        return (low, high) if index == chosen else (low, low)
    length = -(-(high - low) // size)
    return min(low + index * length, high), min(low + (index + 1) * length, high)
