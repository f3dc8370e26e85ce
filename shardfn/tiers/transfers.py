"""Transfers between disk and memory, by a few threads, into and out of a few buffers; and to and from an accelerator.

Copies between an accelerator and its host's memory are concurrent with the accelerator's computation.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import devices
from shardfn.debugging import debugging
from shardfn.mesh.planned import planned
from shardfn.tiers import mapping
from shardfn.tiers.tensors import ALIGNMENT, place_of

THREADS = 4  # they only wait for the device
AT_ONCE = 4 * 2**20  # bytes of one request
UNIT = 2**20  # a buffer's size is a multiple of it


def patience() -> float:
    """Seconds after which a transfer is given up: the environment's SHARDFN_DISK_TIMEOUT, or 300.

    Raises:
        ValueError: it is not a positive number.
    """
    text = os.environ.get("SHARDFN_DISK_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"SHARDFN_DISK_TIMEOUT must be a number of seconds above 0, got {text!r}")
    return min(seconds, threading.TIMEOUT_MAX)


class DirectBuffer:
    """Memory for direct I/O: aligned, and pinned if this process uses CUDA.

    Attributes:
        bytes: the memory.
        busy: an event of the accelerator, after which it may be used again.
    """

    def __init__(self, nbytes: int) -> None:
        # Pinned memory is rounded up to a power of two, so extra room would double it; and most of it begins at a page.
        pinned = devices.in_use() == "cuda"
        with torch.inference_mode(False):  # it outlives the caller's inference mode
            memory = _empty(nbytes + (0 if pinned else ALIGNMENT), pinned)
            if pinned and memory.data_ptr() % ALIGNMENT:
                del memory
                memory = _empty(nbytes + ALIGNMENT, pinned)
            first = -memory.data_ptr() % ALIGNMENT
            self.bytes = memory[first : first + nbytes]
        self.busy: Any = None


def _empty(nbytes: int, pinned: bool) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class Buffers:
    """This process's unused buffers by size, and the total bytes of all buffers."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._spare: dict[int, list[DirectBuffer]] = {}
        self.unlock()

    def unlock(self) -> None:
        """Gives a forked process a new lock: the inherited one may be held by another thread forever."""
        self._lock = threading.Lock()

    def free_unused(self) -> None:
        """Frees those that are unused."""
        with self._lock:
            self.nbytes -= sum(size * len(spare) for size, spare in self._spare.items())
            self._spare.clear()

    def acquire(self, nbytes: int) -> DirectBuffer:
        """Returns a buffer of at least `nbytes` bytes."""
        rounded = -(-nbytes // UNIT) * UNIT
        with self._lock:
            spare = self._spare.get(rounded)
            buffer = spare.pop(0) if spare else None  # free for longest, so least likely to be busy
            self.nbytes += 0 if buffer else rounded
        if buffer is None:
            return DirectBuffer(rounded)
        if buffer.busy is not None:
            buffer.busy.synchronize()
            buffer.busy = None
        return buffer

    def give_back(self, buffer: DirectBuffer, busy: Any = None) -> None:
        """Takes a buffer back, in use until the event `busy`. The debug mode fills it with bytes 255: nan, or -1."""
        if debugging.memory:
            if busy is not None:
                busy.synchronize()
            with torch.inference_mode(False), torch.no_grad():
                buffer.bytes.fill_(255)
        buffer.busy = busy
        with self._lock:
            self._spare.setdefault(len(buffer.bytes), []).append(buffer)


buffers = Buffers()
os.register_at_fork(after_in_child=buffers.unlock)
Move = Callable[[int, memoryview], None]


@dataclass(eq=False)
class _TransferPart:
    """One part of a transfer.

    Attributes:
        future: resolved when it has ended.
        move: reads or writes the bytes.
        offset: where in the file.
        bytes_: where in memory.
        keeps: owners of the memory and of the place on disk; released when it has ended.
        after: an event of an accelerator to wait for first.
    """

    future: Future[None]
    move: Move
    offset: int
    bytes_: memoryview
    keeps: Any
    after: Any

    def run(self) -> None:
        """Moves the bytes, unless the future was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            self.keeps = None
            return
        failed: BaseException | None = None
        try:
            if self.after is not None:
                self.after.synchronize()
            self.move(self.offset, self.bytes_)
        except BaseException as error:
            failed = error
        self.bytes_, self.keeps = memoryview(b""), None  # before the result: a waiter may free or reuse the memory
        if failed is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(failed)


_pools: dict[int, queue.SimpleQueue[_TransferPart]] = {}
_starting = threading.Lock()


def _pool() -> queue.SimpleQueue[_TransferPart]:
    """The task queue of this process's threads. Each process starts its own: threads do not survive a fork."""
    tasks = _pools.get(os.getpid())
    if tasks is not None:  # without the lock, which a fork may inherit locked
        return tasks
    with _starting:  # two first callers would start twice as many threads
        tasks = _pools.get(os.getpid())
        if tasks is None:
            tasks, as_here = queue.SimpleQueue(), devices.as_here()
            _pools[os.getpid()] = tasks
            for number in range(THREADS):
                name = f"shardfn-disk-{number}"
                # Daemon: a thread that hangs on a disk must not keep the process from ending.
                threading.Thread(target=_run_transfers, args=(tasks, as_here), name=name, daemon=True).start()
        return tasks


def _run_transfers(tasks: queue.SimpleQueue[_TransferPart], as_here: Callable[[], None]) -> None:
    as_here()
    while True:
        tasks.get().run()


def _when_done(parts: Sequence[Future[None]], act: Callable[[], None]) -> None:
    """Calls `act` once none of the parts is in flight: now, or on the thread that ends the last one."""
    for part in parts:
        if not part.done():
            part.add_done_callback(lambda _: _when_done(parts, act))
            return
    act()


class Transfer:
    """Bytes in flight; `wait` waits for them, or raises their error."""

    __slots__ = ("buffer", "parts", "what")

    def __init__(self, parts: list[Future[None]], buffer: DirectBuffer | None, description: str) -> None:
        self.parts, self.buffer, self.what = parts, buffer, description

    def wait(self) -> None:
        """Waits until they have arrived.

        Raises:
            RuntimeError: the transfer failed, or took too long.
        """
        for part in self.parts:
            try:
                part.result(patience())
            except TimeoutError as error:
                if part.done():  # the system's own ETIMEDOUT, not the wait's
                    raise RuntimeError(str(error.strerror or error)) from error
                raise RuntimeError(
                    f"{self.what} has taken more than {patience():g} s: the disk is too slow for it, or hangs; "
                    f"SHARDFN_DISK_TIMEOUT says how long to wait"
                ) from None
            except OSError as error:
                raise RuntimeError(str(error.strerror or error)) from error

    def give_back(self, busy: Any = None) -> None:
        """Returns the buffer, in use until the event `busy`; it is reused once no transfer into it is in flight."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            _when_done(self.parts, lambda: buffers.give_back(buffer, busy))

    def give_up(self) -> None:
        """Abandons the transfer: parts not begun are cancelled, those begun are waited for, and errors are ignored.

        Without the wait, a late write could overwrite what is written there next.
        """
        begun = [part for part in self.parts if not part.cancel()]
        futures.wait(begun, timeout=patience())
        self.give_back()


class PendingRead(Transfer):
    """A tensor's read from disk; `values` are its values in memory once it has arrived."""

    __slots__ = ("values",)

    values: Tensor

    def give_up(self) -> None:
        """Abandons the read without waiting for the parts that have begun."""
        for part in self.parts:
            part.cancel()
        self.give_back()


def reading(x: Tensor, min_bytes: int = 0, target: DirectBuffer | None = None) -> PendingRead | None:
    """Starts to read a tensor into `target`, or a buffer of at least `min_bytes`; None if in memory or empty."""
    place = place_of(x)
    if place is None or place.start == place.stop:
        return None
    file, first = place.stretch.file, place.start // ALIGNMENT * ALIGNMENT
    last = -(-place.stop // ALIGNMENT) * ALIGNMENT
    buffer = buffers.acquire(max(last - first, min_bytes)) if target is None else None
    memory = (target or buffer).bytes[: last - first]  # type: ignore[union-attr]
    parts = _start_parts(file.read, place.stretch.offset + first, memory, x)
    coming = PendingRead(parts, buffer, f"reading {x.nbytes / 1e6:.1f} MB of {file.kind} in {file.folder!r}")
    coming.values = memory[place.start - first : place.stop - first].view(x.dtype).view(x.shape)
    return coming


def writing(x: Tensor, source: Tensor, min_bytes: int = 0, after: Any = None) -> Transfer:
    """Starts to write values in memory to a tensor on disk; they must not change until the write has ended.

    If they have to go through a buffer, it has at least `min_bytes`. `after` is an event of an accelerator after which
    the values are in memory.

    Raises:
        RuntimeError: the file is another process's.
    """
    place = place_of(x)
    assert place is not None, "it is on disk"
    place.stretch.file.refuse_fork()
    file, buffer, offset = place.stretch.file, None, place.stretch.offset + place.start
    # The bytes behind the tensor's end are unused, so the last block can be written whole, which direct I/O needs.
    padding = -place.stop % ALIGNMENT if place.stop == place.end and place.start % ALIGNMENT == 0 else 0
    plain = source.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    behind = plain.untyped_storage().nbytes() - plain.storage_offset() - len(plain)
    if (plain.data_ptr() - offset) % ALIGNMENT or behind < padding:
        if after is not None:
            after.synchronize()
        buffer = buffers.acquire(max(len(plain) + 2 * ALIGNMENT, min_bytes))
        start = offset % ALIGNMENT
        payload = buffer.bytes[start : start + len(plain)].copy_(plain)
    else:
        payload = plain
    memory = payload.as_strided((len(plain) + padding,), (1,))
    description = f"writing {x.nbytes / 1e6:.1f} MB of {file.kind} in {file.folder!r}"
    transfer = Transfer(_start_parts(file.write, offset, memory, (x, source), after), buffer, description)
    torch.autograd.graph.increment_version(x)
    return transfer


def _start_parts(move: Move, offset: int, memory: Tensor, keeps: Any = None, after: Any = None) -> list[Any]:
    """Starts a transfer in parts, which begin at aligned offsets; they keep `keeps` alive."""
    if planned():  # there are no values
        return []
    bytes_ = memoryview(mapping.buffer_at(memory.data_ptr(), len(memory))).cast("B")
    parts, position = [], 0
    while position < len(memory):
        stop = min(len(memory), position + AT_ONCE - (offset + position) % ALIGNMENT)
        future: Future[None] = Future()
        _pool().put(_TransferPart(future, move, offset + position, bytes_[position:stop], (memory, keeps), after))
        parts.append(future)
        position = stop
    return parts


# --- between an accelerator and its host's memory ---


class PendingCopies:
    """Copies in flight to the accelerator; waiting for them blocks the accelerator's stream, not the host."""

    def __init__(self, streams: CopyStreams) -> None:
        self._streams, self.event = streams, None

    def wait(self) -> None:
        """Makes the accelerator's current stream run what is enqueued from now on after the copies."""
        self._streams.module.current_stream(self._streams.device).wait_event(self.event)


class CopyStreams:
    """Two streams of an accelerator: one copies tensors in, and one copies them out."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.copies_in, self._out = self.module.Stream(device=device), self.module.Stream(device=device)

    def bring(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Copies tensors from pinned memory to the accelerator; those already there are returned unchanged."""
        current = self.module.current_stream(self.device)
        with self.module.stream(self.copies_in):
            on_device = [x if x.device == self.device else x.to(self.device, non_blocking=True) for x in columns]
        current.wait_stream(self.copies_in)
        for x, original in zip(on_device, columns, strict=True):
            if x is not original:
                x.record_stream(current)  # the allocator must not reuse its memory while `current` reads it
        return on_device

    @contextlib.contextmanager
    def bringing(self) -> Iterator[PendingCopies]:
        """Runs the block's copies into memory of this device on the copy stream, after what is enqueued by now."""
        self.copies_in.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.copies_in):
            arrival = PendingCopies(self)
            try:
                yield arrival
            finally:
                arrival.event = self.copies_in.record_event()

    def wait_for_reads(self) -> None:
        """Waits until the copies in have read their sources, so that the host can overwrite these."""
        self.copies_in.synchronize()

    def take_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Copies `(into, source)` pairs to pinned memory once the sources are computed; returns an event at the end."""
        self._out.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self._out):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
                source.record_stream(self._out)
            return self._out.record_event()


@devices.cached
def copy_streams(device: torch.device) -> CopyStreams:
    """The copy streams of a device, made once."""
    return CopyStreams(device)
