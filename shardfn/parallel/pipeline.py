"""Pipeline parallelism: each rank along an axis computes its own layers, on one micro-batch after another.

A schedule is a list of forward and backward passes for each rank; the messages between neighbors keep the lists in
step. The result is the sum of the micro-batches' losses, a function like any other: first derivatives in reverse mode
follow the schedule; other derivatives come from the same passes in lockstep, with `ppermute` in between.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import optree
import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.collectives.functional import axis_index, axis_size, ppermute, psum, pvary
from shardfn.compat import autograd, functorch
from shardfn.mesh.grid import AxisName, as_names
from shardfn.mesh.planned import notes, planned
from shardfn.mesh.scope import as_if_at, independent_along, refuse_independent
from shardfn.parallel.messages import (
    Kind,
    Message,
    PipelineRanks,
    PlannedTeam,
    packed,
    refuse_changed,
    team_of,
    unpacked,
)
from shardfn.quoting import listed
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.partition import with_leaves
from shardfn.transforms.autodiff import follow, layouts_of, moves
from shardfn.transforms.custom_vjp import custom_vjp
from shardfn.transforms.shortage import versions
from shardfn.transforms.step import OutsideGradient, Step, pushes

Part = Callable[[Any, Any, Any], Any]
Schedule = Literal["1f1b", "gpipe"]


def pipeline(
    part: Part, params: Any, batches: Iterable[Any], axis: AxisName = (), *, schedule: Schedule = "1f1b"
) -> Tensor:
    """The sum of the losses of micro-batches, where each rank along `axis` has a part of the model: 0-d, `V -> I`.

    Gradients with respect to `params` are this rank's: for what lives at one place of `axis` (`Placement.at`) they are
    exactly the whole batch's. A stage that all ranks along the axis hold (the axis is among its strategy's `replicas`)
    may be used by any of the parts, an embedding by the first and the last, say: its gradient is the sum over all uses.
    Other parameters that all ranks have, and use differently, must go through `pvary` first.

    Args:
        part: `(params, x, batch) -> y`. On the first rank `x` is None, on the others what the previous rank returned;
            the last rank returns the micro-batch's loss, a scalar. In between, `y` is a pytree of tensors, whose
            structure, shapes and dtypes may differ each time; they must not be changed in place afterwards. No
            collective may run along `axis` inside. `axis_index(axis)` is the rank; a single one is both first and last.
        params: a pytree.
        batches: micro-batches, each a pytree, equally many on every rank.
        axis: the axis of the pipeline's ranks; `()` for a single rank.
        schedule: `"1f1b"`: as soon as a rank can, it alternates forward and backward passes, and holds the activations
            of at most `size - index` micro-batches; `"gpipe"`: all forward passes first.

    Returns:
        The sum, the same on all ranks along `axis`. Ranks idle for `(size - 1) / (batches + size - 1)` of the time.

    Raises:
        ValueError: there are no micro-batches; ranks differ in their number or in the schedule.
        RuntimeError: a part uses a tensor that needs a gradient and is not among its arguments; changes in place what
            it returned; runs a collective along `axis`. A rank is gone.

        An error on one rank, interrupts included, ends the pipeline on all ranks along `axis`: it is raised unchanged
        on that rank, and as a ValueError, TypeError or RuntimeError that names it and its rank on the others. Nothing
        of it is left for the next call to find.

    Sources: Huang et al., GPipe (2018), section 2.3; Narayanan et al., PipeDream-2BW (2020), section 3.2, for 1F1B.

    Example:
        ``loss = pipeline(part, params, list(tokens.chunk(4)), "pipe")``, with ``value_and_grad`` around it
    """
    if axis_size(axis) == 1:
        micro_batches = _checked_batches(batches, schedule)
        return torch.stack([_loss(part(params, None, batch)) for batch in micro_batches]).sum()
    refuse_independent(axis, "pipeline")
    if pushes():
        raise OutsideGradient  # the passes in lockstep keep their order where torch.func differentiates them
    ranks = team_of(axis)
    try:
        job, tensors = _job(part, _alone((params, _checked_batches(batches, schedule)), axis), ranks, schedule)
    except BaseException as error:
        return ranks.run(functools.partial(_raise, error))[0]  # the other ranks must learn of it
    return custom_vjp(job.pure, job.fwd, job.bwd)(*tensors)[0]


def _checked_batches(batches: Iterable[Any], schedule: Schedule) -> list[Any]:
    if schedule not in get_args(Schedule):
        raise ValueError(
            f"pipeline: schedule must be one of {', '.join(map(repr, get_args(Schedule)))}, got {schedule!r}"
        )
    micro_batches = list(batches)
    if not micro_batches:
        raise ValueError("pipeline: there are no micro-batches")
    return micro_batches


def _job(part: Part, arguments: Any, ranks: PipelineRanks, schedule: Schedule) -> tuple[_Job, list[Tensor]]:
    leaves, tree = optree.tree_flatten(arguments)
    layouts = layouts_of(arguments)
    moving = [i for i, leaf in enumerate(leaves) if moves(leaf, layouts[i])]
    inside, records = functorch.inside_transform(), torch.is_grad_enabled()
    needs = [inside or (records and leaves[i].requires_grad) for i in moving]
    flat = [(i, layouts[i]) for i in moving]
    collected = {i: layout for i, layout in flat if layout is not None and layout.state_layout is layout}
    job = _Job(part, leaves, tree, moving, needs, inside, inside or records, collected, ranks, schedule)
    return job, [leaves[i] for i in moving]


def _raise(error: BaseException) -> Any:
    raise error


def split_layers(count: int, size: int) -> list[range]:
    """Splits `count` layers into one consecutive run a rank, of lengths that differ by at most 1, longer ones first.

    Raises:
        ValueError: there are more ranks than layers, or no rank.

    Example:
        >>> split_layers(5, 2)
        [range(0, 3), range(3, 5)]
    """
    if not 1 <= size <= count:
        raise ValueError(f"split_layers: {count} layers cannot be shared by {size} ranks: each needs one")
    shortest, longer = divmod(count, size)
    starts = [index * shortest + min(index, longer) for index in range(size + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def schedule_of(schedule: Schedule, index: int, size: int, count: int) -> list[tuple[str, int]]:
    """The passes of rank `index`, in order: `("forward" or "backward", micro-batch)`."""
    warm_up = min(count, size - 1 - index) if schedule == "1f1b" else count
    order = [("forward", m) for m in range(warm_up)]
    for m in range(count - warm_up):
        order += [("forward", warm_up + m), ("backward", m)]
    return order + [("backward", m) for m in range(count - warm_up, count)]


@dataclass
class _Job:
    """One call of `pipeline`, as functions of the leaves that may be differentiated."""

    part: Part
    leaves: list[Any]
    tree: Any
    moving: list[int]
    needs: list[bool]
    inside: bool
    records: bool
    collected: dict[int, Layout]
    team: PipelineRanks
    schedule: Schedule

    def rebuilt(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        leaves = with_leaves(self.leaves, self.moving, tensors)
        arguments: tuple[Any, list[Any]] = optree.tree_unflatten(self.tree, leaves)
        return arguments

    def run_part(self, params: Any, x: Any, batch: Any) -> tuple[list[Tensor], Any]:
        """This rank's part on one micro-batch: tensors and their structure, or on the last rank the loss and None."""
        watch = _RefuseWrapped() if self.inside and not functorch.inside_transform() else contextlib.nullcontext()
        with independent_along(as_names(self.team.axis)), watch:
            output = self.part(params, x, batch)
        if axis_index(self.team.axis) == self.team.size - 1:
            return [_loss(output)], None
        leaves, tree = optree.tree_flatten(output)
        if not leaves or not all(isinstance(y, Tensor) for y in leaves):
            kinds = listed(type(y).__name__ for y in leaves)
            raise TypeError(f"pipeline: a part returns a pytree of tensors to the next rank, not of ({kinds})")
        return leaves, tree

    def pure(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The loss, from all ranks in lockstep: what each returns goes to the next by `ppermute`."""
        work = _Lockstep(self, tensors)
        dtypes = self.team.run(work.run)
        local_loss = work.loss.to(dtypes[-1])
        return (psum(_tied_to(local_loss, work.chain, work.zero), self.team.axis),)

    def fwd(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The loss, and its gradients if any leaf needs one."""
        variables = [x.detach().requires_grad_(need) for x, need in zip(tensors, self.needs, strict=True)]
        rows = zip(variables, self.moving, self.needs, strict=True)
        steps = [v for v, i, need in rows if i in self.collected and need]
        with Step(steps, "replicas", ordered=False, accumulator=torch.float32) as step:
            work = _RankPasses(self, variables, step)
            dtypes = self.team.run(work.run)
            collected = step.finish()
            follow(collected, variables, [self.collected.get(i) for i in self.moving])
        total = psum(work.loss.to(dtypes[-1]), self.team.axis)
        if not any(self.needs):
            return (total,), ()
        gradients = []
        for variable, by_autograd in zip(variables, work.sums, strict=True):
            parts = [g for g in (by_autograd, collected.get(id(variable))) if g is not None]
            gradient = functools.reduce(torch.add, parts) if parts else torch.zeros_like(variable)
            gradients.append(gradient.to(variable.dtype))
        return (total,), tuple(gradients)

    def bwd(
        self, residuals: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        (ct,) = cotangents
        if ct is None:
            return [None] * len(needs)
        grads = [(g * ct).to(g.dtype) if need else None for g, need in zip(residuals, needs, strict=True)]
        if (recorder := recording.current()) is not None:
            for scaled, g in zip(grads, residuals, strict=True):
                if scaled is not None:  # stages have summed it over the ranks along which the loss varies already
                    recorder.same(scaled, g)
        return grads


class _Supposed:
    """Results of ranks that do not run, when a pipeline is planned: their parts run here, for shapes."""

    def __init__(self, job: _Job, params: Any, batches: list[Any]) -> None:
        self.job, self.params, self.batches = job, params, batches
        self.known: dict[Any, tuple[tuple[Kind, ...], Any]] = {}

    def returned(self, rank: int, number: int) -> tuple[tuple[Kind, ...], Any]:
        """The kinds of the tensors that a rank returns for a micro-batch, and their structure."""
        leaves, tree = optree.tree_flatten(self.batches[number])
        key = rank, tree, *[(x.shape, x.dtype) if isinstance(x, Tensor) else id(x) for x in leaves]
        if key not in self.known:
            job, device = self.job, self.job.team.device
            kinds, structure = self.returned(rank - 1, number) if rank else ((), None)
            with notes().paused(), as_if_at(job.team.axis, rank), torch.set_grad_enabled(job.records):
                inputs = [torch.empty(shape, dtype=dtype, device=device, requires_grad=g) for shape, dtype, g in kinds]
                x = optree.tree_unflatten(structure, inputs) if rank else None
                ys, structure = job.run_part(self.params, x, self.batches[number])
            self.known[key] = tuple([(tuple(y.shape), y.dtype, y.requires_grad) for y in ys]), structure
        return self.known[key]


class _Waiting(NamedTuple):
    """A micro-batch between its forward and backward pass: the part's input, its output and the output's versions."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    versions: list[int]


class _RankPasses:
    """One rank's passes, in the order of the schedule.

    Attributes:
        loss: the sum of the losses so far.
        sums: for each variable, the sum of the gradients that autograd has returned, or None.
    """

    def __init__(self, job: _Job, variables: list[Tensor], step: Step) -> None:
        self.job, self.variables, self.team, self.step = job, variables, job.team, step
        self.params, self.batches = job.rebuilt(variables)
        self.first, self.last = self.team.index == 0, self.team.index == self.team.size - 1
        self.loss = torch.zeros((), device=self.team.device)
        self.sums: list[Tensor | None] = [None] * len(variables)
        self.waiting: dict[int, _Waiting] = {}
        self.asked = False  # whether the ranks before want gradients of this rank's input
        self.supposed = _Supposed(job, self.params, self.batches) if planned() else None
        self.trains = any(job.needs)

    def run(self) -> torch.dtype:
        ranks = self.team
        try:
            for kind, number in schedule_of(self.job.schedule, ranks.index, ranks.size, len(self.batches)):
                if kind == "forward":
                    self._forward(number)
                elif self.trains:
                    self._backward(number)
        finally:
            self.waiting.clear()  # frees activations: after a failure, messages are still received
        return self.loss.dtype if self.supposed is None else self.supposed.returned(ranks.size - 1, 0)[0][0][1]

    def _forward(self, number: int) -> None:
        inputs, x = ([], None) if self.first else self._received(number)
        with torch.set_grad_enabled(self.trains or self.job.records):
            outputs, tree = self.job.run_part(self.params, x, self.batches[number])
        self._refuse_closure(outputs, inputs)
        if self.last:
            loss = outputs[0].detach()
            self.loss = self.loss + loss if number else loss
        else:
            terms = self.trains, len(self.batches), self.job.schedule
            self.team.send(outputs, self.team.index + 1, "gathers", terms, packed(tree))
        if self.trains:
            self.waiting[number] = _Waiting(inputs, outputs, versions(outputs))

    def _received(self, number: int) -> tuple[list[Tensor], Any]:
        previous = self.team.index - 1
        if self.supposed is not None:
            assert isinstance(self.team, PlannedTeam), "ranks that do not run are planned"
            kinds, tree = self.supposed.returned(previous, number)
            terms = any(self.job.needs), len(self.batches), self.job.schedule
            self.team.suppose(previous, "gathers", Message(terms, packed(tree), kinds))
        message = self.team.receive(previous)
        self.asked, *settings = message.said
        _refuse_other(settings, [len(self.batches), self.job.schedule], previous, self.team.axis)
        self.trains = self.trains or self.asked
        for x, (*_, needs) in zip(message.tensors, message.kinds, strict=True):
            x.requires_grad_(needs and self.asked)
        return list(message.tensors), optree.tree_unflatten(unpacked(message.tree), message.tensors)

    def _backward(self, number: int) -> None:
        inputs, outs, out_versions = self.waiting.pop(number)
        cotangents: list[Tensor | None] = [None]
        if not self.last:
            message = self.team.receive(self.team.index + 1)
            self.team.delivered(self.team.index + 1, len(self.waiting))
            rest = iter(message.tensors)
            cotangents = [next(rest) if has_gradient else None for has_gradient in message.said]
        refuse_changed(outs, out_versions)
        both = zip(outs, cotangents, strict=True)
        pairs = [(y, ct) for y, ct in both if y.requires_grad and (self.last or ct is not None)]
        leaves = [x for x in (*inputs, *self.variables) if x.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        with self.step.differentiating(y for y, _ in pairs), _without_autocast(self.team.device):
            if pairs:
                ys, cts = zip(*pairs, strict=True)
                grads = torch.autograd.grad(ys, leaves, cts, allow_unused=True)
        rest_grads = iter(grads)
        input_grads = [next(rest_grads) if x.requires_grad else None for x in inputs]
        if self.asked:
            has_gradient = [g is not None for g in input_grads]
            self.team.send([g for g in input_grads if g is not None], self.team.index - 1, "reductions", has_gradient)
        for i, variable in enumerate(self.variables):
            g = next(rest_grads) if variable.requires_grad else None
            self.sums[i] = self.step.added(self.sums[i], g)

    def _refuse_closure(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Raises RuntimeError if a part reached a tensor that needs a gradient and was not passed to it."""
        arguments = {id(x) for x in (*inputs, *self.variables)}
        if any(id(leaf) not in arguments for leaf in autograd.leaves_of(outputs)):
            raise RuntimeError(_CLOSURE)


class _Lockstep:
    """One rank's forward passes, all of them differentiable, one tick after another on all ranks together.

    Attributes:
        loss: the sum of the losses so far.
        chain: the result of the last exchange. Each exchange depends on the one before, so that all ranks take part
            in each exchange of a derivative, in the same order.
        zero: 0, computed from all arguments.
    """

    def __init__(self, job: _Job, tensors: Sequence[Tensor]) -> None:
        self.job, self.team = job, job.team
        self.params, self.batches = job.rebuilt(tensors)
        self.loss = torch.zeros((), device=self.team.device)
        inputs = [torch.zeros(0, device=self.team.device), *filter(torch.is_tensor, (*tensors, *job.leaves))]
        # So that it is batched or has a tangent if one of them is or has.
        real = (x.real if x.is_complex() else x for x in inputs)
        self.zero = torch.stack([x.reshape(-1)[:0].double().sum() for x in real]).sum()
        self.chain: list[Tensor] = []
        self.supposed = _Supposed(job, self.params, self.batches) if planned() else None

    def run(self) -> torch.dtype:
        index, size, count = self.team.index, self.team.size, len(self.batches)
        x: Any = None
        for tick in range(count + size - 1):
            outputs, tree = self._computed(tick - index, x) if 0 <= tick - index < count else ([], None)
            kinds = tuple([(tuple(y.shape), y.dtype, False) for y in outputs])
            notes = self._notes(tick, (packed(kinds), packed(tree), count, self.job.schedule))
            for rank, (_, _, *settings) in enumerate(notes):
                _refuse_other(settings, [count, self.job.schedule], rank, self.team.axis)
            inputs = self._exchanged(outputs, [unpacked(kinds) for kinds, *_ in notes])
            if inputs:
                x = optree.tree_unflatten(unpacked(notes[index - 1][1]), inputs)
        return self.loss.dtype

    def _notes(self, tick: int, local_note: Any) -> list[Any]:
        """The notes of all ranks on their outputs."""
        if self.supposed is None:
            return self.team.exchange(local_note)
        notes = [local_note] * self.team.size
        for rank in range(self.team.size):
            sends = 0 <= tick - rank < len(self.batches) and rank < self.team.size - 1
            kinds, tree = self.supposed.returned(rank, tick - rank) if sends else ((), None)
            notes[rank] = packed(kinds), packed(tree), *local_note[2:]
        return notes

    def _computed(self, number: int, x: Any) -> tuple[list[Tensor], Any]:
        outputs, tree = self.job.run_part(self.params, x, self.batches[number])
        followed = functorch.followed(self.zero)
        if any(not functorch.followed(y) <= followed for y in outputs):
            raise RuntimeError(_CLOSURE)
        if self.team.index < self.team.size - 1:
            return outputs, tree
        self.loss = self.loss + outputs[0] if number else outputs[0]
        return [], None

    def _exchanged(self, outputs: list[Tensor], kinds: list[tuple[Kind, ...]]) -> list[Tensor]:
        """Sends this rank's output and returns its next input: one vector a dtype, as long as any rank's longest."""
        flats: dict[torch.dtype, Tensor] = {}
        forth = [(rank, rank + 1) for rank in range(self.team.size - 1)]
        for dtype in sorted({dtype for of_rank in kinds for _, dtype, _ in of_rank}, key=str):
            lengths = [sum(math.prod(shape) for shape, other, _ in of_rank if other == dtype) for of_rank in kinds]
            rest = torch.zeros(max(1, *lengths) - lengths[self.team.index], dtype=dtype, device=self.team.device)
            flat = torch.cat([*(y.reshape(-1) for y in outputs if y.dtype == dtype), rest])
            flats[dtype] = ppermute(_tied_to(flat, self.chain, self.zero), self.team.axis, forth)
            if dtype.is_floating_point or dtype.is_complex:  # integers have no derivative
                self.chain = [flats[dtype]]
        inputs = []
        for shape, dtype, _ in kinds[self.team.index - 1] if self.team.index else ():
            values, flats[dtype] = flats[dtype].tensor_split([math.prod(shape)])
            inputs.append(values.view(shape))
        return inputs


def _alone(tree: Any, axis: AxisName) -> Any:
    """The tree with flat shards whose stages run on this rank independently of the others along the axis.

    A shard that all of them hold goes through `pvary`, which sums the ranks' gradients once at the end: inside, ranks
    may use it a different number of times, or never.
    """
    places = tuple((name, axis_index(name)) for name in as_names(axis))

    def own_shard(node: Any) -> Any:
        if not is_flat(node) or not isinstance(node.values, Tensor):
            return node
        layout, values = _layout_alone(node.layout, places), node.values
        shared = tuple(name for name, _ in places if name in node.layout.placement.replicas)
        if shared and layout.trainable and (functorch.inside_transform() or values.requires_grad):
            values = pvary(values, shared)
        return FlatShard(values, layout)

    return optree.tree_map(own_shard, tree, is_leaf=is_flat)


@functools.lru_cache(maxsize=4096)
def _layout_alone(layout: Layout, places: tuple[tuple[str, int], ...]) -> Layout:
    names = {name for name, _ in places}
    has_axes = names <= {name for name, _ in layout.grid.sizes}
    cut = names.intersection(layout.placement.axes)  # a stage that uses such a shard raises
    return layout if not has_axes or cut or names <= set(layout.placement.only_at_axes) else layout.alone(places)


def _tied_to(x: Tensor, dependencies: Sequence[Tensor], zero: Tensor) -> Tensor:
    """`x`, depending on `dependencies` without a change of value; on every rank their cotangents depend on `zero`."""
    for other in dependencies:
        none = (other.reshape(-1)[:0] * zero.to(other.dtype)).sum()
        x = x + (none.real if none.is_complex() and not x.is_complex() else none).to(x.dtype)
    return x + zero.to(x.dtype)


def _loss(output: Any) -> Tensor:
    if not isinstance(output, Tensor) or output.ndim or not output.is_floating_point():
        kind = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"pipeline: the last rank must return a micro-batch's loss, a real scalar, got {kind}")
    return output


def _refuse_other(remote: Sequence[Any], local: Sequence[Any], rank: int, axis: AxisName) -> None:
    """Raises ValueError unless another rank has the same number of micro-batches and the same schedule."""
    for template, other, value in zip(("{} micro-batches", "schedule={!r}"), remote, local, strict=True):
        if other != value:
            raise ValueError(
                f"pipeline: rank {rank} along {axis!r} has {template.format(other)}, and this one "
                f"{template.format(value)}: all ranks have the same"
            )


_CLOSURE = (
    "pipeline: a part uses a tensor that needs a gradient and is not among its arguments: the gradient would be lost. "
    "Pass it with params, or use its detach() if none is wanted"
)


class _RefuseWrapped(torch.overrides.TorchFunctionMode):
    """Refuses tensors of an outer torch.func transform, which a part can only have closed over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        computes = func is not Tensor.detach and any(isinstance(y, Tensor) for y in optree.tree_leaves(result))
        if computes and any(map(functorch.wrapped, optree.tree_leaves((args, kwargs)))):
            raise RuntimeError(_CLOSURE)
        return result


def _without_autocast(device: torch.device) -> Any:
    """A context for backward that disables autocast: its ops must keep the dtypes that they had in forward."""
    is_enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_enabled else contextlib.nullcontext()
