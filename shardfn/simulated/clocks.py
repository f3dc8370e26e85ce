"""Vector clocks of a simulated accelerator's streams, which find unordered uses of the same memory.

Each stream counts its operations and remembers, for every other stream, up to which of its operations it has waited
(Lamport 1978; Fidge 1988). The host is a stream, too. Two uses of the same bytes, of which one is a write, must be
ordered by these clocks; otherwise their order on a real device is undefined.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from shardfn.compat import autograd

T = TypeVar("T")

HOST = 0  # the host's number among the streams
_numbers = itertools.count(HOST + 1)
_LATER = 64  # operations launched after an event's until `query` finds that it has happened

Clock = dict[int, int]


def _merge_clocks(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


@dataclass(frozen=True)
class StorageUse:
    """One use of some bytes of a storage.

    Attributes:
        start: the first byte.
        stop: the end.
        stream: number of the stream.
        time: of the stream's own clock.
        writes: whether the bytes are written.
        what: the operation and its line.
    """

    start: int
    stop: int
    stream: int
    time: int
    writes: bool
    what: str

    def before(self, clock: Clock) -> bool:
        """Whether what has this clock comes after it."""
        return clock.get(self.stream, 0) >= self.time


@dataclass
class Uses:
    """The uses of one storage that later ones may have to come after.

    Attributes:
        stream: on which the memory was allocated, and may be used again once it is freed.
        recorded: streams named to `record_stream`, for which the allocator waits before memory is used again.
        name: for messages.
        number: of the storage, if another stream uses it.
    """

    stream: int
    name: str
    each: list[StorageUse] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    number: int = 0


@dataclass
class Point:
    """A point in a stream's work.

    Attributes:
        clock: what has happened by then.
        launched: number of operations that had been launched on the device.
        capture: number of the graph that was being captured on the stream; 0 for none.
    """

    clock: Clock
    launched: int
    capture: int = 0


def extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a strided tensor in its storage, and the end of the last."""
    if x.numel() == 0:
        return 0, 0
    first = int(x.storage_offset()) * x.element_size()
    last = sum((n - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
    return first, first + (last + 1) * x.element_size()


class ByStorage(Generic[T]):
    """Values by the storage of a tensor, until it is freed.

    Torch drops the Python object of a storage when nothing in Python refers to it, and makes another one later, so that
    is no key; the number of the C++ object is one, as long as a weak reference keeps it from being used again.
    """

    def __init__(self, freed: Callable[[T], None] = lambda value: None) -> None:
        self._values: dict[int, tuple[Any, T]] = {}
        self._freed, self._limit = freed, 512

    def __getitem__(self, x: Tensor) -> T:
        return self._values[autograd.storage_of(x)][1]

    def __contains__(self, x: Tensor) -> bool:
        return autograd.storage_of(x) in self._values

    def get(self, x: Tensor) -> T | None:
        """The value for the storage of a tensor."""
        return self._values.get(autograd.storage_of(x), (None, None))[1]

    def __setitem__(self, x: Tensor, value: T) -> None:
        if len(self._values) > self._limit:
            self.forget_freed(list(self._values))
            self._limit = 2 * len(self._values) + 512
        self._values[autograd.storage_of(x)] = autograd.weak_storage(x), value

    def value_of(self, storage: torch.UntypedStorage) -> T | None:
        """The value for a storage."""
        return self._values.get(storage._cdata, (None, None))[1]

    def forget_freed(self, numbers: Iterable[int]) -> None:
        """Drops the values of those storages that were freed."""
        for number in numbers:
            found = self._values.get(number)
            if found is not None and found[0].expired():
                self._values.pop(number, None)  # another thread may have done so
                self._freed(found[1])


class Clocks:
    """The clocks of all streams of a process, and the uses of all storages.

    Attributes:
        races: found so far: the later use, the earlier one, and the bytes' name.
        launched: number of operations launched on the device.
        marked: streams of which a point was taken since they last launched something.
    """

    def __init__(self, where: Callable[[], str], watches: bool = True) -> None:
        self.where, self.watches = where, watches
        self.marked: set[int] = set()
        self.races: list[tuple[str, str]] = []
        self.launched = 0
        self._lock = threading.RLock()
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)  # caches keep streams of earlier simulations
        self._storages: ByStorage[Uses] = ByStorage(self._freed)
        self._abroad: set[int] = set()  # storages that other streams use than the one that may use them again
        self._captures = itertools.count(1)
        self._capture = 0
        self._captured: dict[int, int] = {}  # streams on which a graph is captured, and their times when they joined

    def stream(self) -> int:
        """The number of a new stream."""
        return next(_numbers)

    # --- order ---

    def launched_until(self, stream: int) -> Point:
        """The point that the stream's work has reached, as launched."""
        with self._lock:
            self.marked.add(stream)
            capture = self._capture if stream in self._captured else 0
            return Point(dict(self._clocks[stream]), self.launched, capture)

    def wait(self, stream: int, point: Point) -> None:
        """Orders the stream's further work after a point; by waiting for captured work a stream joins the capture.

        Raises:
            RuntimeError: one of them belongs to a capture, and the other cannot.
        """
        with self._lock:
            if point.capture != self._capture or (stream in self._captured) != bool(point.capture):
                self._join(stream, point)
            _merge_clocks(self._clocks[stream], point.clock)

    def _join(self, stream: int, point: Point) -> None:
        if point.capture and point.capture == self._capture and stream != HOST:
            self._captured[stream] = self._clocks[stream].get(stream, 0)
        elif point.capture or stream in self._captured:
            raise RuntimeError(
                f"a wait at {self.where()} leads into a capture, or out of it: work in a graph can only wait for work "
                f"in the same graph, and nothing outside can wait for it"
            )

    def begin_capture(self, stream: int) -> int:
        """Begins to capture a graph on a stream; returns the number of the capture."""
        with self._lock:
            self._capture = next(self._captures)
            self._captured = {stream: self._clocks[stream].get(stream, 0)}
            return self._capture

    def captured(self, stream: int) -> bool:
        """Whether the work of a stream goes into a graph that is being captured."""
        with self._lock:
            return stream in self._captured

    def end_capture(self, stream: int) -> list[int]:
        """Ends it; returns the streams that joined it, and whose work nothing on the first stream waits for."""
        with self._lock:
            known = self._clocks[stream]
            times = {other: self._clocks[other].get(other, 0) for other in self._captured}
            loose = [s for s, time in times.items() if s != stream and time > max(known.get(s, 0), self._captured[s])]
            self._capture, self._captured = 0, {}
            _merge_clocks(self._clocks[HOST], known)  # nothing has run, so nothing has to wait for it
            return loose

    def synchronize(self, stream: int) -> None:
        """The host waits for all work of a stream."""
        self.wait(HOST, self.launched_until(stream))

    def synchronize_all(self) -> None:
        """The host waits for all work."""
        with self._lock:
            for clock in list(self._clocks.values()):
                _merge_clocks(self._clocks[HOST], clock)

    def happened(self, point: Point) -> bool:
        """Whether the host finds, by asking, that a point has been reached; it then knows it."""
        with self._lock:
            known = self._clocks[HOST]
            if any(known.get(stream, 0) < time for stream, time in point.clock.items()):
                if self.launched < point.launched + _LATER:
                    return False
                _merge_clocks(known, point.clock)
            return True

    def known(self, stream: int) -> Clock:
        """The clock of a stream: for each stream, the last operation that its next one comes after."""
        with self._lock:
            return self._clocks[stream]

    def all(self) -> dict[int, Clock]:
        """The clock of each stream, by its number."""
        with self._lock:
            return dict(self._clocks)

    # --- uses ---

    def use(self, stream: int, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Enters an operation of a stream, and notes what it races with."""
        with self._lock:
            if self.watches:
                self.note_freed()
            clock = self._clocks[stream]
            if stream != HOST:
                if self._captured and stream not in self._captured:
                    raise RuntimeError(f"{what} at {self.where()}: a graph is captured, but not on this stream")
                _merge_clocks(clock, self._clocks[HOST])  # launched after all that the host has waited for
                self.launched += 1
            time = clock[stream] = clock.get(stream, 0) + 1
            if not self.watches:
                return
            label = f"{what} at {self.where()}"
            for tensors, writing in ((reads, False), (writes, True)):
                for x in tensors:
                    self._enter(x, StorageUse(*extent(x), stream, time, writing, label), clock)

    def _enter(self, x: Tensor, use: StorageUse, clock: Clock) -> None:
        uses = self._storages.get(x)
        if uses is None:
            if use.stream == HOST:
                return  # the host's own memory, unless the device uses it, too
            uses = self._new(HOST if x.device.type == "cpu" else use.stream, x)
        kept = []
        for other in uses.each:
            apart = other.stop <= use.start or use.stop <= other.start
            ordered = other.before(clock) or other.stream == use.stream
            if not apart and not ordered and (use.writes or other.writes):
                self.races.append((use.what, f"{other.what}, of {uses.name}"))
            covered = use.start <= other.start and other.stop <= use.stop
            if not (covered and ordered and (use.writes or not other.writes)):
                kept.append(other)
        uses.each = [*kept, use]
        if uses.stream not in (HOST, use.stream) and use.stream != HOST:
            uses.number = autograd.storage_of(x)
            self._abroad.add(uses.number)

    def _new(self, stream: int, x: Tensor) -> Uses:
        uses = self._storages[x] = Uses(stream, f"{x.untyped_storage().nbytes()} bytes on {x.device}")
        return uses

    def allocated(self, stream: int, x: Tensor) -> None:
        """Enters memory that a stream has allocated."""
        with self._lock:
            if self.watches and x not in self._storages:
                self._new(stream, x)

    def resized(self, stream: int, storage: torch.UntypedStorage) -> None:
        """A storage's memory is freed, and a stream allocates other memory for it."""
        with self._lock:
            uses = self._storages.value_of(storage)
            if uses is not None and uses.stream != HOST:
                self._freed(uses)
                uses.stream, uses.each, uses.recorded = stream, [], set()
                uses.name = f"{storage.nbytes()} bytes, allocated anew"

    def record(self, x: Tensor, stream: int) -> None:
        """The allocator will wait for what the stream has been given so far before it uses the memory again."""
        with self._lock:
            if (uses := self._storages.get(x)) is not None:
                uses.recorded.add(stream)

    def note_freed(self) -> None:
        """Notes what was freed meanwhile."""
        with self._lock:
            self._storages.forget_freed(list(self._abroad))

    def _freed(self, uses: Uses) -> None:
        with self._lock:
            self._abroad.discard(uses.number)
            if uses.stream == HOST:
                return  # the allocator of pinned memory waits for copies by itself
            safe_streams = {uses.stream, HOST} | uses.recorded
            # The allocator waits for what recorded streams have been given by now, and so for what they wait for.
            clocks = [self._clocks[stream] for stream in safe_streams - {HOST}]
            for use in uses.each:
                safe = use.stream in safe_streams or any(use.before(clock) for clock in clocks)
                if not safe:
                    self.races.append((f"freed at {self.where()}", f"{use.what}, of {uses.name}"))


class Current(threading.local):
    """The current device of this thread, and its current stream on each device."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Any] = {}


def device_index(device: Any, current: int) -> int:
    """The index of a device, which may be given as torch allows: none, a number, a string or a device."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current if index is None else index
