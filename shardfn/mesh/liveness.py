"""Detects vanished hosts, by the kernel's state of TCP connections, and processes of this host that have ended.

While a process computes or is stopped, its kernel still acknowledges each packet. A host that lost power or network
does not, and TCP alone would retry for a quarter of an hour. A connection to a killed process should break, but a
transport may miss it; so the process table is read, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SILENCE = 10.0  # seconds without an answer after which a host counts as gone
DOUBT = 2.0  # seconds without an answer after which nobody should contact it
EVERY = 2  # seconds between keepalive probes on an idle connection


@dataclass(frozen=True)
class ConnectionState:
    """The kernel's view of one connection.

    Attributes:
        address: of the host at the other end.
        asked: number of packets in a row that it has not acknowledged.
        quiet: seconds since it last answered.
    """

    address: str
    asked: int
    quiet: float


def quiet_hosts(readings: Iterable[ConnectionState]) -> dict[str, float]:
    """Returns the addresses that were asked and answer on no connection, with the seconds since their last answer."""
    probes_sent: dict[str, int] = {}
    quiet: dict[str, float] = {}
    for reading in readings:
        probes_sent[reading.address] = probes_sent.get(reading.address, 0) + reading.asked
        quiet[reading.address] = min(quiet.get(reading.address, reading.quiet), reading.quiet)
    return {address: seconds for address, seconds in quiet.items() if probes_sent[address] and seconds >= DOUBT}


def readings() -> list[ConnectionState]:
    """Reads all connections to other hosts, and turns keepalive probes on for each of them."""
    result = []
    for connection in _connections():
        with contextlib.suppress(OSError):  # the connection may close meanwhile
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPINTVL", EVERY), ("TCP_KEEPCNT", 100), ("TCP_KEEPIDLE", EVERY)):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
            _, _, retransmits, probes, backoff = struct.unpack_from("5B", information)
            received, answered = struct.unpack_from("2I", information, 52)  # milliseconds
            unanswered = retransmits + probes + backoff
            result.append(ConnectionState(_host(connection.getpeername()), unanswered, min(received, answered) / 1e3))
    return result


def own_addresses() -> list[str]:
    """Returns the local addresses of this process's connections."""
    return sorted({_host(connection.getsockname()) for connection in _connections(everywhere=True)})


def addresses_of(host: str) -> frozenset[str]:
    """Returns all addresses of a host; none if its name cannot be resolved here."""
    with contextlib.suppress(OSError):
        return frozenset(_host(info[4]) for info in socket.getaddrinfo(host, None) if host)
    return frozenset()


def own_process() -> str:
    """Returns a name of this process that is unique across hosts and time; empty if the system does not show it."""
    with contextlib.suppress(OSError):
        pid = os.getpid()
        return f"{_namespace_id(pid)} {pid} {_status(pid)[1]}" if _namespace_id(pid) else ""
    return ""


def has_ended(process: str) -> bool:
    """Whether a process, named by `own_process`, has ended; False on a different host or in a pid namespace."""
    place, pid, began = process.split() if process else ("", "0", "")
    if not place or place != _namespace_id(os.getpid()):
        return False
    try:
        os.kill(int(pid), 0)
        state, start_time = _status(int(pid))
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or hidden
        return False
    return state in "ZX" or start_time != began


@functools.cache
def _namespace_id(pid: int) -> str:
    """Returns an id of this process's host and pid namespace; empty if /proc does not show its processes."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(pid):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _status(pid: int) -> tuple[str, str]:
    """Returns the state of a process, Z for a zombie and X for a dead one, and when it began."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    return fields[0], fields[19]


def hang_up(addresses: Iterable[str]) -> None:
    """Shuts down this process's connections to these hosts, so that each thread blocked on one wakes with an error."""
    gone = set(addresses)
    for connection in _connections(everywhere=True):
        with contextlib.suppress(OSError):
            if _host(connection.getpeername()) in gone:
                connection.shutdown(socket.SHUT_RDWR)


def _connections(everywhere: bool = False) -> Iterator[socket.socket]:
    """Yields this process's TCP connections, whoever opened them; those within this host only if `everywhere`."""
    if not hasattr(socket, "TCP_INFO"):
        return  # this system does not report the state of a connection
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:  # closing a duplicate leaves it open
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                if everywhere or _host(connection.getpeername()) != _host(connection.getsockname()):
                    connection.getpeername()  # raises OSError for a listening socket
                    yield connection


def _host(address: tuple[Any, ...]) -> str:
    return str(address[0]).removeprefix("::ffff:")
