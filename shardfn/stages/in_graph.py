"""The schedule of a stage where a step is traced into one graph: gathers and reductions are operations of that graph.

A stage's parameters are gathered right before its function, and again for its backward, as the engine does it, so that
the graph needs no more memory than the engine. What autograd saves of parameters are places in the gathered buffer,
which are found again in the buffer that is gathered for backward.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives.capturing import Watch, capturing
from shardfn.collectives.ledger import attributed_to
from shardfn.collectives.scheduled import Scheduled, run
from shardfn.compat import autograd
from shardfn.mesh.lanes import in_lane
from shardfn.shards.placement import Keep
from shardfn.stages.call import Call, Residuals, differentiated, evaluate
from shardfn.stages.engine import Engine
from shardfn.stages.options import Offload
from shardfn.stages.reduction import Reduction
from shardfn.stages.refusals import refuse_closure, refuse_returned
from shardfn.stages.replay import entered
from shardfn.stages.ring import Slot
from shardfn.stages.signature import GatherPlan
from shardfn.stages.traced import Drawing, Reducing, like_gathered, order_of
from shardfn.transforms.step import GradientSum, Step, owned, wider


class Gathering(Scheduled):
    """The gather of a stage's parameters: `shards -> gathered buffers`, those of `plan` that move.

    Args:
        leaves: whether it also returns copies of the larger pieces from which backward gathers.
    """

    lends = True

    def __init__(self, engine: Engine, plan: GatherPlan, backward: bool, leaves: bool, ahead: int) -> None:
        super().__init__()
        self.engine, self.backward, self.ahead = engine, backward, ahead
        self.plan = plan.copying
        self.pieces = plan.secondary.each if leaves and plan.secondary is not None else ()

    def __str__(self) -> str:
        return f"gather {self.plan.stage}: {', '.join(f'{g.layout.padded} {g.dtype}' for g in self.plan.each)}"

    def like(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Tensors like its results."""
        return like_gathered(self.plan, self.pieces, self.engine.device)

    def start(self, inputs: Sequence[Tensor | None]) -> Slot:
        """Starts it."""
        engine, residency = self.engine, self.engine.residency
        slot = residency.ring.outside(self.plan.nbytes)
        shards = tuple(x for x in inputs if x is not None)
        with in_lane(engine.lane), attributed_to(self.plan.stage, self.backward):
            slot.fill((self.number,), self.plan, shards, residency.means)
        return slot

    def finish(self, started: Slot) -> list[Tensor]:
        """Waits for it; returns its results."""
        with attributed_to(self.plan.stage, self.backward):
            started.settle()
        wholes = [started.buffer[g.start : g.stop].view(g.dtype) for g in self.plan.each if g.moves]
        return [*wholes, *(started.part(gather).own.clone() for gather in self.pieces)]

    def release(self, started: Slot) -> None:
        """Takes the slot back."""
        residency = self.engine.residency
        if residency.means.stream is not None:
            started.free = residency.means.stream.end_of_use()
        residency.ring.give_back(started)

    def prepare(self) -> None:
        """Frees the slots of the engine's ring."""
        self.engine.residency.ring.leave()


@dataclass(eq=False)
class Tracing:
    """What the stages of one traced step on one mesh have in common: the engine's part in a graph.

    Attributes:
        engine: of the mesh.
        ring: the parameters that were gathered last, by what they are of.
        kept: those that calls keep, until backward or until the step ends.
        users: how many calls will still run backward on kept ones.
        backward: whether a backward was the last to run; then a forward begins anew, as the engine's tapes do.
        turns: number of stages whose reduction started.
        wholes: whole gradients of which all reduction is deferred, one for each parameter.
    """

    engine: Engine
    ring: OrderedDict[Any, tuple[Any, list[Tensor]]] = field(default_factory=OrderedDict)
    kept: dict[Any, tuple[Any, list[Tensor]]] = field(default_factory=dict)
    users: Counter[Any] = field(default_factory=Counter)
    backward: bool = False
    turns: int = 0
    wholes: dict[GradientSum, list[Tensor | None]] = field(default_factory=dict)

    # --- as a member of a step, and as what reduces its gradients ---

    @property
    def reductions(self) -> Tracing:
        """What reduces gradients."""
        return self

    def catch_up(self, tape: Any, stop: int) -> None:
        """Nothing: in a graph all ranks run the same stages."""

    def end(self, failed: bool = False) -> None:
        """Ends a step: nothing that it gathered is used again."""
        self.ring.clear()
        self.kept.clear()

    def drain(self) -> None:
        """Nothing: the graph waits where it uses a gradient."""

    def added(self, reduction: Any, total: Tensor | None, out: Tensor) -> Tensor:
        """The sum of a gradient so far and `out`."""
        return out if total is None else total + out

    def settle(self, step: Step) -> None:
        """Reduces the gradients that the step has deferred."""
        for total in [total for total in step.sums.values() if total.reductions is self]:
            route, stage, dtypes = total.reduction.route, total.reduction.layout.stage, total.reduction.dtypes
            if total.out is not None:
                total.out = total.out.to(dtypes.shard)
            if step.defer == "everything":
                whole = [None if g is None else g.to(dtypes.sum) for g in self.wholes.pop(total)]
                total.out = self.reduce(total.reduction, whole, stage)
            elif step.defer == "replicas" and (route.split is not None or route.replica is not None):
                total.out = self.reduce(total.reduction, [total.out], stage, "replicas", False)

    def add_whole(self, total: GradientSum, gradients: Sequence[Tensor | None]) -> None:
        """Adds whole gradients up on this rank, until the step reduces their sum."""
        dtype = wider(total.reduction.dtypes.sum, total.accumulator)
        before = self.wholes.get(total, [None] * len(gradients))
        now = [None if g is None else g.to(dtype) for g in gradients]
        self.wholes[total] = [b if a is None else a if b is None else a + b for a, b in zip(before, now, strict=True)]

    def reduce(
        self,
        reduction: Reduction,
        gradients: Sequence[Tensor | None],
        stage: str,
        part: str = "all",
        begins: bool = True,
    ) -> Tensor:
        """Puts a reduction into the graph."""
        (found,) = run(Reducing(self.engine, reduction, stage, part, begins), gradients)
        return found


_tracings: weakref.WeakKeyDictionary[Watch, dict[Engine, Tracing]] = weakref.WeakKeyDictionary()


class Traced:
    """A call of a stage in a traced step, in place of the engine."""

    def __init__(self, engine: Engine, call: Call) -> None:
        watch = capturing()
        assert watch is not None, "a step is traced under a watch"
        self.tracing = _tracings.setdefault(watch, {}).setdefault(engine, Tracing(engine))
        self.call = call
        self.shards: tuple[Tensor, ...] = ()
        self.inputs: tuple[Tensor, ...] = ()
        self.residuals: Residuals | None = None
        self.secondary: tuple[GatherPlan, tuple[Tensor, ...]] | None = None
        self.again: list[Tensor] | None = None  # the parameters as gathered for backward
        self.key: Any = None  # of the parameters, in the tracing's buffers
        self.keep: Keep = False
        self.drawn: list[Any] = []  # random numbers of forward, which a second run uses again

    # --- forward ---

    def forward(self, call: Call, shards: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs the function on gathered parameters."""
        signature = call.signature
        self.shards, self.inputs = shards, inputs
        self.key = signature.plan(shards), tuple((id(x), x._version) for x in shards)
        remat, records = signature.options.remat, any(call.needs)
        if isinstance(remat, Offload) and remat.moves(call.mesh.device_type):
            raise RuntimeError(
                f"{signature}: remat={remat} moves activations to the {remat.to} and back, which a compiled step "
                f"cannot do: use remat=True or False"
            )
        self.keep = signature.keep if records or signature.keep == "step" else False
        wholes = self._gathered(self.keep, backward=False)
        parameters = self._parameters(wholes)
        hooks = self._hooks(wholes) if records and signature.keeps_graph else None
        policies = [[each] for each in call.contexts] or [[], []]
        call.contexts = [
            entered([*each, Drawing(self.drawn, k > 0, policy=bool(each))]) for k, each in enumerate(policies)
        ]
        with attributed_to(signature.stage):
            try:
                residuals = evaluate(call, parameters, inputs, records, hooks)
            except RuntimeError as error:
                if hooks is None or "support saved tensor hooks" not in str(error):
                    raise
                # A transform of torch.func inside: then the graph keeps gathered parameters.
                self.drawn.clear()
                call.contexts = [Drawing(self.drawn, False), *call.contexts]
                residuals = evaluate(call, parameters, inputs, records)
        storages = refuse_returned(signature, residuals.outputs, {autograd.storage_of(x) for x in (*wholes, *shards)})
        if records or any(y.requires_grad for y in residuals.outputs):
            refuse_closure(signature, (*residuals.parameters, residuals.inputs), residuals.outputs)
        call.differentiable = [y.requires_grad for y in residuals.outputs]
        if records and signature.keeps_graph:
            self.residuals = residuals
        return _apart(residuals.outputs, storages, inputs)

    def _gathered(self, keep: Keep, backward: bool) -> list[Tensor]:
        """A buffer for each shard: gathered, or the shard itself."""
        call, signature, tracing = self.call, self.call.signature, self.tracing
        plan, shards, key = signature.plan(self.shards), self.shards, self.key
        moving = [gather.moves for gather in plan.each]
        if not any(moving):
            return list(shards)
        if tracing.backward and not backward:
            tracing.ring.clear()
        tracing.backward = backward
        known = tracing.kept.get(key) or tracing.ring.get(key)
        if known is None:
            source = self.secondary if backward and self.secondary is not None else (plan, shards)
            leaves = isinstance(keep, tuple) and not backward and any(call.needs)
            work = Gathering(tracing.engine, source[0], backward, leaves, signature.options.prefetch)
            found = run(work, source[1])
            gathered, pieces = found[: sum(moving)], iter(found[sum(moving) :])
            if work.pieces:
                assert plan.secondary is not None, "there are pieces of it"
                same = zip(plan.each, plan.secondary.each, shards, strict=True)
                self.secondary = plan.secondary, tuple(x if a is b else next(pieces) for a, b, x in same)
            known = (shards, gathered)
        if keep is True or keep == "step":
            tracing.kept[key] = known
            tracing.users[key] += not backward
            if call.step is not None:
                call.step.meet(tracing)
        else:
            tracing.ring[key] = known
            tracing.ring.move_to_end(key)
            while len(tracing.ring) > signature.options.prefetch + 1:
                tracing.ring.popitem(last=False)
        gathered_now = iter(known[1])
        return [next(gathered_now) if moves else shard for moves, shard in zip(moving, shards, strict=True)]

    def _parameters(self, wholes: Sequence[Tensor]) -> list[list[Tensor]]:
        """The parameters in gathered buffers, as leaves of the call's own graph."""
        signature = self.call.signature
        each = zip(signature.layouts, wholes, self.call.needs, strict=False)
        with torch.no_grad():
            return [
                [owned(p, need, layout.stage, checked=True) for p in layout.views(whole.detach())]
                for layout, whole, need in each
            ]

    # --- backward ---

    def backward(
        self,
        call: Call,
        needs: Sequence[bool],
        cotangents: Sequence[Tensor | None],
        inputs: tuple[Tensor, ...],
        collect: bool,
    ) -> list[Tensor | None]:
        """Gradients of shards and inputs, as `Engine.backward`."""
        residuals, self.residuals = self.residuals, None
        with attributed_to(call.signature.stage, backward=True):
            if residuals is None:
                call.contexts = call.contexts or [Drawing(self.drawn, True)]
                wholes = self._gathered(self.keep, backward=True)
                with call.surroundings.autocast_again():
                    parameters = self._parameters(wholes)
                    residuals = evaluate(call, parameters, self.inputs, True)
            of_parameters, of_inputs = differentiated(residuals, needs, cotangents)
            if self.keep is True:
                self.tracing.users[self.key] -= 1
                if not self.tracing.users[self.key]:
                    self.tracing.kept.pop(self.key, None)
            return [*self._reduced(needs[: len(self.shards)], of_parameters, collect), *of_inputs]

    def _reduced(
        self, needs: Sequence[bool], of_parameters: list[list[Tensor | None]], collects: bool
    ) -> list[Tensor | None]:
        """The gradients of shards, reduced, or None for those that the step collects."""
        call, tracing, step = self.call, self.tracing, self.call.step
        found: list[Tensor | None] = [None] * len(needs)
        stage = call.signature.stage
        if any(needs):
            tracing.turns += 1
        begins = True
        for k, gather in enumerate(call.signature.plan(self.shards).each):
            if not needs[k]:
                continue
            shard, variable = self.shards[k], call.collected[k] if collects else None
            place, divides = (k, tracing.turns % 2), variable is not None
            reduction = tracing.engine._reduction(call.signature, gather, place, shard.dtype, divides)
            if step is None or variable is None:
                found[k] = tracing.reduce(reduction, of_parameters[k], stage, "all", begins)
            else:
                step.meet(tracing)
                total = step.sum_of(variable, reduction, tracing)
                if step.defer == "everything":
                    tracing.add_whole(total, of_parameters[k])
                    continue
                part = "scatter" if step.defer == "replicas" else "all"
                total.add(tracing.reduce(reduction, of_parameters[k], stage, part, begins))
            begins = False
        return found

    # --- what autograd saves ---

    def _hooks(self, wholes: Sequence[Tensor]) -> Any:
        """A context in which autograd saves places in gathered buffers in place of parameters."""
        at = {autograd.storage_of(whole): k for k, whole in enumerate(wholes) if whole is not self.shards[k]}

        def pack(x: Tensor) -> Any:
            k = at.get(autograd.storage_of(x)) if x.layout is torch.strided else None
            if k is None or x.dtype != wholes[k].dtype or order_of(x.shape, x.stride()) is None:
                return x.detach()
            return k, x.shape, x.stride(), x.storage_offset() - wholes[k].storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            k, *place = packed
            if self.again is None:
                self.again = self._gathered(self.keep, backward=True)
            return _place(self.again[k], *place)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _apart(outputs: Sequence[Tensor], storages: list[int], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a call, detached from its graph; copies of those that share memory."""
    others = {autograd.storage_of(x) for x in inputs}
    alone = [storages.count(storage) == 1 and storage not in others for storage in storages]
    return tuple([y.detach() if yes else y.detach().clone() for y, yes in zip(outputs, alone, strict=True)])


def _place(whole: Tensor, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """A view of a gathered buffer: a parameter, or its transpose, by views that compilers know."""
    order = order_of(shape, stride)
    assert order is not None, "only such places are saved"
    sizes = [shape[d] for d in order]
    ordered = whole.narrow(0, offset, math.prod(sizes)).view(sizes)
    return ordered if order == list(range(len(order))) else ordered.permute([order.index(d) for d in range(len(order))])
