"""Hosts that cannot be made are an error that says what it takes; what crosses between them is in the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardfn as sf
from benchmarks.hosts import expected
from benchmarks.two_hosts import hosts
from shardfn.collectives.ledger import Record
from shardfn.testing import world

BOTH = ("replica", "shard")


@pytest.mark.parametrize(
    ("script", "told"),
    [("", "No such file"), ("echo mount of /sys failed: Operation not permitted >&2; exit 1", "not permitted")],
)
def test_where_no_namespaces_can_be_made_it_is_said_how(
    script: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        (tmp_path / "ip").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught, hosts("this command"):
        pytest.fail("there are none")
    assert "this command needs network namespaces, which this process may not make (" in str(caught.value)
    assert told in str(caught.value)
    assert "--cap-add NET_ADMIN" in str(caught.value)


@pytest.mark.parametrize(
    ("op", "axis", "share"),
    [
        ("all_gather", ("replica",), 1.0),
        ("all_gather", ("shard",), 0.0),
        ("reduce_scatter", BOTH, 2 / 3),
        ("all_reduce", BOTH, 1 / 2),
    ],
)
def test_what_is_for_the_other_host_follows_from_the_axes(op: str, axis: tuple[str, ...], share: float) -> None:
    one = Record(op, axis, "a", torch.float32, 1200, "gloo", scheduled=False, backward=False)
    assert expected(sf.collectives.Ledger([one])) == 1200 * share


def gradients_by(name: str) -> float:
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    params = sf.shard({"w": torch.ones(64, 64)}, mesh, sf.strategies.from_name(name, shard="shard", replica="replica"))
    stage = sf.stage(lambda p, x: x + p["w"].sum())
    with sf.collectives.ledger() as log:
        sf.value_and_grad(lambda params: stage(params, torch.zeros(())))(params)
    return expected(log)


def test_only_gradients_on_shards_cross_where_copies_are_whole_on_each_host() -> None:
    crossing = {name: sum(world(4).run(gradients_by, name)) for name in ("hybrid_shard", "ddp", "full_shard")}
    half = 64 * 64 * 4
    assert crossing["hybrid_shard"] < crossing["ddp"] < crossing["full_shard"]
    assert 2 * half <= crossing["hybrid_shard"] < 2.1 * half  # a first call also compares what ranks do
