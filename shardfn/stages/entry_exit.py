"""One call of a stage under torch's own autograd, between two autograd nodes: the entry and the exit.

The entry gathers in forward, and reduces gradients in backward. The exit returns the outputs in forward, and gathers
again in backward, before any node of the function runs. So both run once per call, on every rank whose outputs get a
gradient, whichever parameters the function used. Where autograd would save a view of a gathered parameter, hooks save
its offset (`saved.py`), and backward takes the view of the buffer that the exit has gathered.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.collectives.ledger import attributed_to, open_ledgers, unscheduled
from shardfn.compat import autograd, functorch, modes
from shardfn.debugging import debugging
from shardfn.mesh.axes import known_axes
from shardfn.mesh.scope import current_mesh, scope
from shardfn.quant.packed import Packed
from shardfn.stages import nonfinite
from shardfn.stages.composition import transposed
from shardfn.stages.gather import Gathered, Secondary, offset_in
from shardfn.stages.gather_plan import GatherPlan
from shardfn.stages.gather_stream import Arrival
from shardfn.stages.recompute import Recomputed
from shardfn.stages.recorded import record_parameters
from shardfn.stages.refusals import refuse_mixed, writes
from shardfn.stages.replay import entered
from shardfn.stages.saved import DecodedParameter, GatheredView, hooks
from shardfn.stages.signature import Signature, cast, cast_all
from shardfn.stages.written import Snapshot, snapshot
from shardfn.tiers.activations import Offload, offloading
from shardfn.transforms.step import Step, exact_part_differentiates

if TYPE_CHECKING:
    from shardfn.stages.schedule import Schedule
    from shardfn.stages.tape import CallTape


NOTHING = contextlib.nullcontext()


def attributed(stage: str, backward: bool | None = None) -> Any:
    """A context in which the ledger and the debug mode attribute collectives to a stage."""
    return attributed_to(stage, backward) if open_ledgers or debugging.collectives else NOTHING


class _Running(threading.local):
    """The calls whose functions are running on this thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


_running = _Running()


class Call:
    """One call of a stage.

    Autograd's saved values refer to the call. So that there is no reference cycle, the call refers to no tensor that
    autograd made.

    Attributes:
        notices: whether it detects that autograd saves a parameter although the gathered parameters are kept.
        key: key of its gather in `Prefetch.buffers`.
        versions: version counters of the shards, which must not change until backward.
        trains: for each shard, whether it gets a gradient.
        collected: for each shard, itself if the step collects its gradient, so that autograd gets none; else None.
        reduces: for each shard, whether backward reduces a gradient.
        again: whether backward gathers again, the same on all ranks; None until they have agreed on it.
        forward: whether its function is running while autograd records it.
        saved: whether autograd saved a view of a parameter.
        keeps: whether autograd keeps the gathered parameters until backward.
        gathered: the gathered parameters, while the function runs and again in backward.
        secondary: larger shards from which backward gathers, in place of the shards.
        outer: the call inside whose function this call was made.
        nests: whether calls were made inside its function.
        index: position on the tape.
        ended: the same, but between the calls before and after its end: backward reaches it there.
        opened_in: number of the backward pass in which its exit has run.
        done: whether its backward has run.
        stays: whether parameters that backward gathered stay, for another pass through the graph.
        decodes: quantized parameters that its function has decoded.
        away: its offloaded activations.
        frame: the recomputation of its function, until the exit node holds it.
        before: a snapshot of its parameters while its function runs, if they are compared afterwards.
        attribution: the context that attributes collectives between exit and entry in backward to it, and its thread.
    """

    notices = True
    gathered: Gathered | None = None
    secondary: Secondary | None = None
    attribution: tuple[int, attributed_to] | None = None
    frame: Recomputed | None = None
    before: Snapshot | None = None
    saved = keeps = done = stays = forward = nests = False
    index, opened_in = 0, -1
    ended = 0.0
    key: Any = None
    bad = ""  # the kinds of non-finite numbers in the incoming gradients
    owned: Sequence[int] = ()  # storages of gathered parameters, and of shards that are the parameters
    again: bool | None = None
    tape: CallTape | None = None

    def __init__(
        self,
        schedule: Schedule,
        signature: Signature,
        plan: GatherPlan,
        shards: tuple[Tensor, ...],
        trains: list[bool],
        step: Step | None,
    ) -> None:
        self.schedule, self.signature, self.plan, self.shards = schedule, signature, plan, shards
        self.trains, self.reduces, self.step = trains, trains, step
        self.outer = _running.calls[-1] if _running.calls else None
        variables = step.variables if step is not None else {}
        self.collected = [x if need and id(x) in variables else None for x, need in zip(shards, trains, strict=True)]
        self.versions, self.thread = autograd.versions_of(shards), get_ident()
        self.flat: dict[torch.dtype, Tensor] = {}  # the bytes that backward gathered, viewed as each dtype
        self.away: list[Any] = []
        self.decodes: list[DecodedParameter] = []
        self.decoded: dict[DecodedParameter, tuple[Tensor, Arrival | None]] = {}

    # --- forward ---

    def run(self, leaves: list[Any], indices: Sequence[int], records: bool) -> Any:
        """Gathers, runs the function, and returns its result; with `records`, as a part of autograd's graph."""
        schedule = self.schedule
        if not records:
            with schedule.alone:
                views = self._views(schedule.gather(self))
                if (recorder := recording.current()) is not None:
                    self._report(recorder, views)
                result = self._function(leaves, views)
                if debugging.nan:
                    nonfinite.after_forward(schedule.mesh, self, views, [leaves[i] for i in indices], _tensors(result))
                gathered, self.gathered = self.gathered, None
                self._end(gathered)
            return self._without_aliases(result, [])
        with schedule.alone:
            if schedule.gathering.decoded.buffers and not self.signature.packed:  # the logits of a head are large
                schedule.gathering.decoded.trim(all=True)
            token, views = self._entered()
            if (recorder := recording.current()) is not None:
                self._report(recorder, views)
            hooks, self.forward = self._hooks(), True
            try:
                with hooks:
                    result = self._hooked_run(leaves, indices, views)
            finally:
                for parameter in self.decodes:
                    parameter.x = None
                self.decodes, self.forward = [], False
                gathered, self.gathered = self.gathered, None
            if debugging.nan:
                nonfinite.after_forward(schedule.mesh, self, views, [leaves[i] for i in indices], _tensors(result))
            tokens = [token]
            for ps in views:
                for p in ps:
                    if p._backward_hooks:
                        tokens.append(p)
            views = []
            self._end(gathered)
            schedule.ran(self)
        return self._without_aliases(result, [leaves[i] for i in indices], tokens)

    def _report(self, recorder: recording.TraceRecorder, views: Sequence[Sequence[Tensor]]) -> None:
        """Tells the checker of the gathered parameters."""
        for gather, shard, ps in zip(self.plan.each, self.shards, views, strict=True):
            record_parameters(recorder, gather.layout, shard, ps)

    def _entered(self) -> tuple[Tensor, list[list[Tensor]]]:
        """The parameters as results of the entry, and a token: a tensor whose graph leads to the entry."""
        views = self._parted(_EntryFunction.apply(self, *self.shards))  # type: ignore[no-untyped-call]
        token = self.shards[0]
        for ps, trains in zip(views, self.trains, strict=True):
            if trains and ps:
                token = ps[0]
        return token, views

    def _views(self, gathered: Gathered | None) -> list[list[Tensor]]:
        """The parameters by shards, detached: of a view, forward mode would copy the base."""
        return [
            gathered.parameters(gather)
            if gather.moves and gathered
            else [p.detach() for p in gather.layout.views(values.detach())]
            for gather, values in zip(self.plan.each, self.shards, strict=True)
        ]

    def _parted(self, flat: Sequence[Any]) -> list[list[Any]]:
        """Parameters, or their gradients, by shards."""
        by_shard, start = [], 0
        for gather in self.plan.each:
            n = len(gather.layout.entries)
            by_shard.append(list(flat[start : start + n]))
            start += n
        return by_shard

    def _hooks(self) -> Any:
        offloader = offloading(self.schedule.away, self.schedule.mesh, self) if self._offloads() else None
        places = (self.gathered is not None and not (self.keeps and self.again is False)) or self.signature.packed
        if not places and offloader is None:
            return NOTHING
        return hooks(self, offloader)

    def _offloads(self) -> bool:
        return isinstance(self.signature.options.remat, Offload)

    def _hooked_run(self, leaves: list[Any], tensor_indices: Sequence[int], views: list[list[Tensor]]) -> Any:
        signature, remat = self.signature, self.signature.options.remat
        if not signature.options.recomputes or not autograd.saved_tensors_hooks_allowed():
            return self._function(leaves, views)
        sizes = [len(ps) for ps in views]
        leaves = list(leaves)
        tensors = [leaves[i] for i in tensor_indices] + [p for ps in views for p in ps]
        for i in tensor_indices:
            leaves[i] = None

        def run(tensors: Sequence[Tensor]) -> Any:
            arguments, rest = list(leaves), list(tensors[len(tensor_indices) :])
            for i, x in zip(tensor_indices, tensors, strict=False):
                arguments[i] = x
            parts = []
            for n in sizes:
                parts.append(rest[:n])
                rest = rest[n:]
            return self._function(arguments, parts)

        generators = signature.generators(leaves)
        contexts = remat() if callable(remat) else ()
        rng_and_autocast = self.schedule.rng_and_autocast(generators, bool(contexts))
        backward_context = functools.partial(self.schedule.in_backward, self)
        frame = Recomputed(signature, run, tensors, rng_and_autocast, contexts, backward_context)
        compares, signature.sampled = not signature.sampled, True
        result = frame.first(tensors, compares)
        self.frame = frame
        return result

    def _function(self, leaves: Sequence[Any], views: Sequence[Sequence[Tensor]]) -> Any:
        """Calls the function with full parameters, and checks that it did not write into them."""
        signature, options = self.signature, self.signature.options
        arguments = [cast(x, options.input_dtype) for x in leaves] if options.input_dtype else leaves
        mesh = self.schedule.mesh
        mesh_scope = scope(mesh, known_axes(mesh)) if current_mesh() is not mesh else NOTHING
        if (signature.code, self.plan) not in self.schedule.unwritten or debugging.memory:
            layouts, kind = [gather.layout for gather in self.plan.each], (signature.code, self.plan)
            self.before = snapshot(signature, layouts, views, self.schedule.unwritten, kind)
        _running.calls.append(self)
        try:
            with mesh_scope, unscheduled() if open_ledgers else NOTHING:
                result = signature.call(arguments, views, self._decode if signature.packed else None)
            if self.before is not None:
                self.before.check()
        except RuntimeError as error:
            refuse_mixed(signature, error, views, arguments)
            raise
        finally:
            self.before = None
            _running.calls.pop()
        return result if options.output_dtype is None else cast_all(result, options.output_dtype)

    def _decode(self, packed: Packed) -> Tensor:
        """A quantized parameter, decoded; backward decodes it again in place of a saved copy."""
        x = self._decoded(packed)
        if self.before is not None:
            self.before.add(x)
        if self.forward and not self.keeps:
            bytes_ = self.place(packed.values)
            if bytes_ is not None or not self.plan.nbytes:
                source = packed.values.detach() if bytes_ is None else bytes_
                self.decodes.append(DecodedParameter(packed.having(None), source, x))
        return x

    def _end(self, gathered: Gathered | None) -> None:
        """Ends the forward call.

        Raises:
            RuntimeError: the function wrote into a parameter.
        """
        if gathered is not None and gathered.written():
            self.schedule.drop_gather(gathered)
            raise RuntimeError(writes(self.signature))
        if autograd.versions_of(self.shards) != self.versions:
            raise RuntimeError(writes(self.signature))
        if gathered is not None:
            self.schedule.end_forward(self, gathered)

    def _without_aliases(self, result: Any, inputs: Sequence[Tensor], tokens: Sequence[Tensor] = ()) -> Any:
        """The result, without aliases of parameters' memory, and passed through the exit if autograd records."""
        frame, self.frame = self.frame, None  # the frame refers to this call: no cycle
        leaves, tree = ([result], None) if type(result) is Tensor else optree.tree_flatten(result)
        tensor_indices = [i for i, y in enumerate(leaves) if isinstance(y, Tensor)]
        for i in tensor_indices:
            if autograd.memory_of(leaves[i]) in self.owned:  # of a buffer, or of a shard
                leaves[i] = leaves[i].clone()
        input_ids = {id(x) for x in inputs}
        tracked = [y for i in tensor_indices if tokens and (y := leaves[i]).requires_grad and id(y) not in input_ids]
        differentiable = list({id(y): y for y in tracked}.values())
        if differentiable:
            memories, owns_memory = set(map(autograd.memory_of, inputs)), []
            for y in differentiable:
                owns_memory.append((memory := autograd.memory_of(y)) not in memories)
                memories.add(memory)
            outputs = _Exit.apply(self, frame, owns_memory, *tokens, *differentiable)  # type: ignore[no-untyped-call]
            output_of = {id(y): out for y, out in zip(differentiable, outputs, strict=True)}
            if (recorder := recording.current()) is not None:
                for y, out in zip(differentiable, outputs, strict=True):
                    recorder.same(out, y)
            for i in tensor_indices:
                leaves[i] = output_of.get(id(leaves[i]), leaves[i])
        return leaves[0] if tree is None else optree.tree_unflatten(tree, leaves)

    # --- what autograd saves ---

    def place(self, x: Tensor) -> GatheredView | None:
        """The view to save in place of a tensor in gathered or decoded memory; None if autograd saves the tensor."""
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            return None
        for parameter in (None, *self.decodes):
            if parameter is not None:
                offset = None if parameter.x is None else offset_in(parameter.x, x)
            elif self.gathered is None or self.again is False:
                continue
            else:
                offset = self.gathered.offset_of(x)
            if offset is not None:
                self.saved = True
                return (
                    None
                    if parameter is None and self.keeps
                    else GatheredView(self, parameter, x, offset, recording.current())
                )
        return None

    def decode_again(self, parameter: DecodedParameter) -> Tensor:
        """A quantized parameter, decoded once more in backward."""
        decoded = self.decoded.get(parameter)
        if decoded is None:
            source = parameter.source
            bytes_ = source.rebuilt_view() if isinstance(source, GatheredView) else source
            values, stream = self._decoded(parameter.form.having(bytes_)), self.schedule.gathering.stream
            decoded = self.decoded[parameter] = values, None if stream is None else Arrival(stream)
        values, arrival = decoded
        if arrival is not None:
            arrival.before_reading(values)
        return values

    def _decoded(self, packed: Packed) -> Tensor:
        dtype = self.signature.options.gather_dtype or packed.dtype
        with modes.policies_unseen():
            return packed.decoded(dtype, self.schedule.gathering.room_for(packed, dtype))

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The parameters that backward gathered, viewed as a dtype; gathers them if no exit has.

        Raises:
            RuntimeError: a shard was written into since forward.
        """
        if functorch.inside_transform():  # backward of a graph that was made outside of the transform
            with functorch.outside_transforms():
                return self._numbers(dtype)
        return self._numbers(dtype)

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        gathered = self.gathered
        if gathered is None or get_ident() != self.thread:
            with self.schedule.in_backward(self):  # the wait too: its checks belong to this lane
                if gathered is None:
                    self.schedule.gather_again(self)
                    gathered = self.gathered
                    assert gathered is not None, "it is in flight"
                gathered.wait()
        flat = self.flat[dtype] = gathered.numbers(dtype)
        return flat

    # --- backward ---

    def exit_backward(self, cotangents: Sequence[Tensor | None], frame: Recomputed | None) -> None:
        """The exit in backward: gathers again, prefetches for earlier calls, and recomputes with `remat`."""
        schedule = self.schedule
        if debugging.nan:
            self.bad = nonfinite.describe_nonfinite(nonfinite.not_finite([x for x in cotangents if x is not None]))
        schedule.end_others(self)
        context = schedule.in_backward(self)
        with entered([context, functorch.outside_transforms()]) if functorch.inside_transform() else context:
            schedule.begin_backward(self)
        if open_ledgers or debugging.collectives:
            self.end_attribution()
            self.attribution = get_ident(), attributed_to(self.signature.stage, backward=True, scheduled=False)
            self.attribution[1].__enter__()
        if frame is not None:
            frame.second()  # here, so that every rank runs its collectives, whatever the rank's graph needs

    def end_attribution(self) -> None:
        """Stops attributing collectives to this call in backward."""
        if self.attribution is not None and self.attribution[0] == get_ident():
            self.attribution[1].__exit__()
        self.attribution = None

    def entry_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The entry in backward: reduces the gradients of parameters to those of shards."""
        schedule = self.schedule
        parted = self._parted([g if g is None or g.layout is torch.strided else g.to_dense() for g in gradients])
        if self.attribution is not None:
            self.end_attribution()
        if self.nests:
            schedule.catch_up_inside(self)
        with schedule.in_backward(self):
            batched = False
            for g in gradients:
                if g is not None:
                    batched = functorch.batched(g)
                    break
            if torch.is_grad_enabled() or batched:
                # Else a pass through this graph would gather where its nodes ask for it, not where all ranks do.
                self.stays = True
                if self.step is not None and self.step.parts is not None:
                    raise exact_part_differentiates(self.signature.name)
                with scope(schedule.mesh):
                    return transposed(self.plan, self.shards, self.trains, parted)
            if debugging.nan:
                nonfinite.after_backward(schedule.mesh, self, self.bad, parted)
            reduced = schedule.reduce(self, parted)
            schedule.release(self)
            return reduced


def _tensors(result: Any) -> list[Tensor]:
    return [y for y in optree.tree_leaves(result) if isinstance(y, Tensor)]


class _EntryFunction(torch.autograd.Function):
    """Gathers; in backward, reduces. The exit's token leads here even if the function used no parameter."""

    @staticmethod
    def forward(ctx: Any, call: Call, *shards: Tensor) -> Any:
        ctx.call, ctx.mesh = call, call.schedule.mesh  # which the schedule holds weakly
        ctx.set_materialize_grads(False)
        views = call._views(call.schedule.gather(call))
        if not all(call.trains):
            ctx.mark_non_differentiable(
                *[p for ps, is_trained in zip(views, call.trains, strict=True) if not is_trained for p in ps]
            )
        return tuple([p for ps in views for p in ps])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.call.entry_backward(gradients)


class _Exit(torch.autograd.Function):
    """Passes outputs on; in backward, gathers again before any node of the function needs a parameter.

    The first token only leads to the entry; the others are parameters with hooks. As their nodes are part of the pass,
    torch would call hooks of unused outputs and parameters with None: they get zeros instead.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, frame: Recomputed | None, fresh: list[bool], *tensors: Tensor) -> Any:
        ctx.call, ctx.frame = call, frame
        ctx.set_materialize_grads(False)
        n = len(fresh)
        ctx.nothing, ctx.zeros = (None,) * (4 + len(tensors) - 1 - n), None
        for x in tensors[1:]:
            if x._backward_hooks:
                ctx.zeros = [x.new_zeros(()).expand(x.shape) if x._backward_hooks else None for x in tensors[1:]]
                break
        return tuple([y.detach() if is_new else y for y, is_new in zip(tensors[-n:], fresh, strict=True)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        ctx.call.exit_backward(cotangents, ctx.frame)
        gradients = *ctx.nothing, *cotangents
        if ctx.zeros is None:
            return gradients
        return *gradients[:4], *[zeros if g is None else g for g, zeros in zip(gradients[4:], ctx.zeros, strict=True)]
