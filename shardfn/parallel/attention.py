"""Context parallelism: attention over a sequence sharded over an axis, as a ring or by exchanging heads.

In the ring each rank keeps its queries, and keys and values go around. With causal attention the rank with the
beginning of the sequence would have little to do and the last one much, so sequences may be cut *balanced*: into two
pieces a rank, of which the first rank has the first and the last, the second rank the next ones inwards, and so on.

A mask is never a tensor over the whole sequence. Blocks of queries and keys are halved until one is hidden, visible or
exactly causal, for which torch has kernels, or small enough for a mask of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.callers import api_name
from shardfn.check import recording
from shardfn.collectives import ops
from shardfn.collectives.functional import all_gather, all_to_all, axis_index, axis_size
from shardfn.compat import attention as kernels
from shardfn.compat import devices, dispatch
from shardfn.mesh.grid import AxisName, as_names
from shardfn.mesh.planned import notes, planned
from shardfn.mesh.scope import bound_axis
from shardfn.parallel.linear import wide_dtype
from shardfn.transforms.custom_vjp import custom_vjp

TILE = 512  # queries, and keys, of a block whose scores are computed with a mask
_HIDDEN = torch.iinfo(torch.int64).min  # the document of keys that no query sees
_NO_DOCUMENT = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees; all conditions hold at once.

    Attributes:
        causal: none after its own position.
        window: only those fewer than `window` positions away from it.
        documents: only those of its document: ids `[b, s]` of the tokens of whole rows, in order, the same on every
            rank that shares a row. On the CPU they spare an accelerator's host a wait for each attention.
        padding: none where this is True: `[b, s]`, for whole rows of keys. A query that sees no key gets zeros.

    Example:
        ``parallel.attention(q, k, v, mask=parallel.Mask(window=4096, documents=ids))``
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None


CAUSAL = Mask()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention: `[b, h, t, d], [b, g, s, d], [b, g, s, e] -> [b, h, t, e]`.

    The value and the first derivative use torch's fused kernels, except in blocks that the edge of a mask crosses, and
    with `softcap`. It works under every transform.

    Args:
        q: queries.
        k: keys; `g` heads, of which `h` is a multiple: each serves `h / g` heads of queries, one after another.
        v: values.
        mask: the keys that a query sees; default: those up to its own position. Unless it is `Mask(causal=False)`, with
            or without padding, `t` and `s` must be equal.
        scale: factor of the scores; default: `d ** -0.5`.
        sinks: for each head the score of a further key without a value, `[h]`.
        softcap: scores `x` become `softcap * tanh(x / softcap)`.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: the dtypes differ.

    Example:
        ``attention(q, k, v, mask=Mask(causal=False, padding=tokens == PAD))``
    """
    return ring_attention(q, k, v, (), mask=mask, scale=scale, sinks=sinks, softcap=softcap)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: AxisName,
    *,
    mask: Mask = CAUSAL,
    balanced: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention over a sequence sharded over `axis`, as a ring.

    Shapes are `[b, h, t / c, d], [b, g, t / c, d], ... -> [b, h, t / c, e]`.

    Keys and values go around the ring in `c - 1` steps; in backward they go again, and their gradients in `c` steps.
    While they travel, each rank computes with those that it has. Second derivatives, tangents (jvp) and batches (vmap)
    gather keys and values instead.

    With a window, steps to ranks whose keys nobody sees are left out, and gradients return in one step. For a causal
    window `w` and `n` positions a rank, `ceil((w - 1) / n)` steps remain in order. Balanced, both pieces of a rank have
    neighbors: `2 * ceil(2 * (w - 1) / n)` steps, at most `c - 1`. So 8 ranks with a window of `n / 2` or less send 1 of
    7 messages in order, and 2 of 7 balanced.

    Args:
        q: this rank's queries.
        k: its keys, as for `attention`.
        v: its values.
        axis: the axis that cuts the sequence; `()` if nothing does.
        mask: as for `attention`, of whole rows.
        balanced: the sequence is sharded as `positions(..., balanced=True)` says, so that with a causal mask all ranks
            have equal work; otherwise it is cut in order, as a spec cuts it, and the last rank has almost twice the
            mean.
        scale: factor of the scores; default: `d ** -0.5`.
        sinks: as for `attention`, on every rank. Each rank's gradient is that of its own queries.
        softcap: as for `attention`.

    Raises:
        ValueError: the shapes do not fit; in a checked call also: ranks pass other shapes or options.
        TypeError: the dtypes differ.

    Sources: Liu et al., Ring Attention with Blockwise Transformers (2023), algorithm 1; Brandon et al., Striped
    Attention (2023), for the imbalance; Llama 3 (2024), section 3.3.2, for the split into two pieces a rank.
    """
    size = axis_size(axis)
    _check_qkv(q, k, v, mask, sinks, size)
    in_order = mask.causal or mask.window is not None or mask.documents is not None or mask.padding is not None
    options = {"causal": mask.causal, "window": mask.window, "scale": scale, "softcap": softcap}
    _check_same_pieces("ring_attention", axis, {"k": k}, balanced=balanced, **options)
    balanced = balanced and in_order and size > 1
    _ordered("ring_attention", axis, balanced, in_order)
    if balanced and (q.shape[2] % 2 or k.shape[2] % 2):
        raise ValueError(
            f"ring_attention: this rank has {q.shape[2]} positions; balanced=True needs two equal pieces. Make "
            f"the sequence a multiple of {2 * size}, or pass balanced=False"
        )
    documents = _documents(mask, len(q), k.shape[2] * size)
    rule = _ring(
        axis, mask.causal, mask.window, balanced, q.shape[-1] ** -0.5 if scale is None else scale, softcap,
        documents is not None, sinks is not None,
    )  # fmt: skip
    out: Tensor = rule(q, k, v, *(x for x in (documents, sinks) if x is not None))[0]
    return out


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: AxisName,
    *,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Like `ring_attention` on a sequence that is cut in order, but each rank computes some heads over the whole of it.

    Four all-to-alls bring queries, keys and values to the ranks of their heads, and the results back. If the ranks do
    not divide the heads of keys, these are repeated until they do.

    Args:
        q: this rank's queries; the size of `axis` divides their heads.
        k: its keys, as for `attention`.
        v: its values.
        axis: the axis that cuts the sequence.
        mask: as for `attention`, of whole rows.
        scale: factor of the scores; default: `d ** -0.5`.
        sinks: as for `attention`, on every rank. Each rank's gradient is that of the heads that it computes.
        softcap: as for `attention`.

    Raises:
        ValueError: the size of `axis` does not divide the heads; the shapes do not fit, or, in a checked call, differ.
        TypeError: the dtypes differ.

    Source: Jacobs et al., DeepSpeed Ulysses (2023), section 3.
    """
    size = axis_size(axis)
    _check_qkv(q, k, v, mask, sinks, size)
    _ordered("ulysses_attention", axis, False, mask.causal or mask.window is not None or mask.documents is not None)
    if q.shape[1] % size:
        raise ValueError(
            f"ulysses_attention: q has {q.shape[1]} heads, which the {size} ranks along {axis!r} cannot "
            f"share: use ring_attention, or an axis whose size divides {q.shape[1]}"
        )
    options = {"causal": mask.causal, "window": mask.window, "scale": scale, "softcap": softcap}
    _check_same_pieces("ulysses_attention", axis, {"q": q, "k": k}, **options)
    repeats = math.lcm(k.shape[1], size) // max(1, k.shape[1])
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    q, k, v = (all_to_all(x, axis, split_dim=1, concat_dim=2) for x in (q, k, v))
    if sinks is not None:
        sinks = sinks[axis_index(axis) * q.shape[1] :][: q.shape[1]]
    out = attention(q, k, v, mask=mask, scale=scale, sinks=sinks, softcap=softcap)
    return all_to_all(out, axis, split_dim=2, concat_dim=1)


def positions(length: int, axis: AxisName, *, balanced: bool = False, device: torch.device | None = None) -> Tensor:
    """The positions of a sequence of `length` that this rank has, in the order that it holds them: `[length / size]`.

    Balanced, rank `i` of `c` has pieces `i` and `2 c - 1 - i` of `2 c` equal ones; otherwise it has piece `i` of `c`.

    Raises:
        ValueError: the length does not divide into these pieces.
    """
    size = axis_size(axis)
    pieces = 2 * size if balanced and size > 1 else size
    if length % pieces:
        raise ValueError(
            f"positions: a sequence of {length} does not divide into {pieces} pieces"
            + (f" (two for each of the {size} ranks along {axis!r})" if pieces > size else f" along {axis!r}")
            + f": pad it to {-(-length // pieces) * pieces}"
        )
    local_positions = _positions(length // size, axis_index(axis), size, balanced, device)
    if not torch.compiler.is_compiling() and (recorder := recording.current()) is not None:
        recorder.declared(local_positions, recorder.trace.mask(as_names(axis)), (), "positions")
    _ordered("positions", axis, balanced)
    return local_positions


def _ordered(name: str, axis: AxisName, balanced: bool, in_order: bool = True) -> None:
    """Tells a checked call in which order a sequence is sharded, where that matters."""
    if in_order and not torch.compiler.is_compiling() and (recorder := recording.current()) is not None:
        recorder.ordered(name, as_names(axis), balanced)


def _positions(length: int, index: int, size: int, balanced: bool, device: torch.device | None) -> Tensor:
    """The positions of all items, which increase."""
    if not balanced or size == 1:
        return torch.arange(index * length, (index + 1) * length, device=device)
    half = length // 2
    pieces = index, 2 * size - 1 - index
    return torch.cat([torch.arange(piece * half, (piece + 1) * half, device=device) for piece in pieces])


def _check_same_pieces(name: str, axis: AxisName, tensors: dict[str, Tensor], **options: Any) -> None:
    """Raises on all ranks, in a checked call, if their pieces differ in shape, or their options differ."""
    advice = "Every rank passes the same, and as many places of the sequence: pad it to one length before it is cut"
    ops.compare_arguments(name, axis, tensors["k"], lambda: ops.describe_arguments(tensors, **options), advice)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None, size: int) -> None:
    name = api_name("attention")
    if not isinstance(mask, Mask):
        raise TypeError(f"{name}: mask must be a parallel.Mask, got {type(mask).__name__}. Write Mask(causal=True)")
    if not q.dtype == k.dtype == v.dtype:
        kinds = f"q is {q.dtype}, k {k.dtype} and v {v.dtype}"
        raise TypeError(f"{name}: {kinds}; they have one dtype: write k.to(q.dtype)")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    is_4d = q.ndim == k.ndim == v.ndim == 4
    if not is_4d or k.shape[:3] != v.shape[:3] or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"{name}: {shapes}; they are [b, h, t, d], [b, g, s, d] and [b, g, s, e]")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{name}: {shapes}: {q.shape[1]} heads of queries are not a multiple of {k.shape[1]} of keys")
    if q.shape[2] != k.shape[2] and (mask.causal or mask.window is not None or mask.documents is not None):
        kind = "causal=True" if mask.causal else "documents" if mask.window is None else f"window={mask.window}"
        raise ValueError(f"{name}: {shapes}: {kind}, but {q.shape[2]} queries and {k.shape[2]} keys")
    if mask.window is not None and not (type(mask.window) is int and mask.window > 0):
        raise ValueError(f"{name}: window must be a positive number of positions, got {mask.window!r}")
    for part, x in (("documents", mask.documents), ("padding", mask.padding)):
        rows = len(q), k.shape[2] * size
        if x is not None and tuple(x.shape) != rows:
            raise ValueError(
                f"{name}: {part} must be {list(rows)}, of whole rows, got {list(x.shape)}. Pass them as they are "
                f"before rows are sharded"
            )
    if mask.padding is not None and mask.padding.dtype != torch.bool:
        raise TypeError(f"{name}: padding must be torch.bool, True where a key is hidden, got {mask.padding.dtype}")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"{name}: sinks must be {[q.shape[1]]}, one for each head, got {list(sinks.shape)}")


def _documents(mask: Mask, batch: int, length: int) -> Tensor | None:
    """The documents of queries and of keys, `[2, b, s]`, of which equal ones see each other; None if all do."""
    if mask.documents is None and mask.padding is None:
        return None
    if mask.documents is None:
        ids = torch.zeros(batch, length, dtype=torch.int64, device=mask.padding.device)  # type: ignore[union-attr]
    else:
        ids = mask.documents.to(torch.int64)
    if mask.padding is None:
        return ids.expand(2, -1, -1)
    return torch.stack((ids, ids.masked_fill(mask.padding.to(ids.device), _HIDDEN)))


class _Block(NamedTuple):
    """Queries and keys that all see each other, or causally, or by a mask.

    Attributes:
        rows: first query, and the one after the last, among those of a rank.
        columns: likewise, keys.
        coverage: "full", "causal", or "part".
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    coverage: str


class _Pair:
    """The queries of one rank and the keys of one, and which see each other.

    Args:
        shape: `causal` and `window` of the mask, and whether sequences are balanced.
        lengths: numbers of queries and of keys.
        ranks: that have the queries, and the keys.
        size: number of ranks.
        documents: of whole rows, as `_documents` returns them, on the CPU; None if there are none, or no numbers.
        described: whether there are documents.
    """

    def __init__(
        self,
        shape: tuple[bool, int | None, bool],
        lengths: tuple[int, int],
        ranks: tuple[int, int],
        size: int,
        documents: Tensor | None,
        described: bool,
    ) -> None:
        self.causal, self.window, self.balanced = shape
        self.lengths, self.ranks, self.size, self.described = lengths, ranks, size, described
        self.documents = None
        if documents is not None:
            places = (
                _positions(n, i, size, self.balanced, documents.device) for n, i in zip(lengths, ranks, strict=True)
            )
            self.documents = _of_both(documents, *places)
        self.extents: dict[Any, Any] = {}

    def blocks(self, fused: bool) -> list[_Block]:
        """Disjoint blocks of all queries and keys that see each other; not `fused`, of at most `TILE` a side."""
        rows, columns = ((0, length) for length in self.lengths)
        if not all(self.lengths):
            return []
        if not self.balanced or (fused and self._coverage(rows, columns) != "part"):
            return _merged_blocks(list(self._split(rows, columns, fused)))
        quarters = ((row_part, column_part) for row_part in _halves(rows) for column_part in _halves(columns))
        return _merged_blocks([block for parts in quarters for block in self._split(*parts, fused)])

    def mask_of(self, block: _Block, documents: Tensor | None, device: torch.device) -> Tensor | None:
        """The mask of a block, `[b or 1, 1, rows, columns]`, True where a query sees a key.

        Made on the device, where `documents` are, so that the host copies nothing for it. The block is in one piece.
        """
        queries, keys = (
            torch.arange(start := self._position(side, part[0]), start + part[1] - part[0], device=device)
            for side, part in enumerate((block.rows, block.columns))
        )
        of_both = None if documents is None else _of_both(documents, queries, keys)
        return key_mask(self.causal, self.window, queries, keys, of_both)

    def _position(self, side: int, item: int) -> int:
        """The position in the sequence of a query (side 0) or a key."""
        length, index = self.lengths[side], self.ranks[side]
        half = length // 2
        if not self.balanced:
            return index * length + item
        return index * half + item if item < half else (2 * self.size - 1 - index) * half + item - half

    def sees_any(self) -> bool:
        """Whether any query sees any key."""
        rows, columns = (_halves((0, n)) if self.balanced else ((0, n),) for n in self.lengths)
        return any(self._coverage(*parts) != "none" for parts in itertools.product(rows, columns) if all(self.lengths))

    def _split(self, rows: tuple[int, int], columns: tuple[int, int], fused: bool) -> Iterator[_Block]:
        coverage = self._coverage(rows, columns)
        if coverage == "none":
            return
        height, width = rows[1] - rows[0], columns[1] - columns[0]
        if (fused and coverage != "part") or max(height, width) <= TILE:
            yield _Block(rows, columns, coverage)
            return
        for row_part in _halves(rows) if height > TILE or height >= width else (rows,):
            for column_part in _halves(columns) if width > TILE or width >= height else (columns,):
                yield from self._split(row_part, column_part, fused)

    def _coverage(self, rows: tuple[int, int], columns: tuple[int, int]) -> str:
        """The part of a block's keys that its queries see: "none", "full", "causal" or "part"."""
        first, last, key_first, key_last = (
            self._position(side, item) for side, part in enumerate((rows, columns)) for item in (part[0], part[1] - 1)
        )
        nearest, farthest = first - key_last, last - key_first  # distances of queries from keys
        window = math.inf if self.window is None else self.window
        low = 0 if self.causal else 1 - window
        if farthest < low or nearest >= window:
            return "none"
        same = (first, last, rows) == (key_first, key_last, columns)
        near = (
            "full"
            if nearest >= low and farthest < window
            else "causal"
            if self.causal and same and farthest < window
            else ""
        )
        by_document = self._of_documents(rows, columns)
        return "none" if by_document == "none" else near if near and by_document == "full" else "part"

    def _of_documents(self, rows: tuple[int, int], columns: tuple[int, int]) -> str:
        if self.documents is None:
            return "part" if self.described else "full"
        pairs = list(zip(*self._extent(0, rows), *self._extent(1, columns), strict=True))
        if all(high < key_low or key_high < low for low, high, _, key_low, key_high, _ in pairs):
            return "none"
        full = all(
            low == high == key_low == key_high and not hidden for low, high, _, key_low, key_high, hidden in pairs
        )
        return "full" if full else "part"

    def _extent(self, side: int, part: tuple[int, int]) -> tuple[list[int], list[int], list[bool]]:
        """For each row the least and the greatest document in a part of it, and whether it has hidden keys."""
        assert self.documents is not None, "asked for a mask without documents"
        if (side, part) not in self.extents:
            ids = self.documents[side][:, slice(*part)]
            hidden = ids == _HIDDEN
            lowest = ids.masked_fill(hidden, _NO_DOCUMENT).amin(1)
            self.extents[side, part] = lowest.tolist(), ids.amax(1).tolist(), hidden.any(1).tolist()
        extent: tuple[list[int], list[int], list[bool]] = self.extents[side, part]
        return extent


def _of_both(documents: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The documents of queries and keys at these positions; without documents, queries may outnumber keys."""
    return documents[0][:, queries % max(1, documents.shape[-1])], documents[1][:, keys]


def _halves(part: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    middle = sum(part) // 2
    return ((part[0], middle), (middle, part[1])) if part[0] < middle else (part,)


def _merged_blocks(blocks: list[_Block]) -> list[_Block]:
    """Joins full blocks one below another, and then those side by side, so that fewer kernels run."""
    below: list[_Block] = []
    for block in sorted(blocks, key=lambda block: (block.columns, block.rows)):
        last = below[-1] if below else block
        if last.coverage == block.coverage == "full" and (last.columns, last.rows[1]) == (block.columns, block.rows[0]):
            below[-1] = last._replace(rows=(last.rows[0], block.rows[1]))
        else:
            below.append(block)
    joined: list[_Block] = []
    for block in sorted(below, key=lambda block: (block.rows, block.columns)):
        last = joined[-1] if joined else block
        if last.coverage == block.coverage == "full" and (last.rows, last.columns[1]) == (block.rows, block.columns[0]):
            joined[-1] = last._replace(columns=(last.columns[0], block.columns[1]))
        else:
            joined.append(block)
    return joined


def key_mask(
    causal: bool,
    window: int | None,
    queries: Tensor,
    keys: Tensor,
    documents: Sequence[Tensor] | None,
) -> Tensor | None:
    """Which keys queries at these positions see, `[b or 1, 1, t, s]`; None if all.

    Args:
        causal: as in `Mask`.
        window: as in `Mask`.
        queries: their positions, `[t]`.
        keys: their positions, `[s]`.
        documents: those of queries, `[b, t]`, and of keys, `[b, s]`.
    """
    distance = queries[:, None] - keys
    visible = distance >= 0 if causal else None
    if window is not None:
        near = distance < window if causal else distance.abs() < window
        visible = near if visible is None else visible & near
    if documents is not None:
        of_queries, of_keys = documents
        same = of_queries[:, :, None] == of_keys[:, None, :]
        visible = same if visible is None else visible & same
    return None if visible is None else visible[None, None] if visible.ndim == 2 else visible[:, None]


@functools.lru_cache(maxsize=256)
def _distances(shape: tuple[bool, int | None, bool], lengths: tuple[int, int], size: int) -> tuple[int, ...]:
    """Distances, with `size`, at which some rank sees a key: by layouts and the window, never by documents."""

    def sees(index: int, distance: int) -> bool:
        return _Pair(shape, lengths, (index, (index - distance) % size), size, None, False).sees_any()

    near = (d for d in range(1, size) if shape[1] is None or any(sees(index, d) for index in range(size)))
    return 0, *near, size


@functools.lru_cache(maxsize=256)
def _ring(
    axis: AxisName,
    causal: bool,
    window: int | None,
    balanced: bool,
    scale: float,
    softcap: float | None,
    has_documents: bool,
    has_sinks: bool,
) -> custom_vjp:
    fused = softcap is None

    def split(rest: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        return rest[0] if has_documents else None, rest[-1] if has_sinks else None

    def places(length: int, index: int, device: torch.device) -> Tensor:
        return _positions(length, index, axis_size(axis), balanced, device)

    def pairs(
        q: Tensor, k: Tensor, documents: Tensor | None
    ) -> Callable[[int], tuple[_Pair, list[tuple[_Block, int]]]]:
        size, index, lengths = axis_size(axis), axis_index(axis), (q.shape[2], k.shape[2])
        known = documents is not None and dispatch.readable(documents) and not planned()
        read = documents.cpu() if known else None  # type: ignore[union-attr]

        def pair(source: int) -> tuple[_Pair, list[tuple[_Block, int]]]:
            both = _Pair((causal, window, balanced), lengths, (index, source), size, read, documents is not None)
            return both, _planned_blocks(both, fused) if planned() else [(block, 1) for block in both.blocks(fused)]

        return pair

    def distances(q: Tensor, k: Tensor) -> tuple[int, ...]:
        """Distances of the ranks whose keys come here: from 0, this one, up to the size, where gradients return."""
        return _distances((causal, window, balanced), (q.shape[2], k.shape[2]), axis_size(axis))

    def masks(q: Tensor, documents: Tensor | None) -> Callable[[_Pair, _Block], Tensor | None]:
        """Returns a function that makes masks of blocks; documents are copied once, if there is one."""
        copied = functools.cache(lambda: None if documents is None else devices.uploaded(documents, q.device))
        return lambda both, block: None if block.coverage == "full" else both.mask_of(block, copied(), q.device)

    def pure(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        documents, sinks = split(rest)
        documents = None if documents is None else documents.to(q.device, non_blocking=True)
        k, v = (all_gather(x, axis, dim=2) for x in (k, v))
        size, t = axis_size(axis), q.shape[2]
        every = torch.cat([places(k.shape[2] // size, i, q.device) for i in range(size)])
        local = places(t, axis_index(axis), q.device)
        outputs = []
        for start in range(0, max(t, 1), TILE):
            rows = local[start : start + TILE]
            of_both = None if documents is None else _of_both(documents, rows, every)
            visible = key_mask(causal, window, rows, every, of_both)
            outputs.append(kernels.plain_attention(q[:, :, start : start + TILE], k, v, visible, sinks, scale, softcap))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2),)

    def fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        documents, sinks = split(rest)
        size, index, shape = axis_size(axis), axis_index(axis), (*q.shape[:3], v.shape[-1])
        pair, mask_of = pairs(q, k, documents), masks(q, documents)
        if size == 1 and sinks is None and (kernel := _single_kernel(pair(0)[1], q, k, fused)):
            out, lse = kernels.attention_with_lse(q, k, v, kernel == "causal", scale)
            return (out,), (q, k, v, *rest, out, lse)
        out = torch.zeros(shape, dtype=wide_dtype(q), device=q.device)
        if sinks is None:
            lse = torch.full(shape[:3], -torch.inf, dtype=wide_dtype(q), device=q.device)
        else:  # as if the sinks had been seen before all keys
            lse = sinks.to(wide_dtype(q))[:, None].expand(shape[:3]).contiguous()

        def attend(both: _Pair, keys: Tensor, values: Tensor, block: _Block) -> None:
            rows, columns = slice(*block.rows), slice(*block.columns)
            inputs = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
            if fused and block.coverage != "part":
                part, part_lse = kernels.attention_with_lse(*inputs, block.coverage == "causal", scale)
            else:
                part, part_lse = kernels.masked_attention(*inputs, mask_of(both, block), scale, softcap)
            _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)

        travelling = torch.cat((k.flatten(), v.flatten()))
        for distance, following in itertools.pairwise(distances(q, k)):
            coming = None if following == size else _sent(travelling, axis, following - distance)
            both, blocks = pair((index - distance) % size)
            _run_blocks(functools.partial(attend, both, *_keys_and_values(travelling, k, v)), blocks)
            if coming is not None:
                travelling = coming()
        out = out.to(q.dtype)
        return (out,), (q, k, v, *rest, out, lse)

    def bwd(
        residuals: Sequence[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        (q, k, v, *rest, out, lse), (ct,) = residuals, cotangents
        documents, sinks = split(rest)
        size, index = axis_size(axis), axis_index(axis)
        ct = torch.zeros_like(out) if ct is None else ct  # the ring needs every rank, with a cotangent or not
        of_sinks: list[Tensor | None] = []
        if sinks is not None:
            share = (sinks.to(lse.dtype)[:, None] - lse).exp()
            of_sinks = [-(share * (ct.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)]
        of_rest = [*([None] if has_documents else []), *of_sinks]
        pair, mask_of = pairs(q, k, documents), masks(q, documents)
        if size == 1 and (kernel := _single_kernel(pair(0)[1], q, k, fused)):
            return [*kernels.attention_backward(ct, q, out, lse, k, v, kernel == "causal", scale), *of_rest]
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # of queries without keys, so that all weights are zero
        dq = torch.zeros_like(q, dtype=wide_dtype(q))

        def pull(both: _Pair, keys: Tensor, values: Tensor, dk: Tensor, dv: Tensor, block: _Block) -> None:
            rows, columns = slice(*block.rows), slice(*block.columns)
            own_ct, own_q, own_out, own_lse = (x[:, :, rows] for x in (ct, q, out, lse))
            inputs = own_ct, own_q, own_out, own_lse, keys[:, :, columns], values[:, :, columns]
            if fused and block.coverage != "part":
                new_q, new_k, new_v = kernels.attention_backward(*inputs, block.coverage == "causal", scale)
            else:
                new_q, new_k, new_v = kernels.masked_attention_backward(*inputs, mask_of(both, block), scale, softcap)
            dq[:, :, rows] += new_q
            dk[:, :, columns] += new_k
            dv[:, :, columns] += new_v

        travelling = torch.cat((k.flatten(), v.flatten()))
        arriving: Callable[[], Tensor] = lambda: travelling  # noqa: E731
        for distance, following in itertools.pairwise(distances(q, k)):
            coming = None if following == size else _sent(travelling, axis, following - distance)
            both, blocks = pair((index - distance) % size)
            kv_grads = torch.zeros_like(travelling, dtype=wide_dtype(q))
            _run_blocks(
                functools.partial(pull, both, *_keys_and_values(travelling, k, v), *_keys_and_values(kv_grads, k, v)),
                blocks,
            )
            arriving = _sent(arriving() + kv_grads if distance else kv_grads, axis, following - distance)
            if coming is not None:
                travelling = coming()
        dk, dv = _keys_and_values(arriving().to(k.dtype), k, v)
        return [dq.to(q.dtype), dk, dv, *of_rest]

    return custom_vjp(pure, fwd, bwd)


def _single_kernel(blocks: list[tuple[_Block, int]], q: Tensor, k: Tensor, fused: bool) -> str:
    """The coverage of the only block, if one call of a fused kernel is all; otherwise empty."""
    if not fused or len(blocks) != 1 or blocks[0][0][:2] != ((0, q.shape[2]), (0, k.shape[2])):
        return ""
    coverage = blocks[0][0].coverage
    return "" if coverage == "part" else coverage


def _run_blocks(run: Callable[[_Block], None], blocks: list[tuple[_Block, int]]) -> None:
    """Runs a function on blocks; in a plan once for all of a kind. Nothing of a block outlives it."""
    for block, count in blocks:
        with notes().repeated(count) if planned() else contextlib.nullcontext():
            run(block)


def _planned_blocks(both: _Pair, fused: bool) -> list[tuple[_Block, int]]:
    """The blocks of a plan: one of each shape and coverage, and their number.

    Blocks of one kind take the same memory, one after another. Documents have no numbers, so all that they may leave
    visible is computed with masks. A run may also have larger blocks without a mask, if not more than that: the memory
    of the largest one is planned too, and no operations for it.
    """
    blocks = both.blocks(fused)
    kinds: dict[Any, list[_Block]] = {}
    for block in blocks:
        height, width = block.rows[1] - block.rows[0], block.columns[1] - block.columns[0]
        kinds.setdefault((height, width, block.coverage), []).append(block)
    largest = []
    if both.described and fused and blocks:
        notes().assume("attention to all keys that any documents and padding leave visible")
        rows, columns = [x for block in blocks for x in block.rows], [x for block in blocks for x in block.columns]
        largest = [(_Block((min(rows), max(rows)), (min(columns), max(columns)), "full"), 0)]
    return largest + [(kind[0], len(kind)) for kind in kinds.values()]


def _keys_and_values(x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, which travel in one message."""
    return x[: k.numel()].view(k.shape), x[k.numel() :].view(v.shape)


def _sent(x: Tensor, axis: AxisName, by: int) -> Callable[[], Tensor]:
    """Starts to send `x` on by some ranks of the ring; the function returned waits for what comes here."""
    bound = bound_axis(axis, "ring_attention")
    if by % bound.size == 0:
        return lambda: x
    return ops.shifted(x, by, bound.index, bound.size, bound.group)


def _merge(out: Tensor, lse: Tensor, new: Tensor, logs: Tensor) -> None:
    """Merges attention to further keys into `out` and `lse`, in place; `logs` are log-sum-exps, like `lse`."""
    merged = torch.logaddexp(lse, logs)
    finite = merged.masked_fill(merged == -torch.inf, 0)  # queries that saw no key yet have no weights either
    out.mul_((lse - finite).exp()[..., None].to(out.dtype)).add_(new * (logs - finite).exp()[..., None].to(out.dtype))
    lse.copy_(merged)
