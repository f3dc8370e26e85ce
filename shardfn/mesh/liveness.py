"""Hosts that have vanished without a word, by what the kernel knows of this process's connections to them.

A process that computes, or is stopped, still has a kernel that answers each packet; a host that lost its power or its
network does not, and TCP by itself would ask it for a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

SILENCE = 10.0  # seconds without an answer until a host is taken for gone
DOUBT = 2.0  # seconds until nobody should start to talk to it
EVERY = 2  # seconds between two questions to a host on a connection that has nothing else to say


@dataclass(frozen=True)
class Reading:
    """What the kernel says of one connection.

    Attributes:
        address: of the host at the other end.
        asked: how many packets in a row it was sent that it has not answered.
        quiet: seconds since it last answered.
    """

    address: str
    asked: int
    quiet: float


def quiet_hosts(readings: Iterable[Reading]) -> dict[str, float]:
    """The addresses that were asked and do not answer on any connection, and for how many seconds."""
    asked: dict[str, int] = {}
    quiet: dict[str, float] = {}
    for one in readings:
        asked[one.address] = asked.get(one.address, 0) + one.asked
        quiet[one.address] = min(quiet.get(one.address, one.quiet), one.quiet)
    return {address: seconds for address, seconds in quiet.items() if asked[address] and seconds >= DOUBT}


def readings() -> list[Reading]:
    """Of all connections of this process to other hosts, each of which is asked for an answer from now on."""
    found = []
    for connection in _connections():
        with contextlib.suppress(OSError):  # it may end meanwhile
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPINTVL", EVERY), ("TCP_KEEPCNT", 100), ("TCP_KEEPIDLE", EVERY)):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
            _, _, retransmits, probes, backoff = struct.unpack_from("5B", information)
            received, answered = struct.unpack_from("2I", information, 52)  # milliseconds
            asked = retransmits + probes + backoff
            found.append(Reading(_host(connection.getpeername()), asked, min(received, answered) / 1e3))
    return found


def own_addresses() -> list[str]:
    """The addresses by which this process is connected to others."""
    return sorted({_host(connection.getsockname()) for connection in _connections(everywhere=True)})


def addresses_of(host: str) -> frozenset[str]:
    """All addresses of a host; none where it has no name that is known here."""
    with contextlib.suppress(OSError):
        return frozenset(_host(found[4]) for found in socket.getaddrinfo(host, None) if host)
    return frozenset()


def hang_up(addresses: Iterable[str]) -> None:
    """Ends this process's connections to these hosts: each thread that waits for one wakes with an error."""
    gone = set(addresses)
    for connection in _connections(everywhere=True):
        with contextlib.suppress(OSError):
            if _host(connection.getpeername()) in gone:
                connection.shutdown(socket.SHUT_RDWR)


def _connections(everywhere: bool = False) -> Iterator[socket.socket]:
    """This process's TCP connections, whoever has made them; without `everywhere`, not those within this host."""
    if not hasattr(socket, "TCP_INFO"):
        return  # this system does not tell
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:  # closing a duplicate ends nothing
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                    continue
                if everywhere or _host(one.getpeername()) != _host(one.getsockname()):
                    one.getpeername()  # one that only listens has none
                    yield one


def _host(address: tuple[Any, ...]) -> str:
    return str(address[0]).removeprefix("::ffff:")
