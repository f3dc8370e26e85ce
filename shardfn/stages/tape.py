"""What a schedule of stages consists of: calls in turn on a tape."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardfn.shards.placement import Keep
from shardfn.stages.ring import Key, Saved, Slot
from shardfn.stages.signature import GatherPlan, Signature
from shardfn.transforms.step import Step, numbered

Identities = tuple[tuple[int, int], ...]
LONGEST = 4096  # calls on one tape, for a program that never asks for a gradient


@dataclass(eq=False)
class StageRun:
    """One call on the tape: what gathering its parameters takes, forward and backward.

    Attributes:
        signature: of the call.
        key: says what a slot must hold for it.
        keep: whether the slot is its own until its backward, or until the step is over.
        index: how far along the tape it is.
        slot: where its parameters are, or have to be again for its backward; None if it needs none.
        claim: on the slot, until its backward.
        reads: whether its backward reads the parameters.
        secondary: what its parameters are gathered from in place of the shards.
        saved: what of its parameters it needs, where they are not gathered again.
        collected: the shards whose gradient its step takes from it, None for the others.
        trains: whether any of the shards gets a gradient.
        done: whether its backward has run.
        away: activations of it that have left the device, as long as its graph needs them.
    """

    signature: Signature
    plan: GatherPlan
    shards: tuple[Tensor, ...]
    key: Key
    keep: Keep = False
    index: int = 0
    slot: Slot | None = None
    claim: Claim | None = None
    reads: bool = True
    secondary: Secondary | None = None
    saved: Saved | None = None
    collected: Sequence[Tensor | None] = ()
    trains: bool = False
    done: bool = False
    away: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def kind(self) -> Any:
        """What calls of its kind have in common, also of a stage that is made anew at every step."""
        return self.signature.code, self.plan


class Claim:
    """That a call keeps a slot for its backward. It may outlive the call, so it holds no shards."""

    __slots__ = ("key", "run", "slot")

    def __init__(self, run: StageRun, slot: Slot) -> None:
        self.key, self.run = run.key, weakref.ref(run)
        self.slot: Slot | None = slot
        slot.users += 1

    def end(self) -> Slot | None:
        """The slot, unless it has ended before; the run has none from now on."""
        slot, self.slot = self.slot, None
        run = self.run()
        if slot is not None and run is not None:
            run.slot, run.keep = None, False
        return slot


@dataclass(frozen=True, eq=False)
class Secondary:
    """Larger pieces of a stage's parameters, which forward left for backward (ZeRO++, Wang et al. 2023, section 3.2).

    Attributes:
        plan: how they are gathered.
        shards: the pieces.
    """

    plan: GatherPlan
    shards: tuple[Tensor, ...]


class Tape:
    """The calls of one step that may see a backward, in order."""

    __slots__ = ("closed", "count", "front", "number", "runs", "shards", "step", "waiting")

    def __init__(self, step: Step | None) -> None:
        self.number = numbered()  # what keys know it by: a reference would be a cycle, and keep gradients alive
        self.runs: list[StageRun] = []
        self.waiting = 0  # calls without a backward yet
        self.shards: dict[GatherPlan, Any] = {}  # which tensors each stage was called with
        self.count = 0  # of slots taken from the ring
        self.closed = False
        self.front: int | None = None  # the last run that backward has come to
        self.step = step

    def add(self, run: StageRun) -> None:
        """One more call."""
        run.index = len(self.runs)
        self.runs.append(run)
        self.waiting += 1


def key_of(tape: Tape | None, step: Step | None, keep: Keep, plan: GatherPlan, which: Identities) -> Key:
    """What a slot must hold: by the tape's number, or what all tapes of a step have in common, and which shards."""
    scope = step if keep == "step" else tape
    return (0 if scope is None else scope.number, plan, which)


def identities(shards: Sequence[Tensor]) -> Identities:
    """Which tensors these are, and which numbers they hold."""
    return tuple([(id(x), 0 if x.is_inference() else x._version) for x in shards])
