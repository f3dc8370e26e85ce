"""How the arguments of a stage are made of flat shards and other things, worked out once for each structure."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import process_groups
from shardfn.mesh.grid import Grid
from shardfn.quant.formats import Format
from shardfn.quant.packed import Packed, is_packed
from shardfn.shards.buffer import ALIGNMENT
from shardfn.shards.layout import Layout, assemble, is_stage, stage_shards
from shardfn.shards.placement import Keep, keep_of
from shardfn.stages.compressed import Wire
from shardfn.stages.options import Offload, Options


@dataclass(frozen=True, eq=False)
class Gather:
    """One buffer of a stage on its way into a slot.

    Attributes:
        layout: of the parameters.
        dtype: in the slot.
        start: first byte in the slot.
        stop: end of its bytes.
        moves: whether it needs the slot at all: on one rank, in its own dtype, the shard is the parameters.
        tag: the end of its last piece, where no parameter is: says what is gathered.
        whole: whether this rank's own piece has to be in the slot too.
        wire: the few bits in which it travels, if it does so.
        encoded: first byte in the slot of what travels so.
    """

    layout: Layout
    dtype: torch.dtype
    start: int
    stop: int
    moves: bool
    tag: Tensor
    whole: bool = False
    wire: Wire | None = None
    encoded: int = 0


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """All buffers of a stage, and how many bytes of a slot they take."""

    each: tuple[Gather, ...]
    nbytes: int

    @functools.cached_property
    def secondary(self) -> GatherPlan | None:
        """The same slot, filled from copies that are cut less; None if there are none such."""
        if all(gather.layout.secondary is None for gather in self.each):
            return None
        return GatherPlan(tuple(_secondary(gather) for gather in self.each), self.nbytes)

    @functools.cached_property
    def stage(self) -> str:
        """Path of the stage, or of each of them."""
        return "+".join(dict.fromkeys(gather.layout.stage for gather in self.each))


@dataclass(eq=False)
class Signature:
    """The structure of a stage's arguments.

    Attributes:
        name: of the function.
        function: the function.
        options: of the stage.
        outer: the arguments' structure, each stage's parameters one leaf.
        sources: for each of those leaves the numbers of the flat leaves that it is made of.
        layouts: of the flat shards, in order of leaves; `shards` has their numbers.
        wholes: parameters in few bits that are not cut, by the numbers of their leaves.
        known: plans by the dtypes of the shards.
        shares_memory: whether outputs were seen to share memory, of which transforms cannot know.
        writable: whether there are lists and dicts among the arguments.
        computes: whether the function uses the parameters at all, or this rank only takes part.
        compared: whether the numbers of a second run were compared with those of the first.
    """

    name: str
    function: Callable[..., Any]
    options: Options
    outer: optree.PyTreeSpec
    sources: tuple[tuple[int, ...], ...]
    shards: tuple[int, ...]
    layouts: tuple[Layout, ...]
    wholes: dict[int, Packed] = field(default_factory=dict)
    known: dict[Any, GatherPlan] = field(default_factory=dict)
    shares_memory: bool = False
    writable: bool = False
    computes: bool = True
    compared: bool = False

    def __str__(self) -> str:
        return f"stage {self.name} ({self.stage!r})"

    @functools.cached_property
    def stage(self) -> str:
        """What this call is called in messages and in the ledger."""
        return "+".join(dict.fromkeys(layout.stage for layout in self.layouts)) or self.name

    @functools.cached_property
    def code(self) -> Any:
        """The same for functions that are made again and again from the same lines."""
        return getattr(inspect.unwrap(self.function), "__code__", self.name)

    @functools.cached_property
    def summed(self) -> str:
        """How gradients travel, where the layouts do not say it."""
        asked = {"reduce_dtype": self.options.reduce_dtype, "reduce": self.options.reduce}
        return "".join(f", {name}={value}" for name, value in asked.items() if value is not None)

    @functools.cached_property
    def keep(self) -> Keep:
        """What calls keep from forward to backward: the most that any of their layouts asks for."""
        if self.options.reshard is not None:
            return keep_of(self.options.reshard)
        asked = [layout.placement.keep for layout in self.layouts]
        return "step" if "step" in asked else True if True in asked else max(asked, key=bool)

    @functools.cached_property
    def keeps_graph(self) -> bool:
        """Whether what autograd saved in forward stays for backward; otherwise the function runs again."""
        return self.options.remat is False or isinstance(self.options.remat, Offload)

    @functools.cached_property
    def only_at_axes(self) -> tuple[str, ...]:
        """Axes along which some ranks have none of the parameters, and do not call."""
        return tuple(dict.fromkeys(name for layout in self.layouts for name in layout.placement.only_at_axes))

    @property
    def grid(self) -> Grid:
        """The mesh of the shards."""
        return self.layouts[0].grid

    def refuse_elsewhere(self) -> None:
        """Raises ValueError on a rank that holds nothing of the parameters, which live elsewhere."""
        for layout in self.layouts:
            if not layout.here(process_groups.global_rank()):
                only_at = ", ".join(f"{axis}={position}" for axis, position in layout.placement.only_at)
                raise ValueError(
                    f"stage {self.name}: {layout.stage!r} lives at {only_at}, and this rank is elsewhere and holds "
                    f"nothing of it: call a stage where its parameters are, as in `if axis_index(...) == ...`"
                )

    def plan(self, shards: Sequence[Tensor]) -> GatherPlan:
        """How these shards travel."""
        dtypes = tuple([shard.dtype for shard in shards])
        plan = self.known.get(dtypes)
        if plan is None:
            plan = self.known[dtypes] = plan_of(self.options, self.layouts, dtypes)
        return plan

    @functools.cached_property
    def packed(self) -> list[Packed]:
        """The parameters that are kept in few bits; what they hold is the number of a leaf."""
        return [layout.packed[leaf] for layout in self.layouts for e in layout.entries for leaf in e.leaves
                if leaf in layout.packed]  # fmt: skip

    def call(
        self, leaves: Sequence[Any], views: Sequence[Sequence[Any]], decode: Callable[[Packed], Tensor] | None = None
    ) -> Any:
        """The function on these leaves, but whole parameters in place of shards; `decode` for those in few bits."""
        outer, at = [], 0
        for source in self.sources:
            if source[0] in self.shards:
                n = len(source)
                parameters = assemble(self.layouts[at : at + n], views[at : at + n])
                outer.append(decoded(parameters, decode or self.decode) if self.packed else parameters)
                at += n
            else:
                x, whole = leaves[source[0]], self.wholes.get(source[0])
                outer.append(x if whole is None else whole.having(x).decoded())
        args, kwargs = optree.tree_unflatten(self.outer, outer)
        result = self.function(*args, **kwargs)
        if self.writable:
            self._refuse_written((args, kwargs), outer)
        return result

    def decode(self, packed: Packed) -> Tensor:
        """A parameter in few bits, in the dtype that the stage asks for."""
        return packed.decoded(self.options.gather_dtype)

    def _refuse_written(self, arguments: Any, before: Sequence[Any]) -> None:
        """Raises RuntimeError if the function wrote into a list or a dict, of which it had a copy."""
        try:
            same = all(a is b for a, b in zip(self.outer.flatten_up_to(arguments), before, strict=True))
        except ValueError:
            same = False
        if not same:
            raise RuntimeError(
                f"{self}: its function writes into a list or a dict among its arguments. It has a copy, since it may "
                f"run again in backward, and what it writes would be lost: return it"
            )

    def closed_over(self) -> list[Any]:
        """What the function closes over itself."""
        contents = []
        for cell in self._cells:
            with contextlib.suppress(ValueError):  # an empty one
                contents.append(cell.cell_contents)
        return contents

    def named(self) -> list[tuple[str, Tensor]]:
        """Tensors that the function's code names and does not get: what it closes over, and globals; for messages."""
        function = inspect.unwrap(self.function)
        code = getattr(function, "__code__", None)
        found: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars if code else (), self._cells, strict=False):
            with contextlib.suppress(ValueError):  # an empty one
                found[name] = cell.cell_contents
        around = getattr(function, "__globals__", {})
        found |= {name: around[name] for name in (code.co_names if code else ()) if name in around}
        return [(name, x) for name, value in found.items() for x in optree.tree_leaves(value) if isinstance(x, Tensor)]

    @functools.cached_property
    def _cells(self) -> tuple[Any, ...]:
        return getattr(inspect.unwrap(self.function), "__closure__", None) or ()


def signature_of(name: str, function: Callable[..., Any], options: Options, args: Any, kwargs: Any) -> Signature:
    """The signature of a call.

    Raises:
        ValueError: shards of different meshes.
    """
    nodes, outer = optree.tree_flatten((args, kwargs), is_leaf=lambda x: is_packed(x) or is_stage(x))
    wholes: dict[int, Packed] = {}
    sources: list[tuple[int, ...]] = []
    shards: list[int] = []
    layouts: list[Layout] = []
    at = 0
    for node in nodes:
        n = 1
        if is_stage(node):
            flats = stage_shards(node)
            n = len(flats)
            shards += range(at, at + n)
            layouts += [flat.layout for flat in flats]
        elif is_packed(node):
            wholes[at] = node.having(None)
        sources.append(tuple(range(at, at + n)))
        at += n
    for layout in layouts:
        if layout.grid != layouts[0].grid:
            raise ValueError(
                f"stage {name}: its parameters are on different meshes: {layouts[0].stage!r} on ({layouts[0].grid}), "
                f"{layout.stage!r} on ({layout.grid})"
            )
        buffers = [other for other in layouts if other.stage == layout.stage and other.tree == layout.tree]
        if sum(len(entry.leaves) for other in buffers for entry in other.entries) % layout.tree.num_leaves:
            raise ValueError(
                f"stage {name}: {layout.stage!r} has parameters in several buffers, of which {layout} came alone: "
                f"pass all that shard() put in its place"
            )
    values = (args, tuple(kwargs.values()))
    containers = optree.tree_leaves(values, is_leaf=lambda x: is_stage(x) or isinstance(x, (list, dict, deque)))
    writable = any(isinstance(x, (list, dict, deque)) and not is_stage(x) for x in containers)
    structure = outer, tuple(sources), tuple(shards), tuple(layouts), wholes
    return Signature(name, function, options, *structure, writable=writable)


def plan_of(options: Options, layouts: tuple[Layout, ...], dtypes: tuple[torch.dtype, ...]) -> GatherPlan:
    """How shards with these layouts, of these dtypes, travel; one object for all time."""
    with _lock:  # ranks may be threads
        return _plan_of(options.gather_dtype, options.gather, layouts, dtypes)


_lock = threading.Lock()


@functools.cache
def _plan_of(
    gather_dtype: torch.dtype | None,
    format: Format | None,
    layouts: tuple[Layout, ...],
    dtypes: tuple[torch.dtype, ...],
) -> GatherPlan:
    gathers, at = [], 0
    for layout, own in zip(layouts, dtypes, strict=True):
        dtype = gather_dtype if gather_dtype and own.is_floating_point else own
        moves = layout.size > 1 or dtype != own or layout.placement.tiers.params != "device"
        wire = wire_of(layout, own, format)
        stop = at + layout.padded * dtype.itemsize * moves
        tail = min(layout.padded - layout.total, layout.piece) * dtype.itemsize
        whole = layout.secondary is not None or layout.placement.hierarchical
        tag = _tag(layout, dtype if wire is None else wire, min(tail, ALIGNMENT) if wire is None else ALIGNMENT)
        encoded = up(stop)
        gathers.append(Gather(layout, dtype, at, stop, moves, tag, whole, wire, encoded))
        at = encoded if wire is None else up(encoded + layout.size * wire.length)
    return GatherPlan(tuple(gathers), at)


def up(nbytes: int) -> int:
    """Where in a slot the next buffer may begin."""
    return -(-nbytes // 512) * 512


def wire_of(layout: Layout, dtype: torch.dtype, format: Format | None) -> Wire | None:
    """How a shard's pieces travel in few bits; None if they travel as they are, or not at all."""
    chosen = format or layout.placement.gather
    if chosen is None or not dtype.is_floating_point or layout.size == 1:
        return None
    return Wire(chosen, layout.piece, ALIGNMENT)


def _secondary(gather: Gather) -> Gather:
    layout = gather.layout.secondary
    if layout is None:
        return gather
    tag = _tag(layout, gather.wire or gather.dtype, len(gather.tag))
    return replace(gather, layout=layout, tag=tag, whole=True)


def _tag(layout: Layout, travels: torch.dtype | Wire, length: int) -> Tensor:
    what = repr((layout.stage, layout.entries, layout.placement, layout.padded, travels))
    digest = hashlib.blake2b(what.encode(), digest_size=8).digest()
    named = (digest + repr(layout.stage).encode())[:length]
    return torch.tensor(list(named.ljust(length, b" ")), dtype=torch.uint8)


def decoded(tree: Any, decode: Callable[[Packed], Tensor]) -> Any:
    """A stage's parameters with tensors in place of those in few bits."""
    return optree.tree_map(lambda x: decode(x) if is_packed(x) else x, tree, is_leaf=is_packed)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors in another dtype, other things as they are."""
    return x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x


def cast_all(tree: Any, dtype: torch.dtype) -> Any:
    """The same for each leaf of a result."""
    return optree.tree_map(lambda x: cast(x, dtype), tree)
