"""Layouts and flat shards: a stage's parameters in one flat buffer, and this rank's part of it.

As in FSDP's `FlatParameter`, the parameters of one dtype follow each other in a buffer, each aligned to 64 bytes, and
each rank holds an equal contiguous piece of it. So an all-gather of the pieces yields the parameters as views, without
copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from shardfn.compat import dynamo, process_groups, pytrees
from shardfn.mesh import exact as exactness
from shardfn.mesh.grid import Grid
from shardfn.mesh.spec import P
from shardfn.quant.packed import Packed, is_packed
from shardfn.quoting import byte_count
from shardfn.shards.placement import Placement, Tier
from shardfn.tiers import copying
from shardfn.tiers.tensors import on_disk

ALIGNMENT = 64  # bytes
COARSE = 65536  # bytes per parameter, on average


@dataclass(frozen=True)
class Entry:
    """One parameter in the buffer.

    Attributes:
        path: the keys from the root of the whole tree, joined by dots; an empty key adds nothing: `blocks.0.attn.q`.
        leaves: indices of the leaves of the stage's tree; several, if one tensor is at several places.
        shape: shape of this rank's value.
        spec: the sharding of the full parameter over axes other than the buffer's, such as tensor parallelism.
        offset: position of its first element in the buffer.
    """

    path: str
    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    spec: P
    offset: int

    @property
    def numel(self) -> int:
        """Elements of this rank's value."""
        return math.prod(self.shape)


def aligned(numel: int, dtype: torch.dtype, exact: int = 0) -> int:
    """The least multiple of the alignment that is `numel` or more, in elements; that of `Placement.exact` is larger."""
    step = max(1, (exactness.ALIGNMENT if exact else ALIGNMENT) // dtype.itemsize)
    return -(-numel // step) * step


@functools.cache
def _geometry(*places: Any) -> Any:
    return object()


def _unused(used: Iterable[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """First element and length of each gap between the used ranges, `(start, stop)` in order."""
    gaps, end = [], 0
    for start, stop in (*used, (length, length)):
        if start > end:
            gaps.append((end, start - end))
        end = stop
    return tuple(gaps)


@dataclass(frozen=True)
class Range:
    """Elements `start` to `stop`, in row-major order, of parameter `path` as a rank's stages compute with it.

    A rank's value of the parameter has shape `shape` and begins at index `corner` of the full parameter. Without tensor
    parallelism it is the full parameter, and `corner` is all zeros.
    """

    path: str
    start: int
    stop: int
    shape: tuple[int, ...]
    corner: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """The static description of a flat shard: all about it except its values; hashable.

    Attributes:
        stage: path of the stage in the whole tree, joined by dots.
        tree: structure of the stage's parameters, of which this buffer may hold some.
        entries: the parameters in the buffer.
        dtype: dtype of the parameters.
        trainable: whether they get gradients.
        placement: the axes over which the buffer is sharded and replicated.
        grid: the mesh's axes and ranks.
        room: elements of the full buffer, if it is larger than necessary; else 0.
    """

    stage: str
    tree: optree.PyTreeSpec
    entries: tuple[Entry, ...]
    dtype: torch.dtype
    trainable: bool
    placement: Placement
    grid: Grid
    room: int = 0
    _hash: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._fields()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Layout):
            return self is other
        return self._hash == other._hash and self._fields() == other._fields()

    def _fields(self) -> tuple[Any, ...]:
        return self.stage, self.tree, self.entries, self.dtype, self.trainable, self.placement, self.grid, self.room

    def __reduce__(self) -> Any:
        stage, tree, *rest = self._fields()
        return _layout, (stage, tree.unflatten(range(tree.num_leaves)), *rest)

    @cached_property
    def size(self) -> int:
        """Number of pieces."""
        return self.grid.size(self.placement.axes)

    @cached_property
    def piece(self) -> int:
        """Elements of one rank's piece. The last piece ends in at least 64 unused bytes, for tags and marks.

        It also divides by the number of replicas, so that every placement on these axes has the same buffer size, and
        with `Placement.exact` by that number, so that meshes have the same.
        """
        if self.room:
            return self.room // self.size
        exact, step = self.placement.exact, aligned(1, self.dtype)
        finest = exact or self.grid.size(self.placement.axes + self.placement.replicas)
        return aligned(-(-(self.total + step) // finest), self.dtype, exact) * finest // self.size

    @cached_property
    def total(self) -> int:
        """Elements in use, up to the end of the last parameter."""
        return max((entry.offset + entry.numel for entry in self.entries), default=0)

    @property
    def padded(self) -> int:
        """Elements of the full buffer."""
        return self.piece * self.size

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """First element and length of each range that no parameter uses."""
        return _unused(((entry.offset, entry.offset + entry.numel) for entry in self.entries), self.padded)

    def element_range(self, number: int, index: int) -> tuple[int, int, int]:
        """Elements `low` to `high` of a parameter that a piece holds, and their position in it; none if equal."""
        entry, start = self.entries[number], index * self.piece
        low = min(max(start - entry.offset, 0), entry.numel)
        high = min(max(start + self.piece - entry.offset, 0), entry.numel)
        return low, high, entry.offset + low - start

    @cached_property
    def cuts(self) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
        """The contents of each piece: `(entry, start, stop, at)`, elements of an entry at position `at`."""
        numbers = range(len(self.entries))
        pieces = ([(number, *self.element_range(number, index)) for number in numbers] for index in range(self.size))
        return tuple(tuple(cut for cut in piece if cut[1] < cut[2]) for piece in pieces)

    @cached_property
    def holes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """First element and length of each range that no parameter uses, for each piece."""
        return tuple(
            _unused(((position, position + stop - start) for _, start, stop, position in cuts), self.piece)
            for cuts in self.cuts
        )

    @cached_property
    def splits(self) -> tuple[list[int], list[int]]:
        """Lengths for `Tensor.split` of the full buffer, and the indices of the parts that are entries."""
        lengths, chosen, end = [], [], 0
        for entry in self.entries:
            if entry.offset > end:
                lengths.append(entry.offset - end)
            chosen.append(len(lengths))
            lengths.append(entry.numel)
            end = entry.offset + entry.numel
        return [*lengths, self.padded - end], chosen

    @cached_property
    def geometry(self) -> Any:
        """The positions and shapes of the parameters in the buffer, as an object that equal layouts share."""
        return _geometry(tuple((entry.offset, entry.shape) for entry in self.entries), self.padded)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter as a view of the full buffer `[padded]`, in the order of the entries."""
        lengths, chosen = self.splits
        parts = buffer.split(lengths)
        return [parts[i].view(entry.shape) for i, entry in zip(chosen, self.entries, strict=True)]

    def lives_on(self, rank: int) -> bool:
        """Whether a rank is at the `only_at` positions, and so holds a piece; other ranks hold none."""
        return all(self.grid.index(rank, name) == position for name, position in self.placement.only_at)

    def index(self, rank: int) -> int:
        """Index of the piece that a rank holds, where the parameters live."""
        return self.grid.index(rank, self.placement.axes)

    def num_elements_on(self, rank: int) -> int:
        """Elements that a rank holds: a piece, or 0 where the parameters do not live."""
        return self.piece if self.lives_on(rank) else 0

    @cached_property
    def state_layout(self) -> Layout:
        """Layout of the gradient and the optimizer state; its pieces are parts of this layout's pieces."""
        return self.placed(self.placement.of_state)

    @cached_property
    def secondary(self) -> Layout | None:
        """Layout of the larger shards from which backward gathers, or None; its pieces contain this layout's pieces."""
        secondary = self.placement.secondary
        return None if secondary is None else self.placed(secondary)

    def placed(self, placement: Placement) -> Layout:
        """The layout of the same buffer with a different placement."""
        if placement == self.placement:
            return self
        return replace(self, placement=placement)

    def alone(self, places: tuple[tuple[str, int], ...]) -> Layout:
        """The layout of the same pieces for the ranks at these positions, which run independently along these axes."""
        names = {name for name, _ in places}
        placement = self.placement.without(names)
        only_at = (*placement.only_at, *(place for place in places if place[0] not in placement.only_at_axes))
        return replace(self, placement=replace(placement, only_at=only_at), room=self.padded)

    @property
    def partial(self) -> bool:
        """Whether other buffers hold some of the stage's parameters."""
        return sum(len(entry.leaves) for entry in self.entries) < self.tree.num_leaves

    @cached_property
    def in_order(self) -> bool:
        """Whether the buffer holds all of the stage's parameters, each one leaf, in the order of the leaves."""
        return [entry.leaves for entry in self.entries] == [(leaf,) for leaf in range(self.tree.num_leaves)]

    @property
    def coarse(self) -> bool:
        """Whether parameters are large enough on average to be sent one by one, rather than as one buffer."""
        return self.total * self.dtype.itemsize >= COARSE * len(self.entries)

    @cached_property
    def packed(self) -> dict[int, Packed]:
        """The stage's quantized parameters, by the indices of their leaves."""
        return in_few_bits(self.tree)

    def packed_at(self, number: int) -> Packed | None:
        """The description of a quantized parameter, without its bytes; None for others."""
        return self.packed.get(self.entries[number].leaves[0])

    def meant_shape(self, number: int) -> tuple[int, ...]:
        """Shape of the full parameter as a function sees it; of a quantized one, after decoding."""
        packed = self.packed_at(number)
        return self.whole_shape(number) if packed is None else packed.shape

    def cuts_of(self, rank: int) -> list[tuple[int, int, int, int]]:
        """The cuts that a rank holds, as in `cuts`, and parameters without elements at their positions."""
        if not self.lives_on(rank):
            return []
        cuts = ((number, *self.element_range(number, self.index(rank))) for number in range(len(self.entries)))
        return [
            (number, low, high, position)
            for number, low, high, position in cuts
            if low < high or (self.entries[number].numel == 0 and 0 <= position < self.piece)
        ]

    def ranges(self, rank: int) -> list[Range]:
        """The ranges of parameters that the global rank `rank` holds."""
        ranges = []
        for number, low, high, _ in self.cuts_of(rank):
            entry = self.entries[number]
            ranges.append(Range(entry.path, low, high, entry.shape, self.corner(number, rank)))
        return ranges

    def whole_shape(self, number: int) -> tuple[int, ...]:
        """Shape of the full parameter, before `spec` shards it."""
        return tuple(n * k for n, k in zip(self.entries[number].shape, self.parts(number), strict=True))

    def parts(self, number: int) -> tuple[int, ...]:
        """Number of parts into which `spec` splits each dimension of a parameter; a rank's value is one of them."""
        entry = self.entries[number]
        cuts = [self.grid.size(names) for names in entry.spec.by_dim()]
        return (*cuts, *(1,) * (len(entry.shape) - len(cuts)))

    def part(self, number: int, rank: int) -> tuple[int, ...]:
        """Index of a rank's part in each dimension."""
        entry = self.entries[number]
        places = [self.grid.index(rank, names) for names in entry.spec.by_dim()]
        return (*places, *(0,) * (len(entry.shape) - len(places)))

    def cut_axes(self, number: int) -> tuple[str, ...]:
        """Axes along which ranks hold different elements of a parameter, or some ranks none; in the mesh's order."""
        return self._axes[number][0]

    def same_axes(self, number: int) -> tuple[str, ...]:
        """The other axes, along which ranks hold the same elements of a parameter."""
        return self._axes[number][1]

    @cached_property
    def _axes(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        every = {*self.placement.axes, *self.placement.only_at_axes}
        cuts = ({*every, *entry.spec.axes} for entry in self.entries)
        names = tuple(name for name, _ in self.grid.sizes)
        return tuple((tuple(n for n in names if n in cut), tuple(n for n in names if n not in cut)) for cut in cuts)

    def corner(self, number: int, rank: int) -> tuple[int, ...]:
        """Index in the full parameter at which a rank's value begins."""
        return tuple(i * length for i, length in zip(self.part(number, rank), self.entries[number].shape, strict=True))

    def __str__(self) -> str:
        spread = f"1/{self.size} over {' x '.join(self.placement.axes)}" if self.size > 1 else "whole"
        suffix = f", the same over {' x '.join(self.placement.replicas)}" if self.placement.replicas else ""
        suffix += "".join(f", only at {name}={position}" for name, position in self.placement.only_at)
        if self.state_layout is not self:
            suffix += f", gradients 1/{self.state_layout.size} over {' x '.join(self.placement.gradients)}"
        size = self.piece * self.dtype.itemsize
        params, *state_tiers = self.placement.tiers
        elsewhere = "".join(
            f", {kind} {_WHERE[tier]}"
            for kind, tier in zip(("gradients", "state"), state_tiers, strict=True)
            if tier != "device"
        )
        return (
            f"{self.stage or 'all'}: {str(self.dtype).removeprefix('torch.')}{'' if self.trainable else ', frozen'}, "
            f"{spread}{suffix}, {byte_count(size)} a rank{' ' * (params != 'device')}{_WHERE[params]}{elsewhere}"
        )


_WHERE: dict[Tier, str] = {"device": "", "host": "on the host", "disk": "on disk"}


def _meant(flat: FlatShard) -> str:
    """Says what a flat shard is and how to get parameters, for messages."""
    stage = f"stage {flat.layout.stage!r}" if flat.layout.stage else "the parameters"
    return (
        f"it is this rank's piece of {stage}. A function that shardfn.stage wraps gets the whole parameters, "
        f"shardfn.unshard(params) gives them, and shardfn.shards.local_parameters(flat) what this rank holds of each"
    )


def _refused(problem: str) -> Callable[..., Any]:
    """A method that raises TypeError."""

    def refuse(self: FlatShard, *_: Any) -> Any:
        raise TypeError(f"a FlatShard {problem}: {_meant(self)}")

    return refuse


class FlatShard:
    """This rank's piece of a stage's parameters: a pytree node with one tensor leaf.

    So any `tree_map` over a tree of parameters (an optimizer, a moving average, a norm) is one operation per stage. The
    values are not checked until a stage, or `unshard`, uses them.

    While a flat shard exists, its mesh stays alive, with its process groups and the buffers that its stages share.

    Attributes:
        values: `[layout.piece]`, contiguous; `[0]` on ranks where the parameters do not live.
        layout: which elements of which parameters the values are.
    """

    __slots__ = ("_mesh", "layout", "values")

    def __init__(self, values: Tensor, layout: Layout) -> None:
        self.values, self.layout = values, layout
        if torch.compiler.is_compiling():
            dynamo.refuse_compiling(f"a shard of {layout.stage!r}")
        self._mesh = layout.grid.mesh()

    def __reduce__(self) -> Any:
        return FlatShard, (self.values, self.layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        return FlatShard(copying.deepcopy(self.values, memo), self.layout)

    @property
    def spec(self) -> P:
        """The spec for `shard_map`: a vector that is sharded over the layout's axes."""
        return P(self.layout.placement.axes)

    def __repr__(self) -> str:
        if not isinstance(self.values, Tensor):
            return f"FlatShard({self.values!r}, {self.layout})"
        lines = [f"  {entry.path or '(itself)'} {list(entry.shape)}" for entry in self.layout.entries]
        cast = self.values.dtype != self.layout.dtype
        actual = [f"{str(self.values.dtype).removeprefix('torch.')}, {byte_count(self.values.nbytes)}"] * cast
        if self.values.numel() and on_disk(self.values) is not (self.layout.placement.tiers.params == "disk"):
            actual.append("on disk" if on_disk(self.values) else "in memory")
        actually = f"now {', '.join(actual)}; " if actual else ""
        return "\n".join([f"FlatShard({actually}{self.layout},", *lines, ")"])

    __getitem__: Any = _refused("cannot be indexed")
    __len__: Any = _refused("has no length")
    __add__: Any = _refused("has no arithmetic, but any tree_map goes into it")
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = __add__

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or name in FlatShard.__slots__:  # copying and pickling probe for these
                raise AttributeError(name)
            raise AttributeError(f"a FlatShard has no .{name}: {_meant(self)}")

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises TypeError: functions of torch do not take flat shards."""
        flat = next((x for x in optree.tree_leaves((args, kwargs), is_leaf=is_flat) if is_flat(x)), None)
        name = getattr(f, "__name__", str(f))
        raise TypeError(f"torch's {name} takes no FlatShard: {_meant(flat) if flat else 'see shardfn.stage'}")


def local_parameters(flat: FlatShard) -> dict[str, Tensor]:
    """The elements of each parameter that this rank holds in a flat shard, by path.

    Args:
        flat: the shard.

    Returns:
        Vectors of elements in row-major order, views of `flat.values` in its dtype. `flat.layout.ranges(rank)` says
        which elements they are. Parameters of which this rank holds no elements are left out.

    Example:
        ``largest = {name: part.abs().max() for name, part in local_parameters(params["head"]).items()}``
    """
    layout, rank = flat.layout, process_groups.global_rank()
    return {
        layout.entries[number].path: flat.values[start : start + high - low]
        for number, low, high, start in layout.cuts_of(rank)
    }


def lay(
    stage: str,
    tree: optree.PyTreeSpec,
    parts: Sequence[tuple[str, tuple[int, ...], tuple[int, ...], P]],
    dtype: torch.dtype,
    trainable: bool,
    placement: Placement,
    grid: Grid,
) -> Layout:
    """The layout of parameters `(path, leaves, shape, spec)`, one after another in a buffer."""
    entries, offset = [], 0
    if placement.exact:
        exactness.check_fits(placement.exact, dict(grid.sizes), placement.axes + placement.replicas, stage)
    for path, leaves, shape, spec in parts:
        entries.append(Entry(path, leaves, shape, spec, offset))
        offset = aligned(offset + math.prod(shape), dtype, placement.exact)
    return Layout(stage, tree, tuple(entries), dtype, trainable, placement, grid)


def is_flat(value: Any) -> bool:
    """Whether a value is a flat shard."""
    return type(value) is FlatShard


def flat_shards(tree: Any) -> list[FlatShard]:
    """The flat shards in a tree."""
    return [leaf for leaf in optree.tree_leaves(tree, is_leaf=is_flat) if is_flat(leaf)]


def is_stage(value: Any) -> bool:
    """Whether a value is all of a stage's parameters: a flat shard, or the dict of a stage's flat shards."""
    if is_flat(value):
        return True
    if type(value) is not dict or not value or not all(map(is_flat, value.values())):
        return False
    layouts = [flat.layout for flat in value.values()]
    first = layouts[0]
    return first.partial and all(layout.tree == first.tree and layout.stage == first.stage for layout in layouts)


def stage_shards(value: Any) -> list[FlatShard]:
    """The flat shards of one stage, in the order in which optree flattens them."""
    return [value] if is_flat(value) else [value[key] for key in sorted(value)]


def in_few_bits(tree: optree.PyTreeSpec) -> dict[int, Packed]:
    """The quantized parameters of a structure, by the indices of their leaves."""
    leaves = optree.tree_leaves(tree.unflatten(range(tree.num_leaves)), is_leaf=is_packed)
    return {leaf.values: leaf for leaf in leaves if is_packed(leaf)}


def assemble(layouts: Sequence[Layout], views: Sequence[Sequence[Any]]) -> Any:
    """A stage's parameters in their tree, from the views of each of its buffers."""
    if len(layouts) == 1 and layouts[0].in_order:
        return optree.tree_unflatten(layouts[0].tree, views[0])
    leaves: list[Any] = [None] * layouts[0].tree.num_leaves
    for layout, parts in zip(layouts, views, strict=True):
        for entry, part in zip(layout.entries, parts, strict=True):
            for leaf in entry.leaves:
                leaves[leaf] = part
    return optree.tree_unflatten(layouts[0].tree, leaves)


def _layout(stage: str, example: Any, *rest: Any) -> Layout:
    return Layout(stage, optree.tree_structure(example), *rest)


pytrees.register(
    FlatShard,
    lambda flat: ((flat.values,), flat.layout, ("values",)),
    lambda layout, children: FlatShard(children[0], layout),
    optree.GetAttrEntry,
)
