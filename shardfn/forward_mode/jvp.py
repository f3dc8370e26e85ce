"""Forward mode over sharded parameters, and forward over reverse, on the schedule of the stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardfn.compat import functorch
from shardfn.compat.norms import WrittenOut
from shardfn.compat.replacing import replaced
from shardfn.compat.scripted import written_in_python
from shardfn.forward_mode.paired_call import paired
from shardfn.forward_mode.watched import Watched, refuse_applied
from shardfn.quoting import short
from shardfn.shards.partition import with_leaves
from shardfn.stages.stage import way
from shardfn.tracebacks import api_boundary
from shardfn.transforms.autodiff import moves, name_of
from shardfn.transforms.step import OutsideGradient, pushing


@api_boundary
def jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], *, has_aux: bool = False) -> Any:
    """The value of a function, and its derivative in a direction, as `jax.jvp`.

    Stages inside run on the schedule: parameters and their tangents are gathered when a stage runs, and dropped after.
    With a gradient inside, `jvp(grad(loss), (params,), (v,))` gives the gradient and a Hessian-vector product, by twice
    the collectives of the gradient: forward over reverse. Products with a matrix, attention, `silu` and `gelu` compute
    their gradients and the tangents of these together: three products of matrices for each one of a gradient.
    `scaled_dot_product_attention` computes its scores some rows at a time, and again in backward; with dropout or a
    learned mask it is torch's `SDPBackend.MATH`, as its other kernels have no forward mode.

    Inside of another transform, around one in forward mode, around a gradient of a gradient, and where `f` closes over
    what a gradient outside is taken of, stages are compositions of collectives, as in `torch.func.jvp`; `f` may run
    twice to find that out.

    Args:
        f: a function of pytrees.
        primals: its arguments, a tuple of pytrees of tensors and flat shards.
        tangents: their tangents: trees of the same structure, shapes and dtypes. For a leaf that is no floating-point
            tensor, anything, such as None.
        has_aux: `f` returns `(result, aux)`, and aux has no tangents.

    Returns:
        `(result, tangent)`, trees of the same structure, or `(result, tangent, aux)`. A tangent is zero where the
        result does not depend on the primals, and None for leaves that are no floating-point tensors.

    Raises:
        TypeError, ValueError: primals and tangents do not match.

    Example:
        >>> import torch
        >>> x = torch.tensor(2.0)
        >>> jvp(lambda x: x**3, (x,), (torch.tensor(1.0),))
        (tensor(8.), tensor(12.))
    """
    leaves, tree = _flat(primals, "primals")
    moving, other = _flat(tangents, "tangents")
    if other != tree:
        structures = f"{short(str(other))}, {short(str(tree))}"
        raise ValueError(f"jvp: the tangents of {name_of(f)} have another structure than its primals: {structures}")
    pairs = [_checked_tangent(f, i, *pair) for i, pair in enumerate(zip(leaves, moving, strict=True))]
    outside = functorch.inside_transform() or functorch.inside_forward_mode()
    if not outside and not any(isinstance(x, Tensor) and x.requires_grad for pair in pairs for x in pair):
        with contextlib.suppress(OutsideGradient):
            try:
                return _pushed(f, tree, pairs, has_aux)
            except RuntimeError as error:
                if "Nested forward mode" not in str(error):
                    raise  # else `f` has a forward mode of its own, which torch.func can follow
    return _by_torch_func(f, tree, pairs, has_aux)


def _pushed(f: Callable[..., Any], tree: Any, pairs: Sequence[tuple[Any, Tensor | None]], has_aux: bool) -> Any:
    """The result and its tangent, with stages on the schedule."""
    applications = functorch.applications_seen(refuse_applied)
    paired_stages = replaced(way, call=way.call or paired)
    written_out = sdpa_kernel(SDPBackend.MATH)
    with forward_ad.dual_level(), pushing(), paired_stages, written_out, Watched(), applications, written_in_python():
        duals = [x if t is None else functorch.dual(x, t) for x, t in pairs]
        result = f(*optree.tree_unflatten(tree, duals))
        result, aux = result if has_aux else (result, None)
        ys, structure = optree.tree_flatten(result, none_is_leaf=True)
        parts = [functorch.unpacked(y) if isinstance(y, Tensor) else (y, None) for y in ys]
        aux = optree.tree_map(lambda x: functorch.unpacked(x)[0] if isinstance(x, Tensor) else x, aux)
    values = [y for y, _ in parts]
    directions = [None if not moves(y) else torch.zeros_like(y) if t is None else t for y, t in parts]
    if any(isinstance(x, Tensor) and x.requires_grad for x in (*values, *directions, *optree.tree_leaves(aux))):
        raise OutsideGradient
    both = tuple(optree.tree_unflatten(structure, part) for part in (values, directions))
    return (*both, aux) if has_aux else both


def _flat(values: Sequence[Any], argument: str) -> tuple[list[Any], Any]:
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"jvp: {argument} is a tuple of arguments, not {type(values).__name__}: write ({argument},)")
    return optree.tree_flatten(tuple(values), none_is_leaf=True)


def _checked_tangent(f: Callable[..., Any], number: int, x: Any, tangent: Any) -> tuple[Any, Tensor | None]:
    if not moves(x):
        return x, None
    if not isinstance(tangent, Tensor) or (tangent.shape, tangent.dtype) != (x.shape, x.dtype):
        described = (
            f"{tuple(tangent.shape)}, {tangent.dtype}" if isinstance(tangent, Tensor) else type(tangent).__name__
        )
        raise ValueError(
            f"jvp: leaf {number} of the primals of {name_of(f)} has shape {tuple(x.shape)}, {x.dtype}, and its tangent "
            f"is {described}"
        )
    return x, tangent


def _by_torch_func(f: Callable[..., Any], tree: Any, pairs: Sequence[tuple[Any, Tensor | None]], has_aux: bool) -> Any:
    """The same inside of another transform, by torch.func, where stages are composed of collectives."""
    indices = [i for i, (_, tangent) in enumerate(pairs) if tangent is not None]
    leaves = [x for x, _ in pairs]

    def of_moving(*values: Tensor) -> Any:
        return f(*optree.tree_unflatten(tree, with_leaves(leaves, indices, values)))

    values, tangents = tuple(leaves[i] for i in indices), tuple(pairs[i][1] for i in indices)
    with sdpa_kernel(SDPBackend.MATH), WrittenOut(), written_in_python():
        if not followed((values, tangents)):
            result = torch.func.jvp(of_moving, values, tangents, has_aux=has_aux)
            if not followed(result):  # nor anything that `f` closes over
                return result
        return by_transposes(of_moving, values, tangents, has_aux)


def followed(tree: Any) -> bool:
    """Whether something outside takes a derivative of tensors in a tree."""
    tensors = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
    return any(kind != "batch" for x in tensors for _, kind in functorch.followed(x))


def by_transposes(f: Callable[..., Any], primals: Any, tangents: Any, has_aux: bool = False) -> Any:
    """As `torch.func.jvp`, by the transpose of the transpose: torch's formulas of tangents have wrong derivatives."""
    structure: list[Any] = []

    def moving(*primals: Tensor) -> Any:
        result, aux = f(*primals) if has_aux else (f(*primals), ())
        leaves, tree = optree.tree_flatten(result, none_is_leaf=True)
        structure[:] = leaves, tree
        return [y for y in leaves if moves(y)], aux

    transposed: Any = torch.func.vjp
    ys, pull, aux = transposed(moving, *primals, has_aux=True)
    _, push = transposed(pull, [torch.zeros_like(y) for y in ys])
    leaves, tree = structure
    trees = []
    for values in (ys, push(tuple(tangents))[0]):
        remaining = iter(values)
        filled = [next(remaining) if moves(y) else y if values is ys else None for y in leaves]
        trees.append(optree.tree_unflatten(tree, filled))
    return (*trees, aux) if has_aux else tuple(trees)
