"""Recomputes a function in backward: in the first forward, hooks save an index in place of each tensor.

`torch.utils.checkpoint` does the same, but imports torch's compiler, and rewinds no generators among the arguments.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import autograd
from shardfn.stages.refusals import other_numbers, other_result, writes
from shardfn.stages.replay import ResultSignature, RngAndAutocast, SampledNumbers, form_of, shape_of
from shardfn.stages.signature import Signature

Run = Callable[[Sequence[Tensor]], Any]
Kind = tuple[torch.Size, torch.dtype]


class _Keep(torch.autograd.Function):
    """Keeps the inputs by `save_for_backward`, so that the surrounding hooks, such as offloading, apply to them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise AssertionError("nothing depends on it")


class _Saved:
    """The placeholder that hooks save for a tensor; after a run, numbered among the placeholders still alive."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Recomputed:
    """One call of a recomputed function: its inputs and state, and the tensors of its second forward.

    A run may also make graphs that are dropped before it ends, such as a probe in the first run alone. So saved tensors
    of the two runs are matched by their order among those that autograd still holds after each run.

    Attributes:
        saved: placeholders of the tensors that autograd saves while the first run is in progress.
        kinds: shapes and dtypes of the tensors that autograd still holds after the first run.
        operations: the first run's operations. They must equal the second's: the graph of the first run reads tensors
            that the second has saved.
        again: saved tensors of the second run, with their versions, that backward has not read yet.
        sample: some values of the first run's result, if runs are compared.
    """

    def __init__(
        self,
        signature: Signature,
        run: Run,
        tensors: Sequence[Tensor],
        rng_and_autocast: RngAndAutocast,
        contexts: Sequence[Any],
        backward_context: Callable[[], Any],
    ) -> None:
        self.signature, self.run, self.surroundings, self.contexts = signature, run, rng_and_autocast, list(contexts)
        self.here, self.kernels = backward_context, [allowed() for allowed, _ in _KERNELS]
        places = {id(x): i for i, x in reversed(list(enumerate(tensors)))}
        unique = sorted(set(places.values()))  # a tensor may be given twice
        self.at = [unique.index(places[id(x)]) for x in tensors]
        tensors = [tensors[i] for i in unique]
        self.needs = [x.requires_grad for x in tensors]
        self.saved: list[weakref.ref[_Saved]] = []
        self.kinds: list[Kind] = []
        self.operations: list[autograd.Operation] = []
        self.outside: set[Any] = set()  # nodes of tensors that the function closes over
        self.again: dict[int, tuple[Tensor, int]] = {}
        self.sample: SampledNumbers | None = None
        self.form: ResultSignature | None = None  # of the first run's result, once it has ended
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        # Detached: a tensor that needs a gradient would come back without its subclass.
        self.kept: Any = _Keep.apply(anchor, *[x.detach() for x in tensors])  # type: ignore[no-untyped-call]

    def first(self, tensors: Sequence[Tensor], compares: bool) -> Any:
        """Runs the function under hooks that save placeholders; returns its result."""
        versions, last = autograd.versions_of(tensors), autograd.last_node()
        with contextlib.ExitStack() as stack:
            if self.contexts:
                stack.enter_context(self.contexts.pop(0))
            stack.enter_context(self.surroundings.drawing(is_replay=False))
            stack.enter_context(autograd.hooked(self._pack, self._unpack))
            result = self.run(tensors)
        kinds, self.kinds = self.kinds, []
        for number, saved in _live_placeholders(self.saved):
            self.kinds.append(kinds[saved.number])
            saved.number = number
        self.saved.clear()
        if autograd.versions_of(tensors) != versions:
            raise RuntimeError(writes(self.signature))
        self.form, outputs = form_of(result, tensors)
        self.differentiable = [y.requires_grad for y in outputs]
        self.operations = autograd.operations(outputs, tensors, last, self.outside)
        self.again.clear()  # left from a gradient that the function took itself in its first run
        if compares:
            order = self.form.order
            self.sample = SampledNumbers([y.detach() if k >= 0 else None for y, k in zip(outputs, order, strict=True)])
        return result

    def _pack(self, x: Tensor) -> _Saved:
        saved = _Saved(len(self.saved))
        self.saved.append(weakref.ref(saved))
        self.kinds.append((shape_of(x), x.dtype))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.number not in self.again:  # for a gradient that does not come through the call's outputs
            self.second()
        x, version = self.again.pop(saved.number)
        if x._version != version:
            raise RuntimeError(autograd.modified(x, version))
        return x

    def second(self) -> None:
        """Runs the function again, keeps its saved tensors, and raises RuntimeError if the runs differ."""
        unique = [
            x.detach().requires_grad_(needs) if needs else x.detach()
            for x, needs in zip(self.kept.grad_fn.saved_tensors, self.needs, strict=True)
        ]
        tensors = [unique[i] for i in self.at]
        last = autograd.last_node()
        kept: list[tuple[Tensor, int]] = []
        references: list[weakref.ref[_Saved]] = []

        def keep(x: Tensor) -> _Saved:
            saved = _Saved(len(kept))
            references.append(weakref.ref(saved))
            kept.append((x.detach(), x._version))
            return saved

        with contextlib.ExitStack() as stack:
            stack.enter_context(self.here())
            stack.enter_context(self.surroundings.restored_state())
            stack.enter_context(_allowing(self.kernels))
            stack.enter_context(torch.enable_grad())
            if self.contexts:  # of a policy, which keeps results for one run
                stack.enter_context(self.contexts.pop())
            stack.enter_context(self.surroundings.drawing(is_replay=True))
            stack.enter_context(autograd.hooked(keep, lambda saved: kept[saved.number][0]))
            result = self.run(tensors)
        if self.form is None:  # the first run has not ended, and asks for what it has saved so far
            self.again = dict(enumerate(kept))
            return
        self.again = {number: kept[saved.number] for number, saved in _live_placeholders(references)}
        form, outputs = form_of(result, tensors)
        if not self.form.same(form):
            raise RuntimeError(other_result(self.signature, str(self.form), str(form)))
        for i, (y, had_gradient) in enumerate(zip(outputs, self.differentiable, strict=True)):
            if y.requires_grad is not had_gradient:
                first, then = ("with", "without") if had_gradient else ("without", "with")
                raise RuntimeError(other_result(self.signature, f"output {i} {first} a gradient", f"{then} one"))
        if self.sample is not None:
            off, self.sample = self.sample.off(outputs), None
            if off is not None:
                raise RuntimeError(other_numbers(self.signature, off))
        kinds = [(shape_of(x), x.dtype) for x, _ in self.again.values()]
        if kinds != self.kinds:
            first, then = (f"what saves {_kinds_text(saved)} for its gradient" for saved in (self.kinds, kinds))
            raise RuntimeError(other_result(self.signature, first, then))
        operations = autograd.operations(outputs, tensors, last, self.outside)
        if operations != self.operations:
            both = itertools.zip_longest(self.operations, operations, fillvalue=("nothing", ()))
            index, (before, after) = next((index, two) for index, two in enumerate(both) if two[0] != two[1])
            first, then = (f"operation {index}, {name} of {', '.join(operands)}" for name, operands in (before, after))
            raise RuntimeError(other_result(self.signature, first, then))


# Backward may run outside of a torch.nn.attention.sdpa_kernel context that was around forward. These flags are global
# to all threads and devices.
_KERNELS: list[tuple[Callable[[], bool], Callable[[bool], None]]] = [
    (getattr(torch.backends.cuda, f"{kind}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{kind}_sdp"))
    for kind in ("flash", "mem_efficient", "math", "cudnn")
]


@contextlib.contextmanager
def _allowing(kernels: Sequence[bool]) -> Iterator[None]:
    """A context in which attention may use these kernels, in the order of `_KERNELS`."""
    changed = [
        (allow, enabled)
        for (allowed, allow), enabled in zip(_KERNELS, kernels, strict=True)
        if allowed() is not enabled
    ]
    for allow, enabled in changed:
        allow(enabled)
    try:
        yield
    finally:
        for allow, enabled in changed:
            allow(not enabled)


def _live_placeholders(saved: Sequence[weakref.ref[_Saved]]) -> Iterator[tuple[int, _Saved]]:
    """The placeholders that autograd still holds, numbered in the order of saving."""
    return enumerate(x for reference in saved if (x := reference()) is not None)


def _kinds_text(kinds: Sequence[Kind]) -> str:
    common = 3
    shown = ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in kinds[:common])
    return f"{len(kinds)} tensors ({shown}{', ...' * (len(kinds) > common)})"
