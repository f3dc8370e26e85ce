"""Mesh axes along which ranks have different rows of a batch, or shards of parameters.

Along the axes of a strategy ranks have other rows; along those of `specs=`, as in tensor parallelism, the same rows and
parts of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from shardfn.collectives import functional
from shardfn.collectives.agree import agree
from shardfn.curvature.row_uses import Key
from shardfn.mesh.axes import axis_of
from shardfn.mesh.scope import current_mesh, mesh_of, scope
from shardfn.quoting import short
from shardfn.shards.replicated import checksum
from shardfn.transforms.autodiff import Variables, layouts_of
from shardfn.transforms.fitting import program_ranks

Cuts = Mapping[Key, tuple[str, ...]]


def cuts(params: Any, name: str) -> Cuts:
    """Returns the axes over which `specs=` shards each parameter; unsharded ones are left out.

    Raises:
        ValueError: parameters live on some ranks only, or are sharded over an axis along which ranks have other rows.
    """
    layouts, axes_by_key = Variables(params).layouts, dict[Key, tuple[str, ...]]()
    for i, layout in enumerate(layouts):
        if layout is None:
            continue
        if layout.placement.only_at_axes:
            raise ValueError(
                f"{name}: {short(layout.stage)!r} lives at some positions of {', '.join(layout.placement.only_at_axes)}"
                f" only, so that no rank has a whole row: place parameters on all ranks"
            )
        for index, entry in enumerate(layout.entries):
            axes = tuple([axis for axis, n in layout.grid.sizes if n > 1 and axis in entry.spec.axes])
            if axes:
                axes_by_key[Key(i, index)] = axes
    data = {axis for layout in layouts if layout for axis in (*layout.placement.axes, *layout.placement.replicas)}
    shared = sorted(data.intersection(all_of(axes_by_key)))
    if shared:
        key = next(key for key, axes in axes_by_key.items() if not data.isdisjoint(axes))
        layout = layouts[key.leaf]
        assert layout is not None, "a plain tensor is not cut"
        raise ValueError(
            f"{name}: {short(layout.entries[key.number].path)!r} is sharded over {', '.join(shared)} by specs=, and a "
            f"strategy has {', '.join(shared)} too, along which ranks have different rows. Leave the axis out of one"
        )
    return axes_by_key


def refuse_cut(params: Any, name: str) -> None:
    """Raises ValueError if axes shard parameters, so that ranks have parts of each row's gradient."""
    for key, axes in cuts(params, name).items():
        layout = Variables(params).layouts[key.leaf]
        assert layout is not None, "a plain tensor is not cut"
        raise ValueError(
            f"{name}: {short(layout.entries[key.number].path)!r} is sharded over {', '.join(axes)}, along which ranks "
            f"have parts of each row's gradient. Shard parameters over data axes alone, without specs="
        )


def same_along(sharded_axes: Cuts, params: Any, rows: Iterable[Any], name: str) -> None:
    """Raises ValueError on every rank unless ranks along axes that shard parameters have equal rows."""
    if not sharded_axes:
        return
    tensors = [x for x in rows if isinstance(x, Tensor)]
    lines = [f"{x.dtype} {tuple(x.shape)}, numbers with checksum {checksum(x):x}" for x in tensors]
    axes = all_of(sharded_axes)
    advice = f"Along {', '.join(axes)}, which cut parameters, all ranks have the same rows: cut batches over other axes"
    error: Exception | None = None
    try:
        agree(lines, row_axes(params)[0], name, subject=("the rows", advice), axes=axes)
    except ValueError as mismatch:
        error = mismatch
    agree([], program_ranks(params), name, own_error=error)


def all_of(sharded_axes: Cuts) -> tuple[str, ...]:
    """The axes that shard any parameter."""
    return tuple(sorted({axis for axes in sharded_axes.values() for axis in axes}))


def row_axes(tree: Any) -> tuple[Any, tuple[str, ...]]:
    """The mesh along which ranks have different rows, and its axes."""
    layout = next((layout for layout in layouts_of(tree) if layout is not None), None)
    if layout is None:
        mesh = current_mesh()
        return mesh, tuple(mesh.mesh_dim_names or ()) if mesh is not None else ()
    return mesh_of(layout.grid, "per_example"), (*layout.placement.axes, *layout.placement.replicas)


def row_place(tree: Any) -> tuple[int, int]:
    """Returns the index of this rank among the ranks with different rows, and their number."""
    mesh, axes = row_axes(tree)
    if not axes:
        return 0, 1
    axis = axis_of(mesh, tuple(name for name in mesh.mesh_dim_names if name in axes))
    return axis.index, axis.size


def over_ranks(tree: Any, x: Tensor, reduced: Callable[..., Tensor] = functional.psum) -> Tensor:
    """Reduces over the ranks that have different rows, by default to the sum."""
    mesh, axes = row_axes(tree)
    if not axes:
        return x
    with scope(mesh):
        return reduced(x, axes)
