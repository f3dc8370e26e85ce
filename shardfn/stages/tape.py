"""What a schedule of stages consists of: calls in turn on a tape, and the order in which parameters will be used."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardfn.shards.layout import Layout
from shardfn.shards.placement import Keep
from shardfn.stages.residency import Key, Saved, Slot
from shardfn.stages.signature import GatherPlan, Signature
from shardfn.transforms.step import Step, numbered

LONGEST = 4096  # calls on one tape, for a program that never asks for a gradient

Group = tuple[tuple[Layout, ...], tuple[Tensor, ...]]  # the shards of one stage


@dataclass(eq=False)
class StageRun:
    """One call's place on the tape, and what gathering its parameters takes.

    Attributes:
        signature: of the call.
        key: says what a slot must hold for it.
        needs: what of it is differentiated.
        slot: where its parameters are, or have to be again for its backward; None if it needs none.
        kept: whether the slot is its own until its backward, or until the step is over.
        reads: whether its backward reads the parameters.
        copies: what its parameters are gathered from in place of the shards.
        saved: what of its parameters it needs, where they are not gathered again.
        collected: the shards whose gradient its step takes from it, None for the others.
        done: whether its backward has run.
    """

    signature: Signature
    plan: GatherPlan
    shards: tuple[Tensor, ...]
    key: Key
    needs: tuple[bool, ...] = ()
    slot: Slot | None = None
    kept: Keep = False
    reads: bool = True
    copies: Copies | None = None
    saved: Saved | None = None
    collected: Sequence[Tensor | None] = ()
    done: bool = False

    @property
    def kind(self) -> Any:
        """What calls of its kind have in common, also of a stage that is made anew at every step."""
        return self.signature.code, self.plan


@dataclass(frozen=True, eq=False)
class Copies:
    """Larger pieces of a stage's parameters, which forward left for backward."""

    plan: GatherPlan
    shards: tuple[Tensor, ...]


class Tape:
    """The calls of one step that may see a backward, in order."""

    __slots__ = ("closed", "copies", "count", "front", "number", "runs", "shards", "step", "waiting")

    def __init__(self, step: Step | None) -> None:
        self.number = numbered()  # what keys know it by: a reference would be a cycle, and keep gradients alive
        self.runs: list[StageRun] = []
        self.waiting = 0  # calls without a backward yet
        self.shards: dict[GatherPlan, Any] = {}  # which tensors each stage was called with
        self.count = 0  # of slots taken from the ring
        self.closed = False
        self.front: int | None = None  # the last run that backward has come to
        self.step = step
        self.copies: weakref.WeakValueDictionary[Key, Copies] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class LastGather:
    """How the last call with such layouts gathered its parameters."""

    plan: GatherPlan
    taped: bool
    kept: Keep
    signature: Signature


class PrefetchOrder:
    """The shards of stages in the order in which they are going to be used."""

    __slots__ = ("at", "groups", "places")

    def __init__(self, groups: list[Group]) -> None:
        self.groups, self.at = groups, 0
        self.places: dict[int, list[int]] = {}
        for i, (_, shards) in enumerate(groups):
            self.places.setdefault(id(shards[0]), []).append(i)

    def after(self, shard: Tensor, count: int) -> list[Group] | None:
        """What comes after a stage with this first shard; None if there is no such."""
        places = self.places.get(id(shard))
        if places is None:
            return None
        self.at = next((i for i in places if i >= self.at), places[0]) + 1  # one that occurs again is met in turn
        return self.groups[self.at : self.at + count]


@dataclass(eq=False)
class Place:
    """Where a call stands: on which tape, how far along it, and its run there."""

    tape: Tape | None
    index: int
    run: StageRun
