"""What the ranks of a run tell each other: how it was called, at every step whether it goes on, and who has failed."""

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

from shardfn.checkpoint.team import Team
from shardfn.compat import process_groups
from shardfn.mesh import waiting, watchdog
from shardfn.quoting import findings

REASONS = ("finished", "time", "preempted")
FAR = 2**62


@dataclass(frozen=True)
class Word:
    """What one rank says of the run, or all of them: of each number, the largest.

    Attributes:
        stop: why it should stop, by its number in `REASONS`; 0 if it should not.
        failed: a rank that cannot go on, plus 1; 0 if there is none.
        bad: `FAR` less the first step with a number that is not finite; 0 if there is none.
    """

    stop: int = 0
    failed: int = 0
    bad: int = 0

    def __bool__(self) -> bool:
        return any(astuple(self))

    @staticmethod
    def far(step: int) -> int:
        """A step as `bad`: of several, the largest is the first."""
        return FAR - step

    @property
    def bad_step(self) -> int | None:
        """The first step with a number that is not finite, counted from 1."""
        return FAR - self.bad if self.bad else None


def common(*words: Word) -> Word:
    """What several say together."""
    return Word(*map(max, zip(*map(astuple, words), strict=True)))


class Exchange:
    """Tells all ranks the words of all, at the same step on each, and waits for nobody in between.

    What a rank says at one step travels while the next one runs. All ranks read it there, so that all of them stop at
    the same step, whichever rank had a reason and when. A larger world says a word only every few steps.
    """

    def __init__(self, team: Team) -> None:
        self.team, self.period = team, 1 + team.size // 64
        self._travels: tuple[Tensor, Any] | None = None

    def turn(self, step: int, mine: Word) -> Word:
        """Says a word after a step, and hears what all said one turn before. `mine` never takes back anything."""
        if self.team.size == 1:
            return mine
        if step % self.period:
            return Word()
        heard = self._arrived()
        self._send(mine)
        return heard

    def now(self, mine: Word) -> Word:
        """What all ranks say here. It waits for them."""
        if self.team.size == 1:
            return mine
        before = self._arrived()
        self._send(mine)
        return common(before, self._arrived())

    def _send(self, word: Word) -> None:
        said = torch.tensor(astuple(word))
        self._travels = said, dist.all_reduce(said, dist.ReduceOp.MAX, group=self.team.group, async_op=True)

    def _arrived(self) -> Word:
        if self._travels is None:
            return Word()
        (said, work), self._travels = self._travels, None
        # Every rank counts every time, though it need not wait: by the counts others see who has not come.
        with waiting.on("agreeing whether the run goes on", self.team.group.group_name, note="in sf.run.loop"):
            work.wait()
        return Word(*map(int, said.tolist()))


def ranks_of(team: Team) -> list[int]:
    """The global ranks of a team, in their order in it."""
    return [process_groups.global_rank()] if team.group is None else dist.get_process_group_ranks(team.group)


def compare(team: Team, facts: dict[str, str], mine: Exception | None) -> None:
    """Raises on every rank, if arguments are wrong on one or differ between ranks.

    Args:
        team: the ranks.
        facts: what must be the same on all of them.
        mine: what is wrong with this rank's.

    Raises:
        Exception: `mine`.
        ValueError: another rank's are wrong, or differ from rank 0's.
    """
    every = team.gathered((facts, None if mine is None else f"{type(mine).__name__}: {mine}"), "comparing arguments")
    if mine is not None:
        raise mine
    for rank, (_, wrong) in enumerate(every):
        if wrong is not None:
            raise ValueError(f"sf.run.loop: on rank {rank}, {wrong}")
    for rank, (theirs, _) in enumerate(every):
        differ = [f"{name}: rank 0 has {one}, rank {rank} {theirs[name]}" for name, one in every[0][0].items()
                  if theirs[name] != one]  # fmt: skip
        if differ:
            raise ValueError(
                f"sf.run.loop: ranks differ in {findings(differ)}. All ranks pass the same: what only one of them "
                f"knows, it sends to the others first"
            )


TOGETHER = 1.0  # seconds within which ranks fail together


class Failing:
    """One run's: a context around what may fail on this rank alone."""

    def __init__(self, team: Team) -> None:
        # Ranks may have made different numbers of runs before, so that a number here would not do.
        name = team.gathered(uuid.uuid4().hex, "starting the run")[0]
        self.key = f"shardfn/run/{name}/failed"
        self.ranks = ranks_of(team)
        self.alone = team.group is None or process_groups.worlds_of_threads()
        watchdog.goes_on()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Of an error that does not come to all ranks within a second, those that wait for this one learn."""
        try:
            yield
        except BaseException as error:
            if not self.alone:
                with contextlib.suppress(RuntimeError):  # the store has gone with a rank
                    self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        store = process_groups.default_store()
        store.set(f"{self.key}/{dist.get_rank()}", "")
        every, until = [f"{self.key}/{rank}" for rank in self.ranks], time.monotonic() + TOGETHER
        while time.monotonic() < until:
            if store.check(every):
                return
            time.sleep(0.01)
        watchdog.failed(error)
