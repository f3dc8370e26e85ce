"""Jacobians over trees with flat shards: those of one process, each rank with the columns of its own numbers.

A basis of tangents that every rank makes for its own shard pushes one vector on each rank at once, and what comes out
is nobody's column. Here one number moves at a time, on the rank that holds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.check.bits import rounding
from shardfn.collectives import functional
from shardfn.compat import functorch, process_groups
from shardfn.mesh.scope import mesh_of, scope
from shardfn.shards.layout import Layout, is_flat
from shardfn.shards.partition import with_leaves
from shardfn.shards.unsharding import unshard
from shardfn.transforms.autodiff import Variables, name_of

Argnums = int | Sequence[int]


def jacrev(
    f: Callable[..., Any], argnums: Argnums = 0, *, has_aux: bool = False, chunk_size: int | None = None
) -> Callable[..., Any]:
    """The Jacobian of a function of pytrees, a row at a time: `torch.func.jacrev`, which takes flat shards.

    Args:
        f: returns a pytree of floating tensors that are the same on all ranks which share the parameters; a flat shard
            in it counts as the whole parameters that it stands for. With `has_aux` a pair of that and any pytree.
        argnums: which positional arguments to differentiate; a sequence gives a tuple for each output.
        has_aux: `f` returns `(outputs, aux)`.
        chunk_size: rows that are computed at once; default: all.

    Returns:
        `(*args, **kwargs) -> jacobian`, or `(jacobian, aux)`. In place of each output, of shape `[*out]`, there is a
        tree like the argument: `[*out, *shape]` for a tensor, and a flat shard with values `[*out, piece]`, a stack of
        gradients of each output by itself. So a rank holds the columns of its own numbers, and `unshard` makes of it
        what one process has. None for a leaf that has no gradient. Runs the composition that stages stand for.

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
    """The Jacobian of a function of pytrees, a column at a time: `torch.func.jacfwd`, which takes flat shards.

    Each number of the whole parameters takes one tangent, on all ranks together: those of one rank's piece are pushed
    at once, and then those of the next. Arguments, result and errors are those of `jacrev`.

    Args:
        f: as for `jacrev`.
        argnums: which positional arguments to differentiate.
        has_aux: `f` returns `(outputs, aux)`.
        chunk_size: columns that are computed at once; default: those of one piece of a stage.

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
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= number < len(args) for number in numbers):
            raise TypeError(f"{name}: argnums={argnums}, but {name_of(f)} was called with {len(args)} by position")
        chosen = [number % len(args) for number in numbers]
        variables = Variables(tuple(args[i] for i in chosen))
        where = f"{name} of {name_of(f)}"
        trees: list[Any] = []

        def outputs(*values: Tensor) -> tuple[tuple[Tensor, ...], Any]:
            result = f(*with_leaves(args, chosen, variables.tree(values)), **kwargs)
            if has_aux and not (isinstance(result, tuple) and len(result) == 2):
                raise TypeError(f"{where}: with has_aux=True it returns (outputs, aux), not {type(result).__name__}")
            out, aux = result if has_aux else (result, ())
            leaves, tree = optree.tree_flatten(_whole(out))
            trees[:] = [tree]
            return tuple(_floating(y, where) for y in leaves), aux

        _refuse_apart(variables.values, variables.layouts, variables.layouts, f"{where}: an argument that is no shard")
        values, aux = outputs(*variables.values)
        _refuse_apart(values, [None] * len(values), variables.layouts, f"{where}: its result")
        found = by(outputs, variables, values, chunk_size)
        for each in found:
            _refuse_apart(
                each, variables.layouts, variables.layouts, f"{where}: the part of an argument that is no shard"
            )
        filled = [variables.like(each) for each in found]
        made = optree.tree_unflatten(trees[0], [one[0] if isinstance(argnums, int) else one for one in filled])
        return (made, aux) if has_aux else made

    return differentiated


def _by_rows(
    outputs: Callable[..., Any], variables: Variables, values: Sequence[Tensor], chunk_size: int | None
) -> Sequence[Sequence[Tensor]]:
    """For each output, its Jacobian with respect to each variable."""
    every = tuple(range(len(variables.values)))
    if not every or not values:
        return [() for _ in values]
    found = torch.func.jacrev(lambda *xs: outputs(*xs)[0], argnums=every, chunk_size=chunk_size)(*variables.values)
    rows: Sequence[Sequence[Tensor]] = found
    return rows


def _by_columns(
    outputs: Callable[..., Any], variables: Variables, values: Sequence[Tensor], chunk_size: int | None
) -> Sequence[Sequence[Tensor]]:
    for layout in variables.layouts:
        if layout is not None:
            _refuse_cut_further(layout)
    each = [_columns(outputs, variables, k, values, chunk_size) for k in range(len(variables.values))]
    return [[columns[i] for columns in each] for i in range(len(values))]


def _columns(
    outputs: Callable[..., Any], variables: Variables, k: int, values: Sequence[Tensor], chunk_size: int | None
) -> list[Tensor]:
    """The Jacobian of each output with respect to one variable, of which this rank keeps its own columns."""
    x, layout = variables.values[k], variables.layouts[k]
    owners, mine = (1, 0) if layout is None else (layout.size, layout.index(process_groups.global_rank()))
    at_once = chunk_size or max(x.numel(), 1)

    def pushed(tangent: Tensor) -> Any:
        def moved(value: Tensor) -> Any:
            return outputs(*with_leaves(variables.values, [k], [value]))[0]

        return torch.func.jvp(moved, (x,), (tangent.view(x.shape),))[1]

    kept: list[list[Tensor]] = [[] for _ in values]
    for owner in range(owners):
        for start in range(0, x.numel(), at_once):
            basis = x.new_zeros(min(at_once, x.numel() - start), x.numel())
            if owner == mine:
                basis.diagonal(start).fill_(1)
            for columns, tangents in zip(kept, torch.func.vmap(pushed)(basis), strict=True):
                if owner == mine:
                    columns.append(tangents)
    every = [
        torch.cat(columns) if columns else y.new_zeros(0, *y.shape) for columns, y in zip(kept, values, strict=True)
    ]
    return [one.movedim(0, -1).reshape(*y.shape, *x.shape) for one, y in zip(every, values, strict=True)]


def _whole(tree: Any) -> Any:
    return unshard(tree) if any(is_flat(node) for node in optree.tree_leaves(tree, is_leaf=is_flat)) else tree


def _floating(y: Any, where: str) -> Tensor:
    if not isinstance(y, Tensor) or not y.is_floating_point():
        kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(
            f"{where}: it returns {kind} among its outputs, which are floating tensors; has_aux=True for more"
        )
    return y


def _refuse_cut_further(layout: Layout) -> None:
    cut = any(names for entry in layout.entries for names in entry.spec.by_dim())
    if cut or layout.placement.only_at:
        raise NotImplementedError(
            f"jacfwd: {layout.stage!r} {'is also cut by specs=' if cut else 'lives on some ranks only'}: a rank's "
            f"numbers are not those of one piece there. Use jacrev"
        )


def _refuse_apart(
    values: Sequence[Tensor], own: Sequence[Layout | None], layouts: Sequence[Layout | None], what: str
) -> None:
    """Raises ValueError where what is no flat shard differs between ranks that share the arguments of one function."""
    known = [layout for layout in layouts if layout is not None]
    plain = [x.detach() for x, layout in zip(values, own, strict=True) if layout is None]
    if not known or not plain or functorch.inside_transform():
        return
    axes = tuple(dict.fromkeys(name for one in known for name in (*one.placement.axes, *one.placement.replicas)))
    with scope(mesh_of(known[0].grid, what)), torch.no_grad():
        for number, x in enumerate(plain):
            most, least = functional.pmax(x, axes), functional.pmin(x, axes)
            apart, size = (most - least).abs().nan_to_num(), torch.maximum(most.abs(), least.abs()).nan_to_num()
            if x.numel() and bool(apart.max() > rounding(x) * size.max()):
                raise ValueError(
                    f"{what} differs between ranks (tensor {number} of those, of shape {tuple(x.shape)}, by "
                    f"{float(apart.max()):.1e}), so it is not one function of one set of arguments. Sum or gather it "
                    f"over {', '.join(axes)} inside, by psum, say; a tensor that all ranks use for other rows goes "
                    f"through pvary; one that is cut is a leaf of what shardfn.shard returns"
                )
