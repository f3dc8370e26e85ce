"""A process that has imported torch once and forks ranks on request, in milliseconds each.

It is started afresh (not forked), with an environment that suits ranks: one thread each, loopback only. When the
process that started it ends, in whatever way, the socket between them closes and the fork server kills every rank and
exits.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NoReturn

_REQUEST = struct.Struct("ii")
_NUMBER = struct.Struct("q")
_PING, _PONG = (-1, -1), b"."
_PATIENCE = 120.0  # on a busy machine imports take that long
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from shardfn.testing.forkserver import main; from shardfn.testing.processes import serve; "
    "main(int(sys.argv[1]), sys.argv[3:], serve)"
)
_HEAVY = ("pytest", "hypothesis", "optree", "numpy", "torch._dynamo")  # preloaded if the caller has loaded them
_preloads: list[str] = []


@dataclass(frozen=True)
class Child:
    """A forked rank: its process id, and a descriptor from which its exit code can be read once."""

    pid: int
    status: int

    def exit_code(self, timeout: float) -> int | None:
        """The exit code (negative: the signal), or None if it still runs or its code is unknown."""
        data = _read_number(self.status, timeout)
        return int(_NUMBER.unpack(data)[0]) if data else None


class ForkServer:
    """The caller's handle of the process that forks ranks."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._control, remote = socket.socketpair()
        loopback = "lo" if sys.platform == "linux" else "lo0"
        changes = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        preload = [*(name for name in _HEAVY if name in sys.modules and find_spec(name)), *_preloads]
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(remote.fileno()), path, *preload],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **changes},
                start_new_session=True,
            )

    def answers(self) -> bool:
        """Whether it belongs to this process and serves requests; waits until its preloads are imported."""
        if self._owner != os.getpid():
            return False
        self._control.settimeout(_PATIENCE)
        try:
            with self._lock:
                self._control.sendall(_REQUEST.pack(*_PING))
                return self._control.recv(1) == _PONG
        except OSError:
            return False

    def fork(self, rank: int, size: int, descriptors: tuple[int, int]) -> Callable[[], Child]:
        """Requests a rank that owns `descriptors` (channel, stacks); the function returned waits for it."""
        status, status_end = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._control, [_REQUEST.pack(rank, size)], [*descriptors, status_end])
        finally:
            os.close(status_end)

        def wait() -> Child:
            data = _read_number(status, _PATIENCE)
            if not data:
                os.close(status)
                raise RuntimeError("the process that forks ranks has died; its standard error says why")
            return Child(_NUMBER.unpack(data)[0], status)

        return wait

    def close(self) -> None:
        """Stops it, and with it every rank that it has forked."""
        self._control.close()
        if self._owner != os.getpid():
            return
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:  # stuck in an import, say
            self._process.kill()
            self._process.wait()


def _read_number(descriptor: int, timeout: float) -> bytes:
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    return os.read(descriptor, _NUMBER.size) if ready.poll(timeout * 1000) else b""


def preload(*names: str) -> None:
    """Makes the fork server import these modules, if they exist, when it starts, for all ranks that it forks."""
    _preloads.extend(name for name in names if name not in _preloads)


_current: ForkServer | None = None
_current_lock = threading.Lock()


def fork_server() -> ForkServer:
    """This process's fork server, started at the first call, and again if it has died; stopped at exit.

    Raises:
        RuntimeError: it cannot start.
    """
    global _current
    with _current_lock:
        if _current is None or not _current.answers():
            _stop()
            _current = ForkServer()
            if not _current.answers():
                raise RuntimeError("the process that forks ranks could not start; its standard error says why")
        return _current


@atexit.register  # registered at import, so that it runs after the worlds' own handlers
def _stop() -> None:
    if _current is not None:
        _current.close()


def main(control: int, preload: list[str], serve: Callable[[int, int, int, int], NoReturn]) -> None:
    """The fork server itself: imports modules, then serves requests until the other end closes."""
    warnings.simplefilter("ignore")  # from preloads, and from fork in a process with threads
    for name in preload:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.freeze()  # keeps the collector from touching, and so copying, pages that ranks share
    with socket.socket(fileno=control) as channel:
        task = _serve(channel)
    if task is None:
        os._exit(0)  # tearing torch down at interpreter exit is slow
    serve(*task)


def _serve(control: socket.socket) -> tuple[int, int, int, int] | None:
    """Forks ranks. Returns None in the fork server when it is done, and the rank's task in a rank."""
    children: dict[int, int] = {}
    wake, signaled = socket.socketpair()
    for end in (wake, signaled):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signaled.fileno())
    with wake, signaled:
        while True:
            ready, _, _ = select.select([control, wake], [], [])
            if wake in ready:
                wake.recv(4096)
                _reap(children)
            if control in ready:
                request, descriptors, _, _ = socket.recv_fds(control, _REQUEST.size, 3)
                if not request:
                    signal.set_wakeup_fd(-1)
                    _kill(children)
                    return None
                rank, size = _REQUEST.unpack(request)
                if (rank, size) == _PING:
                    control.sendall(_PONG)
                    continue
                channel, stacks, status = descriptors
                if pid := os.fork():
                    with contextlib.suppress(OSError):
                        os.setpgid(pid, pid)
                    children[pid] = status
                    _tell(status, pid)
                    os.close(channel)
                    os.close(stacks)
                    continue
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (*children.values(), status):
                    os.close(descriptor)
                return rank, size, channel, stacks


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, _NUMBER.pack(number))


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, state = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        status = children.pop(pid)
        _kill([pid])  # processes that the rank had started
        _tell(status, os.waitstatus_to_exitcode(state))
        os.close(status)


def _kill(leaders: Iterable[int]) -> None:
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
