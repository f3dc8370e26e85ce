"""Collects a function's gradients while stages and autograd compute them, and marks leaves that belong to a stage."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shardfn.compat import autograd
from shardfn.compat.replacing import replaced
from shardfn.debugging import debugging
from shardfn.mesh import comparisons

Defer = Literal["nothing", "replicas", "everything"]


_numbers = itertools.count(1)


def numbered() -> int:
    """A number that no step or tape had before."""
    return next(_numbers)


_UNKNOWN = -2  # not the number of any backward pass


def wider(dtype: torch.dtype, accumulator: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of a dtype are summed."""
    return dtype if accumulator is None else torch.promote_types(dtype, accumulator)


class GradientSum:
    """The gradient of one flat shard, as far as it has arrived.

    Attributes:
        reduction: how it is reduced.
        reductions: the object that reduces it.
        accumulator: see `Step`; None once the step settles.
        out: the sum so far, `[piece]`, where the placement keeps gradients.
        whole: this rank's own sum, `[padded]`, if all reduction is deferred.
    """

    __slots__ = ("accumulator", "out", "reduction", "reductions", "whole")

    def __init__(self, reduction: Any, reductions: Collector, accumulator: torch.dtype | None) -> None:
        self.reduction, self.reductions, self.accumulator = reduction, reductions, accumulator
        self.out: Tensor | None = None
        self.whole: Tensor | None = None

    def add(self, out: Tensor) -> None:
        """Adds `out`, which nothing else refers to."""
        if self.out is None:  # sums take additions of narrower dtypes
            out = out.to(wider(out.dtype, self.accumulator))
        self.out = self.reductions.added(self.reduction, self.out, out)


class OutsideGradient(BaseException):
    """A gradient outside is to go through one that has tangents. No Exception, which a program might handle."""


class _Pushing(threading.local):
    on = False


_pushing = _Pushing()


def pushing() -> Any:
    """A context in which tangents are pushed forward of which nobody takes the gradient."""
    return replaced(_pushing, on=True)


def pushes() -> bool:
    """Whether such a context is active."""
    return _pushing.on


class Step:
    """One evaluation of gradients with respect to `variables`; stages pass it those of flat shards.

    Attributes:
        variables: the tensors that are differentiated, by id.
        sums: gradients by the id of their variable.
        defer: what is deferred until `finish`: `"replicas"`, the sums over replicas; `"everything"`, the reduce-scatter
            too; `"nothing"`.
        accumulator: the dtype in which gradients of narrower dtypes are summed; None: in their own.
        ordered: whether backward passes come in the reverse order of the forward passes. Only then can a rank take part
            in the backward of stages that its own loss does not use.
        pushed: whether its gradients have tangents.
        unread: whether these tangents are used alone, so that the gradients need not be computed.
        graph: whether its backward pass makes a graph, for derivatives of the gradients.
    """

    graph = False

    def __init__(
        self,
        variables: Sequence[Tensor],
        defer: Defer = "nothing",
        ordered: bool = True,
        unread: bool = False,
        accumulator: torch.dtype | None = None,
    ) -> None:
        self.number, self.ordered = numbered(), ordered
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
        # Where a pass begins it is not yet inside of another, which a hook of the program's may start.
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
        """Does this rank's part in the backward of calls after the given one, if its own loss does not use them."""
        for schedule, other in reversed(self.tapes if self.ordered else []):
            schedule.catch_up(other, index + 1 if other is tape else 0)
            if other is tape:
                break

    def collects(self) -> bool:
        """Whether the running backward pass is the step's own, not one started for something else."""
        return self.live and self.pass_ == autograd.backward_pass()

    def meet(self, schedule: Member) -> None:
        """Registers a schedule, which is told when the step ends."""
        if schedule not in self.schedules:
            self.schedules.append(schedule)

    def join(self, schedule: Member, tape: Any) -> None:
        """Registers a tape, whose calls take part in the step."""
        self.meet(schedule)
        self.tapes.append((schedule, tape))

    def finish(self) -> dict[int, Tensor]:
        """Waits for the gradients that stages passed to the step; returns them by the id of their variable."""
        for schedule in self.schedules:
            schedule.reductions.drain()
            schedule.reductions.settle(self)
        return {key: total.out for key, total in self.sums.items() if total.out is not None}

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
    """The object that reduces gradients over ranks."""

    def added(self, reduction: Any, total: Tensor | None, out: Tensor) -> Tensor:
        """The sum of a gradient so far and `out`, which nothing else refers to."""

    def drain(self) -> None:
        """Waits until every gradient has arrived."""

    def settle(self, step: Step) -> None:
        """Does what the step has deferred."""


class Member(Protocol):
    """The part of a schedule's interface that a step uses."""

    @property
    def reductions(self) -> Collector:
        """The object that reduces its gradients."""

    def catch_up(self, tape: Any, stop: int) -> None:
        """Does this rank's part in the backward of calls on a tape, down to index `stop`, that have had none."""

    def end(self, failed: bool) -> None:
        """Ends the step."""


class _Steps(threading.local):
    def __init__(self) -> None:
        self.open: list[Step] = []


_steps = _Steps()


def current_step() -> Step | None:
    """The innermost evaluation of gradients on this thread; None if there is none."""
    return _steps.open[-1] if _steps.open else None
