"""Validates the arguments of `loop`, so that mistakes are raised on all ranks before the first step."""

from __future__ import annotations

import inspect
import operator
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfn.checkpoint.folders import path_status
from shardfn.local_paths import local_path
from shardfn.run.checkpoints import identity_of
from shardfn.run.folder import Best, Resume, best_of
from shardfn.run.interrupts import seconds_of
from shardfn.run.reports import Report, progress
from shardfn.shards.random import int_seed
from shardfn.transforms.modules import refuse_module

Evaluate = Callable[[Any], Mapping[str, Any]]
Stop = Callable[[Mapping[str, Mapping[int, float]]], bool]
Evaluation = Evaluate | tuple[Evaluate, int]


@dataclass(frozen=True)
class LoopOptions:
    """The arguments of `loop`, normalized.

    Attributes:
        steps: number of the last step.
        start: steps that the state has taken before, in a run without a checkpoint.
        numbered: whether the step takes its number.
        save: the folder of the run's checkpoints.
        save_every: steps between two checkpoints.
        keep_last: how many of the newest checkpoints stay.
        best: the metric that decides which checkpoint is best and stays too.
        resume: whether to go on from the newest checkpoint, or from the newest undamaged one.
        evaluate: by the prefix of its metrics, the evaluation function and its interval in steps.
        stop: says after an evaluation, by all metrics, whether the run ends.
        reports: called with each step's metrics.
        seed: of the random numbers.
        time_limit: seconds from the start of the process.
        flops: floating point operations of a step, on all ranks together.
        peak_flops: floating point operations a second of one device.
        identity: of the batches, as JSON.
    """

    steps: int
    start: int
    numbered: bool
    save: Path | None
    save_every: int | None
    keep_last: int | None
    best: Best | None
    resume: Resume
    evaluate: dict[str, tuple[Evaluate, int]]
    stop: Stop | None
    reports: tuple[Report, ...]
    seed: int
    time_limit: float | None
    flops: float | None
    peak_flops: float | None
    identity: str

    def facts(self) -> dict[str, str]:
        """The arguments that must be the same on all ranks, as text by name."""
        facts = {
            name: repr(getattr(self, name))
            for name in ("steps", "start", "save_every", "keep_last", "best", "resume", "seed")
        }
        facts["save"] = str(self.save)
        facts["evaluate"] = repr({name: interval for name, (_, interval) in self.evaluate.items()})
        return facts | {"batches.identity": self.identity}


def checked_arguments(step: Any, batches: Any, args: dict[str, Any]) -> LoopOptions:
    """Checks and normalizes the arguments.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    if not callable(step):
        raise TypeError(
            f"sf.run.loop: step is a {type(step).__name__}, not a function (state, batch) -> (state, metrics)"
        )
    refuse_module("sf.run.loop", step)
    numbered = _takes_number(step)
    if not numbered:
        _takes(step, 2, "step", "(state, batch) -> (state, metrics)")
    steps, start = _count("steps", args["steps"], "the number of the last step"), args["start"]
    if type(start) is not int or not 0 <= start <= steps:
        raise ValueError(
            f"sf.run.loop: start must be the number of steps that the state has taken, 0 to {steps}, got {start!r}"
        )
    save = args["save"]
    if save is not None:
        _check_folder(save)
    for name in ("save_every", "keep_last", "best"):
        if save is None and args[name] is not None:
            raise ValueError(
                f"sf.run.loop: {name}={args[name]!r} is about checkpoints, and there are none without save=folder"
            )
    save_every = (
        None
        if args["save_every"] is None
        else _count("save_every", args["save_every"], "the number of steps between two checkpoints")
    )
    keep_last = (
        None
        if args["keep_last"] is None
        else _count("keep_last", args["keep_last"], "the number of checkpoints that stay")
    )
    if not isinstance(args["resume"], bool) and args["resume"] != "previous":
        raise TypeError(
            f"sf.run.loop: resume must be True, for the newest checkpoint in save=, or False, or "
            f'"previous", for the newest intact one, got {args["resume"]!r}'
        )
    evaluate = _evaluations(args["evaluate"], save_every or steps)
    best, stop = best_of(args["best"], evaluate), args["stop"]
    if stop is not None and (not callable(stop) or not evaluate):
        raise TypeError(f"sf.run.loop: stop must be a function of the metrics, with evaluate=, got {stop!r}")
    if best is not None and keep_last is None:
        raise ValueError(f"sf.run.loop: best={args['best']!r} is about what stays, and without keep_last= all do")
    _check_batches(batches, save is not None)
    return LoopOptions(
        steps=steps,
        start=start,
        numbered=numbered,
        save=None if save is None else Path(save).absolute(),  # the program may change its working directory later
        save_every=save_every,
        keep_last=keep_last,
        best=best,
        resume=args["resume"],
        evaluate=evaluate,
        stop=stop,
        reports=_reports(args["report"]),
        seed=int_seed(args["seed"]),
        time_limit=seconds_of(args["time_limit"], save is not None),
        flops=_positive("flops", args["flops"]),
        peak_flops=_positive("peak_flops", args["peak_flops"]),
        identity=identity_of(batches),
    )


def _check_folder(save: Any) -> None:
    if not isinstance(save, (str, os.PathLike)):
        raise TypeError(f"sf.run.loop: save is a {type(save).__name__}, not a folder")
    if not os.fspath(save):
        raise ValueError("sf.run.loop: save must be a folder for the run's checkpoints, or None, got ''")
    status = path_status(local_path(save, "sf.run.loop: save"))
    if status is None and os.path.islink(save):
        raise ValueError(
            f"sf.run.loop: save={os.fspath(save)!r} is a link to {Path(save).readlink()}, which is not there"
        )
    if status is not None and not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"sf.run.loop: save={os.fspath(save)!r} is a file, not a folder")


def _count(name: str, value: Any, meaning: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"sf.run.loop: {name} must be {meaning}, an integer of 1 or more, got {value!r}")
    return number


def _positive(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"sf.run.loop: {name} must be a number above 0, or None, got {value!r}")
    return float(value)


def _takes(function: Any, arguments: int, name: str, form: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # callables implemented in C may have no signature
        return
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        raise TypeError(
            f"sf.run.loop: {name} is called as {form.rstrip(',')}, and {name}{signature} does not take that: {error}"
        ) from None


def _takes_number(step: Any) -> bool:
    """Whether a step needs a third argument."""
    try:
        signature = inspect.signature(step)
        signature.bind(None, None, None)
    except (TypeError, ValueError):
        return False
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind <= 1]
    return len(needed) == 3


def _check_batches(batches: Any, resumes: bool) -> None:
    if callable(batches):
        _takes(batches, 1, "batches", "batches(start), for the batches of step `start` and after it,")
    elif not isinstance(batches, Iterable):
        kind = type(batches).__name__
        raise TypeError(f"sf.run.loop: batches must be a function of the step to start at, got {kind}")
    elif resumes:
        raise TypeError(
            f"sf.run.loop: batches must be a function of the step to start at to resume, got "
            f"{type(batches).__name__}, which always begins at its first batch. Pass the result of sf.run.batches, or "
            f"lambda start: itertools.islice(iter(rows), start, None)"
        )


def _evaluations(evaluate: Any, interval: int) -> dict[str, tuple[Evaluate, int]]:
    if evaluate is None:
        return {}
    if isinstance(evaluate, Mapping):
        wrong = [name for name in evaluate if not isinstance(name, str)]
        if wrong:
            raise TypeError(f"sf.run.loop: evaluate has the key {wrong[0]!r}, and keys are names")
        return {f"eval/{name}": _evaluation(evaluation, interval) for name, evaluation in evaluate.items()}
    return {"eval": _evaluation(evaluate, interval)}


def _evaluation(evaluate: Any, interval: int) -> tuple[Evaluate, int]:
    function = evaluate
    if isinstance(evaluate, tuple) and len(evaluate) == 2:
        if callable(evaluate[1]):
            raise TypeError("sf.run.loop: evaluate=(steps, function); the function comes first: (function, steps)")
        function, interval = evaluate[0], _count("evaluate", evaluate[1], "(function, steps between two evaluations)")
    if not callable(function):
        raise TypeError(
            f"sf.run.loop: evaluate must be a function (state) -> metrics, (function, steps) for one with its own "
            f"interval, or a dict of such by name, got {evaluate!r}"
        )
    _takes(function, 1, "evaluate", "(state) -> metrics")
    return function, interval


def _reports(argument: Any) -> tuple[Report, ...]:
    reports: Sequence[Any] = [progress()] if argument is None else [argument] if callable(argument) else argument
    if not isinstance(reports, (list, tuple)) or not all(map(callable, reports)):
        raise TypeError(
            f"sf.run.loop: report must be a function (step, metrics) -> None, a list of such, or None for "
            f"sf.run.progress(), got {argument!r}"
        )
    for report in reports:
        if isinstance(report, type):
            raise TypeError(f"sf.run.loop: report has {report.__name__} itself: call it, sf.run.{report.__name__}(...)")
    return tuple(reports)
