"""The schedule of a step that is traced into one graph: gathers and reductions are operations of that graph.

It gathers where a call needs it, and not ahead: the compiler moves what starts a gather to before what computes.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.capturing import Watch, capturing
from shardfn.collectives.ledger import attributed_to
from shardfn.collectives.scheduled import Scheduled, run_in_graph
from shardfn.compat import dispatch, functorch
from shardfn.compat.autograd import storage_of
from shardfn.compat.modes import DispatchMode, innermost_unseen
from shardfn.compat.replacing import replaced
from shardfn.mesh.lanes import in_lane
from shardfn.stages.entry_exit import Call
from shardfn.stages.gather import Gathered, offset_in
from shardfn.stages.gather_plan import Gather, GatherPlan
from shardfn.stages.prefetch import Wanted
from shardfn.stages.reduction import PendingReduction, inexact_sum
from shardfn.stages.replay import RngAndAutocast
from shardfn.stages.routes import Reduction
from shardfn.stages.schedule import Schedule, schedule_of
from shardfn.stages.signature import Signature
from shardfn.stages.stage import called, called_by, way
from shardfn.stages.tape import CallTape
from shardfn.tiers.activations import Offload
from shardfn.transforms.step import GradientSum, Parts, Step, wider


class GatherFunction(Scheduled):
    """The gather of a stage's parameters: `shards -> gathered buffers`, those of `plan` that move.

    Args:
        pieces: of which of its parts it also returns a copy of this rank's own, from which backward gathers.
    """

    def __init__(self, schedule: Schedule, request: Wanted, pieces: Sequence[Gather], ahead: int) -> None:
        super().__init__()
        self.schedule, self.plan, self.again = schedule, request.plan, request.again
        self.pieces, self.ahead = pieces, ahead

    def __str__(self) -> str:
        return f"gather {self.plan.stage}: {', '.join(f'{g.layout.padded} {g.dtype}' for g in self.plan.each)}"

    def empty_results(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Tensors like its results."""
        return like_gathered(self.plan, self.pieces, self.schedule.device)

    def start(self, inputs: Sequence[Tensor | None]) -> Gathered:
        """Starts it."""
        schedule, shards = self.schedule, [x for x in inputs if x is not None]
        with in_lane(schedule.lane), attributed_to(self.plan.stage, self.again):
            return Gathered(self.plan, shards, schedule.gathering, self.again)

    def finish(self, started: Gathered) -> list[Tensor]:
        """Waits for it; returns its results."""
        with attributed_to(self.plan.stage, self.again):
            gathered = started.wait()
        buffers = [gathered[g.start : g.stop].view(g.dtype) for g in self.plan.each if g.moves]
        return [*buffers, *(self.schedule.piece(started, gather) for gather in self.pieces)]

    def prepare(self) -> None:
        """Frees what the schedule has gathered."""
        self.schedule.empty()


def like_gathered(plan: GatherPlan, pieces: Sequence[Gather], device: torch.device) -> list[Tensor]:
    """Tensors like the buffers of a plan that move, and like pieces of this rank's own."""
    templates = [torch.empty(g.layout.padded, dtype=g.dtype, device=device) for g in plan.each if g.moves]
    for gather in pieces:
        n, dtype = gather.layout.piece, gather.dtype
        if gather.wire is not None:
            n, dtype = gather.wire.length, torch.uint8
        templates.append(torch.empty(n, dtype=dtype, device=device))
    return templates


class Reducing(Scheduled):
    """The reduction of a buffer's gradients: `gradients of its parameters -> gradient of its shard`.

    Args:
        part: "all"; "scatter", without the sum over replicas; "replicas", that sum of what was scattered.
        begins: whether it is the first of its stage's.
    """

    def __init__(self, schedule: Any, reduction: Reduction, stage: str, part: str, begins: bool) -> None:
        super().__init__()
        self.schedule, self.reduction, self.stage, self.part, self.begins = schedule, reduction, stage, part, begins

    def __str__(self) -> str:
        layout = self.reduction.layout
        return f"reduce {layout.stage}: {layout.padded} {self.reduction.dtypes.sum}, {self.part}"

    def empty_results(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Tensors like its results."""
        n, split = self.reduction.layout.piece, self.reduction.route.split
        if self.part != "scatter" and split is not None:
            n //= split.axis.size
        return [torch.empty(n, dtype=self.reduction.dtypes.shard, device=self.schedule.device)]

    def start(self, inputs: Sequence[Tensor | None]) -> PendingReduction:
        """Starts it."""
        reductions = self.schedule.reductions
        if self.begins:
            reductions.turn()
        with in_lane(self.schedule.lane), attributed_to(self.stage, backward=True):
            if self.part == "replicas":
                (out,) = inputs
                assert out is not None, "it was scattered"
                return reductions._sent(PendingReduction(self.reduction, out.clone(), None, False, scattered=True))
            pending = reductions.start(
                self.reduction, inputs, None, "replicas" if self.part == "scatter" else "nothing"
            )
            assert pending is not None, "it starts at once"
            return pending

    def finish(self, started: PendingReduction) -> list[Tensor]:
        """Waits for it; returns its results."""
        reductions = self.schedule.reductions
        return [reductions.wait(started)]

    def abandon(self) -> None:
        """Forgets reductions that an error has left on their way."""
        self.schedule.reductions.drop_all()


class GatheredInGraph:
    """A stage's full parameters in a graph, each buffer a separate tensor; like `Gathered`."""

    bytes = stream = None

    def __init__(self, plan: GatherPlan, buffers: Sequence[Tensor], pieces: dict[Gather, Tensor]) -> None:
        moving = [gather.start for gather in plan.each if gather.moves]
        self.wholes = dict(zip(moving, buffers, strict=False))  # by where they would begin in one buffer
        self.pieces = pieces
        self.of: Sequence[Tensor] = ()
        self.versions = self._versions()

    def wait(self) -> None:
        """Nothing: the graph waits where it uses them."""

    def written(self) -> bool:
        """Whether something has been written into the parameters."""
        return self._versions() != self.versions

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self.wholes.values()]

    def parameters(self, gather: Gather) -> list[Tensor]:
        """The parameters of one gather."""
        return [p.detach() for p in gather.layout.views(self.wholes[gather.start])]

    def storages(self) -> list[int]:
        """The memory that it lies in."""
        return [storage_of(buffer) for buffer in self.wholes.values()]

    def offset_of(self, x: Tensor) -> int | None:
        """A tensor's byte offset in one buffer; None if it is not a permuted view of it."""
        for start, buffer in self.wholes.items():
            offset = offset_in(buffer, x)
            if offset is not None and x.dtype == buffer.dtype and order_of(x.shape, x.stride()) is not None:
                return start + offset
        return None

    def numbers(self, dtype: torch.dtype) -> Any:
        """The buffers of a dtype, from which views are made."""
        return _Numbers(self, dtype)


class _Numbers:
    """The buffers of one dtype, as if they were one tensor."""

    def __init__(self, gathered: GatheredInGraph, dtype: torch.dtype) -> None:
        self.gathered, self.dtype = gathered, dtype

    def as_strided(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A view: a parameter, or its transpose."""
        order = order_of(shape, stride)
        assert order is not None, "only such places are saved"
        sizes, begin = [shape[d] for d in order], offset * self.dtype.itemsize
        end = begin + math.prod(sizes) * self.dtype.itemsize
        for start, buffer in self.gathered.wholes.items():
            if buffer.dtype == self.dtype and start <= begin and end <= start + buffer.nbytes:
                ordered = buffer.narrow(0, (begin - start) // self.dtype.itemsize, math.prod(sizes)).view(sizes)
                straight = order == list(range(len(order)))
                return ordered if straight else ordered.permute([order.index(d) for d in range(len(order))])
        raise AssertionError("a place is in one of the buffers")


class TracedReductions:
    """Reductions as operations of a graph, with what those of a schedule have.

    Attributes:
        stage: whose gradients are reduced.
        wholes: whole gradients of which all reduction is deferred, one for each parameter.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.begins, self.stage = schedule, False, ""
        self.wholes: dict[GradientSum, list[Tensor | None]] = {}

    def turn(self) -> None:
        """Begins the reductions of a stage."""
        self.begins = True

    def start(
        self,
        reduction: Reduction,
        gradients: Sequence[Tensor | None],
        total: GradientSum | None,
        defer: str,
        parts: Parts | None = None,
    ) -> Tensor | None:
        """The sum over ranks, unless it is added to a total, or deferred."""
        del parts
        if reduction.route.tree is not None:
            raise inexact_sum(reduction)
        if defer == "all" and total is not None:
            self._add(total, gradients)
            return None
        out = self._run(reduction, gradients, "scatter" if defer == "replicas" else "all")
        if total is None:
            return out
        total.add(out)
        return None

    def _run(self, reduction: Reduction, gradients: Sequence[Tensor | None], part: str) -> Tensor:
        work = Reducing(self.schedule, reduction, self.stage, part, self.begins and part != "replicas")
        self.begins = self.begins and part == "replicas"
        (reduced,) = run_in_graph(work, gradients)
        return reduced

    def _add(self, total: GradientSum, gradients: Sequence[Tensor | None]) -> None:
        """Adds whole gradients up on this rank, until the step reduces their sum."""
        dtype = wider(total.reduction.dtypes.sum, total.accumulator)
        previous = self.wholes.get(total, [None] * len(gradients))
        current = [None if g is None else g.to(dtype) for g in gradients]
        self.wholes[total] = [
            b if a is None else a if b is None else a + b for a, b in zip(previous, current, strict=True)
        ]

    def wait(self, pending: Tensor) -> Tensor:
        """The same: the graph waits where it uses a gradient."""
        return pending

    def added(self, reduction: Any, total: Tensor | None, out: Tensor) -> Tensor:
        """The sum of a gradient so far and `out`."""
        return out if total is None else total + out

    def finish_step(self, step: Step) -> None:
        """Reduces the gradients that the step has deferred."""
        for total in [total for total in step.sums.values() if total.reductions is self]:
            route, dtypes, self.stage = total.reduction.route, total.reduction.dtypes, total.reduction.layout.stage
            if total.out is not None:
                total.out = total.out.to(dtypes.shard)
            if step.defer == "all":
                self.begins = True
                full = [None if g is None else g.to(dtypes.sum) for g in self.wholes.pop(total)]
                total.out = self._run(total.reduction, full, "all")
            elif step.defer == "replicas" and (route.split is not None or route.replica is not None):
                total.out = self._run(total.reduction, [total.out], "replicas")

    def drain(self) -> None:
        """Nothing: the graph waits."""

    drop_all = trim = drain


class Traced(Schedule):
    """The schedule of the stages of one traced step on one mesh.

    Attributes:
        runs: the schedule that runs the graph's gathers and reductions.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.runs, self.alone = schedule_of(mesh), contextlib.nullcontext()
        self.reductions: Any = TracedReductions(self.runs)

    def call(self, signature: Signature, *rest: Any) -> Any:
        """Calls a stage."""
        remat = signature.options.remat
        if isinstance(remat, Offload) and remat.moves(self.device.type):
            raise RuntimeError(
                f"{signature}: remat={remat} moves activations to the {remat.to} and back, which a compiled step "
                f"cannot do: use remat=True or False"
            )
        return super().call(signature, *rest)

    def compare_stages(self, signature: Signature, plan: GatherPlan) -> None:
        """Nothing: ranks compare the collectives of their graphs."""

    def rng_and_autocast(self, generators: Sequence[torch.Generator], policy: bool) -> RngAndAutocast:
        """The autocast state and random numbers on which a function may depend."""
        return _TracedDraws(self.device, policy)

    def ran(self, call: Call) -> None:
        """Goes by this rank alone where a stage was not called before."""
        if call.again is None:
            call.again = call.saved and not call.keeps

    def announced(self, call: Call) -> list[Wanted]:
        """Nothing."""
        return []

    def before(self, call: Call) -> list[Wanted]:
        """The next gathers of backward that forward has kept; all others are gathered where a call needs them."""
        return [request for request in super().before(call) if self._find(request.key) is not None]

    def _read_ahead(self, layouts: Sequence[Any], shards: Sequence[Tensor]) -> None:
        """Nothing: a gather of the graph reads its shards itself."""

    def start(self, call: Call, request: Wanted) -> Any:
        """Puts a gather into the graph."""
        secondary, keep = request.plan.secondary, call.signature.keep
        leaves = not request.again and isinstance(keep, tuple) and call.tape is not None and call.again is not False
        pieces: list[Gather] = []
        if leaves and secondary is not None:
            pieces = [b for a, b in zip(request.plan.each, secondary.each, strict=True) if a is not b]
        work = GatherFunction(self.runs, request, pieces, call.signature.options.prefetch)
        outputs = run_in_graph(work, request.shards)
        # Backward gathers from these.
        local_pieces = dict(zip(request.plan.each, request.shards, strict=True) if request.again else ())
        local_pieces.update(zip(pieces, outputs[len(outputs) - len(pieces) :], strict=True))
        return GatheredInGraph(request.plan, outputs, local_pieces)

    def piece(self, gathered: Any, gather: Gather) -> Tensor:
        """A copy of this rank's own part of what was gathered, from which backward gathers."""
        piece: Tensor = gathered.pieces[gather]
        return piece

    def reduce(self, call: Call, gradients: list[list[Tensor | None]], unused: bool = False) -> list[Tensor | None]:
        """Puts reductions into the graph."""
        self.reductions.stage = call.signature.stage
        return super().reduce(call, gradients, unused)

    def catch_up(self, tape: CallTape, stop: int) -> None:
        """Nothing: in a graph all ranks run the same stages."""


def in_graph() -> Any:
    """A context in which this thread calls stages as operations of the step that it traces."""
    return replaced(way, call=_call_traced)


def _call_traced(signature: Signature, leaves: list[Any]) -> Any:
    if not dispatch.in_graph() or functorch.inside_transform() or functorch.inside_forward_mode():
        return called(signature, leaves)
    return called_by(traced_schedule, signature, leaves)


_traced: weakref.WeakKeyDictionary[Watch, dict[DeviceMesh, Traced]] = weakref.WeakKeyDictionary()


def traced_schedule(mesh: DeviceMesh) -> Traced:
    """The schedule of the step that is being traced."""
    watch = capturing()
    assert watch is not None, "a step is traced under a watch"
    schedules = _traced.setdefault(watch, {})
    if mesh not in schedules:
        schedules[mesh] = Traced(mesh)
    return schedules[mesh]


def order_of(shape: torch.Size, stride: tuple[int, ...]) -> list[int] | None:
    """The dimensions by their place in memory, if a tensor is a permutation of a contiguous one."""
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], shape[d] == 1))
    expected = 1
    for d in reversed(order):
        if shape[d] != 1 and stride[d] != expected:
            return None
        expected *= shape[d]
    return order


class _TracedDraws(RngAndAutocast):
    """The same in a graph, which has no state of random numbers: it keeps the numbers of the first run."""

    def __init__(self, device: torch.device, policy: bool) -> None:
        super().__init__(device, [], again=False)
        self.policy, self.drawn = policy, list[Any]()

    def restored_state(self) -> Any:
        """A context with the autocast of that time."""
        return self.autocast_again()

    def drawing(self, is_replay: bool) -> Any:
        """A context for what draws random numbers, in a first run or its replay."""
        return ReplayedDraws(self.drawn, is_replay, self.policy)


class ReplayedDraws(DispatchMode):
    """Keeps the random numbers of a first run, and uses them in the following runs in place of new ones.

    A policy right around it does not see them, as it counts operations, which are others in the second run.
    """

    def __init__(self, draws: list[Any], is_replay: bool, policy: bool = False) -> None:
        super().__init__()
        self.drawn, self.again, self.at, self.policy = draws, is_replay, 0, policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws_numbers(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        with innermost_unseen() if self.policy else contextlib.nullcontext():
            if not self.again:
                result = func(*args, **(kwargs or {}))
                saved = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, result)
                self.drawn.append((func, saved))
                return result
            if self.at == len(self.drawn) or self.drawn[self.at][0] is not func:
                raise RuntimeError(
                    f"a stage that runs again in backward draws other random numbers there: {func.name()}"
                )
            numbers = self.drawn[self.at][1]
            self.at += 1
            return args[0].copy_(numbers) if func._schema.is_mutable else numbers


def _draws_numbers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation that may draw random numbers does: attention draws none without dropout."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value: Any = kwargs.get("dropout_p", args[i] if i < len(args) else argument.default_value)
            return bool(value)
    return True
