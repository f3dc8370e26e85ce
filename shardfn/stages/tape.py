"""The calls of one step, in order: backward follows them in reverse."""

from __future__ import annotations

from typing import Any

from shardfn.stages.entry_exit import Call
from shardfn.stages.gather import Secondary
from shardfn.stages.gather_plan import GatherPlan
from shardfn.transforms.step import Step

Key = tuple[Any, ...]
LONGEST = 4096  # most calls on a tape; bounds it in a program that never asks for a gradient


class CallTape:
    """The calls of one step that may get a backward, in order; without a step, those since the last backward."""

    def __init__(self, step: Step | None) -> None:
        self.step = step
        self.runs: list[Call] = []
        self.held: dict[Key, list[Any]] = {}  # what calls keep from forward to backward, and how many do
        self.secondary: dict[Key, Secondary] = {}  # pieces that forward left for backward to gather from
        self.keys: dict[GatherPlan, Key] = {}  # of which tensors each stage was called with
        self.closed = False
        self.front: int | None = None  # the last call that a step's backward has reached

    def add(self, call: Call) -> None:
        """Appends a call."""
        call.tape, call.index = self, len(self.runs)
        self.runs.append(call)
        self.keys[call.plan] = call.key

    def end(self) -> None:
        """Ends the tape: no call on it has a backward any more."""
        self.closed = True
        self.runs.clear()
        self.held.clear()
        self.secondary.clear()
