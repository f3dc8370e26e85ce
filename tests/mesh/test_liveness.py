"""A host that does not answer any more is noticed, and what waits for it ends with an error that says so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.mesh import liveness, waiting, watchdog
from shardfn.mesh.groups import cpu_group
from shardfn.mesh.liveness import ConnectionState, addresses_of, hang_up, own_addresses, quiet_hosts, readings
from shardfn.testing import World, WorldError, errors


@pytest.mark.parametrize(
    ("seen", "quiet"),
    [
        ([], {}),
        ([ConnectionState("a", 0, 500.0)], {}),  # it was asked nothing
        ([ConnectionState("a", 3, 0.2)], {}),  # it is slow
        ([ConnectionState("a", 3, 12.0)], {"a": 12.0}),
        ([ConnectionState("a", 3, 12.0), ConnectionState("a", 0, 0.1)], {}),  # it answers on another connection
        ([ConnectionState("a", 3, 12.0), ConnectionState("a", 0, 40.0), ConnectionState("b", 0, 30.0)], {"a": 12.0}),
    ],
)
def test_a_host_is_quiet_that_was_asked_and_answers_nowhere(
    seen: list[ConnectionState], quiet: dict[str, float]
) -> None:
    assert quiet_hosts(seen) == quiet


@pytest.fixture
def pair() -> Any:
    """Two ends of a connection between two addresses of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), source_address=("127.0.0.3", 0))
        other, _ = server.accept()
        with one, other:
            yield one, other


def test_the_kernel_says_who_answers(pair: Any) -> None:
    one, other = pair
    one.sendall(b"something")
    other.recv(9)
    seen = {reading.address: reading for reading in readings()}
    assert {"127.0.0.1", "127.0.0.3"} <= seen.keys()
    assert seen["127.0.0.1"].quiet < 5
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1, "it is asked from now on"
    assert "127.0.0.3" in own_addresses()
    assert addresses_of("127.0.0.1") == {"127.0.0.1"}
    assert addresses_of("") == set()


def test_only_connections_to_a_host_that_has_gone_end(pair: Any) -> None:
    one, other = pair
    hang_up({"127.0.0.9"})
    one.sendall(b"a")
    assert other.recv(1) == b"a"
    hang_up({"127.0.0.3"})
    assert (one.recv(1), other.recv(1)) == (b"", b"")


def quiet(whose: str) -> str:
    """For rank 0 the host of rank 1, or of the store, has vanished while it waits; what it says then."""
    watchdog.PATIENCE, watchdog.TICK = 0.3, 0.05
    mesh = sf.make_mesh(shard=2, device="cpu")
    total = sf.shard_map(lambda x: sf.psum(x, "shard"), mesh=mesh, in_specs=sf.P("shard"), out_specs=sf.P())
    total(torch.ones(1))
    watcher = watchdog.watcher
    assert watcher is not None
    watcher.home = frozenset({"10.9.9.9"} if whose == "store" else ())
    if mesh.get_rank() == 1:
        time.sleep(2)
        if whose == "nobody":
            total(torch.ones(1))
        return "it came late"
    there = {"rank 1": "127.0.0.1", "store": "10.9.9.9", "nobody": "10.8.8.8"}[whose]
    with mock.patch.object(liveness, "readings", return_value=[ConnectionState(there, 4, 11.0)]):
        try:
            total(torch.ones(1))
        except RuntimeError as error:
            return str(error)
    return "it waited"


def test_a_rank_that_waits_for_a_host_that_has_vanished_says_so() -> None:
    with World(2) as fresh:
        said, _ = fresh.with_deadline(30).run(quiet, "rank 1")
    assert said.startswith("rank 0 waited in vain for all_reduce of ")
    assert "over shard: the host of rank 1, 127.0.0.1, has not answered for 11 s. It has gone, or the network" in said


def test_a_rank_whose_store_has_vanished_says_so() -> None:
    with World(2) as fresh:
        said, _ = fresh.with_deadline(30).run(quiet, "store")
    assert "over shard: the host of the store by which the ranks have met, 10.9.9.9, has not answered for 11 s" in said


def test_the_silence_of_others_is_no_reason_to_give_up() -> None:
    with World(2) as fresh:
        said, other = fresh.with_deadline(30).run(quiet, "nobody")
    assert (said, other) == ("it waited", "it came late")


def test_a_process_of_this_host_is_known_to_have_ended() -> None:
    assert not liveness.has_ended(liveness.own_process())
    program = "import sys; from shardfn.mesh.liveness import own_process; print(own_process(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        name = child.stdout.readline().decode().strip()
        assert not liveness.has_ended(name)
        place, pid, began = name.split()
        assert liveness.has_ended(f"{place} {pid} {int(began) - 1}")  # another process had this number before
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert liveness.has_ended(name)  # a zombie
    assert liveness.has_ended(name)
    assert not liveness.has_ended(f"another{name}")
    assert not liveness.has_ended("")


def test_a_process_has_a_name_only_where_proc_shows_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    own = liveness.own_process()
    monkeypatch.setattr(os, "readlink", lambda path: str(os.getpid() + 1))
    liveness._namespace_id.cache_clear()
    assert liveness.own_process() == ""
    assert not liveness.has_ended(own.rpartition(" ")[0] + " 0")
    liveness._namespace_id.cache_clear()


def test_a_process_may_call_itself_anything() -> None:
    program = (
        "import ctypes; from shardfn.mesh.liveness import has_ended, own_process;"
        "ctypes.CDLL(None).prctl(15, b'a) Z \\xff(', 0, 0, 0); assert own_process() and not has_ended(own_process())"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("wakes", [True, False])
def test_a_killed_process_is_noticed_without_its_connection(wakes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "GRACE", 15.0)  # the other rank shall have time to notice

    def body() -> None:
        watchdog.PATIENCE, watchdog.TICK, watchdog.WAKING = 0.3, 0.05, 0.3
        left: list[int] = []
        group, end = cpu_group([0, 1], "a test").group_name, time.monotonic() + 10
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        over = threading.Event()

        def leave(code: int) -> None:
            left.append(code)
            over.set()

        with mock.patch("os._exit", leave), waiting.on("all_reduce", group, "numbers") as wait:
            if wakes:  # or moves, as in a debugger
                while time.monotonic() < end and not wait.verdict:
                    time.sleep(0.01)
                for _ in range(100):
                    time.sleep(0.01)
            else:
                over.wait(10)
        raise RuntimeError(f"told: {wait.verdict}, left: {left[:1]}")

    with World(2, deadline=60) as fresh, pytest.raises(WorldError) as error:
        fresh.run(body)
    message = str(error.value)
    assert "rank 1 has ended without an error message (killed, out of memory, or crashed)" in message, message
    assert f"left: {[] if wakes else [1]}" in message, message


PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist, shardfn as sf
from shardfn.collectives import kernels
from shardfn.mesh import waiting, watchdog
from shardfn.mesh.groups import cpu_group
from shardfn.parallel import messages, pipeline
watchdog.PATIENCE, watchdog.TICK = 0.3, 0.05
sf.make_mesh(data=-1, device="cpu")
size, rank, x = dist.get_world_size(), dist.get_rank(), torch.ones(2) * dist.get_rank()
group = cpu_group(list(range(size)), "test")
dist.barrier(group)

def end(leave):
    if os.fork() == 0:  # its connections stay open in a child
        time.sleep(20)
        os._exit(0)
    leave()

def late():
    time.sleep(3)

def broadcast(source):
    with waiting.on("broadcast", group.group_name, "test"):
        dist.broadcast(x, source, group)
"""
PIPELINE = """
def part(w, x, batch):
    return (batch if rank == 0 else x * batch.sum()).mul(w).sum(-rank)

mesh = sf.make_mesh(pipe=2, device='cpu')
f = sf.grad(lambda w: pipeline(part, w, [torch.ones(2)], 'pipe'))
sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)(torch.ones(()))
"""
ENDS = {
    "after a broadcast": (
        4, "if rank == 0: late()\nbroadcast(1)\nassert x[0] == 1\nif rank == 1: os._exit(0)", [0, 0, 0, 0], ""
    ),
    "after it had nothing to send": (
        3,
        "if rank == 1: dist.destroy_process_group(); sys.exit(0)\n"
        "if rank == 2: late()\nassert kernels.permute(x, [2, -1, -1], rank, group.group_name)[0] == 2 * (rank == 0)\n"
        "os._exit(0)",
        [0, 0, 0],
        "",
    ),
    "killed, and the third is late": (
        3,
        "if rank == 1: end(lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "if rank == 2: late()\nkernels.all_reduce(x, 'sum', group.group_name)",
        [1, -9, 1],
        "rank 1 has ended without an error message",
    ),
    "killed while the ranks of a group are connected": (
        3,
        "from shardfn.mesh import groups\n"
        "if rank == 1: groups.process_groups.new_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cpu_group([0, 1, 2], 'another')",
        [1, -9, 1],
        "in vain for the connecting of a group",
    ),
    "killed between a message's note and its tensor": (
        2,
        "def kill(*_): end(lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        f"if rank == 1: messages.PipelineRanks._post = kill\n{PIPELINE}",
        [1, -9],
        "pipeline: rank 1 along 'pipe' does not answer",
    ),
    "killed between those, with the store": (
        2,
        f"if rank == 0: messages.PipelineRanks._post = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n{PIPELINE}",
        [-9, 1],
        "and cannot be asked whether it was killed; look first at its output, and at the system's log",
    ),
    "killed, with the store": (
        2,
        "if rank == 0: end(lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "kernels.all_reduce(x, 'sum', group.group_name)",
        [-9, 1],
        "rank 0, which served the store through which the ranks met, has ended. Look at its log",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_process_that_has_ended_is_given_up_only_if_it_did_not_do_its_part(name: str) -> None:
    size, ends, codes, told = ENDS[name]
    serves = "store" in name
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    kept: Any = None if serves else dist.TCPStore("localhost", 0, is_master=True)  # type: ignore[attr-defined]
    env = os.environ | {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_PORT": str(port)} if serves else {
        "MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"
    }  # fmt: skip
    begun = time.monotonic()
    with tempfile.TemporaryFile() as said:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM + ends],
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=said,
            )
            for rank in range(size)
        ]
        try:
            found = [process.wait(60) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said.seek(0)
        text = said.read().decode()
    assert found == codes, text
    assert told in text
    assert ("in vain" in text) == bool(told), text
    assert time.monotonic() - begun < 60
