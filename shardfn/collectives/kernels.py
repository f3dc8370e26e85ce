"""One kernel for each collective, on plain tensors; each returns a fresh contiguous tensor.

On gloo the data is sent as tagged messages, which no different operation can receive. Other backends and traced code
use functional collectives, which a graph can hold. `size` is the number of ranks in `group`; dimensions are
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

# The dtypes that gloo can add; NCCL adds these and more. Other dtypes can be moved as bits, but not reduced.
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
    """Wraps a kernel: moves complex tensors as real ones, and returns no view, so that autograd allows writes."""

    def kernel(x: Tensor, *args: Any) -> Tensor:
        recorder = checker()
        if recorder is not None and plain(x):  # the recorder cannot follow data from other ranks
            with paused():
                out = kernel(x, *args)
            recorder.filled(out)
            return out
        with waiting.on(move.__name__, args[-1]):  # the last argument is the group
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
    """The sum of every rank's `x`; this rank gets its piece of it along `dim`."""
    pieces = _stack_pieces(x, dim, size)
    peers = _recorded("reduce_scatter", x, 1 - 1 / size, group, "exchange" if x.device.type == "cpu" else "native")
    if peers is not None:
        return messages.combined(messages.exchange(peers, pieces, "reduce_scatter", dim).unbind(), "sum")
    if x.device.type == "cpu":  # gloo's own is 2.5 to 6 times slower than an exchange and a local sum
        return _exchange(pieces, size, group).sum(0, dtype=x.dtype)
    return WIRE.wait_tensor(WIRE.reduce_scatter_tensor(pieces.flatten(), "sum", size, group)).view(pieces.shape[1:])


@_kernel
def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The `"sum"`, `"max"` or `"min"` of every rank's `x`; an empty group means this rank alone."""
    if not group:
        return copy(x)
    peers = _recorded("all_reduce", x, 2, group, "native")
    # gloo does not reduce bools; the maximum of their bytes is any, the minimum is all.
    bits = x.view(torch.uint8) if x.dtype == torch.bool else x
    if peers is not None:
        return messages.reduce(peers, bits, op).view(x.dtype)
    return WIRE.wait_tensor(WIRE.all_reduce(bits.contiguous(), op, group)).view(x.dtype)


@_kernel
def all_to_all(x: Tensor, split_dim: int, concat_dim: int, size: int, group: str) -> Tensor:
    """Piece `j` of `x` along `split_dim` goes to rank `j`; what arrives is concatenated along `concat_dim`."""
    peers = _recorded("all_to_all", x, 1 - 1 / size, group, "native")
    pieces = _stack_pieces(x, split_dim, size)
    if peers is not None:
        return _concatenate(messages.exchange(peers, pieces, "all_to_all", split_dim, concat_dim), concat_dim)
    return _concatenate(_exchange(pieces, size, group), concat_dim)


@_kernel
def permute(x: Tensor, source: list[int], index: int, group: str) -> Tensor:
    """Rank `i` gets `x` of rank `source[i]`, or zeros if that is -1; this rank is `index`.

    If ranks exchange by a collective, a rank that receives nothing sends itself a single zero and expands it, and a
    rank that sends nothing sends an empty piece of `x`. Both keep the exchange in place under a compiler, which could
    drop a collective with a constant result, and could move one that depends on no input ahead of others.
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
    arrived = _move(outgoing, WIRE.all_to_all_single, received, [piece.numel() for piece in pieces], group)
    return copy(arrived.view([1] * x.ndim).expand(x.shape))


def shifted(x: Tensor, by: int, index: int, size: int, group: str) -> Callable[[], Tensor]:
    """Starts to send `x` on by some ranks of a ring; returns a function that waits for the `x` that comes here."""
    peers = _recorded("ppermute", x, 1, group, "exchange", scheduled=True)
    source = [(rank - by) % size for rank in range(size)]
    if peers is not None:
        wait = messages.permute(peers, x, source)
    else:
        flat = x.contiguous().flatten()
        receive, send = ([len(flat) * mark for mark in marks] for marks in _marks(source, index))
        carrier = x.dtype if x.dtype in SUMMABLE else _CARRIERS[x.element_size()]
        started = WIRE.all_to_all_single(flat.view(carrier), receive, send, group)

        def wait() -> Tensor:
            return WIRE.wait_tensor(started).view(x.dtype).view(x.shape)

    def arrived() -> Tensor:
        with waiting.on("ppermute", group):
            return wait()

    return arrived


@_kernel
def ragged_all_to_all(x: Tensor, dim: int, send: list[int], receive: list[int], index: int, group: str) -> Tensor:
    """`send[j]` slices of `x` along `dim` go to rank `j`, in order, and `receive[j]` come from it; this is `index`."""
    share = 1 - send[index] / max(1, sum(send))
    peers = _recorded("all_to_all", x, share, group, "native")
    rows = x.movedim(dim, 0).contiguous()
    if peers is not None:
        return messages.ragged(peers, rows, send, receive, "ragged_all_to_all", dim).movedim(0, dim).contiguous()
    width = math.prod(rows.shape[1:])
    lengths = [[count * width for count in counts] for counts in (receive, send)]
    arrived = _move(rows, WIRE.all_to_all_single, *lengths, group).view(sum(receive), *rows.shape[1:])
    return arrived.movedim(0, dim).contiguous()


def inverse(source: Sequence[int]) -> list[int]:
    """Returns the inverse permutation."""
    return [source.index(rank) if rank in source else -1 for rank in range(len(source))]


def _marks(source: Sequence[int], index: int) -> tuple[list[int], list[int]]:
    """Returns two lists of 0 and 1 by rank: the ranks that this one receives from, and those that receive from it."""
    return [int(rank == source[index]) for rank in range(len(source))], [int(index == other) for other in source]


def _recorded(
    op: str, x: Tensor, share: float, group: str, native_transport: str, scheduled: bool | None = None
) -> messages.GlooPeers | None:
    """Enters a collective in the ledger; returns the peers that exchange messages, None if the backend moves `x`."""
    peers = messages.peers(x, group)
    if recording():
        size = process_groups.group_of(group).size() if op == "all_reduce" else 0
        share = share * (1 - 1 / size) if size else share
        transport = native_transport if peers is None else "direct"
        record(op, group, x.dtype, round(x.numel() * x.element_size() * share), transport, scheduled=scheduled)
    return peers


def piece(x: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Returns piece `index` of `size` equal ones of `x` along `dim`, as a copy."""
    length = x.shape[dim] // size
    return x.narrow(dim, index * length, length).clone(memory_format=torch.contiguous_format)


def copy(x: Tensor) -> Tensor:
    """Copies `x` to new contiguous memory: autograd would not notice a write through an alias."""
    return x.clone(memory_format=torch.contiguous_format)


def _exchange(pieces: Tensor, size: int, group: str) -> Tensor:
    lengths = [pieces[0].numel()] * size
    return _move(pieces, WIRE.all_to_all_single, lengths, lengths, group).view(pieces.shape)


def _move(x: Tensor, collective: Callable[..., Tensor], *args: Any) -> Tensor:
    """Runs a collective on the flattened tensor, viewed as a dtype of equal width that the backend supports."""
    carrier = x.dtype if x.dtype in SUMMABLE else _CARRIERS[x.element_size()]
    return WIRE.wait_tensor(collective(x.contiguous().view(carrier).flatten(), *args)).view(x.dtype)


def _stack_pieces(x: Tensor, dim: int, size: int) -> Tensor:
    """`size` equal pieces along `dim`, stacked in front: `[size, ...]`."""
    return x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).contiguous()


def _concatenate(pieces: Tensor, dim: int) -> Tensor:
    """The inverse of `_stack_pieces`."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)
