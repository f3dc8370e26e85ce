"""Memory for gathered parameters, and for gradients that are sent.

On a CPU it is handed out again once nothing refers to it, as fresh pages take as long as a gather. An
accelerator's allocator does the same.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import dispatch
from shardfn.compat.autograd import storage_of, storage_uses
from shardfn.stages.gather_plan import Gather

MOST_VIEWS = 10_000  # of one buffer, for stages whose layouts change


class Buffer:
    """Memory for a stage's parameters or gradients, with the views of it that are used again and again.

    Attributes:
        nbytes: its size.
        all: all bytes of it.
        under_way: whether a collective uses it, though nothing may refer to it any more.
        given: whether it was handed out since the pool was trimmed.
    """

    __slots__ = (
        "_at",
        "_made",
        "_number",
        "_parts",
        "_pooled",
        "_storage",
        "_views",
        "all",
        "given",
        "nbytes",
        "under_way",
    )

    def __init__(self, nbytes: int, device: torch.device, pooled: bool) -> None:
        self._pooled = pooled
        with self._unseen():
            self.all = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes, self.under_way, self.given = nbytes, False, False
        self._storage, self._made = self.all.untyped_storage(), 1
        self._number = storage_of(self.all)
        self._at = self.all.data_ptr() if pooled else 0
        self._parts: dict[Any, Tensor] = {}
        self._views: dict[Any, list[Tensor]] = {}

    def part(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Bytes from `start` to `stop` as numbers of a dtype; for the package alone, as `unheld` knows of it."""
        if not self._pooled:  # it is used for one call
            return self.all[start:stop].view(dtype)
        view = self._parts.get((start, stop, dtype))
        if view is None:
            with self._unseen():
                view = self.all[start:stop].view(dtype).detach()
            self._forget_many()
            self._parts[start, stop, dtype] = view
            self._made += 1  # at the end: after an interrupt the buffer counts as held
        return view

    def views(self, key: Any, make: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Views that are made of all bytes once for this key; for the package alone, as `unheld` knows of them."""
        if not self._pooled:
            return make(self.all)
        views = self._views.get(key)
        if views is None:
            with self._unseen():
                views = [view.detach() for view in make(self.all)]
            self._forget_many()
            self._views[key] = views
            self._made += len(views)
        return views

    def parameters(self, gather: Gather) -> list[Tensor]:
        """The parameters of one gather."""

        def make(bytes_: Tensor) -> list[Tensor]:
            return gather.layout.views(bytes_[gather.start : gather.stop].view(gather.dtype))

        key = gather.start, gather.dtype, gather.layout.geometry
        return [view.detach() for view in self.views(key, make)]

    def _forget_many(self) -> None:
        if self._made > MOST_VIEWS:
            self._parts, self._views, self._made = {}, {}, 1

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """A context for what another call may use: training after inference, and of a pool, a call in other modes."""
        with torch.inference_mode(False), dispatch.outside_modes() if self._pooled else contextlib.nullcontext():
            yield

    def counted(self) -> tuple[int, int, int]:
        """References to it, and to its storage in Python and in C++."""
        return sys.getrefcount(self), sys.getrefcount(self._storage), storage_uses(self._number)

    def moved(self) -> bool:
        """Whether its memory is elsewhere: somebody has freed it, or shares it with another process."""
        return self.all.data_ptr() != self._at

    def unheld(self) -> bool:
        """Whether nothing refers to it, or to its memory, but the pool, which asks in a comprehension over a list."""
        own_count, in_python, in_all = ALONE
        return (
            sys.getrefcount(self) == own_count
            and sys.getrefcount(self._storage) == in_python
            and storage_uses(self._number) == in_all + self._made - 1
            and self.all.data_ptr() == self._at
        )


# Versions of Python count the references of frames in their own way, and one that nothing refers to tells.
(ALONE,) = [buffer.counted() for buffer in [Buffer(8, torch.device("cpu"), pooled=False)]]


class Pool:
    """Buffers on one device. On a CPU one to which nothing else refers is handed out again, and together they take no
    more than as many of the largest as are in use at once: a request takes a larger one only if a new one, beside it,
    would be over that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[Buffer] = []
        self._used = 0  # at once, when one was asked for that was not there, since it was trimmed

    def empty(self, nbytes: int, template: Any, keeps: bool) -> Buffer:
        """A buffer of `nbytes` or more that nothing else uses, with `keeps` until backward, for tensors like this."""
        if self.device.type != "cpu" or type(template) is not Tensor:
            return Buffer(nbytes, self.device, pooled=False)
        free = [b for b in self.buffers if not b.under_way and b.unheld()]
        for buffer in free:
            if buffer.nbytes == nbytes:
                break
        else:
            buffer = self._of_other_size(nbytes, free, keeps)
        buffer.given = True
        return buffer

    def _of_other_size(self, nbytes: int, free: list[Buffer], keeps: bool) -> Buffer:
        """A larger buffer of those that are free, or a new one."""
        free.sort(key=_nbytes)
        self._used = max(self._used, len(self.buffers) - len(free) + 1)
        over = self.nbytes() + nbytes - self._used * max(nbytes, *map(_nbytes, self.buffers), 0)
        if over > 0 and not keeps and free and free[-1].nbytes > nbytes:
            return next(b for b in free if b.nbytes > nbytes)
        gone = []  # another thread may have trimmed the pool meanwhile
        while free and over > 0:
            gone.append(free.pop())
            over -= gone[-1].nbytes
        buffer = Buffer(nbytes, self.device, pooled=True)  # takes no pages before it is used
        self.buffers = [*[b for b in self.buffers if b not in gone and not b.moved()], buffer]
        return buffer

    def trim(self, all: bool = False) -> None:
        """Gives memory back that nothing uses and nobody asked for since the last time; or `all` that nothing uses."""
        used = [b for b in self.buffers if not b.unheld() or (b.given and not all and not b.under_way)]
        self.buffers, self._used = used, 0
        for buffer in () if all else used:
            buffer.given = False

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(map(_nbytes, self.buffers))


_nbytes = operator.attrgetter("nbytes")
