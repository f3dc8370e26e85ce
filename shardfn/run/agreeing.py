"""Agreement of the ranks of a run: on the arguments, on stopping after each step, and on failures."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.checkpoint.team import RankGroup
from shardfn.compat import process_groups
from shardfn.mesh import waiting, watchdog
from shardfn.quoting import findings

REASONS = ("finished", "time", "preempted", "stopped")
FAR = 2**62  # more than any step


@dataclass(frozen=True)
class Word:
    """One rank's report about the run or, combined over ranks, the maximum of each number.

    Attributes:
        stop: why the run should stop, as an index into `REASONS`; 0 if it should not.
        failed: a rank that cannot go on, plus 1; 0 if there is none.
        bad: `FAR` minus the first step with a metric that is not finite; 0 if there is none.
    """

    stop: int = 0
    failed: int = 0
    bad: int = 0

    def __bool__(self) -> bool:
        return any(astuple(self))

    @staticmethod
    def far(step: int) -> int:
        """Encodes a step as `bad`, so that the maximum over ranks is the earliest step."""
        return FAR - step

    @property
    def bad_step(self) -> int | None:
        """The first step with a metric that is not finite, counted from 1."""
        return FAR - self.bad if self.bad else None


def common(*words: Word) -> Word:
    """The maximum of each number over several words."""
    return Word(*map(max, zip(*map(astuple, words), strict=True)))


class WordExchange:
    """All-reduces the ranks' words in the background, so that all ranks act on the same words at the same step.

    The word that a rank sends at one step travels while the next step runs, and all ranks read the result there. So all
    stop at the same step, whichever rank had a reason and when. Worlds of 64 ranks and more exchange words only every
    few steps.
    """

    def __init__(self, group: RankGroup) -> None:
        self.team, self.period = group, 1 + group.size // 64
        self._travels: tuple[Tensor, Any] | None = None

    def turn(self, step: int, local_word: Word) -> Word:
        """Sends `local_word` after a step and returns the combined words of the turn before, without waiting.

        A rank must repeat in `local_word` whatever it has said before.
        """
        if self.team.size == 1:
            return local_word
        if step % self.period:
            return Word()
        received = self._arrived()
        self._send(local_word)
        return received

    def exchange_word(self, local_word: Word) -> Word:
        """Sends `local_word` and returns the combined words of all ranks, after waiting for them."""
        if self.team.size == 1:
            return local_word
        before = self._arrived()
        self._send(local_word)
        return common(before, self._arrived())

    def _send(self, local_word: Word) -> None:
        numbers = torch.tensor(astuple(local_word), device="cpu")
        self._travels = numbers, dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.team.group, async_op=True)

    def _arrived(self) -> Word:
        if self._travels is None:
            return Word()
        (numbers, work), self._travels = self._travels, None
        # Entered even if the result is already there: the counts of `waiting.on` show others which rank is missing.
        with waiting.on("agreeing whether the run goes on", self.team.group.group_name, note="in sf.run.loop"):
            work.wait()
        return Word(*map(int, numbers.tolist()))


def ranks_of(group: RankGroup) -> list[int]:
    """The global ranks of a team, in team order."""
    return [process_groups.global_rank()] if group.group is None else dist.get_process_group_ranks(group.group)


def compare_arguments(group: RankGroup, facts: dict[str, str], local_error: Exception | None) -> None:
    """Raises on every rank if the arguments of one rank are wrong, or differ between ranks.

    Args:
        group: the ranks.
        facts: by name, what must be the same on all ranks.
        local_error: the error in this rank's arguments, if any.

    Raises:
        Exception: `local_error`.
        ValueError: another rank's arguments are wrong or differ from rank 0's.
    """
    text = None if local_error is None else f"{type(local_error).__name__}: {local_error}"
    reports = group.gathered((facts, text), "comparing arguments")
    if local_error is not None:
        raise local_error
    for rank, (_, error) in enumerate(reports):
        if error is not None:
            raise ValueError(f"sf.run.loop: on rank {rank}, {error}")
    for rank, (other, _) in enumerate(reports):
        differ = [f"{name}: rank 0 has {value}, rank {rank} {other[name]}" for name, value in reports[0][0].items()
                  if other[name] != value]  # fmt: skip
        if differ:
            raise ValueError(
                f"sf.run.loop: ranks differ in {findings(differ)}. All ranks pass the same: what only one of them "
                f"knows, it sends to the others first"
            )


TOGETHER = 1.0  # seconds within which errors on all ranks count as one common failure


class Failing:
    """Tells the other ranks of a run when this rank fails alone, since they may be waiting for it."""

    def __init__(self, group: RankGroup) -> None:
        # A random key and no counter, since ranks may have made different numbers of runs before.
        name = group.gathered(uuid.uuid4().hex, "starting the run")[0]
        self.key = f"shardfn/run/{name}/failed"
        self.ranks = ranks_of(group)
        self.alone = group.group is None or process_groups.worlds_of_threads()
        watchdog.goes_on()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """A context in which an error that is not raised on all ranks within a second is reported to waiting ranks."""
        try:
            yield
        except BaseException as error:
            if not self.alone:
                with contextlib.suppress(RuntimeError):  # the store is gone if the rank that hosts it has ended
                    self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        store = process_groups.default_store()
        store.set(f"{self.key}/{dist.get_rank()}", "")
        keys, until = [f"{self.key}/{rank}" for rank in self.ranks], time.monotonic() + TOGETHER
        while time.monotonic() < until:
            if store.check(keys):
                return
            time.sleep(0.01)
        watchdog.failed(error)
