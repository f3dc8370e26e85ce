"""A host that does not answer any more is noticed, and what waits for it ends with an error that says so."""

from __future__ import annotations

import socket
import time
from typing import Any
from unittest import mock

import pytest
import torch

import shardfn as sf
from shardfn.mesh import liveness, watchdog
from shardfn.mesh.liveness import Reading, addresses_of, hang_up, own_addresses, quiet_hosts, readings
from shardfn.testing import World


@pytest.mark.parametrize(
    ("seen", "quiet"),
    [
        ([], {}),
        ([Reading("a", 0, 500.0)], {}),  # it was asked nothing
        ([Reading("a", 3, 0.2)], {}),  # it is slow
        ([Reading("a", 3, 12.0)], {"a": 12.0}),
        ([Reading("a", 3, 12.0), Reading("a", 0, 0.1)], {}),  # it answers on another connection
        ([Reading("a", 3, 12.0), Reading("a", 0, 40.0), Reading("b", 0, 30.0)], {"a": 12.0}),
    ],
)
def test_a_host_is_quiet_that_was_asked_and_answers_nowhere(seen: list[Reading], quiet: dict[str, float]) -> None:
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
    with mock.patch.object(liveness, "readings", return_value=[Reading(there, 4, 11.0)]):
        try:
            total(torch.ones(1))
        except RuntimeError as error:
            return str(error)
    return "it waited"


def test_a_rank_that_waits_for_a_host_that_has_vanished_says_so() -> None:
    with World(2) as fresh:
        said, _ = fresh.within(30).run(quiet, "rank 1")
    assert said.startswith("rank 0 waited in vain for all_reduce of ")
    assert "over shard: the host of rank 1, 127.0.0.1, has not answered for 11 s. It has gone, or the network" in said


def test_a_rank_whose_store_has_vanished_says_so() -> None:
    with World(2) as fresh:
        said, _ = fresh.within(30).run(quiet, "store")
    assert "over shard: the host of the store by which the ranks have met, 10.9.9.9, has not answered for 11 s" in said


def test_the_silence_of_others_is_no_reason_to_give_up() -> None:
    with World(2) as fresh:
        said, other = fresh.within(30).run(quiet, "nobody")
    assert (said, other) == ("it waited", "it came late")
