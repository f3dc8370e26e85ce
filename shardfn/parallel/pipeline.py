"""Pipeline parallelism: each rank along an axis computes with its own layers, on one micro-batch after another.

A schedule is a list of forward and backward passes for each rank, and the ranks' lists meet in the messages between
neighbours. What all of it means is the sum of the micro-batches' losses, a function like any other: first derivatives
by reverse mode come from the schedule, others from the same passes in step, with `ppermute` in between.
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
from shardfn.mesh.scope import independent_along, refuse_independent
from shardfn.parallel.messages import Kind, Team, packed, refuse_changed, team_of, unpacked, versions
from shardfn.quoting import listed
from shardfn.shards.layout import FlatShard, Layout, is_flat
from shardfn.shards.partition import with_leaves
from shardfn.transforms.autodiff import follow, layouts_of, moves
from shardfn.transforms.custom_vjp import custom_vjp
from shardfn.transforms.step import Step

Part = Callable[[Any, Any, Any], Any]
Schedule = Literal["1f1b", "gpipe"]


def pipeline(
    part: Part, params: Any, batches: Iterable[Any], axis: AxisName = (), *, schedule: Schedule = "1f1b"
) -> Tensor:
    """The sum of a loss over micro-batches, where each rank along `axis` has a part of the model: 0-d, `V -> I`.

    Gradients by `params` are this rank's: of what lives at one place of `axis` (`Placement.at`) exactly the whole
    batch's. A stage that all ranks along the axis hold (the axis is among its strategy's `replicas`) may be used by any
    of the parts, an embedding by the first and the last, say: its gradient is the sum over all uses. Other parameters
    that all have, and use differently, go through `pvary` first.

    Args:
        part: `(params, x, batch) -> y`. On the first rank `x` is None, on the others what the rank before returned;
            what the last one returns is the micro-batch's loss, a scalar. In between goes a pytree of tensors, whose
            structure, shapes and dtypes may be others each time; what was returned is not changed in place afterwards.
            Nothing goes along `axis` inside. `axis_index(axis)` says which rank it is; with one rank it is both.
        params: a pytree.
        batches: micro-batches, as many on every rank, each a pytree.
        axis: the ranks of the pipeline; `()` for one.
        schedule: `"1f1b"`: as soon as a rank can, it does one backward pass for each forward pass, and holds the
            activations of `size - index` micro-batches at most; `"gpipe"`: all forward passes first.

    Returns:
        The sum, the same on all ranks along `axis`. Ranks wait for `(size - 1) / (batches + size - 1)` of the time.

    Raises:
        ValueError: no micro-batches; another number of them, or another schedule, than other ranks have.
        RuntimeError: a part uses a tensor that needs a gradient and that it was not given; changes what it returned;
            wants to move something along `axis`. A rank is gone.

        What one rank raises, also an interrupt, ends the pipeline on all ranks along `axis`: there as the same, or as a
        ValueError, TypeError or RuntimeError that says what it was and where. The next call finds nothing of it.

    Sources: Huang et al., GPipe (2018), section 2.3; Narayanan et al., PipeDream-2BW (2020), section 3.2, for 1F1B.

    Example:
        ``loss = pipeline(part, params, list(tokens.chunk(4)), "pipe")``, with ``value_and_grad`` around it
    """
    if axis_size(axis) == 1:
        many = _batches(batches, schedule)
        return torch.stack([_loss(part(params, None, batch)) for batch in many]).sum()
    refuse_independent(axis, "pipeline")
    team = team_of(axis)
    try:
        job, tensors = _job(part, _alone((params, _batches(batches, schedule)), axis), team, schedule)
    except BaseException as error:
        return team.run(functools.partial(_raise, error))[0]  # which the others learn
    return custom_vjp(job.pure, job.fwd, job.bwd)(*tensors)[0]


def _batches(batches: Iterable[Any], schedule: Schedule) -> list[Any]:
    if schedule not in get_args(Schedule):
        raise ValueError(f"pipeline: schedule={schedule!r}; it is one of {', '.join(map(repr, get_args(Schedule)))}")
    many = list(batches)
    if not many:
        raise ValueError("pipeline: there are no micro-batches")
    return many


def _job(part: Part, arguments: Any, team: Team, schedule: Schedule) -> tuple[_Job, list[Tensor]]:
    leaves, tree = optree.tree_flatten(arguments)
    layouts = layouts_of(arguments)
    moving = [i for i, leaf in enumerate(leaves) if moves(leaf, layouts[i])]
    inside, records = functorch.inside_transform(), torch.is_grad_enabled()
    needs = [inside or (records and leaves[i].requires_grad) for i in moving]
    flat = [(i, layouts[i]) for i in moving]
    collected = {i: layout for i, layout in flat if layout is not None and layout.state_layout is layout}
    made = _Job(part, leaves, tree, moving, needs, inside, inside or records, collected, team, schedule)
    return made, [leaves[i] for i in moving]


def _raise(error: BaseException) -> Any:
    raise error


def split_layers(count: int, size: int) -> list[range]:
    """Which of `count` layers each of `size` ranks has: runs as equal as can be, the longer ones first.

    Raises:
        ValueError: more ranks than layers.

    Example:
        >>> split_layers(5, 2)
        [range(0, 3), range(3, 5)]
    """
    if not 1 <= size <= count:
        raise ValueError(f"split_layers: {count} layers cannot be shared by {size} ranks: each needs one")
    each, more = divmod(count, size)
    starts = [index * each + min(index, more) for index in range(size + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def passes(schedule: Schedule, index: int, size: int, count: int) -> list[tuple[str, int]]:
    """What rank `index` does, in order: `("forward" or "backward", micro-batch)`."""
    ahead = min(count, size - 1 - index) if schedule == "1f1b" else count
    found = [("forward", m) for m in range(ahead)]
    for m in range(count - ahead):
        found += [("forward", ahead + m), ("backward", m)]
    return found + [("backward", m) for m in range(count - ahead, count)]


@dataclass
class _Job:
    """One pipeline, as functions of the leaves that may be differentiated."""

    part: Part
    leaves: list[Any]
    tree: Any
    moving: list[int]
    needs: list[bool]
    inside: bool
    records: bool
    collected: dict[int, Layout]
    team: Team
    schedule: Schedule

    def rebuilt(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        mixed = with_leaves(self.leaves, self.moving, tensors)
        made: tuple[Any, list[Any]] = optree.tree_unflatten(self.tree, mixed)
        return made

    def on(self, params: Any, x: Any, batch: Any) -> tuple[list[Tensor], Any]:
        """What this rank's part makes of a micro-batch, tensors and their structure; of the last one the loss."""
        watched = _RefuseWrapped() if self.inside and not functorch.inside_transform() else contextlib.nullcontext()
        with independent_along(as_names(self.team.axis)), watched:
            made = self.part(params, x, batch)
        if self.team.index == self.team.size - 1:
            return [_loss(made)], None
        leaves, tree = optree.tree_flatten(made)
        if not leaves or not all(isinstance(y, Tensor) for y in leaves):
            kinds = listed(type(y).__name__ for y in leaves)
            raise TypeError(f"pipeline: a part returns a pytree of tensors to the next rank, not of ({kinds})")
        return leaves, tree

    def pure(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All ranks in step: what each makes goes to the next by `ppermute`."""
        work = _InStep(self, tensors)
        dtypes = self.team.run(work.run)
        own = work.loss.to(dtypes[-1])
        return (psum(_hung_on(own, work.chain, work.nothing), self.team.axis),)

    def fwd(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The loss, and where anybody asks, its gradients."""
        variables = [x.detach().requires_grad_(need) for x, need in zip(tensors, self.needs, strict=True)]
        steps = [
            v for v, i, need in zip(variables, self.moving, self.needs, strict=True) if i in self.collected and need
        ]
        with Step(steps, "replicas", ordered=False) as step:
            work = _Work(self, variables, step)
            dtypes = self.team.run(work.run)
            found = step.finish()
            follow(found, variables, [self.collected.get(i) for i in self.moving])
        total = psum(work.loss.to(dtypes[-1]), self.team.axis)
        if not any(self.needs):
            return (total,), ()
        kept = []
        for variable, by_autograd in zip(variables, work.sums, strict=True):
            parts = [g for g in (by_autograd, found.get(id(variable))) if g is not None]
            kept.append(functools.reduce(torch.add, parts) if parts else torch.zeros_like(variable))
        return (total,), tuple(kept)

    def bwd(
        self, residuals: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        (ct,) = cotangents
        if ct is None:
            return [None] * len(needs)
        found = [(g * ct).to(g.dtype) if need else None for g, need in zip(residuals, needs, strict=True)]
        if (recorder := recording.current()) is not None:
            for scaled, g in zip(found, residuals, strict=True):
                if scaled is not None:  # stages have summed it over the ranks along which the loss varies
                    recorder.same(scaled, g)
        return found


class _Waiting(NamedTuple):
    """A micro-batch between its forward and its backward: what came, what was made, and its versions."""

    came: list[Tensor]
    made: list[Tensor]
    versions: list[int]


class _Work:
    """One rank's passes.

    Attributes:
        loss: the sum so far.
        sums: of gradients by the variables, which autograd found.
    """

    def __init__(self, job: _Job, variables: list[Tensor], step: Step) -> None:
        self.job, self.variables, self.team, self.step = job, variables, job.team, step
        self.params, self.batches = job.rebuilt(variables)
        self.first, self.last = self.team.index == 0, self.team.index == self.team.size - 1
        self.loss = torch.zeros((), device=self.team.device)
        self.sums: list[Tensor | None] = [None] * len(variables)
        self.waiting: dict[int, _Waiting] = {}
        self.asked = False  # whether the ranks before want gradients of what came
        self.trains = any(job.needs)

    def run(self) -> torch.dtype:
        team = self.team
        try:
            for kind, number in passes(self.job.schedule, team.index, team.size, len(self.batches)):
                if kind == "forward":
                    self._forward(number)
                elif self.trains:
                    self._backward(number)
        finally:
            self.waiting.clear()  # what still comes after a failure needs room
        return self.loss.dtype

    def _forward(self, number: int) -> None:
        came, x = ([], None) if self.first else self._came()
        with torch.set_grad_enabled(self.trains or self.job.records):
            made, tree = self.job.on(self.params, x, self.batches[number])
        self._refuse_closure(made, came)
        if self.last:
            loss = made[0].detach()
            self.loss = self.loss + loss if number else loss
        else:
            said = self.trains, len(self.batches), self.job.schedule
            self.team.send(made, self.team.index + 1, "gathers", said, packed(tree))
        if self.trains:
            self.waiting[number] = _Waiting(came, made, versions(made))

    def _came(self) -> tuple[list[Tensor], Any]:
        before = self.team.index - 1
        message = self.team.receive(before)
        self.asked, *theirs = message.said
        _refuse_other(theirs, [len(self.batches), self.job.schedule], before, self.team.axis)
        self.trains = self.trains or self.asked
        for x, (*_, needs) in zip(message.tensors, message.kinds, strict=True):
            x.requires_grad_(needs and self.asked)
        return list(message.tensors), optree.tree_unflatten(unpacked(message.tree), message.tensors)

    def _backward(self, number: int) -> None:
        came, made, before = self.waiting.pop(number)
        cotangents: list[Tensor | None] = [None]
        if not self.last:
            message = self.team.receive(self.team.index + 1)
            self.team.delivered(self.team.index + 1, len(self.waiting))
            rest = iter(message.tensors)
            cotangents = [next(rest) if given else None for given in message.said]
        refuse_changed(made, before)
        pairs = [
            (y, ct) for y, ct in zip(made, cotangents, strict=True) if y.requires_grad and (self.last or ct is not None)
        ]
        wanted = [x for x in (*came, *self.variables) if x.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        with self.step.differentiating(), _without_autocast(self.team.device):
            if pairs:
                ys, cts = zip(*pairs, strict=True)
                found = torch.autograd.grad(ys, wanted, cts, allow_unused=True)
        rest_found = iter(found)
        back = [next(rest_found) if x.requires_grad else None for x in came]
        if self.asked:
            given = [g is not None for g in back]
            self.team.send([g for g in back if g is not None], self.team.index - 1, "reductions", given)
        for i, variable in enumerate(self.variables):
            g = next(rest_found) if variable.requires_grad else None
            so_far = self.sums[i]
            self.sums[i] = so_far if g is None else g if so_far is None else so_far + g

    def _refuse_closure(self, made: Sequence[Tensor], came: Sequence[Tensor]) -> None:
        """Raises RuntimeError if a part reached a tensor that needs a gradient and was not passed to it."""
        known = {id(x) for x in (*came, *self.variables)}
        if any(id(leaf) not in known for leaf in autograd.leaves_of(made)):
            raise RuntimeError(_CLOSURE)


class _InStep:
    """One rank's passes forward, all of them differentiable, a tick at a time on all ranks.

    Attributes:
        loss: the sum so far.
        chain: what the last exchange gave. Everything hangs on one chain, so that all ranks take part in each exchange
            of a derivative, in order.
        nothing: 0, as a result of all arguments.
    """

    def __init__(self, job: _Job, tensors: Sequence[Tensor]) -> None:
        self.job, self.team = job, job.team
        self.params, self.batches = job.rebuilt(tensors)
        self.loss = torch.zeros((), device=self.team.device)
        given = [x for x in (*tensors, *job.leaves) if isinstance(x, Tensor)]
        self.nothing = _nothing([torch.zeros(0, device=self.team.device), *given])
        self.chain: list[Tensor] = []

    def run(self) -> torch.dtype:
        index, size, count = self.team.index, self.team.size, len(self.batches)
        x: Any = None
        for tick in range(count + size - 1):
            made, tree = self._made(tick - index, x) if 0 <= tick - index < count else ([], None)
            kinds = tuple([(tuple(y.shape), y.dtype, False) for y in made])
            heard = self.team.exchange((packed(kinds), packed(tree), count, self.job.schedule))
            for rank, (_, _, *theirs) in enumerate(heard):
                _refuse_other(theirs, [count, self.job.schedule], rank, self.team.axis)
            came = self._moved(made, [unpacked(theirs) for theirs, *_ in heard])
            if came:
                x = optree.tree_unflatten(unpacked(heard[index - 1][1]), came)
        return self.loss.dtype

    def _made(self, number: int, x: Any) -> tuple[list[Tensor], Any]:
        made, tree = self.job.on(self.params, x, self.batches[number])
        known = functorch.followed(self.nothing)
        if any(not functorch.followed(y) <= known for y in made):
            raise RuntimeError(_CLOSURE)
        if self.team.index < self.team.size - 1:
            return made, tree
        self.loss = self.loss + made[0] if number else made[0]
        return [], None

    def _moved(self, made: list[Tensor], kinds: list[tuple[Kind, ...]]) -> list[Tensor]:
        """What comes, when what was made has gone: one vector a dtype, as long as the longest of any rank."""
        flats: dict[torch.dtype, Tensor] = {}
        forth = [(rank, rank + 1) for rank in range(self.team.size - 1)]
        for dtype in sorted({dtype for each in kinds for _, dtype, _ in each}, key=str):
            lengths = [sum(math.prod(shape) for shape, other, _ in each if other == dtype) for each in kinds]
            rest = torch.zeros(max(1, *lengths) - lengths[self.team.index], dtype=dtype, device=self.team.device)
            flat = torch.cat([*(y.reshape(-1) for y in made if y.dtype == dtype), rest])
            flats[dtype] = ppermute(_hung_on(flat, self.chain, self.nothing), self.team.axis, forth)
            if dtype.is_floating_point or dtype.is_complex:  # others have no derivative
                self.chain = [flats[dtype]]
        came = []
        for shape, dtype, _ in kinds[self.team.index - 1] if self.team.index else ():
            own, flats[dtype] = flats[dtype].tensor_split([math.prod(shape)])
            came.append(own.view(shape))
        return came


def _alone(tree: Any, axis: AxisName) -> Any:
    """A tree whose flat shards are stages of this rank alone among those along the axis, which run independently.

    One that all of them hold goes through `pvary`, which sums over the ranks' gradients at the end: inside, some ranks
    may use it more often than others, or never.
    """
    places = tuple((name, axis_index(name)) for name in as_names(axis))

    def own(node: Any) -> Any:
        if not is_flat(node) or not isinstance(node.values, Tensor):
            return node
        layout, values = _layout_alone(node.layout, places), node.values
        shared = tuple(name for name, _ in places if name in node.layout.placement.replicas)
        if shared and layout.trainable and (functorch.inside_transform() or values.requires_grad):
            values = pvary(values, shared)
        return FlatShard(values, layout)

    return optree.tree_map(own, tree, is_leaf=is_flat)


@functools.lru_cache(maxsize=4096)
def _layout_alone(layout: Layout, places: tuple[tuple[str, int], ...]) -> Layout:
    names = {name for name, _ in places}
    known = names <= {name for name, _ in layout.grid.sizes}
    cut = names.intersection(layout.placement.axes)  # a stage that uses such a one says that it cannot
    return layout if not known or cut or names <= set(layout.placement.only_at_axes) else layout.alone(places)


def _nothing(tensors: Sequence[Tensor]) -> Tensor:
    """0, as a result of all of these: a batch, or with a tangent, if one of them is or has."""
    return torch.stack([(x.real if x.is_complex() else x).reshape(-1)[:0].double().sum() for x in tensors]).sum()


def _hung_on(x: Tensor, others: Sequence[Tensor], nothing: Tensor) -> Tensor:
    """`x`, as a result of the others too; what their cotangents are made of depends on `nothing`, on every rank."""
    for other in others:
        none = (other.reshape(-1)[:0] * nothing.to(other.dtype)).sum()
        x = x + (none.real if none.is_complex() and not x.is_complex() else none).to(x.dtype)
    return x + nothing.to(x.dtype)


def _loss(made: Any) -> Tensor:
    if not isinstance(made, Tensor) or made.ndim or not made.is_floating_point():
        what = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(f"pipeline: the last rank returns a micro-batch's loss, a real scalar, not {what}")
    return made


def _refuse_other(theirs: Sequence[Any], own: Sequence[Any], rank: int, axis: AxisName) -> None:
    """Raises ValueError unless another rank has as many micro-batches and the same schedule."""
    for what, other, mine in zip(("{} micro-batches", "schedule={!r}"), theirs, own, strict=True):
        if other != mine:
            raise ValueError(
                f"pipeline: rank {rank} along {axis!r} has {what.format(other)}, and this one {what.format(mine)}: "
                f"all ranks have the same"
            )


_CLOSURE = (
    "pipeline: a part uses a tensor that needs a gradient and is not among its arguments: the gradient would be lost. "
    "Pass it with params, or use its detach() if none is wanted"
)


class _RefuseWrapped(torch.overrides.TorchFunctionMode):
    """Refuses tensors of a torch.func transform that runs outside, which a part can only have closed over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        computes = func is not Tensor.detach and any(isinstance(y, Tensor) for y in optree.tree_leaves(made))
        if computes and any(map(functorch.wrapped, optree.tree_leaves((args, kwargs)))):
            raise RuntimeError(_CLOSURE)
        return made


def _without_autocast(device: torch.device) -> Any:
    """A context for backward, whose ops take the dtypes that they had in forward."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()
