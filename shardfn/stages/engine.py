"""The schedule of the stages on one mesh, as one thread runs them.

Forward of a call: its parameters are gathered into a slot, the next gather starts, the function runs on views of the
slot. Backward: the same from the other end, then the gradients are sent on their way. The calls of a step form a tape,
which backward follows in reverse to gather ahead; nothing outlives the step, so another order is never wrong.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.collectives.into_buffers import Communicator, communicator_of
from shardfn.collectives.ledger import attributed_to
from shardfn.compat import autograd, process_groups
from shardfn.debugging import debugging
from shardfn.mesh.axes import per_mesh, sizes
from shardfn.mesh.lanes import in_lane, lane
from shardfn.mesh.scope import independent_axes, refuse_independent
from shardfn.shards.layout import Layout
from shardfn.shards.placement import Keep
from shardfn.stages import nonfinite
from shardfn.stages.activation_offload import Away, offloading
from shardfn.stages.call import Call, Residuals, detached, differentiated, evaluate
from shardfn.stages.consistency import alone, compare, lane_state
from shardfn.stages.decoding import Decoding, Memories
from shardfn.stages.options import Offload
from shardfn.stages.parameters import (
    Loan,
    Reads,
    record_gradients,
    record_parameters,
    record_sum,
    whole_parameters,
)
from shardfn.stages.prefetch import Prefetch
from shardfn.stages.reduction import Dtypes, Level, Reduction, Reductions, Route
from shardfn.stages.refusals import refuse_closure, refuse_opaque, refuse_returned, writes
from shardfn.stages.residency import Residency
from shardfn.stages.returned import Returned, held
from shardfn.stages.saved_tensors import argument_hooks, saved_tensor_hooks
from shardfn.stages.signature import Gather, GatherPlan, Signature, plan_of
from shardfn.stages.tape import LONGEST, Identities, StageRun, Tape, identities, key_of
from shardfn.tiers.grad_offload import GradOffload
from shardfn.transforms.step import Step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Engine:
    """What the stages on one mesh share that one thread runs."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = weakref.ref(mesh)
        self.device, self.lane = _device(mesh), lane()
        self.lane_state = lane_state()
        self.alone = alone(mesh, self.lane_state)
        self.met: set[tuple[GatherPlan, str]] = set()
        self.tape = Tape(None)
        self.residency = Residency(self.device, self.communicator)
        self.prefetch = Prefetch(self.residency)
        self.memories = Memories(self.device)
        self.away = Away(self.device)
        self.reads = Reads(mesh, lambda: self.mesh)
        self.reductions = Reductions(self.device, GradOffload(lambda: self.mesh))
        self._held: dict[Any, list[Any]] = {}  # the form of the parameters of these
        self.looked: set[Any] = set()  # the kinds of runs whose parameters were compared byte by byte
        self.touching: set[Any] = set()  # the kinds of calls that put something on their parameters
        self._communicators: dict[tuple[str, ...], Communicator | None] = {}
        self._known_reductions: dict[Any, Reduction] = {}

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh."""
        mesh = self._mesh()
        assert mesh is not None, "a mesh whose stages run is alive"
        return mesh

    def communicator(self, names: tuple[str, ...]) -> Communicator | None:
        """The axes, or None where there is one rank along them."""
        if names not in self._communicators:
            several = math.prod(sizes(self.mesh)[name] for name in names) > 1
            self._communicators[names] = communicator_of(self.mesh, names) if several else None
        return self._communicators[names]

    # --- the schedule ---

    def forward(self, call: Call, shards: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs a call of a stage; its tensor outputs, without a graph."""
        with self.alone, attributed_to(call.signature.stage, backward=False):
            run = self._begin(call, shards)
            self.residency.gather(run)
            self.prefetch.ahead(call.tape, call.step, run)
            records = any(call.needs)
            keeps = records and call.signature.keeps_graph
            residuals, storages = self._run(call, run, inputs, records, again=False)
            if keeps:
                call.residuals = residuals
            call.differentiable = [y.requires_grad for y in residuals.outputs]
            if not records and run.slot is not None and not run.keep:
                run.slot.give_back()
            if call.tape is not None and isinstance(call.signature.keep, tuple) and (run.reads or not keeps):
                self.residency.leave(run)
            left: tuple[Tensor, ...] = detached(residuals.outputs, storages, inputs, call.transformed)
            if records and (debugging.memory or not call.signature.compared):
                call.remember(left)
                call.signature.compared = keeps  # that may never run again
            if keeps and isinstance(call.signature.options.remat, Offload):
                residuals.let_go()
            return left

    def saving_arguments(self, call: Call, shards: Sequence[Tensor]) -> Any:
        """A context for what autograd saves of a call as a whole: its arguments, some of which leave the device."""
        asked = call.signature.options.remat
        if not isinstance(asked, Offload) or not asked.moves(self.device.type) or call.transformed:
            return contextlib.nullcontext()

        def leave(x: Tensor) -> Any:
            away = None if call.run is None else offloading(self.away, lambda: self.mesh, call.run)
            return None if away is None else away(x)

        return argument_hooks(call.signature, {autograd.storage_of(x) for x in shards}, leave)

    def backward(
        self,
        call: Call,
        needs: Sequence[bool],
        cotangents: Sequence[Tensor | None],
        inputs: tuple[Tensor, ...],
        collect: bool,
    ) -> list[Tensor | None]:
        """Gradients of a call with respect to shards and inputs; None for those that are collected or not needed.

        Args:
            call: as it ran forward.
            needs: which gradients are needed.
            cotangents: of the outputs; None for one that the loss does not use.
            inputs: as in forward.
            collect: whether the step may take gradients past autograd, and let them fly.
        """
        tape, run = call.tape, call.run
        assert run is not None, "a call runs forward before backward"
        if tape is not None:
            tape.closed = True
        residuals, call.residuals = call.residuals, None
        with in_lane(self.lane), self.alone, attributed_to(call.signature.stage, backward=True):
            self._reclaim()
            self.away.ahead(tape, run)
            if residuals is None or run.reads:
                if run.slot is None and run.plan.nbytes:  # it gave its own back, and runs backward again
                    self.residency.take(None, run, call.signature.options.prefetch + 1)
                self.residency.gather(run)
            self.prefetch.behind(tape, run)
            if residuals is None:
                with call.surroundings.again():
                    residuals, _ = self._run(call, run, inputs, True, again=True)
                call.refuse_constant(residuals.outputs)
                call.signature.compared = True
            with _in_use(run, residuals.decoding):
                if residuals.decoding is not None:
                    residuals.decoding.again()
                new = run.reads and (debugging.memory or (*run.kind, "backward") not in self.looked)
                returned = self._lends(run, residuals.parameters, None, ("backward",)) if new else None
                gradients = differentiated(residuals, needs, cotangents)
                if returned is not None:
                    returned.check_hooks()
            self.away.done()
            if debugging.nan and run.trains:  # then all ranks come here: their gradients travel
                nonfinite.after_backward(call.mesh, run, inputs, cotangents, gradients)
            of_shards = self._reduced(run, call.step, needs, gradients[0], collect)
            self._done(tape, run)
            return [*of_shards, *gradients[1]]

    def catch_up(self, tape: Tape, stop: int) -> None:
        """Takes the part of this rank in the backward of later calls, whose outputs its own loss does not use.

        Other ranks' losses may: what travels there comes in the order of the tape, on every rank.
        """
        front = len(tape.runs) if tape.front is None else tape.front
        for run in reversed(tape.runs[stop:front]):
            if run.done or (run.trains and not any(x is not None for x in run.collected)):
                continue  # for gradients that autograd has to carry on there is no place
            tape.closed = True
            with in_lane(self.lane), attributed_to(run.plan.stage, backward=True):
                if run.reads or not run.signature.keeps_graph:
                    self.residency.gather(run)
                self.prefetch.behind(tape, run)
                if debugging.nan and run.trains:
                    nonfinite.compare(self.mesh, run, "")
                nothing: list[list[Tensor | None]] = [[None] * len(gather.layout.entries) for gather in run.plan.each]
                self._reduced(run, tape.step, [x is not None for x in run.collected], nothing, True)
                self._done(tape, run)
        tape.front = min(front, stop)

    def end(self) -> None:
        """A step is over: nothing that it gathered is used again."""
        try:
            self.reductions.drain()
        finally:
            self.tape = Tape(None)
            self.residency.end()
            self.away.end()

    # --- a call's place on the tape ---

    def _begin(self, call: Call, shards: tuple[Tensor, ...]) -> StageRun:
        """Gives a call its place on the tape and its slot, which starts to fill."""
        signature = call.signature
        for layout in signature.layouts if independent_axes() else ():
            refuse_independent(layout.placement.axes, f"stage {signature.name}: gathering {layout.stage!r}")
        plan = signature.plan(shards)
        if (plan, signature.summed) not in self.met:
            self._meet(signature, plan)
        which = identities(shards)
        tape = call.tape = self._tape(call, plan, which) if any(call.needs) else None
        keep = self._keep(call)
        run = StageRun(signature, plan, shards, key_of(tape, call.step, keep, plan, which), keep)
        call.run = run
        self._reclaim()
        if tape is not None:
            run.collected, run.trains = call.collected, any(call.needs[: len(shards)])
            run.secondary = self.residency.secondary.get(run.key)
            tape.add(run)
        if plan.nbytes:
            self.residency.take(tape, run, signature.options.prefetch + 1)
        self.residency.claim(run, call)
        return run

    def _keep(self, call: Call) -> Keep:
        """What a call keeps of its slot."""
        keep = call.signature.keep
        if keep == "step" and call.step is not None:
            call.step.meet(self)
            return keep
        return call.tape is not None and keep in (True, "step")

    def _tape(self, call: Call, plan: GatherPlan, now: Identities) -> Tape:
        """The tape of a new call: another one after a backward, for another step, or for other parameters."""
        if (
            self.tape.closed
            or self.tape.step is not call.step
            or len(self.tape.runs) >= LONGEST
            or self.tape.shards.get(plan, now) != now
        ):
            self.tape = Tape(call.step)
            if call.step is not None:
                call.step.join(self, self.tape)
        self.tape.shards[plan] = now
        return self.tape

    def _reclaim(self) -> None:
        """Takes back what calls kept that are gone."""
        self.residency.reclaim(None if self.tape.closed else self.tape)

    def _done(self, tape: Tape | None, run: StageRun) -> None:
        self.residency.release(run)
        run.secondary = None
        if tape is not None and not run.done:
            tape.waiting -= 1
            if tape.waiting == 0 and tape is self.tape and tape.step is None:
                self.end()  # nobody else says so, and the parameters must not be held on to
        run.done = True

    def _meet(self, signature: Signature, plan: GatherPlan) -> None:
        """What runs here for the first time is compared between ranks, and the ring made large enough for its like."""
        expected = per_mesh(self.mesh, "stages", dict[str, list[Layout]])
        for layouts in expected.values():
            here = tuple(layout for layout in layouts if layout.here(process_groups.global_rank()))
            like = plan_of(signature.options, here, tuple(layout.dtype for layout in here))
            self.residency.ring.reserve(like.nbytes)
        compare(self.mesh, signature, plan, self.lane_state)
        self.met.add((plan, signature.summed))

    # --- the function, and its gradients ---

    def _run(
        self, call: Call, run: StageRun, inputs: tuple[Tensor, ...], records: bool, again: bool
    ) -> tuple[Residuals, list[int]]:
        """The function on the gathered parameters, and the storages of its outputs; with `records`, under autograd."""
        # What computes again in backward has a graph too, for a moment: it shows what is closed over, what may be
        # differentiated, and it is what a loss runs into that gets past the outputs. Backward takes the same room.
        signature, slot = call.signature, run.slot
        lent = self.reads.watch(call, run) if records and not again and signature.keeps_graph else None
        own = {autograd.storage_of(x) for x in run.shards}
        if slot is not None:
            own.add(autograd.storage_of(slot.buffer))
        if lent is None:
            parameters = whole_parameters(slot, run.plan, run.shards, call.needs, run.kind in self.touching)
        else:
            parameters = lent.parameters
            own.add(lent.storage)
        records_once = records and not again
        away = offloading(self.away, lambda: self.mesh, run) if records_once else None
        saving = saved_tensor_hooks(signature, own, away, call.transformed) if records_once else None
        decoding = self.memories.take(signature)
        if decoding is not None:
            own.add(decoding.storage)
        if (recorder := recording.current()) is not None:
            for gather, shard, some in zip(run.plan.each, run.shards, parameters, strict=False):
                record_parameters(recorder, gather.layout, shard, some)
        given = [x for x in (*run.shards, *inputs) if not x.is_inference()]
        given += [] if slot is None else [slot.buffer]
        given += [] if decoding is None else [decoding.memory.buffer]
        versions = _versions(given, lent)
        when = "again" if again else "forward" if records else "alone"
        returned = self._lends(run, parameters, decoding, (when, *call.needs[: len(run.shards)]))
        changed = False
        with _in_use(run, decoding):
            try:
                residuals = evaluate(call, call.mesh, parameters, inputs, records, saving, decoding, away)
            finally:
                written = _versions(given, lent) != versions
                changed = returned is not None and returned.changed()
                if written and slot is not None:
                    slot.forget()
                if changed and slot is not None:
                    slot.views.clear()
            if written:
                raise RuntimeError(writes(signature))
            if returned is not None:
                if changed:
                    self._touches(call, run, returned)
                returned.check(changed, lambda: whole_parameters(slot, run.plan, run.shards, call.needs, anew=True))
        storages = refuse_returned(signature, residuals.outputs, own)
        refuse_opaque(signature, call.leaves_returned())
        if not again and (records or any(y.requires_grad for y in residuals.outputs)):
            refuse_closure(signature, (*residuals.parameters, residuals.inputs), residuals.outputs)
        if lent is not None:
            self.reads.saw(run, lent.kept())
        if debugging.nan and not again:
            nonfinite.after_forward(call.mesh, run, parameters, inputs, residuals)
        return residuals, storages

    def _lends(
        self, run: StageRun, parameters: list[list[Tensor]], decoding: Decoding | None, when: tuple[Any, ...]
    ) -> Returned | None:
        """What parameters are before a run of its kind, or of the debug mode; None of tensors without memory."""
        if any(type(p) is not Tensor for ps in parameters for p in ps[:1]):
            return None
        kind = (*run.kind, *when)
        looked = None if kind in self.looked and not debugging.memory else partial(self.looked.add, kind)
        form = self._held.get(kind)
        if form is None or when == ("backward",):  # they were lent before
            form = self._held[kind] = held(parameters)
        return Returned(run.signature, run.plan, parameters, form, decoding, looked)

    def _touches(self, call: Call, run: StageRun, returned: Returned) -> None:
        """Calls of this kind get tensors of their own from now on; those before may have had the same as this one.

        Raises:
            RuntimeError: what it did to them would be done to the gradient of an earlier call, too.
        """
        touches = run.kind in self.touching
        self.touching.add(run.kind)
        runs = [] if touches or call.tape is None else call.tape.runs
        if any(
            other.plan is run.plan and other.slot is run.slot and not (other is run or other.done) for other in runs
        ):
            returned.refuse_shared()

    def _reduced(
        self,
        run: StageRun,
        step: Step | None,
        needs: Sequence[bool],
        of_parameters: list[list[Tensor | None]],
        collect: bool,
    ) -> list[Tensor | None]:
        """The gradients of the parameters become those of the shards."""
        pendings: list[Any] = [None] * len(run.shards)
        # Two memories in turn. By what all ranks send alike, and not by a place on the tape, which may differ between
        # them: when a memory is free again decides the order of hops.
        turn = self.reductions.turn() if any(needs[: len(run.shards)]) else 0
        recorder = recording.current()
        for k, (gather, shard) in enumerate(zip(run.plan.each, run.shards, strict=True)):
            if not needs[k]:
                continue
            if recorder is not None:
                record_gradients(recorder, gather.layout, of_parameters[k])
            variable = run.collected[k] if collect else None
            summed = run.signature.options.sum_dtype(shard.dtype)
            reduction = self._reduction(run.signature, gather, (k, turn), summed, shard.dtype, variable is not None)
            total = step.sum_of(variable, reduction, self.reductions) if step and variable is not None else None
            defer = step.defer if step and total else "nothing"
            pending = self.reductions.start(reduction, of_parameters[k], total, defer)
            pendings[k] = pending if total is None else None
        arrived = [None if pending is None else self.reductions.wait(pending) for pending in pendings]
        if recorder is not None:
            for gather, shard, gradient in zip(run.plan.each, run.shards, arrived, strict=False):
                if gradient is not None:
                    record_sum(recorder, gather.layout, shard, gradient)
        return arrived

    def _reduction(
        self,
        signature: Signature,
        gather: Gather,
        memory: tuple[int, int],
        summed: torch.dtype,
        dtype: torch.dtype,
        divides: bool,
    ) -> Reduction:
        """How a buffer's gradient travels; `divides`: to where the optimizer state of its shard is."""
        format = (signature.options.reduce or gather.layout.placement.reduce) if dtype.is_floating_point else None
        key = (gather, memory, summed, dtype, divides, format)
        reduction = self._known_reductions.get(key)
        if reduction is None:
            layout = gather.layout
            fine = layout.state_layout if divides else layout
            first = fine if layout.size == 1 else layout  # one that is whole is scattered once, over all
            done, left = first.placement.axes, fine.placement.replicas
            levels = self._levels(done) if format else ()
            split, replica = map(self.communicator, (fine.placement.axes[len(done) :], left))
            route = Route(self.communicator(done), split, replica, levels)
            dtypes = Dtypes(gather.dtype, summed, dtype)
            reduction = self._known_reductions[key] = Reduction(first, route, dtypes, memory, format)
        return reduction

    def _levels(self, axes: tuple[str, ...]) -> tuple[Level, ...]:
        """A scatter axis by axis, the last of the mesh first: its links are the fastest, and leave that much less."""
        of = sizes(self.mesh)
        left, levels = [name for name in axes if of[name] > 1], []
        for name in sorted(left, key=list(of).index, reverse=True):
            along = self.communicator((name,))
            assert along is not None, "there are several ranks along it"
            at = left.index(name)
            levels.append(Level(along, math.prod(of[other] for other in left[:at])))
            left.remove(name)
        return tuple(levels)


def engine_of(mesh: DeviceMesh) -> Engine:
    """The engine of a mesh for this thread: each has its own ring and its own tape."""
    return per_mesh(mesh, ("engine", get_ident(), lane()), lambda: Engine(mesh))


class _in_use:
    """A context: a function, or its backward, reads what a run's slot holds, and what is decoded of that."""

    __slots__ = ("around", "before", "slot")

    def __init__(self, run: StageRun, decoding: Decoding | None) -> None:
        self.slot = run.slot
        self.around: list[Any] = []
        if run.saved is not None and run.slot is not None:
            self.around.append(run.slot.showing(run.saved))
        if decoding is not None:
            self.around.append(decoding.memory.lent())

    def __enter__(self) -> None:
        if self.slot is not None:
            self.before, self.slot.busy = self.slot.busy, True
        for context in self.around:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.around):
            context.__exit__(*error)
        if self.slot is not None:
            self.slot.busy = self.before


def _versions(given: list[Tensor], lent: Loan | None) -> list[int]:
    """Change when the function writes into its parameters, or into what else it was given."""
    versions = [x._version for x in given]
    return versions if lent is None else [*versions, lent.version]


def _device(mesh: DeviceMesh) -> torch.device:
    kind = torch.device(mesh.device_type)
    return kind if kind.type == "cpu" else torch.device(kind.type, getattr(torch, kind.type).current_device())
