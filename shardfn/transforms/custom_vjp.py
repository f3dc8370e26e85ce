"""Functions with a hand-written first derivative, whose other derivatives are those of a plain function.

A fused kernel, a ring or a pipeline schedule has its own forward and backward, faster than autograd's. Second
derivatives, forward mode and vmap use a plain function with the same result.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardfn.compat import functorch
from shardfn.mesh.scope import current_mesh, scope
from shardfn.shards.partition import with_leaves

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class custom_vjp:
    """A function of tensors with a hand-written derivative, as `jax.custom_vjp`.

    Transforms that need more than a first derivative by reverse mode go through `pure`.

    Attributes:
        pure: `(*inputs) -> outputs`.
        fwd: `(*inputs) -> (outputs, residuals)`: tuples of tensors. Residuals may be inputs or outputs.
        bwd: `(residuals, cotangents, needs) -> gradients`, one for each input: None if it needs none, or is zero. A
            cotangent is None if the output is not used.
    """

    pure: Callable[..., Tensors]
    fwd: Callable[..., tuple[Tensors, Tensors]]
    bwd: Callable[..., Sequence[Tensor | None]]

    def __call__(self, *inputs: Tensor) -> Tensors:
        """The outputs. The path depends only on the transforms around the call, so all ranks take the same one."""
        if torch.compiler.is_compiling() or functorch.inside_batching_or_forward():
            return self.pure(*inputs)
        needed = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if not needed and not functorch.inside_transform():
            return self.fwd(*inputs)[0]
        run = _VjpCall(self)
        tensors: Tensors = functorch.applied(_Forward if functorch.inside_transform() else _Direct, run, *inputs)
        return tensors[: run.outputs]


class _VjpCall:
    """One call of a `custom_vjp`; not a pytree node, so transforms pass it through unchanged.

    Attributes:
        plan: index of each residual among the inputs, followed by the tensors in `made`.
        made: indices of the saved tensors among the outputs of `forward`.
    """

    __slots__ = ("function", "made", "mesh", "outputs", "plan")

    def __init__(self, function: custom_vjp) -> None:
        self.function, self.mesh = function, current_mesh()
        self.outputs, self.plan, self.made = 0, list[int](), list[int]()

    def forward(self, inputs: Tensors) -> Tensors:
        """The outputs, followed by residuals that are neither outputs nor inputs."""
        outputs, residuals = self.function.fwd(*inputs)
        self.outputs = len(outputs)
        places = {id(x): i for i, x in enumerate(inputs)}
        tensors = [*outputs]
        numbers = {id(x): i for i, x in enumerate(outputs)}
        self.plan, self.made = [], []
        for x in residuals:
            if id(x) not in places:
                if id(x) not in numbers:
                    numbers[id(x)] = len(tensors)
                    tensors.append(x)
                places[id(x)] = len(inputs) + len(self.made)
                self.made.append(numbers[id(x)])
            self.plan.append(places[id(x)])
        return tuple(tensors) or (torch.empty(0, device="cpu"),)  # a Function must return a tensor

    def backward(self, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]) -> Any:
        """Gradients by `bwd`; `saved` are the inputs, and the tensors in `made`."""
        return self.function.bwd([saved[i] for i in self.plan], cotangents, needs)

    def composed(
        self, inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients by differentiating `pure`."""
        chosen = [i for i, need in enumerate(needs) if need]

        def outputs(*variables: Tensor) -> Tensors:
            return self.function.pure(*with_leaves(inputs, chosen, variables))

        values, pull = torch.func.vjp(outputs, *[inputs[i] for i in chosen])[:2]
        cts = tuple(torch.zeros_like(y) if ct is None else ct for y, ct in zip(values, cotangents, strict=True))
        results = dict(zip(chosen, pull(cts), strict=True))
        return [results.get(i) for i in range(len(inputs))]

    def scope(self) -> Any:
        """A context with the mesh of the call: backward may run on a different thread, or in a different scope."""
        if self.mesh is None or self.mesh is current_mesh():
            return contextlib.nullcontext()
        return scope(self.mesh)


class _Forward(Function):
    """Autograd's function `(run, *inputs) -> (*outputs, *residuals)`, without residuals that are inputs or outputs."""

    @staticmethod
    def forward(run: _VjpCall, *inputs: Tensor) -> Tensors:
        return run.forward(inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        run: _VjpCall = inputs[0]
        ctx.run = run
        ctx.save_for_backward(*inputs[1:], *[output[i] for i in run.made])
        ctx.mark_non_differentiable(*output[run.outputs :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        run: _VjpCall = ctx.run
        needs = ctx.needs_input_grad[1:]
        saved = [functorch.alive(x) for x in ctx.saved_tensors]
        if not any(needs):
            return (None,) * (1 + len(needs))
        inputs, cts = saved[: len(needs)], cotangents[: run.outputs]
        with run.scope():
            if functorch.inside_batching_or_forward() or any(ct is not None and functorch.batched(ct) for ct in cts):
                return (None, *run.composed(inputs, cts, needs))
            if not torch.is_grad_enabled():
                return (None, *run.backward(saved, cts, needs))
            is_present = [ct is not None for ct in cts]
            present = [ct for ct in cts if ct is not None]
            gradients = iter(functorch.applied(_Backward, run, needs, is_present, *present, *saved))
            return (None, *(next(gradients) if need else None for need in needs))


class _Direct(_Forward):
    """`_Forward` outside of torch.func, where `apply` inspects the arguments of a Function with `setup_context`."""

    setup_context = Function.setup_context

    @staticmethod
    def forward(ctx: Any, run: _VjpCall, *inputs: Tensor) -> Tensors:  # type: ignore[override]
        output = run.forward(inputs)
        _Forward.setup_context(ctx, (run, *inputs), output)
        return output


class _Backward(Function):
    """Autograd's function `(run, needs, is_present, *cotangents, *inputs, *made) -> gradients` of chosen inputs."""

    @staticmethod
    def forward(run: _VjpCall, needs: Sequence[bool], is_present: list[bool], *tensors: Tensor) -> Tensors:
        cts, saved = _separated(is_present, tensors)
        gs = run.backward(saved, cts, needs)
        return without_input_aliases(
            [torch.zeros_like(x) if g is None else g for g, x, need in zip(gs, saved, needs, strict=False) if need],
            tensors,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.run, ctx.needs, ctx.given = inputs[:3]
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        run: _VjpCall = ctx.run
        tensors = [functorch.alive(x) for x in ctx.saved_tensors]
        count = sum(ctx.given) + len(ctx.needs)  # without `made`, which is computed from the inputs
        indices = [i for i, x in enumerate(tensors[:count]) if x.is_floating_point() or x.is_complex()]

        def composed_again(*variables: Tensor) -> Tensors:
            cts, inputs = _separated(ctx.given, with_leaves(tensors[:count], indices, variables))
            return tuple(g for g in run.composed(inputs, cts, ctx.needs) if g is not None)

        with run.scope():
            pull = torch.func.vjp(composed_again, *[tensors[i] for i in indices])[1]
            gradients = dict(zip(indices, pull(tuple(cotangents)), strict=True))
        return (None, None, None, *(gradients.get(i) for i in range(len(tensors))))


for _function in (_Forward, _Backward):  # torch asks for the signature at every call
    setattr(_function.forward, "__signature__", inspect.signature(_function.forward))  # noqa: B010


def without_input_aliases(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensors:
    """Outputs of a Function, with views of those that are inputs, which could not be saved for a second derivative."""
    ids = {id(x) for x in inputs}
    return tuple([g.view_as(g) if id(g) in ids else g for g in outputs])


def _separated(is_present: Sequence[bool], tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
    """Splits tensors into cotangents, None where `is_present` is False, and the tensors after them."""
    rest: Iterator[Tensor] = iter(tensors)
    return [next(rest) if present else None for present in is_present], list(rest)
