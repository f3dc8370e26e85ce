"""What the ranks of a pipeline send each other: tensors of any shapes, each message with a note that says what comes.

A note goes from host to host and is of one size, whatever it says: no rank has to know what another will send, and
none takes one thing for another. The last note to each other rank is an `End`: all went well, or why not. Who expects
tensors and finds an end stops too, so what fails on one rank ends on all; and as each reads up to every end, nothing is
left on the way for the next pipeline to find.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import pickle
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.check.callsites import paused
from shardfn.check.recording import current
from shardfn.collectives.agree import compare
from shardfn.collectives.into_buffers import Communicator, communicator_of
from shardfn.collectives.ledger import record
from shardfn.compat import functorch, process_groups
from shardfn.debugging import debugging
from shardfn.mesh import waiting
from shardfn.mesh.axes import per_mesh
from shardfn.mesh.grid import AxisName, as_names
from shardfn.mesh.groups import group_over
from shardfn.mesh.lanes import lane
from shardfn.mesh.scope import current_mesh

ROOM = 1024  # bytes of a note; what does not fit follows
_LENGTH = struct.Struct("<q")
_NOTE, _MORE, _TENSORS = 3, 4, 5  # tags: of notes, of what does not fit, and the first one of tensors
_TAGS = 2**30
_numbers = itertools.count()

Way = Literal["gathers", "reductions"]  # two communicators: neither direction waits for the other
Kind = tuple[tuple[int, ...], torch.dtype, bool]  # and whether it needs a gradient


@dataclass(frozen=True)
class End:
    """A rank's last word.

    Attributes:
        said: what it found, if all went well.
        wrong: what went wrong on it: an error's type and text.
        stopped: whether it stopped because others had.
    """

    said: Any = None
    wrong: tuple[str, str] | None = None
    stopped: bool = False


@dataclass(frozen=True)
class Message:
    """What came.

    Attributes:
        said: in addition to the tensors.
        tree: their structure, packed.
        kinds: of the tensors where they come from.
        tensors: in memory of their own.
    """

    said: Any
    tree: bytes = b""
    kinds: tuple[Kind, ...] = ()
    tensors: Sequence[Tensor] = ()


_GONE = End(wrong=("does not answer", ""))
_Sent = tuple[Any, Tensor, list[int]]  # the work, bytes, and their version
_left: deque[Any] = deque(maxlen=16)  # what the last runs sent
_cut_short: weakref.WeakKeyDictionary[Any, str] = (
    weakref.WeakKeyDictionary()
)  # groups on which something may be on its way that no run will read, and why


class Stopped(Exception):
    """Another rank has stopped, so this one does."""


class _Gone(RuntimeError):
    """Another rank does not answer."""


def _tried(do: Callable[..., Any], *args: Any) -> Any:
    """Something that only fails if the rank at the other end is gone."""
    try:
        return do(*args)
    except RuntimeError as error:
        raise _Gone(waiting.brief(error)) from error


class _Line:
    """Notes to and from one other rank, in order.

    A note has room for tensors behind it: as many bytes as those of the message before had, which both sides know.

    Attributes:
        here: bytes of room in the next note that comes.
        there: in the next one that goes.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self.group, self.peer = group, peer
        self.here = self.there = 0
        self.coming: tuple[bytearray, Any] | None = None
        self.going: deque[Any] = deque()

    def send(self, note: Any, rows: Sequence[Tensor] = ()) -> None:
        """Sends a note, and behind it what there must be room for."""
        body = pickle.dumps(note)
        data = _LENGTH.pack(len(body)) + body
        with functorch.outside_transforms():
            first = torch.empty(ROOM + _places(rows)[-1], dtype=torch.uint8)
            first[: min(ROOM, len(data))] = torch.frombuffer(bytearray(data[:ROOM]), dtype=torch.uint8)
            for row, at in zip(rows, _places(rows), strict=False):
                first[ROOM + at : ROOM + at + len(row)] = row
            self._start(first, _NOTE)
            if len(data) > ROOM:
                self._start(torch.frombuffer(bytearray(data[ROOM:]), dtype=torch.uint8), _MORE)

    def _start(self, row: Tensor, tag: int) -> None:
        self.going.append(self.group.send([row], self.peer, tag))  # a work that nobody holds takes its message with it

    def expect(self) -> None:
        """Makes ready for the next note, which may then come while this rank computes."""
        if self.coming is None:
            data = bytearray(ROOM + self.here)
            with functorch.outside_transforms():
                self.coming = data, self._coming(data, _NOTE)

    def receive(self) -> tuple[Any, bytearray]:
        """The next note, and the memory that it came in, with room behind."""
        self.expect()
        assert self.coming is not None
        data, work = self.coming
        _tried(self._arrived, work)
        self.coming = None
        (length,) = _LENGTH.unpack_from(data)
        body = data[_LENGTH.size : min(ROOM, _LENGTH.size + length)]
        if length > len(body):
            more = bytearray(length - len(body))
            with functorch.outside_transforms():
                _tried(self._coming(more, _MORE).wait)
            body += more
        return pickle.loads(body), data

    def _arrived(self, work: Any) -> None:
        peer = dist.get_global_rank(self.group, self.peer)
        with waiting.on("a message of a pipeline", self.group.group_name, f"rank {peer}", [peer], sided=True):
            work.wait()

    def _coming(self, data: bytearray, tag: int) -> Any:
        return _tried(self.group.recv, [torch.frombuffer(data, dtype=torch.uint8)], self.peer, tag)

    def arrived(self, left: int = 0) -> None:
        """Until the other rank has all that was sent but so much."""
        while len(self.going) > left:
            _tried(self.going[0].wait)
            self.going.popleft()


def _places(rows: Sequence[Any]) -> list[int]:
    """Where each of these bytes begin when they lie one after another, aligned; and where all end."""
    return list(itertools.accumulate((-(-len(row) // 64) * 64 for row in rows), initial=0))


class Team:
    """The ranks along an axis, on which one pipeline after another runs.

    Attributes:
        axis: its name.
        device: where tensors go from and to.
        size: ranks along it.
        index: which of them this one is.
    """

    def __init__(self, axis: AxisName, along: Communicator, device: str) -> None:
        backend = process_groups.backend_of(along.gathers, device)
        if backend in ("fake", "threaded", "undefined"):
            raise RuntimeError(f"pipeline along {axis!r}: its backend, {backend!r}, sends nothing from rank to rank")
        self.axis, self.communicator, self.device = axis, along, torch.device(device)
        self.size, self.index = along.axis.size, along.axis.index
        ranks = dist.get_process_group_ranks(along.gathers)
        hosts = along.gathers if backend == "gloo" else group_over(ranks, "notes", "gloo")
        self.together = hosts is along.gathers and self.device.type == "cpu"  # notes go where tensors go
        self.lines = {i: _Line(hosts, i) for i in range(self.size) if i != self.index}
        self.sent: dict[int, deque[list[_Sent]]] = {i: deque() for i in self.lines}
        self.ends: dict[int, End] = {}
        self.hosts = hosts

    # --- a run ---

    def run(self, body: Callable[[], Any]) -> list[Any]:
        """What `body` returns on each rank, when it has on all; what it raises on one is an error on all.

        Raises:
            ValueError, TypeError, RuntimeError: something went wrong on another rank, or it is gone.
        """
        if debugging.collectives:
            compare("pipeline", f"{self.size} ranks", self.communicator.axis, served=True)
        said, failure = None, None
        self.ends = {}
        for line in self.lines.values():
            line.here = line.there = 0
        try:
            self._refuse_after_a_cut()
            said = body()
            for to in self.sent:
                self.delivered(to)
        except BaseException as error:  # also an interrupt: others must not wait for this rank
            failure = error
        try:
            ends = self._finished(said, failure)
            if failure is not None and not isinstance(failure, Stopped):
                raise failure
            self._raise_of(ends)
        finally:
            failure = None  # it knows this frame
        return [end.said for end in ends]

    def _refuse_after_a_cut(self) -> None:
        if self.hosts in _cut_short:
            raise RuntimeError(
                f"pipeline along {self.axis!r}: an earlier one was cut short on this rank, {_cut_short[self.hosts]}, "
                f"and its messages may still be on their way: start the processes again"
            )

    def _finished(self, said: Any, failure: BaseException | None) -> list[End]:
        """Every rank's end, when nothing is on its way any more."""
        stopped = isinstance(failure, Stopped)
        wrong = None if failure is None or stopped else (type(failure).__name__, str(failure)[:8000])
        own, before = End(said, wrong, stopped), _cut_short.get(self.hosts)
        _cut_short[self.hosts] = before or "while ranks compared how it ended"
        for line in self.lines.values():
            with contextlib.suppress(RuntimeError):  # one that is gone says nothing either
                line.send(own)
        cut = before or "; ".join(filter(None, [self._reads_to_the_end(source) for source in self.lines]))
        for i, line in self.lines.items():
            if self.ends.get(i, _GONE) is not _GONE:
                line.arrived()
        _left.append((self.sent, self.lines))  # others may still be reading it, if the run failed
        self.sent = {i: deque() for i in self.lines}
        if cut:
            _cut_short[self.hosts] = cut
        else:
            del _cut_short[self.hosts]
        return [own if i == self.index else self.ends.get(i, _GONE) for i in range(self.size)]

    def _reads_to_the_end(self, source: int) -> str:
        """What remains unread, if anything does."""
        left = ""
        while source not in self.ends:
            try:
                self._next(source)
            except _Gone:
                self.ends[source] = _GONE
            except RuntimeError:  # no memory for it, which may be what went wrong at first
                left = f"when it could not take what rank {source} had sent"
        return f"when rank {source} did not answer" if self.ends[source] is _GONE else left

    def _raise_of(self, ends: list[End]) -> None:
        for i, end in enumerate(ends):
            if end.wrong is not None:
                kind, text = end.wrong
                known = {"ValueError": ValueError, "TypeError": TypeError}.get(kind, RuntimeError)
                how = kind if end is _GONE else f"failed: {kind}: {text}"
                raise known(f"pipeline: rank {i} along {self.axis!r} {how}")

    # --- what goes and comes during a run ---

    def send(self, tensors: Sequence[Tensor], to: int, way: Way, said: Any, tree: bytes = b"") -> None:
        """Sends tensors, which must stay as they are until they have arrived.

        Raises:
            TypeError: one that no message can hold; nothing was sent then.
        """
        rows = [self._row(x) for x in tensors]
        kinds = tuple([(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors])
        line, nbytes = self.lines[to], _places(rows)[-1]
        fits = self.together and 0 < nbytes <= line.there
        line.there = nbytes
        # Tags that nothing else ever has.
        tags = [] if fits else [_TENSORS + next(_numbers) % _TAGS for row in rows if row.nbytes]
        line.send((way, tags, packed(kinds), tree, said), rows if fits else ())
        going: list[_Sent] = []
        self.sent[to].append(going)
        group, left = getattr(self.communicator, way), iter(tags)
        for x, row in zip(tensors, rows, strict=True):
            record(
                "send", self.communicator.axis.group, x.dtype, row.nbytes, "native", self.communicator.names,
                scheduled=True, backward=way == "reductions",
            )  # fmt: skip
            if row.nbytes and not fits:
                row = row.clone() if row.is_inference() else row  # which nobody can see change
                going.append((group.send([row], to, next(left)), row, versions([row])))
        self.delivered(to, self.size)  # by then the schedule says that they are: neighbours wait for no tighter bound

    def delivered(self, to: int, left: int = 0) -> None:
        """Waits until at most so many messages are on their way to a rank.

        Raises:
            RuntimeError: a tensor was changed on its way.
        """
        while len(self.sent[to]) > left:
            for work, row, version in self.sent[to].popleft():
                work.wait()
                refuse_changed([row], version)
        self.lines[to].arrived(2 * left + 1)

    def receive(self, source: int) -> Message:
        """The next message from a rank.

        Raises:
            Stopped: it has stopped, or was stopped.
            RuntimeError: it is at its end without that, or gone.
        """
        try:
            found = self._next(source)
        except _Gone as error:
            self.ends[source] = _GONE
            raise RuntimeError(f"pipeline: rank {source} along {self.axis!r} does not answer ({error})") from None
        if isinstance(found, Message):
            return found
        if found.wrong or found.stopped:
            raise Stopped
        raise RuntimeError(f"pipeline: rank {source} along {self.axis!r} is at its end, and this one expected more")

    def exchange(self, said: Any) -> list[Any]:
        """What each rank says."""
        for line in self.lines.values():
            line.send(("gathers", [], packed(()), b"", said))
        heard = {source: self.receive(source).said for source in self.lines}
        return [heard.get(i, said) for i in range(self.size)]

    def _next(self, source: int) -> Message | End:
        if source not in self.ends:
            note, data = self.lines[source].receive()
            if not isinstance(note, End):
                return self._message(source, data, *note)
            self.ends[source] = note
        return self.ends[source]

    def _message(
        self, source: int, data: bytearray, way: Way, tags: list[int], packed: bytes, tree: bytes, said: Any
    ) -> Message:
        with paused():  # nobody can know what other ranks have sent
            found = self._arrived(source, data, way, tags, unpacked(packed))
        if (recorder := current()) is not None:
            for x in found:
                recorder.filled(x)
        return Message(said, tree, unpacked(packed), found)

    def _arrived(
        self, source: int, data: bytearray, way: Way, tags: list[int], kinds: tuple[Kind, ...]
    ) -> list[Tensor]:
        line, group = self.lines[source], getattr(self.communicator, way)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in kinds]
        places = _places([range(n) for n in sizes])
        line.here = places[-1]
        line.expect()
        if any(sizes) and not tags:  # they came with the note
            return [
                _within(data, ROOM + at, shape, dtype) for at, (shape, dtype, _) in zip(places, kinds, strict=False)
            ]
        found = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in kinds]
        rows = [self._row(x) for x in found if x.nbytes]
        for work in [_tried(group.recv, [row], source, tag) for row, tag in zip(rows, tags, strict=True)]:
            _tried(work.wait)
        return found

    def _row(self, x: Any) -> Tensor:
        """A tensor's bytes, in order: its own memory where they are in order there."""
        plain = type(x) in (Tensor, torch.nn.Parameter)
        if not plain or x.layout != torch.strided or x.device.type != self.device.type:
            found = f"a {x.layout} tensor on {x.device}" if plain else type(x).__name__
            raise TypeError(
                f"pipeline: a part returns a pytree of tensors to the next rank, dense ones on {self.device.type}; "
                f"among them is {found}"
            )
        return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _within(data: bytearray, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in memory that others lie in too, but with a version of its own."""
    count = math.prod(shape)
    return (
        torch.frombuffer(data, dtype=dtype, count=count, offset=at).view(shape)
        if count
        else torch.empty(shape, dtype=dtype)
    )


def team_of(axis: AxisName) -> Team:
    """The ranks along an axis of the mesh in scope. All of them take part the first time."""
    mesh = current_mesh()
    assert mesh is not None, "an axis of several ranks belongs to a mesh"
    return per_mesh(
        mesh, ("team", lane(), axis), lambda: Team(axis, communicator_of(mesh, as_names(axis)), mesh.device_type)
    )


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Change when tensors are written into."""
    return [0 if x.is_inference() else x._version for x in tensors]


def refuse_changed(tensors: Sequence[Tensor], before: list[int]) -> None:
    """Raises RuntimeError if tensors were written into since they had these versions."""
    if versions(tensors) != before:
        raise RuntimeError(
            "pipeline: a part changed in place a tensor that it had returned to the next rank, or had returned part "
            "of: it may still be on its way, and its gradient is to come. Return another tensor, or a clone"
        )


@functools.lru_cache(maxsize=1024)
def packed(known: Any) -> bytes:
    """What a note can hold of something that is often the same."""
    return pickle.dumps(known)


@functools.lru_cache(maxsize=1024)
def unpacked(data: bytes) -> Any:
    """The inverse of `packed`."""
    return pickle.loads(data)
