"""The schedule of stages on one mesh: what is gathered when, into which slot, and what flies in backward.

Forward of a call: wait for its parameters, start the next gather, run the function on views of the slot. Backward:
the same from the other end, then send the gradients on their way. The calls of a step form a tape, which backward
follows in reverse to gather ahead; nothing outlives the step, so another order is never wrong.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Sequence
from threading import current_thread, get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.collectives.agree import agree
from shardfn.collectives.into_buffers import Communicator, communicator_of
from shardfn.collectives.ledger import here, in_place, record_buffers, recording, serving
from shardfn.compat import autograd, process_groups
from shardfn.mesh import waiting
from shardfn.mesh.axes import per_mesh, sizes
from shardfn.mesh.groups import world_of_thread
from shardfn.mesh.lanes import in_lane, lane
from shardfn.mesh.scope import independent_axes, refuse_independent, scope
from shardfn.shards.layout import Layout
from shardfn.shards.placement import Keep
from shardfn.stages.call import (
    Call,
    Residuals,
    Saving,
    differentiated,
    discarding,
    evaluate,
    leaving,
    refuse_closure,
    refuse_opaque,
    refuse_returned,
    writes,
)
from shardfn.stages.loan import Loan, loan
from shardfn.stages.reduction import Dtypes, Reductions
from shardfn.stages.residency import Key, Ring, Slot, whole_parameters
from shardfn.stages.signature import GatherPlan, Signature
from shardfn.stages.tape import LONGEST, Copies, Group, LastGather, Place, PrefetchOrder, StageRun, Tape
from shardfn.transforms.step import ReductionRoute, Step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("shardfn")
_STAGES = (
    "the stages",
    "All ranks run the same stages in the same order: a branch around a stage goes the same way on every rank",
)


class Agreed:
    """What the ranks have agreed on in one lane, whichever thread of it runs the stages.

    Attributes:
        compared: stages that run on all of them.
        inside: who runs a stage.
    """

    def __init__(self) -> None:
        self.compared: set[GatherPlan] = set()
        self.inside: _Alone | None = None


class _Alone:
    """A context: no other thread of the lane runs stages, since other ranks could not tell what is for which."""

    __slots__ = ("agreed", "depth", "name")

    def __init__(self, agreed: Agreed) -> None:
        self.agreed, self.depth, self.name = agreed, 0, current_thread().name

    def __enter__(self) -> None:
        other = self.agreed.inside
        if other is not None and other is not self:
            raise RuntimeError(
                f"threads {other.name!r} and {self.name!r} run stages at the same time, and other ranks cannot tell "
                f"them apart: give each thread a name of its own, the same on all ranks, in threading.Thread(name=...)"
            )
        self.agreed.inside, self.depth = self, self.depth + 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.agreed.inside = None


class Engine:
    """What the stages on one mesh share that one thread runs: the ring, the tape, and the gradients in flight."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = weakref.ref(mesh)
        self.device, self.lane = _device(mesh), lane()
        self.ring = Ring(self.device)
        self.reductions = Reductions(self.device)
        self.tape = Tape(None)
        self.count = 0  # of slots taken from the ring by calls that no backward follows
        self.kept: dict[Key, Slot] = {}  # from forward to backward
        self.lasting: dict[Key, Slot] = {}  # until the step is over
        self.orders: list[PrefetchOrder] = []  # what `layers` were told
        # Of the world and not of the mesh, which may go sooner on one rank than on another.
        self.agreed: Agreed = world_of_thread().agreed.setdefault(lane(), Agreed())
        # Whether backward of such a call was seen to need the parameters.
        self.reads = per_mesh(mesh, ("reads", lane()), dict[Any, bool])
        self.met: set[GatherPlan] = set()
        self.alone: Any = _Alone(self.agreed) if mesh.size() > 1 else contextlib.nullcontext()
        self.last_gathers: dict[tuple[Layout, ...], LastGather] = {}
        self._links: dict[tuple[str, ...], Communicator | None] = {}
        self._routes: dict[tuple[Layout, bool], tuple[Layout, ReductionRoute]] = {}

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh."""
        mesh = self._mesh()
        assert mesh is not None, "a mesh whose stages run is alive"
        return mesh

    def communicator(self, names: tuple[str, ...], layout: Layout) -> Communicator | None:
        """The axes, or None where there is one rank along them."""
        if names not in self._links:
            self._links[names] = communicator_of(self.mesh, names) if layout.grid.size(names) > 1 else None
        return self._links[names]

    # --- a call, forward and backward ---

    def forward(self, call: Call, shards: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs a call of a stage; its tensor outputs, without a graph."""
        with self.alone, serving(call.signature.stage, backward=False):
            place = self._begin(call, shards)
            self._gather(place.run)
            self._ahead(call, place)
            records = any(call.needs)
            keeps = records and call.signature.options.remat in (False, "offload")
            made, storages = self._run(call, place.run, inputs, records, again=False)
            if keeps:
                call.residuals = made
            call.differentiable = [y.requires_grad for y in made.outputs]
            if not records and place.run.slot is not None and not place.run.kept:
                place.run.slot.give_back()
            if place.tape is not None and isinstance(call.signature.keep, tuple) and (place.run.reads or not keeps):
                self._leave(place.tape, place.run)
            left: tuple[Tensor, ...] = leaving(made.outputs, storages, inputs, call.transformed)
            return left

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
        place = call.place
        assert place is not None, "a call runs forward before backward"
        run = place.run
        if place.tape is not None:
            place.tape.closed = True
        made, call.residuals = call.residuals, None
        with in_lane(self.lane), self.alone, serving(call.signature.stage, backward=True):
            if made is None or run.reads:
                if run.slot is None and run.plan.nbytes:  # it gave its own back, and runs backward again
                    self._take(None, run, call.signature.options.prefetch + 1)
                self._gather(run)
            self._behind(place)
            if made is None:
                with call.surroundings.again():
                    made, _ = self._run(call, run, inputs, True, again=True)
            with _in_use(run):
                gradients = differentiated(made, needs, cotangents)
            of_shards = self._reduced(place, call.step, needs, gradients[0], collect)
            self._done(place)
            return [*of_shards, *gradients[1]]

    def catch_up(self, tape: Tape, stop: int) -> None:
        """Takes the part of this rank in the backward of later calls, whose outputs its own loss does not use.

        Other ranks' losses may: what travels there comes in the order of the tape, on every rank.
        """
        front = len(tape.runs) if tape.front is None else tape.front
        for index in range(front - 1, stop - 1, -1):
            run = tape.runs[index]
            if run.done or not any(x is not None for x in run.collected):
                continue
            place = Place(tape, index, run)
            tape.closed = True
            with in_lane(self.lane), serving(run.plan.stage, backward=True):
                if run.reads or run.signature.options.remat not in (False, "offload"):
                    self._gather(run)
                self._behind(place)
                nothing: list[list[Tensor | None]] = [[None] * len(gather.layout.entries) for gather in run.plan.each]
                needs = [x is not None for x in run.collected]
                self._reduced(place, tape.step, needs, nothing, True)
                self._done(place)
        tape.front = min(front, stop)

    # --- gathering ---

    def _begin(self, call: Call, shards: tuple[Tensor, ...]) -> Place:
        """Gives a call its place on the tape and its slot, which starts to fill."""
        signature, options = call.signature, call.signature.options
        for layout in signature.layouts if independent_axes() else ():
            refuse_independent(layout.placement.axes, f"stage {signature.name}: gathering {layout.stage!r}")
        plan = signature.plan(shards)
        if plan not in self.met:
            self._meet(signature, plan)
        tape = self._tape(call, plan, shards) if any(call.needs) else None
        kept = _kept(tape, call)
        key = _key(tape, call.step, kept, plan, shards)
        run = StageRun(signature, plan, shards, key, tuple(call.needs), kept=kept, collected=call.collected)
        if tape is not None:
            run.copies = tape.copies.get(key)
        self.last_gathers[signature.layouts] = LastGather(plan, tape is not None, run.kept, signature)
        if plan.nbytes:
            self._take(tape, run, options.prefetch + 1)
        place = call.place = Place(tape, len(tape.runs) if tape else 0, run)
        if tape is not None:
            tape.runs.append(run)
            tape.waiting += 1
            if run.kept is True and run.slot is not None:
                run.slot.users += 1
                weakref.finalize(call, self._release, place).atexit = False
        return place

    def _tape(self, call: Call, plan: GatherPlan, shards: tuple[Tensor, ...]) -> Tape:
        """The tape of a new call: another one after a backward, for another step, or for other parameters."""
        now = _identities(shards)
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

    def _take(self, tape: Tape | None, run: StageRun, slots: int, busy: Slot | None = None) -> bool:
        """Finds the slot that holds what a run needs, or else fills one; False if that one is busy."""
        if run.kept:
            store = self.kept if run.kept is True else self.lasting
            run.slot = store.get(run.key)
            if run.slot is None:
                run.slot = store[run.key] = self.ring.keep(run.plan.nbytes)
                self._fill(run)
            return True
        run.slot = self.ring.find(run.key)
        if run.slot is None:
            counter: Any = self if tape is None else tape
            slot = self.ring.at(counter.count, slots, run.plan.nbytes, busy)
            if slot is None:
                return False
            counter.count += 1
            run.slot = slot
            self._fill(run)
        return True

    def _gather(self, run: StageRun) -> None:
        """Until a run's parameters are in its slot."""
        slot = run.slot
        if slot is None:
            return
        try:
            if slot.holds != run.key:
                self._fill(run)
            slot.settle()
        except RuntimeError as error:
            slot.forget()
            raise RuntimeError(
                f"stage {run.signature.name}: gathering its parameters failed on this rank: {error}"
            ) from waiting.cause(error)

    def _fill(self, run: StageRun) -> None:
        assert run.slot is not None, "a run that moves bytes has a slot"
        with serving(run.plan.stage, here.backward or False):
            if recording():
                held = {id(copy): copy for run in self.tape.runs if run.copies for copy in run.copies.shards}
                record_buffers(self.ring.nbytes() + sum(copy.nbytes for copy in held.values()))
            if run.copies is None:
                run.slot.fill(run.key, run.plan, run.shards, self.communicator)
            else:
                run.slot.fill(run.key, run.copies.plan, run.copies.shards, self.communicator)
                run.slot.sources = run.shards

    def _leave(self, tape: Tape, run: StageRun) -> None:
        """Copies what the next gathers of a run's parameters shall come from."""
        plan = run.plan.secondary
        if run.copies is not None or plan is None or run.slot is None:
            return
        shards = [
            shard if gather is secondary else run.slot.part(secondary).own.clone()
            for gather, secondary, shard in zip(run.plan.each, plan.each, run.shards, strict=True)
        ]
        run.copies = tape.copies[run.key] = Copies(plan, tuple(shards))

    def _ahead(self, call: Call, place: Place) -> None:
        """Starts the gathers of the layers that come next."""
        run, prefetch = place.run, call.signature.options.prefetch
        found: list[Group] | None = None
        for order in reversed(self.orders):
            found = order.after(run.shards[0], prefetch)
            if found is not None:
                break
        for layouts, shards in found or ():
            last = self.last_gathers.get(layouts)
            if last is not None and last.plan.nbytes and last.taped == (place.tape is not None):
                key = _key(place.tape, call.step, last.kept, last.plan, shards)
                coming = StageRun(last.signature, last.plan, shards, key, kept=last.kept)
                if not self._take(place.tape, coming, prefetch + 1, busy=run.slot):
                    return

    def _behind(self, place: Place) -> None:
        """Starts the gathers for the calls whose backward comes next."""
        if place.tape is None:
            return
        left = place.run.signature.options.prefetch
        for run in reversed(place.tape.runs[: place.index]):
            if left == 0:
                return
            if run.done or run.slot is None or run.kept or not run.reads:
                continue
            if run.slot.alternates(place.run.slot):
                return
            if run.slot.holds != run.key:
                self._fill(run)
            left -= 1

    def _release(self, place: Place) -> None:
        """A kept slot goes back when its last call is done, or gone."""
        run = place.run
        slot = run.slot
        if run.kept is True and slot is not None:
            run.slot, run.kept = None, False
            slot.users -= 1
            if slot.users == 0:
                self.kept.pop(run.key, None)
                self.ring.give_back(slot)

    def _done(self, place: Place) -> None:
        tape, run = place.tape, place.run
        self._release(place)
        run.copies = None
        if tape is not None and not run.done:
            tape.waiting -= 1
            if tape.waiting == 0 and tape is self.tape and tape.step is None:
                self.end()  # nobody else says so, and the parameters shall not be held on to
        run.done = True

    def end(self) -> None:
        """A step is over: nothing that it gathered is used again."""
        self.reductions.drain()
        self.tape = Tape(None)
        for slot in self.lasting.values():
            self.ring.give_back(slot)
        self.lasting.clear()
        # What was gathered ahead for calls that did not keep it, or never came.
        for key in [key for key, slot in self.kept.items() if slot.users == 0]:
            self.ring.give_back(self.kept.pop(key))
        for slot in self.ring.slots:
            slot.give_back()

    # --- the function ---

    def _run(
        self, call: Call, run: StageRun, inputs: tuple[Tensor, ...], records: bool, again: bool
    ) -> tuple[Residuals, list[int]]:
        """The function on the gathered parameters, and the storages of its outputs; with `records`, under autograd."""
        # What computes again in backward has a graph too, for a moment: it shows what is closed over, what may be
        # differentiated, and it is what a loss runs into that gets past the outputs. Backward takes the same room.
        keeps = records and not again and call.signature.options.remat in (False, "offload")
        lent = self._loan(call, run) if keeps else None
        signature, slot = call.signature, run.slot
        own = {autograd.storage_of(x) for x in run.shards}
        if slot is not None:
            own.add(autograd.storage_of(slot.buffer))
        if lent is None:
            parameters = whole_parameters(slot, run.plan, run.shards, call.needs)
        else:
            parameters = lent.parameters
            own.add(lent.storage)
        saving = self._saving(signature, own) if records and not again else None
        versions = _versions(run, inputs, lent)
        try:
            with _in_use(run):
                made = evaluate(call, self.mesh, parameters, inputs, records, saving)
        finally:
            written = _versions(run, inputs, lent) != versions
            if written and slot is not None:
                slot.forget()
        if written:
            raise RuntimeError(writes(signature))
        storages = refuse_returned(signature, made.outputs, own)
        refuse_opaque(signature, call.static)
        if not again and (records or any(y.requires_grad for y in made.outputs)):
            refuse_closure(signature, made)
        if lent is not None:
            self._saw(run, lent.kept())
        return made, storages

    def _saw(self, run: StageRun, reads: bool) -> None:
        """Whether a call's backward will gather, which all ranks must do or none: they agree once."""
        kind = run.kind
        if kind not in self.reads:
            with in_place(), scope(self.mesh), torch.no_grad():
                flag = torch.tensor(float(reads), device=self.device)
                self.reads[kind] = bool(functional.psum(flag, self._callers(run.signature)))
        run.reads = self.reads[kind]
        if reads and not run.reads and run.slot is not None:
            run.saved = run.slot.save()

    def _loan(self, call: Call, run: StageRun) -> Loan | None:
        """A loan by which it is seen whether backward reads parameters; none where that is known, or makes no odds.

        A call like one that did not is watched again, since gathering for its backward is left out.
        """
        known = self.reads.get(run.kind)
        if run.slot is None or run.kept or known or (known is None and call.transformed):
            return None
        if not any(call.needs[: len(run.shards)]):  # of a frozen stage, ranks differ in whether there is a backward
            return None
        lent = loan(run.slot, run.plan, run.shards, call.needs)
        if lent is None:
            self._saw(run, True)
        return lent

    def _saving(self, signature: Signature, own: set[int]) -> Any:
        """A context for what autograd saves, if hooks around the stage would take it, or it shall go to the host."""
        if not autograd.saved_tensors_hooks_allowed():
            return None
        around, remat = autograd.saved_tensors_hooks(), signature.options.remat
        if remat not in (False, "offload"):
            return None if around is None else discarding(signature.stage)
        if remat == "offload" and self.device.type == "cpu":
            _offloads_nothing(signature.name)
        away = self.device if remat == "offload" and self.device.type != "cpu" else None
        return None if away is None and around is None else Saving(signature.name, own, away, around).context()

    def _reduced(
        self,
        place: Place,
        step: Step | None,
        needs: Sequence[bool],
        of_parameters: list[list[Tensor | None]],
        collect: bool,
    ) -> list[Tensor | None]:
        """The gradients of the parameters become those of the shards."""
        run, parity = place.run, place.index % 2  # the same memory for the same call at every step
        found: list[Any] = [None] * len(run.shards)
        for k, (gather, shard) in enumerate(zip(run.plan.each, run.shards, strict=True)):
            if not needs[k]:
                continue
            variable = run.collected[k] if collect else None
            layout, route = self._route(gather.layout, variable is not None)
            total = step.sum_of(variable, layout, route, self.reductions) if step and variable is not None else None
            dtypes = Dtypes(gather.dtype, run.signature.options.sum_dtype(shard.dtype), shard.dtype)
            defer = step.defer if step and total else "nothing"
            pending = self.reductions.start((k, parity), layout, of_parameters[k], route, dtypes, total, defer)
            found[k] = pending if total is None else None
        return [None if pending is None else self.reductions.wait(pending) for pending in found]

    def _route(self, layout: Layout, divides: bool) -> tuple[Layout, ReductionRoute]:
        """Along which ranks a gradient is summed, and the layout that the first scatter goes by."""
        known = self._routes.get((layout, divides))
        if known is None:
            fine = layout.state_layout if divides else layout
            first = fine if layout.size == 1 else layout  # one that is whole is scattered once, over all
            done, left = first.placement.axes, fine.placement.replicas
            split = fine.placement.axes[len(done) :]
            known = first, ReductionRoute(*(self.communicator(names, layout) for names in (done, split, left)))
            self._routes[(layout, divides)] = known
        return known

    def _meet(self, signature: Signature, plan: GatherPlan) -> None:
        """What runs here for the first time is compared between ranks, and the ring made large enough for its like."""
        expected = per_mesh(self.mesh, "stages", dict[str, list[Layout]])
        lower = signature.options.gather_dtype
        for layouts in expected.values():
            sizes = [
                one.padded * (lower or one.dtype).itemsize
                for one in layouts
                if (one.size > 1 or lower) and one.here(process_groups.global_rank())
            ]
            self.ring.reserve(sum(-(-size // 512) * 512 for size in sizes))
        if plan in self.agreed.compared:
            self.met.add(plan)
            return
        told = [
            f"{signature.name} on {gather.layout}, gathered as {gather.dtype}, layout "
            f"{bytes(gather.tag[:8].tolist()).hex()}"
            for gather in plan.each
        ]
        with in_place():
            agree(told, self.mesh, "stage", subject=_STAGES, axes=self._callers(signature))
        self.agreed.compared.add(plan)
        self.met.add(plan)

    def _callers(self, signature: Signature) -> tuple[str, ...]:
        """Along which all ranks call a stage: not where one position has its parameters or ranks run independently."""
        elsewhere = (*signature.only_at_axes, *independent_axes())
        return tuple(name for name in sizes(self.mesh) if name not in elsewhere)


def engine_of(mesh: DeviceMesh) -> Engine:
    """The engine of a mesh for this thread: each has its own ring and its own tape."""
    return per_mesh(mesh, ("engine", get_ident(), lane()), lambda: Engine(mesh))


class _in_use:
    """A context: a function, or its backward, reads what a run's slot holds."""

    __slots__ = ("before", "showing", "slot")

    def __init__(self, run: StageRun) -> None:
        self.slot = run.slot
        self.showing = None if run.saved is None or run.slot is None else run.slot.showing(run.saved)

    def __enter__(self) -> None:
        if self.slot is not None:
            self.before, self.slot.busy = self.slot.busy, True
        if self.showing is not None:
            self.showing.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.showing is not None:
            self.showing.__exit__(*error)
        if self.slot is not None:
            self.slot.busy = self.before


@functools.cache
def _offloads_nothing(name: str) -> None:
    """Says so once for each stage."""
    _log.warning(
        'stage %s: remat="offload" keeps activations in the memory of the host, where they are anyway on a mesh of '
        "CPUs: it changes nothing here. remat=True saves memory everywhere",
        name,
    )


def _kept(tape: Tape | None, call: Call) -> Keep:
    """What a call keeps of its slot."""
    keep = call.signature.keep
    if keep == "step" and call.step is not None:
        call.step.meet(call.engine)
        return keep
    return tape is not None and keep in (True, "step")


def _key(tape: Tape | None, step: Step | None, kept: Keep, plan: GatherPlan, shards: tuple[Tensor, ...]) -> Key:
    """By the tape's number, or what all tapes of a step have in common."""
    one = step if kept == "step" else tape
    return (0 if one is None else one.number, plan, _identities(shards))


def _identities(shards: tuple[Tensor, ...]) -> tuple[tuple[int, int], ...]:
    return tuple([(id(x), 0 if x.is_inference() else x._version) for x in shards])


def _versions(run: StageRun, inputs: tuple[Tensor, ...], lent: Loan | None) -> list[int]:
    """Change when the function writes into its parameters, or into what else it was given."""
    watched = [] if run.slot is None else [run.slot.buffer]
    versions = [x._version for x in (*watched, *run.shards, *inputs) if not x.is_inference()]
    return versions if lent is None else [*versions, lent.version]


def _device(mesh: DeviceMesh) -> torch.device:
    kind = torch.device(mesh.device_type)
    return kind if kind.type == "cpu" else torch.device(kind.type, _module(kind).current_device())


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)
