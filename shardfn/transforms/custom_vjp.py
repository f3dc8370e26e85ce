"""Functions with a first derivative of their own, and every further one by composition.

What a kernel, a ring or a schedule does faster than autograd would is a forward and a backward of its own; a second
derivative, a tangent or a batch goes through the plain function that both mean. One meaning, two speeds.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from shardfn.compat import functorch
from shardfn.mesh.scope import current_mesh, scope
from shardfn.shards.partition import with_leaves

Tensors = tuple[Tensor, ...]


class Derivative(Protocol):
    """A function of tensors with a derivative of its own, as `call` takes it."""

    @property
    def trains(self) -> Sequence[bool] | None:
        """Which inputs may have a gradient; None for all."""

    @property
    def differentiable(self) -> Sequence[bool] | None:
        """Which outputs may, known after `fwd`; None for all."""

    def pure(self, *inputs: Tensor) -> Tensors:
        """The outputs, by operations that every transform goes through."""

    def fwd(self, *inputs: Tensor) -> tuple[Tensors, Tensors]:
        """The same outputs, and residuals, of which some may be inputs or outputs. Runs without autograd."""

    def begin(self, again: bool) -> None:
        """A backward pass has come here; `again` says that what it finds may be differentiated itself."""

    def bwd(
        self, residuals: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The gradients of the inputs that need one; None for the others, and for one that is zero.

        A cotangent is None where nobody uses the output.
        """


@dataclass(frozen=True)
class custom_vjp:
    """A function of tensors with a derivative written by hand, as `jax.custom_vjp` has it.

    Every transform that needs more than one first derivative goes through `pure`.

    Attributes:
        pure: `(*inputs) -> outputs`.
        fwd: `(*inputs) -> (outputs, residuals)`: tuples of tensors. Residuals may be inputs and outputs themselves.
        bwd: `(residuals, cotangents, needs) -> gradients`, one for each input: None where it needs none, or is zero. A
            cotangent is None where nobody uses the output.
        trains: which inputs may have a gradient; None for all.
        differentiable: which outputs may; None for all.
    """

    pure: Callable[..., Tensors]
    fwd: Callable[..., tuple[Tensors, Tensors]]
    bwd: Callable[..., Sequence[Tensor | None]]
    trains: Sequence[bool] | None = None
    differentiable: Sequence[bool] | None = None

    def begin(self, again: bool) -> None:
        """There is nothing to do."""

    def __call__(self, *inputs: Tensor) -> Tensors:
        """The outputs; all ranks take the same way, by the transforms around them."""
        if torch.compiler.is_compiling() or functorch.inside_batching_or_forward():
            return self.pure(*inputs)
        asked = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if not asked and not functorch.inside_transform():
            return self.fwd(*inputs)[0]
        return call(self, *inputs)


def call(function: Derivative, *inputs: Tensor) -> Tensors:
    """The outputs of a function, whose inputs are differentiated, outside of vmap and forward mode."""
    run = _Run(function)
    found: Tensors = functorch.applied(_Forward if functorch.inside_transform() else _Direct, run, *inputs)
    return found[: run.outputs]


class _Run:
    """One call; no pytree node, so transforms pass it through.

    Attributes:
        plan: where each residual is among inputs, what was made in addition to outputs, and outputs, one after another.
        made: of the last two, those that are saved, by their number in what forward gives.
    """

    __slots__ = ("function", "made", "mesh", "outputs", "plan")

    def __init__(self, function: Derivative) -> None:
        self.function, self.mesh = function, current_mesh()
        self.outputs, self.plan, self.made = 0, list[int](), list[int]()

    def forward(self, inputs: Tensors) -> Tensors:
        """Outputs, and the residuals that are neither these nor inputs."""
        outputs, residuals = self.function.fwd(*inputs)
        self.outputs = len(outputs)
        places = {id(x): i for i, x in enumerate(inputs)}
        every = [*outputs]
        numbers = {id(x): i for i, x in enumerate(outputs)}
        self.plan, self.made = [], []
        for x in residuals:
            if id(x) not in places:
                if id(x) not in numbers:
                    numbers[id(x)] = len(every)
                    every.append(x)
                places[id(x)] = len(inputs) + len(self.made)
                self.made.append(numbers[id(x)])
            self.plan.append(places[id(x)])
        return tuple(every) or (torch.empty(0),)  # torch wants one

    def backward(self, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]) -> Any:
        """Gradients by hand; `saved` are the inputs, and what was made of the residuals."""
        return self.function.bwd([saved[i] for i in self.plan], cotangents, needs)

    def composed(
        self, inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients by the plain function."""
        chosen = [i for i, need in enumerate(needs) if need]
        moves = self.function.differentiable

        def outputs(*variables: Tensor) -> Tensors:
            found = self.function.pure(*with_leaves(inputs, chosen, variables))
            return found if moves is None else tuple(y for y, yes in zip(found, moves, strict=False) if yes)

        values, pull = torch.func.vjp(outputs, *[inputs[i] for i in chosen])[:2]
        given = cotangents if moves is None else [ct for ct, yes in zip(cotangents, moves, strict=True) if yes]
        cts = tuple(torch.zeros_like(y) if ct is None else ct for y, ct in zip(values, given, strict=True))
        found = dict(zip(chosen, pull(cts), strict=True))
        return [found.get(i) for i in range(len(inputs))]

    def scope(self) -> Any:
        """What axis names meant when it was called: backward runs on another thread, or wherever it is asked for."""
        if self.mesh is None or self.mesh is current_mesh():
            return contextlib.nullcontext()
        return scope(self.mesh)


class _Forward(Function):
    """`(run, *inputs) -> (*outputs, *residuals)` of which some are there already."""

    @staticmethod
    def forward(run: _Run, *inputs: Tensor) -> Tensors:
        return run.forward(inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        run: _Run = inputs[0]
        ctx.run = run
        ctx.save_for_backward(*inputs[1:], *[output[i] for i in run.made])
        moves = run.function.differentiable
        still = [] if moves is None else [y for y, yes in zip(output, moves, strict=False) if not yes]
        ctx.mark_non_differentiable(*still, *output[run.outputs :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        needs = ctx.needs_input_grad[1:]
        if run.function.trains is not None:
            needs = [bool(asked and can) for asked, can in zip(needs, run.function.trains, strict=True)]
        saved = [functorch.alive(x) for x in ctx.saved_tensors]
        if not any(needs):
            return (None,) * (1 + len(needs))
        inputs, cts = saved[: len(needs)], cotangents[: run.outputs]
        with run.scope():
            if functorch.inside_batching_or_forward() or any(ct is not None and functorch.batched(ct) for ct in cts):
                return (None, *run.composed(inputs, cts, needs))
            again = torch.is_grad_enabled()
            run.function.begin(again)
            if not again:
                return (None, *run.backward(saved, cts, needs))
            given = [ct is not None for ct in cts]
            present = [ct for ct in cts if ct is not None]
            found = iter(functorch.applied(_Backward, run, needs, given, *present, *saved))
            return (None, *(next(found) if need else None for need in needs))


class _Direct(_Forward):
    """The same outside of torch.func, where `apply` looks at the arguments of a function with a `setup_context`."""

    setup_context = Function.setup_context

    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: Tensor) -> Tensors:  # type: ignore[override]
        output = run.forward(inputs)
        _Forward.setup_context(ctx, (run, *inputs), output)
        return output


class _Backward(Function):
    """`(run, needs, given, *cotangents, *inputs, *made) -> gradients` of the inputs that need one."""

    @staticmethod
    def forward(run: _Run, needs: Sequence[bool], given: list[bool], *tensors: Tensor) -> Tensors:
        cts, saved = _separated(given, tensors)
        found = run.backward(saved, cts, needs)
        return own(
            [torch.zeros_like(x) if g is None else g for g, x, need in zip(found, saved, needs, strict=False) if need],
            tensors,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.run, ctx.needs, ctx.given = inputs[:3]
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        tensors = [functorch.alive(x) for x in ctx.saved_tensors]
        used = sum(ctx.given) + len(ctx.needs)  # what was made follows from the inputs
        moving = [i for i, x in enumerate(tensors[:used]) if x.is_floating_point() or x.is_complex()]

        def again(*variables: Tensor) -> Tensors:
            cts, inputs = _separated(ctx.given, with_leaves(tensors[:used], moving, variables))
            return tuple(g for g in run.composed(inputs, cts, ctx.needs) if g is not None)

        with run.scope():
            pull = torch.func.vjp(again, *[tensors[i] for i in moving])[1]
            found = dict(zip(moving, pull(tuple(cotangents)), strict=True))
        return (None, None, None, *(found.get(i) for i in range(len(tensors))))


for _function in (_Forward, _Backward):  # torch asks for it at every call
    setattr(_function.forward, "__signature__", inspect.signature(_function.forward))  # noqa: B010


def own(found: Sequence[Tensor], given: Sequence[Tensor]) -> Tensors:
    """Outputs of a Function, of which none is an input: what is both cannot be saved for a second derivative."""
    known = {id(x) for x in given}
    return tuple([g.view_as(g) if id(g) in known else g for g in found])


def _separated(given: Sequence[bool], tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
    """Cotangents, None where there was none, and what comes after them."""
    rest: Iterator[Tensor] = iter(tensors)
    return [next(rest) if yes else None for yes in given], list(rest)
