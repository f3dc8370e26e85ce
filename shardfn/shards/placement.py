"""One table of placements: over which axes parameters, gradients and optimizer state are cut, and what is kept.

A strategy is a row of it, a `Placement`. The functions here write the rows that have names; users write their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from shardfn.mesh.grid import AxisName, as_names

Keep = bool | Literal["step"] | tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """How a buffer of parameters, its gradient and its optimizer state are spread over a mesh.

    Attributes:
        axes: parameters are cut into equal pieces along these, major to minor.
        replicas: they are the same along these, where ranks work on other data: gradients are summed over them.
        keep: of what forward gathers, what backward finds: nothing; the whole (`True`), also for the other
            micro-batches of a step (`"step"`); or a copy that is cut over these axes only, the first of `axes`.
        gradients: what `value_and_grad` gives, and optimizer state, are cut along these: `axes` first, and then some
            of `replicas`. Default: `axes`.
        hierarchical: axes are gathered one after another, the last, with the slowest links, first.
        only_at: only ranks at these positions of these axes hold anything of it, `(("pipe", 1),)`; see `at`.

    Raises:
        ValueError: an axis twice; `gradients` or `keep` that do not fit `axes`.
    """

    axes: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    keep: Keep = False
    gradients: tuple[str, ...] = cast("tuple[str, ...]", None)
    hierarchical: bool = False
    only_at: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.gradients is None:
            object.__setattr__(self, "gradients", self.axes)
        every = (*self.axes, *self.replicas, *self.only_at_axes)
        twice = [name for name in every if every.count(name) > 1]
        if twice:
            raise ValueError(
                f"a strategy names the axis {twice[0]!r} twice: axes={self.axes}, replicas={self.replicas}"
                + (f", only_at={dict(self.only_at)}" if self.only_at else "")
            )
        begin, more = self.gradients[: len(self.axes)], self.gradients[len(self.axes) :]
        if begin != self.axes or not set(more) <= set(self.replicas) or len(set(more)) < len(more):
            raise ValueError(
                f"a strategy with axes={self.axes} and replicas={self.replicas} has gradients={self.gradients}: they "
                f"are cut along the axes, in this order, and then along some replicas"
            )
        kept = self.keep if isinstance(self.keep, tuple) else self.axes
        if kept != self.axes[: len(kept)] or self.keep not in (True, False, "step", kept):
            raise ValueError(
                f'a strategy keeps True, False, "step", or the first of axes={self.axes}, not keep={self.keep!r}'
            )

    def keeping(self, keep: Keep) -> Placement:
        """The same with another `keep`: `full_shard("shard").keeping("step")` gathers once for all micro-batches."""
        return replace(self, keep=keep)

    @property
    def of_state(self) -> Placement:
        """Of gradients and optimizer state."""
        if self.gradients == self.axes:
            return self
        left = tuple(name for name in self.replicas if name not in self.gradients)
        return Placement(self.gradients, left, only_at=self.only_at)

    def at(self, **positions: int) -> Placement:
        """The same, but only on the ranks at these positions: `full_shard("shard").at(pipe=1)`.

        The others hold nothing of it, and do not call its stage. So pipelined models keep their parameters' names and
        shapes, and every rank the same tree.
        """
        return replace(self, only_at=(*self.only_at, *positions.items()))

    def without(self, names: Collection[str]) -> Placement:
        """The same, where other ranks along these replicas are left out of account."""
        replicas, gradients = (tuple(n for n in some if n not in names) for some in (self.replicas, self.gradients))
        return replace(self, replicas=replicas, gradients=gradients)

    @property
    def only_at_axes(self) -> tuple[str, ...]:
        """Axes of which one position only holds the parameters."""
        return tuple(name for name, _ in self.only_at)

    def dividing(self, axis: AxisName) -> Placement:
        """The same, with gradients and optimizer state cut along more of the replicas."""
        more = [name for name in as_names(axis) if name not in self.gradients]
        return replace(self, gradients=(*self.gradients, *more))

    @property
    def secondary(self) -> Placement | None:
        """Of the copy that backward gathers from, if that is cut less than the parameters."""
        if not isinstance(self.keep, tuple):
            return None
        rest = self.replicas + self.axes[len(self.keep) :]
        return Placement(self.keep, rest, gradients=self.axes, only_at=self.only_at)


Strategy = Placement | Callable[[str, tuple[int, ...]], Placement]
"""A placement for all parameters, or a function of a parameter's path and whole shape that says which."""


def ddp(axis: AxisName) -> Placement:
    """Everything whole on every rank, gradients summed over `axis` (NO_SHARD, ZeRO-0)."""
    return Placement(replicas=as_names(axis))


def zero1(axis: AxisName) -> Placement:
    """Parameters whole; gradients are scattered, optimizer state is cut, and its step gathers parameters (ZeRO-1)."""
    return Placement(replicas=as_names(axis), gradients=as_names(axis))


def zero2(axis: AxisName) -> Placement:
    """As `full_shard`, but what was gathered in forward is kept for backward (SHARD_GRAD_OP)."""
    return Placement(axes=as_names(axis), keep=True)


def full_shard(axis: AxisName) -> Placement:
    """Parameters, gradients and optimizer state cut over `axis`; gathered for a stage and dropped again (ZeRO-3)."""
    return Placement(axes=as_names(axis))


def hybrid_shard(shard: AxisName, replica: AxisName) -> Placement:
    """Cut over `shard`, the same over `replica` (HSDP): gradients are scattered, then summed over the other."""
    return Placement(axes=as_names(shard), replicas=as_names(replica))


def hybrid_shard_zero2(shard: AxisName, replica: AxisName) -> Placement:
    """As `hybrid_shard`, but what was gathered in forward is kept for backward."""
    return Placement(axes=as_names(shard), replicas=as_names(replica), keep=True)


def hfsdp(shard: AxisName, replica: AxisName) -> Placement:
    """As `hybrid_shard`, but gradients and optimizer state are cut over `replica` too.

    Gradients are scattered over `shard`, then over `replica`; an optimizer's step gathers parameters over `replica`.
    """
    shard, replica = as_names(shard), as_names(replica)
    return Placement(axes=shard, replicas=replica, gradients=shard + replica)


def hpz(shard: AxisName, replica: AxisName) -> Placement:
    """Everything cut over both, but backward gathers over `shard` only, from a copy that forward left (ZeRO++)."""
    shard, replica = as_names(shard), as_names(replica)
    return Placement(axes=shard + replica, keep=shard)


def mics(shard: AxisName, replica: AxisName = ()) -> Placement:
    """As `hybrid_shard`, where `shard` is several axes that are gathered one after another (MiCS).

    Args:
        shard: the axes of the group that holds the parameters once, fast links first: `("gpu", "node")` gathers
            over nodes, a small piece each, and then within each.
        replica: the axes along which such groups repeat.
    """
    return Placement(axes=as_names(shard), replicas=as_names(replica), hierarchical=True)


def uncut(strategy: Strategy, below: int) -> Callable[[str, tuple[int, ...]], Placement]:
    """A strategy, but parameters of fewer elements than `below` stay whole on every rank, as under `ddp`.

    In each stage they make a buffer of their own, which is never gathered, and whose gradient is summed.

    Raises:
        TypeError: something else than a strategy.
    """
    if not isinstance(strategy, Placement) and not callable(strategy):
        raise TypeError(f'uncut: {strategy!r} is no strategy; write uncut(full_shard("shard"), below={below})')

    def rule(path: str, shape: tuple[int, ...]) -> Placement:
        own = strategy if isinstance(strategy, Placement) else strategy(path, shape)
        return Placement(replicas=own.axes + own.replicas, only_at=own.only_at) if math.prod(shape) < below else own

    return rule


_NAMES: dict[str, tuple[Callable[..., Placement], str]] = {
    "ddp": (ddp, "NO_SHARD 3 ddp_spawn zero0 zero_stage_0 deepspeed_stage_0"),
    "zero1": (zero1, "zero_stage_1 deepspeed_stage_1 distributed_optimizer zero_redundancy_optimizer optim"),
    "zero2": (zero2, "SHARD_GRAD_OP 2 zero_stage_2 deepspeed deepspeed_stage_2 optim_grads"),
    "full_shard": (full_shard, "1 fsdp fsdp2 fully_shard zero3 zero_stage_3 deepspeed_stage_3 optim_grads_params"),
    "hybrid_shard": (hybrid_shard, "4 hsdp"),
    "hybrid_shard_zero2": (hybrid_shard_zero2, "5 _HYBRID_SHARD_ZERO2"),
    "hfsdp": (hfsdp, "hybrid_fsdp"),
    "hpz": (hpz, "zero_hpz zero++"),
    "mics": (mics, ""),
}
_OVER_ALL = ("ddp", "zero1", "zero2", "full_shard")


def strategy(name: str, shard: AxisName = "shard", replica: AxisName = ()) -> Placement:
    """A strategy by any of its names: PyTorch's, Accelerate's, Lightning's, DeepSpeed's or Megatron's.

    Args:
        name: such as `"FULL_SHARD"`, `"deepspeed_stage_2"` or `"hsdp"`; case, `-`, `_` and spaces do not matter.
        shard: the axes that cut parameters, within a node say.
        replica: the axes between such groups. Strategies that know no such difference spread over both.

    Raises:
        ValueError: an unknown name; a hybrid strategy without `replica`.

    Example:
        >>> strategy("HYBRID_SHARD", shard="shard", replica="replica") == hybrid_shard("shard", "replica")
        True
    """
    wanted = _plain(name)
    known = next((own for own, (_, others) in _NAMES.items() if wanted in map(_plain, (own, *others.split()))), None)
    if known is None:
        lists = {own: f" ({', '.join(others.split())})" * bool(others) for own, (_, others) in _NAMES.items()}
        listed = "; ".join(own + others for own, others in lists.items())
        raise ValueError(f"there is no strategy {name!r}. There are: {listed}")
    make, _ = _NAMES[known]
    if known in _OVER_ALL:
        return make(as_names(replica) + as_names(shard))
    if not as_names(replica) and known != "mics":
        raise ValueError(
            f"strategy {name!r} tells two kinds of axes apart: pass replica=, over which parameters or the copies that "
            f"are gathered again are the same, beside shard={shard!r}"
        )
    return make(shard, replica)


def _plain(name: Any) -> str:
    return re.sub(r"[-_ ]", "", str(name)).lower()
