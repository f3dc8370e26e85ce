"""From flat shards back to whole parameters: on all ranks, or on some alone, to which the others send their parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

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
from shardfn.tiers.placing import brought

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Part = tuple[int, int, int, int]
"""Number of a parameter, elements `start` to `stop` of the value that a rank has, and where in its piece they begin."""


def unshard(
    tree: Any,
    mesh: DeviceMesh | None = None,
    *,
    ranks: Iterable[int] | None = None,
    to: torch.device | str | None = None,
    only: Which | None = None,
) -> Any:
    """The whole parameters of a tree with flat shards: the inverse of `shard`.

    Of a gradient, what has none is None. Other leaves are left as they are. Linear, and differentiable as
    `all_gather(to="invariant")` is, `V -> I`, unless `ranks` are named.

    Args:
        tree: any pytree; all ranks that have a part of it call together, with the same `ranks` and `only`.
        mesh: default: the one in scope, else the one that the tree was sharded on.
        ranks: global ranks, which get the parameters; elsewhere there is None in each one's place, and a rank needs no
            more memory than for what it sends: its piece of one stage. Default: all of them.
        to: the device on which whole parameters are put, one stage before the next is gathered. Default: the mesh's.
        only: which parameters, as patterns for their paths or a function of a path and a whole shape; there is None in
            the place of the others, plain tensors among them. Default: all of them.

    Returns:
        The tree with each stage's parameters in place of its flat shards: new tensors of their whole shapes, in the
        dtype of the shard's values. Of a stack of shards, with values `[*n, piece]`, they are `[*n, *shape]`.

    Raises:
        ValueError: the mesh is not the one of the shards; `ranks` that are not in it; a pattern that matches nothing;
            `ranks` or `only` that differ between ranks; a device that a rank does not have.
        TypeError: `ranks` that are not integers; something other than patterns or a function.
        NotImplementedError: `ranks` inside a transform.

    Example:
        ``whole = unshard(params, ranks=[0], to="cpu")``, then ``if mesh.get_rank() == 0: torch.save(whole, path)``;
        or one parameter of all, ``unshard(params, only="head.w")["head"]["w"]``
    """
    if torch.compiler.is_compiling():
        with dynamo.one_graph():
            dynamo.refuse_in_graph(None if ranks is None and only is None else _NOT_IN_A_GRAPH)
        every = _Asked(to=None if to is None else torch.device(to))
        return optree.tree_map(lambda node: _made_whole(node, mesh, every), tree, is_leaf=is_stage)
    with waiting.during("sf.unshard"):
        asked = _asked(tree, mesh, ranks, only, to)
        accessors, nodes, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_stage)
        made = (
            _made_whole(node, mesh, asked) if is_stage(node) or asked.names is None else asked.plain(path, node)
            for path, node in zip(map(dotted, accessors), nodes, strict=True)
        )
        return optree.tree_unflatten(spec, list(made))


class _Asked(NamedTuple):
    """What a call of `unshard` gives: on which device, to which ranks, which parameters by name; None for all."""

    to: torch.device | None = None
    ranks: tuple[int, ...] | None = None
    names: frozenset[str] | None = None

    def numbers(self, layout: Layout) -> list[int]:
        """The parameters of a flat shard that are asked for."""
        return [i for i, entry in enumerate(layout.entries) if self.names is None or entry.path in self.names]

    def plain(self, path: str, leaf: Any) -> Any:
        """What becomes of a leaf that is not cut."""
        return leaf if self.names is None or path in self.names or not isinstance(leaf, Tensor) else None


_NOT_IN_A_GRAPH = (
    "unshard: ranks= and only= cannot be in a graph of torch.compile: call it outside of what is compiled, or without"
)
_ARGUMENTS = ("ranks= and only=", "Every rank passes the same")


def _asked(tree: Any, mesh: DeviceMesh | None, ranks: Any, only: Which | None, to: Any) -> _Asked:
    """What is asked for, on which all ranks agree, but for the device, which each of them has to have."""
    if ranks is None and only is None and to is None:
        return _Asked()
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_flat)
    grids = dict.fromkeys(leaf.layout.grid for leaf in leaves if is_flat(leaf))
    meshes = [mesh] * bool(grids) if mesh else [mesh_of(grid, "unshard: the tree") for grid in grids]
    with failing_together(meshes, "unshard"):  # `only` may be a function that raises anything
        found = _Asked(
            None if to is None else device_of(to),
            None if ranks is None else targets(ranks, grids),
            None if only is None else _named(list(map(dotted, accessors)), leaves, chosen(only, "only")),
        )
    for one in meshes:
        agree([f"ranks={found.ranks}", f"only={sorted(found.names or ())}"], one, "unshard", subject=_ARGUMENTS)
    return found


def _named(paths: Sequence[str], leaves: Sequence[Any], which: Chosen) -> frozenset[str]:
    """The names of the parameters that are chosen."""
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


def _made_whole(node: Any, mesh: DeviceMesh | None, asked: _Asked) -> Any:
    """A stage's parameters in place of its flat shards."""
    if not is_stage(node):
        return node
    shards = stage_shards(node)
    return assemble([flat.layout for flat in shards], [_whole(flat, mesh, asked) for flat in shards])


def _whole(flat: FlatShard, mesh: DeviceMesh | None, asked: _Asked) -> list[Tensor | None]:
    layout, to = flat.layout, asked.to
    found: list[Tensor | None] = [None] * len(layout.entries)
    numbers = asked.numbers(layout)
    if flat.values is None or not numbers:  # without values: as in a gradient, of what is frozen
        return found
    if flat.values.ndim > 1 and asked.ranks is None:
        return _whole_stack(flat, mesh, asked)
    where = mesh_of(layout.grid, f"unshard: stage {layout.stage!r}") if mesh is None else mesh
    with scope(where):
        mesh_of(layout.grid, f"unshard: stage {layout.stage!r}")
        if asked.ranks is not None:
            for number, value in gathered_to(flat, asked.ranks, numbers, where, to).items():
                found[number] = value
            return found
        buffer = brought(flat.values, where)
        for name, position in layout.placement.only_at:
            buffer = _spread(buffer, layout, name, position)
        if layout.size > 1:
            buffer = functional.all_gather(buffer, layout.placement.axes, to="invariant")
        views = layout.views(buffer)
        for number in numbers:
            view = views[number]
            for dim, names in enumerate(layout.entries[number].spec.by_dim()):
                if names:
                    view = functional.all_gather(view, names, dim=dim, to="invariant")
            found[number] = view.clone(memory_format=torch.contiguous_format) if to is None else _moved(view, to)
        return found


def _whole_stack(flat: FlatShard, mesh: DeviceMesh | None, asked: _Asked) -> list[Tensor | None]:
    """The same of a stack of shards, `[*n, piece]`: parameters `[*n, *shape]`."""
    numbers, lead = asked.numbers(flat.layout), flat.values.shape[:-1]

    def each(values: Tensor) -> tuple[Any, ...]:
        views = _whole(FlatShard(values, flat.layout), mesh, asked)
        return tuple(views[number] for number in numbers)

    made = torch.func.vmap(each)(flat.values.reshape(-1, flat.values.shape[-1]))
    found = dict(zip(numbers, made, strict=True))
    return [
        found[number].view(*lead, *found[number].shape[1:]) if number in found else None
        for number in range(len(flat.layout.entries))
    ]


def _moved(view: Tensor, to: torch.device) -> Tensor:
    return view.to(to, copy=True, memory_format=torch.contiguous_format)


def _spread(buffer: Tensor, layout: Layout, name: str, position: int) -> Tensor:
    """What one position of an axis holds, on all of them: `V -> I`."""
    if buffer.shape[-1] == 0:  # of a piece that lives elsewhere; its derivative goes there
        buffer = torch.nn.functional.pad(buffer, (0, layout.piece))
    every = functional.all_gather(buffer, name, to="invariant")
    return every.narrow(0, position * layout.piece, layout.piece)


def targets(ranks: Any, grids: Iterable[Grid]) -> tuple[int, ...]:
    """The global ranks that are meant, each of which is in all of these meshes.

    Raises:
        TypeError: not a list of integers.
        ValueError: none, one of them twice, or one that is not in a mesh.
    """
    ranks = list(ranks) if isinstance(ranks, Iterable) else ranks
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise TypeError(
            f"unshard: ranks={short(repr(ranks))}; it is a list of global ranks, such as [0], or None for all of them"
        )
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"unshard: ranks={short(ranks)}; it names at least one rank, and each once; None is all of them"
        )
    for grid in grids:
        wrong = [rank for rank in ranks if rank not in grid.ranks]
        if wrong:
            raise ValueError(
                f"unshard: ranks={short(ranks)}, but rank {wrong[0]} is not in the mesh ({grid}), whose ranks are "
                f"{listed(sorted(grid.ranks))}"
            )
    return tuple(ranks)


def device_of(to: Any) -> torch.device:
    """The device that is meant, which there is.

    Raises:
        ValueError: there is none.
    """
    try:
        device = torch.device(to)
        torch.empty(0, device=device)
    except Exception as error:  # each device has its own
        said = str(error).partition("\n")[0]
        raise ValueError(f"unshard: to={to!r} is not a device of this process ({said})") from error
    return device


def gathered_to(
    flat: FlatShard, ranks: Sequence[int], numbers: Sequence[int], mesh: DeviceMesh, to: torch.device | None
) -> dict[int, Tensor]:
    """These parameters of a flat shard by number, whole, where this rank is among `ranks`; elsewhere nothing.

    Each element is sent once to each of the ranks, by the nearest rank that has it.

    Raises:
        NotImplementedError: a transform follows the shard.
    """
    _refuse_followed(flat, ranks)
    layout, me, found = flat.layout, process_groups.global_rank(), {}
    members, names = layout.grid.ranks, tuple(name for name, _ in layout.grid.sizes)
    with scope(mesh), torch.no_grad():
        values = brought(flat.values.detach(), mesh)
        for target in ranks:
            own = parts(layout, numbers, me, target)
            rows = [values[at : at + stop - start] for _, start, stop, at in own]
            sent = rows[0] if len(rows) == 1 else torch.cat([values[:0], *rows])
            lengths = [_length(parts(layout, numbers, rank, target)) if me == target else 0 for rank in members]
            came = functional.ragged_all_to_all(
                sent, names, [len(sent) if rank == target else 0 for rank in members], lengths
            )
            if me == target:
                every = [(rank, parts(layout, numbers, rank, target)) for rank in members]
                found = _assembled(layout, numbers, every, came, to)
    return found


def parts(layout: Layout, numbers: Sequence[int], source: int, target: int) -> list[Part]:
    """What one rank sends to another: what it holds, unless a rank that is nearer to the other holds the same."""
    if not layout.here(source):
        return []
    index, found = layout.index(source), []
    for number in numbers:
        same = layout.same_axes(number)
        start, stop, at = layout.within(number, index)
        if start < stop and layout.grid.index(source, same) == layout.grid.index(target, same):
            found.append((number, start, stop, at))
    return found


def _length(some: Sequence[Part]) -> int:
    return sum(stop - start for _, start, stop, _ in some)


def _assembled(
    layout: Layout, numbers: Sequence[int], every: list[tuple[int, list[Part]]], came: Tensor, to: torch.device | None
) -> dict[int, Tensor]:
    """Whole parameters from what came from each rank, in the order of ranks."""
    where = came.device if to is None else to
    whole = {i: torch.empty(layout.whole_shape(i), dtype=came.dtype, device=where) for i in numbers}
    cut: dict[tuple[int, tuple[int, ...]], Tensor] = {}  # values of which the whole ones are made
    at = 0
    for rank, some in every:
        for number, start, stop, _ in some:
            entry = layout.entries[number]
            value = whole[number]
            if entry.spec.axes:
                value = cut.setdefault((number, layout.corner(number, rank)), value.new_empty(entry.shape))
            value.view(-1)[start:stop].copy_(came[at : at + stop - start])
            at += stop - start
    for (number, corner), value in cut.items():
        region = tuple(slice(low, low + n) for low, n in zip(corner, value.shape, strict=True))
        whole[number][region].copy_(value)
    return whole


def _refuse_followed(flat: FlatShard, ranks: Sequence[int]) -> None:
    followed = {kind for _, kind in functorch.followed(flat.values)}
    if not torch.is_grad_enabled():
        followed.discard("gradient")
    if followed:
        raise NotImplementedError(
            f"unshard: with ranks={list(ranks)} it has no derivative and no batches, and stage {flat.layout.stage!r} "
            f"carries a {' and a '.join(sorted(followed))}: leave ranks out, or call it outside of transforms, under "
            f"torch.no_grad() if the shards require gradients"
        )
