"""Processes that torchrun starts again do not meet what those before them have left in its store."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardfn.mesh.rendezvous import agents_store, store_of_this_life


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that outlives the processes which meet there."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]


def lived(store: Any, size: int) -> list[Any]:
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(lambda rank: store_of_this_life(store.clone(), rank, size), range(size)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_ranks_of_one_life_meet_and_find_nothing_of_others(store: Any, size: int) -> None:
    for life in range(3):
        found = lived(store, size)
        assert not found[0].check(["rank 0"])
        found[0].set("rank 0", str(life))
        assert [one.get("rank 0") for one in found] == [str(life).encode()] * size


def test_what_a_dead_rank_has_said_is_not_taken_for_another_one(store: Any) -> None:
    store.set("shardfn/here/1", "said by one that was killed then")
    late = threading.Timer(0.5, lambda: found.append(store_of_this_life(store.clone(), 1, 2)))
    found: list[Any] = []
    late.start()
    mine = store_of_this_life(store.clone(), 0, 2)
    late.join()
    mine.set("key", "value")
    assert found[0].get("key") == b"value"


def test_a_rank_that_never_comes_is_an_error(store: Any) -> None:
    store.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match="of 2 ranks only 1 came within"):
        store_of_this_life(store, 0, 2)


def test_torchruns_own_store_is_told_from_one_that_rank_0_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, theirs in {"True": True, "False": False}.items():
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", said)
        assert agents_store() == theirs
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert not agents_store()


TOTAL = """
import torch, shardfn as sf
mesh = sf.make_mesh(data=2, device="cpu")
summed = sf.shard_map(lambda x: sf.psum(x, "data"), mesh=mesh, in_specs=sf.P("data"), out_specs=sf.P())
assert summed(torch.ones(1)).item() == 2
"""


def test_hosts_that_were_restarted_differently_often_meet(store: Any) -> None:
    for restarts in ((0, 0), (1, 0)):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", TOTAL],
                env=os.environ | {
                    "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_RESTART_COUNT": str(restarts[rank]), "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            assert [one.wait(120) for one in ranks] == [0, 0]
        finally:
            for one in ranks:
                one.kill()
