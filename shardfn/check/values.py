"""What each tensor of a recorded call is known as: the node of the value that it has now.

A value is known by its tensor; where autograd makes another one for the same memory, by that. What was not seen to be
made, or was written to without an op, is known by its bits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardfn.check import callsites
from shardfn.check.bits import bits, ordinary
from shardfn.check.callsites import quietly
from shardfn.check.trace import Mask, Node, Trace
from shardfn.compat import autograd

UNKNOWN = -1  # memory whose value nobody has seen being written


class _Owner(weakref.ref[Any]):
    """Refers to a storage, and knows its number when it is gone."""

    __slots__ = ("number",)
    number: int


@dataclass(slots=True, eq=False)
class _Memory:
    """What is known of a storage: a value for all of it, how often it was written to, and what its stretches are.

    Attributes:
        owner: refers to the storage, weakly.
        tensors: by identity, the tensors that have a value of their own in it: `(tensor, node, stamp)`.
        stretches: of a flat shard, `(begin, end, axes)`: elements of a parameter, and along which axes they vary.
    """

    owner: _Owner
    node: int
    stamp: int = 0
    tensors: dict[int, tuple[weakref.ref[Tensor], int, int]] = field(default_factory=dict)
    stretches: Sequence[tuple[int, int, Mask]] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Bits, or a number from Python, that ranks compare: `key` says what it is of, the same on every rank."""

    key: int
    node: int
    seen: Any


class Values:
    """The tensors of a call.

    Attributes:
        trace: what was recorded.
        evidence: what ranks have to compare before they know what varies.
        counts: of how many rows a mean is, which they compare, too.
        watched: what ranks compare of which no type follows: see `case.Compared`.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.evidence: list[Evidence] = []
        self.counts: list[Evidence] = []
        self.watched: list[Evidence] = []
        self._memories: dict[int, _Memory] = {}
        self._freed: list[_Owner] = []
        self._times: dict[tuple[Any, int], int] = {}
        self._last: callsites.Site | None = None
        self._adds = threading.Lock()

    def site(self) -> callsites.Site | None:
        """The user's line that leads here; on a thread of autograd's own, the last one that led somewhere."""
        found = callsites.callsite()
        if found is not None:
            self._last = found
        return self._last

    def node_of(self, x: Tensor) -> int:
        """The node of the value that a plain tensor has now."""
        memory = self._memory(x)
        if memory is None:
            return self._found(x)
        known = memory.tensors.get(id(x))
        own = known is not None and known[0]() is x and known[2] == memory.stamp
        found = known[1] if known is not None and own else memory.node
        return self._found(x) if found == UNKNOWN else found

    def _found(self, x: Tensor) -> int:
        """A node for a value that was not seen to be made."""
        site = self.site()
        made = autograd.inside_backward()
        at = self.add(Node("closed over", (), site, root="closure", backward=made, like=like_of(x)))
        if callsites.caller() == "user":
            self.show(x, at, site, hash((1, *like_of(x)[0])))
        memory = self._memory(x)
        if memory is None:
            self.keep(x, at)
            if ordinary(x) and not _covers(x):
                self._memories[id(_owner(x))].node = UNKNOWN
        else:
            memory.tensors[id(x)] = weakref.ref(x), at, memory.stamp
        return at

    def filled(self, x: Tensor) -> None:
        """Something that is no op has written to a tensor."""
        self.keep(x, UNKNOWN, written=True, whole=True)

    def forget(self) -> None:
        """The call is over: memory may be used for something else."""
        self._memories.clear()
        self._freed.clear()

    def lengths(self) -> list[int]:
        """How much was taken down."""
        return [len(one) for one in self._taken()]

    def cut(self, lengths: Sequence[int]) -> None:
        """Forgets what was taken down since there was so much."""
        for one, length in zip(self._taken(), lengths, strict=True):
            del one[length:]

    def _taken(self) -> list[list[Any]]:
        trace = self.trace
        return [trace.nodes, trace.variables, trace.events, self.evidence, self.counts, self.watched]

    def _memory(self, x: Tensor) -> _Memory | None:
        """What is known of the memory of a tensor."""
        owner = _owner(x)
        found = self._memories.get(id(owner))
        return found if found is not None and found.owner() is owner else None

    def _new(self, x: Tensor, node: int) -> _Memory:
        """Memory that was not known before; it is forgotten when it is freed."""
        while self._freed:
            gone = self._freed.pop()
            known = self._memories.get(gone.number)
            if known is not None and known.owner is gone:
                del self._memories[gone.number]
        owner = _owner(x)
        # Not a weak reference of C++, by which the head of freed memory stays, and with it a hole that nothing fits.
        found = _Owner(owner, self._freed.append)  # which is called on any thread, in the middle of anything
        found.number = id(owner)
        made = self._memories[found.number] = _Memory(found, node)
        return made

    def keep(self, x: Tensor, node: int, written: bool = False, whole: bool = False) -> None:
        """From now on a tensor has this value."""
        memory = self._memory(x)
        if memory is None:
            memory = self._new(x, node)
        elif written:
            memory.stamp += 1
            memory.stretches = ()
            covers = whole and _covers(x)
            if node == UNKNOWN:
                memory.node = UNKNOWN
            elif covers or memory.node in (node, UNKNOWN):
                memory.node = node if covers or memory.node == node else UNKNOWN
            else:
                memory.node = self.add(Node("written in part", (memory.node, node), self.site()))
        memory.tensors[id(x)] = weakref.ref(x), node, memory.stamp

    def show(self, x: Tensor, at: int, site: callsites.Site | None, digest: int) -> None:
        """Has ranks compare the bits of a node."""
        with quietly():
            self.evidence.append(Evidence(self.key(site, digest), at, 0 if x.is_meta else bits(x)))

    def watch(self, x: Tensor, at: int, site: callsites.Site | None, digest: int) -> None:
        """Has ranks compare the bits of a tensor, which do not say along what the node varies."""
        with quietly():
            self.watched.append(Evidence(self.key(site, digest), at, 0 if x.is_meta else bits(x)))

    def add(self, node: Node) -> int:
        """The place of a new node."""
        with self._adds:  # backward may run on several threads
            self.trace.nodes.append(node)
            return len(self.trace.nodes) - 1

    def key(self, site: callsites.Site | None, digest: int) -> int:
        """What comes for the how-manieth time from where; the same on every rank that does the same."""
        place = (site, digest)
        times = self._times[place] = self._times.get(place, 0) + 1
        return hash((0 if site is None else site.digest, digest, times))

    def stretches(self, flat: Tensor, parts: Iterable[tuple[Tensor, Mask]]) -> None:
        """The parameters in a flat shard, or in its gradient, and along which axes each varies."""
        memory = self._memory(flat)
        if memory is not None:
            offsets = [(int(part.storage_offset()), int(part.numel()), axes) for part, axes in parts]
            memory.stretches = [(begin, begin + numel, axes) for begin, numel, axes in offsets]

    def view_of(self, x: Tensor, node: int) -> int:
        """The node of a view, which of a flat shard may be one of a single parameter in it."""
        memory = self._memory(x)
        if memory is None or not memory.stretches or not x.is_contiguous() or not x.numel():
            return node
        begin = x.storage_offset()
        for start, stop, axes in memory.stretches:
            if start <= begin and begin + x.numel() <= stop:
                made = self.trace.nodes[node]
                one = Node("part", (node,), made.site, "exactly", axes, "input", made.backward, made.records)
                one.like = like_of(x)
                return self.add(one)
        return node


def like_of(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """What a message tells of a tensor; a nested one has no shape to tell."""
    return () if x.is_nested else tuple(x.shape), x.dtype


def _owner(x: Tensor) -> Any:
    """What has the memory of a tensor, and is gone when that is."""
    return x.untyped_storage() if ordinary(x) else x


def _covers(x: Tensor) -> bool:
    return not ordinary(x) or x.untyped_storage().nbytes() == x.numel() * x.element_size()
