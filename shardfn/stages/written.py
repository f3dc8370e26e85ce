"""Checks that a stage's function does not change its parameters.

A function may assign the same values in a different dtype or memory order to `.data`, as `module.float()` does: that
has no effect after the call. It may not assign different values: these would persist in plain PyTorch, but parameters
of a stage are temporary gathered copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from shardfn.check.bits import bits, to_ints
from shardfn.check.callsites import quietly
from shardfn.compat import autograd, dispatch, functorch, modes
from shardfn.debugging import debugging
from shardfn.mesh.planned import planned
from shardfn.shards.layout import Layout
from shardfn.stages.refusals import writes
from shardfn.stages.replay import tensor_text
from shardfn.stages.signature import Signature

Parameters = Sequence[Sequence[Tensor]]


class Snapshot:
    """The parameters before a function runs, with checksums, to be compared after it.

    Attributes:
        passed: called after a check that found no change.
        twins: aliases of the parameters, which stay if the function replaces a parameter's `.data`.
        before: checksums of the twins, as a write through `.data` changes no version counter.
        versions: version counters of the twins.
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
        """Adds a parameter; those added after the first ones are decoded parameters, which have no paths."""
        with functorch.outside_transforms(), modes.policies_unseen():
            twin = functorch.unwrapped(p).detach()
            self.parameters.append(p)
            self.twins.append(twin)
            self.before += sums_of([twin])
            self.versions += autograd.versions_of([twin])

    def check(self) -> None:
        """Compares the parameters with the snapshot.

        Raises:
            RuntimeError: the function wrote into a parameter, or assigned a different tensor to its `.data`.
        """
        paths = [*self.paths, *["a parameter in few bits"] * (len(self.twins) - len(self.paths))]
        with functorch.outside_transforms(), modes.policies_unseen():
            if autograd.versions_of(self.twins) != self.versions:
                number = first_written(self.twins, self.before)
                raise RuntimeError(writes(self.signature, None if number is None else paths[number]))
            for path, p, twin in zip(paths, self.parameters, self.twins, strict=True):
                if not keeps_numbers(functorch.unwrapped(p), twin):
                    raise RuntimeError(_assigned(self.signature, path, p, twin))
            number = first_written(self.twins, self.before)
            if number is not None:
                raise RuntimeError(_write_message(self.signature, paths[number]))
        self.passed()


def snapshot(
    signature: Signature, layouts: Iterable[Layout], parameters: Parameters, compared: set[Any], kind: Any
) -> Snapshot | None:
    """A snapshot for the first call of a kind; None for later calls, and for tensors without memory."""
    if kind in compared and not debugging.memory:
        return None
    if (
        planned()
        or dispatch.in_graph()
        or any(type(functorch.unwrapped(p)) is not Tensor for ps in parameters for p in ps[:1])
    ):
        return None
    return Snapshot(signature, layouts, parameters, functools.partial(compared.add, kind))


def keeps_numbers(after: Any, before: Tensor) -> bool:
    """Whether `after` has the values of `before`, converted to its dtype; strides may differ."""
    if after is before:
        return True
    if not isinstance(after, Tensor) or after.shape != before.shape or after.device != before.device:
        return False
    new, old = functorch.unwrapped(after.detach()), functorch.unwrapped(before.detach())
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
    pairs = zip(to_ints(sums_of(tensors)), to_ints(before), strict=True)
    return next((k for k, (after, previous) in enumerate(pairs) if after != previous), None)


def _assigned(signature: Signature, path: str, after: Tensor, before: Tensor) -> str:
    """The message for a different tensor in `.data`."""
    was, is_now = (tensor_text(x.dtype, x.shape) for x in (before, after))
    kinds = "other numbers" if was == is_now else f"{was} before, {is_now} now"
    return (
        f"{signature}: its function puts something else into .data of {path} ({kinds}). It would be lost after "
        f"the call. It may assign the same numbers in another dtype or memory format. "
        f"Let it compute a new tensor, and change parameters outside of stages"
    )


def _write_message(signature: Signature, path: str) -> str:
    """The message for a write that autograd did not see."""
    return (
        f"{signature}: its function writes into {path} past autograd, through .data, numpy, an in-place collective or "
        f"a kernel of its own. Parameters are a gathered copy or the shard itself, and what it writes "
        f"would be lost, or not, by the strategy: let it compute a new tensor, and change parameters outside of stages"
    )
