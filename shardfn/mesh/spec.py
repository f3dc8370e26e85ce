"""Partition specs: the mesh axes over which each dimension of a tensor is sharded.

A spec is `P(...)`, or `...` for "as the value says". The specs of a tree form a tree prefix of it, or are path rules
(`by_path`). Errors quote the tree path, the shape, the mesh sizes and the fix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import optree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.mesh.axes import axis_of, check_axes, sizes
from shardfn.mesh.grid import AxisName, as_names
from shardfn.quoting import listed, short

Entry = str | tuple[str, ...] | None


@dataclass(frozen=True, init=False, repr=False)
class P:
    """Partition spec: for each dimension the mesh axis, or axes (major to minor), over which it is sharded, or None.

    Dimensions beyond the last entry are not sharded; `P()` is a replicated value. A spec is a leaf in every pytree
    registry.

    Raises:
        TypeError: an entry is not an axis name, a tuple of names, or None.
        ValueError: an axis is named twice.

    Example:
        >>> P("shard"), P(None, "tensor"), P(("replica", "shard"), None)
        (P('shard'), P(None, 'tensor'), P(('replica', 'shard'), None))
    """

    entries: tuple[Entry, ...]

    def __init__(self, *entries: Entry | Sequence[str]) -> None:
        object.__setattr__(self, "entries", tuple(_entry(entry) for entry in entries))
        for name in self.axes:
            if self.axes.count(name) > 1:
                raise ValueError(f"{short(self)}: axis {short(repr(name))} is named twice; an axis shards a value once")

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes over which the value is sharded, in the order of its dimensions."""
        return tuple(name for names in self.by_dim() for name in names)

    def by_dim(self) -> Iterator[tuple[str, ...]]:
        """Yields the axes over which each dimension is sharded, as tuples."""
        return (() if entry is None else as_names(entry) for entry in self.entries)

    def same(self, other: P) -> bool:
        """Whether both shard a tensor in the same way, as `P("a")` and `P("a", None)` do."""
        return _trimmed(self) == _trimmed(other)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.entries))})"


@dataclass(frozen=True)
class ByPath:
    """Specs by path rules; made by `by_path`."""

    rules: tuple[tuple[re.Pattern[str], P | EllipsisType], ...]
    strict: bool


def by_path(rules: Iterable[tuple[str, P | EllipsisType]], *, strict: bool = True) -> ByPath:
    """Specs for a whole tree by the paths of its leaves: the first rule that matches a path gives its spec.

    A path is the keys from the root of the subtree that the rules stand for, joined by dots: `blocks.0.attn.q`. An
    empty key is left out.

    Args:
        rules: `(regular expression, spec)`; the expression must match the whole path.
        strict: whether a path that no rule matches, or a rule that matches no path, is an error; otherwise such a leaf
            gets `P()`.

    Returns:
        Specs, accepted wherever a tree of specs is: `shard(specs=...)`, `shard_map(in_specs=...)`.

    Raises:
        TypeError: a rule's spec is no spec.

    Example:
        >>> specs = by_path([(r".*norm.*", P()), (r"blocks\\..*", P("shard"))], strict=False)
    """
    return ByPath(tuple((re.compile(pattern), _spec(spec, "by_path")) for pattern, spec in rules), strict)


@dataclass(frozen=True)
class Leaf:
    """One leaf of a tree with its spec from the tree of specs. `path` reads as Python: `params['w'][0]`."""

    path: str
    value: Any
    spec: P | EllipsisType


def match(specs: Any, tree: Any, where: str, root: str) -> list[Leaf]:
    """Returns each leaf of `tree` with its spec, in the order of `optree.tree_leaves(tree, is_leaf=places_itself)`.

    Args:
        specs: a tree prefix of `tree`, with specs at its leaves.
        tree: any pytree.
        where: the parameter that the specs were passed by, for messages.
        root: the name of the tree in messages.

    Raises:
        ValueError: the specs are not a prefix of the tree; a path has no rule, or a rule matches no path.
        TypeError: a leaf of the specs is not a spec.
    """
    accessors, prefix, prefix_def = optree.tree_flatten_with_accessor(specs)
    try:
        subtrees = prefix_def.flatten_up_to(tree)
    except ValueError:
        raise _structure_error(specs, tree, where, root) from None
    matched: list[Leaf] = []
    for accessor, spec, subtree in zip(accessors, prefix, subtrees, strict=True):
        spec = _spec(spec, accessor.codify(where))
        paths, leaves, _ = optree.tree_flatten_with_accessor(subtree, is_leaf=places_itself)
        chosen = _by_rules(spec, subtree, accessor.codify(where)) if isinstance(spec, ByPath) else [spec] * len(leaves)
        for path, leaf, leaf_spec in zip(paths, leaves, chosen, strict=True):
            matched.append(Leaf((accessor + path).codify(root), leaf, leaf_spec))
    return matched


def places_itself(value: Any) -> bool:
    """Whether a value carries its own spec as `value.spec`, as a flat shard does; such values are leaves of trees."""
    return not isinstance(value, Tensor) and isinstance(getattr(value, "spec", None), P)


def check_spec(leaf: Leaf, mesh: DeviceMesh, where: str) -> None:
    """Raises unless the spec names axes of the mesh and fits the value's dimensions, or equals the value's own spec.

    Raises:
        ValueError: an unknown axis, more entries than dimensions, or a spec that differs from the value's own.
        TypeError: a value that is no tensor under a spec that names axes.
    """
    if isinstance(leaf.spec, EllipsisType):
        return
    name = short(f"{where}: {leaf.path}", 600)
    check_axes(leaf.spec.axes, mesh, f"{short(name, 600)} has spec {short(leaf.spec)}")
    if places_itself(leaf.value):
        check_own(leaf, leaf.value.spec, where)
    elif not isinstance(leaf.value, Tensor):
        if leaf.spec.axes:
            array = hasattr(leaf.value, "__array__")
            raise TypeError(
                f"{name} is {short(repr(leaf.value))}, of type {type(leaf.value).__name__}, which {short(leaf.spec)} "
                f"cannot cut: pass {'torch.from_numpy of it' if array else 'a tensor, or use P()'}"
            )
    elif len(leaf.spec) > leaf.value.ndim:
        _check_rank(leaf.value.shape, leaf.spec, mesh, name)


def check_own(leaf: Leaf, carried: P, where: str) -> None:
    """Raises ValueError if the declared spec differs from the one that the value carries."""
    if isinstance(leaf.spec, P) and not leaf.spec.same(carried):
        name = short(f"{where}: {leaf.path}", 600)
        raise ValueError(
            f"{name} is placed as {short(carried)}, but its spec is {short(leaf.spec)}: declare {short(carried)}, or "
            f"`...` (as the value says)"
        )


def local_shape(shape: Sequence[int], spec: P, mesh: DeviceMesh, name: str = "value") -> tuple[int, ...]:
    """The shape of one rank's shard of a value of global `shape`.

    Args:
        shape: of the full value, in elements.
        spec: the axes over which each dimension is sharded.
        mesh: the mesh that has these axes.
        name: the value's name in messages.

    Returns:
        Each dimension of `shape`, divided by the sizes of the axes that shard it.

    Raises:
        ValueError: an unknown axis, more entries than dimensions, or a dimension that does not divide.

    Example:
        ``local_shape((8, 6), P("shard"), mesh)`` is ``(2, 6)`` where ``shard`` has 4 ranks.
    """
    _check_rank(shape, spec, mesh, name)
    out = list(shape)
    for dim, names in enumerate(spec.by_dim()):
        pieces = _pieces(names, mesh)
        if out[dim] % pieces:
            raise ValueError(
                f"{short(name, 600)} has shape {tuple(shape)}; {short(spec)} cuts dimension {dim} into {pieces} equal "
                f"pieces ({_product_text(names, mesh)}), but {out[dim]} does not divide by {pieces}: "
                f"pad it to {-(-out[dim] // pieces) * pieces}"
            )
        out[dim] //= pieces
    return tuple(out)


def sliced(value: Tensor, spec: P, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's shard of a full value, as a view; the shape must divide (`local_shape` checks that)."""
    for dim, names in enumerate(spec.by_dim()):
        if names:
            axis = axis_of(mesh, names)
            length = value.shape[dim] // axis.size
            value = value.narrow(dim, axis.index * length, length)
    return value


def is_dtensor(value: Any) -> bool:
    """Whether a value is a `torch.distributed.tensor.DTensor`."""
    return isinstance(value, Tensor) and hasattr(value, "placements") and hasattr(value, "to_local")


def global_shape(shape: Sequence[int], spec: P, mesh: DeviceMesh, name: str = "value") -> tuple[int, ...]:
    """The global shape of a value whose local shards have `shape`: the inverse of `local_shape`.

    Args:
        shape: of one rank's shard, in elements; the same on all ranks.
        spec: the axes over which each dimension is sharded.
        mesh: the mesh that has these axes.
        name: the value's name in messages.

    Returns:
        Each dimension of `shape`, times the sizes of the axes that shard it.

    Raises:
        ValueError: an unknown axis, or more entries than dimensions.

    Example:
        ``global_shape((2, 6), P("shard"), mesh)`` is ``(8, 6)`` where ``shard`` has 4 ranks.
    """
    _check_rank(shape, spec, mesh, name)
    cuts = [_pieces(names, mesh) for names in spec.by_dim()]
    return tuple(n * (cuts[dim] if dim < len(cuts) else 1) for dim, n in enumerate(shape))


def joined(*parts: Any) -> str:
    """Joins keys or paths by dots, leaving out empty ones.

    Example:
        >>> joined("blocks", 0, "attn.q"), joined("", "norm.weight")
        ('blocks.0.attn.q', 'norm.weight')
    """
    return ".".join(part for part in map(str, parts) if part)


def dotted(accessor: Iterable[Any]) -> str:
    """Returns a leaf's path as `by_path` sees it: `blocks.0.w`."""
    return joined(*keys_of(accessor))


def leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree, by path."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf)
    return dict(zip(map(dotted, accessors), leaves, strict=True))


def keys_of(accessor: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the keys, indices and names of fields that lead to a leaf."""
    return tuple(getattr(entry, "field", entry.entry) for entry in accessor)


def _entry(entry: Any) -> Entry:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        names = tuple(entry)
        return None if not names else names[0] if len(names) == 1 else names
    raise TypeError(f"P: each entry is an axis name, a tuple of names, or None; got {short(repr(entry))}")


def _trimmed(spec: P) -> tuple[Entry, ...]:
    used = [dim for dim, entry in enumerate(spec.entries) if entry is not None]
    return spec.entries[: used[-1] + 1] if used else ()


def _spec(spec: Any, where: str) -> Any:
    if isinstance(spec, (P, EllipsisType, ByPath)):
        return spec
    instead, dim = "P() for a value that every rank holds whole", getattr(spec, "dim", None)
    if isinstance(spec, str):
        instead = f"P({short(repr(spec))})"
    elif isinstance(dim, int) and dim >= 0:  # a placement of DTensor
        instead = f"P({'None, ' * dim}axis) for an axis of the mesh, by name, that cuts dimension {dim}"
    raise TypeError(
        f"{where} is {short(repr(spec))}, of type {type(spec).__name__}, not a spec (P(...), ..., or by_path): "
        f"write {instead}"
    )


def _by_rules(rules: ByPath, subtree: Any, where: str) -> list[P | EllipsisType]:
    paths = [dotted(accessor) for accessor in optree.tree_accessors(subtree, is_leaf=places_itself)]
    matched = [next((spec for rule, spec in rules.rules if rule.fullmatch(path)), None) for path in paths]
    if rules.strict:
        unmatched = [path for path, spec in zip(paths, matched, strict=True) if spec is None]
        unused = [rule.pattern for rule, _ in rules.rules if not any(map(rule.fullmatch, paths))]
        if unmatched or unused:
            raise ValueError(
                f"{where}: by_path "
                + "; ".join(
                    [f"has no rule for {listed(unmatched)}"] * bool(unmatched)
                    + [f"has rules that match no path: {listed(unused)} (the paths are {listed(paths)})"] * bool(unused)
                )
                + "; add or fix a rule, or pass strict=False"
            )
    return [P() if spec is None else spec for spec in matched]


def _structure_error(specs: Any, tree: Any, where: str, root: str) -> ValueError:
    errors = optree.prefix_errors(specs, tree)
    reason = listed((str(error(where)) for error in errors), 1, room=1000) or "different structures"
    if any(spec is None for spec in optree.tree_leaves(specs, none_is_leaf=True)):
        reason += "\n(None is not a spec: write P() for a value that every rank holds whole)"
    fix = "give a spec for each of its leaves, in containers with the same keys, or one for a whole subtree"
    return ValueError(f"{where} must be a tree prefix of {root}: {reason}; {fix}")


def _check_rank(shape: Sequence[int], spec: P, mesh: DeviceMesh, name: str) -> None:
    check_axes(spec.axes, mesh, f"{short(name, 600)} has spec {short(spec)}")
    if len(spec) > len(shape):
        raise ValueError(
            f"{short(name, 600)} has shape {tuple(shape)}, with {len(shape)} dimension{'s' * (len(shape) != 1)}, but "
            f"{short(spec)} describes {len(spec)}: "
            f"{f'give it at most {len(shape)} of its entries' if shape else 'write P() for a scalar'}"
        )


def _pieces(names: AxisName, mesh: DeviceMesh) -> int:
    lengths = sizes(mesh)
    return math.prod(lengths[name] for name in names)


def _product_text(names: tuple[str, ...], mesh: DeviceMesh) -> str:
    lengths = sizes(mesh)
    return " x ".join(f"{name} {lengths[name]}" for name in names)
