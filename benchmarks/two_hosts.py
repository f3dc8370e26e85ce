"""Two emulated hosts with a slow link between them: network namespaces of this machine.

Creating them requires root, or `CAP_SYS_ADMIN` and `CAP_NET_ADMIN`, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import lacks

HOSTS = {"shardfn-a": "10.231.77.1", "shardfn-b": "10.231.77.2"}
LINK = "shardfn-link"
PORT = 29413
HEADERS = 14 + 20 + 32  # bytes of a packet's Ethernet, IPv4 and TCP headers, with TCP timestamps


@contextlib.contextmanager
def hosts(command: str, megabits: int = 1000) -> Iterator[None]:
    """Creates two namespaces with a link while the block runs; kills their processes afterwards.

    Args:
        command: of the benchmark.
        megabits: a second, that the link carries in each direction.

    Raises:
        SystemExit: this process may not create them, or the tools are missing; the message names `command`.
    """
    try:
        _remove()
        first, second = HOSTS
        for name in HOSTS:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", LINK, "netns", first, "type", "veth", "peer", "name", LINK, "netns", second)
        for name, address in HOSTS.items():
            _run(*inside(name), "ip", "address", "add", f"{address}/24", "dev", LINK)
            _run(*inside(name), "ip", "link", "set", LINK, "mtu", "9000", "up")
            _run(*inside(name), "ip", "link", "set", "lo", "up")
            shape = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb", "limit", "6500kb")
            _run(*inside(name), "tc", "qdisc", "add", "dev", LINK, *shape)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        with contextlib.suppress(OSError):
            _remove()
        lacks(
            f"{command} needs network namespaces, which this process may not make ({told.strip()}): run it as "
            f"root, in a container with --cap-add SYS_ADMIN --cap-add NET_ADMIN, with iproute2 installed"
        )
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by default, SIGTERM would skip the cleanup
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _remove()


def inside(host: str) -> tuple[str, ...]:
    """The prefix of a command that runs on a host."""
    return "ip", "netns", "exec", host


def launch(module: str, *words: str) -> None:
    """Runs a module with `torchrun`, as two ranks on each host, and waits for them.

    Raises:
        SystemExit: a rank failed.
    """
    started = []
    for number, name in enumerate(HOSTS):
        line = (
            *inside(name), sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
            "--node-rank", str(number), "--master-addr", next(iter(HOSTS.values())), "--master-port", str(PORT),
            "-m", module, *words,
        )  # fmt: skip
        started.append(subprocess.Popen(line, env=environment()))
    try:
        for one in started:
            if one.wait(timeout=900):
                raise SystemExit("the ranks on a host failed")
    finally:
        for one in started:
            one.kill()


def link(host: str, state: str) -> None:
    """Sets a host's end of the link `"up"` or `"down"`."""
    _run(*inside(host), "ip", "link", "set", LINK, state)


def kill(host: str) -> None:
    """Kills all processes on a host."""
    found = subprocess.run(("ip", "netns", "pids", host), check=False, capture_output=True, text=True)
    for process in map(int, found.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def environment() -> dict[str, str]:
    """The environment variables of a process on a host: one thread per rank, and gloo on the link."""
    return os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK, "TP_SOCKET_IFNAME": LINK}


def crossed() -> tuple[int, int]:
    """Bytes over this host's end of the link so far, in both directions: with and without the packets' headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            counts = [int(number) for number in numbers.split()]
            whole, packets = counts[0] + counts[8], counts[1] + counts[9]
            return whole, whole - packets * HEADERS
    raise RuntimeError(f"this host has no {LINK}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _remove() -> None:
    for name in HOSTS:
        kill(name)
        subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True)
