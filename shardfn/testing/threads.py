"""Worlds whose ranks are in this process: threads, on torch's threaded process group, or pretended ones.

Every run on threads makes its own threads and groups. The ranks share torch's process-wide state: the default dtype,
the random number generator, and the level of forward-mode differentiation, so `jvp` needs processes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time

import torch
import torch.distributed as dist

from shardfn.compat import dynamo, process_groups
from shardfn.mesh.groups import forget_world
from shardfn.testing import errors, serialization, stacks, state
from shardfn.testing.errors import Failure, Outcome, failure_of, waiting

PATIENCE = 5.0  # seconds to wait for a thread that is leaving its world
_strays: list[threading.Thread] = []


class Threads:
    """Runs calls on `size` threads."""

    def __init__(self, size: int) -> None:
        self._size = size

    def run(self, call: bytes, deadline: float) -> list[Outcome]:
        """Runs a call and returns one outcome per rank.

        Raises:
            RuntimeError: a thread of an earlier run that hung is still running.
        """
        _strays[:] = _still_alive(_strays, PATIENCE)
        if _strays:
            frames, _ = stacks.live(_strays[0].ident or 0)
            raise RuntimeError(
                f"{_strays[0].name} of an earlier run cannot be stopped ({stacks.where(frames)}), and a thread cannot "
                'be killed; use kind="processes" for a function that may hang outside a collective'
            )
        # MKL detects the processor at its first call; if two threads make that call at once, one may get results with
        # half of the digits.
        for dtype in (torch.float32, torch.float64):
            torch.ones(8, dtype=dtype, device="cpu").sin()
        dynamo.free_graphs()
        with state.borrowed(), process_groups.threaded_groups():
            state.reset()
            return _ThreadedCall(self._size, call).outcomes(deadline)

    def close(self) -> None:
        """Does nothing: nothing outlives a run."""


class _ThreadedCall:
    """One call, on fresh threads."""

    def __init__(self, size: int, call: bytes) -> None:
        self._size = size
        self._call = call
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._outcomes: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._leaving = threading.Lock()
        self._over = False

    def outcomes(self, deadline: float) -> list[Outcome]:
        threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self._size)
        ]
        for thread in threads:
            thread.start()
        outcomes = self._wait(deadline)
        for rank, thread in enumerate(threads):
            if rank not in outcomes:
                outcomes[rank] = waiting(*stacks.live(thread.ident or 0))
        process_groups.release_threads()
        if self._leaving.acquire(timeout=PATIENCE):
            self._over = True
            self._leaving.release()
        _strays.extend(_still_alive(threads, 1.0))
        return [outcomes[rank] for rank in range(self._size)]

    def _rank(self, rank: int) -> None:
        try:
            dist.init_process_group("threaded", store=self._store, rank=rank, world_size=self._size)
            outcome = serialization.perform(self._call)
        except BaseException as error:
            outcome = failure_of(error)
        with self._leaving:
            # After the run this thread would see the process's own groups, which it must not destroy.
            if not self._over and dist.is_initialized():
                forget_world()
                dist.destroy_process_group()
        self._outcomes.put((rank, outcome))

    def _wait(self, deadline: float) -> dict[int, Outcome]:
        """The outcomes by rank, once all are there, at the deadline, or shortly after a first failure."""
        limit, outcomes, cut_short = time.monotonic() + deadline, dict[int, Outcome](), False
        while len(outcomes) < self._size and (left := limit - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                rank, outcome = self._outcomes.get(timeout=left)
                outcomes[rank] = outcome
            if not cut_short and any(isinstance(outcome, Failure) for outcome in outcomes.values()):
                cut_short, limit = True, min(limit, time.monotonic() + errors.GRACE)
        return outcomes


def _still_alive(threads: list[threading.Thread], patience: float) -> list[threading.Thread]:
    limit = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


class Fake:
    """Runs calls as some of the ranks of a world on torch's "fake" backend, which transfers nothing.

    Any size starts at once. Shapes are right and values are not. The deadline does not apply, because the ranks run
    one after the other.
    """

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
