"""Values go from one tier to another; what is on disk is what it was, to whatever torch and Python do with it."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import World
from shardfn.tiers.tensors import on_disk
from tests.models import same
from tests.refusals import told
from tests.resident import grown, pages_of


def whole() -> Any:
    g = torch.Generator().manual_seed(0)
    stages = [{"w": torch.randn(30, 7, generator=g), "v": torch.randn(9, generator=g).double()} for _ in range(3)]
    return {"embed": torch.randn(41, 5, generator=g), "blocks": stages, "none": {"empty": torch.empty(0, 3)}}


def where(tree: Any) -> set[bool]:
    """Whether leaves with elements are on disk."""
    return {on_disk(x) for x in optree.tree_leaves(tree) if isinstance(x, Tensor) and x.numel()}


def moved(scratch: Path) -> list[Any]:
    mesh = sf.make_mesh(device="cpu", scratch=scratch, shard=2)
    params = sf.shard(whole(), mesh, sf.full_shard("shard"))
    optimizer = so.adamw8bit(0.1)
    params, state = optimizer.step(params, params, optimizer.init(params))
    given = {"params": params, "state": state, "plain": torch.ones(2), "step": 3}
    away = sf.shards.to_tier(given, "disk")
    here = sf.shards.to_tier(away, "device")
    stay = [sf.shards.to_tier(away, "disk"), sf.shards.to_tier(here, "device"), sf.shards.to_tier(here, "host")]
    kept = [(away, stay[0]), (here, stay[1]), (here, stay[2])]
    tied = sf.shards.to_tier({"a": params["embed"], "b": params["embed"]}, "disk")
    variables = sf.shards.to_tier(optree.tree_map(lambda x: x.clone().requires_grad_(), params), "disk")
    found = [
        same(away, given), same(here, given),
        where(away["params"]) == where(away["state"]["codes"]) == where(away["state"]["scales"]) == {True},
        where(here) == where(given) == {False}, away["plain"] is given["plain"],
        all(x is y for a, b in kept for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)),
        tied["a"].values is tied["b"].values,
        all(x.requires_grad and x.is_leaf for x in optree.tree_leaves(variables)),
    ]  # fmt: skip
    grads = sf.value_and_grad(lambda p: sf.stage(lambda p: p["w"].square().sum())(p["blocks"][0]))
    return [*found, same(grads(away["params"]), grads(here["params"]))]


@pytest.mark.world(2)
def test_values_of_shards_go_from_tier_to_tier_and_nothing_else_does(world: World, tmp_path: Path) -> None:
    assert world.run(moved, tmp_path) == [[True] * 9] * 2


def refusals(scratch: Path) -> list[str]:
    mesh = sf.make_mesh(device="cpu", scratch=scratch, shard=2)
    params = sf.shard(whole(), mesh, sf.full_shard("shard"))
    elsewhere = sf.shard(whole(), sf.make_mesh(device="cpu", data=2), sf.full_shard("data"))
    meta = optree.tree_map(lambda x: x.to("meta"), params)
    twice = optree.tree_map(lambda x: x.clone().requires_grad_() * 2, params)
    (scratch / "file").touch()
    blocked = sf.shard(whole(), sf.make_mesh(device="cpu", scratch=scratch / "file", rows=2), sf.full_shard("rows"))
    return [
        told(lambda: sf.shards.to_tier(params, "tape")),  # type: ignore[arg-type]
        told(lambda: sf.shards.to_tier("disk", params)),
        told(lambda: sf.shards.to_tier(elsewhere, "disk")),
        told(lambda: sf.shards.to_tier(blocked, "disk")),
        told(lambda: sf.shards.to_tier(meta, "disk")),
        told(lambda: sf.shards.to_tier(twice, "disk")),
        told(lambda: torch.func.grad(lambda p: sf.shards.to_tier(p, "disk")["embed"].values.sum())(params)),
    ]


@pytest.mark.world(2)
def test_what_cannot_be_put_is_told(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDFN_SCRATCH", raising=False)
    tier, turned, nowhere, folder, meta, twice, transform = world.run(refusals, tmp_path)[0]
    assert tier == 'ValueError: to_tier: tier=\'tape\'; a tier is "device", "host" or "disk"'
    assert (
        turned
        == "TypeError: to_tier('disk', ...): the tree comes first, and its tier after it: to_tier(params, 'disk')"
    )
    assert nowhere.startswith("ValueError: values are to be on disk, but the folder is unknown: pass a folder")
    assert folder.startswith("FileExistsError: ")
    assert "no file for values can be made in" in folder
    assert str(tmp_path / "file") in folder
    assert "they are on the device meta" in meta
    assert "stage 'blocks.0' cannot be put elsewhere here, as they carry a gradient" in twice
    assert "as a transform is running" in transform


def one_at_a_time(scratch: Path) -> list[float]:
    """MB of its own that moving 8 shards of 8 MB each to disk takes, and of pages that stay."""
    mesh = sf.make_mesh(device="cpu", scratch=scratch, shard=1)
    params = sf.shard({"blocks": [torch.full((2**21,), float(i)) for i in range(8)]}, mesh, sf.full_shard("shard"))
    sf.shards.to_tier(params["blocks"][0], "disk")
    kept: list[Any] = []
    own, of_files = grown(lambda: kept.append(sf.shards.to_tier(params, "disk")))
    return [own, of_files, pages_of(scratch)]


def test_no_more_than_a_shard_is_in_memory_meanwhile(tmp_path: Path) -> None:
    with World(1) as world:
        ((own, of_files, stay),) = world.run(one_at_a_time, tmp_path)
    assert own < 20
    assert of_files < 9
    assert stay == 0


def copies(scratch: Path) -> list[bool]:
    mesh = sf.make_mesh(device="cpu", scratch=scratch, shard=2)
    plan = sf.full_shard("shard")
    here, away = sf.shard(whole(), mesh, plan), sf.shard(whole(), mesh, plan.with_tiers(params="disk"))
    want = optree.tree_leaves(here)
    tied = {"a": away["embed"], "b": away["embed"]}
    twins = copy.deepcopy(tied)
    deep, file = copy.deepcopy(away), io.BytesIO()
    torch.save(away, file)
    file.seek(0)
    pickled, loaded = pickle.loads(pickle.dumps(away)), torch.load(file, weights_only=False)
    cloned = optree.tree_map(torch.clone, away)
    doubled = torch.utils._pytree.tree_map(lambda x: x * 2, away)
    moved = optree.tree_map(lambda x: x.to("cpu", torch.float64), away)
    found = [
        *(same(optree.tree_leaves(one), want) for one in (away, deep, pickled, loaded, cloned)),
        all(optree.tree_structure(one) == optree.tree_structure(away) for one in (deep, pickled, loaded, cloned)),
        same(optree.tree_leaves(doubled), [x * 2 for x in want]),
        same(optree.tree_leaves(moved), [x.double() for x in want]),
        where(away) == where(deep) == {True}, where([cloned, pickled, loaded, doubled]) == {False},
        twins["a"].values is twins["b"].values, twins["a"].values is not tied["a"].values,
    ]  # fmt: skip
    for x in optree.tree_leaves(deep):
        x.zero_()
    return [*found, same(optree.tree_leaves(away), want)]


@pytest.mark.world(2)
def test_copies_of_what_is_on_disk(world: World, tmp_path: Path) -> None:
    assert world.run(copies, tmp_path) == [[True] * 13] * 2


def gathered(scratch: Path) -> list[bool]:
    """Whole parameters again, and no page of what they were gathered from is left."""
    mesh = sf.make_mesh(device="cpu", scratch=scratch, replica=2, shard=2)
    away = sf.shard(whole(), mesh, sf.hybrid_shard(shard="shard", replica="replica").with_tiers(params="disk"))
    plain = [sf.unshard(away), sf.unshard(away, ranks=[3]), sf.unshard(away, to="cpu")]
    some = sf.unshard(away, only=r"blocks\.1\.w", ranks=[0, 3])
    sf.shards.assert_replicated(away)
    stay, rank, want = pages_of(scratch), torch.distributed.get_rank(), whole()
    return [
        stay == 0, same(plain[0], want), same(plain[2], want), (rank != 3) or same(plain[1], want),
        (some["blocks"][1]["w"] is not None) is (rank in (0, 3)),
        (rank not in (0, 3)) or torch.equal(some["blocks"][1]["w"], want["blocks"][1]["w"]),
    ]  # fmt: skip


@pytest.mark.world(4)
def test_what_is_on_disk_is_gathered_and_no_page_of_it_stays(world: World, tmp_path: Path) -> None:
    assert world.run(gathered, tmp_path) == [[True] * 6] * 4


def printed(scratch: Path) -> list[str]:
    mesh = sf.make_mesh(device="cpu", scratch=scratch, shard=2)
    params = sf.shard({"w": torch.ones(64)}, mesh, sf.full_shard("shard"))
    away = sf.shard({"w": torch.ones(64)}, mesh, sf.full_shard("shard").with_tiers(params="disk", state="host"))
    return [
        str(params["w"].layout), str(away["w"].layout), repr(away["w"]), repr(sf.shards.to_tier(params["w"], "disk")),
        repr(sf.shards.to_tier(away["w"], "device")),
    ]  # fmt: skip


@pytest.mark.world(2)
def test_shards_say_where_they_are(world: World, tmp_path: Path) -> None:
    plain, layout, away, put, back = world.run(printed, tmp_path)[0]
    known = "w: float32, 1/2 over shard, 192 B a rank"
    assert plain == known
    assert layout == f"{known} on disk, state on the host"
    assert away.startswith(f"FlatShard({layout},\n")
    assert put.startswith(f"FlatShard(now on disk; {plain},\n")
    assert back.startswith(f"FlatShard(now in memory; {layout},\n")
