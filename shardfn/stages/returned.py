"""Checks that a function leaves its lent parameters as they were, and says what it did to them otherwise.

Parameters are lent to a function for one run. It may assign another dtype or memory order to `.data`, as
`module.float()` does, and may say that one needs no gradient: this ends with the call. Anything else that it does to
them would last in a process that holds them whole, and is lost here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from shardfn.check.bits import bits, whole
from shardfn.check.callsites import quietly
from shardfn.compat import autograd, functorch
from shardfn.debugging import debugging
from shardfn.mesh.planned import planned
from shardfn.shards.layout import Layout
from shardfn.stages.decoding import Decoding
from shardfn.stages.refusals import writes
from shardfn.stages.replay import kind_of
from shardfn.stages.signature import GatherPlan, Signature

Parameters = Sequence[Sequence[Tensor]]


class Returned:
    """The parameters of one run, as they are before it.

    Attributes:
        at: the address of each.
        held: the form of each, and whether it needs a gradient.
        looked: called after their bytes have been compared; None if they are not compared.
        twins: if they are, other tensors of the same memory, with their checksums in `before`. A write through `.data`
            changes no version counter.
    """

    __slots__ = ("at", "before", "decoding", "held", "looked", "parameters", "plan", "signature", "twins")

    def __init__(
        self,
        signature: Signature,
        plan: GatherPlan,
        parameters: Parameters,
        held: Sequence[Any],
        decoding: Decoding | None,
        looked: Callable[[], object] | None,
    ) -> None:
        self.signature, self.plan, self.parameters, self.decoding = signature, plan, parameters, decoding
        self.at, self.held, self.looked = _at(parameters), held, looked
        self.twins = [p.detach() for ps in parameters for p in ps] if looked else []
        self.before = sums_of(self.twins) if looked else []

    def changed(self) -> bool:
        """Whether the function changed the tensors themselves."""
        return held(self.parameters) != self.held or _at(self.parameters) != self.at

    def check(self, changed: bool, originals: Callable[[], Parameters]) -> None:
        """Raises RuntimeError if numbers have changed, or something was attached to a parameter that would be lost.

        Args:
            changed: the result of `changed`.
            originals: makes the original parameters again.
        """
        params = [p for ps in self.parameters for p in ps]
        if changed:
            for k, (p, original) in enumerate(zip(params, (q for qs in originals() for q in qs), strict=True)):
                if not keeps_numbers(p, original):
                    raise RuntimeError(_assigned(self.signature, self.path(k), p, original))
        if self.looked is not None:
            if (written := first_written(self.twins, self.before)) is not None:
                raise RuntimeError(_written(self.signature, self.path(written)))
            for k in range(len(self.twins)):
                if params[k].grad is not None:
                    raise RuntimeError(
                        f"{self.signature}: its function leaves a gradient in .grad of {self.path(k)}, which is lent "
                        f"to it for one run: it would be lost. Return it, or let the loss depend on what it is the "
                        f"gradient of"
                    )
        for decoded in self.decoding.each if self.decoding is not None else ():
            if not keeps_numbers(decoded.parameter, decoded.twin):
                raise RuntimeError(
                    _assigned(self.signature, "a parameter in few bits", decoded.parameter, decoded.twin)
                )
        if self.looked is not None and self.decoding is not None and not self.decoding.intact():
            raise RuntimeError(_written(self.signature, "a parameter in few bits"))
        if self.looked is not None:
            self.looked()
        self.twins.clear()  # a loan counts the references to that memory

    def check_hooks(self) -> None:
        """As `check`, after the backward of a run, in which hooks of the function may have run."""
        twins = iter(self.twins)
        self.check(self.changed(), lambda: [[next(twins) for _ in ps] for ps in self.parameters])

    def refuse_shared(self) -> None:
        """Raises RuntimeError if the function changed what autograd does with a parameter that an earlier call shares.

        That is, whether it needs a gradient or has a hook.
        """
        for k, (after, before) in enumerate(zip(held(self.parameters), self.held, strict=True)):
            if after[-2:] != before[-2:]:
                raise RuntimeError(
                    f"{self.signature}: its function calls requires_grad_() on a parameter, or puts a hook on it "
                    f"({self.path(k)}), in this call and not in an earlier one whose gradient is still to come. Both "
                    f"were lent the same tensor: do so in every call, or use p.detach() in this one"
                )

    def path(self, number: int) -> str:
        """The quoted path of a parameter in the whole tree."""
        return repr([entry.path for gather in self.plan.each for entry in gather.layout.entries][number])


class Snapshot:
    """Parameters as they are before a function runs, to compare with what they are after it.

    Attributes:
        passed: called where nothing has changed.
        twins: other tensors of the same memory, with their checksums in `before`. A write through `.data` changes no
            version counter.
    """

    def __init__(
        self, signature: Signature, layouts: Iterable[Layout], parameters: Parameters, passed: Callable[[], object]
    ) -> None:
        self.signature, self.passed = signature, passed
        self.paths = [repr(entry.path) for layout in layouts for entry in layout.entries]
        self.parameters = list[Tensor]()
        self.twins, self.before, self.versions = list[Tensor](), list[Any](), list[int]()
        for ps in parameters:
            for p in ps:
                self.add(p)

    def add(self, p: Tensor) -> None:
        """Adds a parameter, decoded, if it is none of those that have paths."""
        with functorch.outside_transforms():
            twin = functorch.unwrapped(p).detach()
            self.parameters.append(p)
            self.twins.append(twin)
            self.before += sums_of([twin])
            self.versions += autograd.versions_of([twin])

    def check(self) -> None:
        """Compares.

        Raises:
            RuntimeError: the function wrote into a parameter, or put another tensor into its `.data`.
        """
        if autograd.versions_of(self.twins) != self.versions:
            raise RuntimeError(writes(self.signature))
        with functorch.outside_transforms():
            paths = [*self.paths, *["a parameter in few bits"] * (len(self.twins) - len(self.paths))]
            for path, p, twin in zip(paths, self.parameters, self.twins, strict=True):
                if not keeps_numbers(p, twin):
                    raise RuntimeError(_assigned(self.signature, path, p, twin))
            number = first_written(self.twins, self.before)
            if number is not None:
                raise RuntimeError(_written(self.signature, paths[number]))
        self.passed()


def snapshot(
    signature: Signature, layouts: Iterable[Layout], parameters: Parameters, compared: set[Any], kind: Any
) -> Snapshot | None:
    """The parameters before a call of a kind that has not been `compared`; None for others, and without memory."""
    if kind in compared and not debugging.memory:
        return None
    if planned() or any(type(functorch.unwrapped(p)) is not Tensor for ps in parameters for p in ps[:1]):
        return None
    return Snapshot(signature, layouts, parameters, functools.partial(compared.add, kind))


def held(parameters: Parameters) -> list[Any]:
    """The form of each parameter, whether it needs a gradient, and whether it has no hooks."""
    return [(p.dtype, p.shape, p.stride(), p.requires_grad, p._backward_hooks is None) for ps in parameters for p in ps]


def _at(parameters: Parameters) -> list[int]:
    return [p.data_ptr() for ps in parameters for p in ps]


def keeps_numbers(now: Any, before: Tensor) -> bool:
    """Whether `now` has the numbers of `before`, converted to its own dtype; strides may differ."""
    if now is before:
        return True
    if not isinstance(now, Tensor) or now.shape != before.shape or now.device != before.device:
        return False
    new, old = functorch.unwrapped(now.detach()), functorch.unwrapped(before.detach())
    if new.data_ptr() == old.data_ptr() and (new.dtype, new.stride()) == (old.dtype, old.stride()):
        return new.is_conj() is old.is_conj() and new.is_neg() is old.is_neg()
    if new.shape != old.shape or new.is_floating_point() is not old.is_floating_point():
        return False
    rounded = old.to(new.dtype)
    return bool(((new == rounded) | ((new != new) & (rounded != rounded))).all())  # or both nan


def sums_of(tensors: Iterable[Tensor]) -> list[Any]:
    """A checksum of the bits of each tensor; for tensors on an accelerator it stays there."""
    with quietly():
        return [bits(x) for x in tensors]


def first_written(tensors: Sequence[Tensor], before: Sequence[Any]) -> int | None:
    """Index of the first of these tensors whose bits have changed; None if none have."""
    pairs = zip(whole(sums_of(tensors)), whole(before), strict=True)
    return next((k for k, (now, then) in enumerate(pairs) if now != then), None)


def _assigned(signature: Signature, path: str, now: Tensor, before: Tensor) -> str:
    """The message for another tensor in `.data`."""
    was, is_now = (kind_of(x.dtype, x.shape) for x in (before, now))
    kinds = "other numbers" if was == is_now else f"{was} before, {is_now} now"
    return (
        f"{signature}: its function puts something else into .data of {path} ({kinds}). Parameters are lent to it for "
        f"one run, after which that would be lost. It may assign the same numbers in another dtype or memory format. "
        f"Let it compute a new tensor, and change parameters outside of stages"
    )


def _written(signature: Signature, path: str) -> str:
    """The message for a write past autograd."""
    return (
        f"{signature}: its function writes into {path} past autograd, through .data, numpy, an in-place collective or "
        f"a kernel of its own. Parameters are lent to it, a gathered copy or the shard itself, and what it writes "
        f"would be lost, or not, by the strategy: let it compute a new tensor, and change parameters outside of stages"
    )
