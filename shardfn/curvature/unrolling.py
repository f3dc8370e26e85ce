"""Gradients through training: by transposing its steps, or implicitly at a minimum.

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
from shardfn.optim.hyperparameters import check_integer
from shardfn.optim.optimizer import Optimizer
from shardfn.transforms.autodiff import Variables, differentiating, grad, name_of, value_and_grad
from shardfn.transforms.shortage import RandomNumbers, versions


def unroll(
    loss: Function, optimizer: Optimizer, outer: Function, *, segment: int | None = None
) -> Callable[[Any, Any, Any, Sequence[Any]], tuple[Tensor, tuple[Any, Any, Any]]]:
    """Returns a function that trains, and differentiates the outcome: a metagradient.

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
        check_integer("unroll", "segment", segment, 1)

    def run(params: Any, state: Any, hyper: Any, batches: Sequence[Any]) -> tuple[Tensor, tuple[Any, Any, Any]]:
        name = f"unroll of {name_of(loss)}"
        if not isinstance(batches, Sequence):
            raise TypeError(
                f"{name}: batches must be a list, as they are read from both ends, got {type(batches).__name__}"
            )
        check_batches(batches, params, name)
        Space(params, name).agree("unroll", segment=segment)
        refuse_derivative(_tensor_leaves((params, state, hyper)), name)
        training = _Training(loss, optimizer, list(each_of(batches, name, loss, before=2)), hyper)
        count, length = len(batches), segment or math.isqrt(len(batches) - 1) + 1
        begins, checkpoints, current = range(0, count, length), [], (params, state)
        for begin in begins:
            checkpoints.append(current)
            current = training.steps(current, begin, min(begin + length, count))[-1][0]
        with draws_restored(_tensor_leaves(current)):
            value, (params_gradient, hyper_gradient) = value_and_grad(outer, (0, 1))(current[0], hyper)
            backward = _Back(training, current, params_gradient, hyper_gradient)
            for begin in reversed(begins):
                steps = training.steps(checkpoints.pop(), begin, min(begin + length, count))
                for index in reversed(range(begin, begin + len(steps) - 1)):
                    del steps[-1]
                    backward.over(index, *steps[-1])
        return value, backward.gradients(params, state)

    return run


@dataclass
class _Training:
    """Steps of training, which can be made again."""

    loss: Function
    optimizer: Optimizer
    batches: list[tuple[Any, ...]]
    hyper: Any
    random: dict[int, RandomNumbers] = field(default_factory=dict)

    def draw(self, index: int, current: Any) -> None:
        """Makes a step draw the same random numbers each time."""
        self.random.setdefault(index, RandomNumbers(_tensor_leaves(current))).restore()

    def first(self, *trees: Any) -> Any:
        """Takes the first step on copies; raises RuntimeError for an optimizer that overwrites."""
        copies = [optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree) for tree in trees]
        before = versions(_tensor_leaves(copies))
        new = self.optimizer.step(*copies)
        if versions(_tensor_leaves(copies)) != before:
            raise RuntimeError("unroll: the optimizer overwrites arguments that are needed again. Pass donate=False")
        return new

    def steps(self, current: Any, begin: int, end: int) -> list[tuple[Any, Any]]:
        """Returns parameters, state and gradient before each step, and the final parameters and state."""
        steps = []
        for index in range(begin, end):
            self.draw(index, current)
            g = grad(lambda p, batch: self.loss(p, self.hyper, *batch))(current[0], self.batches[index])
            steps.append((current, g))
            current = self.optimizer.step(current[0], g, current[1]) if index else self.first(current[0], g, current[1])
            current = optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, current)
        return [*steps, (current, None)]


class _DifferentiatedLeaves:
    """The leaves of a tree with a derivative, as variables of a graph."""

    def __init__(self, tree: Any) -> None:
        self.all = Variables(tree)
        self.values = [x.detach().requires_grad_() for x in self.all.values]

    def tracked(self) -> Any:
        return self.all.tree(self.values)


class _Back:
    """The backward pass through training: gradients with respect to the inputs of one step."""

    def __init__(self, training: _Training, last: Any, params_gradient: Any, hyper_gradient: Any) -> None:
        self.training, self.slope = training, hyper_gradient
        space = Space(last[0], "unroll")
        self.params = space.tangents(space.read(params_gradient))
        self.state = [torch.zeros_like(x) for x in Variables(last[1]).values]

    def over(self, index: int, current: Any, g: Any) -> None:
        """Transposes a step."""
        training, parts = self.training, [_DifferentiatedLeaves(x) for x in (current[0], g, current[1])]
        with torch.enable_grad():
            new = training.optimizer.step(*(part.tracked() for part in parts))
            pairs = zip(Variables(new).values, [*self.params, *self.state], strict=True)
            differentiable = [(y, ct) for y, ct in pairs if y.requires_grad]
            ys, cts = zip(*differentiable, strict=True)
            inputs = [x for part in parts for x in part.values]
            gradients = torch.autograd.grad(ys, inputs, cts, allow_unused=True, materialize_grads=True)
        split = iter(gradients)
        by_params, by_gradient, self.state = ([next(split) for _ in part.values] for part in parts)
        space = Space(current[0], "unroll")
        training.draw(index, current)
        v, batch = space.tangents(by_gradient), training.batches[index]
        product, mixed = _gradient_jvp(training.loss, space, training.hyper, v, batch)
        self.params = add_([x.clone() for x in by_params], space.tangents(space.read(product)))
        self.slope = optree.tree_map(torch.add, self.slope, mixed)

    def gradients(self, params: Any, state: Any) -> tuple[Any, Any, Any]:
        """Gradients with respect to the initial parameters and state, and `hyper`."""
        return Variables(params).tree_of(self.params), Variables(state).tree_of(self.state), self.slope


def _gradient_jvp(loss: Function, space: Space, hyper: Any, v: Vector, batch: tuple[Any, ...]) -> tuple[Any, Any]:
    """The derivatives along `v` of the gradients with respect to the parameters and `hyper`."""
    fixed = Variables(hyper)

    def gradients(values: Vector, hyper_values: Vector) -> Any:
        f = differentiating(lambda p, h: loss(p, h, *batch), (0, 1), unread=True)
        return f(space.variables.tree(values), fixed.tree(hyper_values))[1]

    values, hyper_values = ([x.detach() for x in variables.values] for variables in (space.variables, fixed))
    return jvp(gradients, (values, hyper_values), (v, [torch.zeros_like(x) for x in hyper_values]))[1]


def _tensor_leaves(tree: Any) -> list[Tensor]:
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
    refuse_derivative(_tensor_leaves((params, hyper)), name)
    next(each_of(batches, name, loss, before=2))
    with draws_restored(_tensor_leaves(params)) as random_state:
        params_gradient, hyper_gradient = grad(outer, (0, 1))(params, hyper)
        random_state.restore()  # so that all that follows is of one function
        solution = solve(hvp(lambda p, *batch: loss(p, hyper, *batch), params, batches), params_gradient, by, **options)
        space = Space(params, name)
        v = space.tangents(space.read(solution.x))
        for batch in each_of(batches, name):
            _, mixed = _gradient_jvp(loss, space, hyper, v, batch)
            hyper_gradient = optree.tree_map(torch.sub, hyper_gradient, mixed)
    return hyper_gradient, solution
