"""What ranks try together, and any of them may call off: all come back to where they began, and can go on.

Who calls an attempt off says so in the store, and then interrupts the groups. The others wake from whatever they
waited for, find out why, and interrupt theirs. When each has said how it fared, the groups are made anew in place, and
what was under way in them is forgotten.
"""

from __future__ import annotations

import contextlib
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

from shardfn.collectives import messages
from shardfn.compat import process_groups
from shardfn.mesh import waiting, watchdog
from shardfn.mesh.axes import axis_groups, forget_runs
from shardfn.mesh.groups import cpu_group, groups_of_steps, world_of_thread
from shardfn.mesh.lanes import in_lane, lane

PATIENCE = 30.0  # seconds without a sign of life from a rank, after which it is given up


@dataclass
class Count:
    """How often the same ranks have tried something together in one lane, and which of it left notes in the store."""

    n: int = 0
    noted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fared:
    """How an attempt went on one rank.

    Attributes:
        how: `"off"`, it called it off; `"stopped"`, that stopped it; `"failed"`, something else did, and it has left.
        told: why.
        groups: names of its groups.
        changed: whether what it was given is no more as it was, so that it cannot try again.
    """

    how: Literal["off", "stopped", "failed"]
    told: str
    groups: tuple[str, ...] = ()
    changed: bool = False


class Attempt:
    """A context: the ranks try something once, all of them. No group of theirs may be used by another thread.

    Args:
        ranks: global ranks, of which this is one.
        what: it is, for messages.
    """

    def __init__(self, ranks: Sequence[int], what: str) -> None:
        self.ranks, self.what, self.rank = sorted(ranks), what, dist.get_rank()
        who = hashlib.blake2b(repr((lane(), self.ranks)).encode(), digest_size=8).hexdigest()
        self.count: Count = world_of_thread().agreed.setdefault(f"attempts {who}", Count())
        self.count.n += 1
        self.prefix, self.next = (f"shardfn/attempt/{who}/{self.count.n + later}" for later in (0, 1))
        self.finish = cpu_group(self.ranks, "finish")
        self.groups: list[Any] | None = None
        self.over, self.lock, self.lane = False, threading.Lock(), lane()
        self._store: Any = None

    def __enter__(self) -> Attempt:
        watchdog.looking[id(self)] = self._look
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self.lock:
            self.over = True
        watchdog.looking.pop(id(self), None)

    @property
    def store(self) -> Any:
        """This attempt's own way to the store: a blocked thread holds that of all others."""
        if self._store is None:
            self._store = process_groups.default_store().clone()
        return self._store

    def finished(self) -> None:
        """Returns when every rank has come here.

        Raises:
            RuntimeError: one has called the attempt off, or does not come.
        """
        with waiting.on("the end", self.finish.group_name, self.what):
            try:
                self.finish.barrier().wait()
            except RuntimeError:
                # Who is in the next attempt was let out of this one, and has broken the group since.
                if self.called_off() or not self._told(f"{self.next}/off"):
                    raise
        while self.count.noted:  # nobody reads these any more
            prefix = self.count.noted.pop()
            for key in ("off", "came", f"fared/{self.rank}", f"beat/{self.rank}"):
                self.store.delete_key(f"{prefix}/{key}")

    def called_off(self, within: float = 0.0) -> bool:
        """Whether a rank has called it off, as far as is known, or does so in some seconds."""
        limit = time.monotonic() + within
        while not self._told(f"{self.prefix}/off"):
            if time.monotonic() >= limit:
                return False
            time.sleep(0.01)
        return True

    def call_off(self, why: str) -> None:
        """Ends it, on all ranks, each of which has to `interrupt` its groups and to `meet` the others then."""
        self.store.set(f"{self.prefix}/off", why)

    def failed(self, why: str) -> None:
        """This rank leaves, for another reason."""
        with contextlib.suppress(RuntimeError):  # the store may have gone, with a rank
            self._note(Fared("failed", why))

    def interrupt(self) -> None:
        """Ends what is under way in the groups, once."""
        with self.lock:
            if self.over or self.groups is not None:
                return
            with in_lane(self.lane):
                self.groups = steps_groups(self.ranks)
            self._release()
            for one in self.groups:
                process_groups.interrupt(one)

    def meet(self, mine: Fared) -> dict[int, Fared]:
        """How each rank fared in an attempt that was called off; all of them come here, but those that have failed.

        Raises:
            RuntimeError: a rank does not come any more.
        """
        self._note(replace(mine, groups=tuple(one.group_name for one in self.groups or ())))
        pause, beats, looked = 0.001, dict.fromkeys(self.ranks, (0, time.monotonic())), time.monotonic()
        while self.store.add(f"{self.prefix}/came", 0) < len(self.ranks):
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
            if time.monotonic() - looked > PATIENCE / 10:
                looked = time.monotonic()
                self._refuse_lost(beats)
        every = self.store.multi_get([f"{self.prefix}/fared/{rank}" for rank in self.ranks])
        found = [Fared(**json.loads(text)) for text in every]
        return dict(zip(self.ranks, found, strict=True))

    def renew(self, fared: dict[int, Fared]) -> None:
        """Makes the groups work again that were interrupted; none of the ranks has failed.

        Raises:
            RuntimeError: a rank does not come any more.
        """
        with self.lock:
            self.over = True
        groups = self.groups or []
        names = [one.group_name for one in groups]
        for one, name in zip(groups, names, strict=True):
            without = [r for r in dist.get_process_group_ranks(one) if name not in fared[r].groups]
            if without:
                raise RuntimeError(f"{self.what}: ranks {without} have not made the group {name} that this rank has")
        messages.forget(groups)
        waiting.forget(names)
        world_of_thread().agreed.pop(lane(), None)  # some may have compared a stage, and others not yet
        forget_runs()
        gc.collect()
        for name, one in sorted(zip(names, groups, strict=True), key=lambda each: each[0]):
            process_groups.renew(one, f"{self.prefix}/again/{name}", self.store)

    def _told(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(self.store.check([key]))
        return False

    def _note(self, fared: Fared) -> None:
        said = asdict(replace(fared, told=fared.told[:2000]))
        self.store.set(f"{self.prefix}/fared/{self.rank}", json.dumps(said))
        self.store.add(f"{self.prefix}/came", 1)
        self.count.noted.append(self.prefix)

    def _release(self) -> None:
        told = f"{self.what} was called off: {self.store.get(f'{self.prefix}/off').decode()}"
        waiting.release([one.group_name for one in self.groups or ()], told)

    def _look(self, store: Any) -> None:
        """Wakes this rank, once a second, from another thread: not everybody who waits has noticed."""
        if store.check([f"{self.prefix}/off"]):
            store.add(f"{self.prefix}/beat/{self.rank}", 1)
            self.interrupt()
            self._release()

    def _refuse_lost(self, beats: dict[int, tuple[int, float]]) -> None:
        """Raises RuntimeError if a rank that has not said how it fared shows no sign of life."""
        now = time.monotonic()
        for rank in self.ranks:
            if rank == self.rank or self.store.check([f"{self.prefix}/fared/{rank}"]):
                continue
            beat, since = self.store.add(f"{self.prefix}/beat/{rank}", 0), beats[rank][1]
            if beat != beats[rank][0]:
                beats[rank] = beat, now
            elif now - since > PATIENCE:
                raise RuntimeError(
                    f"{self.what}: it was called off, and rank {rank} has not come back from it, nor given a sign of "
                    f"life for {now - since:.0f} s: it has ended; look at its output first"
                )


def steps_groups(ranks: Sequence[int]) -> list[Any]:
    """The groups, all of their ranks among these, that this thread's lane may wait in."""
    known = {str(one.group_name): one for one in groups_of_steps(list(ranks))}
    for name in axis_groups() - known.keys():
        one = process_groups.group_of(name)
        if one.size() > 1 and set(ranks).issuperset(dist.get_process_group_ranks(one)):
            known[name] = one
    return list(known.values())


def can_call_off(ranks: Sequence[int]) -> bool:
    """Whether these ranks, of which this is one, can come back from what they are in the middle of."""
    return dist.group.WORLD is not None and all(process_groups.renewable(one) for one in steps_groups(ranks))
