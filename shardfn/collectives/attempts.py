"""Attempts: work of several ranks that any of them can abort, after which all can try again.

`accumulate(micro="auto")` uses them: a rank that runs out of memory aborts the attempt. It sets a key in the store and
interrupts its process groups. The other ranks wake from the collective that they wait for, read the reason, and
interrupt their groups. When each rank has reported its outcome, the groups are renewed in place, and the collectives
that were in flight are dropped.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

from shardfn.collectives import late_checks, messages
from shardfn.compat import process_groups
from shardfn.mesh import waiting, watchdog
from shardfn.mesh.axes import axis_groups, forget_runs
from shardfn.mesh.groups import cpu_group, groups_of_steps, world_of_thread
from shardfn.mesh.lanes import in_lane, lane

PATIENCE = 30.0  # seconds without a sign of life after which a rank is given up


@dataclass
class Count:
    """The number of attempts of the same ranks in one lane, and their key prefixes left in the store."""

    n: int = 0
    noted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fared:
    """The outcome of an attempt on one rank.

    Attributes:
        how: `"off"`: it aborted the attempt; `"stopped"`: it was stopped by that; `"failed"`: it left because of a
            different error.
        told: the reason.
        groups: names of the groups that it interrupted.
        changed: whether its input has been modified, so that it cannot try again.
    """

    how: Literal["off", "stopped", "failed"]
    told: str
    groups: tuple[str, ...] = ()
    changed: bool = False


class Attempt:
    """A context for one attempt of all ranks. No other thread may use these ranks' groups meanwhile.

    Args:
        ranks: global ranks; this rank is one of them.
        name: name of the attempt, for messages.
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self.ranks, self.what, self.rank = sorted(ranks), name, dist.get_rank()
        digest = hashlib.blake2b(repr((lane(), self.ranks)).encode(), digest_size=8).hexdigest()
        self.count: Count = world_of_thread().agreed.setdefault(f"attempts {digest}", Count())
        self.count.n += 1
        self.prefix, self.next = (f"shardfn/attempt/{digest}/{self.count.n + later}" for later in (0, 1))
        self.finish = cpu_group(self.ranks, "finish")
        self.groups: list[Any] | None = None
        # The watchdog thread may call `interrupt`: the lock keeps it from groups of an attempt that is over, and lets
        # only one thread interrupt them.
        self.over, self.lock, self.lane = False, threading.Lock(), lane()

    def __enter__(self) -> Attempt:
        watchdog.looking[id(self)] = self._poll
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self.lock:
            self.over = True
        watchdog.looking.pop(id(self), None)

    @functools.cached_property
    def store(self) -> Any:
        """A separate client of the store: the shared client blocks while any thread waits in it."""
        return process_groups.default_store().clone()

    def finished(self) -> None:
        """Waits until every rank has finished the attempt.

        Raises:
            RuntimeError: a rank has aborted the attempt, or does not come.
        """
        with waiting.on("the end", self.finish.group_name, self.what):
            try:
                self.finish.barrier().wait()
            except RuntimeError:
                # A rank that aborts the next attempt breaks the group, but it has passed this barrier: all ranks came.
                if self.called_off() or not self._is_set(f"{self.next}/off"):
                    raise
        while self.count.noted:  # all ranks have come here, so nobody reads these keys any more
            prefix = self.count.noted.pop()
            for key in ("off", "came", f"fared/{self.rank}", f"beat/{self.rank}"):
                self.store.delete_key(f"{prefix}/{key}")

    def called_off(self, timeout_s: float = 0.0) -> bool:
        """Whether a rank has aborted the attempt, or does so within `timeout_s`."""
        limit = time.monotonic() + timeout_s
        while not self._is_set(f"{self.prefix}/off"):
            if time.monotonic() >= limit:
                return False
            time.sleep(0.01)
        return True

    def call_off(self, reason: str) -> None:
        """Aborts the attempt on all ranks; each rank must then `interrupt` its groups and `wait_for_outcomes`."""
        self.store.set(f"{self.prefix}/off", reason)

    def failed(self, reason: str) -> None:
        """Reports that this rank leaves because of a different error."""
        with contextlib.suppress(RuntimeError):  # the store may have ended with a rank
            self._note(Fared("failed", reason))

    def interrupt(self) -> None:
        """Interrupts the collectives in flight in this lane's groups; only the first call has an effect."""
        with self.lock:
            if self.over or self.groups is not None:
                return
            with in_lane(self.lane):  # the watchdog thread is in no lane
                self.groups = steps_groups(self.ranks)
                late_checks.drop_checks()
            self._release()
            process_groups.interrupt(self.groups)

    def wait_for_outcomes(self, own_outcome: Fared) -> dict[int, Fared]:
        """Waits until all ranks have reported on an aborted attempt; returns the outcome of each.

        Raises:
            RuntimeError: a rank shows no sign of life any more.
        """
        self._note(replace(own_outcome, groups=tuple(group.group_name for group in self.groups or ())))
        pause, beats, checked = 0.001, dict.fromkeys(self.ranks, (0, time.monotonic())), time.monotonic()
        while self.store.add(f"{self.prefix}/came", 0) < len(self.ranks):
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
            if time.monotonic() - checked > PATIENCE / 10:
                checked = time.monotonic()
                self._refuse_lost(beats)
        reports = self.store.multi_get([f"{self.prefix}/fared/{rank}" for rank in self.ranks])
        outcomes = [Fared(**json.loads(text)) for text in reports]
        return dict(zip(self.ranks, outcomes, strict=True))

    def renew(self, fared: dict[int, Fared]) -> None:
        """Renews the interrupted groups, so that they work again; requires that no rank has failed.

        Raises:
            RuntimeError: a rank does not come any more.
        """
        with self.lock:
            self.over = True
        groups = self.groups or []
        names = [group.group_name for group in groups]
        for group, name in zip(groups, names, strict=True):
            missing = [r for r in dist.get_process_group_ranks(group) if name not in fared[r].groups]
            if missing:
                raise RuntimeError(f"{self.what}: ranks {missing} have not made the group {name} that this rank has")
        messages.reset_messages(groups)
        waiting.reset_waits(names)
        world_of_thread().agreed.pop(lane(), None)  # some ranks may have compared a stage already, and others not
        late_checks.drop_checks()
        forget_runs()
        gc.collect()
        for name, group in sorted(zip(names, groups, strict=True), key=lambda pair: pair[0]):
            process_groups.renew(group, f"{self.prefix}/again/{name}", self.store)

    def _is_set(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(self.store.check([key]))
        return False

    def _note(self, fared: Fared) -> None:
        report = asdict(replace(fared, told=fared.told[:2000]))
        self.store.set(f"{self.prefix}/fared/{self.rank}", json.dumps(report))
        self.store.add(f"{self.prefix}/came", 1)
        self.count.noted.append(self.prefix)

    def _release(self) -> None:
        reason = f"{self.what} was called off: {self.store.get(f'{self.prefix}/off').decode()}"
        waiting.release([group.group_name for group in self.groups or ()], reason)

    def _poll(self, store: Any) -> None:
        """Wakes this rank if the attempt was aborted; the watchdog thread calls it at every tick."""
        if store.check([f"{self.prefix}/off"]):
            store.add(f"{self.prefix}/beat/{self.rank}", 1)
            self.interrupt()
            self._release()

    def _refuse_lost(self, beats: dict[int, tuple[int, float]]) -> None:
        """Raises RuntimeError if a rank that has not reported shows no sign of life."""
        current_time = time.monotonic()
        for rank in self.ranks:
            if rank == self.rank or self.store.check([f"{self.prefix}/fared/{rank}"]):
                continue
            beat, since = self.store.add(f"{self.prefix}/beat/{rank}", 0), beats[rank][1]
            if beat != beats[rank][0]:
                beats[rank] = beat, current_time
            elif current_time - since > PATIENCE:
                raise RuntimeError(
                    f"{self.what}: it was aborted, and rank {rank} has not come back, nor given a sign of life "
                    f"for {current_time - since:.0f} s: it has ended; look at its output first"
                )


def steps_groups(ranks: Sequence[int]) -> list[Any]:
    """Returns the groups in which this thread's lane may wait, as far as all their ranks are among `ranks`."""
    groups = {str(group.group_name): group for group in groups_of_steps(list(ranks))}
    for name in axis_groups() - groups.keys():
        group = process_groups.group_of(name)
        if group.size() > 1 and set(ranks).issuperset(dist.get_process_group_ranks(group)):
            groups[name] = group
    return list(groups.values())


def can_call_off(ranks: Sequence[int]) -> bool:
    """Whether these ranks can recover from an interrupt: on gloo and NCCL, whose groups can be renewed."""
    return dist.group.WORLD is not None and all(process_groups.renewable(group) for group in steps_groups(ranks))
