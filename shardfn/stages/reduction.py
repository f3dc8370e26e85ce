"""Reduces gradients of a stage's parameters to gradients of its shards.

A gradient takes up to three hops: a reduce-scatter over the shard axes, a second one over those replica axes that shard
the optimizer state, and an all-reduce over the other replica axes. They overlap with the next stage's backward. A
gradient in flight must not be read. So only a `Step`, which collects gradients outside of autograd and waits for all of
them at its end, leaves them in flight; other callers wait at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import compressed
from shardfn.collectives.into_buffers import (
    Communicator,
    Handle,
    all_gather,
    all_reduce,
    arrived,
    reduce_scatter,
    scatter_by_tree,
    scatter_pieces,
)
from shardfn.collectives.late_checks import check
from shardfn.collectives.ledger import attributed_to
from shardfn.compat import devices
from shardfn.mesh import waiting
from shardfn.mesh.exact import PartSums
from shardfn.quant.formats import Format
from shardfn.shards.layout import ALIGNMENT, Layout
from shardfn.stages.buffers import Buffer, Pool
from shardfn.stages.routes import RankTree, Reduction
from shardfn.tiers import placing
from shardfn.tiers.offload import GradOffload
from shardfn.transforms.step import Defer, GradientSum, Parts, Step, wider

_HOST = torch.device("cpu")
_Memory = Callable[[int, torch.dtype], Tensor]


class PendingReduction:
    """One gradient in flight: its current hop, and the hops that follow.

    Attributes:
        out: the tensor that the current hop sums; for the first hop, the one that it fills.
        hops: the hops that start after the current one.
        levels: the current scatter and those that follow, if scatters along single axes replace the first hop.
        source: the tensors that the first hop reads, until it has ended: gradients, or buffers with copies of them.
        sends: whether the first hop is in flight.
        failed: whether a wait failed, so that the hop may still read the source.
        left: on an accelerator, the event after which no hop reads the source, if later hops were started ahead.
        held: the tensors that those later hops read.
        landed: on an accelerator, the event after which a quantized gradient is decoded.
        of_parts: in an exact step, the sum over parts to which it is added.
        ends: whether `out` contains the end of the full buffer, with its marks.
        marks: dtype of the marks there, for the current hop; None if they are not checked.
    """

    under_way: Handle | None = None
    along: tuple[str, Communicator] | None = None
    into: Tensor | None = None
    marks: torch.dtype | None = None
    sends = failed = False
    left: Any = None
    landed: Any = None
    of_parts: PartSums | None = None

    def __init__(
        self, reduction: Reduction, out: Tensor, total: GradientSum | None, deferred: bool, scattered: bool = False
    ) -> None:
        route, shard = reduction.route, reduction.route.shard
        self.reduction, self.out, self.total = reduction, out, total
        self.levels = [] if scattered else list(route.levels)
        hops = [] if deferred else [("reduce_scatter", route.split), ("all_reduce", route.replica)]
        self.hops = [("reduce_scatter", level.along) for level in self.levels[1:]]
        self.hops += [(op, comm) for op, comm in hops if comm is not None]
        index = 0 if shard is None else shard.axis.index
        self.ends = shard is None or (route.tree.pieces[index] if route.tree else index) == shard.axis.size - 1
        self.held: list[Tensor] = []
        self.source: Sequence[Any] = ()
        self.turn = 0  # in which it started
        self.made_on = None if out.device.type in ("cpu", "meta") else _stream(out)

    def scattering(
        self, handle: Handle, shard: Communicator, marks: torch.dtype, source: Sequence[Any]
    ) -> PendingReduction:
        """Sets the first hop, which is in flight, and its source; `marks` is the dtype of the marks at its end."""
        self.under_way, self.along, self.sends, self.source = handle, ("reduce_scatter", shard), True, source
        self.into, self.marks = self.out, marks if shard.checks and self.reduction.format is None else None
        return self

    def begin(self, into: Tensor | None = None) -> PendingReduction:
        """Starts the next hop, if there is one; a reduce-scatter fills `into`, or new memory."""
        if not self.hops:
            return self
        op, comm = self.along = self.hops.pop(0)
        layout, out, scatters, self.marks = self.reduction.layout, self.out, op == "reduce_scatter", None
        if self.reduction.format is None:
            marks = _marks(layout, out.dtype, out.device)
            marks_length = len(marks) * (comm.axis.size if scatters else 1)
            if self.ends and comm.checks and len(out) >= marks_length:
                self.marks = out.dtype
                out[len(out) - len(marks) :].copy_(marks)
        elif scatters:
            self.levels = self.levels[1:]
            out = self.levels[0].ordered(out) if self.levels else out
        self.into = out.new_empty(len(out) // comm.axis.size) if scatters and into is None else into
        with attributed_to(layout.stage, backward=True):
            self.under_way = _hop(self.reduction, comm, out, self.into, lambda n, dtype: out.new_empty(n, dtype=dtype))
        return self

    def ahead(self, side: Any) -> None:
        """Starts all following hops on an accelerator's side stream, which waits for each in place of this stream.

        Quantized gradients are also decoded there. `held` keeps the tensors that a hop reads until the current stream
        has waited, too: their memory belongs to the current stream, and the collective holds it only until the first
        wait.
        """
        module = torch.get_device_module(side.device)
        encoded = self.reduction.format is not None
        while self.hops or (encoded and self.under_way is not None):
            # `into` is allocated on the current stream, whose earlier work may still use that memory.
            op, comm = self.hops[0] if self.hops else ("", None)
            into = self.out.new_empty(len(self.out) // comm.axis.size) if comm and op == "reduce_scatter" else None
            side.wait_stream(module.current_stream(side.device))
            with module.stream(side):
                if self.under_way is not None:
                    self._land()
                self.left = self.left or side.record_event()
                self.held.append(self.out)
                self.begin(into)
        self.landed = side.record_event() if encoded and self.left is not None else None  # else `side` did nothing

    def advance(self) -> None:
        """Waits until no hop reads the source, and the last hop is in flight."""
        if self.left is not None:
            # The source's memory returns to this stream, which so has to wait for the hop that reads it on the side.
            torch.get_device_module(self.out.device).current_stream(self.out.device).wait_event(self.left)
            self.left = None
        if self.under_way is not None and (self.sends or self.hops):
            self._land()
            self.begin()
        if self.source:
            self._let_go()

    def _let_go(self) -> None:
        """Releases the source, whose memory returns to the stream on which it was allocated."""
        if self.failed:
            return
        if self.made_on is not None and (current := _stream(self.out)) != self.made_on:
            self.used_on(current)
        for x in self.source:
            if type(x) is Buffer:
                x.under_way = False
        self.source = ()

    def used_on(self, stream: Any) -> None:
        """Tells the allocator that this stream uses the gradient's memory."""
        for x in (*self.source, *self.held, self.out, self.into):
            if x is not None:
                (x.all if type(x) is Buffer else x).record_stream(stream)

    def wait(self) -> Tensor:
        """Waits for all hops; returns the reduced gradient, or adds it to the step's sum."""
        while self.under_way is not None:
            self._land()
            self.begin()
        if self.landed is not None:
            torch.get_device_module(self.out.device).current_stream(self.out.device).wait_event(self.landed)
            self.landed, self.held = None, []
        if self.source:
            self._let_go()
        if self.of_parts is not None:
            self.of_parts.add(self.out)
            return self.out
        out = self.out.to(self.reduction.dtypes.shard)
        if self.total is not None:
            self.total.add(out)
        return out

    def _land(self) -> None:
        """Waits for the current hop, and checks its marks."""
        assert self.under_way is not None, "something is under way"
        assert self.along is not None, "it goes along an axis"
        (op, comm), handle, stage = self.along, self.under_way, self.reduction.layout.stage
        self.under_way, self.sends, self.failed = None, False, True
        try:
            arrived(handle, op, comm.reductions.group_name, self.reduction.purpose)
        except RuntimeError as error:
            raise RuntimeError(
                f"stage {stage!r}: summing its gradient failed on this rank: {error}"
            ) from waiting.cause(error)
        self.failed = False
        if op == "reduce_scatter":
            assert self.into is not None, "a scatter fills something"
            self.out, self.into = self.into, None
            if self.reduction.route.tree is None:
                self.ends = self.ends and comm.axis.index == comm.axis.size - 1
        if self.marks is not None and self.ends:
            marks = _marks(self.reduction.layout, self.marks, _HOST).to(self.out.dtype)
            _compare_marks(self.out[len(self.out) - len(marks) :], marks, stage)


def _hop(reduction: Reduction, comm: Communicator, flat: Tensor, into: Tensor | None, memory: _Memory) -> Handle:
    """Starts to sum a gradient over ranks: a reduce-scatter into `into`, or with None an all-reduce in place."""
    if (format := reduction.format) is None:
        if into is None:
            return all_reduce(flat, comm)
        return reduce_scatter(flat, into, comm, lambda n: memory(n, flat.dtype), reduction.purpose.number)
    tag = functools.partial(_tag, reduction.layout, format)
    if into is None:
        return compressed.all_reduce(flat, comm, format, tag, lambda n: memory(n, torch.uint8))
    return compressed.reduce_scatter(flat, into, comm, format, tag, lambda n: memory(n, torch.uint8))


def _stream(x: Tensor) -> Any:
    """The current stream of a tensor's accelerator."""
    return torch.get_device_module(x.device).current_stream(x.device)


@devices.cached
def _marks(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The marks in the padding at the end of the full buffer: 1, then digits that identify the stage.

    If all ranks sum the same stage, the sum of the marks is the marks times its first number, the number of
    ranks. If they sum different stages it is not: `_compare_marks` checks this, without a further collective.
    """
    n = ALIGNMENT // layout.dtype.itemsize
    digest = hashlib.blake2b(repr((layout.stage, layout.entries, layout.padded)).encode(), digest_size=n).digest()
    digits = [digit if dtype.itemsize > 2 else digit % 2 for digit in digest]  # so that sums are exact
    return torch.tensor([1, *digits[1:]], dtype=dtype, device=device)


@devices.cached
def _tag(layout: Layout, format: Format, device: torch.device) -> Tensor:
    """The tag that follows each piece in a quantized format; it identifies the buffer."""
    text = repr((layout.stage, layout.entries, layout.padded, format)).encode()
    return torch.tensor(
        list(hashlib.blake2b(text, digest_size=compressed.TAG).digest()), dtype=torch.uint8, device=device
    )


def _compare_marks(end: Tensor, marks: Tensor, stage: str) -> None:
    """Raises RuntimeError unless the marks at a buffer's end belong to one stage on all ranks; sets them to zero."""

    def wrong(end: Tensor) -> str | None:
        if torch.equal(end, marks * end[0]):
            return None
        return (
            f"stage {stage!r}: its gradient came together with another stage's: ranks sum the gradients of different "
            f"stages. Whose output the loss uses must be the same on every rank, or be differentiated by "
            f"shardfn.value_and_grad"
        )

    check(end, wrong)
    end.zero_()


def _copy(views: list[Tensor], gradients: list[Tensor]) -> None:
    """Copies tensors, in one call for each dtype and memory order: CUDA fuses only copies of the same kind."""
    if views and views[0].device.type == "cpu":
        torch._foreach_copy_(views, gradients)  # copies them one by one
        return
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for view, gradient in zip(views, gradients, strict=True):
        into, those = kinds.setdefault((gradient.dtype, gradient.stride() == view.stride()), ([], []))
        into.append(view)
        those.append(gradient)
    for into, those in kinds.values():
        torch._foreach_copy_(into, those)


def _buffer_views(layout: Layout, dtype: torch.dtype, memory: Tensor) -> list[Tensor]:
    """Views of a buffer: each parameter's place, the gaps between them, and the place of the marks."""
    flat = memory[: layout.padded * dtype.itemsize].view(dtype)  # of bytes, or already of this dtype
    marks = layout.padded - ALIGNMENT // layout.dtype.itemsize
    gaps = [flat[start : min(start + length, marks)] for start, length in layout.gaps]
    return [*layout.views(flat), *gaps, flat[marks:]]


def inexact_sum(reduction: Reduction) -> RuntimeError:
    """The error about a gradient of parameters with exact parts that is not summed by parts."""
    return RuntimeError(
        f"stage {reduction.layout.stage!r}: its parameters have with_exact, and this gradient is not summed by "
        f'exact parts. Write accumulate(f, batch, micro="exact"), outside of a compiled step, or shard the parameters '
        f"by a strategy without with_exact"
    )


class Reductions:
    """The gradients in flight on one mesh.

    Attributes:
        in_flight: the gradients that nobody has waited for.
        for_elsewhere: those among them that will be kept on the host or on disk.
        moving: those that have further hops, or whose source is still read.
        turns: number of stages whose reduction has started since the last `trim`.
        pools: memory for copies of gradients that are sent. Stages use the pools in turn, so that a stage reuses the
            memory of the second stage before it, of whichever size.
        grad_offload: moves gradients that are kept on the host or on disk.
    """

    def __init__(self, device: torch.device, grad_offload: GradOffload) -> None:
        self.device, self.grad_offload = device, grad_offload
        self.in_flight: list[PendingReduction] = []
        self.for_elsewhere: list[PendingReduction] = []
        self.moving: list[PendingReduction] = []
        self.pools = [Pool(device) for _ in range(self.UNDER_WAY)]
        self.turns = 0
        self._side: Any = None
        self._sending: Any = None

    UNDER_WAY = 2  # stages whose gradients are sent at once, so as to bound their memory

    def turn(self) -> None:
        """Begins a stage's reductions; advances those of stages before the last one to their next hop."""
        self.turns += 1
        for pending in [other for other in self.moving if other.turn <= self.turns - self.UNDER_WAY]:
            pending.advance()
            if not pending.hops:
                self.moving.remove(pending)

    def start(
        self,
        reduction: Reduction,
        gradients: Sequence[Tensor | None],
        total: GradientSum | None,
        defer: Defer,
        parts: Parts | None = None,
    ) -> PendingReduction | None:
        """Starts to reduce the gradients of one buffer's parameters; None if the step defers it."""
        if reduction.route.tree is not None:
            return self._send_part(reduction, reduction.route.tree, gradients, total, parts)
        if total is not None and defer == "all":
            self._add_whole(reduction, gradients, total)
            return None
        self._let_leave()
        if reduction.in_pieces():
            return self._send_pieces(reduction, gradients, total, defer != "nothing")
        return self._send(reduction, *self._flat(reduction, gradients), total, defer != "nothing")

    def _add_whole(self, reduction: Reduction, gradients: Sequence[Tensor | None], total: GradientSum) -> None:
        """Adds unsharded gradients on this rank, until the step reduces their sum."""
        layout, dtype = reduction.layout, wider(reduction.dtypes.sum, total.accumulator)
        if total.whole is None:
            total.whole = torch.zeros(layout.padded, dtype=dtype, device=self.device)
        pairs = [(view, g) for view, g in zip(layout.views(total.whole), gradients, strict=True) if g is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [g for _, g in pairs])

    def _memory(self, nbytes: int, template: Any) -> Buffer:
        """Memory that a collective will read or fill; `under_way` keeps the pool from reusing it until then."""
        buffer = self.pools[self.turns % self.UNDER_WAY].empty(nbytes, template, keeps=False)
        buffer.under_way = True
        return buffer

    def _flat(self, reduction: Reduction, gradients: Sequence[Tensor | None]) -> tuple[Tensor, list[Buffer]]:
        """The gradients in one buffer, at the positions of their parameters."""
        layout, dtype = reduction.layout, reduction.dtypes.sum
        buffers: list[Buffer] = []
        if reduction.route.shard is None:  # one rank: the full gradient is the shard's
            flat = torch.empty(layout.padded, dtype=dtype, device=self.device)
            places = _buffer_views(layout, dtype, flat)
        else:
            nbytes, template = layout.padded * dtype.itemsize, gradients[0]
            if template is None:
                template = next((g for g in gradients if g is not None), None)
            buffers = [self._memory(nbytes, torch.empty(0, device=self.device) if template is None else template)]
            flat = buffers[0].part(0, nbytes, dtype)
            places = buffers[0].views((layout, dtype), lambda memory: _buffer_views(layout, dtype, memory))
        n, present = len(gradients), [g for g in gradients if g is not None]
        views, gaps, tail = places[:n], places[n:-1], places[-1]
        if len(present) < n:
            gaps = [*gaps, *(view for view, g in zip(views, gradients, strict=True) if g is None)]
            views = [view for view, g in zip(views, gradients, strict=True) if g is not None]
        if reduction.marked():
            views, present = [*views, tail], [*present, _marks(layout, dtype, self.device)]
        else:
            gaps = [*gaps, tail]
        torch._foreach_zero_(gaps)
        _copy(views, present)
        return flat, buffers

    def _send(
        self, reduction: Reduction, flat: Tensor, source: list[Any], total: GradientSum | None, deferred: bool
    ) -> PendingReduction:
        """Starts the first hop of a gradient in one buffer."""
        shard, layout = reduction.route.shard, reduction.layout
        if shard is None:
            if reduction.format is not None:
                flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
            return self._sent(PendingReduction(reduction, flat, total, deferred))
        marked = flat.dtype

        def memory(n: int, dtype: torch.dtype) -> Tensor:
            source.append(self._memory(n * dtype.itemsize, flat))
            return source[-1].part(0, n * dtype.itemsize, dtype)

        if reduction.format is None:
            out = torch.empty(layout.piece, dtype=reduction.dtypes.shard, device=self.device)
            handle = _hop(reduction, shard, flat, out, memory)
        else:
            dtype = torch.promote_types(reduction.dtypes.sum, torch.float32)
            first = reduction.route.levels[0]
            flat, shard = first.ordered(flat), first.along
            out = torch.empty(len(flat) // shard.axis.size, dtype=dtype, device=self.device)
            # Allocated here, not on the encoding stream: its memory must return to this stream.
            scratch = memory(compressed.scratch_bytes(len(flat), shard, reduction.format), torch.uint8)
            with attributed_to(layout.stage, backward=True), self._encoding(flat, out, scratch):
                handle = _hop(reduction, shard, flat, out, lambda n, dtype: scratch)
        pending = PendingReduction(reduction, out, total, deferred)
        return self._sent(pending.scattering(handle, shard, marked, [*source, flat]))

    def _send_part(
        self,
        reduction: Reduction,
        tree: RankTree,
        gradients: Sequence[Tensor | None],
        total: GradientSum | None,
        parts: Parts | None,
    ) -> PendingReduction:
        """Starts to sum the gradients of one part of a batch on each rank, by the tree of all parts."""
        if total is None or parts is None:
            raise inexact_sum(reduction)
        flat, source = self._flat(reduction, gradients)
        shard, dtype, pieces = reduction.route.shard, reduction.dtypes.sum, len(tree.pieces)
        pending = PendingReduction(reduction, flat, total, deferred=True, scattered=True)
        pending.of_parts = total.next_call(parts)
        if shard is None:
            return self._sent(pending)
        pending.out = torch.empty(len(flat) // pieces, dtype=dtype, device=self.device)

        def memory(n: int) -> Tensor:
            source.append(self._memory(n * dtype.itemsize, flat))
            return source[-1].part(0, n * dtype.itemsize, dtype)

        handle = scatter_by_tree(flat, pending.out, shard, tree.pieces, tree.bases, memory, reduction.purpose.number)
        return self._sent(pending.scattering(handle, shard, dtype, source))

    def _sum_of_parts(self, total: GradientSum) -> Tensor:
        """The gradient of an exact step: the sum of those of all calls, `[piece]` on each replica."""
        reduction: Reduction = total.reduction
        layout, replica = reduction.layout, reduction.route.replica
        sums = [part_sums.sum for part_sums in total.by_call]
        out = functools.reduce(lambda a, b: a if b is None else b if a is None else a.add_(b), sums)
        assert out is not None, "some part has made a call"
        out, total.by_call = out.to(reduction.dtypes.shard), []
        if replica is None:
            return out
        gathered = torch.empty(layout.piece, dtype=out.dtype, device=self.device)
        local = gathered.view(replica.axis.size, -1)[replica.axis.index]
        local.copy_(out)
        bytes_of = (x.view(torch.uint8) for x in (gathered, local))
        arrived(all_gather(next(bytes_of), replica, out.dtype, next(bytes_of)), "all_gather",
                replica.gathers.group_name, reduction.purpose)  # fmt: skip
        return gathered

    def _send_pieces(
        self, reduction: Reduction, gradients: Sequence[Tensor | None], total: GradientSum | None, deferred: bool
    ) -> PendingReduction:
        """Sends slices of the gradients to the other ranks without copying them, and adds the received ones."""
        layout, shard, dtype = reduction.layout, reduction.route.shard, reduction.dtypes.sum
        assert shard is not None, "pieces are for other ranks"
        flats = [
            torch.zeros(entry.numel, dtype=dtype, device=self.device) if g is None else g.reshape(-1)
            for g, entry in zip(gradients, layout.entries, strict=True)
        ]
        index, size = shard.axis.index, shard.axis.size
        parts = [[flats[k][start:stop] for k, start, stop, _ in cut] for cut in layout.cuts]
        places = [(offset, offset + stop - start) for _, start, stop, offset in layout.cuts[index]]
        marks = _marks(layout, dtype, self.device)
        parts[-1].append(marks)
        if index == size - 1:
            places.append((layout.piece - len(marks), layout.piece))
        out = torch.empty(layout.piece, dtype=dtype, device=self.device)
        for offset, length in layout.holes[index]:
            out[offset : offset + length].zero_()
        # The first received piece arrives in the output, and needs no scratch memory.
        numel = layout.piece * (size - 2)
        source = [self._memory(numel * dtype.itemsize, out)] if numel else []
        received = source[0].part(0, numel * dtype.itemsize, dtype) if numel else out[:0]
        arriving = [out, *(received.view(size - 2, -1).unbind() if numel else ())]
        into = [[row[start:stop] for start, stop in places] for row in arriving]

        def add() -> None:
            for n, part in enumerate(parts[index]):
                target = into[0][n].add_(part)
                for other in into[1:]:
                    target.add_(other[n])

        expected = [*into[:index], [], *into[index:]]
        handle = scatter_pieces(parts, expected, add, layout.padded, dtype, shard, reduction.purpose.number)
        return self._sent(PendingReduction(reduction, out, total, deferred).scattering(handle, shard, dtype, source))

    @contextlib.contextmanager
    def _encoding(self, *memory: Tensor) -> Iterator[None]:
        """A context in which gradients are quantized and sent; on an accelerator, on a separate stream.

        If that fails, the memory is reused only after the stream has passed what it has been given.
        """
        if self.device.type == "cpu":
            yield
            return
        module = torch.get_device_module(self.device)
        self._sending = self._sending or module.Stream(device=self.device)
        # The gradients were written on the current stream.
        self._sending.wait_stream(module.current_stream(self.device))
        with module.stream(self._sending):
            try:
                yield
            except BaseException:
                for x in memory:
                    x.record_stream(self._sending)
                raise

    def _sent(self, pending: PendingReduction) -> PendingReduction:
        """Registers a reduction; starts its first hop if needed, and on accelerators the following ones."""
        pending.turn = self.turns
        self.in_flight.append(pending)
        has_streams = self.device.type != "cpu"
        encoded = has_streams and pending.reduction.format is not None
        if pending.under_way is None and not encoded:
            pending.source = [pending.out]
            pending.begin()
        native = pending.reduction.format is None and not any(comm.overrides for _, comm in pending.hops)
        if encoded or (has_streams and native and pending.hops):
            self._side = self._side or torch.get_device_module(self.device).Stream(device=self.device)
            pending.ahead(self._side)
        if pending.total is not None and pending.reduction.tier != "device":
            self.for_elsewhere.append(pending)
        if pending.sends or pending.hops or pending.left:
            self.moving.append(pending)
        return pending

    def wait(self, pending: PendingReduction) -> Tensor:
        """Waits for one gradient."""
        self.in_flight.remove(pending)
        if pending in self.for_elsewhere:
            self.for_elsewhere.remove(pending)
        if pending in self.moving:
            self.moving.remove(pending)
        pending.advance()
        return pending.wait()

    def drain(self) -> None:
        """Waits for all gradients."""
        in_flight = self.in_flight
        # Every gradient's last hop starts before the first is waited for, so they overlap.
        for pending in in_flight:
            pending.advance()
        for pending in in_flight:
            pending.wait()
        if in_flight:  # else a first drain has trimmed already: a second trim would free the pools' memory
            self.trim()
        self.in_flight, self.for_elsewhere, self.moving = [], [], []
        self.grad_offload.wait_for_gradients()

    def drop_all(self) -> None:
        """Drops all gradients in flight; the allocator reuses their memory only after the streams have passed."""
        side_streams = [stream for stream in (self._side, self._sending) if stream is not None]
        for stream in () if devices.capturing(self.device) else side_streams:
            for pending in self.in_flight:
                pending.used_on(stream)
        self.in_flight, self.for_elsewhere, self.moving = [], [], []
        self.trim()

    def trim(self) -> None:
        """Frees the pools' memory that was not used since the last `trim`."""
        self.turns = 0
        for pool in self.pools:
            pool.trim()

    def added(self, reduction: Reduction, total: Tensor | None, out: Tensor) -> Tensor:
        """The sum of a gradient so far and `out`, on the tier where its placement keeps gradients."""
        tier = reduction.tier
        if tier == "device":
            return out if total is None else total.add_(out)
        return self.grad_offload.add(total, out, tier)

    def _let_leave(self) -> None:
        """Waits for gradients that are kept on the host or disk, except the last two, and moves them there."""
        for pending in self.for_elsewhere[: -self.UNDER_WAY]:
            self.wait(pending)

    def finish_step(self, step: Step) -> None:
        """Reduces the gradients that the step has deferred, and waits for all."""
        for total in [total for total in step.sums.values() if total.reductions is self]:
            reduction: Reduction = total.reduction
            total.accumulator = None
            if total.by_call:
                with attributed_to(reduction.layout.stage, backward=True):
                    total.out = self.added(reduction, None, self._sum_of_parts(total))
                continue
            with attributed_to(reduction.layout.stage, backward=True):
                if step.defer == "all" and total.whole is not None:
                    full, total.whole, total.out = total.whole.to(reduction.dtypes.sum), None, None
                    if reduction.marked():
                        marks = _marks(reduction.layout, full.dtype, full.device)
                        full[len(full) - len(marks) :].copy_(marks)
                    self.turn()
                    self._send(reduction, full, [], total, False)
                elif total.out is not None:
                    deferred, dtype = step.defer == "replicas", reduction.dtypes.shard
                    if deferred or total.out.dtype != dtype:
                        out, total.out = placing.on_mesh_device(total.out, self.grad_offload.mesh()).to(dtype), None
                        self._let_leave()
                        self._sent(PendingReduction(reduction, out, total, not deferred, scattered=True))
        self.drain()
