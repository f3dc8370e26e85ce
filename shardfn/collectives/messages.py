"""Collectives on gloo made of messages that only meet their like, and the threads that start them.

gloo distinguishes the messages of its own collectives by their order alone: one that is longer than expected ends the
process, and a shorter one leaves the rest of a buffer as it was. Here each message carries a number made of what it
belongs to, its place in the order of calls included. Ranks that do different things therefore wait for each other.
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

from shardfn.compat import dispatch, process_groups
from shardfn.mesh import waiting
from shardfn.mesh.lanes import lane

SMALL = 2**18  # bytes that one rank may get from all others to sum them; more are summed in pieces, by all ranks
What = tuple[Hashable, ...]  # what a message belongs to: an op, a dtype, a shape, ...
Message = tuple[int, Tensor]  # the other rank, and what is sent to it or filled from it


@dataclass(frozen=True, eq=False)
class Peers:
    """The ranks of a group on gloo, as this one sees them; `calls` counts what they did together."""

    group: Callable[[], Any]
    index: int
    size: int
    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def others(self) -> list[int]:
        """All but this one, the next one first, so that not all send to the same rank at once."""
        return [(self.index + step) % self.size for step in range(1, self.size)]


_known: dict[str, tuple[weakref.ref[Any], Peers | None]] = {}  # by a group's name, which later groups may have again


def peers(x: Tensor, group: str) -> Peers | None:
    """Those who move `x` by messages; None where the backend's own collectives do.

    That is on other backends, and for tensors without data and code that is being traced, since a graph holds
    functional collectives.
    """
    if x.device.type != "cpu" or not dispatch.plain(x):
        return None
    own = process_groups.group_of(group)
    known = _known.get(group)
    if known is None or known[0]() is not own:
        reference = weakref.ref(own)
        gloo = process_groups.backend_of(own, "cpu") == "gloo"
        known = _known[group] = reference, Peers(reference, own.rank(), own.size()) if gloo else None
    return known[1]


def forget(groups: Sequence[Any]) -> None:
    """All that was under way in these groups has ended; ranks that called different things count their calls anew."""
    settle()  # what waits there to be started meets the end of its group first
    for group in groups:
        _left.pop(group, None)
        _known.pop(group.group_name, None)


def gather(p: Peers, x: Tensor, *what: Hashable) -> Tensor:
    """Every rank's `x`, stacked: `[size, *x.shape]`."""
    whole = x.new_empty((p.size, *x.shape))
    pieces, own = whole.unbind(), _sendable(x)
    swapped = start(p, (*what, x.dtype, x.shape), [(i, pieces[i]) for i in p.others], [(i, own) for i in p.others])
    pieces[p.index].copy_(own)
    swapped()
    return whole


def exchange(p: Peers, x: Tensor, *what: Hashable) -> Tensor:
    """`x[j]` of rank `i` becomes `x[i]` of rank `j`: `[size, ...] -> [size, ...]`."""
    came = torch.empty_like(x, memory_format=torch.contiguous_format)
    into, out = came.unbind(), _sendable(x).unbind()
    swapped = start(p, (*what, x.dtype, x.shape), [(i, into[i]) for i in p.others], [(i, out[i]) for i in p.others])
    into[p.index].copy_(out[p.index])
    swapped()
    return came


def reduce(p: Peers, x: Tensor, op: str) -> Tensor:
    """The `"sum"`, `"max"` or `"min"` of every rank's `x`, in order of ranks: the same bits on all of them."""
    what = ("all_reduce", op, x.dtype, x.shape)
    if x.numel() * x.element_size() * (p.size - 1) > SMALL:
        return _reduce_in_pieces(p, x, op, what)
    if p.size == 2:
        return combined(gather(p, x, *what[:2]).unbind(), op)
    every = x.new_empty((p.size, *x.shape)) if p.index == 0 else x.new_empty((1, *x.shape))
    slots, own = every.unbind(), _sendable(x)
    if p.index:
        start(p, what, [], [(0, own)])()
        start(p, (*what, "back"), [(0, slots[0])], [])()
        return slots[0]
    came = start(p, what, [(i, slots[i]) for i in p.others], [])
    slots[0].copy_(own)
    came()
    total = combined(slots, op)
    start(p, (*what, "back"), [], [(i, total) for i in p.others])()
    return total


def _reduce_in_pieces(p: Peers, x: Tensor, op: str, what: What) -> Tensor:
    """Each rank adds up its piece of the whole, and sends the sum to the others."""
    out = x.clone(memory_format=torch.contiguous_format)
    length = -(-out.numel() // p.size)
    pieces = [out.view(-1)[i * length : (i + 1) * length] for i in range(p.size)]
    mine = pieces[p.index]
    came = mine.new_empty((p.size - 1, mine.numel())).unbind()
    arrived = [*came[: p.index], mine, *came[p.index :]]  # by rank
    start(p, what, [(i, arrived[i]) for i in p.others], [(i, pieces[i]) for i in p.others])()
    if p.index < 2:  # it is in the first step, after which nobody needs it
        combined(arrived, op, out=mine)
    else:
        mine.copy_(combined(arrived, op))
    start(p, (*what, "back"), [(i, pieces[i]) for i in p.others], [(i, mine) for i in p.others])()
    return out


_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def combined(parts: Sequence[Tensor], op: str, out: Tensor | None = None) -> Tensor:
    """The ranks' values as one, in memory of its own or in `out`."""
    if op == "sum" and len(parts) > 2 and parts[0].dtype.itemsize < 4:  # each step would round
        return torch.sum(torch.stack(tuple(parts)), 0, dtype=parts[0].dtype, out=out)
    total = _COMBINE[op](parts[0], parts[1], out=out)
    for part in parts[2:]:
        _COMBINE[op](total, part, out=total)
    return total


def permute(p: Peers, x: Tensor, source: Sequence[int]) -> Callable[[], Tensor]:
    """Begins to send `x`, rank `i`'s being that of `source[i]`, or zeros for -1; the function returned waits."""
    own = _sendable(x)
    here = source[p.index]
    out = own if here == p.index else x.new_zeros(x.shape) if here < 0 else own.new_empty(x.shape)
    into = [(here, out)] if here not in (-1, p.index) else []
    targets = [i for i in p.others if source[i] == p.index]
    came = start(p, ("ppermute", tuple(source), x.dtype, x.shape), into, [(i, own) for i in targets])

    def wait() -> Tensor:
        came()
        return out.clone() if out is own else out

    return wait


def ragged(p: Peers, x: Tensor, send: Sequence[int], receive: Sequence[int], *what: Hashable) -> Tensor:
    """`send[j]` rows of `x` go to rank `j`, in order, and `receive[j]` come from it: `[sum(receive), ...]`."""
    came = x.new_empty((sum(receive), *x.shape[1:]))
    into, out = came.split(list(receive)), _sendable(x).split(list(send))
    kind = (*what, x.dtype, x.shape[1:])
    number, group = next(p.calls), p.group()

    def begin() -> list[Any]:
        works = [group.recv([into[i]], i, _tag((*kind, receive[i]), number)) for i in p.others if receive[i]]
        return works + [group.send([out[i]], i, _tag((*kind, send[i]), number)) for i in p.others if send[i]]

    works = Launched(begin, group)
    into[p.index].copy_(out[p.index])
    _arrive(works, kind, group)
    return came


def start(p: Peers, what: What, into: Sequence[Message], out: Sequence[Message]) -> Callable[[], None]:
    """Begins to send and to receive what all these ranks call `what`; the function returned waits for all of it.

    Another thread begins: a send copies to the other side at once if that waits for it, and where processes share
    cores, one that did so itself would be the last to wake up when an answer comes.
    """
    tag, group = _tag(what, next(p.calls)), p.group()

    def begin() -> list[Any]:
        works = [group.recv([x], i, tag) for i, x in into]
        return works + [group.send([x], i, tag) for i, x in out]

    works = Launched(begin, group)
    return lambda: _arrive(works, what, group)


def _arrive(works: Launched, what: What, group: Any) -> None:
    described = _described(what)
    here = waiting.on(str(what[0]), group.group_name, _described(what[1:]))
    try:
        with here:
            works.wait()
    except RuntimeError as error:
        if " in vain for " in str(error):
            raise
        if here.nested:  # the outer one knows more
            said = f"not every other rank along the axis has come to {described} ({waiting.brief(error)})"
            raise RuntimeError(said) from None
        raise RuntimeError(
            f"this rank waited in vain for {described}, and not every other rank along the axis has come to the same. "
            f"SHARDFN_DEBUG=collectives says who does what ({waiting.brief(error)})"
        ) from None


def _tag(what: What, number: int) -> int:
    """31 bits; the first is for none of the small numbers that other messages have."""
    return 0x40000000 | ((_digest(what) + number * 0x1E3779B1) & 0x3FFFFFFF)


@functools.lru_cache(maxsize=4096)
def _described(what: What) -> str:
    return ", ".join(str(tuple(part) if isinstance(part, torch.Size) else part) for part in what)


@functools.lru_cache(maxsize=4096)
def _digest(what: What) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=4).digest(), "big")


def _sendable(x: Tensor) -> Tensor:
    return x.detach().resolve_neg().contiguous()


# --- who starts what moves: a send copies to the other side at once if that waits for it ---


_LAUNCHER = "shardfn-link"
_launchers: dict[str, ThreadPoolExecutor] = {}  # by lane: one may wait for a hop, which must not hold up the others


class Launched:
    """Works that another thread starts: in a group, or such as take care of themselves.

    If it is dropped, `left` gets them: gloo would forget a message that nobody holds, and give the next one that the
    other rank sends to the wrong side of the gap. They are waited for with the next ones.
    """

    __slots__ = ("left", "works")

    def __init__(self, start: Callable[[], list[Any]], group: Any = None) -> None:
        self.left = [] if group is None else _left.setdefault(group, [])
        self.works: Future[list[Any]] | None = launch(start)

    def wait(self) -> None:
        """Until all have arrived, and all that was dropped before."""
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
    every = works.result()
    while every:
        every.pop().wait()  # what is interrupted here is not waited for twice: gloo would, for another message


_left: weakref.WeakKeyDictionary[Any, list[Future[list[Any]]]] = weakref.WeakKeyDictionary()  # by group


def launch(start: Callable[[], list[Any]]) -> Future[list[Any]]:
    """Starts works on the lane's launcher, in the order of the calls, and at once on that thread itself."""
    if not threading.current_thread().name.startswith(_LAUNCHER):
        part = lane()
        if part not in _launchers:
            _launchers.setdefault(part, ThreadPoolExecutor(1, thread_name_prefix=_LAUNCHER))
        return _launchers[part].submit(start)
    done: Future[list[Any]] = Future()
    done.set_result(start())
    return done


def settle() -> None:
    """Until all that waits to be started on the lane's launcher has been."""
    launcher = _launchers.get(lane())
    if launcher is not None:
        launcher.submit(lambda: None).result()
