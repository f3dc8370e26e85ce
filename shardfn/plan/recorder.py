"""Records a program on a simulated device: its works in order, and the memory held meanwhile."""

from __future__ import annotations

import bisect
import contextlib
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives.ledger import Record, attribution, ledger
from shardfn.compat import autograd, process_groups
from shardfn.compat.dispatch import tensors_in
from shardfn.compat.flops import flops_of, traffic_of
from shardfn.compat.replacing import replaced
from shardfn.plan.places import LocationFinder, SourceLocation
from shardfn.plan.schedule import Work
from shardfn.simulated.clocks import HOST
from shardfn.simulated.device import Device, Listener
from shardfn.simulated.operations import NAME, launches, second
from shardfn.tiers.tensors import ALIGNMENT, on_disk


@dataclass(eq=False)
class MemoryBlock:
    """The memory of one tensor, with all its views.

    Attributes:
        nbytes: its size.
        tier: `"device"`, `"host"` or `"disk"`.
        place: where it was made.
        stage: the stage for which it was made.
        kind: of the arguments of a step: their kind; otherwise empty.
        ended: the pass that had come when it was freed; empty while it is not.
    """

    nbytes: int
    tier: str
    place: SourceLocation
    stage: str
    kind: str = ""
    ended: str = ""


@dataclass(eq=False)
class OpenWork:
    """A work that may still grow."""

    kind: str
    stage: str
    phase: str
    stream: int
    where: str
    after: set[int] = field(default_factory=set)
    launches: int = 0
    flops: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    moved: int = 0
    sent: int = 0
    record: Record | None = None
    ranks: tuple[int, ...] = ()

    def work(self, per_node: int, order: dict[int, int]) -> Work:
        """Returns the finished work of a plan; `order` numbers the streams."""
        record = self.record
        return Work(
            self.kind, self.stage, self.phase, order.get(self.stream, 0), tuple(sorted(self.after)), self.launches,
            dict(self.flops), self.moved, () if record is None else record.axis, max(1, len(self.ranks)),
            max(1, len({rank // per_node for rank in self.ranks})),
            "" if record is None else str(record.dtype).removeprefix("torch."),
            self.sent, record is not None and record.scheduled, self.where,
        )  # fmt: skip


Event = tuple[int, int, MemoryBlock]
"""A change of the memory: the position of the work during which it came, the change in bytes, and of what."""


class _Records(list[Record]):
    """A ledger's records, each of which is passed on to a recorder."""

    def __init__(self, recorder: PlanRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def append(self, entry: Record) -> None:
        super().append(entry)
        self._recorder.recorded(entry)


class PlanRecorder(Listener):
    """Records a program, as the device reports it.

    Attributes:
        kind: the kind of device whose memory is told from the host's.
        works: what was launched while it listened.
        events: how the memory changed meanwhile, in order.
        assumed: what the user's code read on the host meanwhile, what else was taken for granted, and where.
        blocks: all memory that is held now, by the number of its storage.
        device: which tells it.
    """

    kind = NAME
    device: Device

    def __init__(self) -> None:
        self.works: list[OpenWork] = []
        self.events: list[Event] = []
        self.assumed: dict[str, None] = {}
        self.blocks: dict[int, MemoryBlock] = {}
        self._references: dict[int, Any] = {}
        self._lock = threading.RLock()
        self._on, self._repeats = False, 1
        self._begin()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which launches are recorded, after a reset."""
        self._begin()
        self._known |= {stream: dict(clock) for stream, clock in self.device.clocks.all().items()}
        with ledger() as log:
            log.records = _Records(self)
            self._on = True
            try:
                yield
            finally:
                self._on = False
                self.works += self._announced

    def paused(self) -> Any:
        """A context in which launches are not recorded."""
        return replaced(self, _on=False)

    def repeated(self, times: int) -> Any:
        """A context in which operations count as often, or not at all; memory is that of one time."""
        return replaced(self, _repeats=times)

    def _begin(self) -> None:
        self.works, self.events, self.assumed, self.places = [], [], {}, LocationFinder()
        self._announced: deque[OpenWork] = deque()
        self._known: defaultdict[int, dict[int, int]] = defaultdict(dict)  # of each stream, when its last work began
        self._times: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))

    # --- what the device tells ---

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes an operation, and the memory of its results."""
        if func.is_view:
            return
        with self._lock:
            outs = [x for x in tensors_in(out) if x.device.type == self.kind]
            inputs = [x for x in tensors_in(args, kwargs) if x.device.type == self.kind]
            new = [x for x in (*outs, *inputs) if self._changed(x)]
            counts = self._on and self._repeats and launches(func)
            if not counts and not new:
                return
            place = self.places.current_location(attribution.stage)
            if counts:
                draft = self._open("compute", place)
                draft.moved += self._repeats * traffic_of(func, args, kwargs, out)
                if flops := self._repeats * flops_of(func, args, kwargs, out):
                    draft.flops[str(inputs[0].dtype).removeprefix("torch.")] += flops
            for x in new:
                self._hold(x, place)

    def copied(self, into: Tensor, x: Tensor) -> None:
        """Notes a copy between the host and the device."""
        with self._lock:
            if self._on:
                self._open("copy", self.places.current_location(attribution.stage), into.nbytes)
            self.note_memory(into)

    def sent(self, group: str, stream: int) -> None:
        """Notes that a collective was launched: the first of those that the ledger has heard of."""
        with self._lock:
            if not self._on:
                return
            if self._announced:
                draft = self._announced.popleft()
                draft.stream = stream
                draft.ranks = tuple(dist.get_process_group_ranks(process_groups.group_of(group)))
                self.works.append(draft)
                position = len(self.works) - 1
            else:  # several may make up one that the ledger knows
                candidates = (i for i in range(len(self.works) - 1, -1, -1) if self.works[i].record is not None)
                position = next((i for i in candidates if self.works[i].stream == stream), -1)
                if position < 0:
                    return  # it connects ranks, or compares them: it is no part of the program
            self.works[position].launches += 1
            self._date(stream, position)

    def note_host_read(self, kind: str) -> None:
        """Notes that the user's code reads numbers on the host, or a size that depends on them."""
        with self._lock:
            if kind != "cpu collective" and not kind.endswith(f"->{self.kind}"):
                where = self.places.asks()
                if where:
                    self.assumed[f"{kind} at {where}"] = None

    def on_host(self, tensors: Iterable[Tensor]) -> None:
        """Notes that a run has the memory of these tensors on the host."""
        with self._lock:
            for x in tensors:
                if (block := self.find(x)) is not None and block.tier == "device":
                    block.tier = "host"

    def assume(self, what: str) -> None:
        """Notes something that depends on numbers, with the line of the user's code."""
        with self._lock:
            self.assumed[f"{what} at {self.places.current_location('').where}"] = None

    def note_memory(self, x: Tensor) -> None:
        """Notes memory."""
        with self._lock:
            if self._changed(x):
                self._hold(x, self.places.current_location(attribution.stage))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that memory was freed, or allocated, for a storage that is known."""
        with self._lock:
            block = self.blocks.get(storage._cdata)
            if block is not None and block.tier != "disk":
                self._happens(storage.nbytes() - block.nbytes, block)
                block.nbytes = storage.nbytes()

    def recorded(self, entry: Record) -> None:
        """Records a collective that the ledger announces."""
        with self._lock:
            if not self._on:
                return
            place = self.places.current_location(entry.stage)
            phase = place.phase if place.phase == "update" else "backward" if entry.backward else place.phase
            draft = OpenWork(entry.op, entry.stage, phase, HOST, place.where, sent=entry.bytes, record=entry)
            self._announced.append(draft)

    # --- works ---

    def _open(self, kind: str, place: SourceLocation, sent: int = 0) -> OpenWork:
        """Returns the work for an operation: the last one if nothing comes between, or a new one."""
        clocks, stream, stage = self.device.clocks, self.device.stream(), attribution.stage
        waits = self._waits(stream)
        last = self.works[-1] if self.works else None
        if (
            last is None
            or kind != "compute"
            or (last.kind, last.stage, last.phase, last.stream) != (kind, stage, place.phase, stream)
            or waits
            or stream in clocks.marked
        ):
            last = OpenWork(kind, stage, place.phase, stream, place.where, set(waits))
            self.works.append(last)
            self._date(stream, len(self.works) - 1, waits=False)
        last.launches += self._repeats
        last.sent += self._repeats * sent
        return last

    def _date(self, stream: int, position: int, waits: bool = True) -> None:
        """Notes when, by its stream's clock, a work began."""
        if waits:
            self.works[position].after |= self._waits(stream)
        times, positions = self._times[stream]
        times.append(self.device.clocks.known(stream).get(stream, 0))
        positions.append(position)
        self.device.clocks.marked.discard(stream)

    def _waits(self, stream: int) -> set[int]:
        """Returns the works of other streams for which this stream has begun to wait since its last work."""
        known, awaited = self._known[stream], set()
        for other, time in self.device.clocks.known(stream).items():
            if other in (stream, HOST) or known.get(other, 0) >= time:
                continue
            known[other] = time
            times, positions = self._times[other]
            index = bisect.bisect_right(times, time) - 1
            if index >= 0:
                awaited.add(positions[index])
        return awaited

    # --- memory ---

    def _changed(self, x: Tensor) -> bool:
        """Whether a tensor's memory is new, or has grown. What caches kept from before is new when it is used."""
        block = self.blocks.get(autograd.storage_of(x))
        if block is None:
            return x not in second
        return block.tier != "disk" and block.nbytes != x.untyped_storage().nbytes()

    def _hold(self, x: Tensor, place: SourceLocation) -> None:
        number, storage = autograd.storage_of(x), x.untyped_storage()
        nbytes, block = int(storage.nbytes()), self.blocks.get(number)
        if block is not None:
            self._happens(nbytes - block.nbytes, block)
            block.nbytes = nbytes
            return
        tier = "device" if x.device.type == self.kind else "disk" if on_disk(x) else "host"
        if tier == "disk":
            nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        block = self.blocks[number] = MemoryBlock(nbytes, tier, place, attribution.stage)
        self._happens(nbytes, block)
        # Torch keeps the object of a storage that a weak reference names as long as the storage.
        self._references[number] = weakref.ref(storage, lambda _: self._freed(number))

    def _freed(self, number: int) -> None:
        with self._lock:
            self._references.pop(number, None)
            block = self.blocks.pop(number, None)
            if block is not None:
                block.ended = self.works[-1].phase if self.works else "forward"
                self._happens(-block.nbytes, block)

    def _happens(self, change: int, block: MemoryBlock) -> None:
        if self._on:
            self.events.append((len(self.works) - 1, change, block))

    def find(self, x: Tensor) -> MemoryBlock | None:
        """Returns the memory of a tensor on the device or host, after recording it if it is new."""
        if x.device.type not in (self.kind, "cpu"):
            return None
        with self._lock:
            if self._changed(x):
                self._hold(x, SourceLocation("forward", "", ""))
            return self.blocks[autograd.storage_of(x)]
