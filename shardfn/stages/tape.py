"""The tape of a schedule: the calls of stages, in order."""

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
LONGEST = 4096  # most calls on a tape; bounds it in a program that never asks for a gradient


@dataclass(eq=False)
class StageRun:
    """One call on the tape, with what it takes to gather its parameters, forward and backward.

    Attributes:
        signature: signature of the call.
        key: what a slot must hold for it.
        keep: whether it keeps its slot until its backward, or until the end of the step.
        index: position on the tape.
        slot: the slot of its parameters, in forward and again in backward; None if it needs none.
        claim: its claim on the slot, until its backward.
        reads: whether its backward reads the parameters.
        secondary: pieces from which its parameters are gathered, in place of the shards.
        saved: the slot's contents that it needs, if they are not gathered again.
        collected: shards whose gradient its step collects, None for the others.
        trains: whether any of the shards gets a gradient.
        done: whether its backward has run.
        ready: events of an accelerator after which the shards are as they were at the call; None if they are unknown.
        away: its activations that have left the device, while its graph needs them.
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
    ready: tuple[Any, ...] | None = None
    away: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def kind(self) -> Any:
        """What calls of its kind have in common, also if the stage is made anew at every step."""
        return self.signature.code, self.plan


class Claim:
    """A call's claim on a slot until its backward. It may outlive the call, so it holds no shards."""

    __slots__ = ("key", "run", "slot")

    def __init__(self, run: StageRun, slot: Slot) -> None:
        self.key, self.run = run.key, weakref.ref(run)
        self.slot: Slot | None = slot
        slot.users += 1

    def end(self) -> Slot | None:
        """The slot, and takes it from the run; None if the claim ended before."""
        slot, self.slot = self.slot, None
        run = self.run()
        if slot is not None and run is not None:
            run.slot, run.keep = None, False
        return slot


@dataclass(frozen=True, eq=False)
class Secondary:
    """Larger pieces of a stage's parameters, which forward keeps for backward (ZeRO++, Wang et al. 2023, section 3.2).

    Attributes:
        plan: how they are gathered.
        shards: the pieces.
    """

    plan: GatherPlan
    shards: tuple[Tensor, ...]


class Tape:
    """The calls of one step that may get a backward, in order."""

    __slots__ = ("closed", "count", "front", "number", "runs", "shards", "step", "waiting")

    def __init__(self, step: Step | None) -> None:
        self.number = numbered()  # keys contain it in place of a reference, which would be a cycle
        self.runs: list[StageRun] = []
        self.waiting = 0  # calls without a backward yet
        self.shards: dict[GatherPlan, Any] = {}  # which tensors each stage was called with
        self.count = 0  # slots taken from the ring
        self.closed = False
        self.front: int | None = None  # the last run that backward has reached
        self.step = step

    def add(self, run: StageRun) -> None:
        """Appends a call."""
        run.index = len(self.runs)
        self.runs.append(run)
        self.waiting += 1


def key_of(tape: Tape | None, step: Step | None, keep: Keep, plan: GatherPlan, shard_ids: Identities) -> Key:
    """What a slot must hold: number of the tape, or of the step if slots are kept for it, plan, and shards."""
    scope = step if keep == "step" else tape
    return (0 if scope is None else scope.number, plan, shard_ids)


def identities(shards: Sequence[Tensor]) -> Identities:
    """Which tensors these are, and their versions."""
    return tuple([(id(x), 0 if x.is_inference() else x._version) for x in shards])
