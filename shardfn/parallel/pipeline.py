"""Pipeline parallelism: each rank along an axis computes with its own layers, on one micro-batch after another.

A schedule is a list of forward and backward passes for each rank, and the ranks' lists meet in the messages between
neighbours. What all of it means is the sum of the micro-batches' losses, a function like any other: first derivatives
by reverse mode come from the schedule, others from the same passes in step, with `ppermute` in between.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from shardfn import compat
from shardfn.autodiff import layouts_of, moves
from shardfn.collectives import axis_index, axis_size, ppermute, psum
from shardfn.firstorder import Rule
from shardfn.ledger import record
from shardfn.link import Link, link
from shardfn.mesh import AxisName, as_names, current_mesh, known_axes
from shardfn.reduction import Step

Part = Callable[[Any, Any, Any], Any]
Schedule = Literal["1f1b", "gpipe"]


def pipeline(
    part: Part, params: Any, batches: Iterable[Any], axis: AxisName = (), *, schedule: Schedule = "1f1b"
) -> Tensor:
    """The sum of a loss over micro-batches, where each rank along `axis` has a part of the model: 0-d, `V -> I`.

    Gradients by `params` are this rank's: of what lives at one place of `axis` (`Placement.at`) exactly the whole
    batch's. Parameters that all ranks along the axis have, and use differently, go through `pvary` first.

    Args:
        part: `(params, x, batch) -> y`. On the first rank `x` is None, on the others what the rank before returned;
            what the last one returns is the micro-batch's loss, a scalar. In between goes a pytree of tensors, of one
            structure and shape everywhere. `axis_index(axis)` says which rank it is; with one rank it is both.
        params: a pytree.
        batches: micro-batches, as many on every rank, each a pytree.
        axis: the ranks of the pipeline; `()` for one.
        schedule: `"1f1b"`: as soon as a rank can, it does one backward pass for each forward pass, and holds the
            activations of `size - index` micro-batches at most; `"gpipe"`: all forward passes first.

    Returns:
        The sum, the same on all ranks along `axis`. Ranks wait for `(size - 1) / (batches + size - 1)` of the time.

    Raises:
        ValueError: on all ranks along `axis`: no micro-batches; another number of them, or other shapes, than other
            ranks have; an unknown schedule.
        RuntimeError: on all ranks, if `part` fails on one when it runs there for the first time.

    Sources: Huang et al., GPipe (2018), section 2.3; Narayanan et al., PipeDream-2BW (2020), section 3.2, for 1F1B.

    Example:
        ``loss = pipeline(part, params, list(tokens.chunk(4)), "pipe")``, with ``value_and_grad`` around it
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"pipeline: schedule={schedule!r}; it is one of {', '.join(map(repr, get_args(Schedule)))}")
    many = list(batches)
    if not many:
        raise ValueError("pipeline: there are no micro-batches")
    if axis_size(axis) == 1:
        return torch.stack([_loss(part(params, None, batch)) for batch in many]).sum()
    between = _surveyed(part, params, many, axis)
    leaves, tree = optree.tree_flatten((params, many))
    layouts = layouts_of((params, many))
    moving = [i for i, leaf in enumerate(leaves) if moves(leaf, layouts[i])]
    inside = compat.inside_transform()
    needs = [inside or (torch.is_grad_enabled() and leaves[i].requires_grad) for i in moving]
    flat = [(i, layouts[i]) for i in moving]
    collected = {i for i, layout in flat if layout is not None and layout.divided is layout}
    job = _Job(part, leaves, tree, moving, needs, collected, axis, between, schedule)
    return Rule(job.pure, job.forward, job.backward)(*[leaves[i] for i in moving])[0]


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


@dataclass(frozen=True)
class _Between:
    """What passes from rank to rank: a pytree of tensors of these shapes and dtypes; and the dtype of the loss."""

    tree: Any
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    loss: torch.dtype = torch.float32

    def __str__(self) -> str:
        return ", ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for shape, dtype in self.kinds)

    def empty(self, device: torch.device) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.kinds]


@dataclass
class _Job:
    """One pipeline, as functions of the leaves that may be differentiated."""

    part: Part
    leaves: list[Any]
    tree: Any
    moving: list[int]
    needs: list[bool]
    collected: set[int]
    axis: AxisName
    between: _Between
    schedule: Schedule

    def rebuilt(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        mixed = list(self.leaves)
        for i, x in zip(self.moving, tensors, strict=True):
            mixed[i] = x
        made: tuple[Any, list[Any]] = optree.tree_unflatten(self.tree, mixed)
        return made

    def pure(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All ranks in step: what each makes goes to the next by `ppermute`."""
        params, batches = self.rebuilt(tensors)
        size, index, device = axis_size(self.axis), axis_index(self.axis), _device(tensors)
        # Everything hangs on one chain, so that all ranks take part in each exchange of a derivative, in order.
        nothing = _nothing([x for x in (*tensors, *self.leaves) if isinstance(x, Tensor)])
        coming = [_hung_on(x.zero_(), [], nothing) for x in self.between.empty(device)]
        losses: list[Tensor] = []
        chain = [(rank, rank + 1) for rank in range(size - 1)]
        for tick in range(len(batches) + size - 1):
            going, number = coming, tick - index
            if 0 <= number < len(batches):
                x = optree.tree_unflatten(self.between.tree, coming) if index else None
                made = self.part(params, x, batches[number])
                if index == size - 1:
                    losses.append(_loss(made))
                else:
                    going = optree.tree_leaves(made)
            coming = [ppermute(_hung_on(x, coming, nothing), self.axis, chain) for x in going]
        own = torch.stack(losses).sum() if losses else torch.zeros((), dtype=self.between.loss, device=device)
        return (psum(_hung_on(own, coming, nothing), self.axis),)

    def forward(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The loss, and where anybody asks, its gradients."""
        variables = [x.detach().requires_grad_(need) for x, need in zip(tensors, self.needs, strict=True)]
        steps = [
            v for v, i, need in zip(variables, self.moving, self.needs, strict=True) if i in self.collected and need
        ]
        with Step(steps, "replicas", ordered=False) as step:
            work = _Work(self, variables, _link(self.axis), step)
            work.run()
            found = step.finish()
        total = psum(work.loss.to(self.between.loss), self.axis)
        if not any(self.needs):
            return (total,), ()
        kept = []
        for variable, by_autograd in zip(variables, work.sums, strict=True):
            parts = [g for g in (by_autograd, found.get(id(variable))) if g is not None]
            kept.append(functools.reduce(torch.add, parts) if parts else torch.zeros_like(variable))
        return (total,), tuple(kept)

    def backward(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        (ct,) = cotangents
        if ct is None:
            return [None] * len(inputs)
        return [(g * ct).to(g.dtype) if need else None for g, need in zip(kept, needs, strict=True)]


class _Work:
    """One rank's passes.

    Attributes:
        loss: the sum so far.
        sums: of gradients by the variables, which autograd found.
    """

    def __init__(self, job: _Job, variables: list[Tensor], link: Link, step: Step) -> None:
        self.job, self.variables, self.link, self.step = job, variables, link, step
        self.params, self.batches = job.rebuilt(variables)
        self.size, self.index = axis_size(job.axis), axis_index(job.axis)
        self.device = _device(variables)
        self.loss = torch.zeros((), dtype=job.between.loss, device=self.device)
        self.sums: list[Tensor | None] = [None] * len(variables)
        self.waiting: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # what came and what was made, until backward
        self.under_way: list[tuple[Any, Tensor]] = []
        self.trains = any(job.needs)

    def run(self) -> None:
        for kind, number in passes(self.job.schedule, self.index, self.size, len(self.batches)):
            if kind == "forward":
                self._forward(number)
            elif self.trains:
                self._backward(number)
        for work, _ in self.under_way:
            work.wait()

    def _forward(self, number: int) -> None:
        came = self._received(self.index - 1, "gathers") if self.index else []
        came = [x.requires_grad_(self.trains and x.is_floating_point()) for x in came]
        x = optree.tree_unflatten(self.job.between.tree, came) if self.index else None
        with torch.set_grad_enabled(self.trains):
            made = self.job.part(self.params, x, self.batches[number])
            leaves = [_loss(made)] if self.index == self.size - 1 else optree.tree_leaves(made)
        if self.index == self.size - 1:
            self.loss = self.loss + leaves[0].detach()
        else:
            self._send([y.detach() for y in leaves], self.index + 1, "gathers")
        if self.trains:
            self.waiting[number] = came, leaves

    def _backward(self, number: int) -> None:
        came, made = self.waiting.pop(number)
        cotangents: list[Tensor | None] = [None]
        if self.index < self.size - 1:
            rest = iter(self._received(self.index + 1, "reductions", floating=True))
            cotangents = [next(rest) if y.is_floating_point() else None for y in made]
        wanted = [x for x in (*came, *self.variables) if x.requires_grad]
        pairs = [(y, ct) for y, ct in zip(made, cotangents, strict=True) if y.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        with self.step.differentiating():
            if pairs:
                ys, cts = zip(*pairs, strict=True)
                found = torch.autograd.grad(ys, wanted, cts, allow_unused=True)
        rest_found = iter(found)
        back = [next(rest_found) if x.requires_grad else None for x in came]
        if self.index:
            moves = [(x, g) for x, g in zip(came, back, strict=True) if x.is_floating_point()]
            self._send([torch.zeros_like(x) if g is None else g for x, g in moves], self.index - 1, "reductions")
        for i, variable in enumerate(self.variables):
            g = next(rest_found) if variable.requires_grad else None
            before = self.sums[i]
            self.sums[i] = before if g is None else g if before is None else before + g

    def _send(self, tensors: Sequence[Tensor], to: int, way: str) -> None:
        group, peer = self._peer(to, way)
        for x in tensors:
            x = x.contiguous()
            record(
                "send", self.link.axis.group, x.dtype, x.nbytes, "native", self.link.names,
                scheduled=True, backward=way == "reductions",
            )  # fmt: skip
            self.under_way.append((dist.isend(x, peer, group=group), x))
        self.under_way = [one for one in self.under_way if not one[0].is_completed()]

    def _received(self, source: int, way: str, floating: bool = False) -> list[Tensor]:
        group, peer = self._peer(source, way)
        found = [x for x in self.job.between.empty(self.device) if x.is_floating_point() or not floating]
        coming: list[Any] = [dist.irecv(x, peer, group=group) for x in found]
        for work in coming:
            work.wait()
        return found

    def _peer(self, index: int, way: str) -> tuple[Any, int]:
        group = getattr(self.link, way)  # two communicators: neither direction waits for the other
        return group, dist.get_process_group_ranks(group)[index]


def _surveyed(part: Part, params: Any, batches: list[Any], axis: AxisName) -> _Between:
    """What passes between ranks, found out once by running each rank's part on one micro-batch.

    Raises:
        ValueError, RuntimeError: on all ranks along `axis`, if something does not fit or fails on one of them.
    """
    mesh = current_mesh()
    assert mesh is not None, "an axis of several ranks belongs to a mesh"
    leaves, tree = optree.tree_flatten((params, batches[0]))
    shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    code = getattr(part, "__code__", part)
    known = mesh.__dict__.setdefault("_shardfn_pipelines", {})
    key = (code, tree, repr(shapes), len(batches), axis)
    if key in known:
        return known[key]
    size, index = axis_size(axis), axis_index(axis)
    store, place = compat.default_store(), _place(mesh, axis)  # no tensors: a transform may be running
    device = _device([x for x in leaves if isinstance(x, Tensor)])
    between: _Between | None = None
    problem: Exception | None = None
    for turn in range(size):  # each tells what it found, or what is wrong, and hears of it from all
        if turn == index:
            found: Any = None
            if problem is None:
                try:
                    found = _tried(part, params, batches, between, index, size, device)
                except Exception as failure:
                    problem = failure
            told = found if problem is None else f"{type(problem).__name__}: {problem}"
            store.set(f"{place}/{turn}", pickle.dumps(told))
        else:
            found = pickle.loads(store.get(f"{place}/{turn}"))
            if isinstance(found, str):
                problem = problem or RuntimeError(f"pipeline: the part of rank {turn} along {axis!r} failed: {found}")
        if problem is None:
            between, problem = _joined(between, found, turn, size, len(batches), axis)
    if problem is not None:
        raise problem
    assert between is not None, "the last rank returned a loss"
    known[key] = between
    return between


def _joined(
    between: _Between | None, found: Any, turn: int, size: int, own: int, axis: AxisName
) -> tuple[_Between | None, Exception | None]:
    """What passes between ranks after one more told what it returns, or what is wrong with that."""
    count, made = found
    if count != own:
        return between, ValueError(
            f"pipeline: rank {turn} along {axis!r} has {count} micro-batches, and this one {own}: all have as many"
        )
    if between is None:
        return made, None
    if turn == size - 1:
        return replace(between, loss=made), None
    if made != between:
        return between, ValueError(
            f"pipeline: rank {turn} along {axis!r} returns {made}, but those before {between}: all return the same "
            f"structure, shapes and dtypes"
        )
    return between, None


def _place(mesh: Any, axis: AxisName) -> str:
    """A place in the store for one survey by the ranks along an axis."""
    ranks = dist.get_process_group_ranks(compat.group_of(_link(axis).axis.group))
    number = next(mesh.__dict__.setdefault("_shardfn_surveys", itertools.count()))
    return f"shardfn/pipeline/{known_axes(mesh).number}/{'-'.join(map(str, ranks))}/{number}"


def _tried(
    part: Part, params: Any, batches: list[Any], between: _Between | None, index: int, size: int, device: torch.device
) -> tuple[int, Any]:
    x = None
    if between is not None:
        x = optree.tree_unflatten(between.tree, [y.zero_() for y in between.empty(device)])
    given = optree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (params, x, batches[0]))
    with torch.enable_grad(), torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        made = part(*given)
    if any(y.requires_grad for y in optree.tree_leaves(made) if isinstance(y, Tensor)):
        raise RuntimeError(
            "pipeline: a part uses a tensor that needs a gradient and is not among its arguments: the gradient would "
            "be lost. Pass it with params, or detach it"
        )
    if index == size - 1:
        return len(batches), _loss(made).dtype
    leaves, tree = optree.tree_flatten(made)
    if not leaves or not all(isinstance(y, Tensor) for y in leaves):
        kinds = ", ".join(type(y).__name__ for y in leaves)
        raise TypeError(f"pipeline: a part returns a pytree of tensors to the next rank, not of ({kinds})")
    return len(batches), _Between(tree, tuple((tuple(y.shape), y.dtype) for y in leaves))


def _nothing(tensors: Sequence[Tensor]) -> Tensor:
    """0, as a result of all of these: a batch, or with a tangent, if one of them is or has."""
    return torch.stack([(x.real if x.is_complex() else x).reshape(-1)[:0].double().sum() for x in tensors]).sum()


def _hung_on(x: Tensor, others: Sequence[Tensor], nothing: Tensor) -> Tensor:
    """`x`, as a result of the others too; what their cotangents are made of depends on `nothing`, on every rank."""
    for other in others:
        x = x + (other.reshape(-1)[:0] * nothing.to(other.dtype)).sum().to(x.dtype)
    return x + nothing.to(x.dtype)


def _loss(made: Any) -> Tensor:
    if not isinstance(made, Tensor) or made.ndim or not made.is_floating_point():
        what = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(f"pipeline: the last rank returns a micro-batch's loss, a real scalar, not {what}")
    return made


def _link(axis: AxisName) -> Link:
    mesh = current_mesh()
    assert mesh is not None, "an axis of several ranks belongs to a mesh"
    return link(mesh, as_names(axis))


def _device(tensors: Sequence[Tensor]) -> torch.device:
    mesh = current_mesh()
    return next((x.device for x in tensors), torch.device(mesh.device_type if mesh else "cpu"))
