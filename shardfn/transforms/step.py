"""What a function's gradients are collected in while stages and autograd compute them, and whose a leaf is."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from shardfn.compat import autograd
from shardfn.debugging import debugging
from shardfn.mesh import callsites

Defer = Literal["nothing", "replicas", "everything"]


_numbers = itertools.count(1)


def numbered() -> int:
    """A number that no step and no tape had before."""
    return next(_numbers)


_UNKNOWN = -2  # no backward pass has this number


class GradientSum:
    """The gradient of one flat shard: what arrived of it so far.

    Attributes:
        reduction: how it travels.
        reductions: who sums it.
        out: `[piece]`, in the shard's dtype, where the placement keeps gradients.
        whole: `[padded]`, this rank's own, where all reduction is put off.
    """

    __slots__ = ("out", "reduction", "reductions", "whole")

    def __init__(self, reduction: Any, reductions: Collector) -> None:
        self.reduction, self.reductions = reduction, reductions
        self.out: Tensor | None = None
        self.whole: Tensor | None = None

    def add(self, out: Tensor) -> None:
        """Takes `out`, which nobody else has."""
        self.out = self.reductions.added(self.reduction, self.out, out)


class Step:
    """One evaluation of gradients with respect to `variables`, which gets those of flat shards from the stages.

    Attributes:
        variables: the tensors that are differentiated, by identity.
        sums: gradients by the identity of their variable.
        defer: what is left undone until `finish`: `"replicas"`, the sums over replicas; `"everything"`, those and the
            scatter; `"nothing"`.
        ordered: whether backward passes come in the reverse order of the forward passes. Only then a rank can take part
            in the backward of stages that its own loss does not use.
    """

    def __init__(self, variables: Sequence[Tensor], defer: Defer = "nothing", ordered: bool = True) -> None:
        self.number, self.ordered = numbered(), ordered
        self.variables = {id(variable): variable for variable in variables}
        self.sums: dict[int, GradientSum] = {}
        self.defer = defer
        self.live = False
        self.pass_: int | None = None
        self.engines: list[Member] = []
        self.tapes: list[tuple[Member, Any]] = []
        self.watched: Any = None

    def __enter__(self) -> Step:
        if debugging.collectives:
            self.watched = callsites.body()
            self.watched.__enter__()
        _steps.open.append(self)
        self.live = True
        return self

    def __exit__(self, *error: Any) -> None:
        _steps.open.remove(self)
        self.live = False
        try:
            for engine in self.engines:
                engine.end()
        finally:
            if self.watched is not None:
                self.watched.__exit__(*error)

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """The backward pass inside is the one whose gradients the step collects."""
        self.pass_ = _UNKNOWN
        try:
            yield
            self.catch_up()
        finally:
            self.pass_ = None
        self.tapes.clear()

    def catch_up(self, tape: Any = None, index: int = -1) -> None:
        """This rank's part in the backward of calls that came after that one, if its own loss does not use them."""
        for engine, other in reversed(self.tapes if self.ordered else []):
            engine.catch_up(other, index + 1 if other is tape else 0)
            if other is tape:
                break

    def collects(self) -> bool:
        """Whether the backward pass that runs is that one, and not one that was started for something else."""
        if not self.live or self.pass_ is None:
            return False
        now = autograd.backward_pass()
        if self.pass_ == _UNKNOWN:
            self.pass_ = now
        return self.pass_ == now

    def meet(self, engine: Member) -> None:
        """Tells it when the step is over."""
        if engine not in self.engines:
            self.engines.append(engine)

    def join(self, engine: Member, tape: Any) -> None:
        """The calls on one more tape take part."""
        self.meet(engine)
        self.tapes.append((engine, tape))

    def finish(self) -> dict[int, Tensor]:
        """The gradients that stages gave, by the identity of their variable, when all have arrived."""
        for engine in self.engines:
            engine.reductions.drain()
            engine.reductions.settle(self)
        return {key: total.out for key, total in self.sums.items() if total.out is not None}

    def sum_of(self, variable: Tensor, reduction: Any, reductions: Collector) -> GradientSum:
        """Where the gradient of a variable is collected."""
        found = self.sums.get(id(variable))
        if found is None:
            found = self.sums[id(variable)] = GradientSum(reduction, reductions)
        return found


class Collector(Protocol):
    """What sums gradients over ranks."""

    def added(self, reduction: Any, known: Tensor | None, out: Tensor) -> Tensor:
        """What arrived of a gradient so far, with `out`, which nobody else has."""

    def drain(self) -> None:
        """Until every gradient has arrived."""

    def settle(self, step: Step) -> None:
        """Does what the step put off."""


class Member(Protocol):
    """What a step needs to know of an engine."""

    @property
    def reductions(self) -> Collector:
        """What sums its gradients."""

    def catch_up(self, tape: Any, stop: int) -> None:
        """Takes part in the backward of calls on a tape, down to that one, that have had none."""

    def end(self) -> None:
        """The step is over."""


class _Steps(threading.local):
    def __init__(self) -> None:
        self.open: list[Step] = []


_steps = _Steps()


def current_step() -> Step | None:
    """The innermost evaluation of gradients on this thread."""
    return _steps.open[-1] if _steps.open else None


# --- leaves of the graph of one run of a stage, which nobody else may differentiate ---


def owned(x: Tensor, need: bool, stage: str, checked: bool = False) -> Tensor:
    """A leaf of the graph of one run of a stage, which nobody else may differentiate.

    Whoever tries by `backward()` gets an error from it; `checked` says that somebody looks before.
    """
    if need:
        x.requires_grad_()
        x._shardfn_stage = stage  # type: ignore[attr-defined]
        if not checked:
            x.register_post_accumulate_grad_hook(_refuse_escaped)
    return x


def owner(x: Tensor) -> str | None:
    """The stage whose graph a leaf belongs to; None if it is nobody's."""
    return getattr(x, "_shardfn_stage", None)


def escaped(stage: str) -> RuntimeError:
    """What is wrong with a loss that reaches into a stage."""
    return RuntimeError(
        f"stage {stage!r}: the loss depends on a tensor that this stage's function computed but did not return: a "
        f"hook, an attribute or a list kept it. Its gradient would be lost. Return it from the stage, "
        f"or keep y.detach().clone() of it; where numbers are read too late, SHARDFN_DEBUG=memory shows nan"
    )


def _refuse_escaped(leaf: Tensor) -> None:
    leaf.grad = None
    raise escaped(owner(leaf) or "")
