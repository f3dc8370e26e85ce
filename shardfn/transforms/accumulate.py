"""Gradient accumulation: one micro-batch in memory at a time, with communication deferred to the last."""

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
from shardfn.tiers.streaming import in_place
from shardfn.tracebacks import api_boundary
from shardfn.transforms import exact
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


@api_boundary
def accumulate(
    f: Callable[..., Any],
    microbatches: Iterable[Any],
    *,
    micro: int | Literal["auto", "exact"] | None = None,
    has_aux: bool = False,
    defer: Defer = "replicas",
    accumulator_dtype: torch.dtype = torch.float32,
) -> Accumulation:
    """A function of parameters that returns the loss and gradient over micro-batches, one at a time.

    If `f` returns a pair `(total, count)`, such as a sum over tokens and their number, the loss is the sum of the
    totals over the sum of the counts, divided once, at the end. That is the loss of the full batch, however its rows
    and masked tokens are spread over micro-batches; not with batch norms, which see one micro-batch at a time. If `f`
    returns a scalar, the loss is the sum of these, and nothing is averaged.

    With `micro="auto"` a batch is split into as few micro-batches as fit into memory. The first attempt uses one. When
    any rank runs out of memory, all ranks abort the attempt, and try again with twice as many, from the same random
    state. The number that fits is remembered by function and batch size, and logged.

    With `micro="exact"`, for parameters of a strategy `with_exact(C)`, this rank's rows are its share of C parts, and
    the result has the same bits on any mesh. `f` then gets one part, and returns the total and count of its rows, or
    the total alone; to sum over ranks there is an error, as this function does it. Torch's random numbers, and
    `fold_in(seed, step, "data")`, depend on the part. `defer` and `accumulator_dtype` are not used: each sum has the
    dtype in which gradients are sent.

    Args:
        f: `(params, batch) -> (total, count)` or `-> loss`, or `(params, *batch)` if a micro-batch is a tuple. The
            count is a number or a 0-d tensor without a gradient; sum both over ranks, by `psum`. With `"auto"` it may
            run more than once, so it must change nothing but torch's own random state.
        microbatches: the micro-batches, as many on every rank; with `micro`, one batch: a pytree of tensors with the
            same number of rows in dim 0. Numbers of rows and lengths may differ between ranks.
        micro: the number of parts into which the batch is split, on every rank; they differ by one row at most, and the
            last ones are empty on a rank with fewer rows. Or `"auto"`, or `"exact"`, for equal parts on all ranks.
        has_aux: `f` returns `(loss, aux)` or `((total, count), aux)`; the new function returns `(loss, [aux, ...])` in
            place of the loss. With `"exact"` these are of the parts of all ranks, and have tensors and numbers alone.
        defer: the reductions of flat shards' gradients that wait for the last micro-batch: `"replicas"`, the sum over
            replicas; `"all"`, the reduce-scatter too, which takes memory for the full gradients of all stages;
            `"nothing"`.
        accumulator_dtype: the dtype in which gradients of narrower dtypes are summed; the sum is returned in their own.

    Returns:
        `params -> (value, gradient)`, as `value_and_grad` gives. Its attribute `micro` is the number of parts it ran
        in.

    Raises:
        TypeError, ValueError: no micro-batches; a module in place of a function; no such `defer`; a batch that cannot
            be split in this way, or that ranks would split differently.
        torch.OutOfMemoryError: on every rank, if one of them runs out of memory with a single row.
        RuntimeError: `"auto"` or `"exact"` under a transform, or where something outside differentiates through it;
            with `"exact"` in a compiled or captured step, or if a part asks for its position along a data axis.

    Example:
        >>> import torch
        >>> loss = lambda p, x: (p * x).sum()
        >>> accumulate(loss, [torch.tensor([1.0]), torch.tensor([2.0])])(torch.tensor([3.0]))
        (tensor(9.), tensor([3.]))
        >>> accumulate(loss, torch.tensor([[1.0], [2.0]]), micro=2)(torch.tensor([3.0]))
        (tensor(9.), tensor([3.]))
        >>> mean = lambda p, x: ((p * x).sum(), len(x))
        >>> accumulate(mean, [torch.tensor([1.0]), torch.tensor([2.0, 3.0])])(torch.tensor([3.0]))
        (tensor(6.), tensor([2.]))
    """
    if not isinstance(accumulator_dtype, torch.dtype) or not accumulator_dtype.is_floating_point:
        raise TypeError(f"accumulate: accumulator_dtype must be a floating dtype, got {accumulator_dtype!r}")
    if defer not in get_args(Defer):
        raise ValueError(f"accumulate: defer must be one of {', '.join(map(repr, get_args(Defer)))}, got {defer!r}")
    refuse_module("accumulate", f)
    name = name_of(f)

    def losses(params: Any, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Any, Any]]:
        number = 0
        for number, batch in enumerate(batches, 1):
            accumulation.micro = number
            with refusing_writes():
                result = f(params, *batch) if isinstance(batch, tuple) else f(params, batch)
                yield _total_and_count(result, has_aux, name)
        if number == 0:
            raise ValueError(f"accumulate: there are no micro-batches for {name}")

    def summed(params: Any, batches: Iterable[Any]) -> tuple[Any, Any]:
        if _differentiated(params):

            def total(params: Any) -> tuple[Tensor, Any]:
                values, auxes, counts = zip(*losses(params, batches), strict=True)
                value, count = torch.stack(values).sum(), _summed(counts, name)
                return value if count is None else (value / count).to(value.dtype), list(auxes)

            (value, aux), gradient = value_and_grad(total, has_aux=True)(params)
            return (value, aux) if has_aux else value, gradient
        return _one_by_one(lambda values: losses(values, batches), params, has_aux, defer, accumulator_dtype, name)

    def part_by_part(f: Any, batch: Any, params: Any, has_aux: bool, name: str) -> tuple[int, tuple[Any, Any]]:
        def of_part(params: Any, part: Any) -> tuple[Tensor, Any, Any]:
            with refusing_writes():
                result = f(params, *part) if isinstance(part, tuple) else f(params, part)
                return _total_and_count(result, has_aux, name)

        described = [_function_id(f), f"has_aux={has_aux}"]
        total, auxes, gradient, number = exact.part_by_part(of_part, batch, params, described, name)
        return number, ((total, auxes) if has_aux else total, gradient)

    def accumulated(params: Any) -> tuple[Any, Any]:
        if micro is None:
            return summed(params, microbatches)
        if micro == "exact":
            accumulation.micro, result = part_by_part(f, microbatches, params, has_aux, name)
            return result
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
        described = [_function_id(f), f"defer={defer!r}", f"has_aux={has_aux}"]
        return fitted(lambda parts: summed(params, parts), microbatches, micro, params, described, name)

    accumulation = Accumulation(accumulated)
    return accumulation


def _differentiated(params: Any) -> bool:
    """Whether a transform, or autograd outside, may differentiate what is computed here."""
    leaves = optree.tree_leaves(params)
    outside = torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    return functorch.inside_transform() or outside or functorch.inside_forward_mode()


def _function_id(f: Callable[..., Any]) -> str:
    """An identifier of a function by its code: the same on every rank, and each time the function is made."""
    while isinstance(f, functools.partial):
        f = f.func
    code = getattr(f, "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', type(f).__qualname__)}{line}"


def _total_and_count(result: Any, has_aux: bool, name: str) -> tuple[Tensor, Any, Any]:
    """A micro-batch's loss or total, its aux, and its count or None."""
    loss, *rest = result if has_aux and isinstance(result, tuple) and result else (result,)
    count = None
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, count = loss
        wrong = not isinstance(count, (Tensor, int, float)) or isinstance(count, bool)
        if isinstance(count, Tensor):
            wrong = count.ndim > 0 or count.is_complex() or count.requires_grad
        if wrong:
            got = f"shape {tuple(count.shape)}, {count.dtype}" if isinstance(count, Tensor) else type(count).__name__
            raise TypeError(
                f"accumulate: the count of (total, count) must be a number or a 0-d tensor without a gradient, got "
                f"{got}. If {name} returns (loss, aux), pass has_aux=True"
            )
    return (*scalar((loss, *rest) if rest else loss, has_aux, name), count)


def _summed(counts: Sequence[Any], name: str) -> Any:
    """The sum of the counts of all micro-batches; None if there are none."""
    present = [count for count in counts if count is not None]
    if present and len(present) < len(counts):
        raise ValueError(f"accumulate: {name} must return (total, count) for every micro-batch or for none")
    return sum(present[1:], present[0]) if present else None


def _divide(count: Any, xs: list[Tensor]) -> None:
    """Divides tensors of one dtype in place; in float32 if theirs has 16 bits, in which a count may be infinite."""
    if not isinstance(count, Tensor):
        torch._foreach_div_(xs, count)
    elif xs[0].dtype.itemsize > 2:
        torch._foreach_div_(xs, count.to(xs[0].device, xs[0].dtype))
    else:
        for x in xs:
            x.copy_(x.float() / count.to(x.device, torch.float32))


def _one_by_one(
    losses: Callable[[Any], Iterator[tuple[Tensor, Any, Any]]],
    params: Any,
    has_aux: bool,
    defer: Defer,
    accumulator: torch.dtype,
    name: str,
) -> Any:
    """The loss and its gradient, by one forward and backward per micro-batch."""
    wrapped, recorder = Variables(params), recording.current()
    begin = 0 if recorder is None else len(recorder.trace.nodes)
    variables = [value.detach().requires_grad_() for value in wrapped.values]
    sums: list[Tensor | None] = [None] * len(variables)
    values, counts, auxes = [], [], []
    with torch.enable_grad(), Step(variables, defer, accumulator=accumulator) as step:
        for value, aux, count in losses(wrapped.tree(variables)):
            if recorder is not None and count is not None:
                recorder.counted(value, count)
            if step.schedules:
                reaches_others((value, aux), variables)
            if variables:
                with step.differentiating([value]):
                    gradients: Sequence[Tensor | None] = [None] * len(variables)
                    if value.requires_grad:
                        gradients = torch.autograd.grad(value, variables, allow_unused=True)
                sums = [step.added(total, g) for total, g in zip(sums, gradients, strict=True)]
            values.append(value.detach())
            counts.append(count)
            auxes.append(optree.tree_map(detached, aux))
            del value, aux
        collected = step.finish()
        follow(collected, variables, wrapped.layouts)
    parts = [None if g is None else g.to(variable.dtype) for g, variable in zip(sums, variables, strict=True)]
    sums_of_all = unshared(totals(parts, collected, variables, wrapped.layouts))
    count = _summed(counts, name)
    if recorder is not None:
        for value in values:
            recorder.differentiated(value, begin, zip(wrapped.values, sums_of_all, strict=True))
    total = torch.stack(values).sum()
    if count is not None:
        in_place(sums_of_all, functools.partial(_divide, count))
        total = (total / count).to(total.dtype)
    gradient = wrapped.gradient(sums_of_all)
    return (total, auxes) if has_aux else total, gradient
