"""Turns full parameters into flat shards, also from a stream of tensors, so that no rank holds all of them.

A tree of parameters becomes a tree of stages: a `FlatShard` for each stage, or a dict of them where a stage has several
dtypes, frozen parameters or placements.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.agree import agree, failing_together
from shardfn.compat import autograd, process_groups
from shardfn.mesh.axes import check_axes, grid_of, per_mesh
from shardfn.mesh.grid import Grid
from shardfn.mesh.planned import planned
from shardfn.mesh.selectors import Chosen, Which, chosen
from shardfn.mesh.spec import ByPath, P, dotted, global_shape, is_dtensor, joined, local_shape, sliced
from shardfn.quant.packed import Packed, is_packed
from shardfn.quoting import listed
from shardfn.shards.layout import FlatShard, Layout, in_few_bits, is_flat, lay
from shardfn.shards.placement import Placement, Strategy
from shardfn.shards.replicated import assert_replicated, checksum
from shardfn.tiers import copying, placing
from shardfn.tracebacks import api_boundary

Specs = P | ByPath | Mapping[Any, Any] | Sequence[Any] | Callable[[str, tuple[int, ...]], P]
"""Sharding over axes other than the buffer's: one spec for all parameters, a tree, patterns, or a function."""


@api_boundary
def shard(
    tree: Any,
    mesh: DeviceMesh,
    strategy: Strategy,
    *,
    stages: Which | None = None,
    frozen: Which = (),
    specs: Specs = P(),  # noqa: B008  # immutable
    inputs: Literal["global", "local"] = "global",
) -> Any:
    """Shards a tree of parameters: returns flat shards, one for each stage and dtype.

    Args:
        tree: a pytree of dense tensors of any shapes and dtypes, the same on every rank. They are copied.
        mesh: the mesh whose ranks hold the pieces, on its kind of device.
        strategy: the axes over which parameters are sharded and replicated: `full_shard("shard")`, ...; or a function
            of a parameter's path and full shape that returns such a placement.
        stages: which subtrees become stages: a regular expression that matches the whole path (keys joined by dots),
            several of them, or a function of a path and a shape, which is None for a node above tensors. Default:
            each top-level entry of the tree, and each item of a list or tuple entry.
        frozen: which parameters get no gradient: patterns, or a function of a path and a full shape. Integer
            parameters never get one.
        specs: the sharding over *other* axes, such as tensor-parallel ones: a `P` for all, a tree prefix of them,
            `by_path`, or a function of a path and the shape of the tensor passed that returns a `P`.
        inputs: `"global"`: tensors are full, and are sharded as `specs` say; `"local"`: they are this rank's parts.

    Returns:
        The tree with a `FlatShard` in place of each stage; where a stage has several dtypes or placements, or frozen
        parameters as well as others, a dict of flat shards, such as `{"float32": ..., "float32 frozen": ...}`.

    Raises:
        ValueError: unknown axes; a dimension that does not divide; a parameter in no stage; one tensor in two stages;
            a pattern that matches nothing; values that differ between ranks.
        TypeError: a leaf that is not a plain tensor; an argument that is neither patterns nor a function.

    Example:
        ``params = shard(init(makers, seed=0), mesh, full_shard("shard"), frozen=r"embed\\..*")``
    """
    rules = Rules(mesh, strategy, stages, frozen, specs, inputs)
    return agreed(rules, "shard", lambda: rules.map_stages(tree, rules.cut))


@api_boundary
def shard_named(
    named: Iterable[tuple[str, Tensor]],
    like: Any,
    mesh: DeviceMesh,
    strategy: Strategy,
    *,
    stages: Which | None = None,
    frozen: Which = (),
    specs: Specs = P(),  # noqa: B008
) -> Any:
    """Shards a stream of named full tensors, such as a checkpoint's, one tensor at a time.

    All ranks pass the same stream.

    Args:
        named: `(path, tensor)` in any order, each path once; at most one full tensor is in memory besides the shards.
        like: a pytree of tensors of the right shapes and dtypes, such as on the meta device.
        mesh: as for `shard`, like the arguments that follow.
        strategy: as for `shard`.
        stages: as for `shard`.
        frozen: as for `shard`.
        specs: as for `shard`.

    Returns:
        As `shard` of the full tree.

    Raises:
        ValueError: a name that is missing, unknown or twice in the stream; a shape or dtype that differs from `like`.
        TypeError: as `shard`; a value that is not a tensor.

    Example:
        ``params = shard_named(torch.load(path, mmap=True).items(), like, mesh, full_shard("shard"))``
    """
    rules = Rules(mesh, strategy, stages, frozen, specs, "global", filled=False)

    def stream() -> Any:
        tree = rules.map_stages(like, rules.cut)
        waiting = dict(rules.places)
        for name, tensor in named:
            if name not in rules.places:
                raise ValueError(f"{name!r} is not a parameter: the tree has {listed(rules.places)}")
            if name not in waiting:
                raise ValueError(f"{name!r} came twice")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name!r} is of type {type(tensor).__name__}, not a tensor")
            refuse_sparse(name, tensor)
            flat, number, shape = waiting.pop(name)
            if tensor.shape != shape or tensor.dtype != flat.layout.dtype:
                raise ValueError(
                    f"{name!r} is {tensor.dtype} {tuple(tensor.shape)}, but the tree has {flat.layout.dtype} "
                    f"{tuple(shape)}: convert it on the way"
                )
            rules.fill(flat, number, name, tensor)
        if waiting:
            raise ValueError(f"no tensor came for {listed(waiting)}")
        return tree

    return agreed(rules, "shard_named", stream)


_PARAMETERS = (
    "the parameters",
    "Every rank passes the same parameters, with the same values: make them from one seed, or with init_sharded",
)


class Rules:
    """The arguments of one call of `shard`, `shard_named` or `init_sharded`, and the parameters seen so far."""

    def __init__(
        self,
        mesh: DeviceMesh,
        strategy: Strategy,
        stages: Which | None,
        frozen: Which,
        specs: Specs,
        inputs: str,
        filled: bool = True,
    ) -> None:
        if not isinstance(strategy, Placement) and (not callable(strategy) or isinstance(strategy, type)):
            raise TypeError(
                f'a strategy is a Placement, such as shardfn.full_shard("shard"), or a function of path and shape that '
                f"returns one, not {strategy!r}; names go through shardfn.strategies.from_name(...)"
            )
        if inputs not in ("global", "local"):
            raise ValueError(f'inputs must be "global" or "local", got {inputs!r}')
        flat_specs: Any = specs if optree.tree_is_leaf(specs) else _specs_by_path(specs)
        if not isinstance(flat_specs, (P, ByPath, dict)) and (not callable(flat_specs) or isinstance(flat_specs, type)):
            raise TypeError(
                f"specs must be a P for all parameters, a tree of P, by_path([...]), or a function of path and shape, "
                f"got {specs!r}"
            )
        self.mesh, self.grid, self.strategy, self.rank = mesh, grid_of(mesh), strategy, process_groups.global_rank()
        self.placements: set[Placement] = set()
        if isinstance(strategy, Placement):
            self._valid(strategy)
        self.inputs, self.filled, self.specs = inputs, filled, flat_specs
        self.stages = None if stages is None else chosen(stages, "stages")
        self.frozen = chosen(frozen, "frozen")
        self.unused = self.frozen.unused(()) | (set() if self.stages is None else self.stages.unused(()))
        if isinstance(flat_specs, dict):
            self.unused |= flat_specs.keys()
        elif isinstance(flat_specs, ByPath) and flat_specs.strict:
            self.unused |= {rule.pattern for rule, _ in flat_specs.rules}
        self.compared: list[str] = []
        self.places: dict[str, tuple[FlatShard, int, torch.Size]] = {}
        self.owners: dict[Any, tuple[weakref.ref[Tensor], str]] = {}
        self.rooms: list[Tensor] = []  # reserve disk space for the gradients, until this object is freed

    def map_stages(self, tree: Any, f: Callable[[str, Any], Any], make: Callable[[str, Any], Any] | None = None) -> Any:
        """The tree with `f(path, subtree)` in place of each stage."""
        return self._walk(tree, "", 0, f, make)

    def _walk(self, node: Any, path: str, depth: int, f: Any, make: Any) -> Any:
        if node is None:
            return None
        leaf = is_flat(node) or is_packed(node) or optree.tree_is_leaf(node)
        if make and leaf and callable(node) and not isinstance(node, Tensor):
            return self._walk(make(path, node), path, depth, f, make)
        if self._ends(node, path, depth, leaf):
            return f(path, make(path, node) if make else node)
        if leaf:
            raise ValueError(
                f"{path or 'the tree itself'} is in no stage: stages are {self.stages}; add it, or a node above it"
            )
        accessors, children, one_level = optree.tree_flatten_with_accessor(
            node, lambda x: x is not node, none_is_leaf=True
        )
        names = [dotted(accessor) for accessor in accessors]
        walked = [
            self._walk(child, joined(path, name), depth + 1, f, make)
            for name, child in zip(names, children, strict=True)
        ]
        return optree.tree_unflatten(one_level, walked)

    def _ends(self, node: Any, path: str, depth: int, leaf: bool) -> bool:
        """Whether a node is a stage."""
        if self.stages is not None:
            return self._chooses(self.stages, path, tuple(node.shape) if isinstance(node, (Tensor, Packed)) else None)
        return leaf or depth == 2 or (depth == 1 and type(node) not in (list, tuple))

    def cut(self, path: str, subtree: Any) -> Any:
        """The flat shards of one stage's parameters."""
        layouts, values = self.laid(path, subtree)
        if not layouts:
            return subtree
        shards = {key: self._flat(layout, values) for key, layout in layouts.items()}
        per_mesh(self.mesh, "stages", dict[str, list[Layout]])[path] = list(layouts.values())
        return next(iter(shards.values())) if len(shards) == 1 else shards

    def laid(self, path: str, subtree: Any) -> tuple[dict[str, Layout], dict[str, Tensor]]:
        """The layouts of one stage's parameters, and the parameters by name; both empty if it has none."""
        accessors, leaves, tree = optree.tree_flatten_with_accessor(subtree, is_leaf=is_flat)
        names = [joined(path, dotted(accessor)) for accessor in accessors]
        tensors: dict[Any, tuple[str, Tensor, list[int]]] = {}
        for number, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            tensors.setdefault(self._identity(name, leaf, path), (name, leaf, []))[2].append(number)
        packed = in_few_bits(tree)
        parameters = [
            self._parameter(name, leaf, tuple(numbers), packed.get(numbers[0]))
            for name, leaf, numbers in tensors.values()
        ]
        return plan(path, tree, parameters, self.grid), {name: leaf for name, leaf, _ in tensors.values()}

    def _parameter(self, name: str, leaf: Tensor, leaves: tuple[int, ...], packed: Packed | None) -> Parameter:
        """A parameter with its spec, placement and whether it is trained, by the rules.

        For a quantized one the rules see the parameter's shape, not that of the bytes.
        """
        spec = self._spec(name, tuple(leaf.shape) if packed is None else packed.shape)
        if packed is not None and spec.axes:
            raise ValueError(
                f"{name} is quantized, as {packed}, and {spec} would split the bytes, not the numbers: give it P()"
            )
        if self.inputs == "global":
            shape, full_shape = local_shape(leaf.shape, spec, self.mesh, name), tuple(leaf.shape)
        else:
            shape, full_shape = tuple(leaf.shape), global_shape(leaf.shape, spec, self.mesh, name)
        full_shape = full_shape if packed is None else packed.shape
        trainable = not self._chooses(self.frozen, name, full_shape) and (leaf.is_floating_point() or leaf.is_complex())
        return Parameter(name, leaves, shape, spec, leaf.dtype, trainable, self._placement(name, full_shape, spec))

    def _flat(self, layout: Layout, values: dict[str, Tensor]) -> FlatShard:
        """A flat shard of a layout, filled with this rank's part of `values` if there are any yet."""
        length = layout.num_elements_on(self.rank)
        flat = FlatShard(
            placing.new((length,), layout.dtype, layout.placement.tiers.params, "params", self.mesh), layout
        )
        if layout.trainable and layout.placement.tiers.grads == "disk":
            n = layout.state_layout.num_elements_on(self.rank)
            self.rooms.append(placing.new((n,), layout.dtype, "disk", "grads", self.mesh))
        self.compared.append(str(layout))
        for number, entry in enumerate(layout.entries):
            refuse_second(entry.path, self.places)
            self.places[entry.path] = (flat, number, values[entry.path].shape)
            if self.filled:
                self.fill(flat, number, entry.path, values[entry.path])
            else:
                self.compared.append(f"{entry.path}: {entry.shape}")
        return flat

    def fill(self, flat: FlatShard, number: int, name: str, value: Tensor) -> None:
        """Copies this rank's part of a parameter into its flat shard."""
        if planned():
            return
        if value.is_meta:
            raise ValueError(
                f"{name} is on the meta device, without values: use init_sharded(..., fill=...) or shard_named"
            )
        entry, layout = flat.layout.entries[number], flat.layout
        digest = f", values with checksum {checksum(value)}" if self.inputs == "global" or not entry.spec.axes else ""
        self.compared.append(f"{name}: {tuple(value.shape)}{digest}")
        if not layout.lives_on(self.rank):
            return
        local = sliced(value.detach(), entry.spec, self.mesh) if self.inputs == "global" else value.detach()
        low, high, position = layout.element_range(number, layout.index(self.rank))
        if low < high:
            copying.copy_(flat.values[position : position + high - low], local.reshape(-1)[low:high])

    def _identity(self, name: str, leaf: Any, stage: str) -> Any:
        """A key that is equal for leaves that are the same tensor."""
        if isinstance(leaf, FlatShard) or not isinstance(leaf, Tensor) or is_dtensor(leaf):
            description = f"of type {type(leaf).__name__}"
            if is_dtensor(leaf) or is_flat(leaf):
                description = (
                    "a DTensor: pass its full_tensor()" if is_dtensor(leaf) else "a FlatShard already: unshard it first"
                )
            hint = "what configures a model belongs in its functions, by functools.partial say"
            if hasattr(leaf, "tree") or isinstance(leaf, torch.nn.Module):
                hint = "those of a module are interop.functional(module).tree"
            raise TypeError(f"{name or 'the tree'} is {description}; parameters are plain tensors ({hint})")
        refuse_sparse(name, leaf)
        if leaf.is_meta or leaf.numel() == 0:
            key: Any = id(leaf)
        else:
            key = (autograd.storage_of(leaf), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype)
        owned, owner = self.owners.get(key, (None, stage))
        if owned is None or owned() is None:  # the memory of a deleted tensor may have been reused
            self.owners[key] = (weakref.ref(leaf), stage)
        elif owner != stage:
            raise ValueError(
                f"{name} is the same tensor as one in stage {owner!r}: a copy in each stage would be trained apart. "
                f"Leave it in one and pass that stage's parameters to both functions, or clone it"
            )
        return key

    def _placement(self, name: str, shape: tuple[int, ...], spec: P) -> Placement:
        """The placement of a parameter; raises ValueError if its spec names an axis that the placement shards over."""
        place = self.strategy if isinstance(self.strategy, Placement) else self._valid(self.strategy(name, shape), name)
        clash = [axis for axis in spec.axes if axis in (*place.gradients, *place.only_at_axes)]
        if clash:
            verb = "puts it at one place of" if clash[0] in place.only_at_axes else "cuts the buffer over"
            raise ValueError(f"{name}: {spec} cuts over {clash[0]!r}, but the strategy {verb} that axis already")
        return place

    def _valid(self, placement: Any, name: str = "") -> Placement:
        """A placement that the strategy returned; its type, axes and positions are checked once."""
        if not isinstance(placement, Placement):
            raise TypeError(f"{name}: the strategy is a function that returned {placement!r}, not a Placement")
        if placement not in self.placements:
            where = "the strategy" + (f" of {name}" if name else "")
            check_axes(placement.axes + placement.replicas + placement.only_at_axes, self.mesh, where)
            for axis, position in placement.only_at:
                size = self.grid.size(axis)
                if not 0 <= position < size:
                    raise ValueError(f"{where}: at {axis}={position}, but positions run from 0 to {size - 1}")
            self.placements.add(placement)
        return placement

    def _spec(self, name: str, shape: tuple[int, ...]) -> P:
        """The spec of a parameter."""
        if isinstance(self.specs, P):
            return self.specs
        if isinstance(self.specs, dict):  # a key may hold dots: the longer place is nearer to the parameter
            place = max((path for path in self.specs if f"{name}.".startswith(f"{path}.")), key=len, default=None)
            if place is None:
                raise ValueError(f"specs have nothing for {name}: add it to the tree")
            self.unused.discard(place)
            return self.specs[place]
        if not isinstance(self.specs, ByPath):
            answer = self.specs(name, shape)
            if not isinstance(answer, P):
                raise TypeError(f"{name}: specs is a function that returned {answer!r}, not a P")
            return answer
        first_match = next(((rule.pattern, spec) for rule, spec in self.specs.rules if rule.fullmatch(name)), None)
        if first_match is None or not isinstance(first_match[1], P):
            if self.specs.strict:
                raise ValueError(f"specs have nothing for {name}: add it; or by_path([...], strict=False) gives it P()")
            return P()
        self.unused.discard(first_match[0])
        return first_match[1]

    def _chooses(self, which: Chosen, path: str, shape: tuple[int, ...] | None) -> bool:
        """Whether patterns choose a parameter; takes note of the patterns that match."""
        self.unused -= which.matching(path)
        return which(path, shape)


def _specs_by_path(tree: Any) -> dict[str, P]:
    """The specs of a tree by their places, each of which is for the parameters there and below.

    Raises:
        TypeError: a leaf is not a `P`.
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
    for accessor, spec in zip(accessors, leaves, strict=True):
        if not isinstance(spec, P):
            raise TypeError(f"{accessor.codify('specs')} is {spec!r}, not a P")
    return {dotted(accessor): spec for accessor, spec in zip(accessors, leaves, strict=True)}


class Parameter(NamedTuple):
    """A parameter before it has a place in a buffer; `leaves` are indices in the tree, `shape` is this rank's."""

    name: str
    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    spec: P
    dtype: torch.dtype
    trainable: bool
    placement: Placement


def plan(stage: str, tree: optree.PyTreeSpec, parameters: Sequence[Parameter], grid: Grid) -> dict[str, Layout]:
    """Layouts of one stage's parameters: a buffer for each dtype, trainable or not, and placement.

    Their names say what distinguishes them.
    """
    groups: dict[tuple[torch.dtype, bool, Placement], list[Parameter]] = {}
    for p in parameters:
        groups.setdefault((p.dtype, p.trainable, p.placement), []).append(p)
    several = len({placement for *_, placement in groups}) > 1
    layouts: dict[str, Layout] = {}
    for (dtype, trainable, placement), group in groups.items():
        where = f" over {' x '.join(placement.axes)}" if placement.axes else " whole"
        key = str(dtype).removeprefix("torch.") + ("" if trainable else " frozen") + (where if several else "")
        same_key = sum(other.split(", ")[0] == key for other in layouts)
        parts = [(p.name, p.leaves, p.shape, p.spec) for p in group]
        layouts[f"{key}, {same_key + 1}" if same_key else key] = lay(
            stage, tree, parts, dtype, trainable, placement, grid
        )
    return layouts


def agreed(rules: Rules, name: str, run: Callable[[], Any]) -> Any:
    """Runs a function on every rank; raises on all ranks if it fails on one, or if ranks got different values."""
    with failing_together([rules.mesh], name, (ValueError, TypeError, OSError)):
        result = run()
        if rules.unused:
            raise ValueError(
                f"{name}: nothing matches {listed(map(repr, sorted(rules.unused)))}; the parameters are "
                f"{listed(rules.places)}"
            )
    lines = sorted(rules.compared, key=lambda line: line.partition(": "))  # a stage before its parameters
    agree(lines, rules.mesh, name, subject=_PARAMETERS)
    if rules.inputs == "local":  # of full values, `compared` already has checksums
        assert_replicated(result, rules.mesh)
    return result


def refuse_sparse(name: str, leaf: Tensor) -> None:
    """Raises TypeError for a parameter that is not dense."""
    if leaf.layout != torch.strided:
        raise TypeError(f"{name or 'the tree'} is {leaf.layout}; parameters are dense tensors: pass its to_dense()")


def refuse_second(name: str, names: Container[str]) -> None:
    """Raises ValueError for a name that another parameter has."""
    if name in names:
        raise ValueError(
            f"two parameters are called {name!r}: a name is its keys joined by dots, without empty keys. Rename "
            f"one of them"
        )
