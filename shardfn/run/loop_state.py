"""The state of a run in progress, and its result."""

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
    """One metric as a mapping of steps to values, in step order, 16 bytes each."""

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        """Adds the value of a later step."""
        self._steps.append(step)
        self._values.append(value)

    def __getitem__(self, step: int) -> float:
        index = bisect_left(self._steps, step)
        if index == len(self._steps) or self._steps[index] != step:
            raise KeyError(step)
        return self._values[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True)
class Run:
    """The result of `loop`.

    Attributes:
        start: the step that it resumed from; 0 of a new run.
        step: number of steps taken in all.
        ended: `"finished"` after the last step; `"preempted"` by a signal or `"time"` before the limit. Then the
            program should end, with a status other than 0, and the same call in the next program resumes.
        metrics: name -> step -> value, of the steps taken by this call; steps count from 1. Those from `evaluate` are
            named `eval/...`.
        best: with `best`, the step of the best checkpoint among those that stay; None if none has been compared.
    """

    start: int
    step: int
    ended: str
    metrics: Mapping[str, Mapping[int, float]] = field(repr=False)
    best: int | None = None


@dataclass
class LoopState:
    """A run in progress.

    Attributes:
        team: the ranks.
        asked: the arguments of `loop`.
        failing: context for code that may fail on one rank alone.
        stepping: runs a step.
        exchange: exchanges words between ranks.
        reports: the reports that are called.
        figures: computes time and throughput of steps.
        saver: writes checkpoints, if `save` is given.
        interrupts: signals and the time limit.
        late: metrics that have not been read.
        history: metrics that have been read.
        bad: the first step with a metric that is not finite on this rank, and what it was.
        recent: durations of the last few steps, in seconds.
        kinds: structure, dtypes and shapes of the state, the same after each step; None before the first.
        evaluation: seconds that the slowest evaluation took.
        rows: the batches.
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
        """What this rank reports to the others after `reached` steps."""
        return Word(
            stop=self.interrupts.reason(self._needs(reached)),
            failed=0 if self.error is None else 1 + self.team.rank,
            bad=0 if self.bad is None else Word.far(self.bad[0]),
        )

    def _needs(self, reached: int) -> float:
        """Estimated seconds until the run could stop and have a checkpoint, if it decided so now."""
        steps = (1 + 2 * self.exchange.period) * max(self.recent, default=0.0)  # until all know the reason, and one
        evaluation = self.evaluation if self.evaluations(reached) else 0.0
        return steps + evaluation + (0.0 if self.saver is None else self.saver.needs())

    def evaluations(self, step: int) -> list[str]:
        """The names of the evaluations that follow a step."""
        return [name for name, (_, n) in self.asked.evaluate.items() if step % n == 0 or step >= self.asked.steps]

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows a step."""
        interval = self.asked.every
        return self.saver is not None and (step == self.asked.steps or (interval is not None and step % interval == 0))

    def due(self, step: int) -> bool:
        """Whether something follows a step that needs all metrics up to it."""
        return step == self.asked.steps or self.saves(step) or bool(self.evaluations(step))

    def close(self) -> None:
        """Closes the batches."""
        rows, self.rows = self.rows, iter(())
        self.stepping.close(rows)

    @property
    def error(self) -> Exception | None:
        """An error on this rank that did not interrupt a step: of a report or a checkpoint."""
        return self.reports.error or (None if self.saver is None else self.saver.error)

    def tell(self, step: int, metrics: dict[str, float], figures: dict[str, float]) -> None:
        """Remembers and reports the metrics of a step."""
        for name, value in metrics.items():
            self.history.setdefault(name, Series()).add(step, value)
        self.reports.step(step, {**metrics, **{name: x for name, x in figures.items() if name not in metrics}})
