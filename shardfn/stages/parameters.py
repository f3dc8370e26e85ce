"""Whole parameters for one run of a function: views of its slot, or tensors that show whether anything keeps them.

A stage whose backward reads no parameter need not gather them again. But a function can keep what it read in many ways:
autograd saves it, a Function has it as an attribute, a hook, a checkpoint or a closure holds it. So references are
counted instead: lent parameters are views of the slot by a storage of their own, and the references to that storage and
to the views are counted before and after the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from shardfn.check.recording import Recorder
from shardfn.collectives import functional
from shardfn.collectives.ledger import unscheduled
from shardfn.compat import autograd
from shardfn.mesh.axes import per_mesh
from shardfn.mesh.lanes import lane
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import scope
from shardfn.shards.layout import Layout
from shardfn.stages.call import Call
from shardfn.stages.consistency import callers
from shardfn.stages.ring import Slot, ordinary_tensors
from shardfn.stages.signature import Gather, GatherPlan
from shardfn.stages.tape import StageRun
from shardfn.transforms.step import owned


def whole_parameters(
    slot: Slot | None, plan: GatherPlan, shards: Sequence[Tensor], needs: Sequence[bool], anew: bool = False
) -> list[list[Tensor]]:
    """Each shard's parameters as leaves of autograd: views of the slot, or of the shard itself.

    The slot's views are reused between calls, unless `anew`.
    """
    if anew and slot is not None:
        slot.views.clear()
    found = []
    for gather, values, need in zip(plan.each, shards, needs, strict=False):
        if slot is None or not gather.moves:
            found.append(_leaves(gather.layout, values, need))
            continue
        cached: Known | None = slot.views.get((gather, need))
        if cached is None or not cached.untouched(need):
            views = _views(slot.buffer, gather, need)
            cached = slot.views[(gather, need)] = Known(views, [p.data_ptr() for p in views])
        found.append(_with_own(cached.parameters, slot, gather, values, need))
    return found


def _leaves(layout: Layout, whole: Tensor, need: bool) -> list[Tensor]:
    """The parameters in a whole buffer, as leaves of autograd."""
    with ordinary_tensors():
        return [owned(view.detach(), need, layout.stage) for view in layout.views(whole.detach())]


class Known(NamedTuple):
    """Parameters in a slot, and their addresses."""

    parameters: list[Tensor]
    at: list[int]

    def untouched(self, need: bool) -> bool:
        """Whether the tensors are as they were made: nothing was assigned to them or attached to them."""
        own = int(need)  # `owned` sets one attribute, the stage's name, on those that need a gradient
        for p in self.parameters:
            if p.requires_grad is not need or p._backward_hooks or p.grad is not None or len(p.__dict__) != own:
                return False
        return self.at == [p.data_ptr() for p in self.parameters]


def _views(buffer: Tensor, gather: Gather, need: bool) -> list[Tensor]:
    """The parameters of one gather as views of a slot's bytes."""
    with ordinary_tensors():
        whole = buffer[gather.start : gather.stop].view(gather.dtype)
    return _leaves(gather.layout, whole, need)


def _with_own(views: list[Tensor], slot: Slot, gather: Gather, values: Tensor, need: bool) -> list[Tensor]:
    """The same, but views of the shard for parameters that this rank's piece holds whole and that were not copied."""
    part = slot.part(gather)
    if not part.in_pieces:
        return views
    views = list(views)
    with ordinary_tensors():
        own = values.detach()
        for number, at, length, shape in part.inner:
            views[number] = owned(own[at : at + length].view(shape), need, gather.layout.stage)
    return views


# --- who keeps them ---


class Loan:
    """One run's parameters, with the number of references to them.

    Attributes:
        parameters: the parameters of each shard.
        storage: id of the storage under those that are lent.
    """

    __slots__ = ("_base", "_before", "_edges", "_lent", "parameters", "storage")

    def __init__(
        self, base: Tensor, slot: Slot, plan: GatherPlan, shards: Sequence[Tensor], needs: Sequence[bool]
    ) -> None:
        self._base, self.storage = base, autograd.storage_of(base)
        pairs = zip(plan.each, shards, needs, strict=False)
        self.parameters = [
            _with_own(_views(base, gather, need), slot, gather, values, need)
            if gather.moves
            else _leaves(gather.layout, values, need)
            for gather, values, need in pairs
        ]
        self._lent = [p for ps in self.parameters for p in ps if autograd.storage_of(p) == self.storage]
        # Autograd adds a reference to a leaf at its first use: made here, so that it counts before the run.
        self._edges = [get_gradient_edge(p) for p in self._lent if p.requires_grad]
        self._before = self._references()

    @property
    def version(self) -> int:
        """A version counter that changes if the function writes into the parameters."""
        return self._base._version

    def kept(self) -> bool:
        """Whether anything that the run left behind refers to the parameters."""
        return self._references() != self._before

    def _references(self) -> tuple[int, list[Any]]:
        return autograd.storage_references(self._base), [autograd.references(p) for p in self._lent]


class Reads:
    """Whether a stage's backward reads its parameters; if not, they are never gathered for it.

    All ranks of the engine's mesh agree on it.

    Attributes:
        known: by kind of call, whether backward of such a call was seen to read parameters.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.known = per_mesh(mesh, ("reads", lane()), dict[Any, bool])

    def watch(self, call: Call, run: StageRun) -> Loan | None:
        """A loan that shows whether backward reads parameters; None if that is known, or makes no difference.

        A call whose kind did not read them is watched again, since its backward will not gather.
        """
        reads = self.known.get(run.kind)
        if run.slot is None or run.keep or reads or (reads is None and call.transformed):
            return None
        if not any(call.needs[: len(run.shards)]):  # for a frozen stage, ranks may differ in whether backward runs
            return None
        with ordinary_tensors():
            base = autograd.second_storage(run.slot.write)
        if base is None:  # references cannot be counted, for fake tensors say
            self.saw(call.mesh, run, True)
            return None
        return Loan(base, run.slot, run.plan, run.shards, call.needs)

    def saw(self, mesh: DeviceMesh, run: StageRun, reads: bool) -> None:
        """Decides whether a call's backward gathers, which all ranks must do or none: they agree once per kind.

        If no rank has computed the stage, this says nothing of later calls, and is not remembered.
        """
        kind = run.kind
        if kind not in self.known and planned():  # no other rank says anything
            self.known[kind] = reads or not run.signature.computes
        if kind not in self.known:
            signature = run.signature
            with unscheduled(), scope(mesh), torch.no_grad():
                flags = torch.tensor([float(reads), float(signature.computes)], device=run.shards[0].device)
                reading, computing = functional.psum(flags, callers(mesh, signature)).tolist()
            if computing:
                self.known[kind] = bool(reading)
        run.reads = self.known.get(kind, False)
        if reads and not run.reads and run.slot is not None:
            run.saved = run.slot.save()


# --- for calls that `check` records: gathers write to memory without an op that it could see ---


def record_parameters(recorder: Recorder, layout: Layout, shard: Tensor, parameters: Sequence[Tensor]) -> None:
    """Records the parameters that a stage's function gets; their gradients will be summed over ranks."""
    mask = recorder.trace.mask
    summed = mask((*layout.placement.axes, *layout.placement.replicas))
    cut = [mask((*layout.placement.only_at_axes, *entry.spec.axes)) for entry in layout.entries]
    recorder.parameters(layout, [entry.path for entry in layout.entries], shard, parameters, summed, cut)


def record_gradients(recorder: Recorder, layout: Layout, gradients: Sequence[Tensor | None]) -> None:
    """Records a stage's gradients, before they are summed over ranks."""
    recorder.summed(recorder.trace.mask((*layout.placement.axes, *layout.placement.replicas)))
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            recorder.part(layout, number, gradient)


def record_sum(recorder: Recorder, layout: Layout, shard: Tensor, gradient: Tensor) -> None:
    """Records the gradient of a flat shard."""
    fine = layout.state_layout if gradient.shape != shard.shape else layout
    cut = {name for number in range(len(fine.entries)) for name in fine.cut_axes(number)}
    recorder.declared(gradient, recorder.trace.mask((*fine.placement.axes, *cut)), [shard], "gradient of a stage")
