"""Functions with a first derivative written by hand, and every other one by composition.

What a kernel, a ring or a schedule does faster than autograd would is a forward and a backward of its own; a second
derivative, a tangent or a batch goes through the plain function that both mean. One meaning, two speeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardfn import compat
from shardfn.mesh import current_mesh, scope

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rule:
    """A function of tensors, said twice.

    Attributes:
        pure: `(*inputs) -> outputs`, of ops that every transform goes through.
        forward: `(*inputs) -> (outputs, kept)`: the same outputs, and tensors for backward. Runs without autograd.
        backward: `(inputs, outputs, kept, cotangents, needs) -> gradients`, None for an input that has none. A
            cotangent is None where nobody uses the output; `needs` says which gradients are asked for.
    """

    pure: Callable[..., Tensors]
    forward: Callable[..., tuple[Tensors, Tensors]]
    backward: Callable[..., Sequence[Tensor | None]]

    def __call__(self, *inputs: Tensor) -> Tensors:
        """The outputs; all ranks take the same way, by the transforms around them."""
        if torch.compiler.is_compiling() or compat.inside_batching_or_forward():
            return self.pure(*inputs)
        asked = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if not asked and not compat.inside_transform():
            return self.forward(*inputs)[0]
        call = _Call(self)
        found: Tensors = compat.applied(_Forward, call, *inputs)
        return found[: call.outputs]


class _Call:
    """One call of a rule; no pytree node, so transforms pass it through."""

    __slots__ = ("mesh", "outputs", "rule")

    def __init__(self, rule: Rule) -> None:
        self.rule, self.outputs, self.mesh = rule, 0, current_mesh()

    def scope(self) -> Any:
        """What axis names meant when it was called: backward runs on another thread, or wherever it is asked for."""
        if self.mesh is None or self.mesh is current_mesh():
            return contextlib.nullcontext()
        return scope(self.mesh)


class _Forward(Function):
    """`(call, *inputs) -> (*outputs, *kept)`; how many outputs there are is entered in the call."""

    @staticmethod
    def forward(call: _Call, *inputs: Tensor) -> Tensors:
        outputs, kept = call.rule.forward(*inputs)
        call.outputs = len(outputs)
        return (*outputs, *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, ctx.outputs = inputs[0], inputs[0].outputs
        ctx.inputs = len(inputs) - 1
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.mark_non_differentiable(*output[ctx.outputs :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        with ctx.call.scope():
            return _Forward._backward(ctx, cotangents)

    @staticmethod
    def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        rule: Rule = ctx.call.rule
        every = [compat.alive(x) for x in ctx.saved_tensors]
        inputs, made = every[: ctx.inputs], every[ctx.inputs :]
        needs = ctx.needs_input_grad[1:]
        cts = cotangents[: ctx.outputs]
        if compat.inside_batching_or_forward() or any(ct is not None and compat.batched(ct) for ct in cts):
            return (None, *_pure_backward(rule, needs, inputs, cts))
        if not torch.is_grad_enabled():
            found = rule.backward(inputs, made[: ctx.outputs], made[ctx.outputs :], cts, needs)
            return (None, *found)
        given = [ct is not None for ct in cts]
        sizes = len(inputs), ctx.outputs
        present = [ct for ct in cts if ct is not None]
        grads = iter(compat.applied(_Backward, ctx.call, needs, given, sizes, *present, *inputs, *made))
        return (None, *(next(grads) if need else None for need in needs))


class _Backward(Function):
    """`(call, needs, given, sizes, *cotangents, *inputs, *outputs, *kept) -> gradients` of the inputs that need one."""

    @staticmethod
    def forward(call: _Call, needs: Sequence[bool], given: list[bool], sizes: Any, *tensors: Tensor) -> Tensors:
        cts, inputs, made = _apart(given, sizes, tensors)
        found = call.rule.backward(inputs, made[: sizes[1]], made[sizes[1] :], cts, needs)
        return own(
            [torch.zeros_like(x) if g is None else g for g, x, need in zip(found, inputs, needs, strict=True) if need],
            tensors,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, ctx.needs, ctx.given, ctx.sizes = inputs[:4]
        ctx.save_for_backward(*inputs[4:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [compat.alive(x) for x in ctx.saved_tensors]
        used = len(tensors) - len(_apart(ctx.given, ctx.sizes, tensors)[2])  # what was kept follows from the inputs
        moving = [i for i, x in enumerate(tensors[:used]) if x.is_floating_point() or x.is_complex()]

        def again(*variables: Tensor) -> Tensors:
            mixed = list(tensors)
            for i, variable in zip(moving, variables, strict=True):
                mixed[i] = variable
            cts, inputs, _ = _apart(ctx.given, ctx.sizes, mixed)
            return tuple(g for g in _pure_backward(ctx.call.rule, ctx.needs, inputs, cts) if g is not None)

        with ctx.call.scope():
            pull = torch.func.vjp(again, *[tensors[i] for i in moving])[1]
            found = dict(zip(moving, pull(tuple(cotangents)), strict=True))
        return (None, None, None, None, *(found.get(i) for i in range(len(tensors))))


def own(found: Sequence[Tensor], given: Sequence[Tensor]) -> Tensors:
    """Outputs of a Function, of which none is an input: what is both cannot be saved for a second derivative."""
    known = {id(x) for x in given}
    return tuple([g.view_as(g) if id(g) in known else g for g in found])


def _apart(given: list[bool], sizes: tuple[int, int], tensors: Sequence[Tensor]) -> Any:
    """Cotangents, None where there was none; inputs; and what forward made."""
    rest = iter(tensors)
    cts = [next(rest) if yes else None for yes in given]
    inputs = [next(rest) for _ in range(sizes[0])]
    return cts, inputs, list(rest)


def _pure_backward(
    rule: Rule, needs: Sequence[bool], inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    chosen = [i for i, need in enumerate(needs) if need]

    def outputs(*variables: Tensor) -> Tensors:
        mixed = list(inputs)
        for i, variable in zip(chosen, variables, strict=True):
            mixed[i] = variable
        return rule.pure(*mixed)

    values, pull = torch.func.vjp(outputs, *[inputs[i] for i in chosen])[:2]
    cts = tuple(torch.zeros_like(y) if ct is None else ct for y, ct in zip(values, cotangents, strict=True))
    found = dict(zip(chosen, pull(cts), strict=True))
    return [found.get(i) for i in range(len(inputs))]
