"""Activations that are away from their device, from the time autograd has saved them until backward needs them.

What moves is a stretch of a storage, as it was then; what autograd saved of it, once or several times, are views. It
leaves while forward goes on. Backward follows the tape in reverse, and what the call before the one it is at has saved
is on its way back meanwhile.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import autograd
from shardfn.stages.tape import StageRun, Tape
from shardfn.tiers import mapping, tensors
from shardfn.tiers.files import ALIGNMENT, File
from shardfn.tiers.transfers import Buffer, Reading, Transfer, reading, writing

CHUNK = 2**23  # bytes that are written at once
WRITING = 2**26  # bytes on their way to disk at once
COPYING = 2**29  # bytes on their way to the host
SPARSE = 8  # a stretch with that many times the bytes of what was saved of it does not move

_log = logging.getLogger("shardfn")


@dataclass(frozen=True, eq=False)
class View:
    """What autograd saved: a tensor's numbers in a stretch that is away.

    Attributes:
        away: whose the stretch is.
        activation: the stretch.
        start: where in it they are, in bytes.
        dtype: of the tensor.
        shape: of the tensor.
        strides: of the tensor.
        conj: whether its numbers are the conjugates of those.
        witness: a tensor without numbers that counts the writes into the one that was saved.
        version: how many there had been.
    """

    away: Away
    activation: Activation
    start: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    conj: bool
    witness: Tensor
    version: int

    def brought(self) -> Tensor:
        """The tensor, with these numbers.

        Raises:
            RuntimeError: they cannot be read.
        """
        memory = self.away.bring(self.activation)
        at = (int(memory.storage_offset()) + self.start) // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        made.set_(memory.untyped_storage(), at, self.shape, self.strides)
        return made.conj() if self.conj else made


class Activation:
    """A stretch of a storage. It takes memory on the device as long as `here` is there, or what is back.

    Attributes:
        here: the stretch itself, until it has left.
        host: the same in pinned memory, where the device has other memory than the host.
        left: after which it is there.
        place: the same on disk.
        parts: how many parts of it are still to be written there.
        coming: it is being read.
        back: it is here again.
        arrived: after which it is.
    """

    __slots__ = (  # noqa: RUF023  # in the order in which they come to be
        "__weakref__", "here", "host", "left", "place", "parts", "coming", "back", "arrived", "storage",
    )  # fmt: skip

    def __init__(self, here: Tensor, storage: Any) -> None:
        self.here: Tensor | None = here
        self.host: Tensor | None = None
        self.place: Tensor | None = None
        self.coming: Reading | None = None
        self.back: Tensor | None = None
        self.left: Any = None
        self.arrived: Any = None
        self.parts = 0
        self.storage = storage  # a weak reference: as long as there is one, no other storage gets its number


class Away:
    """What has left of the activations of one engine, and what is on its way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: weakref.WeakValueDictionary[Any, Activation] = weakref.WeakValueDictionary()
        self._copying: deque[Activation] = deque()  # to the host
        self._writing: deque[tuple[Activation, Transfer, int]] = deque()
        self._copied = self._written = 0  # bytes that are on their way so
        self._freed = 0
        self._brought: list[weakref.ref[Activation]] = []  # back, or on their way
        self._next: list[weakref.ref[Activation]] = []  # those of the call whose backward comes next
        self._side: Any = None

    # --- out ---

    def leave(self, x: Tensor, above: int, file: File | None) -> View | None:
        """Sends off what a tensor's memory holds, unless that has happened; None if it stays.

        Args:
            x: that autograd saves.
            above: the fewest bytes that move.
            file: on disk, where they go; None for the host.
        """
        self._settle()
        found = _stretch(x)
        if found is None or found[1] - found[0] < max(above, 1):
            return None
        start, stop = found
        key = autograd.storage_of(x), x._version, start, stop
        one = self._known.get(key)
        if one is None:
            one = self._known[key] = Activation(_bytes(x, start, stop), autograd.weak_storage(x))
            self._send(one, stop - start, file)
        at = int(x.storage_offset()) * x.dtype.itemsize - start
        witness = x.detach()
        witness.data = x.new_empty(0)  # the count of writes stays what it was: that of the tensor that was saved
        return View(self, one, at, x.dtype, x.shape, x.stride(), x.is_conj(), witness, x._version)

    def _send(self, one: Activation, nbytes: int, file: File | None) -> None:
        if file is not None:
            one.place = tensors.empty((nbytes,), torch.uint8, file)
            one.parts = -(-nbytes // CHUNK)
        if self.device.type == "cpu":
            self._write(one)
        else:
            self._copy(one, nbytes)

    def _copy(self, one: Activation, nbytes: int) -> None:
        """Starts to copy to the host; its own memory must not be used for others before that has ended."""
        assert one.here is not None, "it leaves once"
        one.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        side = self._beside()
        with self._module().stream(side):
            one.host.copy_(one.here, non_blocking=True)
            one.left = side.record_event()
        self._copying.append(one)
        self._copied += nbytes
        while self._copied > COPYING and len(self._copying) > 1:
            self._end_copy()

    def _end_copy(self) -> None:
        one = self._copying.popleft()
        assert one.host is not None, "it is on its way"
        self._now().wait_event(one.left)  # the memory goes to what is computed after that
        self._copied -= one.host.nbytes
        one.here = None
        if one.place is not None:
            one.left.synchronize()
            self._write(one)

    def _write(self, one: Activation) -> None:
        source = one.here if one.host is None else one.host
        assert source is not None, "it has not left"
        assert one.place is not None, "it has a place"
        for start in range(0, source.nbytes, CHUNK):
            part = slice(start, min(start + CHUNK, source.nbytes))
            while self._written and self._written + CHUNK > WRITING:
                self._end_write()
            transfer = writing(one.place[part], source[part])
            self._writing.append((one, transfer, part.stop - part.start))
            self._written += part.stop - part.start

    def _end_write(self) -> None:
        one, transfer, nbytes = self._writing.popleft()
        self._written -= nbytes
        transfer.wait()  # of one that fails the numbers stay in memory
        transfer.give_back()
        one.parts -= 1
        if one.parts == 0:
            one.here = one.host = None
        self._free(nbytes)

    def _free(self, nbytes: int) -> None:
        """Memory of the host is used no more."""
        self._freed += nbytes
        if self._freed > WRITING:
            self._freed = 0
            mapping.trim()

    def _settle(self) -> None:
        """Takes note of what has arrived."""
        while self._copying and self._copying[0].left.query():
            self._end_copy()
        while self._writing and all(part.done() for part in self._writing[0][1].parts):
            self._end_write()

    # --- back ---

    def ahead(self, tape: Tape | None, run: StageRun) -> None:
        """Brings back what a run's backward reads, and starts to do so for the one that comes next."""
        if not self._known:
            return
        self._settle()
        runs = tape.runs[: run.index] if tape is not None and run.signature.options.prefetch else []
        behind = next((other for other in reversed(runs) if other.away and not other.done), None)
        self._next = list(behind.away) if behind else []
        wanted = [*_alive(run.away), *_alive(self._next)]
        self._forget(wanted)
        for one in wanted:
            self._start(one)

    def done(self) -> None:
        """A run's backward is over: what it alone has brought back goes."""
        if self._brought:
            self._forget(_alive(self._next))

    def _forget(self, but: Iterable[Activation]) -> None:
        """Lets go of what came back, or was to, but for these."""
        needed = {id(one) for one in but}
        kept = []
        for one in _alive(self._brought):
            if id(one) in needed:
                kept.append(weakref.ref(one))
                continue
            if one.arrived is not None:
                self._now().wait_event(one.arrived)  # nothing else may get the memory before that
            if one.place is not None and self.device.type == "cpu":
                self._free(one.place.nbytes)
            one.coming = one.back = one.arrived = None
        self._brought = kept

    def _start(self, one: Activation) -> None:
        """Starts to bring a stretch back, unless it is here, or on its way."""
        if one.here is not None or one.back is not None or one.coming is not None:
            return
        self._brought.append(weakref.ref(one))
        if one.host is None:
            assert one.place is not None, "it is somewhere"
            one.coming = reading(one.place, own=Buffer(-(-one.place.nbytes // ALIGNMENT) * ALIGNMENT))
            return
        one.back = torch.empty(one.host.nbytes, dtype=torch.uint8, device=self.device)
        side = self._beside()
        with self._module().stream(side):
            one.back.copy_(one.host, non_blocking=True)
            one.arrived = side.record_event()

    def bring(self, one: Activation) -> Tensor:
        """The bytes of a stretch, on the device.

        Raises:
            RuntimeError: they cannot be read.
        """
        if one.here is not None:
            return one.here
        self._start(one)
        if one.coming is not None:
            coming, one.coming = one.coming, None  # one that fails is not waited for again, but read again
            coming.wait()
            one.back = coming.values.to(self.device, non_blocking=True)
        assert one.back is not None, "it has been started"
        if one.arrived is not None:
            now = self._now()
            now.wait_event(one.arrived)
            one.back.record_stream(now)
        return one.back

    def end(self) -> None:
        """A step is over: what nobody has taken is not waited for."""
        self._next = []
        self._forget(())
        while self._copying:
            self._end_copy()
        while self._writing:
            try:
                self._end_write()
            except RuntimeError as error:  # nobody needs it any more, or it is read from where it still is
                _log.warning("%s", error)

    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    def _now(self) -> Any:
        return self._module().current_stream(self.device)

    def _beside(self) -> Any:
        """The stream for copies, after what the device was told so far."""
        if self._side is None:
            self._side = self._module().Stream(device=self.device)
        self._side.wait_stream(self._now())
        return self._side


def _alive(some: Iterable[weakref.ref[Activation]]) -> list[Activation]:
    return [one for one in (ref() for ref in some) if one is not None]


def _stretch(x: Tensor) -> tuple[int, int] | None:
    """Which bytes of its storage move for a tensor: all, or if that is much more, those that it spans; None if none."""
    whole, own = x.untyped_storage().nbytes(), x.nbytes
    if whole <= SPARSE * own:
        return (0, whole) if own else None
    start = int(x.storage_offset()) * x.dtype.itemsize
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if own else 0
    nbytes = span * x.dtype.itemsize
    return (start, start + nbytes) if 0 < nbytes <= SPARSE * own else None


def _bytes(x: Tensor, start: int, stop: int) -> Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=x.device)
    return made.set_(x.untyped_storage(), start, (stop - start,), (1,))
