"""The ring: the few buffers that hold gathered parameters, however deep the model.

A slot has as many bytes as the largest stage needs. What autograd saved of a stage's parameters are views of its slot;
they stay valid, because backward fills the same slot with the same numbers before it reads them. Slots are written
through an alias with a version counter of its own, so that autograd does not take the writes for changes.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives.capturing import capturing, written_by_graphs
from shardfn.collectives.into_buffers import (
    Communicator,
    Handle,
    Pieces,
    all_gather,
    arrived,
    gather_by_hops,
    gather_pieces,
    transport,
)
from shardfn.collectives.late_checks import check
from shardfn.compat import devices, functorch, process_groups
from shardfn.debugging import debugging
from shardfn.stages.compressed import zero_padding
from shardfn.stages.gather_stream import Copied, GatherStream
from shardfn.stages.signature import Gather, GatherPlan
from shardfn.tiers.offload import DiskPrefetch

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Means:
    """What brings shards into the slots of one engine.

    Attributes:
        communicator_of: the communicator along some axes; None if there is one rank along them.
        disk: reads of shards from disk.
        stream: the stream on which gathers start; None on the CPU.
    """

    communicator_of: Callable[[tuple[str, ...]], Communicator | None]
    disk: DiskPrefetch
    stream: GatherStream | None


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """A context in which new tensors are usable later under any mode, such as outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Saved:
    """The contents of a slot for a call that will read them; copied when the slot is filled with something else."""

    copy: Tensor | None = None


_left: deque[tuple[GatherStream, list[Handle], tuple[Tensor, ...]]] = deque()
"""Transfers that nobody waited for before their slot was collected, and their memory."""
devices.clears.append(_left.clear)


def _free_left() -> None:
    """Frees such memory, for the allocator to use again only after the transfers."""
    while _left and capturing() is None:
        try:
            stream, _, memory = _left.popleft()
        except IndexError:  # another thread took it
            return
        for x in memory:
            if x.device.type != "cpu":  # where shards may be
                x.record_stream(stream.stream)
                x.record_stream(stream.decoding)


class Slot:
    """A buffer for one stage's gathered parameters.

    Attributes:
        buffer: `[n]` bytes; parameters are views of them.
        write: the same memory, through which it is filled.
        holds: key of what it holds, or will hold when `works` have arrived; None for nothing in particular.
        sources: the shards in `holds`, kept alive so that no other tensor gets their ids.
        works: transfers into it that are under way.
        views: parameters in it, by gather, and whether they need a gradient.
        parts: by gather, the part of it that the gather fills.
        users: number of calls that keep it.
        readers: calls that will read what it holds now, without gathering it again.
        position: its position in the ring; None outside of the ring.
        busy: whether a function is running on what it holds, forward or backward.
        free: the event of an accelerator after which nothing uses it; None if there is none.
        stream: of an accelerator: the one on which its last gather started.
    """

    holds: Key | None = None
    sources: tuple[Tensor, ...] = ()
    users = 0
    readers: weakref.WeakSet[Saved] | None = None
    busy = False
    free: Any = None
    stream: GatherStream | None = None

    def __init__(self, nbytes: int, device: torch.device, position: weakref.ref[Position] | None = None) -> None:
        self.position = position
        self.works: list[Handle] = []
        with ordinary_tensors():
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.write = self.buffer.data
        self.views: dict[tuple[Gather, bool | None], Any] = {}
        self.parts: dict[Gather, SlotPart] = {}

    def __del__(self) -> None:
        if self.works and self.stream is not None:
            _left.append((self.stream, self.works, (self.buffer, *self.sources)))

    def save(self) -> Saved:
        """Notes that a call will read what the slot holds now."""
        saved = Saved()
        self.readers = weakref.WeakSet() if self.readers is None else self.readers
        self.readers.add(saved)
        return saved

    @contextlib.contextmanager
    def showing(self, saved: Saved) -> Iterator[None]:
        """A context in which the slot has its contents of the time of `save`."""
        if saved.copy is None:
            yield
            return
        self.settle()
        with ordinary_tensors():
            present = self.buffer.clone()
            self.write.copy_(saved.copy)
            try:
                yield
            finally:
                self.write.copy_(present)

    def fill(
        self, holds: Key, plan: GatherPlan, shards: tuple[Tensor, ...], by: Means, ready: Sequence[Any] | None = None
    ) -> None:
        """Starts to gather shards into the slot, after waiting for what is under way; if there is one, on a stream.

        That waits for the events `ready`, if they are known.
        """
        self.give_back()
        if _left:
            _free_left()
        position = self.position() if self.position is not None else None
        if position is not None and position.slot is not self:
            position.slot.give_back()
            position.slot = self
        if by.stream is None:
            self._start_all(plan, shards, by)
        else:
            self.stream = by.stream
            with by.stream.starting(self.free, ready):
                self._start_all(plan, shards, by)
        self.holds, self.sources = holds, shards

    def _start_all(self, plan: GatherPlan, shards: tuple[Tensor, ...], by: Means) -> None:
        batches: dict[tuple[str, ...], list[tuple[Gather, Tensor]]] = {}
        for gather, values in zip(plan.each, shards, strict=True):
            if not gather.moves:
                continue
            tier = gather.layout.placement.tiers.params
            if tier == "device":
                self._start(gather, values.detach(), by, batches)
                continue
            with by.disk.arriving(tier, values.detach(), self.buffer.device) as piece:
                self._start(gather, piece, by, batches)
        for axes, gathers in batches.items():
            axis = by.communicator_of(axes)
            assert axis is not None, "pieces go to other ranks"
            parts = [(self.part(gather), gather, values) for gather, values in gathers]
            buffers = [
                Pieces(part.region, values.view(torch.uint8), part.tag, gather.dtype) for part, gather, values in parts
            ]
            work = gather_pieces(buffers, axis)
            self.works += [_Arrival(work, axis, part, gather) for part, gather, _ in parts]
        self.works += by.disk.copies()
        if by.stream is not None and any(gather.moves and gather.layout.size == 1 for gather in plan.each):
            self.works.append(Copied(by.stream))  # what goes to no other rank has no work of its own

    def _start(
        self, gather: Gather, values: Tensor, by: Means, batches: dict[tuple[str, ...], list[tuple[Gather, Tensor]]]
    ) -> None:
        """Starts one gather, or adds it to `batches`, in which the gathers along the same axes start together."""
        part, placement, wire = self.part(gather), gather.layout.placement, gather.wire
        axis = by.communicator_of(placement.axes)
        if wire is None:
            in_place = not gather.whole and placement.tiers.params == "device"
            unchanged = in_place and values.dtype == gather.dtype and values.is_contiguous()
            part.in_pieces = bool(axis and unchanged and transport("all_gather", axis) == "direct")
            if part.in_pieces:
                batches.setdefault(placement.axes, []).append((gather, values))
                for start, stop in part.shared:
                    part.own[start:stop].copy_(values[start:stop])
                return
        if wire is None or values.dtype == torch.uint8:  # pieces left by an earlier gather are already encoded
            part.own.copy_(values, non_blocking=True)
        else:
            holes = gather.layout.holes[gather.layout.index(process_groups.global_rank())]
            wire.write(zero_padding(values.to(part.own.device, non_blocking=True), holes), part.own)
        if axis is None:
            if wire is not None:
                part.decode(gather)
            return
        if axis.axis.index == axis.axis.size - 1:
            part.tail.copy_(part.tag)
        dtype = gather.dtype if wire is None else torch.uint8
        if placement.hierarchical:
            hops = [hop for name in reversed(placement.axes) if (hop := by.communicator_of((name,))) is not None]
            work = gather_by_hops(part.region, axis.axis.index, hops, dtype)
        else:
            work = all_gather(part.region, axis, dtype, part.sent)
        arrival = _Arrival(work, axis, part, gather)
        self.works.append(arrival if wire is None or by.stream is None else by.stream.decoded(arrival))

    def part(self, gather: Gather) -> SlotPart:
        """The part of the slot that one gather fills."""
        part = self.parts.get(gather)
        if part is not None:
            return part
        layout, wire = gather.layout, gather.wire
        index = layout.index(process_groups.global_rank())
        with ordinary_tensors():
            region, decoded = self.write[gather.start : gather.stop], None
            numbers = region.view(gather.dtype)
            if wire is not None:
                decoded = numbers.view(-1, wire.numel)
                region = self.write[gather.encoded : gather.encoded + len(decoded) * wire.length]
            sent = region.view(layout.size, -1)[index]
            own = numbers.view(layout.size, -1)[index] if wire is None else sent
            tag = _tag(gather, self.write.device)
            tail = region[len(region) - len(tag) :]
        shared, inner = [], []
        for k, start, stop, at in layout.cuts[index] if wire is None else ():
            entry = layout.entries[k]
            if stop - start == entry.numel:
                inner.append((k, at, entry.numel, entry.shape))
            else:
                shared.append((at, at + stop - start))
        part = self.parts[gather] = SlotPart(region, own, sent, tail, tag, shared, inner, decoded=decoded)
        return part

    def settle(self) -> None:
        """Waits for the transfers under way."""
        works, self.works = self.works, []
        if works:
            self.free = None
        for work in works:
            work.wait()

    def forget(self) -> None:
        """Declares that the contents must not be used again."""
        self.holds, self.sources = None, ()

    def give_back(self) -> None:
        """Ends a loan: copies the contents for those who will read them, and forgets them.

        With `debugging.memory`, every number in it becomes nan or -1, so that a late read is noticed.
        """
        self.settle()
        self.forget()
        if self.readers is not None or debugging.memory:
            self.free = None
        if self.readers is not None:
            with ordinary_tensors():
                copy = self.buffer.clone()
            for reader in self.readers:
                reader.copy = copy
            self.readers = None
        if debugging.memory and not functorch.inside_transform():  # a transform would refuse the write
            with ordinary_tensors():
                self.write.fill_(255)

    def retire(self) -> None:
        """Ends its use: the allocator takes its memory again only after all that uses it, on any stream."""
        self.settle()
        if self.stream is not None:
            current = self.stream.module.current_stream(self.stream.device)
            if self.free is not None:
                current.wait_event(self.free)
            self.buffer.record_stream(current)  # another stream may have allocated it

    def alternates(self, other: Slot | None) -> bool:
        """Whether the two slots cannot hold something at the same time."""
        return other is not None and (other is self or (self.position is not None and self.position is other.position))


@dataclass
class SlotPart:
    """The bytes of one buffer in a slot.

    Attributes:
        region: all bytes that are gathered.
        own: this rank's piece of the region, in its dtype.
        sent: the same, as bytes.
        tail: the end of the last piece.
        tag: what is put there, on the device: a copy at every gather would make the host wait.
        shared: ranges in this rank's piece with parameters that pieces cut.
        inner: parameters that the piece holds whole: index, first element in the piece, number of elements, shape.
        in_pieces: whether only the `shared` ranges of this rank's piece are copied into the slot.
        decoded: where quantized pieces are decoded, `[pieces, n]`.
    """

    region: Tensor
    own: Tensor
    sent: Tensor
    tail: Tensor
    tag: Tensor
    shared: list[tuple[int, int]]
    inner: list[tuple[int, int, int, tuple[int, ...]]]
    in_pieces: bool = False
    decoded: Tensor | None = None

    def decode(self, gather: Gather) -> None:
        """Decodes pieces that were gathered in a quantized format."""
        if gather.wire is None or self.decoded is None:
            return
        for start, numbers in gather.wire.read_all(self.region.view(len(self.decoded), -1), gather.dtype):
            self.decoded[start : start + len(numbers)].copy_(numbers)


@devices.cached
def _tag(gather: Gather, device: torch.device) -> Tensor:
    return gather.tag.to(device)


class _Arrival:
    """A gather that checks, when it arrives, whether ranks gathered the same stage."""

    __slots__ = ("checks", "gather", "group", "part", "work")

    def __init__(self, work: Handle, axis: Communicator, part: SlotPart, gather: Gather) -> None:
        self.work, self.group, self.part, self.gather = work, axis.gathers.group_name, part, gather
        self.checks = axis.checks and axis.axis.index < axis.axis.size - 1

    def wait(self) -> None:
        arrived(self.work, "all_gather", self.group, self.gather.layout.stage)
        if self.checks:
            check(self.part.tail, functools.partial(_wrong, self.gather))  # which may be called much later
        self.part.decode(self.gather)


def _wrong(gather: Gather, tail: Tensor) -> str | None:
    """What is wrong with the tag that came with the last rank's piece."""
    if torch.equal(tail, gather.tag):
        return None
    ours, last = (bytes(x[8:].tolist()).decode(errors="replace").strip() for x in (gather.tag, tail))
    return (
        f"it gathers for {ours}, but the last rank along {' x '.join(gather.layout.placement.axes)} for "
        f"{last or 'another stage'}: ranks run different stages. A branch around a stage goes the same way "
        f"on every rank, and one that has no use for it calls shardfn.skip(stage, params)"
    )


class Position:
    """A position in the ring, where one slot holds something at a time.

    It is the same slot for all calls, unless one needs a larger one. With `debugging.memory` each call has its own
    slot, so that none finds the numbers of another in place of its own.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.slot = Slot(nbytes, device, weakref.ref(self))

    def next(self, nbytes: int, room: int) -> Slot:
        """A slot for another call, with at least `room` bytes."""
        slot = self.slot
        if slot.buffer.numel() < room:
            # Calls that still need the smaller slot keep it alive. Transfers into it must end before it is freed.
            slot.retire()
            slot.position = None
            self.slot = Slot(nbytes, slot.buffer.device, weakref.ref(self))
        elif debugging.memory and slot.parts:
            return Slot(nbytes, slot.buffer.device, weakref.ref(self))
        return self.slot


class Ring:
    """Slots that stage calls take in turn, and slots that calls keep from forward to backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        written_by_graphs(self)
        self.positions: list[Position] = []
        self.spare: list[Slot] = []
        self._lent: Any = weakref.WeakSet[Slot]()  # by `outside`; an error may leave some on their way
        self.largest = 0

    @property
    def slots(self) -> list[Slot]:
        """The slot at each position."""
        return [position.slot for position in self.positions]

    @property
    def lent(self) -> int:
        """Bytes of the slots lent by `outside`."""
        return sum(slot.buffer.numel() for slot in self._lent)

    def at(self, number: int, slots: int, nbytes: int, spared: Slot | None = None) -> Slot | None:
        """The slot for call `number` of a schedule with `slots` slots; None if it would replace `spared`.

        A running function keeps its slot: a call within its backward, such as from a checkpoint, gets the next free
        one.
        """
        self.largest = max(self.largest, nbytes)
        i = number % slots
        if i < len(self.positions) and self.positions[i].slot.busy:
            i = next((k for k, position in enumerate(self.positions) if not position.slot.busy), len(self.positions))
        while len(self.positions) <= i:
            self.positions.append(Position(self.largest, self.device))
        position = self.positions[i]
        return None if position.slot.alternates(spared) else position.next(self.largest, nbytes)

    def find(self, holds: Key) -> Slot | None:
        """The slot that already holds this; None if there is none."""
        for position in self.positions:
            if position.slot.holds == holds:
                return position.slot
        return None

    def outside(self, nbytes: int) -> Slot:
        """Lends a slot outside of the ring, until `give_back`."""
        fitting = [slot for slot in self.spare if slot.buffer.numel() >= nbytes]
        best = min(fitting, key=lambda slot: slot.buffer.numel(), default=None) or Slot(nbytes, self.device)
        if fitting:
            self.spare.remove(best)
        self._lent.add(best)
        return best

    def give_back(self, slot: Slot) -> None:
        """Ends a loan by `outside`."""
        slot.give_back()
        self._lent.discard(slot)
        # What a graph has used, it writes to in each of its runs.
        if not debugging.memory and not devices.capturing(self.device):
            self.spare.append(slot)

    def empty(self) -> None:
        """Waits for all that uses the slots that calls take in turn, on any stream, and forgets what they hold."""
        _free_left()
        for slot in self.slots:
            if slot.free is not None:
                self._stream().wait_event(slot.free)
            if slot.works or slot.holds is not None:
                slot.give_back()
            slot.free = None

    def used(self) -> None:
        """Notes that the current stream was given a graph, which uses these slots."""
        end = self._stream().record_event()
        for slot in self.slots:
            slot.free = end

    def leave(self) -> None:
        """Frees the slots that calls take in turn, as soon as nothing uses them."""
        self.empty()
        for slot in self.slots:
            slot.retire()
        self.positions.clear()

    def _stream(self) -> Any:
        return torch.get_device_module(self.device).current_stream(self.device)

    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.lent + sum(slot.buffer.numel() for slot in (*self.slots, *self.spare))

    def reserve(self, nbytes: int) -> None:
        """Makes new slots at least this large, for a stage that is still to come."""
        self.largest = max(self.largest, nbytes)
