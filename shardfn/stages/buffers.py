"""Memory for gathered parameters, and for gradients that are sent.

On a CPU a pool reuses a buffer once nothing refers to it: first touching fresh pages takes as long as a gather. On an
accelerator torch's caching allocator does the same.
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
    """Memory for a stage's parameters or gradients, with cached views of it.

    Attributes:
        nbytes: its size.
        all: all bytes of it.
        under_way: whether a collective in flight uses it, even if nothing in Python refers to it.
        given: whether the pool has lent it since it was last trimmed.
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
        """Bytes `start` to `stop` viewed as a dtype; a cached view, which `unheld` does not count as a use."""
        if not self._pooled:  # used for one call, so a cache of views is of no use
            return self.all[start:stop].view(dtype)
        view = self._parts.get((start, stop, dtype))
        if view is None:
            with self._unseen():
                view = self.all[start:stop].view(dtype).detach()
            self._forget_many()
            self._parts[start, stop, dtype] = view
            self._made += 1  # last: after an interrupt in between, the buffer counts as held, which is safe
        return view

    def views(self, key: Any, make: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """The views that `make` returns, cached by key; `unheld` does not count them as uses."""
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
        """A context for tensors that later calls reuse: without inference mode and, in a pool, dispatch modes."""
        with torch.inference_mode(False), dispatch.outside_modes() if self._pooled else contextlib.nullcontext():
            yield

    def counted(self) -> tuple[int, int, int]:
        """Numbers of references to this object, and to its storage in Python and in C++."""
        return sys.getrefcount(self), sys.getrefcount(self._storage), storage_uses(self._number)

    def has_moved(self) -> bool:
        """Whether its data pointer has changed: a program has resized its storage, or shared it with a process."""
        return self.all.data_ptr() != self._at

    def unheld(self) -> bool:
        """Whether only the pool refers to this buffer and its memory.

        Call it in a comprehension over a list: references of the calling frame are counted, as in `ALONE`.
        """
        own_count, in_python, in_all = ALONE
        return (
            sys.getrefcount(self) == own_count
            and sys.getrefcount(self._storage) == in_python
            and storage_uses(self._number) == in_all + self._made - 1
            and self.all.data_ptr() == self._at
        )


# Versions of Python count references of frames differently. So the counts of an unused buffer are measured once.
(ALONE,) = [buffer.counted() for buffer in [Buffer(8, torch.device("cpu"), pooled=False)]]


class Pool:
    """Buffers on one device; on a CPU they are reused once nothing else refers to them.

    The pool's size is bounded by the number of buffers in use at once times the largest size. A request takes a larger
    free buffer only if a new one would exceed this bound.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[Buffer] = []
        self._used = 0  # most buffers in use at once, counted when a new one is made; since the last trim

    def empty(self, nbytes: int, template: Any, keeps: bool) -> Buffer:
        """An unused buffer of `nbytes` or more, for tensors like `template`; with `keeps` it is held until backward."""
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
        """A free larger buffer, or a new one; drops free buffers that would exceed the pool's bound."""
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
        self.buffers = [*[b for b in self.buffers if b not in gone and not b.has_moved()], buffer]
        return buffer

    def trim(self, all: bool = False) -> None:
        """Frees the unused buffers that were not lent since the last `trim`; with `all`, every unused buffer."""
        used = [b for b in self.buffers if not b.unheld() or (b.given and not all and not b.under_way)]
        self.buffers, self._used = used, 0
        for buffer in () if all else used:
            buffer.given = False

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(map(_nbytes, self.buffers))


_nbytes = operator.attrgetter("nbytes")
