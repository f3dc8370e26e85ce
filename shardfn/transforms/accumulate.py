"""The gradient of a sum over micro-batches, with one of them in memory at a time and communication deferred to the
last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import optree
import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.collectives.capturing import capturing
from shardfn.compat import functorch
from shardfn.transforms.autodiff import (
    Variables,
    detached,
    follow,
    name_of,
    reaches_others,
    refusing_writes,
    scalar,
    totals,
    unshared,
    value_and_grad,
)
from shardfn.transforms.fitting import fitted
from shardfn.transforms.modules import refuse_module
from shardfn.transforms.step import Defer, Step


class Accumulation:
    """A function `params -> (value, gradient)`, over micro-batches one after another.

    Attributes:
        micro: number of micro-batches in the last call; 0 before the first.
    """

    def __init__(self, run: Callable[[Any], tuple[Any, Any]]) -> None:
        self._run = run
        self.micro = 0

    def __call__(self, params: Any) -> tuple[Any, Any]:
        """The sum over micro-batches and its gradient."""
        return self._run(params)


def accumulate(
    f: Callable[..., Any],
    microbatches: Iterable[Any],
    *,
    micro: int | Literal["auto"] | None = None,
    has_aux: bool = False,
    defer: Defer = "replicas",
) -> Accumulation:
    """A function of parameters that returns the sum of `f` over micro-batches and its gradient, one of them at a time.

    Nothing is averaged: if `f` is a sum, divided by the size of the whole batch, the result is exactly the whole
    batch's loss and gradient; not with batch norms, which see one micro-batch at a time. A mean, divided by the number
    of micro-batches, is the whole batch's only if they have equally many rows.

    With `micro="auto"` a batch is cut into as few parts as fit into memory. It is tried whole first. When any rank runs
    out of memory, all ranks abandon the attempt, and begin again with twice as many parts, from the same random
    numbers. The number that fits is remembered by function and batch size, and logged.

    Args:
        f: `(params, batch) -> loss`, or `(params, *batch)` if a micro-batch is a tuple. With `"auto"` it may run more
            than once, so it must change nothing but torch's own random state.
        microbatches: the micro-batches, as many on every rank; with `micro`, one batch: a pytree of tensors with the
            same number of rows in dim 0. Numbers of rows and lengths may differ between ranks.
        micro: the number of parts into which the batch is cut, on every rank; they differ by one row at most, and the
            last ones are empty on a rank with fewer rows. Or `"auto"`.
        has_aux: `f` returns `(loss, aux)`; the new function returns `(sum, [aux, ...])` in place of the sum.
        defer: what gradients of flat shards defer to the last micro-batch: `"replicas"`, the sum over replicas;
            `"everything"`, the reduce-scatter too, which takes a buffer for the whole gradients of all stages;
            `"nothing"`.

    Returns:
        `params -> (value, gradient)`, as `value_and_grad` gives. Its attribute `micro` is the number of parts it ran
        in.

    Raises:
        TypeError, ValueError: no micro-batches; a module in place of a function; no such `defer`; a batch that cannot
            be cut in this way, or that ranks would cut differently.
        torch.OutOfMemoryError: on every rank, if one of them runs out of memory with a single row.
        RuntimeError: `"auto"` under a transform, or where something outside differentiates through it.

    Example:
        >>> import torch
        >>> loss = lambda p, x: (p * x).sum()
        >>> accumulate(loss, [torch.tensor([1.0]), torch.tensor([2.0])])(torch.tensor([3.0]))
        (tensor(9.), tensor([3.]))
        >>> accumulate(loss, torch.tensor([[1.0], [2.0]]), micro=2)(torch.tensor([3.0]))
        (tensor(9.), tensor([3.]))
    """
    if defer not in get_args(Defer):
        raise ValueError(f"accumulate: defer={defer!r}; it is one of {', '.join(map(repr, get_args(Defer)))}")
    refuse_module("accumulate", f)
    name = name_of(f)

    def losses(params: Any, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Any]]:
        number = 0
        for number, batch in enumerate(batches, 1):
            accumulation.micro = number
            with refusing_writes():
                yield scalar(f(params, *batch) if isinstance(batch, tuple) else f(params, batch), has_aux, name)
        if number == 0:
            raise ValueError(f"accumulate: there are no micro-batches for {name}")

    def summed(params: Any, batches: Iterable[Any]) -> tuple[Any, Any]:
        if _differentiated(params):

            def total(params: Any) -> tuple[Tensor, Any]:
                values, auxes = zip(*losses(params, batches), strict=True)
                return torch.stack(values).sum(), list(auxes)

            (value, aux), gradient = value_and_grad(total, has_aux=True)(params)
            return (value, aux) if has_aux else value, gradient
        return _one_by_one(lambda values: losses(values, batches), params, has_aux, defer)

    def accumulated(params: Any) -> tuple[Any, Any]:
        if micro is None:
            return summed(params, microbatches)
        if micro == "auto" and capturing() is not None:
            raise RuntimeError(
                f"accumulate({name}, micro='auto'): a captured step cannot try how many parts fit: pass the number of "
                f"parts that an ordinary call ran in, its attribute micro"
            )
        if micro == "auto" and _differentiated(params):
            raise RuntimeError(
                f"accumulate: micro='auto' with {name} under a torch.func transform, or with parameters that something "
                f"outside differentiates: what runs out of memory there cannot run again. Pass a number: micro=2"
            )
        described = [_called(f), f"defer={defer!r}", f"has_aux={has_aux}"]
        return fitted(lambda parts: summed(params, parts), microbatches, micro, params, described, name)

    accumulation = Accumulation(accumulated)
    return accumulation


def _differentiated(params: Any) -> bool:
    """Whether a transform, or autograd outside, may differentiate what is computed here."""
    leaves = optree.tree_leaves(params)
    outside = torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    return functorch.inside_transform() or outside or functorch.inside_forward_mode()


def _called(f: Callable[..., Any]) -> str:
    """An identifier of a function: the same however often it is made anew, and on every rank."""
    while isinstance(f, functools.partial):
        f = f.func
    code = getattr(f, "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', type(f).__qualname__)}{line}"


def _one_by_one(losses: Callable[[Any], Iterator[tuple[Tensor, Any]]], params: Any, has_aux: bool, defer: Defer) -> Any:
    """The sum and its gradient, by one forward and backward per micro-batch."""
    wrapped, recorder = Variables(params), recording.current()
    begin = 0 if recorder is None else len(recorder.trace.nodes)
    variables = [value.detach().requires_grad_() for value in wrapped.values]
    sums: list[Tensor | None] = [None] * len(variables)
    values, auxes = [], []
    with torch.enable_grad(), Step(variables, defer) as step:
        for value, aux in losses(wrapped.tree(variables)):
            if step.engines:
                reaches_others((value, aux), variables)
            if variables:
                with step.differentiating([value]):
                    gradients: Sequence[Tensor | None] = [None] * len(variables)
                    if value.requires_grad:
                        gradients = torch.autograd.grad(value, variables, allow_unused=True)
                sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, gradients, strict=True)]
            values.append(value.detach())
            auxes.append(optree.tree_map(detached, aux))
            del value, aux
        collected = step.finish()
        follow(collected, variables, wrapped.layouts)
    gradients = unshared(totals(sums, collected, variables, wrapped.layouts))
    if recorder is not None:
        for value in values:
            recorder.differentiated(value, begin, zip(wrapped.values, gradients, strict=True))
    gradient = wrapped.gradient(gradients)
    total = torch.stack(values).sum()
    return (total, auxes) if has_aux else total, gradient
