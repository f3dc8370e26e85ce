"""Connects this process to the rendezvous store of its world, which rank 0 or torchrun serves.

torchrun restarts processes, and its store may outlive them: entries of processes that died must not be read again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardfn.mesh import watchdog
from shardfn.mesh.launchers import Start

NAMED = 20.0  # seconds within which a host's name must resolve
ANSWERS = 20.0  # seconds within which a listener must answer as a store does
COMPLAINS = 10.0  # seconds for which a process that cannot join tries to tell the others why
LISTENS = 3.0  # seconds of these within which a listener must answer as a store does
PAUSE = 0.01  # seconds between rank 0's polls at first; the pause grows to twenty times as much

_HERE, _LIFE = "shardfn/here/{}", "shardfn/life/{}"
_log = logging.getLogger("shardfn")


class PortInUse(RuntimeError):
    """Rank 0 cannot listen because the port is in use, perhaps by another process that is rank 0."""


def store_of(start: Start, limit: float) -> Any:
    """Returns the store of a world, which rank 0 or torchrun serves; the other ranks wait until it listens.

    Raises:
        PortInUse: rank 0 cannot serve it because the port is in use.
        RuntimeError: the host is unknown, the listener is no store, or nothing listened within the limit.
    """
    serves = start.rank == 0 and not agents_store()
    _resolve(start)
    if not serves:
        _reach(start, limit)
    store = _connected(start.host, start.port, start.size, serves, ANSWERS)
    if not isinstance(store, RuntimeError):
        store.set_timeout(timedelta(seconds=limit))
        return store
    error = str(store)
    if "EADDRINUSE" in error:
        raise PortInUse(
            f"make_mesh: rank 0 cannot listen on port {start.port} of {socket.gethostname()}, which another program "
            f"or rank 0 uses. Give each process a different RANK, export MASTER_PORT=PORT, a free one, for all ranks, "
            f"or end earlier runs"
        ) from None
    where = f"MASTER_ADDR:MASTER_PORT = {start.host}:{start.port}"
    brief = error.split("\n")[0].split("Exception raised from")[0][:200].rstrip(" .")
    if serves:
        raise RuntimeError(
            f"make_mesh: rank 0 runs on {socket.gethostname()} and does not find itself at {where} ({brief}): "
            f"MASTER_ADDR names the host on which rank 0 runs"
        ) from None
    raise RuntimeError(
        f"make_mesh: what listens at {where} is not rank 0 of this world ({brief}): another program uses that "
        f"port. Export MASTER_PORT=PORT, a free one, for all ranks"
    ) from None


def _connected(host: str, port: int, size: int | None, serves: bool, seconds: float) -> Any:
    """Returns the store at an address, or the RuntimeError that says why there is none."""
    result: list[Any] = []

    def connect() -> None:
        try:
            result.append(
                dist.TCPStore(  # type: ignore[attr-defined]
                    host, port, size, serves, timedelta(seconds=seconds), wait_for_workers=False, multi_tenant=True
                )
            )
        except RuntimeError as error:
            result.append(error)

    # On a separate thread, as torch waits without limit for the answer of a listener that is no store.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return result[0] if result else RuntimeError("no answer")


def _resolve(start: Start) -> None:
    """Waits until the host's name resolves, which takes time for a pod that has just been started."""
    until, pause = time.monotonic() + NAMED, 0.5
    while True:
        try:
            socket.getaddrinfo(start.host, start.port)
            return
        except OSError as error:
            if time.monotonic() + pause > until:
                raise RuntimeError(
                    f"make_mesh: MASTER_ADDR={start.host!r} has no address that {socket.gethostname()} knows ({error}"
                    f"): it is the name or the IP address of the host where rank 0 runs"
                ) from None
            time.sleep(pause)


def _reach(start: Start, limit: float) -> None:
    """Waits until something listens at the host and port."""
    started, next_warning = time.monotonic(), watchdog.PATIENCE * watchdog.STARTING
    while True:
        try:
            socket.create_connection((start.host, start.port), timeout=5).close()
            return
        except OSError as error:
            waited = time.monotonic() - started
            problem = (
                f"rank 0 of {start.size} has not come: nothing listens at {start.host}:{start.port} ({error}), where "
                f"MASTER_ADDR and MASTER_PORT say that it does"
            )
        if waited > limit:
            raise RuntimeError(f"make_mesh: {problem}, in {limit:.0f} s. Look at the output of rank 0 first")
        if waited > next_warning:
            next_warning = 2 * waited
            _log.warning(
                "rank %d has waited %.0f s for the world to begin: %s. %s", start.rank, waited, problem, watchdog.STARTS
            )
        time.sleep(0.2)


def reached_soon(host: str, port: int) -> Any:
    """Returns the store, to tell the others why this process does not join; None if it is not reachable soon."""
    until = time.monotonic() + COMPLAINS
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=1).close()
            store = _connected(host, port, None, False, LISTENS)
            return None if isinstance(store, RuntimeError) else store
        time.sleep(0.2)
    return None


def agents_store() -> bool:
    """Whether torchrun's agent serves the store, rather than rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_this_life(store: Any, rank: int, size: int) -> Any:
    """Returns a view of the store that only this generation of processes reads and writes.

    torchrun's own restart count cannot separate generations: each host counts only restarts that its own processes
    caused, so hosts that continue together may count differently. Instead, every process writes a fresh unique name and
    rank 0 answers each of them. Names left by processes that died are answered too, and nobody reads the answers.

    Raises:
        RuntimeError: a rank did not arrive within the store's timeout.
    """
    own_name = uuid.uuid4().hex
    if rank > 0:
        store.set(_HERE.format(rank), own_name)
        life = store.get(_LIFE.format(own_name)).decode()
        store.add(_LIFE.format(life), 1)  # rank 0 counts the ranks that have read its answer
        return dist.PrefixStore(f"life {life}", store)  # type: ignore[attr-defined]
    end, pause, answered = time.monotonic() + store.timeout.total_seconds(), PAUSE, set()
    while store.add(_LIFE.format(own_name), 0) < size - 1:
        for other in range(1, size):
            if store.check([_HERE.format(other)]) and (name := store.get(_HERE.format(other))) not in answered:
                store.set(_LIFE.format(name.decode()), own_name)
                answered.add(name)
        if time.monotonic() > end:
            raise RuntimeError(f"of {size} ranks only {len(answered) + 1} came within {store.timeout}")
        time.sleep(pause)
        pause = min(2 * pause, 20 * PAUSE)
    return dist.PrefixStore(f"life {own_name}", store)  # type: ignore[attr-defined]
