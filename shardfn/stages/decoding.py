"""Parameters in few bits as a stage's function meets them: decoded, into memory that all stages share.

What autograd saved of them are views of that memory; they stay valid, because backward decodes the same bytes to the
same place before it reads them. So a stage keeps its bytes alone, however many stages there are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.compat import autograd, functorch
from shardfn.debugging import debugging
from shardfn.quant.packed import Packed
from shardfn.shards.buffer import ALIGNMENT
from shardfn.stages.ring import ordinary_tensors
from shardfn.stages.signature import Signature


class Memory:
    """Bytes that one run after another decodes its parameters to.

    Attributes:
        buffer: of which decoded parameters are views.
        busy: whether a function, or its backward, is running on what it holds.
        holds: the mark of the run whose parameters it has; None for nobody's.
    """

    __slots__ = ("__weakref__", "_write", "buffer", "busy", "holds")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.busy = False
        self.holds: object = None
        with ordinary_tensors():
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._write = self.buffer.data  # a version counter of its own: autograd takes no write for a change

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """In use; what another run has in it, around this one, is there again afterwards."""
        around, before, self.busy = self.buffer.clone() if self.busy else None, self.holds, True
        try:
            yield
        finally:
            self.busy = around is not None
            with ordinary_tensors():
                if around is not None:
                    self._write.copy_(around)
                    self.holds = before
                elif debugging.memory and not functorch.inside_transform():
                    self._write.fill_(255)  # whoever reads it still will see that
                    self.holds = None

    def put(self, at: int, x: Tensor) -> Tensor:
        """Writes a tensor there; a view that is read-only for autograd."""
        with ordinary_tensors():
            self._write[at : at + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
            return self.buffer[at : at + x.nbytes].view(x.dtype).view(x.shape).detach()


class Decoded(NamedTuple):
    """A parameter, where in the memory it is, and the same memory by a tensor that nobody else has."""

    packed: Packed
    at: int
    parameter: Tensor
    twin: Tensor


class Decoding:
    """One run's parameters, decoded. Called with one in few bits; `again` decodes all of them to where they were.

    Attributes:
        memory: where they are.
        each: what the function was given.
    """

    __slots__ = ("_at", "_dtype", "_mark", "each", "memory")

    def __init__(self, memory: Memory, dtype: torch.dtype | None) -> None:
        self.memory, self._dtype, self._at = memory, dtype, 0
        self.each: list[Decoded] = []
        self._mark = object()  # the memory outlives runs, and must not keep their bytes

    def __call__(self, packed: Packed) -> Tensor:
        """The parameter."""
        self.memory.holds = self._mark
        x = self.memory.put(self._at, packed.decoded(self._dtype))
        self.each.append(Decoded(packed, self._at, x, x.detach()))
        self._at += room(x.nbytes)
        return x

    def again(self) -> None:
        """Puts all of them there once more, unless nobody else's were there since."""
        if self.memory.holds is self._mark:
            return
        self.memory.holds = None  # until all of them are there
        for decoded in self.each:
            self.memory.put(decoded.at, decoded.packed.decoded(self._dtype))
        self.memory.holds = self._mark

    def intact(self) -> bool:
        """Whether what was lent still has the numbers that the bytes stand for."""
        pairs = ((decoded.twin, decoded.packed.decoded(self._dtype)) for decoded in self.each)
        return all(torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)  # nan and signs of zero too

    @property
    def storage(self) -> int:
        """The number of the storage that they are in."""
        return autograd.storage_of(self.memory.buffer)


class Memories:
    """What the runs of one engine decode to: one memory while such runs follow each other, or a graph needs it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: Memory | None = None
        self._known: Callable[[], Memory | None] = lambda: None

    def take(self, signature: Signature) -> Decoding | None:
        """For a run; None if its parameters are not in few bits."""
        if not signature.packed:
            self._kept = None  # a large stage of another kind, such as the last, has its room
            return None
        dtype = signature.options.gather_dtype
        nbytes = sum(room(part.numel * (dtype or part.dtype).itemsize) for part in signature.packed)
        memory = self._known()
        if memory is None or len(memory.buffer) < nbytes:
            memory = Memory(nbytes, self.device)  # runs that still need the smaller one keep it alive
            self._known = weakref.ref(memory)
        self._kept = memory
        return Decoding(memory, dtype)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def room(nbytes: int) -> int:
    """The bytes that a parameter of so many takes up."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
