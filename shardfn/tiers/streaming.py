"""Columns of values that pass through memory one window at a time: read ahead, changed, and written behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from shardfn.tiers.tensors import place_of
from shardfn.tiers.transfers import Transfer, copy_streams, reading, writing

CHUNK = 2**19  # elements
AHEAD = 2  # windows that are read while another is changed
BEHIND = 2  # windows that are written meanwhile


@dataclass(frozen=True, eq=False)
class Window:
    """Stretches of several tensors that are changed together.

    Attributes:
        columns: vectors of one length, in memory or on disk.
        kept: which of them are changed; what happens to the others in memory does not matter.
        change: a function that changes the columns in memory, in place.
    """

    columns: Sequence[Tensor]
    kept: Sequence[bool]
    change: Callable[[list[Tensor]], object]


def stream(windows: Iterable[Window]) -> None:
    """Changes one window after another, while the next ones are read and the previous ones written.

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
        for passage in (*going, *coming):
            passage.give_up()
        raise


def _end(going: deque[_Passage]) -> None:
    going[0].end()
    going.popleft()


class _Passage:
    """A window on its way through memory."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.readings = [reading(x) for x in window.columns]
        self.writings: list[Transfer] = []
        self.out: Any = None  # an event after the copies out of an accelerator

    def change(self) -> None:
        """Changes the window once it is read, and starts to write it."""
        window, columns = self.window, []
        for x, coming in zip(window.columns, self.readings, strict=True):
            if coming is not None:
                coming.wait()
            columns.append(x if coming is None else coming.values)
        kept_on = [x.device for x, is_kept in zip(columns, window.kept, strict=True) if is_kept]
        device = next((device for device in kept_on if device.type != "cpu"), kept_on[0])  # an accelerator, if any
        if all(x.device == device for x in columns):
            window.change(columns)
        elif device.type == "cpu":  # some gradients are still on an accelerator
            window.change([x.to(device) for x in columns])
        else:
            copier = copy_streams(device)
            on_device = copier.bring(columns)
            window.change(on_device)
            triples = zip(columns, on_device, window.kept, strict=True)
            self.out = copier.take_out([(x, new) for x, new, is_kept in triples if is_kept and new is not x])
        for x, coming, is_kept in zip(window.columns, self.readings, window.kept, strict=True):
            if coming is not None and is_kept:
                self.writings.append(writing(x, coming.values, after=self.out))

    def end(self) -> None:
        """Waits until the window is written."""
        for transfer in self.writings:
            transfer.wait()
        if self.out is not None:
            self.out.synchronize()
        for done in (*self.writings, *self.readings):
            if done is not None:
                done.give_back()

    def give_up(self) -> None:
        """Abandons it. A buffer that is being written from is not reused before the write has ended."""
        for transfer in self.writings or self.readings:
            if transfer is not None:
                transfer.give_up()


def streams(tensors: Iterable[Tensor]) -> bool:
    """Whether any tensor is on disk, or they are on different devices."""
    listed = list(tensors)
    return len({x.device for x in listed}) > 1 or any(place_of(x) is not None for x in listed)


def windows_of(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Splits a range into windows of `CHUNK` elements."""
    for first in range(start, stop, CHUNK):
        yield first, min(first + CHUNK, stop)


def add_(into: Tensor, more: Tensor) -> None:
    """Adds a vector to one on disk."""

    def add(columns: list[Tensor]) -> None:
        columns[0].add_(columns[1])

    flat, other = into.view(-1), more.reshape(-1)
    stream(Window([flat[a:b], other[a:b]], [True, False], add) for a, b in windows_of(0, len(flat)))


def in_place(tensors: Iterable[Tensor], change: Callable[[list[Tensor]], object]) -> None:
    """Changes each element of tensors, wherever they are; `change` works element by element.

    It is called with all tensors of a device and dtype together, for which torch's kernels for lists are fast.
    """
    kinds: dict[Any, list[Tensor]] = {}
    flats = []
    for x in tensors:
        if place_of(x) is None:
            kinds.setdefault((x.device, x.dtype), []).append(x)
        else:
            flats.append(x.view(-1))
    for group in kinds.values():
        change(group)
    stream(Window([x[a:b]], [True], change) for x in flats for a, b in windows_of(0, len(x)))
