"""Quantized collectives: values are quantized where they are sent, and summed in float32 where they arrive.

A tag follows the bytes of each piece. It identifies the buffer to which the piece belongs, and is equal on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives.into_buffers import (
    TRANSPORTS,
    CombinedWorks,
    Communicator,
    Handle,
    Later,
    compare_buffers,
    exchanged,
    transport,
)
from shardfn.collectives.late_checks import ROOM, check
from shardfn.collectives.ledger import record, recording
from shardfn.compat.devices import elements_at_a_time
from shardfn.debugging import debugging
from shardfn.quant.formats import Format

STEP = 64  # bytes: the length of a piece is a multiple of this
TAG = 8  # bytes of a tag
CACHED = 2**18  # numbers decoded at a time on a CPU
Tag = Callable[[torch.device], Tensor]
"""Returns a tag, bytes `[TAG]`, on a device."""


@dataclass(frozen=True)
class Wire:
    """The encoding of pieces of `numel` values for a quantized collective.

    Attributes:
        format: format of the bytes.
        numel: numbers in a piece.
        room: bytes reserved for the tag.
    """

    format: Format
    numel: int
    room: int

    def __str__(self) -> str:
        return str(self.format)

    @property
    def used(self) -> int:
        """Bytes of the encoded numbers."""
        return self.format.nbytes(self.numel)

    @property
    def length(self) -> int:
        """Bytes of a piece, including the tag and padding."""
        return -(-(self.used + self.room) // STEP) * STEP

    def write(self, x: Tensor, pieces: Tensor) -> None:
        """Encodes `[..., numel]` into `[..., length]`, without the tag."""
        pieces[..., : self.used].copy_(self.format.encode(x))

    def read(self, pieces: Tensor, dtype: torch.dtype) -> Tensor:
        """Decodes `[..., length]` to `[..., numel]`."""
        return self.format.decode(pieces[..., : self.used], self.numel, dtype)

    def read_all(self, pieces: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Decodes `[n, length]`, several pieces at a time, so that intermediate results stay small.

        Yields:
            The index of the first of them, and their numbers `[n, numel]`.
        """
        step = max(1, elements_at_a_time(pieces.device, CACHED) // max(1, self.numel))
        for start in range(0, len(pieces), step):
            yield start, self.read(pieces[start : start + step], dtype)

    def rounded(self, x: Tensor, dtype: torch.dtype, holes: Sequence[tuple[int, int]]) -> Tensor:
        """`x [numel]` after encoding and decoding, with zeros in its holes; the derivative ignores the rounding."""
        bounds = [0, *(bound for start, length in holes for bound in (start, start + length)), len(x)]
        pieces = [x[a:b] for a, b in itertools.pairwise(bounds)]
        x = torch.cat([torch.zeros_like(piece) if k % 2 else piece for k, piece in enumerate(pieces)])
        arrived = self.format.decode(self.format.encode(x), self.numel, dtype).to(x.dtype)
        return arrived.detach() + (x - x.detach())

    def tags(self, pieces: Tensor) -> Tensor:
        """Views of the tags in `[..., length]`."""
        return pieces[..., self.length - self.room :]


def zero_padding(x: Tensor, holes: Sequence[tuple[int, int]]) -> Tensor:
    """A detached shard `[n]` whose holes are overwritten with zeros.

    An optimizer may have left any value in padding, such as the nan of 0/0, which would spoil the scale of a quantized
    block.
    """
    if not holes:
        return x.detach()
    x = x.clone() if x.is_inference() else x.data  # `.data`: a write to padding must not bump the version counter
    torch._foreach_zero_([x[start : start + length] for start, length in holes])
    return x


def scratch_bytes(numel: int, comm: Communicator, format: Format) -> int:
    """The bytes of scratch memory that a `reduce_scatter` of `numel` numbers asks for."""
    return 2 * comm.axis.size * Wire(format, numel // comm.axis.size, TAG).length


def reduce_scatter(
    flat: Tensor, out: Tensor, comm: Communicator, format: Format, tag: Tag, scratch: Callable[[int], Tensor]
) -> Handle:
    """Fills `out [n]` with the sum over ranks of this rank's piece of `flat [size * n]`.

    Each piece is rounded once, except this rank's own, and sums are in the dtype of `out`: Quantized Gradient ZeRO
    (Wang et al. 2023, ZeRO++, section 3.3) by one all-to-all. `scratch(n)` lends `n` bytes until the wait.
    """
    if debugging.collectives:
        compare_buffers("reduce_scatter", comm, (flat.nbytes, flat.dtype), more=f" in {format}")
    size, index = comm.axis.size, comm.axis.index
    wire = Wire(format, len(flat) // size, TAG)
    pieces = flat.view(size, -1)
    sent, received = scratch(scratch_bytes(len(flat), comm, format)).view(2, size, -1).unbind()
    wire.write(pieces, sent)
    wire.tags(sent).copy_(tag(sent.device))
    _record("reduce_scatter", wire, comm, size - 1)

    def add() -> None:
        _compare_tags(wire, received, tag, comm, own_index=index)
        out.copy_(pieces[index])
        for received_pieces in (received[:index], received[index + 1 :]):
            for _, numbers in wire.read_all(received_pieces, out.dtype):
                for row in numbers:  # one by one, so that sums do not depend on the number decoded at once
                    out.add_(row)

    if transport("reduce_scatter", comm) == "direct":
        work = exchanged([[row] for row in received], [[row] for row in sent], comm)
    else:
        work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=comm.reductions, async_op=True)
    return CombinedWorks([work], add)


def all_reduce(x: Tensor, comm: Communicator, format: Format, tag: Tag, scratch: Callable[[int], Tensor]) -> Handle:
    """Sums `x [n]` over ranks in place: a `reduce_scatter`, then an all-gather of the sums, rounded once more."""
    size, index = comm.axis.size, comm.axis.index
    n = -(-len(x) // size)
    padded = torch.cat((x, x.new_zeros(n * size - len(x))))
    part, wire = torch.empty_like(padded[:n]), Wire(format, n, TAG)
    scattered = reduce_scatter(padded, part, comm, format, tag, scratch)

    def gather() -> Handle:
        encoded = scratch(size * wire.length).view(size, -1)
        wire.write(part, encoded[index])
        wire.tags(encoded[index]).copy_(tag(x.device))
        _record("all_gather", wire, comm, size - 1)

        def finish() -> None:
            _compare_tags(wire, encoded, tag, comm)
            for start, numbers in wire.read_all(encoded, x.dtype):
                into = x[start * n : (start + len(numbers)) * n]
                into.copy_(numbers.view(-1)[: len(into)])

        move = TRANSPORTS["all_gather"][transport("all_gather", comm)]
        return CombinedWorks([move(encoded.view(-1), comm)], finish)

    return Later(scattered, gather)


def _record(op: str, wire: Wire, comm: Communicator, pieces: int) -> None:
    if recording():
        record(op, comm.axis.group, torch.uint8, pieces * wire.length, str(wire.format), comm.names)


def _compare_tags(wire: Wire, pieces: Tensor, tag: Tag, comm: Communicator, own_index: int | None = None) -> None:
    """Raises RuntimeError unless the tags of all received pieces `[n, length]` equal this rank's tag."""

    def wrong(tags: Tensor, start: int) -> str | None:
        expected = tag(tags.device)
        if all(torch.equal(row, expected) for i, row in enumerate(tags, start) if i != own_index):
            return None
        return "ranks sum the gradients of different stages, or in different formats"

    tags, step = wire.tags(pieces), ROOM // wire.room
    for start in range(0, len(tags) if comm.checks else 0, step):
        check(tags[start : start + step], partial(wrong, start=start))
