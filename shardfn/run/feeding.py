"""Copies batches out of user memory, reads them ahead in a thread, and copies them to the device."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from shardfn.compat import devices
from shardfn.compat.loaders import without_frames

LOOK = 1.0  # seconds between checks whether the thread is alive
PATIENCE = 10.0  # seconds to wait for the reading thread to end


@dataclass(frozen=True)
class _EndOfBatches:
    """The end of the batches, with the error that caused it, if any."""

    error: BaseException | None = None


@dataclass(eq=False)
class _Ahead:
    """The state that a reading thread shares with its consumer.

    Attributes:
        items: batches, in order.
        stop: set when no more are wanted.
    """

    items: queue.Queue[Any]
    stop: threading.Event

    def put(self, item: Any) -> bool:
        """Waits for room and adds an item; False if no more items are wanted."""
        while not self.stop.is_set():
            try:
                self.items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def end(self) -> None:
        """Tells the thread to stop, and drops what it has read, so that it does not wait for room."""
        self.stop.set()
        while not self.items.empty():
            self.items.get_nowait()


_open: weakref.WeakKeyDictionary[_Ahead, threading.Thread] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    readers = list(_open.items())
    for shared, _ in readers:
        shared.end()
    for _, thread in readers:  # a thread inside torch when the interpreter ends would abort the process
        thread.join(PATIENCE)


def ahead(open_: Callable[[], Iterator[Any]], depth: int, device: torch.device) -> Generator[Any]:
    """Iterates over `open_()` in a thread that reads up to `depth` items ahead; errors are raised in their place.

    The thread creates the iterator, and ends when this generator ends or is dropped. For an accelerator, tensors are
    copied to pinned memory, from which the device can copy asynchronously.
    """
    shared = _Ahead(queue.Queue(depth), threading.Event())
    thread = threading.Thread(target=_read_ahead, args=(open_, shared, device), name="shardfn-feed", daemon=True)
    _open[shared] = thread
    thread.start()
    try:
        while True:
            item = _next(shared, thread)
            if isinstance(item, _EndOfBatches):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        shared.end()
        thread.join(PATIENCE)


def _next(shared: _Ahead, thread: threading.Thread) -> Any:
    while True:
        try:
            return shared.items.get(timeout=LOOK)
        except queue.Empty:
            if not thread.is_alive() and shared.items.empty():
                raise RuntimeError("the thread that reads batches is gone: threads do not survive a fork") from None


def _read_ahead(open_: Callable[[], Iterator[Any]], shared: _Ahead, device: torch.device) -> None:
    try:
        devices.use(device)  # pinned memory is of the thread's device
        batches = open_()
        for batch in batches:
            if not shared.put(locked(batch, device)):
                break
        else:
            shared.put(_EndOfBatches())
    except BaseException as error:
        shared.put(_EndOfBatches(without_frames(error)))


def locked(batch: Any, device: torch.device) -> Any:
    """The batch with its CPU tensors in pinned memory, unless the device is the CPU."""
    if device.type == "cpu":
        return batch

    def pin(x: Any) -> Any:
        pinnable = isinstance(x, Tensor) and x.device.type == "cpu" and not x.is_pinned()
        return x.pin_memory() if pinnable else x

    return optree.tree_map(pin, batch)


class Copier:
    """Copies batches to a device on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device=device)

    def start(self, batch: Any) -> BatchCopy:
        """Starts to copy a batch."""
        if self.device.type == "cpu":
            return BatchCopy(batch, None)
        with self._module.stream(self._stream):
            copied = optree.tree_map(self._to_device, batch)
            return BatchCopy(copied, self._stream.record_event())

    def _to_device(self, x: Any) -> Any:
        return x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x

    def arrived(self, copy: BatchCopy) -> Any:
        """The copied batch; makes the current stream wait for the copy."""
        if copy.event is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(copy.event)
            for x in optree.tree_leaves(copy.batch):
                if isinstance(x, Tensor):
                    x.record_stream(current)  # keeps the allocator from reusing the memory while a step still reads it
        return copy.batch


@dataclass(frozen=True)
class BatchCopy:
    """A batch that is being copied, and the event that follows the copy; None if there was nothing to copy."""

    batch: Any
    event: Any


def owned(batch: Any) -> Any:
    """Copies all tensors and arrays of a batch that user code has made, since that code may overwrite them.

    All are copied because views cannot be told from buffers: a slice of a data set looks like a part of a buffer.
    Copies stay on the same device, and in pinned memory. Objects of unknown types without `clone` are left unchanged.
    """
    return optree.tree_map(_copied, batch, none_is_leaf=True)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        on_host = type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"
        # In a worker `is_pinned` would initialize CUDA, which a forked process must not do.
        pinned = on_host and get_worker_info() is None and leaf.is_pinned()
        return torch.empty_like(leaf, pin_memory=True).copy_(leaf) if pinned else leaf.clone()
    if isinstance(leaf, (np.ndarray, bytearray)):
        return leaf.copy()
    if isinstance(leaf, MutableMapping):  # such as the BatchEncoding of tokenizers
        mapping = copy.copy(leaf)
        for key, value in leaf.items():
            mapping[key] = owned(value)
        return mapping
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        instance: Any = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(instance, field.name, owned(getattr(leaf, field.name)))
        return instance
    clone = getattr(leaf, "clone", None)  # tensor dicts, graphs
    return clone() if callable(clone) else leaf


def fresh(loader: Any) -> bool:
    """Whether no two batches share memory: `default_collate` stacks rows, and no user code follows."""
    return type(loader) is DataLoader and loader.collate_fn is default_collate
