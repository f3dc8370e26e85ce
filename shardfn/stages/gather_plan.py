"""Plans of a stage's all-gathers: the bytes of one buffer at which each layout's parameters arrive.

A plan is made once for each combination of options, layouts and dtypes.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardfn.collectives.compressed import Wire
from shardfn.quant.formats import Format
from shardfn.shards.layout import ALIGNMENT, Layout
from shardfn.stages.options import Options


@dataclass(frozen=True, eq=False)
class Gather:
    """The all-gather of one layout's parameters into a stage's buffer.

    Attributes:
        layout: layout of the parameters.
        dtype: their dtype in the buffer.
        start: first byte in the buffer.
        stop: one past the last byte.
        moves: whether it needs the buffer: False if the shard is the full parameters, on one rank and in its own dtype.
        tag: bytes that identify the buffer, for the padding at the end of the last shard; ranks compare them.
        wire: the quantized format in which it is sent, if any.
        encoded: first byte of the quantized shards in the buffer.
    """

    layout: Layout
    dtype: torch.dtype
    start: int
    stop: int
    moves: bool
    tag: Tensor
    wire: Wire | None = None
    encoded: int = 0

    @functools.cached_property
    def sent(self) -> tuple[int, int]:
        """The byte range of the buffer that ranks send: first byte, and one past the last."""
        if self.wire is None:
            return self.start, self.stop
        pieces = (self.stop - self.start) // (self.wire.numel * self.dtype.itemsize)
        return self.encoded, self.encoded + pieces * self.wire.length

    def piece(self, index: int) -> tuple[int, int]:
        """The byte range of the shard of the rank with this index along the axes."""
        start, stop = self.sent
        nbytes = (stop - start) // self.layout.size
        return start + index * nbytes, start + (index + 1) * nbytes


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """The gathers of all layouts of a stage, and how many bytes of a buffer they take."""

    each: tuple[Gather, ...]
    nbytes: int

    @functools.cached_property
    def secondary(self) -> GatherPlan | None:
        """The plan that fills the same buffer from the larger shards that forward keeps; None without these."""
        if all(gather.layout.secondary is None for gather in self.each):
            return None
        gathers = []
        for gather in self.each:
            layout = gather.layout.secondary
            if layout is not None:
                tag = _gather_tag(layout, gather.wire or gather.dtype, len(gather.tag))
                gather = replace(gather, layout=layout, tag=tag)
            gathers.append(gather)
        return GatherPlan(tuple(gathers), self.nbytes)

    @functools.cached_property
    def stage(self) -> str:
        """Path of the stage; of several, joined by `+`."""
        return "+".join(dict.fromkeys(gather.layout.stage for gather in self.each))


def plan_of(options: Options, layouts: tuple[Layout, ...], dtypes: tuple[torch.dtype, ...]) -> GatherPlan:
    """The plan for shards with these layouts and dtypes; the same object for the same arguments."""
    with _lock:  # ranks may be threads, and plans are compared by identity
        return _plan_of(options.gather_dtype, options.gather_format, layouts, dtypes)


_lock = threading.Lock()


@functools.cache
def _plan_of(
    gather_dtype: torch.dtype | None,
    format: Format | None,
    layouts: tuple[Layout, ...],
    dtypes: tuple[torch.dtype, ...],
) -> GatherPlan:
    gathers, start = [], 0
    for layout, shard_dtype in zip(layouts, dtypes, strict=True):
        dtype = gather_dtype if gather_dtype and shard_dtype.is_floating_point else shard_dtype
        moves = layout.size > 1 or dtype != shard_dtype or layout.placement.tiers.params != "device"
        wire = wire_of(layout, shard_dtype, format)
        stop = start + layout.padded * dtype.itemsize * moves
        tail = min(layout.padded - layout.total, layout.piece) * dtype.itemsize
        tag = _gather_tag(layout, dtype if wire is None else wire, min(tail, ALIGNMENT) if wire is None else ALIGNMENT)
        encoded = up(stop)
        gathers.append(Gather(layout, dtype, start, stop, moves, tag, wire, encoded))
        start = encoded if wire is None else up(encoded + layout.size * wire.length)
    return GatherPlan(tuple(gathers), start)


def up(nbytes: int) -> int:
    """The least multiple of 512 that is `nbytes` or more, where the next part of a buffer may begin."""
    return -(-nbytes // 512) * 512


def wire_of(layout: Layout, dtype: torch.dtype, format: Format | None) -> Wire | None:
    """The quantized format in which a shard is sent; None if it is sent unquantized, or not at all."""
    chosen = format or layout.placement.gather_format
    if chosen is not None and layout.placement.exact:
        raise ValueError(
            f"stage {layout.stage!r} has gather_format, and parameters with with_exact: quantized messages give other "
            f"bits on another number of ranks. Leave one of them out"
        )
    if chosen is None or not dtype.is_floating_point or layout.size == 1:
        return None
    return Wire(chosen, layout.piece, ALIGNMENT)


def _gather_tag(layout: Layout, sent_as: torch.dtype | Wire, length: int) -> Tensor:
    text = repr((layout.stage, layout.entries, layout.placement, layout.padded, sent_as))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    identity = (digest + repr(layout.stage).encode())[:length]
    return torch.tensor(list(identity.ljust(length, b" ")), dtype=torch.uint8, device="cpu")
