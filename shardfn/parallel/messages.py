"""The messages between the ranks of a pipeline: tensors of any shapes, each message behind a note that describes it.

A note goes from host to host and has a fixed size whatever it holds, so no rank has to know in advance what another
will send, and none mistakes one message for another. The last note to each other rank is a `LastNote`: either success,
or the reason of a failure. A rank that expects tensors and finds an end stops too, so a failure on one rank ends the
run on all; and as each rank reads up to every end, no message is left over for the next pipeline to find.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import pickle
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.check.callsites import paused
from shardfn.check.recording import current
from shardfn.collectives.agree import compare
from shardfn.collectives.capturing import refuse_traced
from shardfn.collectives.into_buffers import Communicator, communicator_of
from shardfn.collectives.ledger import record
from shardfn.compat import dispatch, functorch, process_groups
from shardfn.debugging import debugging
from shardfn.mesh import waiting
from shardfn.mesh.axes import device_of, per_mesh
from shardfn.mesh.grid import AxisName, as_names
from shardfn.mesh.groups import connected_group, group_over
from shardfn.mesh.lanes import lane
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import current_mesh
from shardfn.transforms.shortage import versions

ROOM = 1024  # bytes of a note; a longer one continues in a second message
_LENGTH = struct.Struct("<q")
_NOTE, _MORE, _TENSORS = 3, 4, 5  # tags: a note, its continuation, the first of the tensors'
_TAGS = 2**30
_numbers = itertools.count()

Way = Literal["gathers", "reductions"]  # one communicator each: neither direction waits for the other
Kind = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, whether it needs a gradient


@dataclass(frozen=True)
class LastNote:
    """A rank's last note.

    Attributes:
        said: the result of its body, if it succeeded.
        wrong: its error's type and text, if it failed.
        stopped: whether it stopped because another rank had.
    """

    said: Any = None
    wrong: tuple[str, str] | None = None
    stopped: bool = False


@dataclass(frozen=True)
class Message:
    """A message as received.

    Attributes:
        said: the value sent along with the tensors.
        tree: the tensors' tree structure, packed.
        kinds: their shapes, dtypes and `requires_grad` on the sender.
        tensors: the tensors, in memory of their own.
    """

    said: Any
    tree: bytes = b""
    kinds: tuple[Kind, ...] = ()
    tensors: Sequence[Tensor] = ()


_GONE = LastNote(wrong=("does not answer", ""))
_Sent = tuple[Any, Tensor, list[int]]  # the work, the bytes, and their versions
_left: deque[Any] = deque(maxlen=16)  # keeps what the last runs sent alive: other ranks may still read it
# By group: why messages may still be in flight on it that no run will read.
_cut_short: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Stopped(Exception):
    """Another rank has stopped, so this one does."""


class _Gone(RuntimeError):
    """Another rank does not answer."""


def _call_peer(call: Callable[..., Any], *args: Any) -> Any:
    """Calls a function whose RuntimeError can only mean that the rank at the other end is gone; raises `_Gone` then."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise _Gone(waiting.brief(error)) from error


class _NoteChannel:
    """Notes to and from one other rank, in order.

    A note has room for tensors behind it, as many bytes as the previous message's tensors took, which both sides know.

    Attributes:
        here: bytes of room in the next note to arrive.
        there: bytes of room in the next note to send.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self.group, self.peer = group, peer
        self.here = self.there = 0
        self.coming: tuple[bytearray, Any] | None = None
        self.going: deque[Any] = deque()

    def send(self, note: Any, rows: Sequence[Tensor] = ()) -> None:
        """Sends a note, and behind it tensors' bytes, for which there must be room."""
        body = pickle.dumps(note)
        data = _LENGTH.pack(len(body)) + body
        with functorch.outside_transforms():
            message = torch.empty(ROOM + _row_offsets(rows)[-1], dtype=torch.uint8, device="cpu")
            message[: min(ROOM, len(data))] = torch.frombuffer(bytearray(data[:ROOM]), dtype=torch.uint8)
            for row, offset in zip(rows, _row_offsets(rows), strict=False):
                message[ROOM + offset : ROOM + offset + len(row)] = row
            self._start(message, _NOTE)
            if len(data) > ROOM:
                self._start(torch.frombuffer(bytearray(data[ROOM:]), dtype=torch.uint8), _MORE)

    def _start(self, row: Tensor, tag: int) -> None:
        self.going.append(
            _call_peer(self.group.send, [row], self.peer, tag)
        )  # dropping the work would drop its message

    def expect(self) -> None:
        """Posts the receive of the next note, which can then arrive while this rank computes."""
        if self.coming is None:
            data = bytearray(ROOM + self.here)
            with functorch.outside_transforms():
                self.coming = data, self._coming(data, _NOTE)

    def receive(self) -> tuple[Any, bytearray]:
        """Returns the next note, and the memory in which it came with the room behind it."""
        self.expect()
        assert self.coming is not None
        data, work = self.coming
        _call_peer(self._arrived, work)
        self.coming = None
        (length,) = _LENGTH.unpack_from(data)
        body = data[_LENGTH.size : min(ROOM, _LENGTH.size + length)]
        if length > len(body):
            tail = bytearray(length - len(body))
            with functorch.outside_transforms():
                _call_peer(self._arrived, self._coming(tail, _MORE))
            body += tail
        return pickle.loads(body), data

    def _arrived(self, work: Any) -> None:
        peer = dist.get_global_rank(self.group, self.peer)
        with waiting.on("a message of a pipeline", self.group.group_name, f"rank {peer}", [peer], sided=True):
            work.wait()

    def _coming(self, data: bytearray, tag: int) -> Any:
        return _call_peer(self.group.recv, [torch.frombuffer(data, dtype=torch.uint8)], self.peer, tag)

    def arrived(self, left: int = 0) -> None:
        """Waits until at most `left` of the messages sent have not arrived at the other rank."""
        while len(self.going) > left:
            _call_peer(self._arrived, self.going[0])
            self.going.popleft()


def _row_offsets(rows: Sequence[Any]) -> list[int]:
    """The offset of each row of bytes when they lie one after another, aligned to 64; and the end of the last."""
    return list(itertools.accumulate((-(-len(row) // 64) * 64 for row in rows), initial=0))


class PipelineRanks:
    """The ranks along an axis, on which one pipeline runs after another.

    Attributes:
        axis: the axis's name.
        device: the device of the tensors that are sent and received.
        size: the number of ranks along the axis.
        index: this rank's index among them.
    """

    def __init__(self, axis: AxisName, communicator: Communicator, device: torch.device) -> None:
        backend = process_groups.backend_of(communicator.group, device.type)
        if backend in ("fake", "threaded", "undefined"):
            raise RuntimeError(f"pipeline along {axis!r}: its backend, {backend!r}, sends nothing from rank to rank")
        if backend == "gloo" and device.type != "cpu":
            raise RuntimeError(
                f"pipeline along {axis!r}: gloo sends no tensors on {device.type} from rank to rank: use NCCL, "
                f"with one process for each device"
            )
        self.axis, self.communicator, self.device = axis, communicator, device
        self.size, self.index = communicator.axis.size, communicator.axis.index
        ranks = dist.get_process_group_ranks(communicator.group)
        hosts = communicator.group if backend == "gloo" or planned() else group_over(ranks, "notes", "gloo")
        self.together = hosts is communicator.group and self.device.type == "cpu"  # notes and tensors take the same way
        self.lines = {i: _NoteChannel(hosts, i) for i in range(self.size) if i != self.index}
        self.sent: dict[int, deque[list[_Sent]]] = {i: deque() for i in self.lines}
        self.ends: dict[int, LastNote] = {}
        self.hosts = hosts
        late = process_groups.connects_late(communicator.group, device.type)
        backward_group = group_over(ranks, "reduce") if late else communicator.group
        ways = {"gathers": communicator.group, "reductions": backward_group}
        self.groups = {direction: connected_group(group, device, pairs=True) for direction, group in ways.items()}

    # --- a run ---

    def run(self, body: Callable[[], Any]) -> list[Any]:
        """Runs `body` and returns its results on all ranks, in order, once it has succeeded on all.

        Raises:
            ValueError, TypeError, RuntimeError: `body` failed on another rank, or that rank is gone. An error of
                this rank's own `body` is raised unchanged.
        """
        if debugging.collectives:
            compare("pipeline", f"{self.size} ranks", self.communicator.axis, served=True)
        result, failure = None, None
        self.ends = {}
        for line in self.lines.values():
            line.here = line.there = 0
        try:
            self._refuse_after_a_cut()
            result = body()
            for to in self.sent:
                self.delivered(to)
        except BaseException as error:  # interrupts too: other ranks must not wait for this one
            failure = error
        try:
            ends = self._finished(result, failure)
            if failure is not None and not isinstance(failure, Stopped):
                raise failure
            self._raise_of(ends)
        finally:
            failure = None  # its traceback refers to this frame: a reference cycle
        return [end.said for end in ends]

    def _refuse_after_a_cut(self) -> None:
        if self.hosts in _cut_short:
            raise RuntimeError(
                f"pipeline along {self.axis!r}: an earlier one was cut short on this rank, {_cut_short[self.hosts]}, "
                f"and its messages may still be on their way: start the processes again"
            )

    def _finished(self, result: Any, failure: BaseException | None) -> list[LastNote]:
        """Exchanges ends and returns every rank's, once no message is in flight."""
        stopped = isinstance(failure, Stopped)
        wrong = None if failure is None or stopped else (type(failure).__name__, str(failure)[:8000])
        local_note, earlier = LastNote(result, wrong, stopped), _cut_short.get(self.hosts)
        _cut_short[self.hosts] = earlier or "while ranks compared how it ended"  # stays if an interrupt comes below
        for line in self.lines.values():
            with contextlib.suppress(RuntimeError):  # a rank that is gone cannot be told
                line.send(local_note)
        cut = earlier or "; ".join(filter(None, [self._reads_to_the_end(source) for source in self.lines]))
        for i, line in self.lines.items():
            if self.ends.get(i, _GONE) is not _GONE:
                line.arrived()
        _left.append((self.sent, self.lines))  # after a failure other ranks may still be reading it
        self.sent = {i: deque() for i in self.lines}
        if cut:
            _cut_short[self.hosts] = cut
        else:
            del _cut_short[self.hosts]
        return [local_note if i == self.index else self.ends.get(i, _GONE) for i in range(self.size)]

    def _reads_to_the_end(self, source: int) -> str:
        """Reads messages up to a rank's end; returns why some remain unread, or an empty string."""
        unread = ""
        while source not in self.ends:
            try:
                self._next(source)
            except _Gone:
                self.ends[source] = _GONE
            except RuntimeError:  # out of memory, say, which may be the original failure
                unread = f"when it could not take what rank {source} had sent"
        return f"when rank {source} did not answer" if self.ends[source] is _GONE else unread

    def _raise_of(self, ends: list[LastNote]) -> None:
        for i, end in enumerate(ends):
            if end.wrong is not None:
                kind, text = end.wrong
                error = {"ValueError": ValueError, "TypeError": TypeError}.get(kind, RuntimeError)
                problem = kind if end is _GONE else f"failed: {kind}: {text}"
                raise error(f"pipeline: rank {i} along {self.axis!r} {problem}")

    # --- what goes and comes during a run ---

    def send(self, tensors: Sequence[Tensor], to: int, direction: Way, payload: Any, tree: bytes = b"") -> None:
        """Sends tensors, which must not change until they have arrived.

        Raises:
            TypeError: a message cannot hold one of them; nothing was sent.
        """
        refuse_traced("messages of a pipeline")
        rows = [self._row(x) for x in tensors]
        kinds = tuple([(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors])
        line, nbytes = self.lines[to], _row_offsets(rows)[-1]
        fits = self.together and 0 < nbytes <= line.there
        line.there = nbytes
        # Unique tags: a receive never matches a tensor of another message.
        tags = [] if fits else [_TENSORS + next(_numbers) % _TAGS for row in rows if row.nbytes]
        with self._reaching(to):
            line.send((direction, tags, packed(kinds), tree, payload), rows if fits else ())
            self._post(tensors, rows, to, direction, None if fits else tags)
        self.delivered(to, self.size)  # no deadlock: a neighbor takes older ones without waiting for this rank

    def _post(
        self, tensors: Sequence[Tensor], rows: Sequence[Tensor], to: int, direction: Way, tags: list[int] | None
    ) -> None:
        """Sends tensors, as rows of bytes, unless they went with the note."""
        sends: list[_Sent] = []
        self.sent[to].append(sends)
        group, left = self.groups[direction], iter(tags or ())
        for x, row in zip(tensors, rows, strict=True):
            record(
                "send", self.communicator.axis.group, x.dtype, row.nbytes, "native", self.communicator.names,
                scheduled=True, backward=direction == "reductions",
            )  # fmt: skip
            if row.nbytes and tags is not None:
                row = row.clone() if row.is_inference() else row  # has no version: a change would go unnoticed
                sends.append((_call_peer(group.send, [row], to, next(left)), row, versions([row])))

    def delivered(self, to: int, left: int = 0) -> None:
        """Waits until at most `left` messages to a rank are in flight.

        Raises:
            RuntimeError: a tensor was changed before it had arrived, or the rank is gone.
        """
        with self._reaching(to):
            while len(self.sent[to]) > left:
                for work, row, version in self.sent[to].popleft():
                    _call_peer(self.lines[to]._arrived, work)
                    refuse_changed([row], version)
            self.lines[to].arrived(2 * left + 1)

    def receive(self, source: int) -> Message:
        """Returns the next message from a rank.

        Raises:
            Stopped: that rank failed, or stopped because another had.
            RuntimeError: that rank has finished without a further message, or is gone.
        """
        with self._reaching(source):
            message = self._next(source)
        if isinstance(message, Message):
            return message
        if message.wrong or message.stopped:
            raise Stopped
        raise RuntimeError(f"pipeline: rank {source} along {self.axis!r} is at its end, and this one expected more")

    @contextlib.contextmanager
    def _reaching(self, other: int) -> Iterator[None]:
        """Says which rank is gone, if it is."""
        try:
            yield
        except _Gone as error:
            self.ends[other] = _GONE
            raise RuntimeError(f"pipeline: rank {other} along {self.axis!r} does not answer ({error})") from None

    def exchange(self, value: Any) -> list[Any]:
        """Sends a value to all ranks and returns the values of all, in order."""
        for to, line in self.lines.items():
            with self._reaching(to):
                line.send(("gathers", [], packed(()), b"", value))
        values = {source: self.receive(source).said for source in self.lines}
        return [values.get(i, value) for i in range(self.size)]

    def _next(self, source: int) -> Message | LastNote:
        if source not in self.ends:
            note, data = self.lines[source].receive()
            if not isinstance(note, LastNote):
                return self._message(source, data, *note)
            self.ends[source] = note
        return self.ends[source]

    def _message(
        self, source: int, data: bytearray, direction: Way, tags: list[int], packed: bytes, tree: bytes, payload: Any
    ) -> Message:
        with paused():  # the checks cannot know what other ranks have sent
            tensors = self._arrived(source, data, direction, tags, unpacked(packed))
        if (recorder := current()) is not None:
            for x in tensors:
                recorder.filled(x)
        return Message(payload, tree, unpacked(packed), tensors)

    def _arrived(
        self, source: int, data: bytearray, direction: Way, tags: list[int], kinds: tuple[Kind, ...]
    ) -> list[Tensor]:
        line, group = self.lines[source], self.groups[direction]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in kinds]
        places = _row_offsets([range(n) for n in sizes])
        line.here = places[-1]
        line.expect()
        if any(sizes) and not tags:  # the tensors came with the note
            located = zip(places, kinds, strict=False)
            return [_tensor_at(data, ROOM + offset, shape, dtype) for offset, (shape, dtype, _) in located]
        return self._receive_tensors(source, group, tags, kinds)

    def _receive_tensors(self, source: int, group: Any, tags: Iterable[int], kinds: tuple[Kind, ...]) -> list[Tensor]:
        """Receives tensors by themselves."""
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in kinds]
        rows = [self._row(x) for x in tensors if x.nbytes]
        for work in [_call_peer(group.recv, [row], source, tag) for row, tag in zip(rows, tags, strict=True)]:
            _call_peer(self.lines[source]._arrived, work)
        return tensors

    def _row(self, x: Any) -> Tensor:
        """A tensor's bytes in row-major order: a view where it is contiguous, otherwise a copy."""
        plain = isinstance(x, Tensor) and dispatch.ordinary(x)
        if not plain or x.layout != torch.strided or x.device != self.device:
            description = f"a {x.layout} tensor on {x.device}" if plain else type(x).__name__
            raise TypeError(
                f"pipeline: a part returns a pytree of tensors to the next rank, dense ones on {self.device}; "
                f"among them is {description}"
            )
        return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class PlannedTeam(PipelineRanks):
    """The same where a program is planned: other ranks do not run, and what they send has to be `supposed`.

    Attributes:
        supposed: the messages to come from each rank, without their tensors, and their way.
    """

    def __init__(self, axis: AxisName, communicator: Communicator, device: torch.device) -> None:
        super().__init__(axis, communicator, device)
        self.supposed: dict[int, deque[tuple[Way, Message]]] = {i: deque() for i in self.lines}

    def suppose(self, source: int, direction: Way, message: Message) -> None:
        """Notes that a rank sends this."""
        self.supposed[source].append((direction, message))

    def run(self, body: Callable[[], Any]) -> list[Any]:
        """Runs `body`, and returns its result for all ranks."""
        result = body()
        for to in self.sent:
            self.delivered(to)
        return [result] * self.size

    def send(self, tensors: Sequence[Tensor], to: int, direction: Way, payload: Any, tree: bytes = b"") -> None:
        """Sends tensors, and supposes that the gradient of what needs one comes back."""
        self._post(tensors, [self._row(x) for x in tensors], to, direction, [_TENSORS] * len(tensors))
        self.delivered(to, self.size)
        if direction == "gathers":
            kinds = tuple([(tuple(x.shape), x.dtype, False) for x in tensors if x.requires_grad])
            self.suppose(to, "reductions", Message([x.requires_grad for x in tensors], kinds=kinds))

    def delivered(self, to: int, left: int = 0) -> None:
        """Waits until at most `left` messages to a rank are in flight."""
        while len(self.sent[to]) > left:
            for work, *_ in self.sent[to].popleft():
                work.wait()

    def receive(self, source: int) -> Message:
        """Returns the message that is supposed to come."""
        direction, message = self.supposed[source].popleft()
        tags = [_TENSORS for shape, *_ in message.kinds if 0 not in shape]
        tensors = self._receive_tensors(source, self.groups[direction], tags, message.kinds)
        return dataclasses.replace(message, tensors=tensors)


def _tensor_at(data: bytearray, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in shared memory, with a separate version counter."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(shape)


def team_of(axis: AxisName) -> PipelineRanks:
    """The ranks along an axis of the mesh in scope. All of them must take part in the first call."""
    mesh = current_mesh()
    assert mesh is not None, "an axis of several ranks belongs to a mesh"
    kind = PlannedTeam if planned() else PipelineRanks
    return per_mesh(
        mesh, ("team", lane(), axis), lambda: kind(axis, communicator_of(mesh, as_names(axis)), device_of(mesh))
    )


def refuse_changed(tensors: Sequence[Tensor], before: list[int]) -> None:
    """Raises RuntimeError if tensors were written to since they had these versions."""
    if versions(tensors) != before:
        raise RuntimeError(
            "pipeline: a tensor that a pipeline stage returned, or a view of one, was changed in place while it may be "
            "in flight and before its gradient came. Return a different tensor, or a clone"
        )


@functools.lru_cache(maxsize=1024)
def packed(value: Any) -> bytes:
    """Pickles what a note holds; cached, as the same value is often sent again."""
    return pickle.dumps(value)


@functools.lru_cache(maxsize=1024)
def unpacked(data: bytes) -> Any:
    """The inverse of `packed`."""
    return pickle.loads(data)
