"""The calls of one step, in order: backward follows them in reverse."""

from __future__ import annotations

import operator
from typing import Any

from shardfn.stages.entry_exit import Call
from shardfn.stages.gather import Secondary
from shardfn.stages.gather_plan import GatherPlan
from shardfn.transforms.step import Step

Key = tuple[Any, ...]
LONGEST = 4096  # most calls on a tape; bounds it in a program that never asks for a gradient


_ended = operator.attrgetter("ended")


class CallTape:
    """The calls of one step that may get a backward, in order.

    Without a step, it has the calls since the last backward.
    """

    def __init__(self, step: Step | None) -> None:
        self.step = step
        self.runs: list[Call] = []
        self.held: dict[Key, list[Any]] = {}  # gathers kept until backward, and by how many calls
        self.secondary: dict[Key, Secondary] = {}  # larger shards that forward kept, from which backward gathers
        self.keys: dict[GatherPlan, Key] = {}  # the shards with which each stage was last called
        self.nested = False  # whether a call has made calls of other stages
        self.closed = False
        self.front: int | None = None  # the last call that a step's backward has reached

    def add(self, call: Call) -> None:
        """Appends a call."""
        call.tape, call.index, call.ended = self, len(self.runs), len(self.runs)
        self.runs.append(call)
        self.keys[call.plan] = call.key
        if call.outer is not None:
            call.outer.nests = self.nested = True

    def before(self, call: Call) -> list[Call]:
        """The calls whose backward follows that of a call, the last one first.

        Backward reaches a call at its end, so one that has made other calls comes before these.
        """
        if not self.nested:
            return self.runs[: call.index][::-1]
        return sorted([other for other in self.runs if other.ended < call.ended], key=_ended, reverse=True)

    def end(self) -> None:
        """Ends the tape: no call on it has a backward any more."""
        self.closed = True
        self.runs.clear()
        self.held.clear()
        self.secondary.clear()
