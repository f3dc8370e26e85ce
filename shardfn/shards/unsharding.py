"""Turns flat shards back into full parameters: on all ranks, or on some, to which the others send their parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.callers import api_name
from shardfn.collectives import functional
from shardfn.collectives.agree import agree, failing_together
from shardfn.compat import dynamo, functorch, process_groups
from shardfn.mesh import waiting
from shardfn.mesh.grid import Grid
from shardfn.mesh.scope import mesh_of, scope
from shardfn.mesh.selectors import Chosen, Which, chosen
from shardfn.mesh.spec import dotted
from shardfn.quoting import listed, short
from shardfn.shards.layout import FlatShard, Layout, assemble, is_flat, is_stage, stage_shards
from shardfn.tiers.placing import on_mesh_device
from shardfn.tracebacks import api_boundary

Part = tuple[int, int, int, int]
"""Index of a parameter, elements `start` to `stop` of a rank's value, and their position in the rank's piece."""


@api_boundary
def unshard(
    tree: Any,
    mesh: DeviceMesh | None = None,
    *,
    ranks: Iterable[int] | None = None,
    to: torch.device | str | None = None,
    only: Which | None = None,
) -> Any:
    """The full parameters of a tree with flat shards: the inverse of `shard`.

    In a gradient, parameters without one become None. Other leaves stay unchanged. Linear, and differentiable as
    `all_gather(to="invariant")` is, `V -> I`, unless `ranks` are given. Copies along an axis over which a parameter is
    replicated are not compared: each rank gets its own (see `assert_replicated`).

    Args:
        tree: any pytree; all ranks that have a part of it call together, with the same `ranks` and `only`.
        mesh: default: the mesh in scope, else the one that the tree was sharded on.
        ranks: global ranks that get the parameters; other ranks get None for each, and need memory only for what they
            send: their piece of one stage. Default: all ranks.
        to: the device to which full parameters are moved, one stage before the next is gathered. Default: the mesh's.
        only: the parameters to return, as patterns for their paths or a function of a path and a full shape; all other
            parameters and plain tensors become None. Default: all parameters.

    Returns:
        The tree with each stage's parameters in place of its flat shards: new tensors of their full shapes, in the
        dtype of the shard's values. For a stack of shards, with values `[*n, piece]`, they are `[*n, *shape]`.

    Raises:
        ValueError: the mesh is not the one of the shards; `ranks` that are not in it; a pattern that matches nothing;
            `ranks` or `only` that differ between ranks; a device that a rank does not have.
        TypeError: `ranks` that are not integers; `only` is neither patterns nor a function.
        NotImplementedError: `ranks` inside a transform.

    Example:
        ``whole = unshard(params, ranks=[0], to="cpu")``, then ``if mesh.get_rank() == 0: torch.save(whole, path)``; or
        one parameter of all, ``unshard(params, only="head.w")["head"]["w"]``
    """
    dynamo.refuse_compiling("unshard")
    with waiting.during("sf.unshard"):
        request = _request(tree, mesh, ranks, only, to)
        accessors, nodes, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_stage)
        full: list[Any] = []
        for path, node in zip(map(dotted, accessors), nodes, strict=True):
            if is_stage(node):
                shards = stage_shards(node)
                views = [_full_parameters(flat, mesh, request) for flat in shards]
                full.append(assemble([flat.layout for flat in shards], views))
            else:
                requested = request.names is None or path in request.names or not isinstance(node, Tensor)
                full.append(node if requested else None)
        return optree.tree_unflatten(spec, full)


class _Request(NamedTuple):
    """Arguments of `unshard`: the device, the ranks, and the names of the parameters; None for the default."""

    to: torch.device | None = None
    ranks: tuple[int, ...] | None = None
    names: frozenset[str] | None = None

    def numbers(self, layout: Layout) -> list[int]:
        """Indices of the requested parameters of a flat shard."""
        return [i for i, entry in enumerate(layout.entries) if self.names is None or entry.path in self.names]


_ARGUMENTS = ("ranks= and only=", "Every rank passes the same")


def _request(tree: Any, mesh: DeviceMesh | None, ranks: Any, only: Which | None, to: Any) -> _Request:
    """The arguments of `unshard`, checked; all ranks must agree on them, except for the device."""
    if ranks is None and only is None and to is None:
        return _Request()
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_flat)
    grids = dict.fromkeys(leaf.layout.grid for leaf in leaves if is_flat(leaf))
    meshes = [mesh] * bool(grids) if mesh else [mesh_of(grid, "unshard: the tree") for grid in grids]
    with failing_together(meshes, "unshard"):  # `only` may be a function that raises on one rank
        request = _Request(
            None if to is None else device_of(to),
            None if ranks is None else targets(ranks, grids),
            None if only is None else _chosen_names(list(map(dotted, accessors)), leaves, chosen(only, "only")),
        )
    agree([f"ranks={request.ranks}", f"only={sorted(request.names or ())}"], meshes, "unshard", subject=_ARGUMENTS)
    return request


def _chosen_names(paths: Sequence[str], leaves: Sequence[Any], which: Chosen) -> frozenset[str]:
    """The names of the chosen parameters."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if is_flat(leaf):
            layout: Layout = leaf.layout
            shapes += [(entry.path, layout.whole_shape(i)) for i, entry in enumerate(layout.entries)]
        elif isinstance(leaf, Tensor):
            shapes.append((path, tuple(leaf.shape)))
    if unused := which.unused(name for name, _ in shapes):
        raise ValueError(
            f"unshard: only: nothing matches {listed(map(repr, sorted(unused)))}; the parameters are "
            f"{listed([name for name, _ in shapes])}"
        )
    return frozenset(name for name, shape in shapes if which(name, shape))


def _full_parameters(flat: FlatShard, mesh: DeviceMesh | None, request: _Request) -> list[Tensor | None]:
    """The full parameters of a flat shard; None for those that are not requested."""
    layout, to = flat.layout, request.to
    full: list[Tensor | None] = [None] * len(layout.entries)
    numbers = request.numbers(layout)
    if flat.values is None or not numbers:  # a gradient has no values for frozen parameters
        return full
    if flat.values.ndim > 1 and request.ranks is None:
        return _whole_stack(flat, mesh, request)
    where = mesh_of(layout.grid, f"{api_name('unshard')}: stage {layout.stage!r}") if mesh is None else mesh
    with scope(where):
        mesh_of(layout.grid, f"{api_name('unshard')}: stage {layout.stage!r}")
        if request.ranks is not None:
            for number, value in gathered_to(flat, request.ranks, numbers, where, to).items():
                full[number] = value
            return full
        buffer = on_mesh_device(flat.values, where)
        for name, position in layout.placement.only_at:
            if buffer.shape[-1] == 0:  # ranks at other positions hold nothing; a gather needs equal sizes
                buffer = torch.nn.functional.pad(buffer, (0, layout.piece))
            gathered = functional.all_gather(buffer, name, to="invariant")
            buffer = gathered.narrow(0, position * layout.piece, layout.piece)
        if layout.size > 1:
            buffer = functional.all_gather(buffer, layout.placement.axes, to="invariant")
        views = layout.views(buffer)
        for number in numbers:
            view = views[number]
            for dim, names in enumerate(layout.entries[number].spec.by_dim()):
                if names:
                    view = functional.all_gather(view, names, dim=dim, to="invariant")
            form = torch.contiguous_format
            full[number] = view.clone(memory_format=form) if to is None else view.to(to, copy=True, memory_format=form)
        return full


def _whole_stack(flat: FlatShard, mesh: DeviceMesh | None, request: _Request) -> list[Tensor | None]:
    """As `_whole`, for a stack of shards `[*n, piece]`: parameters `[*n, *shape]`."""
    numbers, lead = request.numbers(flat.layout), flat.values.shape[:-1]

    def gather_one(values: Tensor) -> tuple[Any, ...]:
        views = _full_parameters(FlatShard(values, flat.layout), mesh, request)
        return tuple(views[number] for number in numbers)

    stacked = torch.func.vmap(gather_one)(flat.values.reshape(-1, flat.values.shape[-1]))
    by_number = dict(zip(numbers, stacked, strict=True))
    return [
        by_number[number].view(*lead, *by_number[number].shape[1:]) if number in by_number else None
        for number in range(len(flat.layout.entries))
    ]


def targets(ranks: Any, grids: Iterable[Grid]) -> tuple[int, ...]:
    """The global ranks that get parameters; each must be in all of these meshes.

    Raises:
        TypeError: not a list of integers.
        ValueError: an empty list, a rank twice, or one that is not in a mesh.
    """
    ranks = list(ranks) if isinstance(ranks, Iterable) else ranks
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise TypeError(
            f"unshard: ranks must be a list of global ranks, such as [0], or None for all, got {short(repr(ranks))}"
        )
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"unshard: ranks must name at least one rank and each once, or be None for all, got {short(ranks)}"
        )
    for grid in grids:
        foreign = [rank for rank in ranks if rank not in grid.ranks]
        if foreign:
            raise ValueError(
                f"unshard: ranks={short(ranks)}, but rank {foreign[0]} is not in the mesh ({grid}), whose ranks are "
                f"{listed(sorted(grid.ranks))}"
            )
    return tuple(ranks)


def device_of(to: Any) -> torch.device:
    """The device, which must exist in this process.

    Raises:
        ValueError: there is none.
    """
    try:
        device = torch.device(to)
        torch.empty(0, device=device)
    except Exception as error:  # each backend raises its own type
        reason = str(error).partition("\n")[0]
        raise ValueError(f"unshard: to={to!r} is not a device of this process ({reason})") from error
    return device


def gathered_to(
    flat: FlatShard, ranks: Sequence[int], numbers: Sequence[int], mesh: DeviceMesh, to: torch.device | None
) -> dict[int, Tensor]:
    """These full parameters of a flat shard, by index, on ranks among `ranks`; empty on other ranks.

    Each element is sent once to each of the ranks, by the nearest rank that has it.

    Raises:
        NotImplementedError: a transform or autograd tracks the shard.
    """
    _refuse_followed(flat, ranks)
    layout, me, full = flat.layout, process_groups.global_rank(), {}
    members, names = layout.grid.ranks, tuple(name for name, _ in layout.grid.sizes)
    with scope(mesh), torch.no_grad():
        values = on_mesh_device(flat.values.detach(), mesh)
        for target in ranks:
            outgoing = sent_parts(layout, numbers, me, target)
            rows = [values[position : position + stop - start] for _, start, stop, position in outgoing]
            sent = rows[0] if len(rows) == 1 else torch.cat([values[:0], *rows])
            incoming = [(rank, sent_parts(layout, numbers, rank, target) if me == target else []) for rank in members]
            lengths = [sum(stop - start for _, start, stop, _ in sent_parts) for _, sent_parts in incoming]
            received = functional.ragged_all_to_all(
                sent, names, [len(sent) if rank == target else 0 for rank in members], lengths
            )
            if me == target:
                full = _assembled(layout, numbers, incoming, received, to)
    return full


def sent_parts(layout: Layout, numbers: Sequence[int], source: int, target: int) -> list[Part]:
    """The parts that one rank sends to another: its own elements, unless a rank nearer to the target has them."""
    if not layout.lives_on(source):
        return []
    index, sent = layout.index(source), []
    for number in numbers:
        same = layout.same_axes(number)
        start, stop, position = layout.element_range(number, index)
        if start < stop and layout.grid.index(source, same) == layout.grid.index(target, same):
            sent.append((number, start, stop, position))
    return sent


def _assembled(
    layout: Layout, numbers: Sequence[int], sent: list[tuple[int, list[Part]]], data: Tensor, to: torch.device | None
) -> dict[int, Tensor]:
    """Full parameters from the elements received from each rank, in the order of ranks."""
    device = data.device if to is None else to
    full = {i: torch.empty(layout.whole_shape(i), dtype=data.dtype, device=device) for i in numbers}
    values: dict[tuple[int, tuple[int, ...]], Tensor] = {}  # the ranks' values, which are parts of a full parameter
    position = 0
    for rank, sent_parts in sent:
        for number, start, stop, _ in sent_parts:
            entry = layout.entries[number]
            value = full[number]
            if entry.spec.axes:
                value = values.setdefault((number, layout.corner(number, rank)), value.new_empty(entry.shape))
            value.view(-1)[start:stop].copy_(data[position : position + stop - start])
            position += stop - start
    for (number, corner), value in values.items():
        region = tuple(slice(low, low + n) for low, n in zip(corner, value.shape, strict=True))
        full[number][region].copy_(value)
    return full


def _refuse_followed(flat: FlatShard, ranks: Sequence[int]) -> None:
    """Raises NotImplementedError if a transform or autograd tracks the shard."""
    followed = {kind for _, kind in functorch.followed(flat.values)}
    if not torch.is_grad_enabled():
        followed.discard("gradient")
    if followed:
        raise NotImplementedError(
            f"unshard: with ranks={list(ranks)} it has no derivative and no batches, and stage {flat.layout.stage!r} "
            f"carries a {' and a '.join(sorted(followed))}: leave ranks out, or call it outside of transforms, under "
            f"torch.no_grad() if the shards require gradients"
        )
