"""Runs a function again in backward: what autograd saves in its first run are numbers, not tensors.

`torch.utils.checkpoint` does the same, but loads torch's compiler, and does not rewind generators among the arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import autograd
from shardfn.stages.refusals import other_numbers, other_result, writes
from shardfn.stages.replay import Form, RngAndAutocast, Sample, form_of
from shardfn.stages.signature import Signature

Run = Callable[[Sequence[Tensor]], Any]


class _Keep(torch.autograd.Function):
    """Keeps tensors as autograd keeps them, so that the hooks around see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise AssertionError("nothing depends on it")


class Recomputed:
    """One call of a function: how to run it again, and what that has given so far.

    Attributes:
        count: how many tensors autograd saved in the first run.
        again: those of the second run that backward has not asked for yet, with their versions.
        sample: some numbers of the first run's result, if they are compared.
    """

    def __init__(
        self,
        signature: Signature,
        run: Run,
        tensors: Sequence[Tensor],
        surroundings: RngAndAutocast,
        contexts: Sequence[Any],
    ) -> None:
        self.signature, self.run, self.surroundings, self.contexts = signature, run, surroundings, list(contexts)
        places = {id(x): i for i, x in reversed(list(enumerate(tensors)))}
        unique = sorted(set(places.values()))  # a tensor may be given twice
        self.at = [unique.index(places[id(x)]) for x in tensors]
        tensors = [tensors[i] for i in unique]
        self.needs = [x.requires_grad for x in tensors]
        self.count = 0
        self.again: dict[int, tuple[Tensor, int]] = {}
        self.sample: Sample | None = None
        self.form: Form | None = None  # of the first run's result, once it has ended
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        self.kept: Any = _Keep.apply(anchor, *tensors)  # type: ignore[no-untyped-call]

    def first(self, tensors: Sequence[Tensor], compares: bool) -> Any:
        """The function's result."""
        versions = _versions(tensors)
        with contextlib.ExitStack() as stack:
            if self.contexts:
                stack.enter_context(self.contexts.pop(0))
            stack.enter_context(autograd.hooked(self._pack, self._unpack))
            result = self.run(tensors)
        if _versions(tensors) != versions:
            raise RuntimeError(writes(self.signature))
        self.form, outputs = form_of(result, tensors)
        self.differentiable = [y.requires_grad for y in outputs]
        self.again.clear()  # for a gradient that the function itself took
        if compares:
            order = self.form.order
            self.sample = Sample([y.detach() if k >= 0 else None for y, k in zip(outputs, order, strict=True)])
        return result

    def _pack(self, x: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def _unpack(self, number: int) -> Tensor:
        if number not in self.again:
            self._second()
        x, version = self.again.pop(number)
        if x._version != version:
            raise RuntimeError(autograd.modified(x, version))
        return x

    def _second(self) -> None:
        """Runs the function again, and keeps what autograd saves."""
        unique = [
            x.detach().requires_grad_(needs) if needs else x.detach()
            for x, needs in zip(self.kept.grad_fn.saved_tensors, self.needs, strict=True)
        ]
        tensors = [unique[i] for i in self.at]
        found: dict[int, tuple[Tensor, int]] = {}

        def keep(x: Tensor) -> int:
            found[len(found)] = x.detach(), x._version
            return len(found) - 1

        with contextlib.ExitStack() as stack:
            stack.enter_context(self.surroundings.again())
            stack.enter_context(torch.enable_grad())
            if self.contexts:  # of a policy, which keeps results for one run
                stack.enter_context(self.contexts.pop())
            stack.enter_context(autograd.hooked(keep, lambda number: found[number][0]))
            result = self.run(tensors)
        self.again = found
        if self.form is None:
            return
        form, outputs = form_of(result, tensors)
        if not self.form.same(form, False):
            raise RuntimeError(other_result(self.signature, str(self.form), str(form)))
        for i, (y, had_gradient) in enumerate(zip(outputs, self.differentiable, strict=True)):
            if y.requires_grad is not had_gradient:
                words = f"output {i} with a gradient", "without one"
                raise RuntimeError(other_result(self.signature, *(words if had_gradient else words[::-1])))
        if self.sample is not None:
            off, self.sample = self.sample.off(outputs), None
            if off is not None:
                raise RuntimeError(other_numbers(self.signature, off))
        if len(found) != self.count:
            first, then = (f"what saves {n} tensors for its gradient" for n in (self.count, len(found)))
            raise RuntimeError(other_result(self.signature, first, then))


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]
