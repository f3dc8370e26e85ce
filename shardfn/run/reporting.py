"""Whoever is told of each step, on the first rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

_log = logging.getLogger("shardfn")

Report = Callable[[int, dict[str, float]], Any]
"""Is called as `report(step, metrics)` after each step, which counts from 1. One that has a method `begin(step, steps)`
is told first which step the run goes on from, and which is its last; one that has `end()`, that there are no more."""


class Reports:
    """The reports of one run; one that fails has failed the run, of which all ranks hear.

    Attributes:
        error: of the first that failed.
    """

    def __init__(self, every: Sequence[Report]) -> None:
        self.every = every
        self.error: Exception | None = None

    def begin(self, step: int, steps: int) -> None:
        """A run goes on from a step."""
        self._each(lambda one: getattr(one, "begin", _nothing)(step, steps))

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of a step, for each to do with as it likes."""
        self._each(lambda one: one(step, dict(metrics)))

    def end(self) -> None:
        """There are no more. The run is over, so that a report which fails now is told in the log."""
        for one in self.every:
            try:
                getattr(one, "end", _nothing)()
            except Exception as error:
                _log.error("the report %r failed at its end, and may be incomplete: %r", one, error, exc_info=error)

    def _each(self, tell: Callable[[Report], Any]) -> None:
        if self.error is not None:
            return
        try:
            for one in self.every:
                tell(one)
        except Exception as error:
            self.error = error


def _nothing(*_: object) -> None:
    """What a plain function does before the first step, and after the last."""
