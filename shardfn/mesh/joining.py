"""How this process reaches the store by which the ranks of its world meet: torch's own, which rank 0 serves."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardfn.mesh import waiting
from shardfn.mesh.launchers import Start
from shardfn.mesh.lives import agents_store

NAMED = 20.0  # seconds in which the name of a host must become known
ANSWERS = 20.0  # seconds in which what listens must answer as a store does
COMPLAINS = 10.0  # seconds for which a process that cannot join tries to tell the others
LISTENS = 3.0  # of these, in which what listens must answer as a store does

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
    found: list[Any] = []

    def connect() -> None:
        try:
            found.append(
                dist.TCPStore(  # type: ignore[attr-defined]
                    start.host, start.port, start.size, serves, timedelta(seconds=ANSWERS),
                    wait_for_workers=False, multi_tenant=True,
                )
            )  # fmt: skip
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)  # torch waits for ever for an answer
    thread.start()
    thread.join(ANSWERS + 1)
    if found and not isinstance(found[0], RuntimeError):
        found[0].set_timeout(timedelta(seconds=limit))
        return found[0]
    error = str(found[0]) if found else "no answer"
    if "EADDRINUSE" in error:
        raise PortInUse(
            f"make_mesh: rank 0 cannot listen on port {start.port} of {socket.gethostname()}, which another program "
            f"uses, or another process that is rank 0, too: RANK is another one for each process; or export "
            f"MASTER_PORT=PORT, a free one, for all ranks, or end what is left of an earlier run"
        ) from None
    raise RuntimeError(_refused(start, serves, error)) from None


def _refused(start: Start, serves: bool, error: str) -> str:
    where = f"MASTER_ADDR:MASTER_PORT = {start.host}:{start.port}"
    if serves:
        return (
            f"make_mesh: rank 0 runs on {socket.gethostname()} and does not find itself at {where} ({_brief(error)}): "
            f"MASTER_ADDR names the host on which rank 0 runs"
        )
    return (
        f"make_mesh: what listens at {where} is not rank 0 of this world ({_brief(error)}): another program uses that "
        f"port. Export MASTER_PORT=PORT, a free one, for all ranks"
    )


def _brief(error: str) -> str:
    return error.split("\n")[0].split("Exception raised from")[0][:200].rstrip(" .")


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
    begun, speaks = time.monotonic(), waiting.PATIENCE
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
            found: list[Any] = []

            def connect(found: list[Any] = found) -> None:
                with contextlib.suppress(RuntimeError):
                    found.append(dist.TCPStore(host, port, None, False, timedelta(seconds=LISTENS)))  # type: ignore[attr-defined]

            thread = threading.Thread(target=connect, daemon=True)
            thread.start()
            thread.join(LISTENS)
            return found[0] if found else None
        time.sleep(0.2)
    return None
