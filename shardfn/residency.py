"""The ring: the few buffers that gathered parameters live in, however deep the model.

A slot is bytes, as many as the largest stage needs. What autograd saved of a stage's parameters are views of its slot;
they stay valid, because backward fills the same slot with the same numbers before it reads them. Those writes
go through an alias with a version counter of its own, so autograd does not take them for changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfn.link import Handle

Key = tuple[Any, ...]


class Slot:
    """A buffer for one stage's gathered parameters.

    Attributes:
        buffer: `[n]` bytes, of which parameters are views.
        write: the same memory, to fill it by.
        holds: what it holds or will hold when `works` have arrived; None for nothing in particular.
        sources: the shards that `holds` speaks of, so that no other tensor takes their identity.
        works: what is under way into it.
        views: parameters in it, by what they are views for.
        parts: pieces of it, by the wire that fills them.
        users: calls that keep it.
    """

    __slots__ = ("buffer", "holds", "parts", "sources", "users", "views", "works", "write")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.write = self.buffer.data
        self.holds: Key | None = None
        self.sources: tuple[Tensor, ...] = ()
        self.works: list[Handle] = []
        self.views: dict[Any, Any] = {}
        self.parts: dict[Any, Any] = {}
        self.users = 0

    def settle(self) -> None:
        """Waits for what is under way."""
        works, self.works = self.works, []
        for work in works:
            work.wait()

    def forget(self) -> None:
        """What it holds shall not be used again."""
        self.holds, self.sources = None, ()


class Ring:
    """Slots that stage calls take in turn, and slots that calls keep from forward to backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: list[Slot] = []
        self.spare: list[Slot] = []
        self.largest = 0

    def at(self, turn: int, slots: int, nbytes: int) -> Slot:
        """The slot for call number `turn` of a schedule with so many slots."""
        self.largest = max(self.largest, nbytes)
        i = turn % slots
        while len(self.slots) <= i:
            self.slots.append(Slot(self.largest, self.device))
        if self.slots[i].buffer.numel() < nbytes:
            # Calls that still need the smaller one keep it alive; it goes when they do.
            self.slots[i] = Slot(self.largest, self.device)
        return self.slots[i]

    def find(self, holds: Key) -> Slot | None:
        """The slot that holds this already."""
        for slot in self.slots:
            if slot.holds == holds:
                return slot
        return None

    def keep(self, nbytes: int) -> Slot:
        """A slot outside the ring, until it is given back."""
        fitting = [slot for slot in self.spare if slot.buffer.numel() >= nbytes]
        if not fitting:
            return Slot(nbytes, self.device)
        best = min(fitting, key=lambda slot: slot.buffer.numel())
        self.spare.remove(best)
        return best

    def give_back(self, slot: Slot) -> None:
        """The end of `keep`."""
        slot.forget()
        self.spare.append(slot)

    def reserve(self, nbytes: int) -> None:
        """Stages of this size are to be expected: the slots are made large enough at once."""
        self.largest = max(self.largest, nbytes)
