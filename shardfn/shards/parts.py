"""A registry of plain tensors that are local shards, by the specs of `shard_map`.

The tensors themselves do not say so. Functions that need full tensors, such as a norm, raise an error for these;
elementwise functions do not check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from shardfn.mesh.axes import sizes
from shardfn.mesh.spec import Leaf, P
from shardfn.shards.pieces import Units

PARTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The spec of each such tensor, while it is alive."""


Parts = tuple[tuple[int, P], ...]
"""Indices of the leaves of a flattened tree that are parts, with their specs."""


def note_parts(flat: list[Any], leaves: list[Leaf], values: list[Any], mesh: DeviceMesh) -> Parts:
    """Registers the plain tensors that are parts; returns those of a flattened tree.

    Args:
        flat: the flattened tree.
        leaves: its tensors and flat shards, with their specs.
        values: the values that a function gets for them.
        mesh: the mesh of the specs.
    """
    specs = {}
    for leaf, value in zip(leaves, values, strict=True):
        spec = leaf.spec
        if isinstance(value, Tensor) and isinstance(spec, P) and any(sizes(mesh)[name] > 1 for name in spec.axes):
            PARTS[value] = specs[id(leaf.value)] = spec
    return tuple((i, specs[id(x)]) for i, x in enumerate(flat) if id(x) in specs)


def note_again(parts: Parts | None, flat: list[Any]) -> None:
    """Registers the parts of a flattened tree with the structure of an earlier one."""
    for i, spec in parts or ():
        PARTS[flat[i]] = spec


def note_gradients(leaves: Sequence[Tensor], aliases: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Registers gradients of parts as parts; a leaf is also a part if a function has used its alias as one."""
    for leaf, alias, gradient in zip(leaves, aliases, gradients, strict=True):
        spec = PARTS.get(alias) or PARTS.get(leaf)
        if spec is not None:
            PARTS[leaf] = PARTS[gradient] = spec


def has_parts() -> bool:
    """Whether any part is alive.

    A function, so that optimizers' functions do not name `PARTS`: they may be pickled together with what they name.
    """
    return bool(PARTS)


def refuse_parts(name: str, *trees: Units) -> None:
    """Raises ValueError for a plain tensor that is a part: the same on every rank that declares the same specs."""
    if not PARTS:
        return
    for unit in (unit for leaves in trees for unit in leaves.each if unit.layout is None and unit.trainable):
        if (spec := PARTS.get(unit.values)) is not None:
            raise ValueError(
                f"{name}: {unit.name} must be a flat shard or the same on every rank, got this rank's part, by "
                f"{spec} of shard_map. Make flat shards, which know their norms: sf.shard(params, mesh, strategy, "
                f"specs=...)"
            )
