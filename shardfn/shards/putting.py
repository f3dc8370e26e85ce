"""Moves the values of shards between memory tiers: device, host and disk."""

from __future__ import annotations

from typing import Any, get_args

import optree
from torch import Tensor

from shardfn.compat import functorch
from shardfn.mesh.scope import mesh_of
from shardfn.quoting import short
from shardfn.shards.blocks import Blocks
from shardfn.shards.layout import Layout
from shardfn.shards.pieces import is_unit
from shardfn.shards.placement import Tier
from shardfn.tiers import placing
from shardfn.tracebacks import api_boundary


@api_boundary
def to_tier(tree: Any, tier: Tier) -> Any:
    """The same tree with its shards' values on a memory tier, as `jax.device_put` to a memory kind.

    Shards move one after another, so at most one of them exists twice at a time. Only values move: a strategy still
    decides where a step puts its results, and gathers read values from their present tier. Before a step, move
    parameters that were put on the host of an accelerator back to the device, unless their strategy is for the host:
    `full_shard("shard").with_tiers(params="host")`.

    Args:
        tree: a pytree of flat shards: parameters, gradients, an optimizer's state. Other leaves stay unchanged.
        tier: `"device"`; `"host"`, the memory of the host, which on a CPU mesh is the device; or `"disk"`, a file in
            the folder that `make_mesh(..., scratch=...)` names.

    Returns:
        The tree. Values that are on the tier already are the same tensors; others are new ones.

    Raises:
        TypeError: the tier is passed as the tree.
        ValueError: there is no such tier; disk without a `scratch` folder.
        OSError: the disk has no room.
        NotImplementedError: a transform or autograd tracks the values.

    Example:
        ``waiting = to_tier((params, state), "disk")``, and later ``params, state = to_tier(waiting, "device")``
    """
    if isinstance(tree, str):
        raise TypeError(
            f"to_tier({short(repr(tree))}, ...): the tree comes first, and its tier after it: to_tier(params, "
            f"{short(repr(tree))})"
        )
    if tier not in get_args(Tier):
        raise ValueError(f'to_tier: tier={tier!r}; a tier is "device", "host" or "disk"')
    moved: dict[int, Tensor] = {}  # by id: one tensor at several places stays one

    def put_one(node: Any) -> Any:
        if not _is_node(node) or not isinstance(node.values, Tensor):
            return node
        x, layout = node.values, node.layout
        _refuse_followed(x, layout)
        if id(x) not in moved:
            new = placing.put(x, tier, "values", mesh_of(layout.grid, f"to_tier: stage {layout.stage!r}"))
            moved[id(x)] = new if new is x else new.requires_grad_(x.requires_grad)
        return optree.tree_map(lambda _: moved[id(x)], node)

    return optree.tree_map(put_one, tree, is_leaf=_is_node)


def _is_node(x: Any) -> bool:
    return is_unit(x) or type(x) is Blocks


def _refuse_followed(x: Tensor, layout: Layout) -> None:
    """Raises NotImplementedError for values that a transform or autograd tracks, or that are on the meta device."""
    followed = {kind for _, kind in functorch.followed(x)} - ({"gradient"} if x.is_leaf else set())
    if not followed and placing.plain(x):
        return
    reason = "a transform is running"
    if followed or x.is_meta:
        reason = f"they carry a {' and a '.join(sorted(followed))}" if followed else "they are on the device meta"
    raise NotImplementedError(
        f"to_tier: the values of stage {layout.stage!r} cannot be put elsewhere here, as {reason}: call it outside of "
        f"transforms, on parameters that have numbers"
    )
