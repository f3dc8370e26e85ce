"""Gathers a stage's parameters into one buffer, which lives as long as something refers to it.

On an accelerator a buffer is allocated on the compute stream. The gather stream waits for all work that the compute
stream had been given by then, and the compute stream waits for the gather before it reads. So memory that the host
frees can be allocated again on the compute stream, without `record_stream`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.collectives.compressed import zero_padding
from shardfn.collectives.into_buffers import (
    Communicator,
    Handle,
    Purpose,
    all_gather,
    arrived,
    gather_by_hops,
    purpose_of,
    transport,
)
from shardfn.collectives.late_checks import check
from shardfn.compat import devices, functorch
from shardfn.compat.autograd import second_storage, storage_of
from shardfn.mesh import waiting
from shardfn.quant.packed import Packed
from shardfn.stages.buffers import Buffer, Pool
from shardfn.stages.gather_plan import Gather, GatherPlan
from shardfn.stages.gather_stream import Arrival, Copied, GatherStream
from shardfn.tiers.offload import DiskPrefetch
from shardfn.tiers.transfers import copy_streams


class Gathering:
    """The resources for gathers of all stages that one lane runs on one mesh: communicators, streams and memory.

    Attributes:
        communicator_of: the communicator along some axes; None if there is one rank along them.
        disk: reads of shards from disk.
        stream: the stream on which gathers start; None on a CPU.
        pool: buffers for gathered parameters, reused on a CPU.
        decoded: buffers for decoded quantized parameters, likewise.
    """

    def __init__(self, device: torch.device, communicator_of: Callable[[tuple[str, ...]], Communicator | None]) -> None:
        self.device, self.communicator_of = device, communicator_of
        self.disk, self.pool, self.decoded = DiskPrefetch(), Pool(device), Pool(device)
        self.stream = None if device.type in ("cpu", "meta") else GatherStream(device)

    def room_for(self, packed: Packed, dtype: torch.dtype) -> Tensor | None:
        """Reused memory for a decoded quantized parameter; None where the allocator reuses memory, as on accelerators.

        Each call returns a new storage over this memory, so that later decoding there does not bump the version counter
        of an earlier parameter. The checker tracks values by their memory, so in a checked call it returns None.
        """
        plain = type(packed.values) is Tensor and not functorch.inside_transform()
        if not plain or self.device.type != "cpu" or recording.outer() is not None:
            return None
        nbytes = packed.numel * dtype.itemsize
        return second_storage(self.decoded.empty(nbytes, packed.values, keeps=True).part(0, nbytes, dtype).detach())


_left: deque[tuple[GatherStream, list[Handle], tuple[Tensor, ...]]] = deque()
"""Gathers that nobody waited for, and their memory. `__del__` only appends here, as it may run on any thread."""
devices.clears.append(_left.clear)


def free_left() -> None:
    """Frees the memory of gathers that nobody waited for, once their streams have passed them."""
    try:
        while not devices.capturing(_left[0][0].device):
            free(_left.popleft())
    except IndexError:  # none is left; another thread may have taken the last one
        return


def free(left: tuple[GatherStream, list[Handle], tuple[Tensor, ...]]) -> None:
    """Records the gather streams on memory, as the stream that it returns to has not waited for the gathers."""
    stream, _, memory = left
    streams = [stream.stream, stream.decoding]
    if any(x.device.type == "cpu" for x in memory):  # shards on the host or on disk
        streams.append(copy_streams(stream.device).copies_in)
    for x in memory:
        for writer in streams:
            _used_on(writer, x)


def _used_on(stream: Any, x: Tensor) -> None:
    if x.device.type != "cpu":  # shards may be on the host
        x.record_stream(stream)


@dataclass(frozen=True, eq=False)
class Secondary:
    """Larger shards of a stage's parameters, which forward keeps for backward (ZeRO++, Wang et al. 2023, section 3.2).

    Attributes:
        plan: the plan by which backward gathers them.
        shards: this rank's larger shard of each buffer.
    """

    plan: GatherPlan
    shards: tuple[Tensor, ...]


class Gathered:
    """A stage's full parameters, in flight until `wait`.

    Attributes:
        buffer: the buffer that they fill.
        bytes: its bytes in use, `[plan.nbytes]`.
        shards: the shards from which they are gathered.
        of: the shards of which the ids are in its key; kept alive, so that no new tensor gets one of these ids.
        version: version counter of the buffer when they arrived.
    """

    def __init__(
        self, plan: GatherPlan, shards: Sequence[Tensor], by: Gathering, again: bool, keeps: bool = False
    ) -> None:
        self.plan, self.shards, self.again = plan, shards, again
        self.of: Sequence[Tensor] = shards
        if _left:
            free_left()
        self.works: list[Handle] = []
        self.failed = ""  # why a wait failed
        self.version: int | None = None
        self.stream = by.stream
        self.made_on = None if by.stream is None else by.stream.compute_stream()
        self.arrival: Arrival | None = None
        self.buffer = by.pool.empty(plan.nbytes, shards[0], keeps)
        self.bytes = self.buffer.part(0, plan.nbytes, torch.uint8)
        self.buffer.under_way = True
        if by.stream is None:
            self._start(by)
        else:
            with by.stream.starting():
                try:
                    self._start(by)
                except BaseException:
                    self.works.append(Copied(by.stream))  # what it has enqueued may still write
                    raise

    def __del__(self) -> None:
        if self.works and self.stream is not None:
            _left.append((self.stream, self.works, (self.bytes, *self.shards)))

    def _start(self, by: Gathering) -> None:
        for gather, values in zip(self.plan.each, self.shards, strict=True):
            if not gather.moves:
                continue
            tier = gather.layout.placement.tiers.params
            if tier == "device":
                self._start_one(gather, values.detach(), by)
                continue
            with by.disk.arriving(tier, values.detach(), self.bytes.device) as piece:
                self._start_one(gather, piece, by)
        self.works += by.disk.copies()
        if by.stream is not None and any(gather.moves and gather.layout.size == 1 for gather in self.plan.each):
            self.works.append(Copied(by.stream))  # a copy on one rank is no collective, and returns no work

    def _start_one(self, gather: Gather, values: Tensor, by: Gathering) -> None:
        layout, wire = gather.layout, gather.wire
        comm = by.communicator_of(layout.placement.axes)
        index = 0 if comm is None else comm.axis.index
        piece_bounds = gather.piece(index)
        own_piece = self.buffer.part(*piece_bounds, gather.dtype if wire is None else torch.uint8)
        if wire is None or values.dtype == torch.uint8:
            own_piece.copy_(values, non_blocking=True)
        else:
            wire.write(zero_padding(values.to(own_piece.device, non_blocking=True), layout.holes[index]), own_piece)
        if comm is None:
            _decode_pieces(self.buffer, gather)
            return
        region = self.buffer.part(*gather.sent, torch.uint8)
        dtype = gather.dtype if wire is None else torch.uint8
        by_purpose = not layout.placement.hierarchical and transport("all_gather", comm) == "direct"
        if not by_purpose and index == comm.axis.size - 1:
            _tail(gather, region).copy_(_tag_on(gather, region.device))
        if layout.placement.hierarchical:
            hops = [hop for name in reversed(layout.placement.axes) if (hop := by.communicator_of((name,))) is not None]
            work = gather_by_hops(region, index, hops, dtype)
        else:
            piece = self.buffer.part(*piece_bounds, torch.uint8)
            work = all_gather(region, comm, dtype, piece, _purpose(gather, self.again).number)
        arrival = _CheckedGather(work, comm, gather, self.buffer, self.again, checks=not by_purpose)
        self.works.append(arrival if wire is None or by.stream is None else by.stream.decoded(arrival))

    def wait(self) -> Tensor:
        """Waits until the parameters are there; returns the buffer.

        Raises:
            RuntimeError: ranks gathered different stages, or a rank is gone.
        """
        if self.failed:
            raise RuntimeError(self.failed)
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            self.failed = f"stage {self.plan.stage!r}: gathering its parameters failed on this rank: {error}"
            raise RuntimeError(self.failed) from waiting.cause(error)
        works, self.works = self.works, []
        self.buffer.under_way = False
        if self.stream is not None and (current := self.stream.compute_stream()) != self.made_on:
            _used_on(current, self.bytes)
            if works:  # the stream to which this memory returns has not waited for them
                free((self.stream, works, (self.bytes, *self.shards)))
        if self.stream is not None:
            if self.arrival is None:
                self.arrival = Arrival(self.stream)
            self.arrival.before_reading(self.bytes)
        if self.version is None and not self.bytes.is_inference():
            self.version = self.bytes._version
        return self.bytes

    def written(self) -> bool:
        """Whether something has been written into the parameters since they came."""
        return self.version is not None and self.version != self.bytes._version

    def parameters(self, gather: Gather) -> list[Tensor]:
        """The parameters of one gather, as views."""
        return self.buffer.parameters(gather)

    def piece(self, gather: Gather, index: int) -> Tensor:
        """A copy of one rank's piece: numbers, or bytes in a quantized format."""
        return self.buffer.part(*gather.piece(index), gather.dtype if gather.wire is None else torch.uint8).clone()

    def storages(self) -> list[int]:
        """The storage that the parameters are in."""
        return [storage_of(self.bytes)]

    def offset_of(self, x: Tensor) -> int | None:
        """The byte offset of a tensor in the gathered bytes; None if it is in a different storage."""
        return offset_in(self.bytes, x)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The gathered bytes viewed as a dtype; waits for the gather."""
        self.wait()
        return self.buffer.part(0, self.plan.nbytes // dtype.itemsize * dtype.itemsize, dtype).detach()


def offset_in(memory: Tensor, x: Tensor) -> int | None:
    """The byte offset of `x` from the first element of `memory`; None if it is in a different storage."""
    if storage_of(x) != storage_of(memory):
        return None
    return int(x.storage_offset() * x.dtype.itemsize - memory.storage_offset() * memory.dtype.itemsize)


class _CheckedGather:
    """A gather in flight; its `wait` checks that ranks gathered the same stage, and decodes a quantized one."""

    __slots__ = ("again", "buffer", "checks", "gather", "group", "work")

    def __init__(
        self, work: Handle, comm: Communicator, gather: Gather, buffer: Buffer, again: bool, checks: bool
    ) -> None:
        self.work, self.group, self.gather, self.buffer = work, comm.gathers.group_name, gather, buffer
        self.again = again
        self.checks = checks and comm.checks and comm.axis.index < comm.axis.size - 1

    def wait(self) -> None:
        op = "second all_gather" if self.again else "all_gather"
        arrived(self.work, op, self.group, _purpose(self.gather, self.again))
        if self.checks:
            region = self.buffer.part(*self.gather.sent, torch.uint8)
            check(_tail(self.gather, region), functools.partial(_wrong, self.gather))
        if self.gather.wire is not None:
            _decode_pieces(self.buffer, self.gather)


def _decode_pieces(buffer: Buffer, gather: Gather) -> None:
    """Decodes pieces that were gathered in a quantized format."""
    if (wire := gather.wire) is None:
        return
    numbers = buffer.part(gather.start, gather.stop, gather.dtype).view(-1, wire.numel)
    encoded = buffer.part(*gather.sent, torch.uint8).view(len(numbers), -1)
    for start, decoded in wire.read_all(encoded, gather.dtype):
        numbers[start : start + len(decoded)].copy_(decoded)


def _tail(gather: Gather, region: Tensor) -> Tensor:
    return region[len(region) - len(gather.tag) :]


@devices.cached
def _tag_on(gather: Gather, device: torch.device) -> Tensor:
    return gather.tag.to(device)


@functools.cache
def _purpose(gather: Gather, again: bool) -> Purpose:
    layout, sent_as = gather.layout, gather.wire or gather.dtype
    return purpose_of(layout.stage, repr((again, layout.stage, layout.entries, layout.padded, sent_as)))


def _wrong(gather: Gather, tail: Tensor) -> str | None:
    """The message for a tag from the last rank that differs from this rank's; None if they are equal."""
    if torch.equal(tail, gather.tag):
        return None
    own_stage, last_stage = (bytes(x[8:].tolist()).decode(errors="replace").strip() for x in (gather.tag, tail))
    return (
        f"it gathers for {own_stage}, but the last rank along {' x '.join(gather.layout.placement.axes)} for "
        f"{last_stage or 'another stage'}: ranks run different stages. A branch around a stage goes the same way "
        f"on every rank, and one that has no use for it calls shardfn.skip(stage, params)"
    )
