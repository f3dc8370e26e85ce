"""Worlds that one process pretends: torch's "fake" backend transfers nothing, so any size starts at once.

Shapes are right and values are not. The deadline does not apply, because the ranks run here, one after the other.
"""

from __future__ import annotations

import torch.distributed as dist

from shardfn.compat import process_groups
from shardfn.testing import serialization, state
from shardfn.testing.errors import Outcome


class Fake:
    """Runs calls as some of the ranks of a fake world."""

    def __init__(self, size: int, ranks: tuple[int, ...]) -> None:
        self._size = size
        self._ranks = ranks

    def run(self, call: bytes, deadline: float) -> list[Outcome]:
        """Runs a call and returns one outcome per rank.

        Raises:
            RuntimeError: this process has a process group already.
        """
        if dist.is_initialized():
            raise RuntimeError(
                'kind="fake" makes the default process group of this process, and there is one already: '
                f"backend {dist.get_backend()}, rank {dist.get_rank()} of {dist.get_world_size()}"
            )
        with state.borrowed():
            return [self._as_rank(rank, call) for rank in self._ranks]

    def _as_rank(self, rank: int, call: bytes) -> Outcome:
        state.reset()
        dist.init_process_group("fake", store=process_groups.fake_store(), rank=rank, world_size=self._size)
        try:
            return serialization.perform(call)
        finally:
            dist.destroy_process_group()

    def close(self) -> None:
        """Does nothing: nothing outlives a run."""
