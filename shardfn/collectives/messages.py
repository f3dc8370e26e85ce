"""Collectives on gloo made of tagged point-to-point messages, and the threads that start them.

gloo matches the messages of its own collectives by order alone: a message that is longer than expected ends the
process, and a shorter one leaves the rest of the buffer unchanged. Here each message carries a tag derived from its
operation and its number in the order of calls. So ranks that run different operations wait for each other, until the
watchdog reports it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import devices, dispatch, process_groups
from shardfn.mesh import waiting
from shardfn.mesh.lanes import lane

SMALL = 2**18  # most bytes that one rank receives to sum alone; more are summed in pieces by all ranks
What = tuple[Hashable, ...]  # what a message belongs to: an op, a dtype, a shape, ...
Message = tuple[int, Tensor]  # the other rank, and the tensor to send to it or to fill from it


@dataclass(frozen=True, eq=False)
class GlooPeers:
    """The ranks of a gloo group as this rank sees them; `calls` numbers their operations."""

    group: Callable[[], Any]
    index: int
    size: int
    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def other_ranks(self) -> list[int]:
        """All ranks but this one, starting with the next, so that not all send to the same rank at once."""
        return [(self.index + step) % self.size for step in range(1, self.size)]


_known: dict[str, tuple[weakref.ref[Any], GlooPeers | None]] = {}  # by group name, which a later group may reuse


def peers(x: Tensor, group: str) -> GlooPeers | None:
    """Returns the peers that exchange `x` by messages; None if the backend's own collectives are used.

    These are used on other backends, for tensors without data, and in traced code, since a graph holds functional
    collectives.
    """
    if x.device.type != "cpu" or not dispatch.plain(x):
        return None
    owner = process_groups.group_of(group)
    entry = _known.get(group)
    if entry is None or entry[0]() is not owner:
        reference = weakref.ref(owner)
        gloo = process_groups.backend_of(owner, "cpu") == "gloo"
        entry = _known[group] = reference, GlooPeers(reference, owner.rank(), owner.size()) if gloo else None
    return entry[1]


def reset_messages(groups: Sequence[Any]) -> None:
    """Drops the state of these groups, whose collectives have ended; call numbers start again."""
    flush_launcher()  # works that are queued must fail on the ended group, before it is renewed
    for group in groups:
        _left.pop(group, None)
        _known.pop(group.group_name, None)


def gather(p: GlooPeers, x: Tensor, *kind: Hashable) -> Tensor:
    """Returns every rank's `x`, stacked: `[size, *x.shape]`."""
    gathered = x.new_empty((p.size, *x.shape))
    pieces, own_piece = gathered.unbind(), _sendable(x)
    wait = start(
        p, (*kind, x.dtype, x.shape), [(i, pieces[i]) for i in p.other_ranks], [(i, own_piece) for i in p.other_ranks]
    )
    pieces[p.index].copy_(own_piece)
    wait()
    return gathered


def exchange(p: GlooPeers, x: Tensor, *kind: Hashable) -> Tensor:
    """Sends `x[j]` of rank `i` to rank `j` as its row `i`: `[size, ...] -> [size, ...]`."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    into, out = received.unbind(), _sendable(x).unbind()
    wait = start(
        p, (*kind, x.dtype, x.shape), [(i, into[i]) for i in p.other_ranks], [(i, out[i]) for i in p.other_ranks]
    )
    into[p.index].copy_(out[p.index])
    wait()
    return received


def reduce(p: GlooPeers, x: Tensor, op: str) -> Tensor:
    """Returns the `"sum"`, `"max"` or `"min"` of every rank's `x` in rank order: the same bits on all ranks."""
    kind = ("all_reduce", op, x.dtype, x.shape)
    if x.numel() * x.element_size() * (p.size - 1) > SMALL:
        return _reduce_in_pieces(p, x, op, kind)
    if p.size == 2:
        return combined(gather(p, x, *kind[:2]).unbind(), op)
    stacked = x.new_empty((p.size, *x.shape)) if p.index == 0 else x.new_empty((1, *x.shape))
    slots, own_piece = stacked.unbind(), _sendable(x)
    if p.index:
        start(p, kind, [], [(0, own_piece)])()
        start(p, (*kind, "back"), [(0, slots[0])], [])()
        return slots[0]
    wait = start(p, kind, [(i, slots[i]) for i in p.other_ranks], [])
    slots[0].copy_(own_piece)
    wait()
    total = combined(slots, op)
    start(p, (*kind, "back"), [], [(i, total) for i in p.other_ranks])()
    return total


def _reduce_in_pieces(p: GlooPeers, x: Tensor, op: str, kind: What) -> Tensor:
    """Reduces by pieces: each rank reduces one piece of `x`, and sends the result to all others."""
    out = x.clone(memory_format=torch.contiguous_format)
    length = -(-out.numel() // p.size)
    pieces = [out.view(-1)[i * length : (i + 1) * length] for i in range(p.size)]
    own_piece = pieces[p.index]
    received = own_piece.new_empty((p.size - 1, own_piece.numel())).unbind()
    parts = [*received[: p.index], own_piece, *received[p.index :]]  # by rank
    start(p, kind, [(i, parts[i]) for i in p.other_ranks], [(i, pieces[i]) for i in p.other_ranks])()
    if p.index < 2:  # the first addition reads `own_piece` and may overwrite it; later ones would read the sum
        combined(parts, op, out=own_piece)
    else:
        own_piece.copy_(combined(parts, op))
    start(p, (*kind, "back"), [(i, pieces[i]) for i in p.other_ranks], [(i, own_piece) for i in p.other_ranks])()
    return out


_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def combined(parts: Sequence[Tensor], op: str, out: Tensor | None = None) -> Tensor:
    """Reduces the ranks' values to one, in fresh memory or in `out`."""
    if op == "sum" and len(parts) > 2 and parts[0].dtype.itemsize < 4:  # each addition would round
        return torch.sum(torch.stack(tuple(parts)), 0, dtype=parts[0].dtype, out=out)
    total = _COMBINE[op](parts[0], parts[1], out=out)
    for part in parts[2:]:
        _COMBINE[op](total, part, out=total)
    return total


def permute(p: GlooPeers, x: Tensor, source: Sequence[int]) -> Callable[[], Tensor]:
    """Starts to send `x` so that rank `i` gets that of `source[i]`, or zeros for -1; returns a function that waits."""
    own_piece = _sendable(x)
    own_source = source[p.index]
    out = (
        own_piece if own_source == p.index else x.new_zeros(x.shape) if own_source < 0 else own_piece.new_empty(x.shape)
    )
    into = [(own_source, out)] if own_source not in (-1, p.index) else []
    targets = [i for i in p.other_ranks if source[i] == p.index]
    arrive = start(p, ("ppermute", tuple(source), x.dtype, x.shape), into, [(i, own_piece) for i in targets])

    def wait() -> Tensor:
        arrive()
        return out.clone() if out is own_piece else out

    return wait


def ragged(p: GlooPeers, x: Tensor, send: Sequence[int], receive: Sequence[int], *kind: Hashable) -> Tensor:
    """`send[j]` rows of `x` go to rank `j`, in order, and `receive[j]` come from it: `[sum(receive), ...]`."""
    received = x.new_empty((sum(receive), *x.shape[1:]))
    into, out = received.split(list(receive)), _sendable(x).split(list(send))
    row_kind = (*kind, x.dtype, x.shape[1:])
    number, group = next(p.calls), p.group()

    def begin() -> list[Any]:
        works = [group.recv([into[i]], i, _tag((*row_kind, receive[i]), number)) for i in p.other_ranks if receive[i]]
        return works + [group.send([out[i]], i, _tag((*row_kind, send[i]), number)) for i in p.other_ranks if send[i]]

    works = Launched(begin, group)
    into[p.index].copy_(out[p.index])
    _arrive(works, row_kind, group)
    return received


def start(p: GlooPeers, kind: What, into: Sequence[Message], out: Sequence[Message]) -> Callable[[], None]:
    """Starts sends and receives that belong to one operation, `kind`; returns a function that waits for all.

    The launcher thread starts the works. A send copies to the receiver at once if the receiver is waiting. If processes
    share cores, a thread that did this copy itself would be the last to wake up when an answer comes.
    """
    tag, group = _tag(kind, next(p.calls)), p.group()

    def begin() -> list[Any]:
        works = [group.recv([x], i, tag) for i, x in into]
        return works + [group.send([x], i, tag) for i, x in out]

    works = Launched(begin, group)
    return lambda: _arrive(works, kind, group)


def _arrive(works: Launched, kind: What, group: Any) -> None:
    described = _kind_text(kind)
    wait = waiting.on(str(kind[0]), group.group_name, _kind_text(kind[1:]))
    try:
        with wait:
            works.wait()
    except RuntimeError as error:
        if " in vain for " in str(error):
            raise
        if wait.nested:  # the outer wait adds more to the message
            message = f"not every other rank along the axis has come to {described} ({waiting.brief(error)})"
            raise RuntimeError(message) from None
        raise RuntimeError(
            f"this rank waited in vain for {described}, and not every other rank along the axis has come to the same. "
            f"SHARDFN_DEBUG=collectives says who does what ({waiting.brief(error)})"
        ) from None


def _tag(kind: What, number: int) -> int:
    """Returns a 31-bit tag; bit 30 is set, which keeps it apart from the small tags of other messages."""
    return 0x40000000 | ((_kind_digest(kind) + number * 0x1E3779B1) & 0x3FFFFFFF)


@functools.lru_cache(maxsize=4096)
def _kind_text(kind: What) -> str:
    return ", ".join(str(tuple(part) if isinstance(part, torch.Size) else part) for part in kind)


@functools.lru_cache(maxsize=4096)
def _kind_digest(kind: What) -> int:
    return int.from_bytes(hashlib.blake2b(repr(kind).encode(), digest_size=4).digest(), "big")


def _sendable(x: Tensor) -> Tensor:
    return x.detach().resolve_neg().contiguous()


# --- the launcher thread, which starts works ---


_LAUNCHER = "shardfn-link"
_launchers: dict[str, ThreadPoolExecutor] = {}  # by lane: a launcher that waits for a hop must not block other lanes


class Launched:
    """Works in `group` that the launcher thread starts; without a group, works that may be dropped without a wait.

    If a handle is dropped, its works go to `left`, and the next wait on the group waits for them: gloo would forget a
    message that nobody holds, and match the other rank's next message to the wrong receive.
    """

    __slots__ = ("left", "works")

    def __init__(self, start: Callable[[], list[Any]], group: Any = None) -> None:
        self.left = [] if group is None else _left.setdefault(group, [])
        self.works: Future[list[Any]] | None = launch(start)

    def wait(self) -> None:
        """Waits until all works have arrived, and all that were dropped before."""
        while self.left:
            _wait_for(self.left[-1])
            self.left.pop()
        if self.works is not None:
            _wait_for(self.works)
        self.works = None

    def __del__(self) -> None:
        if self.works is not None:
            self.left.append(self.works)


def _wait_for(works: Future[list[Any]]) -> None:
    remaining = works.result()
    while remaining:
        remaining.pop().wait()  # popped first: after an interrupt, waiting twice would take another message


_left: weakref.WeakKeyDictionary[Any, list[Future[list[Any]]]] = weakref.WeakKeyDictionary()  # by group


def launch(start: Callable[[], list[Any]]) -> Future[list[Any]]:
    """Starts works on the lane's launcher thread, in the order of the calls; on that thread itself, at once."""
    if not threading.current_thread().name.startswith(_LAUNCHER):
        lane_name = lane()
        if lane_name not in _launchers:
            _launchers.setdefault(lane_name, ThreadPoolExecutor(1, _LAUNCHER, devices.as_here()))
        return _launchers[lane_name].submit(start)
    done: Future[list[Any]] = Future()
    done.set_result(start())
    return done


def flush_launcher() -> None:
    """Waits until all works queued on the lane's launcher have been started."""
    launcher = _launchers.get(lane())
    if launcher is not None:
        launcher.submit(lambda: None).result()
