"""The structure of a stage's arguments: which leaves are flat shards, and of which parameters.

A signature is made once for each structure, and cached: later calls with the same structure skip this work.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import process_groups
from shardfn.quant.packed import Packed, is_packed
from shardfn.shards.layout import FlatShard, Layout, assemble, is_stage, stage_shards
from shardfn.shards.placement import Keep, keep_of
from shardfn.stages.gather_plan import GatherPlan, plan_of
from shardfn.stages.options import Options


@dataclass(eq=False)
class Signature:
    """The structure of a stage's arguments.

    Attributes:
        name: name of the function.
        function: the function.
        options: the stage's options.
        outer: the arguments' structure, with each stage's parameters as one leaf.
        sources: for each of those leaves, indices of the flat leaves of which it consists.
        shards: indices of the flat shards among the flat leaves.
        layouts: layouts of the flat shards, in the same order.
        wholes: quantized parameters that are not sharded, by the indices of their leaves.
        known: gather plans by the dtypes of the shards.
        writable: whether there are lists, dicts or deques among the arguments.
        computes: whether the function uses the parameters, or this rank only takes part in the collectives.
        sampled: whether a second forward's values were compared with the first's; done at the first call alone.
        paired: the forward-mode versions of this stage (`forward_mode/pairs.py`), by which arguments have tangents, and
            by the gradients of which only the tangents are read.
        reverses: whether torch.func.vjp can run the function on pairs of primal and tangent, as far as is known.
        apart: the per-example version of this stage (`curvature`).
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
    writable: bool = False
    computes: bool = True
    sampled: bool = False
    paired: dict[tuple[tuple[bool, ...], tuple[bool, ...]], Signature] = field(default_factory=dict)
    reverses: bool = True
    apart: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return f"stage {self.name} ({self.stage!r})"

    @functools.cached_property
    def stage(self) -> str:
        """The stage's path, for messages and the ledger."""
        return "+".join(dict.fromkeys(layout.stage for layout in self.layouts)) or self.name

    @functools.cached_property
    def code(self) -> Any:
        """The function's code, which is the same if a function is made again and again from the same lines."""
        return getattr(inspect.unwrap(self.function), "__code__", self.name)

    @functools.cached_property
    def summed(self) -> str:
        """The options for reducing gradients that no layout has, as text that ranks compare."""
        requested = {"reduce_dtype": self.options.reduce_dtype, "reduce_format": self.options.reduce_format}
        return "".join(f", {name}={value}" for name, value in requested.items() if value is not None)

    @functools.cached_property
    def keep(self) -> Keep:
        """The gathered values that calls keep from forward to backward: the most that any of their layouts asks for."""
        if self.options.reshard is not None:
            return keep_of(self.options.reshard)
        requested = [layout.placement.keep for layout in self.layouts]
        return "step" if "step" in requested else True if True in requested else max(requested, key=bool)

    @functools.cached_property
    def only_at_axes(self) -> tuple[str, ...]:
        """Axes along which some ranks hold none of the parameters, and do not call the stage."""
        return tuple(dict.fromkeys(name for layout in self.layouts for name in layout.placement.only_at_axes))

    def refuse_elsewhere(self) -> None:
        """Raises ValueError on a rank that holds none of the parameters."""
        for layout in self.layouts:
            if not layout.lives_on(process_groups.global_rank()):
                only_at = ", ".join(f"{axis}={position}" for axis, position in layout.placement.only_at)
                raise ValueError(
                    f"stage {self.name}: {layout.stage!r} lives at {only_at}, and this rank is elsewhere and holds "
                    f"nothing of it: call a stage where its parameters are, as in `if axis_index(...) == ...`"
                )

    def plan(self, shards: Sequence[Tensor]) -> GatherPlan:
        """The gather plan for shards of these dtypes."""
        dtypes = tuple([shard.dtype for shard in shards])
        plan = self.known.get(dtypes)
        if plan is None:
            plan = self.known[dtypes] = plan_of(self.options, self.layouts, dtypes)
        return plan

    @functools.cached_property
    def packed(self) -> list[Packed]:
        """The quantized parameters; each holds the index of a leaf."""
        return [layout.packed[leaf] for layout in self.layouts for e in layout.entries for leaf in e.leaves
                if leaf in layout.packed]  # fmt: skip

    def call(
        self, leaves: Sequence[Any], views: Sequence[Sequence[Any]], decode: Callable[[Packed], Tensor] | None = None
    ) -> Any:
        """Calls the function with full parameters in place of shards; `decode` decodes the quantized ones."""
        outer, first_layout = [], 0
        for source in self.sources:
            if source[0] in self.shards:
                n = len(source)
                parameters = assemble(
                    self.layouts[first_layout : first_layout + n], views[first_layout : first_layout + n]
                )
                outer.append(decoded(parameters, decode or self.decode) if self.packed else parameters)
                first_layout += n
            else:
                x, packed = leaves[source[0]], self.wholes.get(source[0])
                outer.append(x if packed is None else packed.having(x).decoded())
        args, kwargs = optree.tree_unflatten(self.outer, outer)
        result = self.function(*args, **kwargs)
        if self.writable:
            self._refuse_written((args, kwargs), outer)
        return result

    def nodes(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments, with each stage's flat shards as one node."""
        nodes: list[Any] = []
        layouts, shards = iter(self.layouts), set(self.shards)
        for indices in self.sources:
            flats = {i: FlatShard(leaves[i], next(layouts)) for i in indices} if indices[0] in shards else {}
            nodes.append(leaves[indices[0]] if not flats else flats[indices[0]] if len(flats) == 1 else flats)
        return nodes

    def decode(self, packed: Packed) -> Tensor:
        """Decodes a quantized parameter, to the dtype that the stage asks for."""
        return packed.decoded(self.options.gather_dtype)

    def _refuse_written(self, arguments: Any, before: Sequence[Any]) -> None:
        """Raises RuntimeError if the function wrote into a list or dict among its arguments, which are copies."""
        try:
            same = all(a is b for a, b in zip(self.outer.flatten_up_to(arguments), before, strict=True))
        except ValueError:
            same = False
        if not same:
            raise RuntimeError(
                f"{self}: its function writes into a list or a dict among its arguments. It has a copy, since it may "
                f"run again in backward, and what it writes would be lost: return it"
            )

    def generators(self, leaves: Sequence[Any]) -> list[torch.Generator]:
        """The generators among the arguments, and those over which the function closes."""
        contents = list(leaves)
        for cell in self._cells:
            with contextlib.suppress(ValueError):  # an empty cell
                contents.append(cell.cell_contents)
        return [x for x in contents if type(x) is torch.Generator]

    @functools.cached_property
    def _cells(self) -> tuple[Any, ...]:
        return getattr(inspect.unwrap(self.function), "__closure__", None) or ()


def signature_of(name: str, function: Callable[..., Any], options: Options, args: Any, kwargs: Any) -> Signature:
    """The signature of a call.

    Raises:
        ValueError: shards of different meshes, or only some of a stage's buffers.
    """
    nodes, outer = optree.tree_flatten((args, kwargs), is_leaf=lambda x: is_packed(x) or is_stage(x))
    unsharded: dict[int, Packed] = {}
    sources: list[tuple[int, ...]] = []
    shards: list[int] = []
    layouts: list[Layout] = []
    index = 0
    for node in nodes:
        n = 1
        if is_stage(node):
            flats = stage_shards(node)
            n = len(flats)
            shards += range(index, index + n)
            layouts += [flat.layout for flat in flats]
        elif is_packed(node):
            unsharded[index] = node.having(None)
        sources.append(tuple(range(index, index + n)))
        index += n
    for layout in layouts:
        if layout.grid != layouts[0].grid:
            raise ValueError(
                f"stage {name}: its parameters are on different meshes: {layouts[0].stage!r} on ({layouts[0].grid}), "
                f"{layout.stage!r} on ({layout.grid})"
            )
        buffers = [other for other in layouts if other.stage == layout.stage and other.tree == layout.tree]
        if sum(len(entry.leaves) for other in buffers for entry in other.entries) % layout.tree.num_leaves:
            raise ValueError(
                f"stage {name}: {layout.stage!r} has parameters in several buffers, but got {layout} alone: pass "
                f"all that shard() returned in its place"
            )
    values = (args, tuple(kwargs.values()))
    containers = optree.tree_leaves(values, is_leaf=lambda x: is_stage(x) or isinstance(x, (list, dict, deque)))
    writable = any(isinstance(x, (list, dict, deque)) and not is_stage(x) for x in containers)
    structure = outer, tuple(sources), tuple(shards), tuple(layouts), unsharded
    return Signature(name, function, options, *structure, writable=writable)


def decoded(tree: Any, decode: Callable[[Packed], Tensor]) -> Any:
    """A stage's parameters, with quantized ones decoded."""
    return optree.tree_map(lambda x: decode(x) if is_packed(x) else x, tree, is_leaf=is_packed)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Casts a floating-point tensor; returns anything else unchanged."""
    return x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x


def cast_all(tree: Any, dtype: torch.dtype) -> Any:
    """Casts all floating-point tensors of a tree."""
    return optree.tree_map(lambda x: cast(x, dtype), tree)
