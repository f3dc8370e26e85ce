"""Maps each tensor of a recorded call to the node of its current value.

A value is found by its tensor object, or if autograd made another object for the same memory, by the memory. A value
whose origin was not recorded, or that was written to without an op, is known by its bits.
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
from shardfn.check.trace import Mask, Node, Trace, Variable
from shardfn.compat import autograd

UNKNOWN = -1  # memory that was written to without a record


class _Owner(weakref.ref[Any]):
    """A weak reference to a storage that still has the storage's number when it is gone."""

    __slots__ = ("number",)
    number: int


@dataclass(slots=True, eq=False)
class _StorageState:
    """The state of a storage: the node of its full contents, a write count, and a flat shard's layout.

    Attributes:
        owner: weak reference to the storage.
        tensors: by identity, tensors with a value of their own in it: `(tensor, node, stamp)`.
        stretches: for a flat shard, `(begin, end, axes)`: the elements of a parameter, and the axes along which they
            vary.
    """

    owner: _Owner
    node: int
    stamp: int = 0
    tensors: dict[int, tuple[weakref.ref[Tensor], int, int]] = field(default_factory=dict)
    stretches: Sequence[tuple[int, int, Mask]] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Bits or a Python number for ranks to compare; `key` identifies the place, equally on every rank."""

    key: int
    node: int
    seen: Any


class Values:
    """The tensors of a call.

    Attributes:
        trace: the record.
        evidence: what ranks must compare to know what varies.
        counts: numbers of rows of means, which ranks compare as well.
        watched: bits that ranks compare but that determine no type, see `case.Compared`.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.evidence: list[Evidence] = []
        self.counts: list[Evidence] = []
        self.watched: list[Evidence] = []
        self._memories: dict[int, _StorageState] = {}
        self._freed: list[_Owner] = []
        self._times: dict[tuple[int, int], int] = {}
        self._last: callsites.Site | None = None
        self._adds = threading.Lock()

    def site(self) -> callsites.Site | None:
        """Returns the user's line that leads here; on a thread of autograd's own, the last known line."""
        site = callsites.callsite()
        if site is not None:
            self._last = site
        return self._last

    def node_of(self, x: Tensor) -> int:
        """Returns the node of a plain tensor's current value."""
        memory = self._memory(x)
        if memory is None:
            return self._add_unrecorded(x)
        entry = memory.tensors.get(id(x))
        current = entry is not None and entry[0]() is x and entry[2] == memory.stamp
        node = entry[1] if entry is not None and current else memory.node
        return self._add_unrecorded(x) if node == UNKNOWN else node

    def follows(self, x: Tensor) -> bool:
        """Whether the record knows how a value depends on what it may be differentiated by."""
        node = self.trace.nodes[self.node_of(x)]
        return node.records or node.variable > 0 or node.root == "parameter" or node.backward

    def _add_unrecorded(self, x: Tensor) -> int:
        """Adds a node for a value whose origin was not recorded."""
        return self.closure(x, x.requires_grad and ordinary(x))

    def closure(self, x: Tensor, differentiated: bool) -> int:
        """Adds a node for a tensor that is closed over, and that something outside may differentiate."""
        site, trace = self.site(), self.trace
        backward = autograd.inside_backward()
        node_id = self.add(Node("closed over", (), site, root="closure", backward=backward, like=like_of(x)))
        if differentiated and not backward:
            node, trace.closed = trace.nodes[node_id], True
            node.variable = 1 << len(trace.variables)
            path = f"a tensor of shape {list(x.shape)} that is closed over{f' at {site}' if site else ''}"
            trace.variables.append(Variable(path, trace.everywhere, node_id))
        if callsites.caller() == "user":
            self.note(self.evidence, node_id, site, hash((1, *like_of(x)[0])), x)
        memory = self._memory(x)
        if memory is None:
            self.keep(x, node_id)
            if ordinary(x) and not _covers(x):
                self._memories[id(_owner(x))].node = UNKNOWN
        else:
            memory.tensors[id(x)] = weakref.ref(x), node_id, memory.stamp
        return node_id

    def filled(self, x: Tensor) -> None:
        """Records that something other than an op has written to a tensor."""
        self.keep(x, UNKNOWN, written=True, full=True)

    def clear_memory(self) -> None:
        """Forgets all memory when the call is over, since it may be reused."""
        self._memories.clear()
        self._freed.clear()

    def lengths(self) -> list[int]:
        """Returns the lengths of the record's lists."""
        return [len(entries) for entries in self._record_lists()]

    def cut(self, lengths: Sequence[int]) -> None:
        """Cuts the record's lists back to these lengths."""
        for entries, length in zip(self._record_lists(), lengths, strict=True):
            del entries[length:]

    def _record_lists(self) -> list[list[Any]]:
        trace = self.trace
        return [trace.nodes, trace.variables, trace.events, self.evidence, self.counts, self.watched]

    def _memory(self, x: Tensor) -> _StorageState | None:
        """Returns the state of a tensor's memory, None if it is new."""
        owner = _owner(x)
        memory = self._memories.get(id(owner))
        return memory if memory is not None and memory.owner() is owner else None

    def _new(self, x: Tensor, node: int) -> _StorageState:
        """Registers new memory, which is forgotten when it is freed."""
        while self._freed:
            freed = self._freed.pop()
            memory = self._memories.get(freed.number)
            if memory is not None and memory.owner is freed:
                del self._memories[freed.number]
        owner = _owner(x)
        # Not a C++ weak reference: it would keep the header of freed memory, and so fragment it.
        reference = _Owner(owner, self._freed.append)  # called on any thread at any time
        reference.number = id(owner)
        new_memory = self._memories[reference.number] = _StorageState(reference, node)
        return new_memory

    def keep(self, x: Tensor, node: int, written: bool = False, full: bool = False) -> None:
        """Sets a tensor's value to a node from now on."""
        memory = self._memory(x)
        if memory is None:
            memory = self._new(x, node)
        elif written:
            memory.stamp += 1
            memory.stretches = ()
            covers = full and _covers(x)
            if node == UNKNOWN:
                memory.node = UNKNOWN
            elif covers or memory.node in (node, UNKNOWN):
                memory.node = node if covers or memory.node == node else UNKNOWN
            else:
                memory.node = self.add(Node("written in part", (memory.node, node), self.site()))
        memory.tensors[id(x)] = weakref.ref(x), node, memory.stamp

    def note(
        self, entries: list[Evidence], node_id: int, site: callsites.Site | None, digest: int, content: Any
    ) -> None:
        """Has ranks compare a number, or the bits of a tensor; `entries` are `evidence`, `counts` or `watched`."""
        if isinstance(content, Tensor):
            with quietly():
                content = 0 if content.is_meta else bits(content)
        entries.append(Evidence(self.key(site, digest), node_id, content))

    def add(self, node: Node) -> int:
        """Adds a node and returns its index."""
        with self._adds:  # backward may run on several threads
            self.trace.nodes.append(node)
            return len(self.trace.nodes) - 1

    def key(self, site: callsites.Site | None, digest: int) -> int:
        """Returns a key for the n-th event of a kind at a line; equal on every rank that does the same."""
        place = (0 if site is None else site.digest, digest)
        times = self._times[place] = self._times.get(place, 0) + 1
        return hash((*place, times))

    def stretches(self, flat: Tensor, parts: Iterable[tuple[Tensor, Mask]]) -> None:
        """Records where the parameters in a flat shard or its gradient lie, and the axes along which each varies."""
        memory = self._memory(flat)
        if memory is not None:
            offsets = [(int(part.storage_offset()), int(part.numel()), axes) for part, axes in parts]
            memory.stretches = [(begin, begin + numel, axes) for begin, numel, axes in offsets]

    def view_of(self, x: Tensor, node: int) -> int:
        """Returns the node of a view; in a flat shard, it may be the view of a single parameter."""
        memory = self._memory(x)
        if memory is None or not memory.stretches or not x.is_contiguous() or not x.numel():
            return node
        begin = x.storage_offset()
        for start, stop, axes in memory.stretches:
            if start <= begin and begin + x.numel() <= stop:
                base = self.trace.nodes[node]
                piece = Node("part", (node,), base.site, "exactly", axes, "input", base.backward, base.records)
                piece.like = like_of(x)
                return self.add(piece)
        return node


def like_of(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns a tensor's shape and dtype for messages; a nested tensor counts as of shape ()."""
    return () if x.is_nested else tuple(x.shape), x.dtype


def _owner(x: Tensor) -> Any:
    """Returns the object that owns a tensor's memory and dies with it."""
    return x.untyped_storage() if ordinary(x) else x


def _covers(x: Tensor) -> bool:
    return not ordinary(x) or x.untyped_storage().nbytes() == x.numel() * x.element_size()
