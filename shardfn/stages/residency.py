"""Which slot holds a stage's gathered parameters, and until when."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch

from shardfn.collectives.into_buffers import Communicator
from shardfn.collectives.ledger import attributed_to, record_buffers, recording
from shardfn.mesh import waiting
from shardfn.stages.gather_stream import GatherStream
from shardfn.stages.ring import Key, Means, Ring, Slot
from shardfn.stages.tape import Claim, Secondary, StageRun, Tape, identities
from shardfn.tiers.offload import DiskPrefetch


class Residency:
    """The slots of one engine, and who keeps them.

    Attributes:
        ring: the slots.
        until_backward: slots that calls keep from forward to backward.
        until_step_end: slots that calls keep until the end of the step.
        dropped: claims of calls that no longer exist. The garbage collector only appends here: it runs on any thread,
            in the middle of anything, where waiting or writing is not safe.
        secondary: pieces that forward left for backward to gather from.
        count: slots taken from the ring by calls that no backward follows.
        means: what fills the slots.
    """

    def __init__(self, device: torch.device, communicator_of: Callable[[tuple[str, ...]], Communicator | None]) -> None:
        self.ring = Ring(device)
        stream = None if device.type in ("cpu", "meta") else GatherStream(device)
        self.means = Means(communicator_of, DiskPrefetch(), stream)
        self.until_backward: dict[Key, Slot] = {}
        self.until_step_end: dict[Key, Slot] = {}
        self.dropped: deque[Claim] = deque()
        self.secondary: weakref.WeakValueDictionary[Key, Secondary] = weakref.WeakValueDictionary()
        self.count = 0

    def take(self, tape: Tape | None, run: StageRun, slots: int, busy: Slot | None = None) -> bool:
        """Gives a run the slot that holds its parameters, or else starts to fill one; False if that slot is busy."""
        if run.keep:
            store = self.until_backward if run.keep is True else self.until_step_end
            run.slot = store.get(run.key)
            if run.slot is None:
                run.slot = store[run.key] = self.ring.outside(run.plan.nbytes)
                self.fill(run)
            return True
        run.slot = self.ring.find(run.key)
        if run.slot is None:
            counter = self if tape is None else tape
            slot = self.ring.at(counter.count, slots, run.plan.nbytes, busy)
            if slot is None:
                return False
            counter.count += 1
            run.slot = slot
            self.fill(run)
        return True

    def gather(self, run: StageRun) -> None:
        """Waits until a run's parameters are in its slot.

        Raises:
            RuntimeError: ranks gathered different stages, or a rank is gone.
        """
        slot = run.slot
        if slot is None:
            return
        try:
            if slot.holds != run.key:
                self.fill(run)
            slot.settle()
        except RuntimeError as error:
            slot.forget()
            raise RuntimeError(
                f"stage {run.signature.name}: gathering its parameters failed on this rank: {error}"
            ) from waiting.cause(error)

    def fill(self, run: StageRun) -> None:
        """Starts to gather a run's parameters into its slot."""
        assert run.slot is not None, "a run that moves bytes has a slot"
        if recording():
            held = {id(piece): piece.nbytes for secondary in self.secondary.values() for piece in secondary.shards}
            record_buffers(self.ring.nbytes() + sum(held.values()))
        with attributed_to(run.plan.stage):
            if run.secondary is None:
                ready = run.ready if self.means.stream is not None and identities(run.shards) == run.key[-1] else None
                run.slot.fill(run.key, run.plan, run.shards, self.means, ready)
            else:
                run.slot.fill(run.key, run.secondary.plan, run.secondary.shards, self.means)
                run.slot.sources = run.shards

    def used(self, run: StageRun) -> None:
        """Notes that a run does not use its slot any more, once the accelerator has done what it was given so far."""
        if self.means.stream is not None and run.slot is not None and not run.slot.busy:
            run.slot.free = self.means.stream.end_of_use()

    def leave(self, run: StageRun) -> None:
        """Keeps pieces from which backward gathers, if they are larger than the shards."""
        plan = run.plan.secondary
        if run.secondary is not None or plan is None or run.slot is None:
            return
        shards = [
            shard if gather is secondary else run.slot.part(secondary).own.clone()
            for gather, secondary, shard in zip(run.plan.each, plan.each, run.shards, strict=True)
        ]
        run.secondary = self.secondary[run.key] = Secondary(plan, tuple(shards))

    def claim(self, run: StageRun, call: object) -> None:
        """Keeps a run's slot until its backward, or until its call is garbage-collected."""
        if run.keep is True and run.slot is not None:
            run.claim = Claim(run, run.slot)
            weakref.finalize(call, self.dropped.append, run.claim).atexit = False

    def release(self, run: StageRun) -> None:
        """Gives a slot that was kept for backward back, when its last run is done."""
        if run.claim is not None:
            self._release(run.claim)

    def reclaim(self, tape: Tape | None) -> None:
        """Releases the slots of calls that were garbage-collected, except those on a tape that still grows.

        What later calls on that tape find kept must be the same on every rank, whenever garbage was collected there.
        """
        while self.dropped and (tape is None or self.dropped[0].key[0] != tape.number):
            self._release(self.dropped.popleft())

    def _release(self, claim: Claim) -> None:
        slot = claim.end()
        if slot is not None:
            slot.users -= 1
            if slot.users == 0:
                self.until_backward.pop(claim.key, None)
                self.ring.give_back(slot)

    def end(self) -> None:
        """Ends a step: nothing that it gathered is used again."""
        self.means.disk.give_up()
        self.reclaim(None)
        for slot in self.until_step_end.values():
            self.ring.give_back(slot)
        self.until_step_end.clear()
        # These were gathered ahead for calls that did not keep them, or never came.
        for key in [key for key, slot in self.until_backward.items() if slot.users == 0]:
            self.ring.give_back(self.until_backward.pop(key))
        for slot in self.ring.slots:
            slot.give_back()
