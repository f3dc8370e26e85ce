"""Worlds whose ranks are persistent CPU processes, connected by gloo: what the caller does, and what a rank does."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, NoReturn

import torch
import torch.distributed as dist

from shardfn.compat import dynamo, process_groups
from shardfn.testing import errors, serialization, stacks, state
from shardfn.testing.errors import Failure, Outcome, waiting
from shardfn.testing.forkserver import Child, ForkServer, fork_server

_START_SECONDS = 60.0
_MAX_GROUPS = 16  # gloo groups' threads wake 100 times a second; a new world takes 0.05 s


@dataclass(frozen=True)
class _Rank:
    """A rank's process: its channel, and the file to which it writes its stacks."""

    number: int
    child: Child
    channel: Connection
    log: IO[bytes]


class Processes:
    """Runs calls on `size` processes, started at the first call and again after any failure.

    With `alone` they have no process group.
    """

    def __init__(self, size: int, alone: bool = False) -> None:
        self._size, self._alone = size, alone
        self._ranks: list[_Rank] = []
        self._finalizer = weakref.finalize(self, _kill, self._ranks, os.getpid())

    def run(self, call: bytes, deadline: float) -> list[Outcome]:
        """Runs a call and returns one outcome per rank.

        Raises:
            RuntimeError: the processes cannot start.
        """
        try:
            if not self._ranks:
                _start(self._ranks, self._size, self._alone)
            path = [entry or os.getcwd() for entry in sys.path]
            setting = pickle.dumps((path, state.filters()))
            for rank in self._ranks:
                with contextlib.suppress(ConnectionError):  # it is dead, which _collect reports
                    rank.channel.send_bytes(setting)
                    rank.channel.send_bytes(call)
            outcomes, groups = _collect(self._ranks, deadline)
        except BaseException:
            self._stop()
            raise
        # After a failure collectives may be half done, so no later call could trust these ranks; and a call on a rank
        # that is alone must begin without a process group.
        if groups > (0 if self._alone else _MAX_GROUPS) or any(isinstance(outcome, Failure) for outcome in outcomes):
            self._stop()
        return outcomes

    def close(self) -> None:
        """Stops the processes, gracefully if possible."""
        limit = time.monotonic() + 2.0
        for rank in self._ranks:
            with contextlib.suppress(ConnectionError):
                rank.channel.send_bytes(b"")
        for rank in self._ranks:
            wait([rank.child.status], max(0.0, limit - time.monotonic()))
        self._stop()

    def _stop(self) -> None:
        _kill(self._ranks, os.getpid())


def _start(ranks: list[_Rank], size: int, alone: bool) -> None:
    server = fork_server()
    for forked in [_fork(server, number, 0 if alone else size) for number in range(size)]:
        ranks.append(forked())
    if alone:
        return
    port = _receive(ranks, 0)
    for rank in ranks[1:]:
        rank.channel.send_bytes(port)
    for rank in ranks:
        _receive(ranks, rank.number)


def _fork(server: ForkServer, number: int, size: int) -> Callable[[], _Rank]:
    channel, remote = Pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
    with remote:
        child = server.fork(number, size, (remote.fileno(), log.fileno()))
    return lambda: _Rank(number, child(), channel, log)


def _receive(ranks: Sequence[_Rank], number: int) -> bytes:
    """A message of one rank; raises RuntimeError if a rank dies, or none comes in time."""
    channel = ranks[number].channel
    ready = wait([channel, *(rank.child.status for rank in ranks)], _START_SECONDS)
    if channel in ready:
        with contextlib.suppress(EOFError, ConnectionError):
            return channel.recv_bytes()
    reason = "a rank died; its standard error says why" if ready else f"it took more than {_START_SECONDS:g} s"
    raise RuntimeError(f"a world of {len(ranks)} processes could not start: {reason}")


def _collect(ranks: Sequence[_Rank], deadline: float) -> tuple[list[Outcome], int]:
    """All outcomes, waiting until the deadline or shortly after a first failure; and the most groups on any rank."""
    outcomes: dict[int, Outcome] = {}
    most_groups = 0
    limit = time.monotonic() + deadline
    left_over = {rank.number: rank for rank in ranks}
    while left_over and (left := limit - time.monotonic()) > 0:
        ready = wait([end for rank in left_over.values() for end in (rank.channel, rank.child.status)], left)
        for number, rank in list(left_over.items()):
            if rank.channel in ready or rank.child.status in ready:
                del left_over[number]
                outcomes[number], groups = _answer(rank)
                most_groups = max(most_groups, groups)
                if isinstance(outcomes[number], Failure):
                    limit = min(limit, time.monotonic() + errors.GRACE)
    outcomes |= _stuck(list(left_over.values()))
    return [outcomes[rank.number] for rank in ranks], most_groups


def _answer(rank: _Rank) -> tuple[Outcome, int]:
    try:
        if rank.channel.poll():
            groups = int(pickle.loads(rank.channel.recv_bytes()))
            return serialization.decode_outcome(rank.channel.recv_bytes()), groups
    except (EOFError, ConnectionError):
        pass
    return _obituary(rank), 0


def _obituary(rank: _Rank) -> Failure:
    code = rank.child.exit_code(timeout=5.0)
    if code is None:
        message = "the process is gone, and so is what could have reported its exit code"
    elif code < 0:
        message = f"the process was killed by {signal.Signals(-code).name}"
    else:
        message = f"the process exited with code {code}"
    _, text = stacks.parse_stacks(_log(rank))
    return Failure("died", "ChildProcessError", message, text, ChildProcessError(message))


def _stuck(ranks: Sequence[_Rank]) -> dict[int, Outcome]:
    """A failure for every rank that has not answered, which says where it is."""
    lengths = {rank.number: len(_log(rank)) for rank in ranks}
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.child.pid, signal.SIGUSR1)
    failures: dict[int, Outcome] = {}
    for rank in ranks:
        failures[rank.number] = waiting(*stacks.parse_stacks(_settled(rank, lengths[rank.number])))
    return failures


def _settled(rank: _Rank, length: int, patience: float = 2.0) -> str:
    """A rank's log, once it is longer than `length` and has stopped growing, or after `patience` seconds."""
    limit = time.monotonic() + patience
    previous = ""
    while time.monotonic() < limit:
        text = _log(rank)
        if len(text) > length and text == previous:
            break
        previous = text
        time.sleep(0.02)
    return previous


def _log(rank: _Rank) -> str:
    return os.pread(rank.log.fileno(), 1 << 20, 0).decode(errors="replace")


def _kill(ranks: list[_Rank], owner: int) -> None:
    """Kills the ranks that still run, waits until they are gone, and closes their descriptors."""
    if owner == os.getpid():  # not a fork of the owner, at its exit
        running = [rank for rank in ranks if not wait([rank.child.status], 0)]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.child.pid, signal.SIGKILL)
        limit = time.monotonic() + 10.0
        for rank in running:
            wait([rank.child.status], max(0.0, limit - time.monotonic()))
    for rank in ranks:
        rank.channel.close()
        rank.log.close()
        os.close(rank.child.status)
    ranks.clear()


# --- a rank's process ---


def serve(rank: int, size: int, channel: int, log: int) -> NoReturn:
    """Joins the others, unless `size` is 0, and answers calls; an empty message asks it to leave. It never returns."""
    parent = os.getppid()
    if sys.platform == "linux":  # the kernel kills this process when its parent dies
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    stacks.record_stacks(log)
    torch.set_num_threads(1)
    with Connection(channel) as caller, contextlib.suppress(EOFError, BrokenPipeError):
        if size:
            # All meet at a store that rank 0 holds, on a port that the caller passes on.
            port = 0 if rank == 0 else pickle.loads(caller.recv_bytes())
            store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
            if rank == 0:
                caller.send_bytes(pickle.dumps(store.port))
            # The caller enforces the deadline, so a collective itself never times out.
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(days=1))
            caller.send_bytes(b"ready")
        while setting := caller.recv_bytes():
            sys.path[:], warning_filters = pickle.loads(setting)
            call = caller.recv_bytes()
            state.reset()
            with state.filtering(warning_filters):
                answer = serialization.encode_outcome(serialization.perform(call))
            caller.send_bytes(pickle.dumps(process_groups.group_count()))
            caller.send_bytes(answer)
            dynamo.free_graphs()
        if size:
            # Otherwise a rank may be gone while another still communicates with it, which then aborts.
            dist.barrier()
            dist.destroy_process_group()
        # Exits after the exit handlers, without the second or so in which the interpreter tears torch down.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os._exit(1)  # the caller is gone
