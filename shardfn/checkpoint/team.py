"""The processes that save or load together, and raise each other's errors."""

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
    """A checkpoint could not be written or read; raised on every rank."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


@dataclass(frozen=True)
class RankGroup:
    """A group of processes that includes this one.

    Attributes:
        rank: of this process within the group.
        size: number of processes.
        group: process group to communicate by; None for one process.
        use: what they do together, for messages about waiting.
    """

    rank: int
    size: int
    group: Any = None
    use: str = "checkpoint"

    def gathered(self, value: T, task: str = "") -> list[T]:
        """Gathers every rank's object, waiting for all; `task` describes the operation in messages about waiting."""
        if self.group is None:
            return [value]
        objects: list[Any] = [None] * self.size
        try:
            with waiting.on("meeting", self.group.group_name, task or self.use):
                dist.all_gather_object(objects, value, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(f"a rank has ended, or did not come: {waiting.brief(error)}") from waiting.cause(
                error
            )
        return objects

    def run_on_each(self, task: str, run: Callable[[], T]) -> T:
        """Runs a function on all ranks and returns this rank's result; if it fails on one, all raise the same.

        Raises:
            CheckpointError: names the errors and the ranks.
        """
        return self._run_on_all(task, run, share=False)[0]

    def run_and_gather(self, task: str, run: Callable[[], T]) -> list[T]:
        """Runs a function on all ranks and returns all results; if it fails on one, all raise the same.

        Raises:
            CheckpointError: names the errors and the ranks.
        """
        return self._run_on_all(task, run, share=True)[1]

    def first(self, task: str, run: Callable[[], None]) -> None:
        """Runs a function on the first rank only; if it fails, all raise the same CheckpointError."""
        self.run_on_each(task, run if self.rank == 0 else lambda: None)

    def _run_on_all(self, task: str, run: Callable[[], T], share: bool) -> tuple[T, list[T]]:
        result: Any = None
        cause: Exception | None = None
        try:
            result = run()
        except Exception as error:
            cause = error
        try:
            outcomes = self.gathered((result if share else None, None if cause is None else _worded(cause)), task)
        except CheckpointError as lost:
            if cause is None:
                raise
            raise CheckpointError(f"{task}: {_worded(cause)}. Then {lost}") from cause
        failed: dict[str, list[int]] = {}
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                failed.setdefault(problem, []).append(rank)
        if failed:
            where = {problem: f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}: " for problem, ranks in failed.items()}
            lines = [problem if len(failed[problem]) == self.size else where[problem] + problem for problem in failed]
            raise CheckpointError(f"{task}: {findings(lines)}") from cause
        return result, [result for result, _ in outcomes]  # type: ignore[misc]


def team_of(grids: Iterable[Grid], use: str = "checkpoint") -> RankGroup:
    """The team of the ranks of these meshes; all processes if there are no meshes.

    Args:
        grids: the meshes.
        use: teams with different uses have different groups, so they may communicate at the same time.

    Raises:
        ValueError: the meshes have different ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return RankGroup(0, 1)
    rank_sets = {tuple(sorted(grid.ranks)) for grid in grids} or {tuple(range(dist.get_world_size()))}
    if len(rank_sets) > 1:
        raise ValueError(
            f"a checkpoint is of one mesh, or of several with the same ranks; here are {listed(sorted(rank_sets))}"
        )
    ranks = list(rank_sets.pop())
    if len(ranks) == 1:
        return RankGroup(0, 1)
    return RankGroup(ranks.index(dist.get_rank()), len(ranks), cpu_group(ranks, use), use)


def on_each_rank(run: Callable[[], T]) -> T:
    """Runs a function before the team is known; if it fails, the others learn of it in their next `together`."""
    try:
        return run()
    except Exception as error:
        if waiting.cause(error) is not None:  # after a wait in vain no other rank comes to hear of it
            with contextlib.suppress(CheckpointError):
                team_of(()).gathered((None, _worded(error)))
        raise


def _worded(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
