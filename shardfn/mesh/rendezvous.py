"""How this process reaches the store by which the ranks of its world meet: one of torch's, of rank 0 or of torchrun.

torchrun starts processes again, and its store may outlive them: what those that died left there is not met again.
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

NAMED = 20.0  # seconds in which the name of a host must become known
ANSWERS = 20.0  # seconds in which what listens must answer as a store does
COMPLAINS = 10.0  # seconds for which a process that cannot join tries to tell the others
LISTENS = 3.0  # of these, in which what listens must answer as a store does
PAUSE = 0.01  # seconds between two looks of rank 0, at first; at most twenty times as long

_HERE, _LIFE = "shardfn/here/{}", "shardfn/life/{}"
_log = logging.getLogger("shardfn")


class PortInUse(RuntimeError):
    """Rank 0 cannot listen where something does already, which may be another rank 0."""


def store_of(start: Start, limit: float) -> Any:
    """The store of a world: rank 0 serves it, or torchrun does; the others wait until it is there.

    Raises:
        PortInUse: rank 0 cannot serve it.
        RuntimeError: the host is unknown, what listens there is no store, or nothing has come to listen there.
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
            f"uses, or another process that is rank 0, too: RANK is another one for each process; or export "
            f"MASTER_PORT=PORT, a free one, for all ranks, or end what is left of an earlier run"
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
    """The store there, or the RuntimeError that says why there is none."""
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

    # On a thread of its own, since torch waits for ever for the answer of something that listens and is no store.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return result[0] if result else RuntimeError("no answer")


def _resolve(start: Start) -> None:
    """Waits until the host has an address, as that of a pod which has just been started may not."""
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
    """Waits until something listens there."""
    begun, speaks = time.monotonic(), watchdog.PATIENCE
    while True:
        try:
            socket.create_connection((start.host, start.port), timeout=5).close()
            return
        except OSError as error:
            waited = time.monotonic() - begun
            told = (
                f"rank 0 of {start.size} has not come: nothing listens at {start.host}:{start.port} ({error}), where "
                f"MASTER_ADDR and MASTER_PORT say that it does"
            )
        if waited > limit:
            raise RuntimeError(f"make_mesh: {told}, in {limit:.0f} s. Look at the output of rank 0 first")
        if waited > speaks:
            speaks = 2 * waited
            _log.warning("rank %d has waited %.0f s for the world to begin: %s", start.rank, waited, told)
        time.sleep(0.2)


def reached_soon(host: str, port: int) -> Any:
    """The store, to tell the others why this process does not come; None where it is not there soon."""
    until = time.monotonic() + COMPLAINS
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=1).close()
            store = _connected(host, port, None, False, LISTENS)
            return None if isinstance(store, RuntimeError) else store
        time.sleep(0.2)
    return None


def agents_store() -> bool:
    """Whether the store is torchrun's own, and not one that rank 0 serves."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_this_life(store: Any, rank: int, size: int) -> Any:
    """What only the processes of this life read and write, in a store that earlier ones may have used.

    torchrun's own number of restarts would not do: each host counts those that its own processes caused, so that hosts
    which go on together have different ones. Instead every process says a name that nobody had before, and rank 0
    answers to each of them. What is left of one that has died is answered, too, and nobody reads it.

    Raises:
        RuntimeError: a rank did not come within the store's timeout.
    """
    me = uuid.uuid4().hex
    if rank > 0:
        store.set(_HERE.format(rank), me)
        life = store.get(_LIFE.format(me)).decode()
        store.add(_LIFE.format(life), 1)
        return dist.PrefixStore(f"life {life}", store)  # type: ignore[attr-defined]
    end, pause, answered = time.monotonic() + store.timeout.total_seconds(), PAUSE, set()
    while store.add(_LIFE.format(me), 0) < size - 1:
        for other in range(1, size):
            if store.check([_HERE.format(other)]) and (name := store.get(_HERE.format(other))) not in answered:
                store.set(_LIFE.format(name.decode()), me)
                answered.add(name)
        if time.monotonic() > end:
            raise RuntimeError(f"of {size} ranks only {len(answered) + 1} came within {store.timeout}")
        time.sleep(pause)
        pause = min(2 * pause, 20 * PAUSE)
    return dist.PrefixStore(f"life {me}", store)  # type: ignore[attr-defined]
