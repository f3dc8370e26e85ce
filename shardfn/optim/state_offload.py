"""Optimizer steps on tensors that are on the host or on disk: where they are before and after, and who moves them.

Elementwise rules stream them through memory a few elements at a time, see `stepping`. Other optimizers work on whole
tensors: those on disk are memory-mapped, and those on an accelerator's host are copied to the device for the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from shardfn.collectives.agree import agree, failing_together
from shardfn.mesh.scope import mesh_of
from shardfn.shards.pieces import is_unit
from shardfn.shards.placement import Tiers
from shardfn.tiers import placing, tensors

NOWHERE = Tiers()
Init = Callable[[Any], Any]
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def placed_together(name: str, init: Callable[[Any], Any], params: Any) -> Any:
    """A new state, on its tiers; if a rank has no room for it, all ranks raise."""
    on_disk = [node for node in _nodes(params) if node.layout.placement.tiers.state == "disk"]
    if not any(placing.plain(node.values) for node in on_disk):
        return placed(init(params))
    meshes = dict.fromkeys(map(_mesh, on_disk))
    with failing_together(list(meshes), name, (OSError, ValueError)):
        state = placed(init(params))
    agree([], list(meshes), name, subject=_STATE)
    return state


_STATE = ("the new states", "Each rank needs room for its own, in the folder that make_mesh(..., scratch=) names")


def placed(tree: Any, kind: str = "state") -> Any:
    """An optimizer's state, or parameters, with each tensor on the tier of its placement."""
    return _put(tree, kind) if _any_away(tree) else tree


def tree_on_device(tree: Any) -> Any:
    """Returns a tree with its tensors on the device; on a CPU, the tree itself."""
    if _any_away(tree) and any(_mesh(node).device_type != "cpu" for node in _nodes(tree)):
        return _put(tree, "")
    return tree


def released(*trees: Any) -> None:
    """Lets the system drop the memory pages of tensors on disk, which a step may have touched."""
    for node in _nodes(trees):
        tensors.release(node.values)


def refuse_elsewhere(name: str, state: Any) -> None:
    """Raises ValueError for a state that has left its tier, which would otherwise stay in memory unnoticed."""
    for node in _nodes(state):
        tier = node.layout.placement.tiers.state
        if node.layout.trainable and placing.plain(node.values) and not _on_tier(node, tier):
            raise ValueError(
                f"{name}: the state of {node.layout.stage or 'the parameters'!r} is in memory, and the strategy keeps "
                f"it on {'disk' if tier == 'disk' else 'the host' if tier == 'host' else 'the device'}: what maps "
                f"over a tree makes new tensors. Put it back: state = shardfn.shards.to_tier(state, {tier!r})"
            )


def on_whole(step: Step) -> Step:
    """A step on whole tensors that also takes tensors on the host or on disk."""

    @functools.wraps(step)
    def wrapped(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        if not _any_away(params):
            return step(params, grads, state)
        params, state = step(*map(tree_on_device, (params, grads, state)))
        params, state = _put(params, "params"), _put(state, "state")
        released(params, grads, state)
        return params, state

    return wrapped


def _any_away(tree: Any) -> bool:
    """Whether the strategy of any flat shard keeps something on the host or on disk."""
    return any(node.layout.placement.tiers != NOWHERE for node in _nodes(tree))


def _nodes(tree: Any) -> list[Any]:
    """The flat shards of a tree, and pieces of flat shards, that have values."""
    leaves = optree.tree_leaves(tree, is_leaf=is_unit)
    return [leaf for leaf in leaves if is_unit(leaf) and isinstance(leaf.values, Tensor)]


def _mesh(node: Any) -> Any:
    return mesh_of(node.layout.grid, f"the state of {node.layout.stage!r}")


def _on_tier(node: Any, tier: str) -> bool:
    """Whether a node's values are on a tier."""
    return placing.is_on_tier(node.values.detach(), tier, _mesh(node))


def _put(tree: Any, kind: str) -> Any:
    """A tree on the tiers that its placements have for `kind`; on the device if `kind` is empty."""

    def put(node: Any) -> Any:
        if not is_unit(node) or not placing.plain(node.values) or node.values.requires_grad:
            return node
        if kind == "state" and not node.layout.trainable:  # a frozen one has the parameters' own values
            return node
        tier = getattr(node.layout.placement.tiers, kind) if kind else "device"
        if _on_tier(node, tier):
            return node
        values = placing.put(node.values.detach(), tier, kind, _mesh(node))
        return optree.tree_map(lambda _: values, node)

    return optree.tree_map(put, tree, is_leaf=is_unit)
