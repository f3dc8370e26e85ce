"""The loop around a step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from shardfn.checkpoint.team import Team, team_of
from shardfn.optim.torch import comes_later
from shardfn.quoting import listed, short_errors
from shardfn.run.agreeing import REASONS, Exchange, Failing, Word, common, compare
from shardfn.run.arguments import Asked, Evaluation, asked
from shardfn.run.async_metrics import STEPS, Figures, checked
from shardfn.run.checkpoints import Origin, Saver, loaded
from shardfn.run.folder import Choice, Keeping, Resume, chosen, compared, put_aside
from shardfn.run.interrupts import Interrupts, ended, refuse
from shardfn.run.loop_state import LoopState, Run
from shardfn.run.nonfinite import explain, not_numbers, wrong_metrics
from shardfn.run.randomness import grids, place, seed_all
from shardfn.run.reports import Report, Reports
from shardfn.run.stepping import Stepping, kinds_of

State = TypeVar("State")
Batch = TypeVar("Batch")


@short_errors
def loop(
    step: Callable[[State, Batch], tuple[State, Mapping[str, Any]]],
    state: State,
    batches: Callable[[int], Iterable[Batch]] | Iterable[Batch],
    *,
    steps: int,
    save: str | os.PathLike[str] | None = None,
    every: int | None = None,
    keep: int | None = None,
    best: str | tuple[str, str] | None = None,
    resume: Resume = True,
    evaluate: Evaluation | Mapping[str, Evaluation] | None = None,
    report: Report | Sequence[Report] | None = None,
    seed: int = 0,
    limit: float | timedelta | None = None,
    flops: float | None = None,
    peak: float | None = None,
) -> tuple[State, Run]:
    """Runs a pure step on one batch after another, on all ranks of the state's mesh together.

    With `save`, a run that ended for whatever reason goes on where its last whole checkpoint is, when the same call is
    made again, and what it then gives is bit for bit what it would have given. For this a step is a function of state,
    batch and its random numbers only; and torch's default generators, `random` and numpy's are seeded before each step
    from `seed`, the step, and this rank's place among those that read other rows. On another number of ranks the rows
    are the same, and these random numbers are not.

    SIGTERM and SIGUSR1 end it: all ranks stop after the same step, whichever got the signal, save, and return. Another
    signal ends the process at once, but for those that come within two seconds. The same happens before `limit`, in
    time for a checkpoint as long as the slowest one was. A program then ends too, and with a status other than 0, as in
    `sys.exit(75)`, so that whatever started it knows that the run is not over.

    Metrics are read two steps late, so the host never waits for the device in a steady step. Before each checkpoint
    they are read to the end, and the state is looked through: one with nan is never written.

    Args:
        step: `(state, batch) -> (state, metrics)`. It may use up the state that it is given, as optimizers do. Metrics
            are numbers or tensors of one element, by name; those of the first rank are shown. `loss`, or without one
            each of them, has to be finite. `tokens`, if it is there, is how many the step has read on all ranks.
        state: any pytree; for `save`, one that `checkpoint.save` takes.
        batches: this rank's batches from a step on, `batches(start)`, where steps count from 0. It may have `axes`,
            along which ranks read other rows (default: those along which the state is placed), and an `identity`, a
            dict of plain values that must be the same when the run goes on. An iterable will do for a run without
            `save`.
        steps: the last step.
        save: a folder for the run's checkpoints: at its beginning, every `every` steps, and at its end.
        every: steps between two checkpoints, which are written in the background.
        keep: how many of the newest stay; None for all. Only those are deleted that runs have made there, as
            `step-00000500`; links, and those that have other names, stay.
        best: a metric, `"eval/loss"`, or `("eval/accuracy", "highest")`: the checkpoint of the step where it is lowest,
            or highest, stays too.
        resume: go on from the newest checkpoint in `save`, if there is one; where that is not whole, or cannot be read,
            it is an error. `"previous"` reads every byte, goes on from the newest that is sound, and gives newer ones
            hidden names that end in `.damaged`. If False, there must be none.
        evaluate: `(state) -> metrics`, which are reported as `eval/...`: after each checkpoint, and at the end; or
            `(function, steps)` for an interval of its own; or a dict of these by name. It leaves the state as it is,
            and its random numbers are its own. A run that goes on from a step after which it is due begins with it.
        report: `(step, metrics) -> None`, or several, called on the first rank with each step's metrics and figures:
            `seconds`, `tokens_per_second`, `memory_gib`, and with `flops` also `tflops` and `mfu`. Default:
            `sf.run.progress()`; `[]` for none.
        seed: of the random numbers of steps.
        limit: seconds, or a timedelta, from the start of the process until it must have ended. Default: with `save`,
            the end of the job that SLURM_JOB_END_TIME says, if it is set.
        flops: floating point operations of one step on all ranks together, for `tflops` of a device and `mfu`.
        peak: floating point operations a second that one device could do; default: as known by its name.

    Returns:
        The state, and a `Run`: the step that was reached, why it ended, and the metrics by step.

    Raises:
        TypeError, ValueError: wrong arguments, on any rank, or other ones than on other ranks; batches that end early
            or are not those of the run in `save`; a step that returns something else. The same on every rank.
        CheckpointError: a checkpoint could not be written, or is of another state.
        FloatingPointError: the loss is not finite. With `save`, the steps since the last checkpoint are run again, and
            it names the first stage that made such a number, in forward or backward, and the rank. The same on every
            rank.
        RuntimeError: another rank has failed; or a run before, in the same program, has ended early, and this one has
            another folder: it would keep what it makes of a state that is half trained.

    Example:
        ``state, run = sf.run.loop(step, state, batches, steps=10_000, save="runs/1", every=500, keep=3)``
    """
    team = team_of(grids(state), "run")
    given = {"steps": steps, "save": save, "every": every, "keep": keep, "best": best, "resume": resume,
             "evaluate": evaluate, "report": report, "seed": seed, "limit": limit, "flops": flops,
             "peak": peak}  # fmt: skip
    where, places, wanted = _asked(team, step, state, batches, given)
    run = LoopState(
        team=team,
        asked=wanted,
        failing=Failing(team),
        stepping=Stepping(step, batches, wanted.seed, where, wanted.steps),
        exchange=Exchange(team),
        reports=Reports(wanted.reports if team.rank == 0 else ()),
        figures=Figures(wanted.flops, wanted.peak, team.size, places),
        saver=_saver(wanted),
    )
    with Interrupts(wanted.limit) as interrupts:
        run.interrupts = interrupts
        try:
            state, start = _begun(run, state)
            run.reports.begin(start, wanted.steps)
            state, reached, why = _trained(run, state, start)
            if run.saver is not None:
                run.saver.finish()
            ended(wanted.save, why)
            found = _best(run, reached)
            interrupts.leaves(REASONS.index(why))
            run.close()
        except BaseException:
            if run.saver is not None:
                run.saver.abandon()
            with contextlib.suppress(Exception):  # what has failed says more
                run.close()
            raise
        finally:
            run.reports.end()
            if run.saver is not None:
                run.saver.lock.release()
    return state, Run(start, reached, why, run.history, found)


def _saver(asked: Asked) -> Saver | None:
    if asked.save is None:
        return None
    return Saver(asked.save, Keeping(asked.keep, asked.best), Origin(asked.seed, asked.identity))


def _asked(team: Team, step: Any, state: Any, batches: Any, given: dict[str, Any]) -> tuple[int, int, Asked]:
    """This rank's place, how many there are, and the arguments, which are the same on all ranks."""
    facts, wrong, found, where = {}, None, None, (0, 1)
    try:
        found, where = asked(step, batches, given), place(batches, state)
        facts = found.facts()
        refuse(found.save)
    except (TypeError, ValueError, RuntimeError) as error:
        wrong = error
    compare(team, facts, wrong)
    assert found is not None, "it was wrong otherwise"
    return *where, found


def _begun(run: LoopState, state: Any) -> tuple[Any, int]:
    """The state to go on from, and its step; a new run is saved first, so that there always is a checkpoint."""
    saver = run.saver
    if saver is None:
        return state, 0
    run.team.first(f"lock {saver.folder}", saver.lock.take)
    choice = chosen(run.team, saver.folder, run.asked.resume)
    if choice.path is not None:
        return _gone_on(run, saver, state, choice)
    if comes_later(state):
        raise ValueError(
            "sf.run.loop: the state of an optimizer by from_torch is not complete before its first step, so "
            "that no checkpoint of this run could be loaded: take one step first, and pass the state that it gives"
        )
    _refuse_nan(run, state, 0)
    saver.save(state, 0, run.history)
    saver.finish()
    return state, 0


def _gone_on(run: LoopState, saver: Saver, state: Any, choice: Choice) -> tuple[Any, int]:
    """The state of a checkpoint, and its step."""
    path = choice.path
    assert path is not None, "there is one to go on from"
    if not run.asked.resume:
        raise ValueError(
            f"sf.run.loop: resume=False, and {path} is of a run already: pass another folder, delete it, or go on "
            f"from it with resume=True"
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
    return state, step


def _best(run: LoopState, step: int) -> int | None:
    """The step whose checkpoint is the best one."""
    saver = run.saver
    if saver is None or saver.keeping.best is None:
        return None
    return saver.keeping.best.of(saver.values(run.team, step, [], run.history))


def _trained(run: LoopState, state: Any, start: int) -> tuple[Any, int, str]:
    """The state after the last step that is taken, how many have been, and why no more are."""
    reached = start
    if start:  # whoever wrote this checkpoint may have ended before the evaluation that follows it
        _evaluated(run, state, start)
        if run.interrupts.cut:
            return state, reached, REASONS[2]
    with run.failing.here():
        run.rows = run.stepping.rows(start) if start < run.asked.steps else iter(())
    run.figures.restart()
    while reached < run.asked.steps:
        began = time.monotonic()
        with run.failing.here():
            state = _stepped(run, state, reached, first=reached == start)
        run.recent.append(time.monotonic() - began)
        reached += 1
        if run.saver is not None:
            run.saver.look()
        heard = run.exchange.turn(reached, run.word(reached))
        if not heard and not run.due(reached):
            continue
        word = common(heard, _settled(run, reached))
        _raise_wrong(run, state, word)
        if word.stop or run.saves(reached):
            _saved(run, state, reached)
        if word.stop and reached < run.asked.steps:
            return state, reached, REASONS[word.stop]
        _evaluated(run, state, reached)
        if run.interrupts.cut:  # the next program evaluates again, at this step
            if run.saver is not None and run.saver.saved != reached:
                _saved(run, state, reached)
            return state, reached, REASONS[2]
    _raise_wrong(run, state, _settled(run, reached))
    return state, reached, REASONS[0]


def _stepped(run: LoopState, state: Any, n: int, first: bool) -> Any:
    """Launches step `n`, which counts from 0, and reads the metrics of an earlier one."""
    if first and not comes_later(state):
        run.kinds = kinds_of(state)
    state, metrics, batch = run.stepping.one(n, run.rows, state)
    if first:
        if run.kinds is None:
            run.kinds = kinds_of(state)
        run.kinds.check(kinds_of(state))
    run.late.put(n + 1, metrics)
    _read(run, n + 1 - STEPS)
    run.figures.launched(n + 1, batch)
    return state


def _read(run: LoopState, until: int) -> None:
    for step, metrics in run.late.until(until):
        wrong = wrong_metrics(metrics)
        if wrong and run.bad is None:
            run.bad = step, listed(wrong, separator=" and ")
        run.tell(step, metrics, run.figures.of(step, metrics))


def _settled(run: LoopState, reached: int) -> Word:
    """What all ranks say when each has read its metrics to the end."""
    with run.failing.here():
        _read(run, run.asked.steps)
    return run.exchange.now(run.word(reached))


def _raise_wrong(run: LoopState, state: Any, word: Word) -> None:
    """Raises on all ranks, if something has failed on one, or was not finite."""
    if word.failed:
        _raise_failed(run)
    if word.bad_step is not None:
        found = run.bad[1] if run.bad is not None and run.bad[0] == word.bad_step else ""
        raise _explained(run, state, word.bad_step, found)


def _explained(run: LoopState, state: Any, step: int, found: str) -> FloatingPointError:
    """The error for a step that is not finite, when steps since the last checkpoint have run again."""
    if run.saver is not None:
        run.saver.finish()
    with run.failing.here():
        run.close()  # which read the same
    return explain(run.team, run.stepping, state, run.saver, step, found)


def _raise_failed(run: LoopState) -> None:
    """Raises on all ranks what has failed on one."""
    error = run.error
    if run.saver is not None and error is not run.saver.error:
        run.saver.finish()
    every = run.team.gathered(None if error is None else f"{type(error).__name__}: {error}", "comparing errors")
    if error is not None:
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(every) if text is not None)
    raise RuntimeError(f"sf.run.loop: rank {rank} has failed: {text}. Look at the output of that rank first")


def _evaluated(run: LoopState, state: Any, step: int) -> None:
    began, names = time.monotonic(), run.evaluations(step)
    for name in names:
        with run.failing.here():
            seed_all(run.asked.seed, name, step, run.stepping.place)
            found = checked(run.asked.evaluate[name][0](state), f"sf.run.loop: evaluate ({name})")
            if run.interrupts.cut:
                break
            compared(run.asked.best, name, found)
            run.tell(step, {f"{name}/{key}": float(value) for key, value in found.items()}, {})
    if names:
        run.evaluation = max(run.evaluation, time.monotonic() - began)
    run.figures.restart()


def _saved(run: LoopState, state: Any, step: int) -> None:
    if run.saver is not None:
        with run.failing.here():
            if run.kinds is not None:  # None before the first step
                run.kinds.check(kinds_of(state))
        _refuse_nan(run, state, step)
        run.saver.save(state, step, run.history)
        run.figures.restart()


def _refuse_nan(run: LoopState, state: Any, step: int) -> None:
    """Raises FloatingPointError on all ranks for a state that has nan on one, though its metrics were finite."""
    with run.failing.here():
        found = not_numbers(state)
    names = list(dict.fromkeys(name for some in run.team.gathered(found, "looking for nan") for name in some))
    if not names:
        return
    if step == 0:
        raise FloatingPointError(f"sf.run.loop: the state has nan before the first step, in {listed(names)}")
    raise _explained(run, state, step, f"the state has nan in {listed(names)}")
