"""Residency: in which slot a stage's gathered parameters are, and until when."""

from __future__ import annotations

import weakref
from collections import deque

import torch

from shardfn.collectives.ledger import attributed_to, record_buffers, recording
from shardfn.mesh import waiting
from shardfn.stages.ring import CommunicatorOf, Key, Ring, Slot
from shardfn.stages.tape import Secondary, StageRun, Tape


class Residency:
    """The slots of one engine, and what keeps them.

    Attributes:
        ring: the slots.
        until_backward: those that calls keep from forward to backward.
        until_step_end: those that calls keep until the step is over.
        secondary: pieces that forward left for backward to gather from.
        count: of slots taken from the ring by calls that no backward follows.
        dropped: runs of calls that are gone, and had no backward.
    """

    def __init__(self, device: torch.device, communicator_of: CommunicatorOf) -> None:
        self.ring, self.communicator_of = Ring(device), communicator_of
        self.until_backward: dict[Key, Slot] = {}
        self.until_step_end: dict[Key, Slot] = {}
        self.secondary: weakref.WeakValueDictionary[Key, Secondary] = weakref.WeakValueDictionary()
        self.count = 0
        self.dropped: deque[StageRun] = deque()

    def take(self, tape: Tape | None, run: StageRun, slots: int, busy: Slot | None = None) -> bool:
        """Finds the slot that holds what a run needs, or else fills one; False if that one is busy."""
        if run.keep:
            store = self.until_backward if run.keep is True else self.until_step_end
            run.slot = store.get(run.key)
            if run.slot is None:
                run.slot = store[run.key] = self.ring.keep(run.plan.nbytes)
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
        """Until a run's parameters are in its slot.

        Raises:
            RuntimeError: what came is not what was meant, or a rank is gone.
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
            held = {id(piece): piece.nbytes for one in self.secondary.values() for piece in one.shards}
            record_buffers(self.ring.nbytes() + sum(held.values()))
        with attributed_to(run.plan.stage):
            if run.secondary is None:
                run.slot.fill(run.key, run.plan, run.shards, self.communicator_of)
            else:
                run.slot.fill(run.key, run.secondary.plan, run.secondary.shards, self.communicator_of)
                run.slot.sources = run.shards

    def leave(self, run: StageRun) -> None:
        """Copies what the next gathers of a run's parameters come from, where these are cut less than the shards."""
        plan = run.plan.secondary
        if run.secondary is not None or plan is None or run.slot is None:
            return
        shards = [
            shard if gather is secondary else run.slot.part(secondary).own.clone()
            for gather, secondary, shard in zip(run.plan.each, plan.each, run.shards, strict=True)
        ]
        run.secondary = self.secondary[run.key] = Secondary(plan, tuple(shards))

    def release(self, run: StageRun) -> None:
        """A slot that was kept for backward goes back when its last call is done."""
        slot = run.slot
        if run.keep is True and slot is not None:
            run.slot, run.keep = None, False
            slot.users -= 1
            if slot.users == 0:
                self.until_backward.pop(run.key, None)
                self.ring.give_back(slot)

    def drop(self, run: StageRun) -> None:
        """The call of a run is gone."""
        if run.keep is True and run.slot is not None:
            self.dropped.append(run)

    def forget_dropped(self, tape: Tape) -> None:
        """Releases what calls that are gone kept, but on this tape, where later calls find it on every rank."""
        for _ in range(len(self.dropped)):
            run = self.dropped.popleft()
            if run.key[0] == tape.number:
                self.dropped.append(run)
            else:
                self.release(run)

    def end(self) -> None:
        """A step is over: nothing that it gathered is used again."""
        for slot in self.until_step_end.values():
            self.ring.give_back(slot)
        self.until_step_end.clear()
        # What was gathered ahead for calls that did not keep it, or never came.
        for key in [key for key, slot in self.until_backward.items() if slot.users == 0]:
            self.ring.give_back(self.until_backward.pop(key))
        for slot in self.ring.slots:
            slot.give_back()
