"""The schedule of a mesh: starts gathers ahead of need, and leaves reductions in flight until the step ends.

Every decision about a collective depends on layouts and on the order of calls alone. So all ranks issue the same
collectives in the same order without asking each other. There is one exception: after the first call of a stage, ranks
agree on whether its backward gathers again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.check import recording
from shardfn.collectives import functional
from shardfn.collectives.capturing import capturing
from shardfn.collectives.late_checks import late_checks
from shardfn.collectives.ledger import attributed_to, open_ledgers, unscheduled
from shardfn.compat import autograd, modes
from shardfn.debugging import debugging
from shardfn.mesh.axes import per_mesh
from shardfn.mesh.groups import world_of_thread
from shardfn.mesh.lanes import in_lane, lane
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import independent_axes, refuse_independent, scope
from shardfn.stages import nonfinite
from shardfn.stages.composition import transposed
from shardfn.stages.consistency import callers, compare, lane_state
from shardfn.stages.entry_exit import Call, attributed
from shardfn.stages.gather import Gathered, free_left
from shardfn.stages.gather_plan import Gather, GatherPlan
from shardfn.stages.prefetch import Prefetch, key_of
from shardfn.stages.recorded import record_gradients, record_sum
from shardfn.stages.reduction import Reductions
from shardfn.stages.replay import RngAndAutocast
from shardfn.stages.routes import Dtypes, Reduction, routed
from shardfn.stages.signature import Signature
from shardfn.stages.tape import LONGEST, CallTape
from shardfn.tiers.activations import Away
from shardfn.tiers.offload import GradOffload
from shardfn.transforms.step import Step, current_step


class Schedule(Prefetch):
    """The stages that one lane runs on one mesh.

    Attributes:
        open: calls whose exit has run in backward, and whose entry has not.
        unwritten: kinds of calls whose functions were found to leave their parameters unchanged.
        agreed: by kind of call, whether backward of such a call gathers again; the same on all ranks.
        tapes: the step's earlier tapes; calls are now added to `tape`.
        passes: numbers of the backward passes that have opened calls.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.lane, self.world, self.lane_state = lane(), world_of_thread(), lane_state()
        self.alone: Any = self.lane_state if mesh.size() > 1 else contextlib.nullcontext()
        self.unwritten: set[Any] = set()
        self.away = Away(self.device)
        self.reductions = Reductions(self.device, GradOffload(lambda: self.mesh))
        self.open: list[Call] = []
        self.agreed: dict[Any, bool] = per_mesh(mesh, ("gathers again", self.lane), dict)
        self.tapes: list[CallTape] = []
        self.passes: set[int] = set()
        self._routed: dict[Any, Reduction] = {}
        _schedules.add(self)

    def call(
        self,
        signature: Signature,
        leaves: list[Any],
        shards: tuple[Tensor, ...],
        tensor_indices: list[int],
        make: Any = Call,
    ) -> Any:
        """Calls a stage; `make` is the class of the call, `tensor_indices` are those of tensors that are no shards."""
        if self.device.type != "cpu" and capturing() is None:
            late_checks().read()
        for layout in signature.layouts if independent_axes() else ():
            refuse_independent(layout.placement.axes, f"stage {signature.name}: gathering {layout.stage!r}")
        plan, step = signature.plan(shards), current_step()
        self.compare_stages(signature, plan)
        differentiates = torch.is_grad_enabled()
        trains = [differentiates and x.requires_grad for x in shards]
        records = any(trains) or (differentiates and any(leaves[i].requires_grad for i in tensor_indices))
        call: Call = make(self, signature, plan, shards, trains, step)
        call.key = key_of(plan, shards, call.versions)
        inside = autograd.inside_backward()  # a recomputed function makes this call
        if self.passes and not inside:  # an earlier pass failed, so its end callback did not run
            for number in [*self.passes]:
                self._end_pass(number)
        if records and not inside:
            self._tape(step, call).add(call)
        hooked = autograd.saved_tensors_hooks_allowed()
        keeps = signature.keep in (True, "step") or not hooked
        packs_places = not keeps or (signature.keep is True and hooked and call.notices and not signature.packed)
        asks = self._asks_again(call, records) if packs_places else records and bool(plan.nbytes)
        call.keeps = keeps and (asks is not False or signature.keep == "step")
        call.again = False if call.keeps and asks else asks
        with attributed(signature.stage, inside):
            result = call.run(leaves, tensor_indices, records)
        if call.nests and call.tape is not None:
            call.ended = len(call.tape.runs) - 0.5  # after the calls that it has made, before the next one
        return result

    def compare_stages(self, signature: Signature, plan: GatherPlan) -> None:
        """Compares a stage with the stages of other ranks, before its first call."""
        if (plan, signature.summed) not in self.lane_state.met:
            with modes.policies_unseen():
                compare(self.mesh, signature, plan, self.lane_state)

    def rng_and_autocast(self, generators: Sequence[torch.Generator], policy: bool) -> RngAndAutocast:
        """The random state and autocast under which a function runs, to be restored for its recomputation."""
        return RngAndAutocast(self.device, generators, again=True)

    def in_backward(self, call: Call) -> Any:
        """A context for communication of a call in backward, on whichever thread autograd runs it."""
        if get_ident() == call.thread and not (open_ledgers or debugging.collectives):
            return self.alone
        stack = contextlib.ExitStack()
        stack.enter_context(in_lane(self.lane))
        stack.enter_context(self.alone)
        stack.enter_context(attributed_to(call.signature.stage, backward=True))
        return stack

    def _asks_again(self, call: Call, records: bool) -> bool | None:
        """Whether backward of a call asks for its parameters again; None if ranks have not agreed on it for calls of
        its kind.
        """
        if not records or not call.plan.nbytes:
            return False
        if not any(call.trains) or call.signature.options.recomputes:
            # Whether a frozen stage has a backward may differ between ranks; recomputation reads all parameters.
            return True
        return self.agreed.get(self.kind_of(call))

    @staticmethod
    def kind_of(call: Call) -> Any:
        """A key for calls of the same code on the same plan, even if each step makes a new stage."""
        return call.signature.code, call.plan, tuple(call.trains)

    def ran(self, call: Call) -> None:
        """Agrees, after the first call of its kind, on whether backward gathers again: where any rank saved a place."""
        if call.again is not None:
            return
        kind, signature = self.kind_of(call), call.signature
        if planned():  # there are no other ranks to agree with
            self.agreed[kind] = call.saved or not signature.computes
            call.again = call.saved and not call.keeps
            return
        with unscheduled(), scope(self.mesh), torch.no_grad(), modes.policies_unseen():
            flags = torch.tensor([float(call.saved), float(signature.computes)], device=self.device)
            saved, computing = functional.psum(flags, callers(self.mesh, signature)).tolist()
        if computing:
            self.agreed[kind] = bool(saved)
        call.again = bool(saved) and not call.keeps

    # --- graphs of a device ---

    def empty(self) -> None:
        """Forgets what was gathered, before and after a graph."""
        if self.lane == lane() and self.world is world_of_thread():  # other threads may be inside a call
            self._drop_buffers()
            free_left()

    # --- gathers ---

    def gather(self, call: Call) -> Gathered | None:
        """The gathered parameters of a call; None if its shards are the full parameters."""
        if not call.plan.nbytes:
            call.owned = [autograd.storage_of(x) for x in call.shards]
            return None
        if modes.innermost() is not None:
            with modes.policies_unseen():
                gathered = self._gathered(call)
        else:
            gathered = self._gathered(call)
        call.gathered = gathered
        call.owned = gathered.storages()
        call.owned += [autograd.storage_of(x) for g, x in zip(call.plan.each, call.shards, strict=True) if not g.moves]
        return gathered

    # --- backward ---

    def begin_backward(self, call: Call) -> None:
        """Starts a call's backward: gathers again, after joining that of later calls that this rank's loss ignores."""
        step, tape, outer = call.step, call.tape, call.outer
        if step is not None and tape is not None and step.collects():
            if outer is not None and outer.tape is not None:
                self.catch_up_inside(outer, call)
            else:
                step.catch_up(tape, call.index)
        self._begin(call)

    def end_others(self, call: Call) -> None:
        """Ends the backward of calls that precede this one in the pass, such as those whose entry gets no gradient.

        Call it outside of any context of this call: it leaves the attribution contexts of those calls.
        """
        around, outer, current_pass = set(), call.outer, autograd.backward_pass()
        while outer is not None:
            around.add(outer)
            outer = outer.outer
        for other in [other for other in self.open if other.opened_in == current_pass and other not in around]:
            self.release(other)

    def _begin(self, call: Call) -> None:
        if call.tape is not None:
            call.tape.closed = True
        current_pass = autograd.backward_pass()
        if current_pass != -1 and current_pass not in self.passes:  # calls that a pass has opened end with it
            self.passes.add(current_pass)
            autograd.at_end_of_pass(functools.partial(self._end_pass, current_pass))
        call.opened_in = current_pass
        self.away.ahead(call.tape, call)
        if call not in self.open:
            self.open.append(call)
        if call.again and call.gathered is None:
            self.gather_again(call)

    def _end_pass(self, number: int) -> None:
        self.passes.discard(number)
        for call in [call for call in self.open if call.opened_in == number]:
            with in_lane(self.lane):
                self.release(call)
        if self.tape.step is None and not self.passes:
            self.tape.end()
            self.tape = CallTape(None)
            self._drop_buffers()
            self.reductions.trim()
            self.orders.clear()

    def release(self, call: Call) -> None:
        """Ends a call's backward: nothing asks for its parameters any more."""
        if call.attribution is not None:
            call.end_attribution()
        if call in self.open:
            self.open.remove(call)
        if not call.stays:
            call.gathered = None
            call.flat.clear()
            call.decoded.clear()
        if call.keeps and not call.done and call.tape is not None and call.key in call.tape.held:
            holders = call.tape.held[call.key]
            holders[1] -= 1
            if holders[1] == 0:
                del call.tape.held[call.key]
            self.gathering.pool.trim(all=True)  # gradients take the place of parameters
        call.done = True
        self.away.done()

    # --- reductions ---

    def reduce(self, call: Call, gradients: list[list[Tensor | None]], unused: bool = False) -> list[Tensor | None]:
        """Reduces the gradients of parameters to those of shards; None for those that the step collects."""
        step = call.step
        collects = unused or (step is not None and step.collects())
        pendings: list[Any] = [None] * len(call.shards)
        if any(call.trains):  # which is the same on all ranks, as the order of later hops depends on it
            self.reductions.turn()
        recorder = recording.current()
        for k, (gather, shard) in enumerate(zip(call.plan.each, call.shards, strict=True)):
            if not call.reduces[k]:
                continue
            if recorder is not None:
                record_gradients(recorder, gather.layout, gradients[k])
            variable = call.collected[k] if collects else None
            reduction = self.reduction_of(call.signature, gather, shard.dtype, variable is not None)
            total = None
            if step is not None and variable is not None:
                total = step.sum_of(variable, reduction, self.reductions)
                if self not in step.schedules:  # of a step in a hook, which has no tape with these calls
                    step.add_schedule(self)
            defer, parts = (step.defer, step.parts) if step and total else ("nothing", None)
            pending = self.reductions.start(reduction, gradients[k], total, defer, parts)
            pendings[k] = pending if total is None else None
            gradients[k] = []
        arrived = [None if pending is None else self.reductions.wait(pending) for pending in pendings]
        if recorder is not None:
            for gather, shard, gradient in zip(call.plan.each, call.shards, arrived, strict=True):
                if gradient is not None:
                    record_sum(recorder, gather.layout, shard, gradient)
        return arrived

    def reduction_of(self, signature: Signature, gather: Gather, dtype: torch.dtype, divides: bool) -> Reduction:
        """The reduction of a buffer's gradient; with `divides`, to the layout of the shard's optimizer state."""
        dtypes = Dtypes(gather.dtype, signature.options.sum_dtype(dtype), dtype)
        format = (
            (signature.options.reduce_format or gather.layout.placement.reduce_format)
            if dtype.is_floating_point
            else None
        )
        key = gather, dtypes, divides, format
        if key not in self._routed:
            self._routed[key] = routed(gather, dtypes, format, divides, self.mesh, self.communicator)
        return self._routed[key]

    # --- the step ---

    def _tape(self, step: Step | None, call: Call) -> CallTape:
        """The tape of a new call: a new one after a backward, for a different step, or for different parameters."""
        tape = self.tape
        changed = tape.keys.get(call.plan, call.key) != call.key
        if tape.closed or tape.step is not step or len(tape.runs) >= LONGEST or (step is None and changed):
            if tape.step is None:
                tape.end()
            else:
                self.tapes.append(tape)
            self.tape = CallTape(step)
            if step is not None:
                step.join(self, self.tape)
        return self.tape

    def catch_up(self, tape: CallTape, stop: int) -> None:
        """Does this rank's part in the backward of later calls whose outputs its own loss does not use.

        Other ranks' losses may use them, and all ranks must issue collectives in the order of the tape.
        """
        front = len(tape.runs) if tape.front is None else tape.front
        for call in reversed(tape.runs[stop:front]):
            if call.outer is None or call.outer.tape is None:  # else `catch_up_inside` of the outer call does
                self._without_gradient(call)
        tape.front = min(front, stop)

    def catch_up_inside(self, outer: Call, after: Call | None = None) -> None:
        """As `catch_up`, for the calls inside the function of `outer`: those after the call `after`, or all of them."""
        step = outer.step if outer.nests else None
        if step is None or not step.collects():
            return
        calls = [(schedule, call) for schedule, tape in step.tapes for call in tape.runs if call.outer is outer]
        for schedule, call in reversed(calls):
            if call is after:
                return
            schedule._without_gradient(call)

    def _without_gradient(self, call: Call) -> None:
        """Joins the backward of a call with a zero gradient, on a rank whose loss does not use the call."""
        if call.done or (any(call.trains) and not any(x is not None for x in call.collected)):
            return  # autograd collects its gradient, so none can be added here
        self.end_others(call)
        with attributed_to(call.signature.stage, backward=True):
            self._begin(call)
            if call.again and call.gathered is not None:
                call.gathered.wait()
            nothing: list[list[Tensor | None]] = [[None] * len(g.layout.entries) for g in call.plan.each]
            if debugging.nan and any(call.trains):
                nonfinite.raise_nonfinite(self.mesh, call, "")
            self.catch_up_inside(call)
            if call.step is not None and call.step.graph:
                with scope(self.mesh):
                    transposed(call.plan, call.shards, call.trains, nothing)
            else:
                self.reduce(call, nothing, unused=True)
            self.release(call)

    def end(self, failed: bool = False) -> None:
        """Ends a step: nothing that it gathered is used again.

        A step that failed waits for nothing, since other ranks may be gone. On a CPU, the next collective on the same
        group waits for the messages that are still in flight.
        """
        try:
            if failed:
                self.reductions.drop_all()
            else:
                self.reductions.drain()
                if self.device.type != "cpu":
                    late_checks().close()
        finally:
            self.gathering.disk.give_up()
            for call in self.open[:]:
                self.release(call)
            self.passes.clear()
            for tape in (*self.tapes, self.tape):
                tape.end()
            self.tapes, self.tape = [], CallTape(None)
            self._drop_buffers(waits=not failed)
            self.orders.clear()
            self.away.end()


_schedules: weakref.WeakSet[Schedule] = weakref.WeakSet()


def forget_gathered(device: torch.device) -> None:
    """Forgets gathered parameters: a graph uses none from outside of it, and later calls use none of the graph's."""
    for schedule in list(_schedules):
        if schedule.device == device:
            schedule.empty()


def schedule_of(mesh: DeviceMesh) -> Schedule:
    """The schedule of a mesh for this lane, whose threads take turns; on one rank, each thread has its own."""
    schedules: dict[int, Schedule] = per_mesh(mesh, ("schedule", lane()), dict)
    thread = 0 if mesh.size() > 1 else get_ident()
    # A recomputed function may call stages on an autograd thread; their schedule is that of the thread it works for.
    if thread and autograd.autograd_thread():
        owners = schedules.keys() & {other.ident for other in threading.enumerate()}
        thread = owners.pop() if len(owners) == 1 else thread
    schedule = schedules.get(thread)
    return schedules.setdefault(thread, Schedule(mesh)) if schedule is None else schedule
