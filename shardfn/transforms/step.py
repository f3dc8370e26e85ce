"""A step: one evaluation of gradients, which collects those of flat shards outside of autograd.

Autograd would need each gradient at once. A step takes it while its reduction is in flight, and waits at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shardfn.compat import autograd
from shardfn.compat.replacing import replaced
from shardfn.debugging import debugging
from shardfn.mesh import comparisons
from shardfn.mesh.exact import PartSums

Defer = Literal["nothing", "replicas", "all"]


_numbers = itertools.count(1)


def new_number() -> int:
    """A number that no step or tape had before."""
    return next(_numbers)


_UNKNOWN = -2  # not the number of any backward pass


def wider(dtype: torch.dtype, accumulator: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of a dtype are summed."""
    return dtype if accumulator is None else torch.promote_types(dtype, accumulator)


class GradientSum:
    """The sum of one flat shard's gradients over calls and micro-batches, as far as they have arrived.

    Attributes:
        reduction: the static description of its reduction.
        reductions: the object that runs the reduction.
        accumulator: see `Step`; None once the step settles.
        out: the sum so far, `[piece]`, where the placement keeps gradients.
        whole: the unreduced local sum, `[padded]`, if all reduction is deferred.
        by_call: in exact steps, a sum over parts for each call of the stage in one part's backward.
        calls: calls so far in this part's backward.
    """

    __slots__ = ("accumulator", "by_call", "calls", "out", "reduction", "reductions", "whole")

    def __init__(self, reduction: Any, reductions: Collector, accumulator: torch.dtype | None) -> None:
        self.reduction, self.reductions, self.accumulator = reduction, reductions, accumulator
        self.out: Tensor | None = None
        self.whole: Tensor | None = None
        self.by_call: list[PartSums] = []
        self.calls = 0

    def next_call(self, parts: Parts) -> PartSums:
        """The sum over parts to which the gradient of the next call belongs."""
        if self.calls == len(self.by_call):  # earlier parts have not made this call
            self.by_call.append(PartSums(parts.bases))
            for _ in range(parts.begun - 1):
                self.by_call[-1].add(None)
        self.calls += 1
        return self.by_call[self.calls - 1]

    def end_part(self, parts: Parts) -> None:
        """Adds zeros for the calls that this part has not made."""
        for total in self.by_call[self.calls :]:
            total.add(None)
        self.calls = 0
        assert all(total.count == parts.begun for total in self.by_call), "the gradients of each part have arrived"

    def add(self, out: Tensor) -> None:
        """Adds `out`, which nothing else refers to."""
        if self.out is None:  # kept in the wider dtype, to which narrower gradients are added
            out = out.to(wider(out.dtype, self.accumulator))
        self.out = self.reductions.added(self.reduction, self.out, out)


class OutsideGradient(BaseException):
    """Raised where something outside differentiates a gradient that has tangents; `shardfn.jvp` then uses composition.

    A BaseException, so that a program's `except Exception` does not catch it.
    """


class _Pushing(threading.local):
    on = False


_pushing = _Pushing()


def pushing() -> Any:
    """A context of forward mode in which nothing differentiates the tangents."""
    return replaced(_pushing, on=True)


def pushes() -> bool:
    """Whether such a context is active."""
    return _pushing.on


@dataclass
class Parts:
    """The parts of an exact step that this rank runs, one after another.

    Attributes:
        bases: those of the digits that number them, along which their sums are added.
        begun: how many have begun their backward.
    """

    bases: tuple[int, ...]
    begun: int = 0


def exact_part_differentiates(subject: str) -> RuntimeError:
    """The error about gradients, or a transform, inside of a part of an exact step."""
    return RuntimeError(
        f"{subject}: a part of a batch that is added exactly takes no gradients and transforms of its own, whose sums "
        f"depend on the mesh. Take them outside of accumulate(micro='exact')"
    )


class Step:
    """One evaluation of gradients with respect to `variables`; stages hand it the gradients of flat shards.

    Attributes:
        variables: the tensors that are differentiated, by id.
        sums: gradients by the id of their variable.
        defer: the hops that are deferred until `finish`: `"replicas"`, the sums over replicas; `"all"`, the
            reduce-scatter too; `"nothing"`.
        accumulator: the dtype in which gradients of narrower dtypes are summed; None: in their own.
        ordered: whether backward passes come in the reverse order of the forward passes. Only then can a rank take part
            in the backward of stages that its own loss does not use.
        pushed: whether its gradients have tangents.
        unread: whether only these tangents are used, so that the gradients need not be computed.
        graph: whether its backward pass makes a graph, for derivatives of the gradients.
        parts: the parts of an exact step; None if sums may depend on the number of ranks.
    """

    graph = False
    parts: Parts | None = None

    def __init__(
        self,
        variables: Sequence[Tensor],
        defer: Defer = "nothing",
        ordered: bool = True,
        unread: bool = False,
        accumulator: torch.dtype | None = None,
    ) -> None:
        self.number, self.ordered = new_number(), ordered
        self.variables = {id(variable): variable for variable in variables}
        self.sums: dict[int, GradientSum] = {}
        self.defer, self.accumulator = defer, accumulator
        self.live, self.pushed = False, pushes()
        self.unread = unread and self.pushed
        self.pass_: int | None = None
        self.schedules: list[Member] = []
        self.tapes: list[tuple[Member, Any]] = []
        self.watched: Any = None

    def __enter__(self) -> Step:
        if _steps.open and _steps.open[-1].parts is not None:
            raise exact_part_differentiates("a gradient")
        if debugging.collectives:
            self.watched = comparisons.body()
            self.watched.__enter__()
        _steps.open.append(self)
        self.live = True
        return self

    def __exit__(self, *error: Any) -> None:
        _steps.open.remove(self)
        self.live = False
        try:
            for schedule in self.schedules:
                schedule.end(error[0] is not None)
        finally:
            if self.watched is not None:
                self.watched.__exit__(*error)

    @contextlib.contextmanager
    def differentiating(self, outputs: Iterable[Tensor]) -> Iterator[None]:
        """A context for the backward pass from these outputs, whose gradients the step collects."""
        self.pass_ = _UNKNOWN
        # The pass's number is read when it begins: later, a hook of the program may have started a pass inside it.
        hooks = [y.grad_fn.register_prehook(self._begins) for y in outputs if y.grad_fn is not None]
        try:
            yield
            self.catch_up()
        finally:
            self.pass_ = None
            for hook in hooks:
                hook.remove()
        self.tapes.clear()

    def _begins(self, _: Any) -> None:
        if self.pass_ == _UNKNOWN:
            self.pass_ = autograd.backward_pass()

    def catch_up(self, tape: Any = None, index: int = -1) -> None:
        """Joins the backward of calls after the given one that this rank's loss does not use."""
        for schedule, other in reversed(self.tapes if self.ordered else []):
            schedule.catch_up(other, index + 1 if other is tape else 0)
            if other is tape:
                break

    def collects(self) -> bool:
        """Whether the running backward pass is the step's own, not one started for something else."""
        return self.live and self.pass_ == autograd.backward_pass()

    def add_schedule(self, schedule: Member) -> None:
        """Registers a schedule, which is told when the step ends."""
        if schedule not in self.schedules:
            self.schedules.append(schedule)

    def join(self, schedule: Member, tape: Any) -> None:
        """Registers a tape, whose calls take part in the step."""
        self.add_schedule(schedule)
        self.tapes.append((schedule, tape))

    def finish(self) -> dict[int, Tensor]:
        """Waits for the gradients that stages passed to the step; returns them by the id of their variable."""
        for schedule in self.schedules:
            schedule.reductions.drain()
            schedule.reductions.finish_step(self)
        return {key: total.out for key, total in self.sums.items() if total.out is not None}

    def next_part(self) -> None:
        """Waits for the gradients of the part before, if there is one, and begins the next part's backward."""
        assert self.parts is not None, "only an exact step has parts"
        if self.parts.begun:
            for schedule in self.schedules:
                schedule.reductions.drain()
            for total in self.sums.values():
                total.end_part(self.parts)
        self.parts.begun += 1

    def sum_of(self, variable: Tensor, reduction: Any, reductions: Collector) -> GradientSum:
        """The `GradientSum` of a variable."""
        total = self.sums.get(id(variable))
        if total is None:
            total = self.sums[id(variable)] = GradientSum(reduction, reductions, self.accumulator)
        return total

    def added(self, total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
        """The sum of a gradient that autograd returned and of those before it."""
        if gradient is None:
            return total
        return gradient.to(wider(gradient.dtype, self.accumulator)) if total is None else total + gradient


class Collector(Protocol):
    """The interface of the object that reduces gradients over ranks: `stages.reduction.Reductions`."""

    def added(self, reduction: Any, total: Tensor | None, out: Tensor) -> Tensor:
        """The sum of a gradient so far and `out`, which nothing else refers to."""

    def drain(self) -> None:
        """Waits until every gradient has arrived."""

    def finish_step(self, step: Step) -> None:
        """Runs the reductions that the step has deferred."""


class Member(Protocol):
    """The part of the interface of `stages.schedule.Schedule` that a step uses."""

    @property
    def reductions(self) -> Collector:
        """The object that reduces its gradients."""

    def catch_up(self, tape: Any, stop: int) -> None:
        """Joins the backward of calls on a tape, down to index `stop`, whose backward has not run."""

    def end(self, failed: bool) -> None:
        """Ends the step."""


class _Steps(threading.local):
    def __init__(self) -> None:
        self.open: list[Step] = []


_steps = _Steps()


def current_step() -> Step | None:
    """The innermost evaluation of gradients on this thread; None if there is none."""
    return _steps.open[-1] if _steps.open else None
