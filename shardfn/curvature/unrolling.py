"""Gradients through training: by going back through its steps, or by what holds at its end.

A step's transpose needs the Hessian of its loss only in one direction, that in which the gradient moves the result. So
it is a forward-mode derivative of the gradient, on the schedule of the stages, and no graph of a gradient is ever kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.curvature.operators import Function, check_batches, each_of, hvp
from shardfn.curvature.solving import Method, solve
from shardfn.curvature.vectors import Space, Vector, add_, draws_restored, refuse_derivative
from shardfn.forward_mode.jvp import jvp
from shardfn.optim.hyperparameters import whole
from shardfn.optim.optimizer import Optimizer
from shardfn.transforms.autodiff import Variables, differentiating, grad, name_of, value_and_grad
from shardfn.transforms.shortage import RandomNumbers, versions


def unroll(
    loss: Function, optimizer: Optimizer, outer: Function, *, segment: int | None = None
) -> Callable[[Any, Any, Any, Sequence[Any]], tuple[Tensor, tuple[Any, Any, Any]]]:
    """A function that trains, and returns what comes of it with its gradient: a metagradient.

    Training goes forward and keeps the parameters and the optimizer's state of every `segment` steps. Then it goes
    back: a segment's steps are made again, and each is transposed. A step takes about five gradients' time in total.

    Args:
        loss: `(params, hyper, *batch) -> loss`, as in `f` of `hvp`; it is minimized. `hyper` is any pytree, such as
            weights of rows, or a temperature.
        optimizer: takes the steps: one with `donate=False`.
        outer: `(params, hyper) -> loss`, of the parameters after the last step.
        segment: steps between two that are kept. Default: the root of their number, so that `2 * sqrt(steps)` states
            are kept at most.

    Returns:
        `(params, state, hyper, batches) -> (value, gradients)`, with one step for each of the batches, a sequence.
        The gradients are with respect to `params`, `state` (where a learning rate that is a tensor may be found) and
        `hyper`: trees like them, with None for leaves that are no floating-point tensors. As for `sf.grad`, that of
        `hyper` is of this rank's `hyper`: the loss sums it over ranks, by `pvary`, if they share it.

    Raises:
        RuntimeError: an optimizer that overwrites; a derivative of the result.
        TypeError, ValueError: batches that are no sequence, or not as many on each rank; no batches.

    Sources: Maclaurin et al., Gradient-based hyperparameter optimization through reversible learning (2015); Kemaev et
        al., MixFlow-MG: scalable meta-learning via mixed-mode differentiation (2025).

    Example:
        ``value, (_, _, slope) = unroll(loss, so.adamw(1e-3, donate=False), outer)(params, state, weights, batches)``
    """
    if segment is not None:
        whole("unroll", "segment", segment, 1)

    def run(params: Any, state: Any, hyper: Any, batches: Sequence[Any]) -> tuple[Tensor, tuple[Any, Any, Any]]:
        name = f"unroll of {name_of(loss)}"
        if not isinstance(batches, Sequence):
            raise TypeError(
                f"{name}: batches are read twice, from both ends: pass a list, not {type(batches).__name__}"
            )
        check_batches(batches, params, name)
        Space(params, name).agree("unroll", segment=segment)
        refuse_derivative(_tensors((params, state, hyper)), name)
        training = _Training(loss, optimizer, list(each_of(batches, name, loss, before=2)), hyper)
        count, length = len(batches), segment or math.isqrt(len(batches) - 1) + 1
        begins, kept, now = range(0, count, length), [], (params, state)
        for begin in begins:
            kept.append(now)
            now = training.steps(now, begin, min(begin + length, count))[-1][0]
        with draws_restored(_tensors(now)):
            value, (over, slope) = value_and_grad(outer, (0, 1))(now[0], hyper)
            back = _Back(training, now, over, slope)
            for begin in reversed(begins):
                each = training.steps(kept.pop(), begin, min(begin + length, count))
                for number in reversed(range(begin, begin + len(each) - 1)):
                    del each[-1]
                    back.over(number, *each[-1])
        return value, back.gradients(params, state)

    return run


@dataclass
class _Training:
    """Steps of training, which can be made again."""

    loss: Function
    optimizer: Optimizer
    batches: list[tuple[Any, ...]]
    hyper: Any
    random: dict[int, RandomNumbers] = field(default_factory=dict)

    def draw(self, number: int, now: Any) -> None:
        """Random numbers of a step are the same each time."""
        self.random.setdefault(number, RandomNumbers(_tensors(now))).restore()

    def first(self, *given: Any) -> Any:
        """The first step, on copies: raises RuntimeError for an optimizer that overwrites."""
        copies = [optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree) for tree in given]
        before = versions(_tensors(copies))
        new = self.optimizer.step(*copies)
        if versions(_tensors(copies)) != before:
            raise RuntimeError("unroll: the optimizer overwrites what it is given, which is needed again: donate=False")
        return new

    def steps(self, now: Any, begin: int, end: int) -> list[tuple[Any, Any]]:
        """Parameters and state before each of some steps, with the gradient there; and after the last, without."""
        found = []
        for number in range(begin, end):
            self.draw(number, now)
            g = grad(lambda p, batch: self.loss(p, self.hyper, *batch))(now[0], self.batches[number])
            found.append((now, g))
            now = self.optimizer.step(now[0], g, now[1]) if number else self.first(now[0], g, now[1])
            now = optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, now)
        return [*found, (now, None)]


class _DifferentiatedLeaves:
    """The leaves of a tree with a derivative, as variables of a graph."""

    def __init__(self, tree: Any) -> None:
        self.all = Variables(tree)
        self.values = [x.detach().requires_grad_() for x in self.all.values]

    def tracked(self) -> Any:
        return self.all.tree(self.values)


class _Back:
    """The way back through training: the gradient with respect to what came after a step, and then before it."""

    def __init__(self, training: _Training, last: Any, over: Any, slope: Any) -> None:
        self.training, self.slope = training, slope
        space = Space(last[0], "unroll")
        self.params = space.tangents(space.read(over))
        self.state = [torch.zeros_like(x) for x in Variables(last[1]).values]

    def over(self, number: int, now: Any, g: Any) -> None:
        """Transposes a step."""
        training, parts = self.training, [_DifferentiatedLeaves(x) for x in (now[0], g, now[1])]
        with torch.enable_grad():
            new = training.optimizer.step(*(part.tracked() for part in parts))
            pairs = zip(Variables(new).values, [*self.params, *self.state], strict=True)
            given = [(y, ct) for y, ct in pairs if y.requires_grad]
            ys, cts = zip(*given, strict=True)
            inputs = [x for part in parts for x in part.values]
            found = torch.autograd.grad(ys, inputs, cts, allow_unused=True, materialize_grads=True)
        split = iter(found)
        by_params, by_gradient, self.state = ([next(split) for _ in part.values] for part in parts)
        space = Space(now[0], "unroll")
        training.draw(number, now)
        v, batch = space.tangents(by_gradient), training.batches[number]
        product, mixed = _along(training.loss, space, training.hyper, v, batch)
        self.params = add_([x.clone() for x in by_params], space.tangents(space.read(product)))
        self.slope = optree.tree_map(torch.add, self.slope, mixed)

    def gradients(self, params: Any, state: Any) -> tuple[Any, Any, Any]:
        """With respect to the parameters and the state at the beginning, and `hyper`."""
        return Variables(params).like(self.params), Variables(state).like(self.state), self.slope


def _along(loss: Function, space: Space, hyper: Any, v: Vector, batch: tuple[Any, ...]) -> tuple[Any, Any]:
    """The derivatives along `v` of the gradients with respect to the parameters and `hyper`."""
    fixed = Variables(hyper)

    def gradients(values: Vector, others: Vector) -> Any:
        f = differentiating(lambda p, h: loss(p, h, *batch), (0, 1), unread=True)
        return f(space.variables.tree(values), fixed.tree(others))[1]

    values, others = ([x.detach() for x in each.values] for each in (space.variables, fixed))
    return jvp(gradients, (values, others), (v, [torch.zeros_like(x) for x in others]))[1]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


def implicit(
    loss: Function, outer: Function, params: Any, hyper: Any, batches: Any = None, by: Method = "cg", **options: Any
) -> Any:
    r"""The hypergradient at the end of training: the derivative of `outer` at a minimum that moves with `hyper`.

    By the implicit function theorem it is
    :math:`\partial_h O - \partial_h \partial_p L \, (H + \lambda)^{-1} \partial_p O`.

    Args:
        loss: `(params, hyper, *batch) -> loss`, as for `unroll`; `params` are at its minimum.
        outer: `(params, hyper) -> loss`.
        params: the parameters.
        hyper: any pytree.
        batches: as for `hvp`.
        by: the method of `solve`.
        **options: of `solve`: `damping`, `tolerance`, `products`, `scale`.

    Returns:
        A tree like `hyper`, and the `Solution` of the linear system.

    Raises:
        As `hvp` and `solve`.

    Sources: Lorraine, Vicol and Duvenaud, Optimizing millions of hyperparameters by implicit differentiation (2020).

    Example:
        ``slope, solution = implicit(loss, outer, params, weights, batches, damping=1e-3)``
    """
    name = f"implicit of {name_of(loss)}"
    refuse_derivative(_tensors((params, hyper)), name)
    next(each_of(batches, name, loss, before=2))
    with draws_restored(_tensors(params)) as began:
        over, slope = grad(outer, (0, 1))(params, hyper)
        began.restore()  # so that all that follows is of one function
        solution = solve(hvp(lambda p, *batch: loss(p, hyper, *batch), params, batches), over, by, **options)
        space = Space(params, name)
        v = space.tangents(space.read(solution.x))
        for batch in each_of(batches, name):
            _, mixed = _along(loss, space, hyper, v, batch)
            slope = optree.tree_map(torch.sub, slope, mixed)
    return slope, solution
