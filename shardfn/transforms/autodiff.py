"""Gradients of functions of pytrees: what calculus says of the loss as written, nothing averaged, nothing reduced.

One meaning, two engines: plain autograd, which keeps no graph for a second derivative unless something outside
asks for one, and torch.func when already inside one of its transforms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

import optree
import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardfn.collectives import functional
from shardfn.compat import autograd, dynamo, functorch
from shardfn.mesh.scope import mesh_of, scope
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.partition import with_leaves
from shardfn.transforms.owned import escaped, owner
from shardfn.transforms.step import Defer, Step


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns what `f` returns and its gradient.

    Args:
        f: returns a scalar (0-d, real, floating) or, with `has_aux`, a pair of it and any pytree.
        argnums: which positional arguments to differentiate; a sequence gives a tuple of gradients.
        has_aux: `f` returns `(loss, aux)`, and so does the new function in place of `loss`.

    Returns:
        `(*args, **kwargs) -> (value, gradient)`. A gradient is a pytree like its argument: a zero tensor for a leaf
        that the loss does not use, None for a leaf that is no floating or complex tensor. Gradients are of this
        rank's loss with respect to this rank's values: every reduction over ranks is the transpose of a
        collective in `f`. Under torch.compile a tensor that `f` closes over is a constant to it: what shall be
        differentiated again is an argument.

    Raises:
        TypeError, ValueError: an argument number without an argument; a loss that is no real scalar.

    Example:
        >>> import torch
        >>> value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        (tensor(5.), {'w': tensor([2., 4.])})
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.compiler.is_compiling():
            dynamo.trace_dicts()
        for number in numbers:
            if not -len(args) <= number < len(args):
                raise TypeError(
                    f"value_and_grad: argnums={argnums}, but {_name(f)} was called with {len(args)} positional "
                    f"arguments (arguments to differentiate are passed by position)"
                )
        chosen = [number % len(args) for number in numbers]
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"value_and_grad: argnums={argnums} names an argument of {_name(f)} twice")
        whole: Any = tuple(args[i] for i in chosen)
        leaves, treedef = optree.tree_flatten(whole)
        layouts = layouts_of(whole)
        moving = [i for i, leaf in enumerate(leaves) if moves(leaf, layouts[i])]

        def loss(*variables: Tensor) -> tuple[Tensor, Any]:
            new = optree.tree_unflatten(treedef, with_leaves(leaves, moving, variables))
            return _scalar(f(*with_leaves(args, chosen, new), **kwargs), has_aux, _name(f))

        engine = _by_torch_func if torch.compiler.is_compiling() or functorch.inside_transform() else _by_autograd
        value, aux, found = engine(loss, [leaves[i] for i in moving], [layouts[i] for i in moving])
        gradients = with_leaves([None] * len(leaves), moving, found)
        # A None leaf is no node to optree, so the gradient keeps the argument's structure around it.
        trees = _placed(optree.tree_unflatten(treedef, gradients), layouts)
        return (value, aux) if has_aux else value, trees[0] if isinstance(argnums, int) else trees

    return differentiated


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns the gradient of `f`, or `(gradient, aux)` with `has_aux`. See `value_and_grad`.

    Example:
        >>> import torch
        >>> grad(lambda x: x**3)(torch.tensor(2.0))
        tensor(12.)
    """
    both = value_and_grad(f, argnums, has_aux=has_aux)

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return differentiated


def accumulate(
    f: Callable[..., Any], microbatches: Iterable[Any], *, has_aux: bool = False, defer: Defer = "replicas"
) -> Callable[[Any], tuple[Any, Any]]:
    """A function of parameters that returns the sum of `f` over micro-batches and its gradient, one of them at a time.

    Nothing is averaged: where `f` is a sum, divided by what the whole batch has of it, the result is exactly the
    whole batch's loss and gradient.

    Args:
        f: `(params, batch) -> loss`, or `(params, *batch)` where a micro-batch is a tuple.
        microbatches: the batches, as many on every rank.
        has_aux: `f` returns `(loss, aux)`; the new function returns `(sum, [aux, ...])` in place of the sum.
        defer: what gradients of flat shards wait for the last micro-batch with: `"replicas"`, the sum over
            replicas; `"everything"`, the scatter too, which takes a buffer for the whole gradients of all stages;
            `"nothing"`.

    Returns:
        `params -> (value, gradient)`, as `value_and_grad` gives.

    Raises:
        ValueError: no micro-batches, or no such `defer`.

    Example:
        >>> import torch
        >>> loss = lambda p, x: (p * x).sum()
        >>> accumulate(loss, [torch.tensor([1.0]), torch.tensor([2.0])])(torch.tensor([3.0]))
        (tensor(9.), tensor([3.]))
    """
    if defer not in get_args(Defer):
        raise ValueError(f"accumulate: defer={defer!r}; it is one of {', '.join(map(repr, get_args(Defer)))}")
    name = _name(f)

    def losses(params: Any) -> Iterator[tuple[Tensor, Any]]:
        number = 0
        for number, batch in enumerate(microbatches, 1):  # noqa: B007
            yield _scalar(f(params, *batch) if isinstance(batch, tuple) else f(params, batch), has_aux, name)
        if number == 0:
            raise ValueError(f"accumulate: there are no micro-batches for {name}")

    def accumulated(params: Any) -> tuple[Any, Any]:
        leaves = optree.tree_leaves(params)
        outside = torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        if functorch.inside_transform() or outside or functorch.inside_forward_mode():

            def total(params: Any) -> tuple[Tensor, Any]:
                values, auxes = zip(*losses(params), strict=True)
                return torch.stack(values).sum(), list(auxes)

            (value, aux), gradient = value_and_grad(total, has_aux=True)(params)
            return (value, aux) if has_aux else value, gradient
        return _one_by_one(losses, params, has_aux, defer)

    return accumulated


def _one_by_one(losses: Callable[[Any], Iterator[tuple[Tensor, Any]]], params: Any, has_aux: bool, defer: Defer) -> Any:
    leaves, treedef = optree.tree_flatten(params)
    layouts = layouts_of(params)
    moving = [i for i, leaf in enumerate(leaves) if moves(leaf, layouts[i])]
    variables = [leaves[i].detach().requires_grad_() for i in moving]
    mixed = with_leaves(leaves, moving, variables)
    sums: list[Tensor | None] = [None] * len(variables)
    values, auxes = [], []
    with torch.enable_grad(), Step(variables, defer) as step:
        for value, aux in losses(optree.tree_unflatten(treedef, mixed)):
            if step.engines:
                _reaches_others((value, aux), variables)
            if variables:
                with step.differentiating():
                    found: Sequence[Tensor | None] = [None] * len(variables)
                    if value.requires_grad:
                        found = torch.autograd.grad(value, variables, allow_unused=True)
                sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, found, strict=True)]
            values.append(value.detach())
            auxes.append(optree.tree_map(_detached, aux))
            del value, aux
        collected = step.finish()
    every = _totals(sums, collected, variables, [layouts[i] for i in moving])
    gradients = with_leaves([None] * len(leaves), moving, _apart(every))
    total = torch.stack(values).sum()
    return (total, auxes) if has_aux else total, _placed(optree.tree_unflatten(treedef, gradients), layouts)


def _by_torch_func(
    loss: Callable[..., Any], leaves: list[Tensor], layouts: list[Layout | None]
) -> tuple[Tensor, Any, Sequence[Tensor]]:
    if not leaves:
        return (*loss(), ())
    found, (value, aux) = torch.func.grad_and_value(loss, argnums=tuple(range(len(leaves))), has_aux=True)(*leaves)
    if not torch.compiler.is_compiling():
        # What a stage computed has a graph outside of all transforms.
        _reaches_others([functorch.unwrapped(x) for x in optree.tree_leaves((value, aux)) if isinstance(x, Tensor)], [])
    every = [_divided(g, layout) for g, layout in zip(found, layouts, strict=True)]
    return value, aux, _apart(every) if torch.compiler.is_compiling() else every


def _by_autograd(
    loss: Callable[..., Any], leaves: list[Tensor], layouts: list[Layout | None]
) -> tuple[Tensor, Any, Sequence[Tensor]]:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("value_and_grad: torch.inference_mode() records no gradients; use torch.no_grad()")
    outside = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: what autograd outside, or forward mode, knows of the argument stays connected.
        variables = [leaf.view_as(leaf) for leaf in leaves]
        for variable in variables:
            if not variable.requires_grad:
                variable.requires_grad_()
        with Step(variables) as step:
            value, aux = loss(*variables)
            others = bool(outside or step.engines) and _reaches_others((value, aux), variables)
            keep = outside and (any(leaf.requires_grad for leaf in leaves) or others)
            by_autograd: list[Tensor | None] = [None] * len(variables)
            with step.differentiating():
                if value.requires_grad and variables:
                    by_autograd = list(torch.autograd.grad(value, variables, create_graph=keep, allow_unused=True))
            collected = step.finish()
        apart = _apart(_totals(by_autograd, collected, variables, layouts))
    return (value, aux, apart) if keep else (_detached(value), optree.tree_map(_detached, aux), apart)


def _totals(
    by_autograd: Sequence[Tensor | None],
    collected: dict[int, Tensor],
    variables: Sequence[Tensor],
    layouts: Sequence[Layout | None],
) -> list[Tensor]:
    """Gradients, of which stages may have given all or a part past autograd."""
    found = []
    for g, variable, layout in zip(by_autograd, variables, layouts, strict=True):
        total = collected.get(id(variable))
        if total is None:
            total = _divided(torch.zeros_like(variable) if g is None else g, layout)
        elif g is not None:
            total = total + _divided(g, layout)
        found.append(total)
    return found


def _divided(gradient: Tensor, layout: Layout | None) -> Tensor:
    """This rank's part of a gradient that several ranks have, where it shall be cut further than its parameter."""
    if layout is None or layout.state_layout is layout:
        return gradient
    with scope(mesh_of(layout.grid, f"the gradient of {layout.stage!r}")):
        return functional.local_slice(gradient, layout.placement.gradients[len(layout.placement.axes) :])


def _placed(gradients: Any, layouts: Sequence[Layout | None]) -> Any:
    """A tree of gradients, whose flat shards know how they are cut."""
    if all(layout is None or layout.state_layout is layout for layout in layouts):
        return gradients
    return optree.tree_map(
        lambda node: FlatShard(node.values, node.layout.state_layout) if is_flat(node) else node,
        gradients,
        is_leaf=is_flat,
    )


def layouts_of(tree: Any) -> list[Layout | None]:
    """The layout of each leaf of a tree, if it is a flat shard's."""
    nodes = [node for node in optree.tree_leaves(tree, is_leaf=is_flat) if not (is_flat(node) and node.values is None)]
    return [node.layout if is_flat(node) else None for node in nodes]


def moves(leaf: Any, layout: Layout | None) -> bool:
    """Whether a leaf has a gradient."""
    return _differentiable(leaf) and (layout is None or layout.trainable)


def _reaches_others(results: Any, variables: list[Tensor]) -> bool:
    """Whether the loss or aux also depends on a tensor, closed over, that somebody outside differentiates.

    Raises:
        RuntimeError: it depends on one inside a stage, which nobody can differentiate from there.
    """
    if torch.compiler.is_compiling():
        return False
    mine = {id(variable) for variable in variables}
    seen: set[Any] = set()
    found = False
    stack = [leaf.grad_fn for leaf in optree.tree_leaves(results) if isinstance(leaf, Tensor)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in mine:
            if owner(leaf) is not None:
                raise escaped(str(owner(leaf)))
            found = True
        stack.extend(parent for parent, _ in node.next_functions)
    return found or any(
        leaf.is_leaf and leaf.requires_grad and id(leaf) not in mine
        for leaf in optree.tree_leaves(results)
        if isinstance(leaf, Tensor)
    )


def _apart(found: Sequence[Tensor]) -> Sequence[Tensor]:
    """Each gradient in memory of its own: autograd may return one for two, or one number for all elements."""
    if torch.compiler.is_compiling():  # memory is not known yet; where a copy is not needed, a compiler leaves it out
        return [gradient.clone(memory_format=torch.contiguous_format) for gradient in found]
    taken: set[int] = set()
    apart = []
    for gradient in found:
        if not gradient.is_contiguous() and 0 in gradient.stride():
            gradient = gradient.contiguous()
        elif autograd.storage_of(gradient) in taken:
            gradient = gradient.clone()
        taken.add(autograd.storage_of(gradient))
        apart.append(gradient)
    return apart


def _scalar(result: Any, has_aux: bool, name: str) -> tuple[Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"value_and_grad: with has_aux=True {name} returns (loss, aux), not {type(result).__name__}")
    value, aux = result if has_aux else (result, ())
    if not isinstance(value, Tensor):
        hint = "; for (loss, aux) pass has_aux=True" if isinstance(value, tuple) else ""
        raise TypeError(f"value_and_grad: {name} returns a scalar tensor, not {type(value).__name__}{hint}")
    if value.ndim or not value.is_floating_point():
        raise ValueError(
            f"value_and_grad: {name} returned shape {tuple(value.shape)}, {value.dtype}; a loss is 0-d, real and "
            f"floating: reduce it, for example with .sum() or .mean()"
        )
    return value, aux


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _detached(leaf: Any) -> Any:
    """Without its graph, but with its tangent in forward mode, which `detach` alone would drop."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not functorch.inside_forward_mode():
        return leaf.detach()
    primal, tangent = forward_ad.unpack_dual(leaf)
    return primal.detach() if tangent is None else forward_ad.make_dual(primal.detach(), tangent.detach())


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", type(f).__name__)
