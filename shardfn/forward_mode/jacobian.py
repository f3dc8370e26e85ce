"""Jacobians over trees with flat shards: each rank has the columns of the elements in its shard.

Together they equal the Jacobian on one process. If every rank made a basis of tangents for its own shard, each pass
would push one vector on every rank at once, and sum columns of different ranks. Here one element has a nonzero tangent
at a time, on the rank that holds it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.check.bits import rounding
from shardfn.collectives import functional
from shardfn.compat import functorch, process_groups
from shardfn.compat.norms import WrittenOut
from shardfn.forward_mode.jvp import by_transposes, followed
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import scope_of
from shardfn.shards.layout import Layout, flat_shards
from shardfn.shards.partition import with_leaves
from shardfn.shards.unsharding import unshard
from shardfn.tracebacks import api_boundary
from shardfn.transforms.autodiff import Variables, name_of, positions

Argnums = int | Sequence[int]


def jacrev(
    f: Callable[..., Any], argnums: Argnums = 0, *, has_aux: bool = False, chunk_size: int | None = None
) -> Callable[..., Any]:
    """The Jacobian of a function of pytrees, a row at a time: `torch.func.jacrev`, for flat shards too.

    Args:
        f: returns a pytree of floating tensors that are the same on all ranks which share the parameters; a flat shard
            in it counts as its whole parameters. With `has_aux` a pair of that and any pytree.
        argnums: which positional arguments to differentiate; a sequence gives a tuple for each output.
        has_aux: `f` returns `(outputs, aux)`.
        chunk_size: rows that are computed at once; default: all.

    Returns:
        `(*args, **kwargs) -> jacobian`, or `(jacobian, aux)`. In place of each output, of shape `[*out]`, there is a
        tree like the argument: `[*out, *shape]` for a tensor, and a flat shard with values `[*out, piece]`, a stack of
        gradients of each output by itself. So a rank holds the columns of its own elements, and `unshard` returns what
        one process has. None for a leaf that has no gradient. Stages run as compositions of collectives.

    Raises:
        TypeError, ValueError: outputs that are not floating tensors, or differ between ranks.

    Example:
        >>> import torch
        >>> jacrev(lambda p: p["w"] ** 2)({"w": torch.tensor([1.0, 2.0])})
        {'w': tensor([[2., 0.],
                [0., 4.]])}
    """
    return _jacobian(f, argnums, has_aux, chunk_size, "jacrev", _by_rows)


def jacfwd(
    f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False, chunk_size: int | None = None
) -> Callable[..., Any]:
    """The Jacobian of a function of pytrees, a column at a time: `torch.func.jacfwd`, for flat shards too.

    Each element of the whole parameters takes one tangent, on all ranks together: those of one rank's piece are pushed
    at once, then those of the next. Arguments, result and errors are those of `jacrev`.

    Args:
        f: as for `jacrev`.
        argnums: which positional arguments to differentiate.
        has_aux: `f` returns `(outputs, aux)`.
        chunk_size: columns that are computed at once; default: all of one piece.

    Raises:
        TypeError, ValueError: as `jacrev`.
        NotImplementedError: parameters that are also cut by `specs=`, or live on some ranks only.

    Example:
        >>> import torch
        >>> jacfwd(lambda p: p["w"] ** 2)({"w": torch.tensor([1.0, 2.0])})
        {'w': tensor([[2., 0.],
                [0., 4.]])}
    """
    return _jacobian(f, argnums, has_aux, chunk_size, "jacfwd", _by_columns)


def hessian(f: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., Any]:
    """The Hessian of a function of pytrees, `jacfwd(jacrev(f))`, as `torch.func.hessian` gives it.

    Args:
        f: as for `jacrev`.
        argnums: which positional arguments to differentiate.

    Returns:
        `(*args, **kwargs) -> hessian`. In place of each output there is a tree of the whole parameters, and in place of
        each of these, of shape `[*first]`, a tree like the argument: tensors `[*out, *first, *shape]`, and flat shards
        with values `[*out, *first, piece]`. Of `n` parameters on `r` ranks, each holds `n * n / r` numbers.

    Raises:
        TypeError, ValueError, NotImplementedError: as `jacrev` and `jacfwd`.

    Example:
        >>> import torch
        >>> hessian(lambda p: (p["w"] ** 3).sum())({"w": torch.tensor([1.0, 2.0])})
        {'w': {'w': tensor([[ 6.,  0.],
                [ 0., 12.]])}}
    """
    return jacfwd(jacrev(f, argnums), argnums)


def _jacobian(
    f: Callable[..., Any], argnums: Argnums, has_aux: bool, chunk_size: int | None, name: str, by: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that returns the Jacobian of `f`, computed by `_by_rows` or `_by_columns`."""

    @api_boundary
    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        chosen = positions(name, f, argnums, args)
        variables = Variables(tuple(args[i] for i in chosen))
        layouts = variables.layouts
        place = f"{name} of {name_of(f)}"
        trees: list[Any] = []

        def outputs(*values: Tensor) -> tuple[tuple[Tensor, ...], Any]:
            result = f(*with_leaves(args, chosen, variables.tree(values)), **kwargs)
            if has_aux and not (isinstance(result, tuple) and len(result) == 2):
                kind = type(result).__name__
                raise TypeError(f"{place}: with has_aux=True the function must return (outputs, aux), got {kind}")
            out, aux = result if has_aux else (result, ())
            leaves, tree = optree.tree_flatten(unshard(out) if flat_shards(out) else out)
            trees[:] = [tree]
            return tuple(_floating(y, place) for y in leaves), aux

        _refuse_apart(variables.values, layouts, layouts, f"{place}: an argument that is no shard")
        values, aux = outputs(*variables.values)
        _refuse_apart(values, [None] * len(values), layouts, f"{place}: its result")
        is_tracked = followed((values, variables.values))
        with WrittenOut() if is_tracked else contextlib.nullcontext():
            by_output = by(outputs, variables, values, chunk_size, is_tracked)
        for gs in by_output:
            _refuse_apart(gs, layouts, layouts, f"{place}: the part of an argument that is no shard")
        filled = [variables.tree_of(gs) for gs in by_output]
        jacobian = optree.tree_unflatten(trees[0], [t[0] if isinstance(argnums, int) else t for t in filled])
        return (jacobian, aux) if has_aux else jacobian

    return differentiated


def _by_rows(
    outputs: Callable[..., Any], variables: Variables, values: Sequence[Tensor], chunk_size: int | None, _: bool
) -> Sequence[Sequence[Tensor]]:
    """The Jacobian of each output with respect to each variable, by reverse mode."""
    indices = tuple(range(len(variables.values)))
    if not indices or not values:
        return [() for _ in values]
    by_reverse: Any = torch.func.jacrev(lambda *xs: outputs(*xs)[0], argnums=indices, chunk_size=chunk_size)
    return by_reverse(*variables.values)


def _by_columns(
    outputs: Callable[..., Any], variables: Variables, values: Sequence[Tensor], chunk_size: int | None, tracked: bool
) -> Sequence[Sequence[Tensor]]:
    """The Jacobian of each output with respect to each variable, by forward mode."""
    for layout in variables.layouts:
        cut = layout is not None and any(names for entry in layout.entries for names in entry.spec.by_dim())
        if layout is not None and (cut or layout.placement.only_at):
            raise NotImplementedError(
                f"jacfwd: {layout.stage!r} {'is also sharded by specs=' if cut else 'lives on some ranks only'}: a "
                f"rank's elements are not one shard there. Use jacrev"
            )
    by_variable = [_columns(outputs, variables, k, values, chunk_size, tracked) for k in range(len(variables.values))]
    return [[columns[i] for columns in by_variable] for i in range(len(values))]


def _columns(
    outputs: Callable[..., Any],
    variables: Variables,
    k: int,
    values: Sequence[Tensor],
    chunk_size: int | None,
    tracked: bool,
) -> list[Tensor]:
    """The Jacobian of each output with respect to one variable; this rank keeps its own columns."""
    x, layout = variables.values[k], variables.layouts[k]
    owners, own_index = (1, 0) if layout is None else (layout.size, layout.index(process_groups.global_rank()))
    at_once = chunk_size or max(x.numel(), 1)

    def pushed(tangent: Tensor) -> Any:
        def outputs_of(value: Tensor) -> Any:
            return outputs(*with_leaves(variables.values, [k], [value]))[0]

        return (by_transposes if tracked else torch.func.jvp)(outputs_of, (x,), (tangent.view(x.shape),))[1]

    by_output: list[list[Tensor]] = [[] for _ in values]
    for owner in range(owners):
        for start in range(0, x.numel(), at_once):
            basis = x.new_zeros(min(at_once, x.numel() - start), x.numel())
            if owner == own_index:
                basis.diagonal(start).fill_(1)
            for columns, tangents in zip(by_output, torch.func.vmap(pushed)(basis), strict=True):
                if owner == own_index:
                    columns.append(tangents)
    stacked = [
        torch.cat(columns) if columns else y.new_zeros(0, *y.shape)
        for columns, y in zip(by_output, values, strict=True)
    ]
    return [s.movedim(0, -1).reshape(*y.shape, *x.shape) for s, y in zip(stacked, values, strict=True)]


def _floating(y: Any, where: str) -> Tensor:
    """An output; raises TypeError if it is not a floating-point tensor."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(
            f"{where}: it returns {kind} among its outputs, which are floating tensors; has_aux=True for more"
        )
    return y


def _refuse_apart(
    values: Sequence[Tensor], own_layouts: Sequence[Layout | None], layouts: Sequence[Layout | None], description: str
) -> None:
    """Raises ValueError if plain tensors differ between ranks that share the parameters."""
    present = [layout for layout in layouts if layout is not None]
    plain = [x.detach() for x, layout in zip(values, own_layouts, strict=True) if layout is None]
    if not present or not plain or functorch.inside_transform():
        return
    axes = tuple(dict.fromkeys(name for l in present for name in (*l.placement.axes, *l.placement.replicas)))
    with scope_of(present[0].grid, description), torch.no_grad():
        for number, x in enumerate(plain):
            high, low = functional.pmax(x, axes), functional.pmin(x, axes)
            gap, size = (high - low).abs().nan_to_num(), torch.maximum(high.abs(), low.abs()).nan_to_num()
            if x.numel() and bool(gap.max() > rounding(x) * size.max()) and not planned():
                raise ValueError(
                    f"{description} differs between ranks (tensor {number}, of shape {tuple(x.shape)}, by "
                    f"{float(gap.max()):.1e}). Sum or gather it over {', '.join(axes)} inside, as by psum; use pvary "
                    f"for tensors that meet per-rank rows; take sharded tensors from shardfn.shard"
                )
