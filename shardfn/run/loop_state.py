"""A run: its state while it is under way, and what it gives at its end."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardfn.checkpoint.team import Team
from shardfn.run.agreeing import Exchange, Failing, Word
from shardfn.run.arguments import Asked
from shardfn.run.async_metrics import Figures, Late
from shardfn.run.checkpoints import Saver
from shardfn.run.interrupts import Interrupts
from shardfn.run.reports import Reports
from shardfn.run.stepping import Kinds, Stepping


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


@dataclass
class LoopState:
    """A run that is under way.

    Attributes:
        team: its ranks.
        asked: how it was called.
        failing: a context for what may fail on one rank.
        stepping: how a step runs.
        exchange: of words between ranks.
        reports: who is told.
        figures: of steps.
        saver: writes checkpoints, if any are asked for.
        interrupts: why it should stop.
        late: metrics that have not been read.
        history: those that have.
        bad: the first step that is not finite here, and what in it.
        recent: seconds of the last few steps.
        kinds: of the state, which are the same after each step; None before the first.
        evaluation: seconds that the slowest evaluation took.
        rows: batches.
    """

    team: Team
    asked: Asked
    failing: Failing
    stepping: Stepping
    exchange: Exchange
    reports: Reports
    figures: Figures
    saver: Saver | None
    interrupts: Interrupts = field(default_factory=lambda: Interrupts(None))
    late: Late = field(default_factory=Late)
    history: dict[str, Series] = field(default_factory=dict)
    bad: tuple[int, str] | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    kinds: Kinds | None = None
    evaluation: float = 0.0
    rows: Iterator[Any] = field(default_factory=lambda: iter(()))

    def word(self, reached: int) -> Word:
        """What this rank has to say after so many steps."""
        return Word(
            stop=self.interrupts.reason(self._needs(reached)),
            failed=0 if self.error is None else 1 + self.team.rank,
            bad=0 if self.bad is None else Word.far(self.bad[0]),
        )

    def _needs(self, reached: int) -> float:
        """Seconds to what it can no longer take back, and to a checkpoint after that."""
        steps = (1 + 2 * self.exchange.period) * max(self.recent, default=0.0)  # until all have heard it, and one more
        evaluation = self.evaluation if self.evaluations(reached) else 0.0
        return steps + evaluation + (0.0 if self.saver is None else self.saver.needs())

    def evaluations(self, step: int) -> list[str]:
        """The names of those that follow a step."""
        return [name for name, (_, n) in self.asked.evaluate.items() if step % n == 0 or step >= self.asked.steps]

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows a step."""
        every = self.asked.every
        return self.saver is not None and (step == self.asked.steps or (every is not None and step % every == 0))

    def due(self, step: int) -> bool:
        """Whether something follows a step for which all its metrics have to be known."""
        return step == self.asked.steps or self.saves(step) or bool(self.evaluations(step))

    def close(self) -> None:
        """Nobody wants more batches."""
        rows, self.rows = self.rows, iter(())
        self.stepping.close(rows)

    @property
    def error(self) -> Exception | None:
        """What has failed here, and not stopped the step."""
        return self.reports.error or (None if self.saver is None else self.saver.error)

    def tell(self, step: int, metrics: dict[str, float], figures: dict[str, float]) -> None:
        """Remembers and reports the metrics of a step."""
        for name, value in metrics.items():
            self.history.setdefault(name, Series()).add(step, value)
        self.reports.step(step, {**metrics, **{name: x for name, x in figures.items() if name not in metrics}})
