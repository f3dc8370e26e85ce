"""A rank that fails by itself says so, so that the others do not wait for it."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

import torch.distributed as dist

from shardfn.checkpoint.team import Team
from shardfn.compat import process_groups
from shardfn.mesh import watchdog

TOGETHER = 1.0  # seconds within which ranks fail together


class Failing:
    """One run's: a context around what may fail on this rank alone."""

    def __init__(self, team: Team) -> None:
        # Ranks may have made different numbers of runs before, so that a number here would not do.
        name = team.gathered(uuid.uuid4().hex, "starting the run")[0]
        self.key = f"shardfn/run/{name}/failed"
        self.ranks = list(range(team.size)) if team.group is None else dist.get_process_group_ranks(team.group)
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
