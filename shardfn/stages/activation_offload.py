"""Activations that are away from their device, from the time autograd has saved them until backward needs them.

What moves is a stretch of a storage, as it was then; what autograd saved of it, once or several times, are views. It
leaves while forward goes on. Backward follows the tape in reverse, and what the call before the one it is at has saved
is on its way back meanwhile.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn.compat import autograd, dynamo, functorch
from shardfn.stages.options import Offload
from shardfn.stages.tape import StageRun, Tape
from shardfn.tiers import mapping, placing, tensors
from shardfn.tiers.files import ALIGNMENT, File
from shardfn.tiers.transfers import Buffer, Reading, Transfer, reading, writing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        tensor.set_(memory.untyped_storage(), at, self.shape, self.strides)
        return tensor.conj() if self.conj else tensor


@dataclass(eq=False)
class Activation:
    """A stretch of a storage. It takes memory on the device as long as `here` is there, or what is back.

    Attributes:
        here: the stretch itself, until it has left.
        storage: a weak reference: as long as there is one, no other storage gets its number.
        host: the same in pinned memory, where the device has other memory than the host.
        left: an event, after which it is there.
        place: the same on disk.
        parts: how many parts of it are still to be written there.
        coming: it is being read.
        back: it is here again.
        arrived: an event, after which it is.
    """

    here: Tensor | None
    storage: Any
    host: Tensor | None = None
    left: Any = None
    place: Tensor | None = None
    parts: int = 0
    coming: Reading | None = None
    back: Tensor | None = None
    arrived: Any = None


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
        span = _stretch(x)
        if span is None or span[1] - span[0] < max(above, 1):
            return None
        start, stop = span
        key = autograd.storage_of(x), x._version, start, stop
        activation = self._known.get(key)
        if activation is None:
            stretch = torch.empty(0, dtype=torch.uint8, device=x.device)
            stretch.set_(x.untyped_storage(), start, (stop - start,), (1,))
            activation = self._known[key] = Activation(stretch, autograd.weak_storage(x))
            self._send(activation, stop - start, file)
        at = int(x.storage_offset()) * x.dtype.itemsize - start
        witness = x.detach()
        witness.data = x.new_empty(0)  # the count of writes stays what it was: that of the tensor that was saved
        return View(self, activation, at, x.dtype, x.shape, x.stride(), x.is_conj(), witness, x._version)

    def _send(self, activation: Activation, nbytes: int, file: File | None) -> None:
        if file is not None:
            activation.place = tensors.empty((nbytes,), torch.uint8, file)
            activation.parts = -(-nbytes // CHUNK)
        if self.device.type == "cpu":
            self._write(activation)
        else:
            self._copy(activation, nbytes)

    def _copy(self, activation: Activation, nbytes: int) -> None:
        """Starts to copy to the host; its own memory must not be used for others before that has ended."""
        assert activation.here is not None, "it leaves once"
        activation.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        side = self._beside()
        with self._module().stream(side):
            activation.host.copy_(activation.here, non_blocking=True)
            activation.left = side.record_event()
        self._copying.append(activation)
        self._copied += nbytes
        while self._copied > COPYING and len(self._copying) > 1:
            self._end_copy()

    def _end_copy(self) -> None:
        activation = self._copying.popleft()
        assert activation.host is not None, "it is on its way"
        self._now().wait_event(activation.left)  # the memory goes to what is computed after that
        self._copied -= activation.host.nbytes
        activation.here = None
        if activation.place is not None:
            activation.left.synchronize()
            self._write(activation)

    def _write(self, activation: Activation) -> None:
        source = activation.here if activation.host is None else activation.host
        assert source is not None, "it has not left"
        assert activation.place is not None, "it has a place"
        for start in range(0, source.nbytes, CHUNK):
            part = slice(start, min(start + CHUNK, source.nbytes))
            while self._written and self._written + CHUNK > WRITING:
                self._end_write()
            transfer = writing(activation.place[part], source[part])
            self._writing.append((activation, transfer, part.stop - part.start))
            self._written += part.stop - part.start

    def _end_write(self) -> None:
        activation, transfer, nbytes = self._writing.popleft()
        self._written -= nbytes
        transfer.wait()  # of one that fails the numbers stay in memory
        transfer.give_back()
        activation.parts -= 1
        if activation.parts == 0:
            activation.here = activation.host = None
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
        for activation in wanted:
            self._start(activation)

    def done(self) -> None:
        """A run's backward is over: what it alone has brought back goes."""
        if self._brought:
            self._forget(_alive(self._next))

    def _forget(self, but: Iterable[Activation]) -> None:
        """Lets go of what came back, or was to, but for these."""
        needed = {id(activation) for activation in but}
        kept = []
        for activation in _alive(self._brought):
            if id(activation) in needed:
                kept.append(weakref.ref(activation))
                continue
            if activation.arrived is not None:
                self._now().wait_event(activation.arrived)  # nothing else may get the memory before that
            if activation.place is not None and self.device.type == "cpu":
                self._free(activation.place.nbytes)
            activation.coming = activation.back = activation.arrived = None
        self._brought = kept

    def _start(self, activation: Activation) -> None:
        """Starts to bring a stretch back, unless it is here, or on its way."""
        if activation.here is not None or activation.back is not None or activation.coming is not None:
            return
        self._brought.append(weakref.ref(activation))
        if activation.host is None:
            assert activation.place is not None, "it is somewhere"
            activation.coming = reading(
                activation.place, own=Buffer(-(-activation.place.nbytes // ALIGNMENT) * ALIGNMENT)
            )
            return
        activation.back = torch.empty(activation.host.nbytes, dtype=torch.uint8, device=self.device)
        side = self._beside()
        with self._module().stream(side):
            activation.back.copy_(activation.host, non_blocking=True)
            activation.arrived = side.record_event()

    def bring(self, activation: Activation) -> Tensor:
        """The bytes of a stretch, on the device.

        Raises:
            RuntimeError: they cannot be read.
        """
        if activation.here is not None:
            return activation.here
        self._start(activation)
        if activation.coming is not None:
            coming, activation.coming = (
                activation.coming,
                None,
            )  # one that fails is not waited for again, but read again
            coming.wait()
            activation.back = coming.values.to(self.device, non_blocking=True)
        assert activation.back is not None, "it has been started"
        if activation.arrived is not None:
            now = self._now()
            now.wait_event(activation.arrived)
            activation.back.record_stream(now)
        return activation.back

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
    return [activation for activation in (ref() for ref in some) if activation is not None]


def _stretch(x: Tensor) -> tuple[int, int] | None:
    """Which bytes of its storage move for a tensor: all, or if that is much more, those that it spans; None if none."""
    whole, own = x.untyped_storage().nbytes(), x.nbytes
    if whole <= SPARSE * own:
        return (0, whole) if own else None
    start = int(x.storage_offset()) * x.dtype.itemsize
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if own else 0
    nbytes = span * x.dtype.itemsize
    return (start, start + nbytes) if 0 < nbytes <= SPARSE * own else None


class Offloading:
    """What of one run leaves the device. Called with a tensor that autograd saves; None for one that stays."""

    def __init__(self, away: Away, asked: Offload, file: File | None, run: StageRun) -> None:
        self.away, self.asked, self.file = away, asked, file
        self.left = run.away

    def __call__(self, x: Tensor) -> View | None:
        """What becomes of it."""
        view = self.away.leave(x, self.asked.above, self.file) if self._movable(x) else None
        if view is not None:
            self.left.append(weakref.ref(view.activation))
        return view

    def lets_go(self, x: Tensor) -> bool:
        """Whether an argument of the stage is not to be held by its graph."""
        return self._movable(x) and x.nbytes >= max(self.asked.above, 1)

    def _movable(self, x: Tensor) -> bool:
        """Whether a tensor is ordinary memory of the device."""
        plain = x.layout is torch.strided and not functorch.wrapped(x)
        plain = plain and (
            type(x) in (Tensor, torch.nn.Parameter) or (self.file is None and type(x) is dynamo.fake_tensors())
        )
        return plain and x.device == self.away.device and not x.is_neg() and tensors.place_of(x.detach()) is None


def offloading(away: Away, mesh: Callable[[], DeviceMesh], run: StageRun) -> Offloading | None:
    """What of a run leaves; None if nothing does.

    Raises:
        ValueError: it goes to disk, and nobody has said where.
    """
    asked, name = run.signature.options.remat, run.signature.name
    if not isinstance(asked, Offload):
        return None
    if not asked.moves(away.device.type):
        _warn_of_nothing(name)
        return None
    if asked.to == "host":
        return Offloading(away, asked, None, run)
    try:
        return Offloading(away, asked, placing.file_of(mesh(), "activations"), run)
    except ValueError as error:
        raise ValueError(
            f'{run.signature}: remat=offload(to="disk"), but nobody has said where: pass a '
            f"folder on a local disk, make_mesh(..., scratch=folder), or set {placing.SCRATCH}"
        ) from error


@functools.cache
def _warn_of_nothing(name: str) -> None:
    """Says so once for each stage."""
    _log.warning(
        'stage %s: remat="offload" keeps activations in the memory of the host, where they are anyway on a mesh of '
        'CPUs: it changes nothing here. remat=True saves memory everywhere, and remat=shardfn.offload("disk") too',
        name,
    )
