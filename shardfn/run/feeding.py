"""Batches get memory of their own, are read ahead by a thread, and are copied to the device beside what it computes."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

LOOK = 1.0  # seconds between two looks whether the thread is alive
PATIENCE = 10.0  # seconds until a thread that reads is left to itself


@dataclass(frozen=True)
class _End:
    """Nothing more comes, because of an error perhaps."""

    error: BaseException | None = None


@dataclass(eq=False)
class _Ahead:
    """What a thread has read.

    Attributes:
        found: batches, in order.
        stop: set when nobody wants any more.
    """

    found: queue.Queue[Any]
    stop: threading.Event

    def put(self, item: Any) -> bool:
        """Waits for room; whether anybody still wants it."""
        while not self.stop.is_set():
            try:
                self.found.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def end(self) -> None:
        """The thread has no more to do."""
        self.stop.set()
        while not self.found.empty():
            self.found.get_nowait()


_open: weakref.WeakKeyDictionary[_Ahead, threading.Thread] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    found = list(_open.items())
    for one, _ in found:
        one.end()
    for _, thread in found:  # one that is inside torch when the interpreter ends aborts the process
        thread.join(PATIENCE)


def ahead(open_: Callable[[], Iterator[Any]], depth: int, device: torch.device) -> Generator[Any]:
    """What an iterator gives, of which a thread has read up to so many; errors come in their place.

    The thread makes the iterator, and ends with it when this one ends or is dropped. For an accelerator tensors are
    copied to locked memory, from which it reads by itself.
    """
    shared = _Ahead(queue.Queue(depth), threading.Event())
    thread = threading.Thread(target=_read, args=(open_, shared, device), name="shardfn-feed", daemon=True)
    _open[shared] = thread
    thread.start()
    try:
        while True:
            item = _next(shared, thread)
            if isinstance(item, _End):
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
            return shared.found.get(timeout=LOOK)
        except queue.Empty:
            if not thread.is_alive() and shared.found.empty():
                raise RuntimeError("the thread that reads batches has gone: it does not live on in a fork") from None


def _read(open_: Callable[[], Iterator[Any]], shared: _Ahead, device: torch.device) -> None:
    try:
        if device.type != "cpu":
            torch.get_device_module(device).set_device(device)  # locked memory belongs to the thread's device
        batches = open_()
        for batch in batches:
            if not shared.put(locked(batch, device)):
                break
        else:
            shared.put(_End())
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # which would keep workers alive as long as somebody has the error
        shared.put(_End(error))


def locked(batch: Any, device: torch.device) -> Any:
    """A batch whose tensors an accelerator can read by itself."""
    if device.type == "cpu":
        return batch

    def lock(x: Any) -> Any:
        free = isinstance(x, Tensor) and x.device.type == "cpu" and not x.is_pinned()
        return x.pin_memory() if free else x

    return optree.tree_map(lock, batch)


class Copier:
    """Takes batches to a device, by a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device=device)

    def start(self, batch: Any) -> Copy:
        """Begins to copy."""
        if self.device.type == "cpu":
            return Copy(batch, None)
        with self._module.stream(self._stream):
            moved = optree.tree_map(self._moved, batch)
            return Copy(moved, self._stream.record_event())

    def _moved(self, x: Any) -> Any:
        return x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x

    def arrived(self, copy: Copy) -> Any:
        """The batch; what the device is told from now on comes after it is there."""
        if copy.event is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(copy.event)
            for x in optree.tree_leaves(copy.batch):
                if isinstance(x, Tensor):
                    x.record_stream(current)  # else its memory would be another's while a step still reads it
        return copy.batch


@dataclass(frozen=True)
class Copy:
    """A batch on its way, and the event by which it is there."""

    batch: Any
    event: Any


def device_of(kind: str) -> torch.device:
    """This process's device of a kind."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def owned(batch: Any) -> Any:
    """A copy of all tensors and arrays in what somebody's code has made, who may fill them again.

    Which of them will be, nobody can know: a slice of a data set looks like a part of a buffer. A copy stays on the
    device, and in locked memory. Objects of no known kind are left as they are.
    """
    return optree.tree_map(_copied, batch, none_is_leaf=True)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        pinned = type(leaf) is Tensor and _pinned(leaf)
        return torch.empty_like(leaf, pin_memory=True).copy_(leaf) if pinned else leaf.clone()
    if isinstance(leaf, (np.ndarray, bytearray)):
        return leaf.copy()
    if isinstance(leaf, MutableMapping):  # of a class of its own, as tokenizers give
        made = copy.copy(leaf)
        for key, value in leaf.items():
            made[key] = owned(value)
        return made
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        like: Any = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(like, field.name, owned(getattr(leaf, field.name)))
        return like
    clone = getattr(leaf, "clone", None)  # tensor dicts, graphs
    return clone() if callable(clone) else leaf


def _pinned(x: Tensor) -> bool:
    if get_worker_info() is not None:  # a forked process must not touch CUDA, and to ask already does
        return False
    return x.layout is torch.strided and x.device.type == "cpu" and x.is_pinned()


def fresh(loader: Any) -> bool:
    """Whether each batch has memory of its own: torch stacks rows, and nobody's code comes after that."""
    return type(loader) is DataLoader and loader.collate_fn is default_collate
