"""Columns of numbers that go through memory a stretch at a time: read ahead, changed, and written behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardfn.tiers.copy_streams import copy_streams
from shardfn.tiers.tensors import place_of
from shardfn.tiers.transfers import Reading, Transfer, reading, writing

CHUNK = 2**19  # elements
AHEAD = 2  # windows that are read while one is changed
BEHIND = 2  # windows that are written meanwhile


@dataclass(frozen=True, eq=False)
class Window:
    """A stretch of several tensors, which are changed together.

    Attributes:
        columns: vectors, in memory or on disk, of one length.
        kept: which of them are changed; what becomes of the others in memory does not matter.
        change: what is done to them, in memory, in place.
    """

    columns: Sequence[Tensor]
    kept: Sequence[bool]
    change: Callable[[list[Tensor]], object]


def stream(windows: Iterable[Window]) -> None:
    """Changes one window after another, while the next ones are read, and the last ones written.

    Raises:
        RuntimeError: something cannot be read or written.
    """
    rest = map(_Passage, windows)
    coming, going = deque(islice(rest, AHEAD)), deque[_Passage]()
    try:
        while coming:
            going.append(coming.popleft())
            coming.extend(islice(rest, 1))
            going[-1].change()
            while len(going) > BEHIND:
                _end(going)
        while going:
            _end(going)
    except BaseException:
        for one in (*going, *coming):
            one.give_up()
        raise


def _end(going: deque[_Passage]) -> None:
    going[0].end()
    going.popleft()


class _Passage:
    """A window on its way through memory."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.readings: list[Reading | None] = []
        self.writings: list[Transfer] = []
        self.out: Any = None  # an event, after what is taken out of an accelerator
        for x in window.columns:
            self.readings.append(reading(x))

    def change(self) -> None:
        """Changes it, once it is read, and starts to write it."""
        window, here = self.window, []
        for x, coming in zip(window.columns, self.readings, strict=True):
            if coming is not None:
                coming.wait()
            here.append(x if coming is None else coming.values)
        device = _where(window, here)
        if all(x.device == device for x in here):
            window.change(here)
        elif device.type == "cpu":  # gradients that an accelerator still has
            window.change([x.to(device) for x in here])
        else:
            beside = copy_streams(device)
            moved = beside.bring(here)
            window.change(moved)
            each = zip(here, moved, window.kept, strict=True)
            self.out = beside.take_out([(x, new) for x, new, kept in each if kept and new is not x])
        for x, coming, kept in zip(window.columns, self.readings, window.kept, strict=True):
            if coming is not None and kept:
                self.writings.append(writing(x, coming.values, after=self.out))

    def end(self) -> None:
        """Until it is written."""
        for transfer in self.writings:
            transfer.wait()
        if self.out is not None:
            self.out.synchronize()
        for done in (*self.writings, *self.readings):
            if done is not None:
                done.give_back()

    def give_up(self) -> None:
        """Nobody waits for it. A buffer that is written from is not given to others: it goes when that has ended."""
        for transfer in self.writings or self.readings:
            if transfer is not None:
                transfer.give_up()


def _where(window: Window, here: Sequence[Tensor]) -> torch.device:
    """Where a window is changed: on an accelerator that has some of what is kept, or else on its host."""
    kept = [x.device for x, kept in zip(here, window.kept, strict=True) if kept]
    return next((device for device in kept if device.type != "cpu"), kept[0])


def streams(tensors: Iterable[Tensor]) -> bool:
    """Whether any of these is on disk, or not where the others are."""
    every = list(tensors)
    return len({x.device for x in every}) > 1 or any(place_of(x) is not None for x in every)


def windows_of(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A range in stretches of a chunk."""
    for at in range(start, stop, CHUNK):
        yield at, min(at + CHUNK, stop)


def add_(into: Tensor, more: Tensor) -> None:
    """Adds a vector to one on disk."""

    def add(columns: list[Tensor]) -> None:
        columns[0].add_(columns[1])

    flat, other = into.view(-1), more.reshape(-1)
    stream(Window([flat[a:b], other[a:b]], [True, False], add) for a, b in windows_of(0, len(flat)))


def in_place(tensors: Iterable[Tensor], change: Callable[[Tensor], object]) -> None:
    """Changes each element of tensors, wherever they are, by itself."""
    away = []
    for x in tensors:
        if place_of(x) is None:
            change(x)
        else:
            away.append(x.view(-1))
    stream(Window([x[a:b]], [True], lambda some: change(some[0])) for x in away for a, b in windows_of(0, len(x)))
