"""The schedule of the stages on one mesh, as one lane runs them.

Forward of a call: its parameters are gathered into a slot, the next gather starts, and the function runs on views of
the slot. Backward: the same in reverse, then the reduction of the gradients starts. The calls of a step form a tape,
which backward follows in reverse to gather ahead. Nothing outlives the step, so a different order in the next is fine.
On an accelerator a gather waits for its slot and its shards, not for the stage before, to which the host came long ago.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from shardfn.check import recording
from shardfn.collectives.capturing import capturing
from shardfn.collectives.into_buffers import Communicator, communicator_of
from shardfn.collectives.late_checks import late_checks
from shardfn.collectives.ledger import attributed_to, open_ledgers
from shardfn.compat import autograd, process_groups
from shardfn.debugging import debugging
from shardfn.mesh.axes import device_of, per_mesh, sizes
from shardfn.mesh.lanes import in_lane, lane
from shardfn.mesh.scope import independent_axes, refuse_independent
from shardfn.shards.layout import Layout
from shardfn.shards.placement import Keep
from shardfn.stages import nonfinite
from shardfn.stages.activation_offload import Away, offloading
from shardfn.stages.call import Call, Residuals, detached, differentiated, evaluate
from shardfn.stages.consistency import compare, lane_state
from shardfn.stages.decoding import Decoding, Memories
from shardfn.stages.options import Offload
from shardfn.stages.parameters import Loan, Reads, record_gradients, record_parameters, record_sum, whole_parameters
from shardfn.stages.prefetch import Prefetch
from shardfn.stages.reduction import Dtypes, Level, Reduction, Reductions, Route
from shardfn.stages.refusals import reentrant_told, refuse_closure, refuse_opaque, refuse_returned, writes
from shardfn.stages.residency import Residency
from shardfn.stages.returned import Returned, held
from shardfn.stages.saved_tensors import argument_hooks, saved_tensor_hooks
from shardfn.stages.signature import Gather, GatherPlan, Signature, plan_of
from shardfn.stages.tape import LONGEST, Identities, StageRun, Tape, identities, key_of
from shardfn.tiers.offload import GradOffload
from shardfn.transforms.given import ready_since
from shardfn.transforms.step import Step


class Engine:
    """The state shared by all stages that one lane runs on one mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = weakref.ref(mesh)
        self.device, self.lane = device_of(mesh), lane()
        self.lane_state = lane_state()
        self.alone = self.lane_state if mesh.size() > 1 else contextlib.nullcontext()
        self.met: set[tuple[GatherPlan, str]] = set()
        self.tape = Tape(None)
        self.residency = Residency(self.device, self.communicator)
        self.prefetch = Prefetch(self.residency)
        self.memories = Memories(self.device)
        self.away = Away(self.device)
        self.reads = Reads(mesh)
        self.reductions = Reductions(self.device, GradOffload(lambda: self.mesh))
        self._held: dict[Any, list[Any]] = {}  # the form of the parameters, by kind of run
        self.looked: set[Any] = set()  # kinds of runs whose parameters were compared byte by byte
        self.touching: set[Any] = set()  # kinds of calls that attach something to their parameters, such as hooks
        self._communicators: dict[tuple[str, ...], Communicator | None] = {}
        self._known_reductions: dict[Any, Reduction] = {}

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh; the engine holds it weakly."""
        mesh = self._mesh()
        assert mesh is not None, "a mesh whose stages run is alive"
        return mesh

    def communicator(self, names: tuple[str, ...]) -> Communicator | None:
        """The communicator along these axes; None if there is one rank along them."""
        if names not in self._communicators:
            several = math.prod(sizes(self.mesh)[name] for name in names) > 1
            self._communicators[names] = communicator_of(self.mesh, names) if several else None
        return self._communicators[names]

    # --- the schedule ---

    def forward(self, call: Call, shards: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs a call of a stage; returns its tensor outputs, detached from the call's graph."""
        again = bool(open_ledgers) and autograd.inside_backward()  # by torch's checkpoints
        with self.alone, attributed_to(call.signature.stage, backward=again):
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
            self.residency.used(run)
            if call.pairs is not None:
                call.pairs.ran(residuals.outputs)
            outputs: tuple[Tensor, ...] = detached(residuals.outputs, storages, inputs, call.transformed)
            if records and (recorder := recording.current()) is not None:
                for inside, outside in zip(residuals.outputs, outputs, strict=True):
                    recorder.same(outside, inside)  # autograd differentiates through the call
            if records and (debugging.memory or not call.signature.compared):
                call.remember(outputs)
                call.signature.compared = keeps  # such calls may never run again, so one sample is enough
            if keeps and isinstance(call.signature.options.remat, Offload):
                # The edges at which the graph ends hold no output tensors.
                residuals.outputs = [get_gradient_edge(y) if y.requires_grad else None for y in residuals.outputs]
            return outputs

    def saving_arguments(self, call: Call, shards: Sequence[Tensor]) -> Any:
        """A context for what autograd saves of the call as a whole: its arguments, some of which are offloaded."""
        remat = call.signature.options.remat
        if not isinstance(remat, Offload) or not remat.moves(self.device.type) or call.transformed:
            return contextlib.nullcontext()

        calls = weakref.ref(call)  # transfers that start inside keep the hooks, as a part of their thread's state

        def leave(x: Tensor) -> Any:
            alive = calls()
            run = None if alive is None else alive.run
            away = None if alive is None or run is None else offloading(self.away, alive.mesh, run)
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
            call: the call, as it ran forward.
            needs: which gradients are needed.
            cotangents: of the outputs; None for one that the loss does not use.
            inputs: as in forward.
            collect: whether the step may collect gradients outside of autograd, and let them arrive later.
        """
        tape, run = call.tape, call.run
        assert run is not None, "a call runs forward before backward"
        if tape is not None:
            tape.closed = True
        residuals, call.residuals = call.residuals, None
        with in_lane(self.lane), self.alone, attributed_to(call.signature.stage, backward=True):
            self.residency.reclaim(None if self.tape.closed else self.tape)
            self.away.ahead(tape, run)
            if residuals is None or run.reads:
                if run.slot is None and run.plan.nbytes:  # backward runs a second time, after the slot was given back
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
                unseen = run.reads and (debugging.memory or (*run.kind, "backward") not in self.looked)
                returned = self._lends(run, residuals.parameters, None, ("backward",)) if unseen else None
                with reentrant_told(call.signature):
                    if call.pairs is None:
                        gradients = differentiated(residuals, needs, cotangents)
                    else:
                        with call.pairs.watching():
                            gradients = differentiated(residuals, needs, cotangents, True)
                if call.pairs is not None:
                    needs, gradients = call.pairs.parted(needs, gradients, residuals.parameters)
                if returned is not None:
                    returned.check_hooks()
            self.away.done()
            if debugging.nan and run.trains:  # all ranks get here, as all take part in summing the gradient
                nonfinite.after_old_backward(call.mesh, run, inputs, cotangents, gradients)
            self.residency.used(run)
            of_shards = self._reduced(run, call.step, needs, gradients[0], collect)
            self._done(tape, run)
            return [*of_shards, *gradients[1]]

    def catch_up(self, tape: Tape, stop: int) -> None:
        """Does this rank's part in the backward of later calls whose outputs its own loss does not use.

        Other ranks' losses may use them, and all ranks must issue collectives in the order of the tape.
        """
        front = len(tape.runs) if tape.front is None else tape.front
        for run in reversed(tape.runs[stop:front]):
            if run.done or (run.trains and not any(x is not None for x in run.collected)):
                continue  # its gradient goes through autograd, which has no use for one from here
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

    def end(self, failed: bool = False) -> None:
        """Ends a step: nothing that it gathered is used again."""
        try:
            self.reductions.drain()
            if self.device.type != "cpu" and capturing() is None:
                late_checks().close()
        finally:
            self.tape = Tape(None)
            self.residency.end()
            self.away.end()

    # --- a call's place on the tape ---

    def _begin(self, call: Call, shards: tuple[Tensor, ...]) -> StageRun:
        """Puts a call on the tape and gives it a slot, which starts to fill."""
        signature = call.signature
        if self.device.type != "cpu" and capturing() is None:
            late_checks().read()
        for layout in signature.layouts if independent_axes() else ():
            refuse_independent(layout.placement.axes, f"stage {signature.name}: gathering {layout.stage!r}")
        plan = signature.plan(shards)
        if (plan, signature.summed) not in self.met:
            self._meet(signature, plan)
        shard_ids = identities(shards)
        tape = call.tape = self._tape(call, plan, shard_ids) if any(call.needs) else None
        keep: Keep = signature.keep
        if keep == "step" and call.step is not None:
            call.step.meet(self)
        else:
            keep = tape is not None and keep in (True, "step")
        key = key_of(tape, call.step, keep, plan, shard_ids)
        run = StageRun(signature, plan, shards, key, keep, ready=ready_since(shards))
        call.run = run
        self.residency.reclaim(None if self.tape.closed else self.tape)
        if tape is not None:
            run.collected, run.trains = call.collected, any(call.needs[: len(shards)])
            run.secondary = self.residency.secondary.get(run.key)
            tape.add(run)
        if plan.nbytes:
            self.residency.take(tape, run, signature.options.prefetch + 1)
        self.residency.claim(run, call)
        return run

    def _tape(self, call: Call, plan: GatherPlan, now: Identities) -> Tape:
        """The tape of a new call: a new one after a backward, for another step, or for other parameters."""
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

    def _done(self, tape: Tape | None, run: StageRun) -> None:
        """Notes that a run's backward is done, and ends the step after the last one if no `Step` does."""
        self.residency.release(run)
        run.secondary = None
        if tape is not None and not run.done:
            tape.waiting -= 1
            if tape.waiting == 0 and tape is self.tape and tape.step is None:
                self.end()  # no `Step` will end it, and slots must not keep the parameters alive
        run.done = True

    def _meet(self, signature: Signature, plan: GatherPlan) -> None:
        """Compares a stage between ranks when it first runs, and makes the ring large enough for the mesh's stages."""
        expected = per_mesh(self.mesh, "stages", dict[str, list[Layout]])
        for layouts in expected.values():
            local = tuple(layout for layout in layouts if layout.here(process_groups.global_rank()))
            plan_here = plan_of(signature.options, local, tuple(layout.dtype for layout in local))
            self.residency.ring.reserve(plan_here.nbytes)
        compare(self.mesh, signature, plan, self.lane_state)
        self.met.add((plan, signature.summed))

    # --- the function, and its gradients ---

    def _run(
        self, call: Call, run: StageRun, inputs: tuple[Tensor, ...], records: bool, again: bool
    ) -> tuple[Residuals, list[int]]:
        """Runs the function on its parameters, with `records` under autograd; returns the outputs' storages too."""
        # With remat there is a graph too, for a moment: it shows what the function closes over and which outputs can
        # be differentiated, and a loss that bypasses the outputs meets it. Backward needs the same memory anyway.
        signature, slot = call.signature, run.slot
        loan = self.reads.watch(call, run) if records and not again and signature.keeps_graph else None
        own = {autograd.storage_of(x) for x in run.shards}
        if slot is not None:
            own.add(autograd.storage_of(slot.buffer))
        if loan is None:
            parameters = whole_parameters(slot, run.plan, run.shards, call.needs, run.kind in self.touching)
        else:
            parameters = loan.parameters
            own.add(loan.storage)
        records_once = records and not again
        offloader = offloading(self.away, call.mesh, run) if records_once else None
        saving = saved_tensor_hooks(signature, own, offloader, call.transformed) if records_once else None
        decoding = self.memories.take(signature)
        if decoding is not None:
            own.add(decoding.storage)
        if (recorder := recording.current()) is not None:
            for gather, shard, ps in zip(run.plan.each, run.shards, parameters, strict=False):
                record_parameters(recorder, gather.layout, shard, ps)
        watched = [x for x in (*run.shards, *inputs) if not x.is_inference()]
        watched += [] if slot is None else [slot.buffer]
        watched += [] if decoding is None else [decoding.memory.buffer]
        versions = _versions(watched, loan)
        phase = "again" if again else "forward" if records else "alone"
        returned = self._lends(run, parameters, decoding, (phase, *call.needs[: len(run.shards)]))
        changed = False
        with _in_use(run, decoding):
            try:
                residuals = evaluate(call, parameters, inputs, records, saving, decoding, offloader)
            finally:
                written = _versions(watched, loan) != versions
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
        assert call.form is not None, "the function has run"
        refuse_opaque(signature, call.form.leaves)
        if not again and (records or any(y.requires_grad for y in residuals.outputs)):
            refuse_closure(signature, (*residuals.parameters, residuals.inputs), residuals.outputs)
        if loan is not None:
            self.reads.saw(call.mesh, run, loan.kept())
        if debugging.nan and not again:
            nonfinite.after_forward(call.mesh, run, parameters, inputs, residuals)
        return residuals, storages

    def _lends(
        self, run: StageRun, parameters: list[list[Tensor]], decoding: Decoding | None, phase: tuple[Any, ...]
    ) -> Returned | None:
        """The state of the parameters before a run, to compare with it afterwards; None for tensors without memory."""
        if any(type(p) is not Tensor for ps in parameters for p in ps[:1]):
            return None
        kind = (*run.kind, *phase)
        looked = None if kind in self.looked and not debugging.memory else partial(self.looked.add, kind)
        form = self._held.get(kind)
        if form is None or phase == ("backward",):  # forward may have changed the form of its parameters
            form = self._held[kind] = held(parameters)
        return Returned(run.signature, run.plan, parameters, form, decoding, looked)

    def _touches(self, call: Call, run: StageRun, returned: Returned) -> None:
        """Notes that calls of this kind need parameter tensors of their own; earlier calls may share this one's.

        Raises:
            RuntimeError: an earlier call shares them, so the change would affect its gradient too.
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
        """Reduces the gradients of parameters to those of the shards."""
        pendings: list[Any] = [None] * len(run.shards)
        # Two scratch memories in turn. Counted by reductions, which are the same on all ranks, and not by the tape,
        # which may differ: the order of hops depends on when a memory is free again, and must be the same everywhere.
        turn = self.reductions.turn() if any(needs[: len(run.shards)]) else 0
        recorder = recording.current()
        for k, (gather, shard) in enumerate(zip(run.plan.each, run.shards, strict=True)):
            if not needs[k]:
                continue
            if recorder is not None:
                record_gradients(recorder, gather.layout, of_parameters[k])
            variable = run.collected[k] if collect else None
            reduction = self._reduction(run.signature, gather, (k, turn), shard.dtype, variable is not None)
            total = step.sum_of(variable, reduction, self.reductions) if step and variable is not None else None
            defer = step.defer if step and total else "nothing"
            pending = self.reductions.start(reduction, of_parameters[k], total, defer)
            pendings[k] = pending if total is None else None
        arrived = [None if pending is None else self.reductions.wait(pending) for pending in pendings]
        if step is None:  # which would drain
            self.reductions.free_scratch()
        if recorder is not None:
            for gather, shard, gradient in zip(run.plan.each, run.shards, arrived, strict=False):
                if gradient is not None:
                    record_sum(recorder, gather.layout, shard, gradient)
        return arrived

    def _reduction(
        self, signature: Signature, gather: Gather, memory: tuple[int, int], dtype: torch.dtype, divides: bool
    ) -> Reduction:
        """How a buffer's gradient is reduced; with `divides`, to the layout of the shard's optimizer state."""
        summed = signature.options.sum_dtype(dtype)
        format = (signature.options.reduce or gather.layout.placement.reduce) if dtype.is_floating_point else None
        key = (gather, memory, summed, dtype, divides, format)
        reduction = self._known_reductions.get(key)
        if reduction is None:
            layout = gather.layout
            fine = layout.state_layout if divides else layout
            first = fine if layout.size == 1 else layout  # a whole parameter's gradient is scattered over all at once
            axes, replicas = first.placement.axes, fine.placement.replicas
            levels = self._levels(axes) if format else ()
            split, replica = map(self.communicator, (fine.placement.axes[len(axes) :], replicas))
            route = Route(self.communicator(axes), split, replica, levels)
            dtypes = Dtypes(gather.dtype, summed, dtype)
            reduction = self._known_reductions[key] = Reduction(first, route, dtypes, memory, format)
        return reduction

    def _levels(self, axes: tuple[str, ...]) -> tuple[Level, ...]:
        """A scatter axis by axis, the mesh's last axis first: its links are the fastest, and less is left for the
        others.
        """
        size_of = sizes(self.mesh)
        remaining, levels = [name for name in axes if size_of[name] > 1], []
        for name in sorted(remaining, key=list(size_of).index, reverse=True):
            along = self.communicator((name,))
            assert along is not None, "there are several ranks along it"
            i = remaining.index(name)
            levels.append(Level(along, math.prod(size_of[other] for other in remaining[:i])))
            remaining.remove(name)
        return tuple(levels)


def engine_of(mesh: DeviceMesh) -> Engine:
    """The engine of a mesh for this lane, whose threads take turns; each engine has its own ring and tape.

    On one rank alone threads of a lane need not take turns, and each has an engine. A thread of autograd, on which
    functions are recomputed, then works for one of them.
    """
    engines: dict[int, Engine] = per_mesh(mesh, ("engine", lane()), dict)
    thread = 0 if mesh.size() > 1 else get_ident()
    if thread and autograd.autograd_thread():
        owners = engines.keys() & {other.ident for other in threading.enumerate()}
        thread = owners.pop() if len(owners) == 1 else thread
    engine = engines.get(thread)
    return engines.setdefault(thread, Engine(mesh)) if engine is None else engine


class _in_use:
    """A context in which a function or its backward reads a run's slot and decoded parameters."""

    __slots__ = ("before", "contexts", "slot")

    def __init__(self, run: StageRun, decoding: Decoding | None) -> None:
        self.slot = run.slot
        self.contexts: list[Any] = []
        if run.saved is not None and run.slot is not None:
            self.contexts.append(run.slot.showing(run.saved))
        if decoding is not None:
            self.contexts.append(decoding.memory.lent())

    def __enter__(self) -> None:
        if self.slot is not None:
            self.before, self.slot.busy = self.slot.busy, True
            self.slot.free = None
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)
        if self.slot is not None:
            self.slot.busy = self.before


def _versions(watched: list[Tensor], loan: Loan | None) -> list[int]:
    """Version counters that change when the function writes into its parameters or other arguments."""
    versions = [x._version for x in watched]
    return versions if loan is None else [*versions, loan.version]
