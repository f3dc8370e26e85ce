"""Worlds whose ranks are threads of this process, on torch's threaded process group.

Every run makes its own threads and its own groups. What torch keeps for the whole process is shared by the ranks:
the default dtype, the random number generator, and the level of forward-mode differentiation, so `jvp` needs
processes.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from shardfn.testing import _torch, stacks, state, wire
from shardfn.testing.errors import GRACE, Failure, Outcome

_strays: list[threading.Thread] = []


class Threads:
    """Runs calls on `size` threads."""

    def __init__(self, size: int) -> None:
        self._size = size

    def run(self, call: bytes, deadline: float) -> list[Outcome]:
        """One outcome per rank.

        Raises:
            RuntimeError: a thread of an earlier run that hung is still running.
        """
        _wait_for_strays()
        with state.borrowed(), _torch.threaded_groups():
            state.reset()
            return _Run(self._size, call).outcomes(deadline)

    def close(self) -> None:
        """Nothing outlives a run."""


class _Run:
    """One call, on fresh threads."""

    def __init__(self, size: int, call: bytes) -> None:
        self._size = size
        self._call = call
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._done = threading.Condition()
        self._found: dict[int, Outcome] = {}

    def outcomes(self, deadline: float) -> list[Outcome]:
        threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self._size)
        ]
        for thread in threads:
            thread.start()
        found = self._collect(deadline)
        for rank in set(range(self._size)) - set(found):
            found[rank] = _stuck(threads[rank])
        _torch.release_threads()
        _join(threads)
        return [found[rank] for rank in range(self._size)]

    def _rank(self, rank: int) -> None:
        dist.init_process_group("threaded", store=self._store, rank=rank, world_size=self._size)
        try:
            outcome = wire.perform(self._call)
        finally:
            dist.destroy_process_group()
        with self._done:
            self._found[rank] = outcome
            self._done.notify()

    def _collect(self, deadline: float) -> dict[int, Outcome]:
        limit = time.monotonic() + deadline
        seen: set[int] = set()
        with self._done:
            while len(self._found) < self._size and (left := limit - time.monotonic()) > 0:
                self._done.wait(left)
                for rank in set(self._found) - seen:
                    seen.add(rank)
                    outcome = self._found[rank]
                    if isinstance(outcome, Failure):
                        limit = min(limit, time.monotonic() + GRACE[outcome.how])
            return dict(self._found)


def _stuck(thread: threading.Thread) -> Failure:
    frames, text = stacks.live(thread.ident or 0)
    place = stacks.where(frames)
    return Failure("waiting", "TimeoutError", place, text, TimeoutError(place))


def _join(threads: list[threading.Thread], patience: float = 1.0) -> None:
    _strays.extend(_still_alive(threads, patience))


def _wait_for_strays(patience: float = 5.0) -> None:
    _strays[:] = _still_alive(_strays, patience)
    if _strays:
        frames, _ = stacks.live(_strays[0].ident or 0)
        raise RuntimeError(
            f"{_strays[0].name} of an earlier run cannot be stopped ({stacks.where(frames)}), and a thread cannot "
            'be killed; use kind="processes" for a function that may hang outside a collective'
        )


def _still_alive(threads: list[threading.Thread], patience: float) -> list[threading.Thread]:
    limit = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
