"""How bytes move: one kernel a collective, on plain tensors, each returning a fresh contiguous tensor.

On gloo they are messages, which a rank that does something else does not take for its own; elsewhere, and in code that
is traced, functional collectives, which a graph can hold. `size` is the number of ranks in `group`, and dimensions are
non-negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.check.callsites import paused
from shardfn.check.recording import current as checker
from shardfn.collectives import messages
from shardfn.collectives.ledger import record, recording
from shardfn.compat import process_groups
from shardfn.compat.dispatch import WIRE, plain
from shardfn.mesh import waiting

# What gloo adds up; NCCL takes these and more. Other dtypes can be moved, as bits, but not reduced.
SUMMABLE = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
_CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def _kernel(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A complex tensor travels as its two parts; what comes out is not a view, so autograd allows writing into it."""

    def kernel(x: Tensor, *args: Any) -> Tensor:
        recorder = checker()
        if recorder is not None and plain(x):  # which cannot know what other ranks have sent
            with paused():
                out = kernel(x, *args)
            recorder.filled(out)
            return out
        with waiting.on(move.__name__, args[-1]):  # its group
            if x.is_complex():
                out = torch.view_as_complex(move(torch.view_as_real(x.resolve_conj()), *args))
            else:
                out = move(x, *args)
        return torch.ops.aten._unsafe_view.default(out, out.shape)

    return kernel


@_kernel
def all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """Every rank's `x`, concatenated along `dim`."""
    peers = _recorded("all_gather", x, size - 1, group, "native")
    if peers is not None:
        return _concatenate(messages.gather(peers, x, "all_gather", dim), dim)
    pieces = _move(x, WIRE.all_gather_into_tensor, size, group)
    return _concatenate(pieces.view(size, *x.shape), dim)


@_kernel
def reduce_scatter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """The sum of every rank's `x`, of which this rank gets its piece along `dim`."""
    pieces = _split(x, dim, size)
    peers = _recorded("reduce_scatter", x, 1 - 1 / size, group, "exchange" if x.device.type == "cpu" else "native")
    if peers is not None:
        return messages.combined(messages.exchange(peers, pieces, "reduce_scatter", dim).unbind(), "sum")
    if x.device.type == "cpu":  # gloo's own is 2.5 to 6 times slower than an exchange and a local sum
        return _exchange(pieces, size, group).sum(0, dtype=x.dtype)
    return _wait(WIRE.reduce_scatter_tensor(pieces.flatten(), "sum", size, group)).view(pieces.shape[1:])


@_kernel
def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The `"sum"`, `"max"` or `"min"` of every rank's `x`; no group is this rank alone."""
    if not group:
        return copy(x)
    peers = _recorded("all_reduce", x, 2, group, "native")
    bits = x.view(torch.uint8) if x.dtype == torch.bool else x
    if peers is not None:
        return messages.reduce(peers, bits, op).view(x.dtype)
    return _wait(WIRE.all_reduce(bits.contiguous(), op, group)).view(x.dtype)


@_kernel
def all_to_all(x: Tensor, split_dim: int, concat_dim: int, size: int, group: str) -> Tensor:
    """Piece `j` of `x` along `split_dim` goes to rank `j`; what arrives is concatenated along `concat_dim`."""
    peers = _recorded("all_to_all", x, 1 - 1 / size, group, "native")
    pieces = _split(x, split_dim, size)
    if peers is not None:
        return _concatenate(messages.exchange(peers, pieces, "all_to_all", split_dim, concat_dim), concat_dim)
    return _concatenate(_exchange(pieces, size, group), concat_dim)


@_kernel
def permute(x: Tensor, source: list[int], index: int, group: str) -> Tensor:
    """`x` of rank `source[i]` goes to rank `i`, which gets zeros where that is -1; this rank is `index`.

    Where ranks exchange by a collective, one that hears from nobody sends itself, rank `index`, a zero and spreads what
    comes. That, and sending nothing as an empty piece of `x`, keeps the exchange in its place under a compiler: one
    that saw its result to be constant would drop it, and one that saw it to need nothing might move it before others.
    """
    receive, send = _marks(source, index)
    peers = _recorded("ppermute", x, sum(send), group, "exchange")
    if peers is not None:
        return messages.permute(peers, x, source)()
    flat = x.flatten()
    if any(receive):
        outgoing = flat if any(send) else flat[:0]
        lengths = [[len(flat) * mark for mark in marks] for marks in (receive, send)]
        return _move(outgoing, WIRE.all_to_all_single, *lengths, group).view(x.shape)
    zero, ranks = x.new_zeros(1), range(len(send))
    pieces = [zero if rank == index else flat if send[rank] else flat[:0] for rank in ranks]
    received = [int(rank == index) for rank in ranks]
    outgoing = torch.cat(pieces)
    came = _move(outgoing, WIRE.all_to_all_single, received, [piece.numel() for piece in pieces], group)
    return copy(came.view([1] * x.ndim).expand(x.shape))


def shifted(x: Tensor, index: int, size: int, group: str) -> Callable[[], Tensor]:
    """Begins to send `x` to the next rank of a ring; the function returned waits for what comes from the one before."""
    peers = _recorded("ppermute", x, 1, group, "exchange", scheduled=True)
    source = [(rank - 1) % size for rank in range(size)]
    if peers is not None:
        come = messages.permute(peers, x, source)
    else:
        flat = x.contiguous().flatten()
        receive, send = ([len(flat) * mark for mark in marks] for marks in _marks(source, index))
        carrier = x.dtype if x.dtype in SUMMABLE else _CARRIERS[x.element_size()]
        started = WIRE.all_to_all_single(flat.view(carrier), receive, send, group)

        def come() -> Tensor:
            return _wait(started).view(x.dtype).view(x.shape)

    def arrived() -> Tensor:
        with waiting.on("ppermute", group):
            return come()

    return arrived


@_kernel
def ragged_all_to_all(x: Tensor, dim: int, send: list[int], receive: list[int], index: int, group: str) -> Tensor:
    """`send[j]` places of `x` along `dim` go to rank `j`, in order, and `receive[j]` come from it; this is `index`."""
    share = 1 - send[index] / max(1, sum(send))
    peers = _recorded("all_to_all", x, share, group, "native")
    rows = x.movedim(dim, 0).contiguous()
    if peers is not None:
        return messages.ragged(peers, rows, send, receive, "ragged_all_to_all", dim).movedim(0, dim).contiguous()
    width = math.prod(rows.shape[1:])
    lengths = [[count * width for count in counts] for counts in (receive, send)]
    came = _move(rows, WIRE.all_to_all_single, *lengths, group).view(sum(receive), *rows.shape[1:])
    return came.movedim(0, dim).contiguous()


def inverse(source: Sequence[int]) -> list[int]:
    """The permutation that sends everything back."""
    return [source.index(rank) if rank in source else -1 for rank in range(len(source))]


def _marks(source: Sequence[int], index: int) -> tuple[list[int], list[int]]:
    """Which rank this one hears from, and which hear from it, marked with a 1."""
    return [int(rank == source[index]) for rank in range(len(source))], [int(index == one) for one in source]


def _recorded(
    op: str, x: Tensor, share: float, group: str, how: str, scheduled: bool | None = None
) -> messages.Peers | None:
    """With whom messages are exchanged, if they are, or how else `x` moves: entered in the ledger."""
    peers = messages.peers(x, group)
    if recording():
        size = process_groups.group_of(group).size() if op == "all_reduce" else 0
        share = share * (1 - 1 / size) if size else share
        way = how if peers is None else "direct"
        record(op, group, x.dtype, round(x.numel() * x.element_size() * share), way, scheduled=scheduled)
    return peers


def piece(x: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Piece `index` of `size` equal ones of `x` along `dim`."""
    length = x.shape[dim] // size
    return x.narrow(dim, index * length, length).clone(memory_format=torch.contiguous_format)


def copy(x: Tensor) -> Tensor:
    """`x` in memory of its own: an alias would let a write through it pass unseen by autograd."""
    return x.clone(memory_format=torch.contiguous_format)


def _exchange(pieces: Tensor, size: int, group: str) -> Tensor:
    lengths = [pieces[0].numel()] * size
    return _move(pieces, WIRE.all_to_all_single, lengths, lengths, group).view(pieces.shape)


def _move(x: Tensor, collective: Callable[..., Tensor], *args: Any) -> Tensor:
    """Flat, and as bits of the same width where the backend does not know the dtype."""
    carrier = x.dtype if x.dtype in SUMMABLE else _CARRIERS[x.element_size()]
    return _wait(collective(x.contiguous().view(carrier).flatten(), *args)).view(x.dtype)


def _wait(started: Tensor) -> Tensor:
    done: Tensor = WIRE.wait_tensor(started)
    return done


def _split(x: Tensor, dim: int, size: int) -> Tensor:
    """`size` equal pieces along `dim`, stacked in front: `[size, ...]`."""
    return x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).contiguous()


def _concatenate(pieces: Tensor, dim: int) -> Tensor:
    """The inverse of `_split`."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)
