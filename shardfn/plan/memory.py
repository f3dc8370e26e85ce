"""What a step will take of each tier, before it is there: counted from layouts, and from a state without numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import optree
import torch
from torch import Tensor

from shardfn.compat import autograd, process_groups
from shardfn.mesh.scope import current_mesh, mesh_of
from shardfn.mesh.selectors import Which
from shardfn.mesh.spec import P
from shardfn.optim.optimizer import Optimizer, must_be_optimizer
from shardfn.optim.torch import comes_later
from shardfn.plan import buffers, hollow
from shardfn.plan.figures import Bytes, Memory, together
from shardfn.quant.formats import Format
from shardfn.quoting import short_errors
from shardfn.shards.blocks import Blocks
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.pieces import is_unit
from shardfn.shards.placement import Strategy
from shardfn.shards.sharding import Specs
from shardfn.stages.signature import Options
from shardfn.stages.stage import stage
from shardfn.tiers import placing
from shardfn.tiers.files import ALIGNMENT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@short_errors
def memory(
    params: Any,
    optimizer: Optimizer | None = None,
    strategy: Strategy | None = None,
    *,
    mesh: DeviceMesh | None = None,
    stages: Which | None = None,
    frozen: Which = (),
    specs: Specs = P(),  # noqa: B008
    reshard: bool | Literal["step"] | None = None,
    prefetch: int = 1,
    gather_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather: Format | None = None,
) -> Memory:
    """The bytes that this rank will have during a step, by kind and tier, before any of them is there.

    It takes no memory, moves nothing and asks no other rank. Stages are counted as `shard` makes them, one call of each
    at a time. What it does not count are activations, what a stage's function computes with, and what an optimizer
    makes for a moment.

    Args:
        params: what `shard` returned; or what it is going to get, with a strategy: a tree of tensors, which may be on
            the meta device, as those of a module that was built inside `interop.meta()` are, or of makers, as `init`
            takes them. Without a strategy, plain tensors count as they are, on the device.
        optimizer: whose state is counted. Default: none.
        strategy: as for `shard`, for what is not sharded yet.
        mesh: as for `shard`. Default: the one in scope.
        stages: as for `shard`, like what follows.
        frozen: as for `shard`.
        specs: as for `shard`.
        reshard: what the stages were asked for, as in `stage`, like what follows.
        prefetch: as in `stage`.
        gather_dtype: as in `stage`.
        reduce_dtype: as in `stage`.
        gather: as in `stage`.

    Returns:
        The figures; printed, they are a table. How each is counted `Memory` says.

    Raises:
        ValueError: a strategy without a mesh, or the other way round, or for parameters that are sharded already; a
            state that only values can tell, or the first step; what `shard` would refuse.
        TypeError: an optimizer that is none; a leaf that is neither a tensor nor a maker.

    Example:
        ``print(memory(init_makers, adamw(3e-4), full_shard("shard").on(state="disk"), mesh=mesh))``
    """
    stage(_nothing, reshard=reshard, prefetch=prefetch, gather_dtype=gather_dtype, gather=gather)  # which looks at them
    options = Options(
        reshard=reshard, prefetch=prefetch, gather_dtype=gather_dtype, reduce_dtype=reduce_dtype, gather=gather
    )
    if optimizer is not None:
        must_be_optimizer("memory", optimizer)
    tree = hollow.without_numbers(_laid_out(params, strategy, mesh, stages, frozen, specs))
    leaves = distinct(optree.tree_leaves(tree, is_leaf=is_flat))
    flats = [leaf for leaf in leaves if is_flat(leaf)]
    state = [] if optimizer is None else _state(optimizer, tree)
    return Memory(
        parameters=together(_parameter(leaf) for leaf in leaves),
        gradients=together(_gradient(leaf) for leaf in leaves),
        state=together(on(tier, x, layout) for x, tier, layout in state),
        gathered=Bytes(buffers.gathered(tree, options)),
        decoded=Bytes(buffers.decoded(tree, options)),
        reducing=Bytes(buffers.reducing(tree, options)),
        moving=_near(flats, buffers.moving(tree, options, state)),
    )


def _nothing() -> None:
    return None


def _laid_out(
    params: Any, strategy: Strategy | None, mesh: DeviceMesh | None, stages: Which | None, frozen: Which, specs: Specs
) -> Any:
    """Parameters as they are, or would be, sharded."""
    already = any(map(is_flat, optree.tree_leaves(params, is_leaf=is_flat)))
    if already and strategy is not None:
        raise ValueError(
            "memory: the parameters are sharded already, each by its own strategy: leave strategy= out, or "
            "pass what shard() is to get"
        )
    if strategy is None:
        if mesh is not None and not already:
            raise ValueError(
                'memory: a mesh, but no strategy: pass what shard() is to get, full_shard("shard") say; without both, '
                "parameters count as whole ones of one process"
            )
        return hollow.made("", params)
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
        raise ValueError("memory: a strategy, but no mesh to cut over: pass mesh=make_mesh(...)")
    return hollow.laid_out(params, mesh, strategy, stages, frozen, specs)


def distinct(leaves: Iterable[Any]) -> list[Any]:
    """Tensors and flat shards, each once."""
    return list({id(leaf.values if is_flat(leaf) else leaf): leaf for leaf in leaves}.values())


# --- one tensor ---


def on(tier: str, x: Tensor | int, layout: Layout | None) -> Bytes:
    """What a tensor takes of a tier, on the layout's mesh."""
    nbytes = x if isinstance(x, int) else x.untyped_storage().nbytes()
    if tier == "disk":
        return Bytes(disk=-(-nbytes // ALIGNMENT) * ALIGNMENT)
    return Bytes(host=nbytes) if tier == "host" and _apart(layout) else Bytes(nbytes)


def _apart(layout: Layout | None) -> bool:
    """Whether the host's memory is another than the device's."""
    return layout is not None and mesh_of(layout.grid, f"stage {layout.stage!r}").device_type != "cpu"


def _near(flats: list[FlatShard], nbytes: int) -> Bytes:
    """In the host's memory, which may be the device's."""
    return Bytes(host=nbytes) if any(_apart(flat.layout) for flat in flats) else Bytes(nbytes)


def _parameter(leaf: Any) -> Bytes:
    if is_flat(leaf):
        return on(leaf.layout.placement.tiers.params, leaf.values.nbytes, leaf.layout)
    return on("device", leaf.nbytes, None)


def _gradient(leaf: Any) -> Bytes:
    if not is_flat(leaf):
        return Bytes(leaf.nbytes) if leaf.is_floating_point() or leaf.is_complex() else Bytes()
    layout = leaf.layout
    if not layout.trainable:
        return Bytes()
    held = layout.state_layout.held(process_groups.global_rank())
    return on(layout.placement.tiers.grads, held * leaf.values.itemsize, layout)


# --- an optimizer's state ---


def _state(optimizer: Optimizer, tree: Any) -> list[tuple[Tensor, str, Layout | None]]:
    """The tensors of a state, on which tier each one would be, and the layout that it is like."""
    try:
        state = optimizer.init(tree)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"memory: the optimizer's init cannot run without numbers ({str(error).partition(chr(10))[0]}): what it "
            f"remembers cannot be known beforehand; leave the optimizer out"
        ) from error
    if comes_later(state):
        raise ValueError(
            "memory: from_torch's optimizers make their state in the first step, and it cannot be known beforehand: "
            "leave the optimizer out, and count what its documentation says"
        )
    seen = {autograd.storage_of(x) for x in optree.tree_leaves(tree) if isinstance(x, Tensor)}
    away = [flat.layout.placement.tiers.params != "device" for flat in optree.tree_leaves(tree, is_leaf=is_flat)
            if is_flat(flat)]  # fmt: skip
    found = []
    for x, layout in _tensors(state):
        if autograd.storage_of(x) in seen:
            continue
        seen.add(autograd.storage_of(x))
        beside = "host" if away and all(away) else "device"
        found.append((x, placing.intended(x) or (layout.placement.tiers.state if layout else beside), layout))
    return found


def _tensors(state: Any) -> Iterator[tuple[Tensor, Layout | None]]:
    """Each tensor, with the layout of the node that it is in."""
    for node in optree.tree_leaves(state, is_leaf=_has_layout):
        for x in optree.tree_leaves(node):
            if isinstance(x, Tensor):
                yield x, node.layout if _has_layout(node) else None


def _has_layout(node: Any) -> bool:
    return is_unit(node) or type(node) is Blocks
