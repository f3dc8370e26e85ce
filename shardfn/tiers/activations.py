"""Moves activations off the device after autograd saves them, and back before backward needs them.

What moves is a range of a storage, with the bytes it has at that time; what autograd saved, once or several times, are
views of it. A range leaves while forward goes on. Backward follows the tape in reverse, and while one call's backward
runs, the activations of the call before it are on their way back.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.compat import autograd, dynamo, functorch
from shardfn.tiers import mapping, placing, tensors
from shardfn.tiers.tensors import ALIGNMENT, File
from shardfn.tiers.transfers import DirectBuffer, PendingRead, Transfer, reading, writing

CHUNK = 2**23  # bytes in one write
WRITING = 2**26  # most bytes in flight to disk
COPYING = 2**29  # most bytes in flight to the host
SPARSE = 8  # a range with more than this many times the bytes of the saved tensor does not move

_log = logging.getLogger("shardfn")


Where = Literal["host", "disk"]


@dataclass(frozen=True)
class Offload:
    """Activations that leave the device, as made by `offload`."""

    to: Where
    above: int
    recompute: bool = False

    def moves(self, device_type: str) -> bool:
        """Whether anything leaves a device of this type: a CPU's memory is the host's."""
        return self.to == "disk" or device_type != "cpu"


def offload(to: Where = "host", above: int = 2**20, *, recompute: bool = False) -> Offload:
    """A value for `stage(remat=...)`: activations leave the device in forward, and return in time for backward.

    They leave while the function goes on, and return while the backward of the following call computes; the bytes in
    flight are bounded. A tensor that is saved several times moves once. A stage's other arguments leave too, so the
    memory of a call does not grow with its activations. Gradients are those of `remat=False`, bit for bit.

    Args:
        to: "host", pinned memory of the host, which changes nothing on a CPU mesh; "disk", this rank's own file in the
            folder of `make_mesh(scratch=...)` or of the environment variable `SHARDFN_SCRATCH`.
        above: bytes; smaller tensors stay on the device.
        recompute: whether backward computes activations again, as by `remat=True`. Then only what a stage is given
            leaves, such as the hidden states between layers.

    Raises:
        ValueError: there is no such place; a negative number of bytes.
        TypeError: `above` is not an int, or `recompute` not a bool.

    Example:
        ``block = stage(block, remat=sf.offload("disk"))`` on ``make_mesh(shard=-1, scratch="/local/nvme")``

    Source:
        Rajbhandari et al. 2021, ZeRO-Infinity: activations that are needed again go to slower memory.
    """
    if to not in get_args(Where):
        raise ValueError(f'offload: to must be "host" or "disk", got {to!r}')
    if not isinstance(above, int) or isinstance(above, bool):
        raise TypeError(f"offload: above must be a number of bytes, got {above!r}")
    if above < 0:
        raise ValueError(f"offload: above must be a number of bytes, 0 or more, got {above}")
    if not isinstance(recompute, bool):
        raise TypeError(f"offload: recompute must be True or False, got {recompute!r}")
    return Offload(to, above, recompute)


class CallOfStage(Protocol):
    """The interface of a stage's call.

    Attributes:
        signature: the stage's name and options.
        away: weak references to its activations that have left.
        done: whether its backward has run.
    """

    signature: Any
    away: list[Any]
    done: bool


class Calls(Protocol):
    """The calls of a step, in order."""

    def before(self, call: Any) -> Sequence[CallOfStage]:
        """The calls whose backward follows that of a call."""


@dataclass(frozen=True, eq=False)
class View:
    """A tensor that autograd saved, as a view of a range that has left the device.

    Attributes:
        away: the object that moves the range.
        activation: the range.
        start: offset of the tensor in the range, in bytes.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        strides: strides of the tensor.
        conj: whether the tensor is a conjugate view.
        witness: an empty tensor that shares the saved tensor's version counter.
        version: the version when it was saved.
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

    def on_device(self) -> Tensor:
        """The saved tensor, on the device.

        Raises:
            RuntimeError: its bytes cannot be read.
        """
        memory = self.away.bring(self.activation)
        offset = (int(memory.storage_offset()) + self.start) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        tensor.set_(memory.untyped_storage(), offset, self.shape, self.strides)
        return tensor.conj() if self.conj else tensor


@dataclass(eq=False)
class Activation:
    """A range of a storage. It takes memory on the device while `here` or `back` is set.

    Attributes:
        here: the range itself, until it has left.
        storage: a weak reference to the storage: while it exists, no other storage gets the same id.
        host: a copy in pinned memory, if the device has other memory than the host.
        left: an event after which that copy is complete.
        place: the copy on disk.
        parts: how many parts of it are still to be written to disk.
        coming: the read from disk that is in flight.
        back: the range, back on the device.
        arrived: an event after which `back` is complete.
    """

    here: Tensor | None
    storage: Any
    host: Tensor | None = None
    left: Any = None
    place: Tensor | None = None
    parts: int = 0
    coming: PendingRead | None = None
    back: Tensor | None = None
    arrived: Any = None


class Away:
    """The activations of one schedule that have left the device or are in flight."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._activations: weakref.WeakValueDictionary[Any, Activation] = weakref.WeakValueDictionary()
        self._copying: deque[Activation] = deque()  # to the host
        self._writing: deque[tuple[Activation, Transfer, int]] = deque()
        self._copied = self._written = 0  # bytes in flight to the host, and to disk
        self._freed = 0
        self._brought: list[weakref.ref[Activation]] = []  # back on the device, or on their way back
        self._next: list[weakref.ref[Activation]] = []  # of the call whose backward comes next
        self._side: Any = None

    # --- out ---

    def leave(self, x: Tensor, above: int, file: File | None) -> View | None:
        """Starts to move the range of a tensor off the device, unless it is moving already; None if it stays.

        Args:
            x: a tensor that autograd saves.
            above: the fewest bytes that move.
            file: the file on disk to which it moves; None for the host.
        """
        self._poll_transfers()
        span = _stretch(x)
        if span is None or span[1] - span[0] < max(above, 1):
            return None
        start, stop = span
        key = autograd.storage_of(x), x._version, start, stop
        activation = self._activations.get(key)
        if activation is None:
            stretch = torch.empty(0, dtype=torch.uint8, device=x.device)
            stretch.set_(x.untyped_storage(), start, (stop - start,), (1,))
            activation = self._activations[key] = Activation(stretch, autograd.weak_storage(x))
            self._send(activation, stop - start, file)
        offset = int(x.storage_offset()) * x.dtype.itemsize - start
        witness = x.detach()
        witness.data = x.new_empty(0)  # keeps the version counter of the saved tensor, but not its memory
        return View(self, activation, offset, x.dtype, x.shape, x.stride(), x.is_conj(), witness, x._version)

    def _send(self, activation: Activation, nbytes: int, file: File | None) -> None:
        if file is not None:
            activation.place = tensors.empty((nbytes,), torch.uint8, file)
            activation.parts = -(-nbytes // CHUNK)
        if self.device.type == "cpu":
            self._write(activation)
        else:
            self._copy(activation, nbytes)

    def _copy(self, activation: Activation, nbytes: int) -> None:
        """Starts a copy to the host; the memory on the device must not be reused before the copy is complete."""
        assert activation.here is not None, "it leaves once"
        activation.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        side = self._copy_stream()
        with self._module().stream(side):
            activation.host.copy_(activation.here, non_blocking=True)
            activation.left = side.record_event()
        self._copying.append(activation)
        self._copied += nbytes
        # Bounds the pinned memory and the device memory that copies in flight hold.
        while self._copied > COPYING and len(self._copying) > 1:
            self._end_copy()

    def _end_copy(self) -> None:
        activation = self._copying.popleft()
        assert activation.host is not None, "it is on its way"
        self._current_stream().wait_event(
            activation.left
        )  # the allocator may reuse the memory on this stream, so it waits
        self._copied -= activation.host.nbytes
        activation.here = None
        if activation.place is not None:
            activation.left.synchronize()
            self._write(activation)

    def _write(self, activation: Activation) -> None:
        """Starts to write a range to disk, from the device if that is the CPU, else from its copy on the host."""
        source = activation.here if activation.host is None else activation.host
        assert source is not None, "it has not left"
        assert activation.place is not None, "it has a place"
        for start in range(0, source.nbytes, CHUNK):
            part = slice(start, min(start + CHUNK, source.nbytes))
            # Bounds the bytes in flight to disk.
            while self._written and self._written + CHUNK > WRITING:
                self._end_write()
            transfer = writing(activation.place[part], source[part])
            self._writing.append((activation, transfer, part.stop - part.start))
            self._written += part.stop - part.start

    def _end_write(self) -> None:
        activation, transfer, nbytes = self._writing.popleft()
        self._written -= nbytes
        transfer.wait()  # if this raises, the range stays in memory
        transfer.give_back()
        activation.parts -= 1
        if activation.parts == 0:
            activation.here = activation.host = None
        self._free(nbytes)

    def _free(self, nbytes: int) -> None:
        """Counts freed host memory, and from time to time returns it to the system."""
        self._freed += nbytes
        if self._freed > WRITING:
            self._freed = 0
            mapping.trim()

    def _poll_transfers(self) -> None:
        """Completes the transfers that have finished, without waiting."""
        while self._copying and self._copying[0].left.query():
            self._end_copy()
        while self._writing and all(part.done() for part in self._writing[0][1].parts):
            self._end_write()

    # --- back ---

    def ahead(self, tape: Calls | None, run: CallOfStage) -> None:
        """Starts to bring back what this run's backward reads, and what the next one reads."""
        if not self._activations:
            return
        self._poll_transfers()
        runs = tape.before(run) if tape is not None and run.signature.options.prefetch else []
        following = next((other for other in runs if other.away and not other.done), None)
        self._next = list(following.away) if following else []
        needed = [*_alive(run.away), *_alive(self._next)]
        self._release(needed)
        for activation in needed:
            self._start(activation)

    def done(self) -> None:
        """Ends a run's backward: releases what was brought back for it alone."""
        if self._brought:
            self._release(_alive(self._next))

    def _release(self, needed: Iterable[Activation]) -> None:
        """Releases everything that was brought back, or is coming back, except these activations."""
        ids = {id(activation) for activation in needed}
        retained = []
        for activation in _alive(self._brought):
            if id(activation) in ids:
                retained.append(weakref.ref(activation))
                continue
            if activation.arrived is not None:
                self._current_stream().wait_event(
                    activation.arrived
                )  # the memory must not be reused before the copy ends
            if activation.place is not None and self.device.type == "cpu":
                self._free(activation.place.nbytes)
            activation.coming = activation.back = activation.arrived = None
        self._brought = retained

    def _start(self, activation: Activation) -> None:
        """Starts to bring a range back, unless it is on the device or on its way."""
        if activation.here is not None or activation.back is not None or activation.coming is not None:
            return
        self._brought.append(weakref.ref(activation))
        if activation.host is None:
            assert activation.place is not None, "it is somewhere"
            activation.coming = reading(
                activation.place, target=DirectBuffer(-(-activation.place.nbytes // ALIGNMENT) * ALIGNMENT)
            )
            return
        activation.back = torch.empty(activation.host.nbytes, dtype=torch.uint8, device=self.device)
        side = self._copy_stream()
        with self._module().stream(side):
            activation.back.copy_(activation.host, non_blocking=True)
            activation.arrived = side.record_event()
        activation.back.record_stream(side)  # nobody may wait for it: a graph may be dropped before it asks

    def bring(self, activation: Activation) -> Tensor:
        """The bytes of a range, on the device.

        Raises:
            RuntimeError: they cannot be read.
        """
        if activation.here is not None:
            return activation.here
        self._start(activation)
        if activation.coming is not None:
            # Cleared first: after a failure the range is read again, not waited for.
            coming, activation.coming = activation.coming, None
            coming.wait()
            activation.back = coming.values.to(self.device, non_blocking=True)
        assert activation.back is not None, "it has been started"
        if activation.arrived is not None:
            stream = self._current_stream()
            stream.wait_event(activation.arrived)
            # The copy was made on another stream; the allocator must know that this one uses its memory.
            activation.back.record_stream(stream)
        return activation.back

    def end(self) -> None:
        """Ends a step: drops what backward has not used, and completes what is in flight."""
        self._next = []
        self._release(())
        while self._copying:
            self._end_copy()
        while self._writing:
            try:
                self._end_write()
            except RuntimeError as error:  # harmless: a range that was not written is still in memory
                _log.warning("%s", error)

    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    def _current_stream(self) -> Any:
        return self._module().current_stream(self.device)

    def _copy_stream(self) -> Any:
        """The stream for copies, made to wait for what the current stream has been given so far."""
        if self._side is None:
            self._side = self._module().Stream(device=self.device)
        self._side.wait_stream(self._current_stream())
        return self._side


def _alive(references: Iterable[weakref.ref[Activation]]) -> list[Activation]:
    return [activation for activation in (ref() for ref in references) if activation is not None]


def _stretch(x: Tensor) -> tuple[int, int] | None:
    """The bytes of a tensor's storage that move: all, or the tensor's span if the storage is much larger, or None."""
    total, used = x.untyped_storage().nbytes(), x.nbytes
    if total <= SPARSE * used:
        return (0, total) if used else None
    start = int(x.storage_offset()) * x.dtype.itemsize
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if used else 0
    nbytes = span * x.dtype.itemsize
    return (start, start + nbytes) if 0 < nbytes <= SPARSE * used else None


class Offloading:
    """Decides what one run offloads. Called with a tensor that autograd saves; returns None for one that stays."""

    def __init__(self, offloaded: Away, options: Offload, file: File | None, run: CallOfStage) -> None:
        self.away, self.asked, self.file = offloaded, options, file
        self.left = run.away

    def __call__(self, x: Tensor) -> View | None:
        """The view that is saved in place of a tensor; None if the tensor stays."""
        view = self.away.leave(x, self.asked.above, self.file) if self._movable(x) else None
        if view is not None:
            self.left.append(weakref.ref(view.activation))
        return view

    def _movable(self, x: Tensor) -> bool:
        """Whether a tensor is ordinary memory of the device: strided, without subclass or transform, not on disk."""
        plain = x.layout is torch.strided and not functorch.wrapped(x)
        plain = plain and (type(x) in (Tensor, torch.nn.Parameter) or (self.file is None and type(x) is dynamo.FAKE))
        return plain and x.device == self.away.device and not x.is_neg() and tensors.place_of(x.detach()) is None


def offloading(offloaded: Away, mesh: DeviceMesh, run: CallOfStage) -> Offloading | None:
    """Returns the policy for a run's activations; None if the run offloads nothing.

    Raises:
        ValueError: they would go to disk, but there is no folder.
    """
    options, name = run.signature.options.remat, run.signature.name
    if not isinstance(options, Offload):
        return None
    if not options.moves(offloaded.device.type):
        if not options.recompute:
            _warn_of_nothing(name)
        return None
    if options.to == "host":
        return Offloading(offloaded, options, None, run)
    try:
        return Offloading(offloaded, options, placing.file_of(mesh, "activations"), run)
    except ValueError as error:
        raise ValueError(
            f'{run.signature}: remat=offload(to="disk"), but the folder is unknown: pass a '
            f"folder on a local disk, make_mesh(..., scratch=folder), or set {placing.SCRATCH}"
        ) from error


@functools.cache
def _warn_of_nothing(name: str) -> None:
    """Warns once for each stage; the cache remembers the names."""
    _log.warning(
        'stage %s: remat="offload" keeps activations in the memory of the host, where they are anyway on a mesh of '
        'CPUs: it changes nothing here. remat=True saves memory everywhere, and remat=shardfn.offload("disk") too',
        name,
    )
