"""Gathers a stage's parameters into one buffer, which belongs to those that refer to it.

On a CPU fresh pages cost as much as a gather, so storages that nobody refers to any more are used again. On an
accelerator the allocator does the same: a buffer is allocated on the stream that computes, the gather's stream waits
for what that stream had been given by then, and the stream that computes waits for the gather before it reads. So
memory that the host frees may be allocated again on that stream, without noting which other streams used it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives.into_buffers import (
    Communicator,
    Handle,
    all_gather,
    arrived,
    gather_by_hops,
    purpose_of,
    transport,
)
from shardfn.collectives.late_checks import check
from shardfn.compat import devices
from shardfn.compat.autograd import storage_of, unused
from shardfn.stages.compressed import zero_padding
from shardfn.stages.gather_stream import Copied, GatherStream
from shardfn.stages.signature import Gather, GatherPlan
from shardfn.tiers.offload import DiskPrefetch


class Pool:
    """Storages on a CPU. One that nothing else refers to is handed out again; for a smaller request, too, if that is
    soon over.

    Attributes:
        most: how many were in use at the same time since the last `trim`.
    """

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.most = 0

    def empty(self, nbytes: int, keeps: bool) -> Tensor:
        """Bytes `[nbytes]` that nothing else refers to; with `keeps`, until backward."""
        free = unused(self.storages)
        self.most = max(self.most, len(self.storages) - len(free) + 1)
        fitting = [
            storage for storage in free if storage.nbytes() == nbytes or (storage.nbytes() > nbytes and not keeps)
        ]
        if fitting:
            storage = min(fitting, key=torch.UntypedStorage.nbytes)
        else:
            storage = torch.UntypedStorage(nbytes, device="cpu")
            if free:  # the largest of those that do not fit gives way
                self._drop([max(free, key=torch.UntypedStorage.nbytes)])
            self.storages.append(storage)
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (nbytes,))  # type: ignore[call-overload]

    def trim(self, most: int | None = None) -> None:
        """Gives memory back, except for so many storages; by default, as many as were in use at the same time."""
        kept, self.most = (self.most, 0) if most is None else (most, self.most)
        self._drop(sorted(unused(self.storages), key=torch.UntypedStorage.nbytes, reverse=True)[kept:])

    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.nbytes() for storage in self.storages)

    def _drop(self, gone: Sequence[torch.UntypedStorage]) -> None:
        self.storages = [s for s in self.storages if not any(s is other for other in gone)]


class Gathering:
    """What brings shards into buffers, for all stages that one lane runs on one mesh.

    Attributes:
        communicator_of: the communicator along some axes; None if there is one rank along them.
        disk: reads of shards from disk.
        stream: of an accelerator: the one on which gathers start.
        pool: memory on a CPU.
    """

    def __init__(self, device: torch.device, communicator_of: Callable[[tuple[str, ...]], Communicator | None]) -> None:
        self.device, self.communicator_of = device, communicator_of
        self.disk, self.pool = DiskPrefetch(), Pool()
        self.stream = None if device.type in ("cpu", "meta") else GatherStream(device)

    def empty(self, nbytes: int, like: Tensor, keeps: bool) -> Tensor:
        """A buffer of so many bytes, on the device of the mesh; with `keeps`, until backward."""
        if self.device.type == "cpu" and type(like) is Tensor:
            return self.pool.empty(nbytes, keeps)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


_left: deque[tuple[GatherStream, list[Handle], tuple[Tensor, ...]]] = deque()
"""Gathers that nobody waited for, and their memory. The garbage collector only takes a note: it runs on any thread."""
devices.clears.append(_left.clear)


def free_left() -> None:
    """Frees such memory, for the allocator to use again only after the gathers."""
    while _left and not devices.capturing(_left[0][0].device):
        try:
            left = _left.popleft()
        except IndexError:  # another thread took it
            return
        free(left)


def free(left: tuple[GatherStream, list[Handle], tuple[Tensor, ...]]) -> None:
    """Lets the allocator use memory again only after gathers for which its own stream has not waited."""
    stream, _, memory = left
    for x in memory:
        _used_on(stream.stream, x)
        _used_on(stream.decoding, x)


def _used_on(stream: Any, x: Tensor) -> None:
    if x.device.type != "cpu":  # where shards may be
        x.record_stream(stream)


@dataclass(frozen=True, eq=False)
class Secondary:
    """Larger pieces of a stage's parameters, which forward keeps for backward (ZeRO++, Wang et al. 2023, section 3.2).

    Attributes:
        plan: how they are gathered.
        shards: the pieces.
    """

    plan: GatherPlan
    shards: tuple[Tensor, ...]


class Gathered:
    """A stage's whole parameters, under way until `wait`.

    Attributes:
        buffer: bytes `[plan.nbytes]`.
        shards: the pieces from which it is gathered.
        of: the shards by which it is known, kept alive so that no other tensors are taken for them.
        version: of the buffer, once it is there.
    """

    def __init__(
        self, plan: GatherPlan, shards: Sequence[Tensor], by: Gathering, again: bool, keeps: bool = False
    ) -> None:
        self.plan, self.shards, self.again = plan, shards, again
        self.of: Sequence[Tensor] = shards
        if _left:
            free_left()
        self.works: list[Handle] = []
        self.version: int | None = None
        self.stream = by.stream
        self.made_on = None if by.stream is None else by.stream.now()
        with torch.inference_mode(False):  # training may find what inference has gathered
            self.buffer = by.empty(plan.nbytes, shards[0], keeps)
        if by.stream is None:
            self._start(by)
        else:
            with by.stream.starting():
                self._start(by)

    def __del__(self) -> None:
        if self.works and self.stream is not None:
            _left.append((self.stream, self.works, (self.buffer, *self.shards)))

    def _start(self, by: Gathering) -> None:
        for gather, values in zip(self.plan.each, self.shards, strict=True):
            if not gather.moves:
                continue
            tier = gather.layout.placement.tiers.params
            if tier == "device":
                self._start_one(gather, values.detach(), by)
                continue
            with by.disk.arriving(tier, values.detach(), self.buffer.device) as piece:
                self._start_one(gather, piece, by)
        self.works += by.disk.copies()
        if by.stream is not None and any(gather.moves and gather.layout.size == 1 for gather in self.plan.each):
            self.works.append(Copied(by.stream))  # what goes to no other rank has no work of its own

    def _start_one(self, gather: Gather, values: Tensor, by: Gathering) -> None:
        layout, wire = gather.layout, gather.wire
        comm = by.communicator_of(layout.placement.axes)
        region = region_of(self.buffer, gather)
        own = self.own(gather, region, 0 if comm is None else comm.axis.index)
        if wire is None or values.dtype == torch.uint8:
            own.copy_(values, non_blocking=True)
        else:
            holes = layout.holes[0 if comm is None else comm.axis.index]
            wire.write(zero_padding(values.to(own.device, non_blocking=True), holes), own)
        if comm is None:
            _decode(self.buffer, gather)
            return
        dtype = gather.dtype if wire is None else torch.uint8
        tagged = not layout.placement.hierarchical and transport("all_gather", comm) == "direct"
        if not tagged and comm.axis.index == comm.axis.size - 1:
            _tail(gather, region).copy_(_tag(gather, region.device))
        if layout.placement.hierarchical:
            hops = [hop for name in reversed(layout.placement.axes) if (hop := by.communicator_of((name,))) is not None]
            work = gather_by_hops(region, comm.axis.index, hops, dtype)
        else:
            work = all_gather(region, comm, dtype, own.view(torch.uint8), _purpose(gather, self.again))
        arrival = _Arrival(work, comm, gather, self.buffer, self.again, checks=not tagged)
        self.works.append(arrival if wire is None or by.stream is None else by.stream.decoded(arrival))

    @staticmethod
    def own(gather: Gather, region: Tensor, index: int) -> Tensor:
        """A piece of that: numbers, or bytes in a quantized format."""
        piece = region.view(gather.layout.size, -1)[index]
        return piece if gather.wire is not None else piece.view(gather.dtype)

    def wait(self) -> Tensor:
        """Waits until the parameters are there; returns the buffer.

        Raises:
            RuntimeError: ranks gathered different stages, or a rank is gone.
        """
        works, self.works = self.works, []
        for work in works:
            work.wait()
        if self.stream is not None and (now := self.stream.now()) != self.made_on:
            _used_on(now, self.buffer)
            if works:  # the stream to which this memory returns has not waited for them
                free((self.stream, works, (self.buffer, *self.shards)))
        if self.version is None and not self.buffer.is_inference():
            self.version = self.buffer._version
        return self.buffer

    def written(self) -> bool:
        """Whether something has been written into the parameters since they came."""
        return self.version is not None and self.version != self.buffer._version

    def parameters(self, gather: Gather) -> list[Tensor]:
        """The parameters of one gather, as views."""
        return gather.layout.views(self.buffer[gather.start : gather.stop].view(gather.dtype))

    def piece(self, gather: Gather, index: int) -> Tensor:
        """A copy of one rank's piece."""
        return self.own(gather, region_of(self.buffer, gather), index).clone()

    def storages(self) -> list[int]:
        """The memory that it lies in."""
        return [storage_of(self.buffer)]

    def offset_of(self, x: Tensor) -> int | None:
        """Where a tensor begins, in bytes; None if it does not lie in here."""
        return offset_in(self.buffer, x)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The parameters as numbers of a dtype, once they are there."""
        buffer = self.wait()
        return buffer[: len(buffer) // dtype.itemsize * dtype.itemsize].view(dtype)


def offset_in(own: Tensor, x: Tensor) -> int | None:
    """Where a tensor begins in the memory of another, in bytes from that one's beginning; None if it lies elsewhere."""
    if storage_of(x) != storage_of(own):
        return None
    return int(x.storage_offset() * x.dtype.itemsize - own.storage_offset() * own.dtype.itemsize)


class _Arrival:
    """A gather that, when it arrives, checks whether ranks gathered the same stage, and decodes it."""

    __slots__ = ("again", "buffer", "checks", "gather", "group", "work")

    def __init__(
        self, work: Handle, comm: Communicator, gather: Gather, buffer: Tensor, again: bool, checks: bool
    ) -> None:
        self.work, self.group, self.gather, self.buffer = work, comm.gathers.group_name, gather, buffer
        self.again = again
        self.checks = checks and comm.checks and comm.axis.index < comm.axis.size - 1

    def wait(self) -> None:
        op, stage = "second all_gather" if self.again else "all_gather", self.gather.layout.stage
        arrived(self.work, op, self.group, stage, _purpose(self.gather, self.again))
        if self.checks:
            check(_tail(self.gather, region_of(self.buffer, self.gather)), functools.partial(_wrong, self.gather))
        _decode(self.buffer, self.gather)


def region_of(buffer: Tensor, gather: Gather) -> Tensor:
    """The bytes that ranks send for one gather."""
    wire = gather.wire
    if wire is None:
        return buffer[gather.start : gather.stop]
    pieces = (gather.stop - gather.start) // (wire.numel * gather.dtype.itemsize)
    return buffer[gather.encoded : gather.encoded + pieces * wire.length]


def _decode(buffer: Tensor, gather: Gather) -> None:
    """Decodes pieces that were gathered in a quantized format."""
    if (wire := gather.wire) is None:
        return
    numbers = buffer[gather.start : gather.stop].view(gather.dtype).view(-1, wire.numel)
    for start, decoded in wire.read_all(region_of(buffer, gather).view(len(numbers), -1), gather.dtype):
        numbers[start : start + len(decoded)].copy_(decoded)


def _tail(gather: Gather, region: Tensor) -> Tensor:
    return region[len(region) - len(gather.tag) :]


@devices.cached
def _tag(gather: Gather, device: torch.device) -> Tensor:
    return gather.tag.to(device)


@functools.cache
def _purpose(gather: Gather, again: bool) -> int:
    layout = gather.layout
    return purpose_of(repr((again, layout.stage, layout.entries, layout.padded, gather.wire or gather.dtype)))


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
