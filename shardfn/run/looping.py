"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from shardfn.checkpoint.team import RankGroup, team_of
from shardfn.optim.torch import comes_later
from shardfn.quoting import listed
from shardfn.run.agreeing import REASONS, Failing, Word, WordExchange, common, compare_arguments
from shardfn.run.arguments import Evaluation, LoopOptions, Stop, checked_arguments
from shardfn.run.async_metrics import STEPS, Late, StepFigures, checked_metrics
from shardfn.run.checkpoints import Origin, Saver, loaded
from shardfn.run.folder import Keeping, Resume, check_best_metric, newest_checkpoint, put_aside
from shardfn.run.interrupts import Interrupts, ended, refuse
from shardfn.run.nonfinite import explain, not_numbers, wrong_metrics
from shardfn.run.randomness import grids, is_exact, place, seed_all
from shardfn.run.reports import Report, Reports
from shardfn.run.stepping import UNCHANGED, Kinds, Stepping, Unchanged, kinds_of, same_rows_refused
from shardfn.tracebacks import api_boundary

State = TypeVar("State")
Batch = TypeVar("Batch")
_log = logging.getLogger("shardfn")


@api_boundary
def loop(
    step: Callable[[State, Batch], tuple[State, Mapping[str, Any]]]
    | Callable[[State, Batch, int], tuple[State, Mapping[str, Any]]],
    state: State,
    batches: Callable[[int], Iterable[Batch]] | Iterable[Batch],
    *,
    steps: int,
    start: int = 0,
    save: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep_last: int | None = None,
    best: str | tuple[str, str] | None = None,
    resume: Resume = True,
    evaluate: Evaluation | Mapping[str, Evaluation] | None = None,
    stop: Stop | None = None,
    report: Report | Sequence[Report] | None = None,
    seed: int = 0,
    time_limit: float | timedelta | None = None,
    flops: float | None = None,
    peak_flops: float | None = None,
) -> tuple[State, Run]:
    """Runs a pure step on one batch after another, on all ranks of the state's mesh together.

    With `save`, a run that ended for whatever reason resumes from its last complete checkpoint when the same call is
    made again, and its results are bit for bit those of an uninterrupted run if a step depends only on state, batch and
    random numbers and its operations are deterministic (on CUDA: `torch.use_deterministic_algorithms(True)`). torch's
    default generators, `random` and numpy's are seeded before each step from `seed`, the step, and this rank's place
    among those that read different rows. On another number of ranks, rows are the same, but random numbers are not.
    With a strategy `with_exact`, all ranks seed with the same, and `accumulate` seeds for each part of a batch.

    SIGTERM and SIGUSR1 stop the run: whichever rank got the signal, all stop after the same step, save, and return. A
    second signal ends the process at once, unless it comes within two seconds. A run also stops before `time_limit`,
    leaving one and a half times as long for a checkpoint as the slowest one took, or two and a half if one is being
    written. The program should then end, with a status other than 0, as in `sys.exit(75)`, so that whatever started it
    knows that the run is not over.

    Metrics are read two steps late, so the host never waits for the device in a steady step. Before each checkpoint all
    are read, and the state is searched: one with nan is never written.

    Args:
        step: `(state, batch) -> (state, metrics)`, or `(state, batch, n)`, where n is the step's number, which counts
            from 1 as in reports. It may consume the state that it is given, as optimizers do. Metrics
            are numbers or tensors of one element, by name; those of the first rank are shown. `loss`, or every metric
            if there is no `loss`, must be finite. `tokens`, if given, is the number of tokens in the step on all ranks.
        state: any pytree; with `save`, one that `checkpoint.save` takes.
        batches: this rank's batches from a step on, `batches(start)`, where steps count from 0. It may have `axes`,
            along which ranks read different rows (default: those along which the state is placed), and an `identity`, a
            dict of plain values that must be the same when the run resumes. Without `save`, an iterable will do.
        steps: number of the last step.
        start: how many steps the state has taken before, in a run that does not resume from a checkpoint in `save`.
        save: a folder for the run's checkpoints: at its beginning, every `save_every` steps, and at its end.
        save_every: steps between two checkpoints, which are written in the background.
        keep_last: how many of the newest stay; None for all. Only checkpoints made by runs there, as `step-00000500`,
            are deleted; links, and checkpoints under other names, stay.
        best: a metric, `"eval/loss"`, or `("eval/accuracy", "highest")`: the checkpoint of the step where it is lowest,
            or highest, stays too.
        resume: True: resume from the newest checkpoint in `save`, if there is one; it is an error if that is incomplete
            or cannot be read. `"previous"`: read every byte, resume from the newest undamaged one, and give newer ones
            hidden names that end in `.damaged`. False: there must be no checkpoint.
        evaluate: `(state) -> metrics`, reported as `eval/...` after each checkpoint and at the end; or
            `(function, steps)` with its own interval; or a dict of these by name. It must not change the state, and
            has its own random numbers. A run that resumes at a step with an evaluation begins with it.
        stop: called on the first rank after each evaluation with the metrics so far, by name and step, as those of
            `Run`: the run saves and ends, a step or two later, once it returns true, as when a loss no longer falls.
        report: `(step, metrics) -> None`, or several, called on the first rank with each step's metrics and figures:
            `seconds`, `tokens_per_second`, `memory_gib`, and with `flops` also `tflops` and `mfu`. Default:
            `sf.run.progress()`; `[]` for none. Its methods, if it has them: `begin(step, steps)`, `end()`,
            `resumed(path, step)`, and `saved(path, step)` for each checkpoint that is complete, as to upload it.
        seed: of the random numbers of steps.
        time_limit: seconds, or a timedelta, from the start of the process until it must have ended. Default: with
            `save`, the end of the job in SLURM_JOB_END_TIME, if set.
        flops: floating point operations of one step on all ranks together, for `tflops` per device and `mfu`.
        peak_flops: peak floating point operations a second of one device; default: looked up by the device's name.

    Returns:
        The state, and a `Run`: the step that was reached, why it ended, and the metrics by step.

    Raises:
        TypeError, ValueError: on every rank: arguments are wrong on one rank, or differ between ranks; batches end
            early, are not those of the run in `save`, or, as the checker finds in the first step, are the same on all
            ranks; a step returns something else than a state of the same kind and metrics.
        CheckpointError: a checkpoint could not be written, or is of another state.
        FloatingPointError: on every rank: the loss is not finite. With `save`, the steps since the last checkpoint are
            run again, to name the first stage that made such a number, in forward or backward, and its rank.
        RuntimeError: another rank has failed; or an earlier run of the same program has ended early and `save` is
            another folder, in which this one would save results of a half-trained state.

    Example:
        ``state, run = sf.run.loop(step, state, batches, steps=10_000, save="runs/1", save_every=500, keep_last=3)``
    """
    group = team_of(grids(state), "run")
    arguments = {"steps": steps, "start": start, "save": save, "save_every": save_every, "keep_last": keep_last,
                 "best": best, "resume": resume, "evaluate": evaluate, "stop": stop, "report": report, "seed": seed,
                 "time_limit": time_limit, "flops": flops, "peak_flops": peak_flops}  # fmt: skip
    where, places, options = _check_options(group, step, state, batches, arguments)
    run = LoopState(
        team=group,
        asked=options,
        failing=Failing(group),
        stepping=Stepping(step, batches, options.seed, where, options.steps, options.numbered, is_exact(state)),
        exchange=WordExchange(group),
        reports=Reports(options.reports if group.rank == 0 else ()),
        figures=StepFigures(options.flops, options.peak_flops, group.size, places),
        saver=_new_saver(options),
    )
    with Interrupts(options.time_limit, options.save) as interrupts:
        run.interrupts = interrupts
        try:
            state, first, path = _initial_state(run, state)
            run.reports.begin(first, options.steps, path)
            if run.saver is not None:
                run.saver.whole = run.reports.saved
                if path is None:
                    run.reports.saved(run.saver.path(first), first)
            state, reached, reason = _train(run, state, first)
            if run.saver is not None:
                run.saver.finish()
                _raise_wrong(
                    run, state, run.exchange.exchange_word(run.rank_report(reached))
                )  # a report of the last checkpoint
            ended(options.save, reason)
            best_checkpoint = _best(run, reached)
            interrupts.leaves(REASONS.index(reason))
            run.close()
        except BaseException:
            if run.saver is not None:
                run.saver.abandon()
            with contextlib.suppress(Exception):  # the original error matters more
                run.close()
            raise
        finally:
            run.reports.end()
            if run.saver is not None:
                run.saver.lock.release()
    return state, Run(first, reached, reason, run.history, best_checkpoint)


def _new_saver(options: LoopOptions) -> Saver | None:
    if options.save is None:
        return None
    return Saver(options.save, Keeping(options.keep_last, options.best), Origin(options.seed, options.identity))


def _check_options(
    group: RankGroup, step: Any, state: Any, batches: Any, arguments: dict[str, Any]
) -> tuple[int, int, LoopOptions]:
    """This rank's place among those with different rows, their number, and the arguments, equal on all ranks."""
    facts, wrong, options, where = {}, None, None, (0, 1)
    try:
        options, where = checked_arguments(step, batches, arguments), place(batches, state)
        facts = options.facts()
        refuse(options.save)
    except (TypeError, ValueError, RuntimeError) as error:
        wrong = error
    compare_arguments(group, facts, wrong)
    assert options is not None, "`compare` has raised otherwise"
    return *where, options


def _initial_state(run: LoopState, state: Any) -> tuple[Any, int, Path | None]:
    """The state and the step to begin with, and the checkpoint that they are from, if any.

    A new run saves its first state, so that there always is a checkpoint.
    """
    saver = run.saver
    if saver is None:
        return state, run.asked.start, None
    run.team.first(f"lock {saver.folder}", saver.lock.acquire)
    choice = newest_checkpoint(run.team, saver.folder, run.asked.resume)
    path = choice.path
    if path is None:
        if comes_later(state):
            raise ValueError(
                "sf.run.loop: the state of an optimizer by from_torch is not complete before its first step, so its "
                "checkpoints could not be loaded. Take one step first, and pass the resulting state"
            )
        _refuse_nan(run, state, 0)
        saver.save(state, run.asked.start, run.history)
        saver.finish()
        return state, run.asked.start, None
    if not run.asked.resume:
        raise ValueError(
            f"sf.run.loop: resume=False, and {path} is of a run already: pass another folder, delete it, or "
            f"continue from it with resume=True"
        )
    began = time.monotonic()
    state, head = loaded(path, state, saver.origin)
    step = head["step"]
    saver.saved, saver.seconds = step, time.monotonic() - began
    saver.keeping.recall(head["run.best"])
    if step > run.asked.steps:
        raise ValueError(
            f"sf.run.loop: steps={run.asked.steps}, and {path} is of step {step} already: `steps` counts from "
            f"the run's beginning, so pass more, or another folder"
        )
    if step < run.asked.steps:
        run.team.first(f"write to {saver.folder}", saver.lock.check)
    put_aside(run.team, choice.torn)
    return state, step, path


def _best(run: LoopState, step: int) -> Path | None:
    """The path of the best checkpoint."""
    saver = run.saver
    if saver is None or saver.keeping.best is None:
        return None
    best = saver.keeping.best.best_step(saver.values(run.team, step, [], run.history))
    return None if best is None else saver.path(best)


def _train(run: LoopState, state: Any, start: int) -> tuple[Any, int, str]:
    """Takes steps; returns the state after the last one, how many have been taken, and why it stopped."""
    reached = start
    if start:  # whoever wrote this checkpoint may have ended before its evaluation
        _evaluate(run, state, start)
        if run.interrupts.cut:
            return state, reached, REASONS[2]
    with run.failing.reporting():
        run.rows = run.stepping.rows(start) if start < run.asked.steps else iter(())
    run.figures.restart()
    while reached < run.asked.steps:
        began = time.monotonic()
        with run.failing.reporting():
            state = _run_step(run, state, reached, first=reached == start)
        run.recent.append(time.monotonic() - began)
        reached += 1
        if run.saver is not None:
            run.saver.poll()
        received = run.exchange.turn(reached, run.rank_report(reached))
        if not received and not run.due(reached):
            continue
        combined = common(received, _combine_reports(run, reached))
        _raise_wrong(run, state, combined)
        if combined.stop or run.saves(reached):
            _save(run, state, reached)
        if combined.stop and reached < run.asked.steps:
            return state, reached, REASONS[combined.stop]
        _evaluate(run, state, reached)
        if run.interrupts.cut:  # the next program repeats the evaluation at this step
            if run.saver is not None and run.saver.saved != reached:
                _save(run, state, reached)
            return state, reached, REASONS[2]
    _raise_wrong(run, state, _combine_reports(run, reached))
    return state, reached, REASONS[0]


def _run_step(run: LoopState, state: Any, n: int, first: bool) -> Any:
    """Launches step `n`, which counts from 0, and reads the metrics of an earlier one."""
    if first and not comes_later(state):
        run.kinds = kinds_of(state)
    before = run.unchanged.before(state)
    with same_rows_refused() if first else contextlib.nullcontext():
        state, metrics, batch = run.stepping.run_step(n, run.rows, state)
    if run.unchanged.after(before, state) and run.team.rank == 0:
        _log.warning("sf.run.loop: step returns the state that it was given, so nothing trains. %s", UNCHANGED)
    if first:
        kinds = kinds_of(state)
        run.kinds = run.kinds or kinds
        run.kinds.check(kinds)
    run.late.put(n + 1, metrics)
    _read_metrics(run, n + 1 - STEPS)
    run.figures.launched(n + 1, batch)
    return state


def _read_metrics(run: LoopState, until: int) -> None:
    for step, metrics in run.late.until(until):
        problems = wrong_metrics(metrics)
        if problems and run.bad is None:
            run.bad = step, listed(problems, separator=" and ")
        run.tell(step, metrics, run.figures.figures_of(step, metrics))


def _combine_reports(run: LoopState, reached: int) -> Word:
    """The words of all ranks, once each has read all its metrics."""
    with run.failing.reporting():
        _read_metrics(run, run.asked.steps)
    return run.exchange.exchange_word(run.rank_report(reached))


def _raise_wrong(run: LoopState, state: Any, combined: Word) -> None:
    """Raises on all ranks if one has failed, or had a metric that is not finite."""
    if combined.failed:
        error = run.error
        if run.saver is not None and error is not run.saver.error:
            run.saver.finish()
        errors = run.team.gathered(None if error is None else f"{type(error).__name__}: {error}", "comparing errors")
        if error is not None:
            raise error
        rank, text = next((rank, text) for rank, text in enumerate(errors) if text is not None)
        raise RuntimeError(f"sf.run.loop: rank {rank} has failed: {text}. Look at the output of that rank first")
    if combined.bad_step is not None:
        problem = run.bad[1] if run.bad is not None and run.bad[0] == combined.bad_step else ""
        raise _explain(run, state, combined.bad_step, problem)


def _explain(run: LoopState, state: Any, step: int, problem: str) -> FloatingPointError:
    """The error for a step that is not finite, after running the steps since the last checkpoint again."""
    if run.saver is not None:
        run.saver.finish()
    with run.failing.reporting():
        run.close()  # the steps that run again read the same source
    return explain(run.team, run.stepping, state, run.saver, step, problem)


def _evaluate(run: LoopState, state: Any, step: int) -> None:
    began, names = time.monotonic(), run.evaluations(step)
    for name in names:
        with run.failing.reporting():
            seed_all(run.asked.seed, name, step, run.stepping.place)
            metrics = checked_metrics(run.asked.evaluate[name][0](state), f"sf.run.loop: evaluate ({name})")
            if run.interrupts.cut:
                break
            check_best_metric(run.asked.best, name, metrics)
            run.tell(step, {f"{name}/{key}": float(value) for key, value in metrics.items()}, {})
    if names and run.asked.stop is not None:
        with run.failing.reporting():
            run.stopped |= run.team.rank == 0 and bool(run.asked.stop(run.history))
    if names:
        run.evaluation = max(run.evaluation, time.monotonic() - began)
    run.figures.restart()


def _save(run: LoopState, state: Any, step: int) -> None:
    if run.saver is not None:
        with run.failing.reporting():
            if run.kinds is not None:  # None before the first step
                run.kinds.check(kinds_of(state))
        _refuse_nan(run, state, step)
        run.saver.save(state, step, run.history)
        run.figures.restart()


def _refuse_nan(run: LoopState, state: Any, step: int) -> None:
    """Raises FloatingPointError on all ranks if the state has nan on one, though its metrics were finite."""
    with run.failing.reporting():
        names_here = not_numbers(state)
    names = list(dict.fromkeys(name for some in run.team.gathered(names_here, "looking for nan") for name in some))
    if not names:
        return
    if step == 0:
        raise FloatingPointError(f"sf.run.loop: the state has nan before the first step, in {listed(names)}")
    raise _explain(run, state, step, f"the state has nan in {listed(names)}")


# --- what a run knows ---


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
        ended: `"finished"` after the last step; `"stopped"` by `stop`; `"preempted"` by a signal or `"time"` before the
            limit. After the last two the program should end, with a status other than 0, and the same call in
            the next program resumes.
        metrics: name -> step -> value, of the steps taken by this call; steps count from 1. Those from `evaluate` are
            named `eval/...`.
        best: with `best`, the path of the best checkpoint among those that stay; None if none has been compared.
    """

    start: int
    step: int
    ended: str
    metrics: Mapping[str, Mapping[int, float]] = field(repr=False)
    best: Path | None = None


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
        unchanged: finds a step that returns the state that it was given.
        stopped: whether `stop` has said so on this rank.
    """

    team: RankGroup
    asked: LoopOptions
    failing: Failing
    stepping: Stepping
    exchange: WordExchange
    reports: Reports
    figures: StepFigures
    saver: Saver | None
    interrupts: Interrupts = field(default_factory=lambda: Interrupts(None))
    late: Late = field(default_factory=Late)
    history: dict[str, Series] = field(default_factory=dict)
    bad: tuple[int, str] | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    kinds: Kinds | None = None
    evaluation: float = 0.0
    rows: Iterator[Any] = field(default_factory=lambda: iter(()))
    unchanged: Unchanged = field(default_factory=Unchanged)
    stopped: bool = False

    def rank_report(self, reached: int) -> Word:
        """This rank's report to the other ranks after `reached` steps."""
        return Word(
            stop=3 if self.stopped else self.interrupts.reason(self._needs(reached)),
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
        interval = self.asked.save_every
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
