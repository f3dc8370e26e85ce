"""Late messages: simulates on CPU processes the timing of collectives that otherwise only a GPU would show.

On NCCL a collective is launched, and reads and writes memory at some time before it is waited for, while the program
goes on. On gloo nearly everything has happened by the launch, so a missing wait, or memory that is reused too early,
still gives right results. `chaos` makes the stages' collectives behave as they may on NCCL:

- they run one after another on two communicators for each group of ranks, one for gathers and one for reductions;
- a result is nan from the launch on, and arrives at a random time before the wait, often only at the wait;
- inputs and outputs must not change in between, which is checked;
- the input of a reduce-scatter is nan once it has arrived: the memory was lent, and must not be read again;
- none may be dropped without being waited for;
- ranks pause at random, and fall behind each other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives import into_buffers, messages
from shardfn.compat import process_groups
from shardfn.mesh.groups import group_over

_POISON = 255  # in every byte: nan, or -1
_active = threading.Lock()


@contextlib.contextmanager
def chaos(mesh: DeviceMesh, seed: int = 0, *, longest: float = 0.002) -> Iterator[Chaos]:
    """A context in which the stages on a mesh communicate as late and as unordered as on NCCL.

    It is for gloo processes, for one mesh at a time, and all ranks of the mesh must use it in the same way.

    Args:
        mesh: a mesh of CPU processes.
        seed: seed of all random choices.
        longest: the longest pause, in seconds.

    Raises:
        RuntimeError: in the block, memory that was lent to a message was written to, or ranks launched different
            collectives; at its end, a message was dropped that nobody had waited for.
        ValueError: the mesh is not of CPU processes with gloo, or another block is active.

    Example:
        ``with chaos(mesh, seed=3): sf.value_and_grad(loss)(params)``
    """
    if mesh.device_type != "cpu" or dist.get_backend() != "gloo":
        raise ValueError(f"chaos: it is for CPU processes with gloo, not {mesh.device_type} with {dist.get_backend()}")
    if not _active.acquire(blocking=False):
        raise ValueError("chaos: another block is in force in this process")
    state, start = Chaos(seed, longest), messages.start

    def late(*args: Any) -> Any:
        state.pause()
        return start(*args)

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(into_buffers.transports(mesh, all_gather="native", reduce_scatter="native"))
            stack.enter_context(mock.patch.object(process_groups, "start_all_gather", state.all_gather))
            stack.enter_context(mock.patch.object(process_groups, "start_reduce_scatter", state.reduce_scatter))
            stack.enter_context(mock.patch.dict(into_buffers.TRANSPORTS["all_reduce"], native=state.all_reduce))
            stack.enter_context(mock.patch.object(messages, "start", late))
            yield state
            state.refuse_dropped()
    finally:
        state.close()
        _active.release()


class Chaos:
    """The state of an active block.

    Attributes:
        launched: the number of messages so far.
    """

    def __init__(self, seed: int, longest: float) -> None:
        self.longest, self._named = longest, f"{seed} {process_groups.global_rank()}"
        self._dice = random.Random(self._named)
        self._lines: dict[tuple[str, tuple[int, ...]], _Communicator] = {}
        self._left: dict[weakref.ref[_PendingCollective], str] = {}
        self.launched = 0

    def pause(self) -> None:
        """Makes this rank pause at random."""
        _pause(self._dice, self.longest)

    def all_gather(self, whole: Tensor, own: Tensor, group: Any) -> _PendingCollective:
        """Replaces `compat.process_groups.start_all_gather`."""
        line = self._line("gathers", group)
        pieces = whole.view(line.size, -1)
        other_pieces = [piece for i, piece in enumerate(pieces.unbind()) if i != line.index]
        return self._launch("all_gather", line, own, other_pieces, lambda rows: [rows[i] for i in line.others])

    def reduce_scatter(self, out: Tensor, flat: Tensor, group: Any) -> _PendingCollective:
        """Replaces `compat.process_groups.start_reduce_scatter`."""
        line = self._line("reductions", group)

        def summed(rows: Tensor) -> list[Tensor]:  # in the order of ranks
            return [functools.reduce(torch.add, rows.view(line.size, line.size, -1)[:, line.index])]

        return self._launch("reduce_scatter", line, flat, [out], summed, lent=flat)

    def all_reduce(self, x: Tensor, along: into_buffers.Communicator) -> _PendingCollective:
        """Replaces the native in-place all-reduce."""
        line = self._line("reductions", along.reductions)
        return self._launch("all_reduce", line, x, [x], lambda rows: [functools.reduce(torch.add, rows).view(x.shape)])

    @property
    def left(self) -> list[str]:
        """The messages that were not waited for yet."""
        return list(self._left.values())

    def refuse_dropped(self) -> None:
        """Raises RuntimeError if a message was dropped, so that it cannot be waited for."""
        dropped = [name for message, name in self._left.items() if message() is None]
        if dropped:
            raise RuntimeError(f"chaos: no rank waits for {len(dropped)} messages: {dropped[0]}")

    def close(self) -> None:
        """Ends its threads."""
        for line in self._lines.values():
            line.queue.put(None)

    def _line(self, kind: str, group: Any) -> _Communicator:
        ranks = tuple(dist.get_process_group_ranks(group))
        for traffic in ("gathers", "reductions"):  # both at once: all ranks must make groups in the same order
            if (traffic, ranks) not in self._lines:
                new_group = group_over(list(ranks), f"chaos {traffic}")
                self._lines[traffic, ranks] = _Communicator(
                    f"{traffic} over ranks {list(ranks)}", new_group, self._named, self.longest
                )
        return self._lines[kind, ranks]

    def _launch(
        self,
        op: str,
        line: _Communicator,
        read: Tensor,
        written: list[Tensor],
        results: Callable[[Tensor], list[Tensor]],
        lent: Tensor | None = None,
    ) -> _PendingCollective:
        self.pause()
        self.launched += 1
        line.launched += 1
        name = f"{op} of {read.nbytes} bytes, number {line.launched} of {line.name}"
        message = _PendingCollective(self, name, read, written, results, lent, late=self._dice.random() < 0.7)
        self._left[weakref.ref(message)] = name
        line.queue.put(message)
        return message

    def arrived(self, message: _PendingCollective) -> None:
        """Records that a message was waited for."""
        self.pause()
        self._left.pop(weakref.ref(message), None)


@dataclass(eq=False)
class _PendingCollective:
    """One collective in flight, on memory that nothing else may write to."""

    owner: Chaos
    name: str
    read: Tensor
    written: list[Tensor]
    results: Callable[[Tensor], list[Tensor]]
    lent: Tensor | None
    late: bool
    rows: Tensor | None = None
    error: Exception | None = None
    ready: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.sent = self.read.detach().clone()
            for x in self.written:
                _write(x, None)
            self.at_launch = self.read.detach().clone()  # not `sent`: poison overwrites an input that is also an output

    def __str__(self) -> str:
        return self.name

    def wait(self) -> None:
        """Waits until its results are in place."""
        self.owner.arrived(self)
        self.ready.wait()
        if self.error is None and self.rows is not None:
            self.land()
        if self.error is not None:
            raise self.error

    def land(self) -> None:
        """Writes the results, after checking that the memory is as it was at the launch."""
        assert self.rows is not None, "it has come"
        rows, self.rows = self.rows, None
        poisoned = all((_bytes(x) == _POISON).all() for x in self.written)
        if not poisoned or not torch.equal(_bytes(self.read), _bytes(self.at_launch)):
            self.error = RuntimeError(f"chaos: memory of {self} was written to before it was waited for")
            return
        for x, result in zip(self.written, self.results(rows), strict=True):
            _write(x, result)
        if self.lent is not None:
            _write(self.lent, None)


class _Communicator:
    """A communicator, which runs one message after another on a separate thread."""

    def __init__(self, name: str, group: Any, seed: str, longest: float) -> None:
        self.name, self.group, self.longest, self.launched = name, group, longest, 0
        self.size, self.index = group.size(), group.rank()
        self.others = [i for i in range(self.size) if i != self.index]
        self.dice = random.Random(f"{seed} {name}")
        self.queue: queue.SimpleQueue[_PendingCollective | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"chaos {name}", daemon=True).start()

    @torch.no_grad()
    def _run(self) -> None:
        while (message := self.queue.get()) is not None:
            _pause(self.dice, self.longest)
            try:
                self._check_same_launch(message)
                message.rows = self._gathered(message.sent)
                if not message.late:
                    message.land()
            except Exception as error:
                message.error = error
            message.ready.set()
            del message  # otherwise it is held until the next message

    def _check_same_launch(self, message: _PendingCollective) -> None:
        """Raises RuntimeError unless all ranks launched the same collective."""
        described = f"{message.name} {message.read.dtype}".encode()
        digest = hashlib.blake2b(described, digest_size=8).digest()
        digests = self._gathered(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        if not (digests == digests[0]).all():
            raise RuntimeError(f"chaos: this rank launched {message}, and others something else")

    def _gathered(self, x: Tensor) -> Tensor:
        rows = torch.empty((self.size, x.numel()), dtype=x.dtype, device="cpu")
        self.group.allgather([list(rows.view(torch.uint8).unbind())], [_bytes(x)]).wait()
        return rows


def _pause(dice: random.Random, longest: float) -> None:
    if dice.random() < 0.15:
        time.sleep(dice.random() * longest)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)


def _write(x: Tensor, values: Tensor | None) -> None:
    """Overwrites memory, bypassing autograd; None writes poison: nan, or -1."""
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        if values is None:
            _bytes(x).fill_(_POISON)
        else:
            x.detach().view(-1).copy_(values.reshape(-1))
