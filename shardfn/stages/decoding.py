"""Decodes quantized parameters for a stage's function, into memory that all stages share.

Tensors that autograd saved are views of that memory; they stay valid, because backward decodes the same bytes to the
same place before it reads them. So a stage keeps only its quantized bytes, however many stages there are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.compat import autograd, functorch
from shardfn.debugging import debugging
from shardfn.quant.packed import Packed
from shardfn.shards.layout import aligned
from shardfn.stages.ring import ordinary_tensors
from shardfn.stages.signature import Signature


class Memory:
    """Memory into which one run after another decodes its parameters.

    Attributes:
        buffer: the bytes; decoded parameters are views of them.
        busy: whether a function or its backward is using the contents.
        holds: mark of the run whose parameters it contains; None for none.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.busy = False
        self.holds: object = None
        with ordinary_tensors():
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._write = self.buffer.data  # has its own version counter, so autograd does not notice writes

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Marks the memory as in use; restores the contents of an outer run that was using it."""
        outer, held, self.busy = self.buffer.clone() if self.busy else None, self.holds, True
        try:
            yield
        finally:
            self.busy = outer is not None
            with ordinary_tensors():
                if outer is not None:
                    self._write.copy_(outer)
                    self.holds = held
                elif debugging.memory and not functorch.inside_transform():
                    self._write.fill_(255)  # nan or -1, so that a late read is noticed
                    self.holds = None

    def put(self, at: int, x: Tensor) -> Tensor:
        """Writes a tensor at an offset; returns a view, whose version counter the write leaves as it is."""
        with ordinary_tensors():
            self._write[at : at + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
            return self.buffer[at : at + x.nbytes].view(x.dtype).view(x.shape).detach()


class Decoded(NamedTuple):
    """A decoded parameter, its offset in the memory, and a private second tensor for the same memory."""

    packed: Packed
    at: int
    parameter: Tensor
    twin: Tensor


class Decoding:
    """Decodes one run's parameters. Called with a quantized one; `again` decodes all of them to the same places.

    Attributes:
        memory: the memory that holds them.
        each: the parameters passed to the function.
    """

    __slots__ = ("_at", "_dtype", "_mark", "each", "memory")

    def __init__(self, memory: Memory, dtype: torch.dtype | None) -> None:
        self.memory, self._dtype, self._at = memory, dtype, 0
        self.each: list[Decoded] = []
        self._mark = object()  # not `self`: the memory outlives the run, and must not keep its bytes alive

    def __call__(self, packed: Packed) -> Tensor:
        """The decoded parameter."""
        self.memory.holds = self._mark
        x = self.memory.put(self._at, packed.decoded(self._dtype))
        self.each.append(Decoded(packed, self._at, x, x.detach()))
        self._at += aligned(x.nbytes, torch.uint8)
        return x

    def again(self) -> None:
        """Decodes all parameters once more, unless the memory still holds them."""
        if self.memory.holds is self._mark:
            return
        self.memory.holds = None  # in case decoding fails half-way
        for decoded in self.each:
            self.memory.put(decoded.at, decoded.packed.decoded(self._dtype))
        self.memory.holds = self._mark

    def intact(self) -> bool:
        """Whether the decoded parameters still equal what their bytes decode to, bit for bit."""
        pairs = ((decoded.twin, decoded.packed.decoded(self._dtype)) for decoded in self.each)
        return all(torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)  # bitwise, for nan and -0

    @property
    def storage(self) -> int:
        """Id of the memory's storage."""
        return autograd.storage_of(self.memory.buffer)


class Memories:
    """The decoding memory of one engine: one while runs with quantized parameters follow each other on a stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: Memory | None = None
        self._latest: dict[Any, weakref.ref[Memory]] = {}  # by the stream on which it is used

    def take(self, signature: Signature) -> Decoding | None:
        """A `Decoding` for a run; None if none of its parameters are quantized."""
        if not signature.packed:
            self._kept = None  # frees the memory for a large stage without quantized parameters, such as the last
            return None
        dtype = signature.options.gather_dtype
        nbytes = sum(aligned(part.numel * (dtype or part.dtype).itemsize, torch.uint8) for part in signature.packed)
        on_cpu = self.device.type == "cpu"
        stream = None if on_cpu else torch.get_device_module(self.device).current_stream(self.device)
        latest = self._latest.get(stream)
        memory = None if latest is None else latest()
        if memory is None or len(memory.buffer) < nbytes:
            memory = Memory(nbytes, self.device)  # runs that still use a smaller one keep that alive
            self._latest[stream] = weakref.ref(memory)
        self._kept = memory
        return Decoding(memory, dtype)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
