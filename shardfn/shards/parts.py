"""Plain tensors that are parts of sharded ones, as specs of `shard_map` have said; nothing else tells them apart.

What needs whole tensors, such as a norm, refuses these. Elementwise work does not ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from shardfn.mesh.axes import sizes
from shardfn.mesh.spec import P
from shardfn.shards.pieces import Units

PARTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The spec of each part that is alive."""


def shards(spec: P, mesh: DeviceMesh) -> bool:
    """Whether a spec shards a tensor over more than one rank."""
    return any(sizes(mesh)[name] > 1 for name in spec.axes)


def note_parts(each: Iterable[tuple[Tensor, P]]) -> None:
    """Notes that these tensors are parts, each by its spec."""
    for x, spec in each:
        PARTS[x] = spec


def note_gradients(leaves: Sequence[Tensor], aliases: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Notes for those that are parts, or whose aliases a function has used as parts, that their gradients are parts."""
    for leaf, alias, gradient in zip(leaves, aliases, gradients, strict=True):
        spec = PARTS.get(alias) or PARTS.get(leaf)
        if spec is not None:
            note_parts([(leaf, spec), (gradient, spec)])


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
