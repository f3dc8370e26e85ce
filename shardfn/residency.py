"""The ring: the few buffers that gathered parameters live in, however deep the model.

A slot is bytes, as many as the largest stage needs. What autograd saved of a stage's parameters are views of its slot;
they stay valid, because backward fills the same slot with the same numbers before it reads them. Those writes
go through an alias with a version counter of its own, so autograd does not take them for changes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn import compat
from shardfn.layout import Layout
from shardfn.link import Handle, Link, arrived, gather_apart, gather_by_hops, sends_apart
from shardfn.signature import Wire, Wires

Key = tuple[Any, ...]
LinkOf = Callable[[tuple[str, ...], Layout], Link | None]


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Tensors made inside may be used under any mode later on."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Saved:
    """What a slot held once, for a call that will read it; copied when the slot is filled with something else."""

    def __init__(self) -> None:
        self.copy: Tensor | None = None


class Slot:
    """A buffer for one stage's gathered parameters.

    Attributes:
        buffer: `[n]` bytes, of which parameters are views.
        write: the same memory, to fill it by.
        holds: what it holds or will hold when `works` have arrived; None for nothing in particular.
        sources: the shards that `holds` speaks of, so that no other tensor takes their identity.
        works: what is under way into it.
        views: parameters in it, by what they are views for.
        parts: what each wire fills of it.
        users: calls that keep it.
        readers: of what it holds now, where that is not gathered again.
    """

    __slots__ = ("buffer", "holds", "parts", "readers", "sources", "users", "views", "works", "write")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with lasting():
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.write = self.buffer.data
        self.holds: Key | None = None
        self.sources: tuple[Tensor, ...] = ()
        self.works: list[Handle] = []
        self.views: dict[tuple[Wire, bool], list[Tensor]] = {}
        self.parts: dict[Wire, Part] = {}
        self.users = 0
        self.readers: weakref.WeakSet[Saved] = weakref.WeakSet()

    def save(self) -> Saved:
        """Somebody will read what it holds now."""
        made = Saved()
        self.readers.add(made)
        return made

    @contextlib.contextmanager
    def showing(self, saved: Saved) -> Iterator[None]:
        """What it held when that was saved."""
        if saved.copy is None:
            yield
            return
        self.settle()
        with lasting():
            now = self.buffer.clone()
            self.write.copy_(saved.copy)
            try:
                yield
            finally:
                self.write.copy_(now)

    def fill(self, holds: Key, wires: Wires, shards: tuple[Tensor, ...], link_of: LinkOf) -> None:
        """Starts to gather shards into it, once what is under way has arrived."""
        self.settle()
        self.forget()
        if self.readers:
            with lasting():
                copy = self.buffer.clone()
            for reader in self.readers:
                reader.copy = copy
            self.readers.clear()
        for wire, values in zip(wires.each, shards, strict=True):
            if wire.moves:
                self._start(wire, values.detach(), link_of)
        self.holds, self.sources = holds, shards

    def _start(self, wire: Wire, values: Tensor, link_of: LinkOf) -> None:
        part, placement = self.part(wire), wire.layout.placement
        axis = link_of(placement.axes, wire.layout)
        one = values.dtype == wire.dtype and values.is_contiguous() and not wire.whole
        part.apart = bool(axis and one and sends_apart(axis, "all_gather"))
        if axis is None:
            part.own.copy_(values)
            return
        last = axis.axis.index == axis.axis.size - 1
        if part.apart:
            for start, stop in part.shared:
                part.own[start:stop].copy_(values[start:stop])
            work = gather_apart(part.region, values.view(torch.uint8), wire.tag, axis, wire.dtype)
        else:
            part.own.copy_(values)
            if last:
                part.tail.copy_(wire.tag)
            hops = [axis]
            if placement.hops:
                hops = [hop for name in reversed(placement.axes) if (hop := link_of((name,), wire.layout)) is not None]
            work = gather_by_hops(part.region, axis.axis.index, hops, wire.dtype)
        self.works.append(_Arrival(work, axis.group_names[0], part.tail, wire, axis.checks and not last))

    def part(self, wire: Wire) -> Part:
        """The part of it that one wire fills."""
        found = self.parts.get(wire)
        if found is None:
            with lasting():
                found = self.parts[wire] = _part(self.write[wire.start : wire.stop], wire)
        return found

    def settle(self) -> None:
        """Waits for what is under way."""
        works, self.works = self.works, []
        for work in works:
            work.wait()

    def forget(self) -> None:
        """What it holds shall not be used again."""
        self.holds, self.sources = None, ()


@dataclass
class Part:
    """The bytes of one buffer in a slot.

    Attributes:
        region: all of them.
        own: this rank's piece, in its dtype.
        tail: the end of the last piece.
        apart: whether this rank's piece stays where it is, but for parameters that are cut.
        shared: where in the piece these are.
        inner: the parameters that are not cut: number, first element in the piece, elements, shape.
    """

    region: Tensor
    own: Tensor
    tail: Tensor
    shared: list[tuple[int, int]]
    inner: list[tuple[int, int, int, tuple[int, ...]]]
    apart: bool = False


def _part(region: Tensor, wire: Wire) -> Part:
    layout = wire.layout
    index = layout.grid.index(compat.global_rank(), layout.placement.axes)
    own = region.view(wire.dtype).view(layout.size, -1)[index]
    cuts = layout.cuts[index]
    whole = [(k, at, stop - start) for k, start, stop, at in cuts if stop - start == layout.entries[k].numel]
    shared = [(at, at + stop - start) for k, start, stop, at in cuts if stop - start < layout.entries[k].numel]
    inner = [(k, at, length, layout.entries[k].shape) for k, at, length in whole]
    return Part(region, own, region[len(region) - len(wire.tag) :], shared, inner)


class _Arrival:
    """A gather that looks whether what came is what was meant."""

    __slots__ = ("work", "group", "tail", "wire", "checks")  # noqa: RUF023

    def __init__(self, work: Handle, group: str, tail: Tensor, wire: Wire, checks: bool) -> None:
        self.work, self.group, self.tail, self.wire, self.checks = work, group, tail, wire, checks

    def wait(self) -> None:
        arrived(self.work, "all_gather", self.group, self.wire.layout.stage)
        if not self.checks:
            return
        tag, layout = self.wire.tag, self.wire.layout
        if self.tail.device.type != "cpu":
            compat.assert_on_device((self.tail == tag.to(self.tail.device)).all(), "ranks run different stages")
        elif not torch.equal(self.tail, tag):
            other = bytes(self.tail[8:].tolist()).decode(errors="replace").strip()
            raise RuntimeError(
                f"it gathers for {bytes(tag[8:].tolist()).decode(errors='replace').strip()}, but the last rank along "
                f"{' x '.join(layout.placement.axes)} for {other or 'another stage'}: ranks run different stages. "
                f"A branch around a stage goes the same way on every rank"
            )


def whole_parameters(
    slot: Slot | None, wires: Wires, shards: Sequence[Tensor], needs: Sequence[bool]
) -> list[list[Tensor]]:
    """Each shard's parameters, as leaves of autograd: views of the slot, or of the shard itself."""
    return [
        _of_slot(slot, wire, values, need) if slot and wire.moves else _leaves(wire.layout, values, need)
        for wire, values, need in zip(wires.each, shards, needs, strict=False)
    ]


def _leaves(layout: Layout, whole: Tensor, need: bool) -> list[Tensor]:
    with lasting():
        return [view.detach().requires_grad_(need) for view in layout.views(whole.detach())]


def _untouched(p: Tensor, need: bool) -> bool:
    """Whether a function that it was lent to left it as it was."""
    return p.requires_grad is need and not p._backward_hooks and p.grad is None


def _of_slot(slot: Slot, wire: Wire, values: Tensor, need: bool) -> list[Tensor]:
    known: list[Tensor] | None = slot.views.get((wire, need))
    if known is None or not all(map(_untouched, known, [need] * len(known))):
        buffer = slot.buffer[wire.start : wire.stop].view(wire.dtype)
        known = slot.views[(wire, need)] = _leaves(wire.layout, buffer, need)
    part = slot.part(wire)
    if part.apart:
        with lasting():
            known, own = list(known), values.detach()
            for number, at, length, shape in part.inner:
                known[number] = own[at : at + length].view(shape).requires_grad_(need)
    return known


class Ring:
    """Slots that stage calls take in turn, and slots that calls keep from forward to backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: list[Slot] = []
        self.spare: list[Slot] = []
        self.lent = 0  # bytes of the slots that are kept
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
        best = min(fitting, key=lambda slot: slot.buffer.numel(), default=None) or Slot(nbytes, self.device)
        if fitting:
            self.spare.remove(best)
        self.lent += best.buffer.numel()
        return best

    def give_back(self, slot: Slot) -> None:
        """The end of `keep`."""
        slot.forget()
        self.lent -= slot.buffer.numel()
        self.spare.append(slot)

    def nbytes(self) -> int:
        """Of all slots."""
        return self.lent + sum(slot.buffer.numel() for slot in (*self.slots, *self.spare))

    def reserve(self, nbytes: int) -> None:
        """Stages of this size are to be expected: the slots are made large enough at once."""
        self.largest = max(self.largest, nbytes)
