"""The outcomes of ranks, and the errors that a world raises for them."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardfn.testing import stacks


@dataclass(frozen=True)
class Returned:
    """A rank's result."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """Why a rank gave no result.

    Attributes:
        how: "raised" an exception, "died" as a process, or was left "waiting".
        type_name: the name of the exception's type.
        message: the exception's text, or where the rank was waiting.
        traceback: the traceback or the stack, as text.
        exception: the original exception, if it could be transferred.
    """

    how: Literal["raised", "died", "waiting"]
    type_name: str
    message: str
    traceback: str
    exception: BaseException | None = None

    def __str__(self) -> str:
        if self.how != "raised":
            return self.message
        return f"{self.type_name}: {self.message}" if self.message else self.type_name

    def as_exception(self) -> BaseException:
        """The original exception, or the nearest thing to it."""
        return RuntimeError(str(self)) if self.exception is None else self.exception


Outcome = Returned | Failure

# Seconds that the other ranks have to answer after the first failure, before they count as waiting for that rank.
GRACE = 3.0


class WorldError(RuntimeError):
    """A function failed on some rank of a world.

    Attributes:
        failures: rank to `Failure`: dead ranks first, then ranks that raised, then ranks left waiting.
    """

    def __init__(self, message: str, failures: Mapping[int, Failure]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class WorldTimeout(WorldError):
    """No rank failed, but some did not answer within the deadline."""


def failure_of(error: BaseException, skip: int = 0) -> Failure:
    """An exception as a failure; its traceback leaves out the outermost `skip` frames."""
    frames = error.__traceback__
    for _ in range(skip):
        frames = frames.tb_next if frames is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure("raised", type(error).__qualname__, str(error), text, error)


def waiting(frames: Sequence[stacks.Frame], text: str) -> Failure:
    """The failure of a rank that never answered, with its stack: the frames, and a text of them."""
    place = stacks.where(frames)
    return Failure("waiting", "TimeoutError", place, text, TimeoutError(place))


def raise_failures(outcomes: list[Outcome], ranks: tuple[int, ...], task: str, deadline: float) -> None:
    """Raises one error for all failures among `outcomes`, if there are any.

    Raises:
        WorldTimeout: ranks were left waiting and nothing else went wrong.
        WorldError: a rank raised or died.
    """
    __tracebackhide__ = True
    answers = dict(zip(ranks, outcomes, strict=True))
    unsorted = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
    if not unsorted:
        return
    phrases = {"died": "died in", "raised": "failed in", "waiting": f"did not return within {deadline:g} s from"}
    order = list(phrases)
    failures = dict(sorted(unsorted.items(), key=lambda item: order.index(item[1].how)))
    worst = next(iter(failures.values())).how
    culprits = [rank for rank, failure in failures.items() if failure.how == worst]
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, failure in failures.items():
        groups.setdefault((str(failure), failure.traceback), []).append(rank)
    lines = [f"{_ranks_text(culprits)} {phrases[worst]} {task}"]
    lines += [f"  {_ranks_text(members)}: {reason}" for (reason, _), members in groups.items()]
    lines += [f"--- {_ranks_text(members)} ---\n{stack.rstrip()}" for (_, stack), members in groups.items() if stack]
    message = "\n".join(lines)
    raise WorldTimeout(message, failures) if worst == "waiting" else WorldError(message, failures)


def _ranks_text(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
