"""Computes the bytes of parameters, gradients and optimizer state on each tier, before allocation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.compat import autograd, process_groups
from shardfn.mesh.scope import current_mesh, mesh_of
from shardfn.mesh.selectors import Which
from shardfn.mesh.spec import P, dotted, joined
from shardfn.optim.optimizer import Optimizer, must_be_optimizer
from shardfn.optim.torch import comes_later
from shardfn.quant.packed import is_packed
from shardfn.quoting import listed
from shardfn.shards.blocks import Blocks
from shardfn.shards.init import drawn_hollow
from shardfn.shards.layout import FlatShard, Layout, flat_shards, is_flat
from shardfn.shards.pieces import is_unit
from shardfn.shards.placement import Strategy
from shardfn.shards.sharding import Rules, Specs
from shardfn.tiers import placing
from shardfn.tiers.tensors import ALIGNMENT
from shardfn.tracebacks import api_boundary


@dataclass(frozen=True)
class Bytes:
    """Bytes that a rank has on each tier.

    Attributes:
        device: on the device that computes; on a mesh of CPUs, the host's memory is counted here.
        host: in the host's memory, if that is separate.
        disk: in files, in whole blocks of 4096 bytes.
    """

    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.disk + other.disk)

    @property
    def total(self) -> int:
        """Bytes on all tiers."""
        return self.device + self.host + self.disk


def total_bytes(parts: Iterable[Bytes]) -> Bytes:
    """Returns the sum over all parts."""
    return sum(parts, Bytes())


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a rank keeps from the first step to the last, exact, by kind and tier: what `estimate_memory` returns.

    Attributes:
        parameters: this rank's pieces, padding included: elements that its layouts hold, times bytes per element.
        gradients: of trained parameters, as `value_and_grad` returns them, in the parameters' dtype: elements that the
            layouts of the state hold, times bytes per element. One set: a loop that keeps the previous gradients while
            it computes new ones has two.
        state: the tensors of `optimizer.init(params)`.
    """

    parameters: Bytes = Bytes()
    gradients: Bytes = Bytes()
    state: Bytes = Bytes()

    @property
    def total(self) -> Bytes:
        """All kinds together, by tier."""
        return total_bytes(getattr(self, kind.name) for kind in fields(self))

    def __str__(self) -> str:
        rows = {field.name: getattr(self, field.name) for field in fields(self)} | {"total": self.total}
        unit, name = (1e9, "GB") if self.total.total >= 1e10 else (1e6, "MB")
        lines = [f"{name + ' a rank':<12}" + "".join(f"{tier:>12}" for tier in ("device", "host", "disk"))]
        for kind, nbytes in rows.items():
            cells = (f"{n / unit:.3f}" if n else "-" for n in (nbytes.device, nbytes.host, nbytes.disk))
            lines.append(f"{kind:<12}" + "".join(f"{cell:>12}" for cell in cells))
        return "\n".join(lines)


@api_boundary
def estimate_memory(
    params: Any,
    optimizer: Optimizer | None = None,
    strategy: Strategy | None = None,
    *,
    mesh: DeviceMesh | None = None,
    stages: Which | None = None,
    frozen: Which = (),
    specs: Specs = P(),  # noqa: B008
) -> MemoryEstimate:
    """Returns the bytes of parameters, gradients and an optimizer's state on this rank, before they are allocated.

    Allocates nothing, moves nothing and asks no other rank. A step takes more, which depends on its functions: gathered
    parameters, activations, buffers. `plan.step` counts all of it.

    Args:
        params: what `shard` returned; or, with a strategy, what it will be given: a tree of tensors, possibly on the
            meta device, as in a module built inside `interop.meta()`, or of makers, as for `init`. Without a strategy,
            plain tensors count as they are, on the device.
        optimizer: the optimizer whose state is counted. Default: none.
        strategy: as for `shard`, if the parameters are not sharded yet.
        mesh: as for `shard`. Default: the mesh in scope.
        stages: as for `shard`.
        frozen: as for `shard`.
        specs: as for `shard`.

    Returns:
        The figures, which print as a table. `MemoryEstimate` says how each is counted.

    Raises:
        ValueError: a strategy without a mesh, or a mesh without a strategy, or a strategy for parameters that are
            sharded already; a state that depends on data or on the first step; anything that `shard` would refuse.
        TypeError: the optimizer is none; a leaf is neither a tensor nor a maker.

    Example:
        ``print(estimate_memory(init_makers, adamw(3e-4), full_shard("shard").with_tiers(state="disk"), mesh=mesh))``
    """
    if optimizer is not None:
        must_be_optimizer("estimate_memory", optimizer)
    tree = without_numbers(_laid_out(params, strategy, mesh, stages, frozen, specs))
    all_leaves = optree.tree_leaves(tree, is_leaf=is_flat)
    leaves = {id(leaf.values if is_flat(leaf) else leaf): leaf for leaf in all_leaves}.values()  # shared tensors once
    state = [] if optimizer is None else _state(optimizer, tree)
    return MemoryEstimate(
        parameters=total_bytes(
            bytes_on(x.layout.placement.tiers.params, x.values.nbytes, x.layout) if is_flat(x) else Bytes(x.nbytes)
            for x in leaves
        ),
        gradients=total_bytes(_gradient(leaf) for leaf in leaves),
        state=total_bytes(bytes_on(tier, x, layout) for x, tier, layout in state),
    )


def _laid_out(
    params: Any, strategy: Strategy | None, mesh: DeviceMesh | None, stages: Which | None, frozen: Which, specs: Specs
) -> Any:
    """Returns the parameters as `shard` lays them out, without asking other ranks."""
    is_sharded = bool(flat_shards(params))
    if is_sharded and strategy is not None:
        raise ValueError(
            "estimate_memory: the parameters are sharded already, each by its own strategy: leave strategy= out, or "
            "pass what shard() is to get"
        )
    if strategy is None:
        if mesh is not None and not is_sharded:
            raise ValueError(
                'estimate_memory: a mesh, but no strategy: pass what shard() is to get, full_shard("shard") say; '
                "without both, "
                "parameters count as whole ones of one process"
            )
        return run_makers("", params)
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
        raise ValueError("estimate_memory: a strategy, but no mesh to shard over: pass mesh=make_mesh(...)")
    rules, names = Rules(mesh, strategy, stages, frozen, specs, "global", filled=False), list[str]()

    def cut(path: str, subtree: Any) -> Any:
        layouts, values = rules.laid(path, subtree)
        names.extend(values)
        flats = {
            key: FlatShard(torch.empty(layout.num_elements_on(rules.rank), dtype=layout.dtype, device="meta"), layout)
            for key, layout in layouts.items()
        }
        return subtree if not flats else next(iter(flats.values())) if len(flats) == 1 else flats

    tree = rules.map_stages(params, cut, run_makers)
    if rules.unused:
        raise ValueError(
            f"estimate_memory: nothing matches {listed(map(repr, sorted(rules.unused)))}; the parameters are "
            f"{listed(names)}"
        )
    return tree


# --- parameters without data, laid out exactly as with data ---


def run_makers(path: str, node: Any) -> Any:
    """Returns a tree with each maker replaced by its result on the meta device.

    Raises:
        TypeError: a leaf is neither a tensor nor a maker.
        ValueError: a maker reads data.
    """
    accessors, leaves, tree = optree.tree_flatten_with_accessor(node, is_leaf=lambda x: is_flat(x) or is_packed(x))
    filled = (_leaf(joined(path, dotted(accessor)), leaf) for accessor, leaf in zip(accessors, leaves, strict=True))
    return optree.tree_unflatten(tree, list(filled))


def _leaf(name: str, leaf: Any) -> Any:
    if isinstance(leaf, Tensor) or is_flat(leaf) or is_packed(leaf):
        return leaf
    if isinstance(leaf, torch.nn.Module):
        raise TypeError(
            f"estimate_memory: {name or 'the tree'} is a module; its parameters as a tree are "
            "interop.functional(module).tree"
        )
    if not callable(leaf):
        raise TypeError(
            f"estimate_memory: {name or 'the tree'} is of type {type(leaf).__name__}; parameters are tensors, on the "
            f"meta device too, or makers, as init takes them"
        )
    return run_makers(name, drawn_hollow(leaf, name or "the tree", "estimate_memory"))


def without_numbers(tree: Any) -> Any:
    """Returns the same tree with tensors on the meta device; tensors that are shared stay shared."""
    replaced: dict[int, Tensor] = {}

    def hollow(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return replaced.setdefault(id(leaf), torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))

    return optree.tree_map(hollow, tree)


# --- one tensor ---


def bytes_on(tier: str, x: Tensor | int, layout: Layout | None) -> Bytes:
    """Returns the bytes of a tensor on a tier of the layout's mesh."""
    nbytes = x if isinstance(x, int) else x.untyped_storage().nbytes()
    if tier == "disk":
        return Bytes(disk=-(-nbytes // ALIGNMENT) * ALIGNMENT)
    if tier == "host" and layout is not None and mesh_of(layout.grid, f"stage {layout.stage!r}").device_type != "cpu":
        return Bytes(host=nbytes)
    return Bytes(nbytes)


def _gradient(leaf: Any) -> Bytes:
    if not is_flat(leaf):
        return Bytes(leaf.nbytes) if leaf.is_floating_point() or leaf.is_complex() else Bytes()
    layout = leaf.layout
    if not layout.trainable:
        return Bytes()
    numel = layout.state_layout.num_elements_on(process_groups.global_rank())
    return bytes_on(layout.placement.tiers.grads, numel * leaf.values.itemsize, layout)


# --- an optimizer's state ---


def _state(optimizer: Optimizer, tree: Any) -> list[tuple[Tensor, str, Layout | None]]:
    """Returns the tensors of a state, each with its tier and the layout that it follows."""
    try:
        state = optimizer.init(tree)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"estimate_memory: the optimizer's init cannot run without numbers ({str(error).partition(chr(10))[0]}): "
            f"what it remembers cannot be known beforehand; leave the optimizer out"
        ) from error
    if comes_later(state):
        raise ValueError(
            "estimate_memory: from_torch's optimizers make their state in the first step, and it cannot be known "
            "beforehand: leave the optimizer out, and count what its documentation says"
        )
    visited = {autograd.storage_of(x) for x in optree.tree_leaves(tree) if isinstance(x, Tensor)}
    offloaded = [flat.layout.placement.tiers.params != "device" for flat in flat_shards(tree)]
    default_tier = "host" if offloaded and all(offloaded) else "device"
    tensors = []
    for node in optree.tree_leaves(state, is_leaf=_has_layout):
        layout = node.layout if _has_layout(node) else None
        tier = layout.placement.tiers.state if layout else default_tier
        for x in optree.tree_leaves(node):
            if isinstance(x, Tensor) and autograd.storage_of(x) not in visited:
                visited.add(autograd.storage_of(x))
                tensors.append((x, placing.intended(x) or tier, layout))
    return tensors


def _has_layout(node: Any) -> bool:
    return is_unit(node) or type(node) is Blocks
