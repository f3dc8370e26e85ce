"""Calls of paired stages in `shardfn.jvp`: their cotangents and gradients carry tangents.

For Hessian-vector products this is forward over reverse: reverse over forward would differentiate torch's formulas for
tangents, and some of these derivatives are wrong (such as a layer norm's). As in any call, hooks save the offsets of
gathered parameters and of their tangents in place of the tensors.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.compat import autograd, functorch, modes
from shardfn.compat.replacing import replaced
from shardfn.forward_mode.pairs import Pairs, dual, nobodys, runs_on_schedule, saving
from shardfn.forward_mode.refusals import closes_over, refuse_opaque
from shardfn.stages.entry_exit import Call
from shardfn.stages.refusals import other_numbers, other_result
from shardfn.stages.replay import RngAndAutocast, SampledNumbers, form_of
from shardfn.stages.saved import GatheredView
from shardfn.stages.schedule import schedule_of
from shardfn.stages.signature import Signature
from shardfn.stages.stage import called, called_by
from shardfn.transforms.autodiff import detached, moves
from shardfn.transforms.step import OutsideGradient


class PairedCall(Call):
    """One call of a stage whose function takes pairs of value and tangent, see `Pairs`."""

    notices = False

    def __init__(self, pairs: Pairs, *arguments: Any) -> None:
        super().__init__(*arguments)
        shards, trains = self.shards, self.trains
        self.unread, self.tangent_of = pairs.unread, pairs.tangent_of
        self.values = pairs.count  # so many leaves, which tangents follow
        self.collected = [None] * len(shards)  # their gradients have tangents, and go through autograd
        self.reduces = [is_trained and k not in self.unread for k, is_trained in enumerate(trains)]
        for k, t in self.tangent_of.items():
            self.reduces[t] = trains[k]

    # --- forward ---

    def _hooks(self) -> Any:
        return replaced(saving, call=None if self.keeps else self.saving)

    def _hooked_run(self, leaves: list[Any], tensor_indices: Sequence[int], views: list[list[Tensor]]) -> Any:
        leaves = list(leaves)
        for i in tensor_indices:
            if i >= self.values:  # else tangents would have graphs, and hold what they are made of
                leaves[i] = leaves[i].detach()
        if self.signature.options.remat is False:
            return self._function(leaves, views)
        rerun = _Again(self, leaves, tensor_indices)
        xs = [leaves[i] for i in tensor_indices]
        outputs = _Rerun.apply(rerun, *xs, *[p for ps in views for p in ps])  # type: ignore[no-untyped-call]
        return rerun.with_tangents(outputs)

    def _without_aliases(self, result: Any, inputs: Sequence[Tensor], tokens: Sequence[Tensor] = ()) -> Any:
        """The same, with values alone through the exit; the gradient of a tangent is nobody's."""
        if not tokens:
            return super()._without_aliases(result, inputs)
        leaves, tree = optree.tree_flatten(result)
        refuse_opaque(self.signature, [y for y in leaves if not isinstance(y, Tensor)])
        pairs = [functorch.unpacked(y) if moves(y) else (y, None) for y in leaves]
        values = super()._without_aliases([value for value, _ in pairs], inputs, tokens)
        depends = [x for x in (*inputs, *self.shards) if x.requires_grad] if torch.is_grad_enabled() else []
        outputs = [
            y if t is None else functorch.dual(y, nobodys(self.signature.stage, t.detach(), depends))
            for y, (_, t) in zip(values, pairs, strict=True)
        ]
        return optree.tree_unflatten(tree, outputs)

    # --- what autograd saves ---

    def saving(self) -> Any:
        """A context inside of `torch.func.vjp` for what its graph saves: of parameters and their tangents, places."""
        buffer = None if self.gathered is None or self.again is False else self.gathered.bytes
        if type(buffer) is not Tensor:
            return contextlib.nullcontext()
        low, high = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes

        def place(x: Tensor | None) -> Any:
            if type(x) is not Tensor or x.layout is not torch.strided or x.is_conj() or x.is_neg():
                return x
            if not low <= (address := x.data_ptr()) < high:
                return x
            return GatheredView(self, None, x, address - low, recording.current())

        def pack(x: Tensor) -> Any:
            x = functorch.unwrapped(x)  # the wrapper would hold its operation, which holds what it has saved
            with functorch.outside_transforms(), modes.functions_unseen():
                value, tangent = functorch.unpacked(x)
                both = _PairOfPlaces(place(value), place(tangent))
            if GatheredView not in map(type, both):
                return x, x._version
            self.saved = True
            return both

        return autograd.hooked_inside(pack, _unpack)

    # --- backward ---

    def entry_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The entry in backward: reduces gradients, and their tangents, to those of shards."""
        schedule, parted = self.schedule, self._parted(gradients)
        self.end_attribution()
        if torch.is_grad_enabled() and not (self.step is not None and self.step.pushed):
            raise OutsideGradient
        with schedule.in_backward(self), modes.functions_unseen(), torch.no_grad():
            for k, t in self.tangent_of.items():
                both = [(None, None) if g is None else functorch.unpacked(g) for g in parted[k]]
                parted[k] = [None if g is None or k in self.unread else g.detach() for g, _ in both]
                parted[t] = [None if dg is None else dg.detach() for _, dg in both]
            reduced = schedule.reduce(self, parted)
            schedule.release(self)
            for k, t in self.tangent_of.items():
                g, dg, reduced[t] = reduced[k], reduced[t], None
                if dg is not None:
                    reduced[k] = functorch.dual(torch.full_like(dg, math.nan) if g is None else g, dg)
            return reduced

    def run_again(self, leaves: Sequence[Any]) -> Any:
        """The function's result, once more, with what was gathered again."""
        if self.plan.nbytes and self.gathered is None:
            self.schedule.gather_again(self)
        if self.gathered is not None:
            self.gathered.wait()
        views = self._views(self.gathered)
        for ps, is_trained in zip(views, self.trains, strict=True):
            for p in ps if is_trained else ():
                p.requires_grad_()
        return views, self._function(leaves, views)


class _PairOfPlaces(NamedTuple):
    """The value that hooks save for a tensor if it, or its tangent, is a view of gathered parameters."""

    value: Any
    tangent: Any


def _unpack(packed: Any) -> Tensor:
    if type(packed) is _PairOfPlaces:
        with modes.functions_unseen():
            value, tangent = [x.rebuilt_view() if type(x) is GatheredView else x for x in packed]
            x = value if tangent is None else dual(value, tangent)
    else:
        x, version = packed
        if x._version != version:
            raise RuntimeError(autograd.modified(x, version))
    return functorch.in_ended_transform(x)  # autograd keeps a tangent only inside of a wrapper


def paired(signature: Signature, leaves: list[Any]) -> Any:
    """Calls a stage in `shardfn.jvp`: as a paired stage if it can run on the schedule, else as its composition."""
    if not runs_on_schedule(signature, leaves):
        return called(signature, leaves)
    pairs = Pairs(signature, leaves)
    with modes.functions_unseen():  # a stage's own calls; those of its function are seen
        return called_by(schedule_of, pairs.signature, pairs.leaves, functools.partial(PairedCall, pairs))


# --- a function that runs again in backward ---


class _Again:
    """The recomputation of a paired call's function: its arguments, random state and first result."""

    def __init__(self, call: PairedCall, leaves: list[Any], tensor_indices: Sequence[int]) -> None:
        self.call, self.at, self.leaves = call, tensor_indices, list(leaves)
        for i in tensor_indices:
            self.leaves[i] = None
        generators = call.signature.generators(leaves)
        self.surroundings = RngAndAutocast(call.schedule.device, generators, again=True)
        self.sizes = [len(gather.layout.entries) for gather in call.plan.each]
        self.tree: Any = None
        self.form: Any = None  # of the first run's result, and some of its numbers, if they are compared
        self.sample: SampledNumbers | None = None
        self.parts: list[Any] = []  # of the result: whether it is an output, and its tangent, or else what it is

    def arguments(self, xs: Sequence[Tensor]) -> list[Any]:
        """The function's arguments."""
        leaves = list(self.leaves)
        for i, x in zip(self.at, xs, strict=True):
            leaves[i] = x
        return leaves

    def refuse_other(self, result: Any, inputs: Sequence[Tensor]) -> None:
        """Raises RuntimeError if the second run returned something else than the first."""
        form, signature = form_of(result, inputs)[0], self.call.signature
        if not self.form.same(form):
            raise RuntimeError(other_result(signature, str(self.form), str(form)))
        values = [functorch.unpacked(y)[0] for y in optree.tree_leaves(result) if moves(y)]
        off, self.sample = None if self.sample is None else self.sample.off(values), None
        if off is not None:
            raise RuntimeError(other_numbers(signature, off))

    def with_tangents(self, outputs: Sequence[Tensor]) -> Any:
        """The result."""
        remaining, (parts, self.parts) = iter(outputs), (self.parts, [])
        filled = [
            y if not moving else next(remaining) if y is None else functorch.dual(next(remaining), y)
            for moving, y in parts
        ]
        return optree.tree_unflatten(self.tree, filled)


class _Rerun(torch.autograd.Function):
    """`(again, *xs, *parameters) -> outputs` that may have gradients; in backward it runs again."""

    @staticmethod
    def forward(ctx: Any, rerun: _Again, *tensors: Tensor) -> Any:
        n = len(rerun.at)
        # With a graph that is dropped: whether torch.func can make one is known then, and a tensor that the function
        # keeps and does not return is known by it.
        with torch.enable_grad(), functorch.forward_mode_on(), modes.functions_seen():
            aliases = iter([x.detach().requires_grad_(x.requires_grad) for x in tensors])
            xs = [next(aliases) for _ in range(n)]
            views = [[next(aliases) for _ in range(size)] for size in rerun.sizes]
            result = rerun.call._function(rerun.arguments(xs), views)
            leaves, rerun.tree = optree.tree_flatten(result)
            rerun.form = form_of(result, [*xs, *[p for ps in views for p in ps]])[0]
            outputs, constant = [], list[Tensor]()
            for y in leaves:
                if not moves(y):
                    rerun.parts.append((False, y))
                    continue
                value, tangent = functorch.unpacked(y)
                rerun.parts.append((True, None if tangent is None else tangent.detach()))
                outputs.append(value.detach())
                if not value.requires_grad:
                    constant.append(outputs[-1])
            signature, input_ids = rerun.call.signature, {id(x) for x in [*xs, *[p for ps in views for p in ps]]}
            if any(id(x) not in input_ids for x in autograd.leaves_of(y for y in leaves if moves(y))):
                raise RuntimeError(closes_over(signature))
        rerun.sample, signature.sampled = None if signature.sampled else SampledNumbers(outputs), True
        ctx.again = rerun
        ctx.mark_non_differentiable(*constant)
        ctx.save_for_backward(*tensors[:n])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        rerun: _Again = ctx.again
        contexts = rerun.call.schedule.in_backward(rerun.call), rerun.surroundings.restored_state()
        with contexts[0], contexts[1], torch.enable_grad(), functorch.forward_mode_on(), modes.functions_seen():
            xs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            views, result = rerun.call.run_again(rerun.arguments(xs))
            rerun.refuse_other(result, [*xs, *[p for ps in views for p in ps]])
            outputs = [y for y in optree.tree_leaves(result) if moves(y)]
            used = [(y, ct) for y, ct in zip(outputs, cotangents, strict=True) if ct is not None and y.requires_grad]
            inputs = [*xs, *[p for ps in views for p in ps]]
            differentiable = [x for x in inputs if x.requires_grad]
            gradients: Sequence[Tensor | None] = [None] * len(differentiable)
            if used and differentiable:
                ys, cts = zip(*used, strict=True)
                gradients = torch.autograd.grad(ys, differentiable, cts, create_graph=True, allow_unused=True)
        remaining = iter(gradients)
        return None, *[detached(next(remaining)) if x.requires_grad else None for x in inputs]
