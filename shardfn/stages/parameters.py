"""Whole parameters as one run of a function gets them: views of its slot, or lent such that it is seen who keeps them.

A stage whose backward reads no parameter need not gather them again. But a function can keep what it read in many
ways: autograd saves it, a Function has it as an attribute, a hook, a checkpoint or a closure holds it. So nobody is
asked: lent parameters are views of the slot by a storage of their own, and what refers to that storage, and to them,
is counted before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardfn.compat import autograd
from shardfn.shards.layout import Layout
from shardfn.stages.ring import Slot, ordinary_tensors
from shardfn.stages.signature import Gather, GatherPlan
from shardfn.transforms.step import owned


def whole_parameters(
    slot: Slot | None, plan: GatherPlan, shards: Sequence[Tensor], needs: Sequence[bool], anew: bool = False
) -> list[list[Tensor]]:
    """Each shard's parameters, as leaves of autograd: views of the slot, or of the shard itself.

    Those of a slot are known from earlier calls; `anew` makes others.
    """
    if anew and slot is not None:
        slot.views.clear()
    return [
        _of_slot(slot, gather, values, need) if slot and gather.moves else leaves(gather.layout, values, need)
        for gather, values, need in zip(plan.each, shards, needs, strict=False)
    ]


def leaves(layout: Layout, whole: Tensor, need: bool) -> list[Tensor]:
    """The parameters in a whole buffer, as leaves of autograd."""
    with ordinary_tensors():
        return [owned(view.detach(), need, layout.stage) for view in layout.views(whole.detach())]


class Known(NamedTuple):
    """Parameters in a slot, and where in memory they are."""

    parameters: list[Tensor]
    at: list[int]

    def untouched(self, need: bool) -> bool:
        """Whether nobody who had them has made anything else of them, or put anything on them, since."""
        own = int(need)  # the stage that they belong to
        for p in self.parameters:
            if p.requires_grad is not need or p._backward_hooks or p.grad is not None or len(p.__dict__) != own:
                return False
        return self.at == [p.data_ptr() for p in self.parameters]


def _of_slot(slot: Slot, gather: Gather, values: Tensor, need: bool) -> list[Tensor]:
    known: Known | None = slot.views.get((gather, need))
    if known is None or not known.untouched(need):
        with ordinary_tensors():
            buffer = slot.buffer[gather.start : gather.stop].view(gather.dtype)
        made = leaves(gather.layout, buffer, need)
        known = slot.views[(gather, need)] = Known(made, [p.data_ptr() for p in made])
    own = own_parameters(slot, gather, values, need)
    return [own.get(k, p) for k, p in enumerate(known.parameters)] if own else known.parameters


def own_parameters(slot: Slot, gather: Gather, values: Tensor, need: bool) -> dict[int, Tensor]:
    """Those that this rank's piece holds whole, and that have stayed there, by number."""
    part = slot.part(gather)
    if not part.in_pieces:
        return {}
    with ordinary_tensors():
        own = values.detach()
        return {
            number: owned(own[at : at + length].view(shape), need, gather.layout.stage)
            for number, at, length, shape in part.inner
        }


class Loan:
    """One run's parameters.

    Attributes:
        parameters: of each shard.
        storage: the number of the storage under those that are lent.
    """

    __slots__ = ("_base", "_before", "_edges", "_lent", "parameters", "storage")

    def __init__(
        self, base: Tensor, slot: Slot, plan: GatherPlan, shards: Sequence[Tensor], needs: Sequence[bool]
    ) -> None:
        self._base, self.storage = base, autograd.storage_of(base)
        pairs = zip(plan.each, shards, needs, strict=False)
        self.parameters = [_parameters(base, slot, gather, values, need) for gather, values, need in pairs]
        self._lent = [p for ps in self.parameters for p in ps if autograd.storage_of(p) == self.storage]
        # Autograd refers to a leaf once it is used: here that has happened already.
        self._edges = [get_gradient_edge(p) for p in self._lent if p.requires_grad]
        self._before = self._references()

    @property
    def version(self) -> int:
        """Changes when somebody writes into the parameters."""
        return self._base._version

    def kept(self) -> bool:
        """Whether anything that a run left behind refers to the parameters."""
        return self._references() != self._before

    def _references(self) -> tuple[int, list[Any]]:
        return autograd.storage_references(self._base), [autograd.references(p) for p in self._lent]


def loan(slot: Slot, plan: GatherPlan, shards: Sequence[Tensor], needs: Sequence[bool]) -> Loan | None:
    """Lends what is in a slot; None where references cannot be counted, as those of fake tensors."""
    if not autograd.COUNTS_REFERENCES:
        return None
    with ordinary_tensors():
        base = autograd.second_storage(slot.write)
    return None if base is None else Loan(base, slot, plan, shards, needs)


def _parameters(base: Tensor, slot: Slot, gather: Gather, values: Tensor, need: bool) -> list[Tensor]:
    if not gather.moves:
        return leaves(gather.layout, values, need)
    own = own_parameters(slot, gather, values, need)
    lent = leaves(gather.layout, base[gather.start : gather.stop].view(gather.dtype), need)
    return [own.get(k, p) for k, p in enumerate(lent)]
