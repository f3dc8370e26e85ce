"""When stages communicate: gathers start ahead of need, and reductions fly until the step ends.

Two lists say what to gather early: the order that `layers` announced, and the calls of this step so far, which backward
follows in reverse. Both, and all else that decides about a message, depend on layouts and on the order of calls alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.check import recording
from shardfn.collectives import functional
from shardfn.collectives.capturing import capturing, not_in_graphs
from shardfn.collectives.into_buffers import Communicator, communicator_of, purpose_of
from shardfn.collectives.late_checks import late_checks
from shardfn.collectives.ledger import attributed_to, record_buffers, unscheduled
from shardfn.collectives.ledger import recording as ledger_open
from shardfn.compat import autograd, functorch, modes
from shardfn.debugging import debugging
from shardfn.mesh import waiting
from shardfn.mesh.axes import device_of, per_mesh, sizes
from shardfn.mesh.groups import world_of_thread
from shardfn.mesh.lanes import in_lane, lane
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import independent_axes, refuse_independent, scope
from shardfn.stages import nonfinite
from shardfn.stages.consistency import callers, compare, lane_state
from shardfn.stages.entry_exit import Call, named, names_stages
from shardfn.stages.forward_mode import Pairs
from shardfn.stages.gather import Gathered, Gathering, Secondary, free_left
from shardfn.stages.paired_call import PairedCall
from shardfn.stages.prefetch import PrefetchOrder
from shardfn.stages.recorded import record_gradients, record_sum
from shardfn.stages.reduction import Dtypes, Level, Reduction, Reductions, Route
from shardfn.stages.replay import RngAndAutocast
from shardfn.stages.signature import Gather, GatherPlan, Signature
from shardfn.tiers.activations import Away
from shardfn.tiers.offload import GradOffload
from shardfn.transforms.step import Step, current_step

Key = tuple[Any, ...]
_numbers = itertools.count(1)


class Wanted(NamedTuple):
    """A gather that is needed, or likely to be next: what it is known by, and how to start it."""

    key: Key
    plan: GatherPlan
    shards: Sequence[Tensor]
    of: Sequence[Tensor]  # the shards by which it is known
    again: bool = False
    keeps: bool = False


def key_of(plan: GatherPlan, shards: Sequence[Tensor], versions: Sequence[int]) -> Key:
    """What a buffer is known by, while it holds these tensors."""
    changing = next(_numbers) if -1 in versions else 0
    return (plan, changing, *map(id, shards), *versions)


class CallTape:
    """The calls of one step that may get a backward, in order; without a step, those since the last backward."""

    def __init__(self, step: Step | None) -> None:
        self.step = step
        self.runs: list[Call] = []
        self.held: dict[Key, list[Any]] = {}  # what calls keep from forward to backward, and how many do
        self.secondary: dict[Key, Secondary] = {}  # pieces that forward left for backward to gather from
        self.keys: dict[GatherPlan, Key] = {}  # of which tensors each stage was called with
        self.closed = False
        self.front: int | None = None  # the last call that a step's backward has reached

    def add(self, call: Call) -> None:
        """Appends a call."""
        call.tape, call.index = self, len(self.runs)
        self.runs.append(call)
        self.keys[call.plan] = call.key

    def end(self) -> None:
        """Ends the tape: no call on it has a backward any more."""
        self.closed = True
        self.runs.clear()
        self.held.clear()
        self.secondary.clear()


LONGEST = 4096  # most calls on a tape; bounds it in a program that never asks for a gradient
ORDERS = 4  # most announced orders


class Schedule:
    """The stages that one lane runs on one mesh.

    Attributes:
        buffers: what is gathered or under way, by what it was made of; who needs one holds it, too.
        kept: the same, for calls that keep it until the step ends.
        open: calls whose exit has run in backward, and whose entry has not.
        orders: orders that `layers` announced, the latest last.
        last: by the layouts of a stage, how its last call gathered it, and whether it kept that; the next is expected
            to do the same.
        compared: kinds of calls whose functions left their parameters as they were.
        agreed: by kind of call, whether backward of such a call gathers again; the same on all ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = weakref.ref(mesh)
        self.device, self.lane, self.world = device_of(mesh), lane(), world_of_thread()
        self.lane_state = lane_state()
        self.alone: Any = self.lane_state if mesh.size() > 1 else contextlib.nullcontext()
        self.met: set[tuple[GatherPlan, str]] = set()
        self.compared: set[Any] = set()
        self.gathering = Gathering(self.device, self.communicator)
        self.away = Away(self.device)
        self.reductions = Reductions(self.device, GradOffload(lambda: self.mesh))
        self.buffers: dict[Key, Gathered] = {}
        self.kept: dict[Key, Gathered] = {}
        self.open: list[Call] = []
        self.orders: deque[PrefetchOrder] = deque(maxlen=ORDERS)
        self.last: dict[Any, tuple[GatherPlan, bool]] = {}
        self.agreed: dict[Any, bool] = per_mesh(mesh, ("gathers again", self.lane), dict)
        self.tape = CallTape(None)
        self.tapes: list[CallTape] = []  # of the step, before that one
        self.passes: set[int] = set()  # backward passes that have opened calls
        not_in_graphs(self)
        self._communicators: dict[tuple[str, ...], Communicator | None] = {}
        self._reductions: dict[Any, Reduction] = {}

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh; the schedule holds it weakly."""
        mesh = self._mesh()
        assert mesh is not None, "a mesh whose stages run is alive"
        return mesh

    def communicator(self, names: tuple[str, ...]) -> Communicator | None:
        """The communicator along these axes; None if there is one rank along them."""
        if names not in self._communicators:
            several = math.prod(sizes(self.mesh)[name] for name in names) > 1
            self._communicators[names] = communicator_of(self.mesh, names) if several else None
        return self._communicators[names]

    def call(
        self,
        signature: Signature,
        leaves: list[Any],
        shards: tuple[Tensor, ...],
        at: list[int],
        pairs: Pairs | None = None,
    ) -> Any:
        """Calls a stage, or one of pairs; `at` says which leaves are tensors, besides the shards."""
        if self.device.type != "cpu" and capturing() is None:
            late_checks().read()
        for layout in signature.layouts if independent_axes() else ():
            refuse_independent(layout.placement.axes, f"stage {signature.name}: gathering {layout.stage!r}")
        plan, step = signature.plan(shards), current_step()
        self.meet(signature, plan)
        differentiates = torch.is_grad_enabled()
        trains = [differentiates and x.requires_grad for x in shards]
        records = any(trains) or (differentiates and any(leaves[i].requires_grad for i in at))
        if pairs is None:
            call = Call(self, signature, plan, shards, trains, step)
        else:
            call = PairedCall(pairs, self, shards, trains, step)
        call.key = key_of(plan, shards, call.versions)
        inside = autograd.inside_backward()  # by a function that runs again
        if self.passes and not inside:  # one failed, and did not come to its end
            for number in [*self.passes]:
                self._end_pass(number)
        if records and not inside:
            self._tape(step, call).add(call)
            if call.outer is not None:
                call.outer.nests = True
        hooked = autograd.saved_tensors_hooks_allowed()
        keeps = signature.keep in (True, "step") or not hooked
        seen = not keeps or (signature.keep is True and hooked and pairs is None and not signature.packed)
        asks = self._asks_again(call, records) if seen else records and bool(plan.nbytes)
        call.keeps = keeps and (asks is not False or signature.keep == "step")
        call.again = False if call.keeps and asks else asks
        with named(signature.stage, inside):
            return call.run(leaves, at, records)

    def meet(self, signature: Signature, plan: GatherPlan) -> None:
        """Compares a stage with the other ranks', before its first call."""
        if (plan, signature.summed) not in self.met:
            with modes.policies_unseen():
                compare(self.mesh, signature, plan, self.lane_state)
            self.met.add((plan, signature.summed))

    def surroundings(self, generators: Sequence[torch.Generator], policy: bool) -> RngAndAutocast:
        """What a function may depend on besides its arguments, for running it again, perhaps under a policy."""
        return RngAndAutocast(self.device, generators, again=True)

    def in_backward(self, call: Call) -> Any:
        """A context for communication of a call in backward, on whichever thread autograd runs it."""
        if get_ident() == call.thread and not names_stages():
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
        remat = call.signature.options.remat
        if not any(call.trains) or not (remat is False or call._offloads()):
            return True  # of a frozen stage ranks may differ in whether there is a backward; what runs again reads all
        return self.agreed.get(self.kind_of(call))

    @staticmethod
    def kind_of(call: Call) -> Any:
        """What calls have in common, also if their stage is made anew at every step."""
        return call.signature.code, call.plan, tuple(call.trains)

    def ran(self, call: Call) -> None:
        """Agrees, after the first call of its kind, on whether backward gathers again: where any rank saved a place."""
        if call.again is not None:
            return
        kind, signature = self.kind_of(call), call.signature
        if planned():  # no other rank says anything
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
        if self.lane == lane() and self.world is world_of_thread():  # other threads may be in the midst of a call
            self._drop_buffers()
            free_left()

    # --- gathers ---

    def announce(self, order: PrefetchOrder) -> None:
        """Announces stages in the order of their use, until it is withdrawn or the step ends."""
        self.withdraw(order)
        if not functorch.inside_transform():  # where nothing is gathered ahead
            self.orders.append(order)

    def withdraw(self, order: PrefetchOrder) -> None:
        """Takes an order back: all its stages have been called."""
        if order in self.orders:
            self.orders.remove(order)

    def gather(self, call: Call) -> Gathered | None:
        """What a call's function computes with; None if its shards are the parameters."""
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

    def _gathered(self, call: Call) -> Gathered:
        own = Wanted(call.key, call.plan, call.shards, call.shards, keeps=call.keeps)
        self._turn(call, [own, *self.announced(call)])
        gathered = self._found(call.key)
        assert gathered is not None, "it has been started"
        if call.keeps:
            self._keep(call, gathered)
        try:
            gathered.wait()
        except RuntimeError as error:
            self.forget(gathered)
            raise RuntimeError(
                f"stage {call.signature.name}: gathering its parameters failed on this rank: {error}"
            ) from waiting.cause(error)
        return gathered

    def _found(self, key: Key) -> Gathered | None:
        """What is there, or under way."""
        found = self.buffers.get(key) or self.kept.get(key)
        if found is None and key in self.tape.held:
            found = self.tape.held[key][0]
        return found

    def _keep(self, call: Call, gathered: Gathered) -> None:
        """Keeps what was gathered until the step ends, or until the last call that keeps it has had its backward."""
        if call.signature.keep == "step" and call.step is not None:
            self.kept[call.key] = gathered
            call.step.meet(self)
        elif call.tape is not None:
            call.tape.held.setdefault(call.key, [gathered, 0])[1] += 1
            self.buffers.pop(call.key, None)

    def announced(self, call: Call) -> list[Wanted]:
        """The stages that `layers` announced to come next, if a call has shown how they are gathered."""
        signature, count = call.signature, call.signature.options.prefetch
        self.last[signature.layouts] = call.plan, call.keeps
        groups = None
        for order in reversed(self.orders):
            groups = order.after(call.shards[0], 2 * count)
            if groups is not None:
                break
        found = []
        for layouts, shards in (groups or ())[:count]:
            plan, keeps = self.last.get(layouts, (None, False))
            if plan is not None and plan.nbytes and -1 not in (versions := autograd.versions_of(shards)):
                found.append(Wanted(key_of(plan, shards, versions), plan, shards, shards, keeps=keeps))
        for layouts, shards in (groups or ())[count:]:
            self._announce(layouts, shards)
        return found

    def _announce(self, layouts: Sequence[Any], shards: Sequence[Tensor]) -> None:
        """Starts to read shards from disk that will be gathered after those that are gathered now."""
        for layout, shard in zip(layouts, shards, strict=True):
            if layout.placement.tiers.params == "disk":
                self.gathering.disk.announce(shard)

    def _turn(self, call: Call, wanted: Sequence[Wanted]) -> None:
        """Starts what is needed now and what is likely to be next.

        Lets go of all else, which those hold who need it; but where less comes next than may be gathered early, what
        came last stays in its place, as backward begins with that.
        """
        stays = {one.key for one in wanted}
        places = 1 + call.signature.options.prefetch - (len(stays) - call.keeps)
        stays.update([key for key in reversed(self.buffers) if key not in stays][:places] if places > 0 else ())
        for key in [key for key in self.buffers if key not in stays]:
            self.buffers.pop(key).wait()  # if nobody used it, its memory is written to until it has come
        for one in wanted:
            found = self._found(one.key)
            if found is None:
                with named(one.key[0].stage):
                    found = self.start(call, one)
                found.of = one.of
            self.buffers.pop(one.key, None)
            self.buffers[one.key] = found  # as the latest

    def start(self, call: Call, one: Wanted) -> Gathered:
        """Starts a gather, for a call."""
        if ledger_open():
            pieces = {id(x): x.nbytes for kept in self.tape.secondary.values() for x in kept.shards}
            record_buffers(self.gathering.pool.nbytes() + sum(pieces.values()))
        return Gathered(one.plan, one.shards, self.gathering, one.again, one.keeps)

    def forget(self, gathered: Gathered) -> None:
        """What was gathered must not be used again."""
        for store in (self.buffers, self.kept):
            for key in [key for key, other in store.items() if other is gathered]:
                del store[key]

    def leave(self, call: Call, gathered: Gathered) -> None:
        """Ends the use of what was gathered in forward; keeps pieces from which backward gathers, if they are larger
        than the shards.
        """
        if call.tape is None:  # no backward comes, and shards may change unseen until the next call
            self.buffers.pop(call.key, None)
        plan = call.plan.secondary
        if plan is None or not isinstance(call.signature.keep, tuple) or call.tape is None or call.again is False:
            return
        secondary = call.tape.secondary
        if call.key not in secondary:
            shards = [
                shard if gather is secondary else self.piece(gathered, secondary)
                for gather, secondary, shard in zip(call.plan.each, plan.each, call.shards, strict=True)
            ]
            secondary[call.key] = Secondary(plan, tuple(shards))
        call.secondary = secondary[call.key]

    def piece(self, gathered: Gathered, gather: Gather) -> Tensor:
        """A copy of this rank's own part of what was gathered, from which backward gathers."""
        comm = self.communicator(gather.layout.placement.axes)
        return gathered.piece(gather, 0 if comm is None else comm.axis.index)

    # --- backward ---

    def gather_again(self, call: Call) -> None:
        """Starts to gather a call's parameters for backward, and those of the calls before it."""
        if call.again:
            self._turn(call, [self._again(call), *self.before(call)])
            call.gathered = self._found(call.key)
        else:  # no exit told the other ranks' that it is needed, but they have the same call
            call.gathered = self.start(call, self._again(call))

    def _again(self, call: Call) -> Wanted:
        if autograd.versions_of(call.shards) != call.versions:
            raise RuntimeError(
                f"{call.signature}: a shard has been modified by an inplace operation between forward and backward, "
                f"which would compute with other numbers: update parameters after backward"
            )
        if call.secondary is not None:
            return Wanted(call.key, call.secondary.plan, call.secondary.shards, call.shards, again=True)
        return Wanted(call.key, call.plan, call.shards, call.shards, again=True)

    def before(self, call: Call) -> list[Wanted]:
        """The gathers of the calls whose backward comes next."""
        found = []
        gathers = announcements = call.signature.options.prefetch
        for other in reversed(call.tape.runs[: call.index]) if call.tape is not None else ():
            if gathers == announcements == 0:
                break
            if other.done or not other.again:
                continue
            if gathers == 0:
                if other.secondary is None:
                    self._announce(other.signature.layouts, other.shards)
                announcements -= 1
                continue
            if other.key != call.key:
                found.append(self._again(other))
            gathers -= 1
        return found

    def leaving(self, call: Call) -> None:
        """A call's exit in backward: gathers again, after its part in later calls that its own loss does not use."""
        step, tape, outer = call.step, call.tape, call.outer
        if step is not None and tape is not None and step.collects():
            if outer is not None and outer.tape is not None:
                self.catch_up_inside(outer, call)
            else:
                step.catch_up(tape, call.index)
        self._begin(call)

    def end_others(self, call: Call) -> None:
        """Ends the backward of calls that this one comes after, as of those without an entry there; outside of any
        context, as that ends theirs.
        """
        around, outer, now = set(), call.outer, autograd.backward_pass()
        while outer is not None:
            around.add(outer)
            outer = outer.outer
        for other in [other for other in self.open if other.opened_in == now and other not in around]:
            self.release(other)

    def _begin(self, call: Call) -> None:
        if call.tape is not None:
            call.tape.closed = True
        now = autograd.backward_pass()
        if now != -1 and now not in self.passes:  # what a pass has opened ends with it
            self.passes.add(now)
            autograd.at_end_of_pass(functools.partial(self._end_pass, now))
        call.opened_in = now
        self.away.ahead(call.tape, call)
        if call not in self.open:
            self.open.append(call)
        if call.again and call.gathered is None:
            self.gather_again(call)

    def _end_pass(self, number: int) -> None:
        self.passes.discard(number)
        for call in [call for call in self.open if call.opened_in == number]:
            self.release(call)
        if self.tape.step is None and not self.passes:
            self.tape.end()
            self.tape = CallTape(None)
            self._drop_buffers()
            self.orders.clear()

    def release(self, call: Call) -> None:
        """Ends a call's backward: nothing asks for its parameters any more."""
        call.end_attribution()
        if call in self.open:
            self.open.remove(call)
        if not call.stays:
            call.gathered = None
            call.flat.clear()
            call.decoded.clear()
        if call.keeps and not call.done and call.tape is not None and call.key in call.tape.held:
            held = call.tape.held[call.key]
            held[1] -= 1
            if held[1] == 0:
                del call.tape.held[call.key]
            self.gathering.pool.trim(all=True)  # gradients take the place of parameters
        call.done = True
        self.away.done()

    # --- reductions ---

    def reduce(self, call: Call, gradients: list[list[Tensor | None]], nothing: bool = False) -> list[Tensor | None]:
        """Reduces the gradients of parameters to those of shards; None for those that the step collects."""
        step = call.step
        collects = nothing or (step is not None and step.collects())
        pendings: list[Any] = [None] * len(call.shards)
        # Two scratch memories in turn, counted by reductions, which are the same on all ranks.
        turn = self.reductions.turn() if any(call.trains) else 0
        recorder = recording.current()
        for k, (gather, shard) in enumerate(zip(call.plan.each, call.shards, strict=True)):
            if not call.reduces[k]:
                continue
            if recorder is not None:
                record_gradients(recorder, gather.layout, gradients[k])
            variable = call.collected[k] if collects else None
            reduction = self.reduction_of(call.signature, gather, (k, turn), shard.dtype, variable is not None)
            total = step.sum_of(variable, reduction, self.reductions) if step and variable is not None else None
            defer = step.defer if step and total else "nothing"
            pending = self.reductions.start(reduction, gradients[k], total, defer)
            pendings[k] = pending if total is None else None
            gradients[k] = []
        arrived = [None if pending is None else self.reductions.wait(pending) for pending in pendings]
        if step is None:
            self.reductions.free_scratch()
        if recorder is not None:
            for gather, shard, gradient in zip(call.plan.each, call.shards, arrived, strict=True):
                if gradient is not None:
                    record_sum(recorder, gather.layout, shard, gradient)
        return arrived

    def transposed(self, call: Call, gradients: list[list[Tensor | None]]) -> list[Tensor | None]:
        """The same as a part of a graph, by collectives that can be differentiated again."""
        found: list[Tensor | None] = []
        with scope(self.mesh):
            for k, (gather, shard) in enumerate(zip(call.plan.each, call.shards, strict=True)):
                if not call.trains[k]:
                    found.append(None)
                    continue
                layout, placement = gather.layout, gather.layout.placement
                parts, at = [], 0
                # Depends on something that has a gradient, so that its own backward runs on all ranks or on none.
                anchor = shard.new_zeros((), dtype=gather.dtype).requires_grad_()
                for entry, g in zip(layout.entries, gradients[k], strict=True):
                    parts.append(anchor.expand(entry.offset - at))
                    parts.append(anchor.expand(entry.numel) if g is None else g.reshape(-1))
                    at = entry.offset + entry.numel
                flat = torch.cat([*parts, anchor.expand(layout.padded - at)]).to(shard.dtype)
                if layout.size > 1:
                    flat = functional.reduce_scatter(flat, placement.axes)
                if layout.grid.size(placement.replicas) > 1:
                    flat = functional.psum(flat, placement.replicas)
                found.append(flat)
        return found

    def reduction_of(
        self, signature: Signature, gather: Gather, memory: tuple[int, int], dtype: torch.dtype, divides: bool
    ) -> Reduction:
        """How a buffer's gradient is reduced; with `divides`, to the layout of the shard's optimizer state."""
        summed = signature.options.sum_dtype(dtype)
        format = (signature.options.reduce or gather.layout.placement.reduce) if dtype.is_floating_point else None
        key = (gather, memory, summed, dtype, divides, format)
        reduction = self._reductions.get(key)
        if reduction is None:
            layout = gather.layout
            fine = layout.state_layout if divides else layout
            first = fine if layout.size == 1 else layout  # a whole parameter's gradient is scattered over all at once
            axes, replicas = first.placement.axes, fine.placement.replicas
            levels = self._levels(axes) if format else ()
            split, replica = map(self.communicator, (fine.placement.axes[len(axes) :], replicas))
            route = Route(self.communicator(axes), split, replica, levels)
            dtypes = Dtypes(gather.dtype, summed, dtype)
            identity = repr((layout.stage, layout.entries, layout.padded, str(summed), divides))
            purpose = purpose_of(f"reduces {identity}")
            reduction = self._reductions[key] = Reduction(first, route, dtypes, memory, format, purpose)
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

    # --- the step ---

    def _tape(self, step: Step | None, call: Call) -> CallTape:
        """The tape of a new call: a new one after a backward, for another step, or for other parameters."""
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
            if call.outer is None or call.outer.tape is None:  # else with that one
                self._without_gradient(call)
        tape.front = min(front, stop)

    def catch_up_inside(self, outer: Call, after: Call | None = None) -> None:
        """The same for calls in the function of another one, `after` one of these."""
        step = outer.step if outer.nests else None
        if step is None or not step.collects():
            return
        calls = [(schedule, call) for schedule, tape in step.tapes for call in tape.runs if call.outer is outer]
        for schedule, call in reversed(calls):
            if call is after:
                return
            schedule._without_gradient(call)

    def _without_gradient(self, call: Call) -> None:
        """A call's part in backward, on a rank whose loss does not use it."""
        if call.done or (any(call.trains) and not any(x is not None for x in call.collected)):
            return  # its gradient goes through autograd, which has no use for one from here
        self.end_others(call)
        with attributed_to(call.signature.stage, backward=True):
            self._begin(call)
            if call.again and call.gathered is not None:
                call.gathered.wait()
            nothing: list[list[Tensor | None]] = [[None] * len(g.layout.entries) for g in call.plan.each]
            if debugging.nan and any(call.trains):
                nonfinite.compare(self.mesh, call, "")
            self.catch_up_inside(call)
            if call.step is not None and call.step.graph:
                self.transposed(call, nothing)
            else:
                self.reduce(call, nothing, nothing=True)
            self.release(call)

    def _drop_buffers(self, waits: bool = True) -> None:
        for store in (self.buffers, self.kept):
            for gathered in store.values() if waits else ():
                gathered.wait()
            store.clear()
        self.gathering.pool.trim()

    def end(self, failed: bool = False) -> None:
        """Ends a step: nothing that it gathered is used again.

        One that failed waits for nothing, since other ranks may be gone. What is under way on a CPU is waited for by
        whatever comes next on the same group.
        """
        try:
            if failed:
                self.reductions.forget()
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


def schedule_of(mesh: DeviceMesh) -> Schedule:
    """The schedule of a mesh for this lane, whose threads take turns; on one rank alone each thread has its own."""
    schedules: dict[int, Schedule] = per_mesh(mesh, ("schedule", lane()), dict)
    thread = 0 if mesh.size() > 1 else get_ident()
    if thread and autograd.autograd_thread():  # on which functions run again, for one of the others
        owners = schedules.keys() & {other.ident for other in threading.enumerate()}
        thread = owners.pop() if len(owners) == 1 else thread
    schedule = schedules.get(thread)
    return schedules.setdefault(thread, Schedule(mesh)) if schedule is None else schedule
