"""The processes that save or load together: what one of them meets, all of them say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from shardfn.mesh import waiting
from shardfn.mesh.grid import Grid
from shardfn.mesh.groups import cpu_group
from shardfn.quoting import bounded, findings, listed

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the same on every rank."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


@dataclass(frozen=True)
class Team:
    """Some processes, of which this is one.

    Attributes:
        rank: this one's number among them.
        size: how many they are.
        group: by which they talk; None for one process.
        use: what they do together, for the message of one that waits.
    """

    rank: int
    size: int
    group: Any = None
    use: str = "checkpoint"

    def gathered(self, mine: T, what: str = "") -> list[T]:
        """Every rank's object; `what` they do meanwhile is for the message of one that waits."""
        if self.group is None:
            return [mine]
        every: list[Any] = [None] * self.size
        try:
            with waiting.on("meeting", self.group.group_name, what or self.use):
                dist.all_gather_object(every, mine, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(f"a rank has ended, or did not come: {waiting.brief(error)}") from waiting.cause(
                error
            )
        return every

    def each(self, what: str, run: Callable[[], T]) -> T:
        """What `run` returns on this rank; if it fails on one, all raise the same.

        Raises:
            CheckpointError: what failed, on which ranks.
        """
        mine, _ = self._met(what, run, share=False)
        return mine

    def together(self, what: str, run: Callable[[], T]) -> list[T]:
        """What `run` returns on every rank; if it fails on one, all raise the same.

        Raises:
            CheckpointError: what failed, on which ranks.
        """
        return self._met(what, run, share=True)[1]

    def first(self, what: str, run: Callable[[], None]) -> None:
        """Runs something on the first rank alone; if it fails, all raise the same CheckpointError."""
        self.each(what, run if self.rank == 0 else lambda: None)

    def _met(self, what: str, run: Callable[[], T], share: bool) -> tuple[T, list[T]]:
        mine: Any = None
        cause: Exception | None = None
        try:
            mine = run()
        except Exception as error:
            cause = error
        every = self.gathered((mine if share else None, None if cause is None else _worded(cause)), what)
        failed: dict[str, list[int]] = {}
        for rank, (_, wrong) in enumerate(every):
            if wrong is not None:
                failed.setdefault(wrong, []).append(rank)
        if failed:
            where = {wrong: f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}: " for wrong, ranks in failed.items()}
            each = [wrong if len(failed[wrong]) == self.size else where[wrong] + wrong for wrong in failed]
            raise CheckpointError(f"{what}: {findings(each)}") from cause
        return mine, [result for result, _ in every]  # type: ignore[misc]


def team_of(grids: Iterable[Grid], use: str = "checkpoint") -> Team:
    """The ranks of these meshes; all processes, where there are none.

    Args:
        grids: the meshes.
        use: teams for different uses may talk at the same time.

    Raises:
        ValueError: meshes of different ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Team(0, 1)
    found = {tuple(sorted(grid.ranks)) for grid in grids} or {tuple(range(dist.get_world_size()))}
    if len(found) > 1:
        raise ValueError(
            f"a checkpoint is of one mesh, or of several with the same ranks; here are {listed(sorted(found))}"
        )
    ranks = list(found.pop())
    if len(ranks) == 1:
        return Team(0, 1)
    return Team(ranks.index(dist.get_rank()), len(ranks), cpu_group(ranks, use), use)


def on_each_rank(run: Callable[[], T]) -> T:
    """What this rank does before it knows its team; if it fails, the others learn of it when they come `together`."""
    try:
        return run()
    except Exception as error:
        if waiting.cause(error) is not None:  # nobody comes to hear of a wait that was in vain
            with contextlib.suppress(CheckpointError):
                team_of(()).gathered((None, _worded(error)))
        raise


def _worded(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
