"""What a run was: how far it came, why it ended, and its metrics by step."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


class Series(Mapping[int, float]):
    """One metric: step -> value, in the order of the steps, in 16 bytes each."""

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        """The next step's."""
        self._steps.append(step)
        self._values.append(value)

    def __getitem__(self, step: int) -> float:
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            raise KeyError(step)
        return self._values[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True)
class Run:
    """What `loop` did.

    Attributes:
        start: the step that it went on from; 0 of a new run.
        step: how many steps have been taken in all.
        ended: `"finished"` after the last step; `"preempted"` by a signal, or `"time"` before the limit, and then the
            program should end, with a status other than 0, and the same call in the next one goes on from there.
        metrics: name -> step -> value, of the steps taken here; steps count from 1. Those that `evaluate` gave are
            `eval/...`.
        best: with `best`, the step whose checkpoint is the best of those that stay; None where none has been compared.
    """

    start: int
    step: int
    ended: str
    metrics: Mapping[str, Mapping[int, float]] = field(repr=False)
    best: int | None = None
