"""The gradient of a sum over micro-batches: one of them in memory at a time, communication put off to the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

import optree
import torch
from torch import Tensor

from shardfn.compat import functorch
from shardfn.transforms.autodiff import (
    Variables,
    detached,
    name_of,
    reaches_others,
    scalar,
    totals,
    unshared,
    value_and_grad,
)
from shardfn.transforms.step import Defer, Step


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
    name = name_of(f)

    def losses(params: Any) -> Iterator[tuple[Tensor, Any]]:
        number = 0
        for number, batch in enumerate(microbatches, 1):  # noqa: B007
            yield scalar(f(params, *batch) if isinstance(batch, tuple) else f(params, batch), has_aux, name)
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
    moving = Variables(params)
    variables = [value.detach().requires_grad_() for value in moving.values]
    sums: list[Tensor | None] = [None] * len(variables)
    values, auxes = [], []
    with torch.enable_grad(), Step(variables, defer) as step:
        for value, aux in losses(moving.tree(variables)):
            if step.engines:
                reaches_others((value, aux), variables)
            if variables:
                with step.differentiating():
                    found: Sequence[Tensor | None] = [None] * len(variables)
                    if value.requires_grad:
                        found = torch.autograd.grad(value, variables, allow_unused=True)
                sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, found, strict=True)]
            values.append(value.detach())
            auxes.append(optree.tree_map(detached, aux))
            del value, aux
        collected = step.finish()
    gradient = moving.gradient(unshared(totals(sums, collected, variables, moving.layouts)))
    total = torch.stack(values).sum()
    return (total, auxes) if has_aux else total, gradient
