"""A process group for several processes on one device, which read each other's memory; NCCL refuses such ranks.

    register()
    dist.init_process_group("shared", store=store, rank=rank, world_size=ranks)

Each rank copies what it sends into a mailbox that all can read: by CUDA IPC, or for CPU tensors through a file in
memory. A collective is launched on a thread of its rank, which first waits until all ranks have launched the same, and
runs on a stream of its own; events that are shared between processes order the devices' work. So ranks are as far
apart as they happen to be, and only `wait` makes the caller's stream wait.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "shared"
PAUSE = 2e-5  # seconds between looks at whether the others have come
waits: list[float] = []  # for how long this process has waited for the others, in each collective
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda rows: rows.sum(0, dtype=rows.dtype),
    "AVG": lambda rows: rows.mean(0),
    "MAX": lambda rows: rows.amax(0),
    "MIN": lambda rows: rows.amin(0),
}
_PrefixStore: Any = dist.distributed_c10d.PrefixStore
_TorchsWork: Any = dist.distributed_c10d.Work
_ProcessGroup: Any = dist.ProcessGroup  # each torch has its own names and signatures for what it calls


def register() -> None:
    """Makes the backend known to torch.distributed."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, Group, devices=["cpu", "cuda"])


@dataclass(frozen=True)
class _Launch:
    """A collective that its caller has launched.

    Attributes:
        what: the same on all ranks.
        sent: this rank's contribution, a vector.
        finish: takes every rank's contribution, `[ranks, n]`, and writes the results.
        results: what `finish` writes.
        ready: recorded on the caller's stream when it launched.
        future: completed when `finish` is launched on the device.
    """

    what: str
    sent: Tensor
    finish: Callable[[Tensor], None]
    results: list[Tensor]
    ready: Any
    future: Any


class _Work(_TorchsWork):  # type: ignore[misc]
    """A collective under way; torch's own works around a future do not raise its error."""

    def __init__(self, future: Any) -> None:
        super().__init__()
        self.future = future

    def wait(self, timeout: Any = None) -> bool:
        self.future.wait()
        return True

    def get_future(self) -> Any:
        return self.future


class Group(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks, one per process."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._index, self._ranks, self._seconds = store, rank, size, timeout.total_seconds()
        self._board = _board(store, rank, size)
        self._boxes: dict[torch.device, _Boxes] = {}
        self._queue: queue.SimpleQueue[_Launch | None] = queue.SimpleQueue()
        self._done = 0
        threading.Thread(target=self._run, name=f"{NAME} {rank}", daemon=True).start()

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # torch's name
        return NAME

    def shutdown(self) -> None:
        self._queue.put(None)

    # --- what torch calls ---

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (x,) = tensors
        return self._reduced(x, x, "all_reduce", opts, lambda rows: rows)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return [self.allreduce([x], opts) for x in tensors][-1]

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        (x,) = tensors
        return self._launch(f"broadcast from {opts.rootRank}", x, [x], lambda rows: _fill(x, rows[opts.rootRank]))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        (out,), (x,) = outputs, inputs

        def finish(rows: Tensor) -> None:
            for y, row in zip(out, rows, strict=True):
                _fill(y, row)

        return self._launch("all_gather", x, out, finish)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        return self._launch("all_gather_single", x, [out], lambda rows: _fill(out, rows))

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        return self._reduced(x, out, "reduce_scatter", opts, self._own)

    def all_to_all_single(self, out: Tensor, x: Tensor, outs: Any, ins: Any, opts: Any = None) -> Any:
        if len({*(outs or []), *(ins or [])}) > 1:
            raise NotImplementedError(f"{NAME}: all_to_all with parts of different sizes: {outs}, {ins}")
        own = self._index
        return self._launch(
            "all_to_all", x, [out], lambda rows: _fill(out, rows.view(len(rows), len(rows), -1)[:, own])
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._launch("barrier", torch.zeros(1, dtype=torch.uint8), [], lambda rows: None)

    def all_gather_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> Any:
        return [self.all_gather_single(out, x) for out, x in zip(outs, xs, strict=True)][-1]

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> Any:
        return [self.reduce_scatter_single(out, x, opts) for out, x in zip(outs, xs, strict=True)][-1]

    # Before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- launching ---

    def _own(self, rows: Tensor) -> Tensor:
        """The pieces that are for this rank, of every rank's contribution."""
        return rows.view(len(rows), len(rows), -1)[:, self._index]

    def _reduced(self, x: Tensor, out: Tensor, what: str, opts: Any, mine: Callable[[Tensor], Tensor]) -> Any:
        asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        names = [name for name in _REDUCTIONS if asked == getattr(dist.ReduceOp, name)]
        if not names:
            raise NotImplementedError(f"{NAME}: {what} by {asked}; there are {', '.join(_REDUCTIONS)}")
        reduced = _REDUCTIONS[names[0]]
        return self._launch(f"{what} {names[0]}", x, [out], lambda rows: _fill(out, reduced(mine(rows))))

    def _launch(self, what: str, x: Tensor, results: list[Tensor], finish: Callable[[Tensor], Any]) -> Any:
        ready = None
        if x.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        future: Any = torch.futures.Future(devices=[x.device] if x.is_cuda else [])
        sent = x.detach().contiguous().view(-1)
        self._queue.put(_Launch(f"{what} {tuple(sent.shape)} {x.dtype}", sent, finish, results, ready, future))
        return _Work(future)

    @torch.no_grad()
    def _run(self) -> None:
        while (launch := self._queue.get()) is not None:
            try:
                self._perform(launch)
            except Exception as error:
                launch.future.set_exception(error)
            del launch  # otherwise its memory is held until the next

    def _perform(self, launch: _Launch) -> None:
        number, x = self._done, launch.sent
        self._done += 1
        boxes = self._boxes.setdefault(x.device, _Boxes(self._store, self._index, self._ranks, x.device))
        with boxes.stream():
            boxes.put(number % 2, x, launch.ready)
            self._meet(number, launch.what)
            launch.finish(boxes.taken(number % 2, x))
            boxes.read(number % 2)
            launch.future.set_result(launch.results)

    def _meet(self, number: int, what: str) -> None:
        """Returns when all ranks have launched this collective."""
        digest = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=7).digest())
        own = self._board[self._index]
        own[1 + number % 2] = digest
        own[0] = number + 1
        began = time.monotonic()
        while int(self._board[:, 0].min()) <= number:
            if time.monotonic() > began + self._seconds:
                late = (self._board[:, 0] <= number).nonzero().flatten().tolist()
                raise RuntimeError(
                    f"{NAME}: ranks {late} have not launched number {number}, {what}, in {self._seconds} s"
                )
            time.sleep(PAUSE)
        waits.append(time.monotonic() - began)
        others = (self._board[:, 1 + number % 2] != digest).nonzero().flatten().tolist()
        if others:
            raise RuntimeError(f"{NAME}: number {number} is {what} on rank {self._index}, and not so on ranks {others}")


class _Boxes:
    """The mailboxes of all ranks on one device: two slots each, so that one is filled while the other is still read."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.store, self.capacity = _PrefixStore(f"boxes/{device.type}", store), 0
        self.boxes: list[Tensor] = []
        self.old: list[Any] = []  # others may still read them
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.written, self.taken_from = self._events("written"), self._events("read")

    def stream(self) -> Any:
        return torch.cuda.stream(self.side) if self.side else nullcontext()

    def put(self, slot: int, x: Tensor, ready: Any) -> None:
        """Copies `x` into this rank's slot, once all have read what was there."""
        if x.nbytes > self.capacity:
            self._grow(x.nbytes)
        if self.side:
            x.record_stream(self.side)  # the caller may drop it
            self.side.wait_event(ready)
            for rank in range(self.size):
                self.side.wait_event(self.taken_from[rank][slot])
        self._slot(self.rank, slot, x).copy_(x)
        if self.side:
            self.written[self.rank][slot].record(self.side)

    def taken(self, slot: int, like: Tensor) -> Tensor:
        """What all ranks have put into that slot, `[ranks, n]`; they must have met in between."""
        if self.side:
            for rank in range(self.size):
                self.side.wait_event(self.written[rank][slot])
        return torch.stack([self._slot(rank, slot, like) for rank in range(self.size)])

    def read(self, slot: int) -> None:
        """Notes that this rank has read the slot."""
        if self.side:
            self.taken_from[self.rank][slot].record(self.side)

    def _slot(self, rank: int, slot: int, like: Tensor) -> Tensor:
        start = slot * self.capacity
        return self.boxes[rank][start : start + like.nbytes].view(like.dtype)

    def _grow(self, nbytes: int) -> None:
        self.capacity = max(2**16, 2 ** math.ceil(math.log2(nbytes)))
        self.old.append(self.boxes)
        own, handle = _shared(2 * self.capacity, self.device)
        handles = self._exchanged(f"memory/{self.capacity}", handle)
        self.boxes = [own if rank == self.rank else _opened(handles[rank]) for rank in range(self.size)]
        if self.device.type == "cpu":
            self._exchanged(f"opened/{self.capacity}", None)
            os.unlink(handle[0])

    def _events(self, what: str) -> list[list[Any]]:
        if self.device.type != "cuda":
            return []
        own = [torch.cuda.Event(interprocess=True) for _ in range(2)]
        for event in own:
            event.record()
        handles = self._exchanged(what, [event.ipc_handle() for event in own])
        return [
            own if rank == self.rank else [torch.cuda.Event.from_ipc_handle(self.device, one) for one in handles[rank]]
            for rank in range(self.size)
        ]

    def _exchanged(self, what: str, mine: Any) -> list[Any]:
        """What every rank says, in order."""
        self.store.set(f"{what}/{self.rank}", bytes(ForkingPickler.dumps(mine)))
        return [pickle.loads(self.store.get(f"{what}/{rank}")) for rank in range(self.size)]


def _board(store: Any, rank: int, size: int) -> Tensor:
    """Of each rank: how many collectives it has launched, and digests of the last two; shared by all processes."""
    if rank == 0:
        path = _file(8 * 3 * size)
        store.set("board", path)
    path = store.get("board").decode()
    board = torch.from_file(path, shared=True, size=3 * size, dtype=torch.int64).view(size, 3)
    if store.add("boards", 1) == size:
        os.unlink(path)
        store.set("all boards", "")
    store.get("all boards")
    return board


def _file(nbytes: int) -> str:
    """A new file of zeros, in memory where that is possible."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    number, path = tempfile.mkstemp(prefix="shardfn-", dir=shared)
    os.ftruncate(number, nbytes)
    os.close(number)
    return path


def _shared(nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
    """Memory that other processes can open, and what they need for that."""
    if device.type == "cpu":
        path = _file(nbytes)
        return _opened((path, nbytes)), (path, nbytes)
    from torch.multiprocessing.reductions import reduce_tensor

    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return memory, reduce_tensor(memory)


def _opened(handle: Any) -> Tensor:
    first, rest = handle
    if isinstance(first, str):
        return torch.from_file(first, shared=True, size=rest, dtype=torch.uint8)
    opened: Tensor = first(*rest)
    return opened


def _fill(x: Tensor, values: Tensor) -> None:
    x.detach().copy_(values.reshape(x.shape))
