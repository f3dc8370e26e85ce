"""Attempts: work that ranks do together and any of them may call off; all return to the start and can go on.

A rank that calls an attempt off sets a key in the store, and then interrupts the groups. The others wake from whatever
they waited for, learn why, and interrupt their groups. When each has reported its outcome, the groups are renewed in
place, and what was under way in them is forgotten.
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
    """How many attempts the same ranks have made in one lane, and which of them left keys in the store."""

    n: int = 0
    noted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fared:
    """The outcome of an attempt on one rank.

    Attributes:
        how: `"off"`: it called the attempt off; `"stopped"`: it was stopped by that; `"failed"`: it left because of
            another error.
        told: the reason.
        groups: names of its groups.
        changed: whether its input has been modified, so that it cannot try again.
    """

    how: Literal["off", "stopped", "failed"]
    told: str
    groups: tuple[str, ...] = ()
    changed: bool = False


class Attempt:
    """A context for one attempt of all ranks. No other thread may use any group of theirs meanwhile.

    Args:
        ranks: global ranks; this rank is one of them.
        what: name of the attempt, for messages.
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self.ranks, self.what, self.rank = sorted(ranks), name, dist.get_rank()
        digest = hashlib.blake2b(repr((lane(), self.ranks)).encode(), digest_size=8).hexdigest()
        self.count: Count = world_of_thread().agreed.setdefault(f"attempts {digest}", Count())
        self.count.n += 1
        self.prefix, self.next = (f"shardfn/attempt/{digest}/{self.count.n + later}" for later in (0, 1))
        self.finish = cpu_group(self.ranks, "finish")
        self.groups: list[Any] | None = None
        self.over, self.lock, self.lane = False, threading.Lock(), lane()

    def __enter__(self) -> Attempt:
        watchdog.looking[id(self)] = self._look
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self.lock:
            self.over = True
        watchdog.looking.pop(id(self), None)

    @functools.cached_property
    def store(self) -> Any:
        """This attempt's own client of the store: a blocked thread holds up the client that all others share."""
        return process_groups.default_store().clone()

    def finished(self) -> None:
        """Returns when every rank has come here.

        Raises:
            RuntimeError: a rank has called the attempt off, or does not come.
        """
        with waiting.on("the end", self.finish.group_name, self.what):
            try:
                self.finish.barrier().wait()
            except RuntimeError:
                # A rank in the next attempt has passed this barrier, so all had come; it broke the group afterwards.
                if self.called_off() or not self._told(f"{self.next}/off"):
                    raise
        while self.count.noted:  # all ranks have come here, so nobody reads these keys any more
            prefix = self.count.noted.pop()
            for key in ("off", "came", f"fared/{self.rank}", f"beat/{self.rank}"):
                self.store.delete_key(f"{prefix}/{key}")

    def called_off(self, timeout_s: float = 0.0) -> bool:
        """Whether a rank is known to have called it off, or does so within some seconds."""
        limit = time.monotonic() + timeout_s
        while not self._told(f"{self.prefix}/off"):
            if time.monotonic() >= limit:
                return False
            time.sleep(0.01)
        return True

    def call_off(self, reason: str) -> None:
        """Ends the attempt on all ranks, each of which must then `interrupt` its groups and `meet` the others."""
        self.store.set(f"{self.prefix}/off", reason)

    def failed(self, reason: str) -> None:
        """Reports that this rank leaves because of another error."""
        with contextlib.suppress(RuntimeError):  # the store may have ended with a rank
            self._note(Fared("failed", reason))

    def interrupt(self) -> None:
        """Interrupts what is under way in the groups; only the first call has an effect."""
        with self.lock:
            if self.over or self.groups is not None:
                return
            with in_lane(self.lane):
                self.groups = steps_groups(self.ranks)
                late_checks.forget()
            self._release()
            process_groups.interrupt(self.groups)

    def meet(self, own_outcome: Fared) -> dict[int, Fared]:
        """Returns how each rank fared in an attempt that was called off; waits until all have reported.

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
        """Makes the groups work again that were interrupted; requires that no rank has failed.

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
        messages.forget(groups)
        waiting.forget(names)
        world_of_thread().agreed.pop(lane(), None)  # some ranks may have compared a stage already, and others not
        late_checks.forget()
        forget_runs()
        gc.collect()
        for name, group in sorted(zip(names, groups, strict=True), key=lambda pair: pair[0]):
            process_groups.renew(group, f"{self.prefix}/again/{name}", self.store)

    def _told(self, key: str) -> bool:
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

    def _look(self, store: Any) -> None:
        """Wakes this rank if the attempt was called off; the watching thread calls it at every tick."""
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
                    f"{self.what}: it was called off, and rank {rank} has not come back from it, nor given a sign of "
                    f"life for {current_time - since:.0f} s: it has ended; look at its output first"
                )


def steps_groups(ranks: Sequence[int]) -> list[Any]:
    """Returns the groups that this thread's lane may wait in, all of whose ranks are among these."""
    groups = {str(group.group_name): group for group in groups_of_steps(list(ranks))}
    for name in axis_groups() - groups.keys():
        group = process_groups.group_of(name)
        if group.size() > 1 and set(ranks).issuperset(dist.get_process_group_ranks(group)):
            groups[name] = group
    return list(groups.values())


def can_call_off(ranks: Sequence[int]) -> bool:
    """Whether these ranks, with this one among them, can recover when they are interrupted."""
    return dist.group.WORLD is not None and all(process_groups.renewable(group) for group in steps_groups(ranks))
