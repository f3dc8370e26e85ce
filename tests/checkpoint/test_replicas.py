"""Copies of replicated values that differ: refused by what writes one of them, or kept each by `ByRank`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import nn

import shardfn as sf
import shardfn.optim as so
from shardfn import P, checkpoint, interop, lora
from shardfn.checkpoint.contents import contents
from shardfn.checkpoint.verifying import verify
from shardfn.testing import World, world
from tests.models import mesh_of, same
from tests.refusals import refused

WEIGHTS = {"w": torch.arange(40.0, dtype=torch.float64).view(8, 5), "b": torch.ones(3, dtype=torch.float64)}


def islands(sizes: dict[str, int], strategy: Any, specs: Any) -> dict[str, Any]:
    """Parameters and optimizer state that have drifted apart along the first axis."""
    mesh = mesh_of(**sizes)
    params = sf.shard(WEIGHTS, mesh, strategy, specs=specs)
    drift = float(mesh.get_local_rank(next(iter(sizes))))
    params = optree.tree_map(lambda x: x + drift, params)
    opt = so.adamw8bit(1e-2) if sizes["shard"] == 2 else so.adamw(1e-2)
    params, state = opt.step(params, optree.tree_map(lambda x: x.sin() + drift, params), opt.init(params))
    return {"params": params, "state": state}


PLACED: dict[str, tuple[dict[str, int], Any, Any]] = {
    "islands": ({"island": 2, "shard": 2}, sf.full_shard("shard"), P()),
    "drifted copies": ({"island": 2, "shard": 1}, sf.ddp("island"), P()),
    "hybrid": ({"replica": 2, "shard": 2}, sf.hybrid_shard(shard="shard", replica="replica"), P()),
    "cut by specs": ({"island": 2, "shard": 2}, sf.ddp("island"), {"w": P("shard"), "b": P()}),
}


def elements(tree: Any) -> Any:
    """What this rank holds of each value, without padding."""
    held = contents(tree, shared=False)
    return [(box.name, box.values) for box in held.boxes], held.plain, held.numbers


def saved_islands(root: str, kind: str) -> Any:
    tree, path = islands(*PLACED[kind]), Path(root)
    said = [refused(lambda: checkpoint.save(path / "x", tree), ValueError)]
    pending = checkpoint.save_async(path / "x", tree)
    said.append(refused(pending.wait, ValueError))
    said.append(refused(lambda: checkpoint.export_hf(path / "x", tree["params"])))
    plain = {"w": tree["params"], "x": torch.full((2,), float(torch.distributed.get_rank()))}
    said.append(refused(lambda: checkpoint.export_hf(path / "x", plain)))
    left = [entry.name for entry in path.iterdir() if entry.name[0] != "."]
    checkpoint.save(path / "each", checkpoint.ByRank(tree))
    pending = checkpoint.save_async(path / "also", {"a": checkpoint.ByRank(tree), "step": 3})
    like = optree.tree_map(lambda x: torch.zeros_like(x) if torch.is_tensor(x) else x, tree)
    back = checkpoint.load(path / "each", checkpoint.ByRank(like), donate=False).value
    pending.wait()
    also = checkpoint.load(path / "also", {"a": checkpoint.ByRank(like), "step": 0})["a"].value
    wrong = refused(lambda: checkpoint.load(path / "each", like))
    return said, left, same(elements(back), elements(tree)) and same(elements(also), elements(tree)), wrong


@pytest.mark.parametrize("kind", PLACED)
def test_replicas_that_differ_are_an_error_or_kept_each(kind: str, tmp_path: Path) -> None:
    size = 4 if PLACED[kind][0]["shard"] == 2 else 2
    for said, left, kept, wrong in world(size).run(saved_islands, str(tmp_path), kind):
        assert all("params.w" in text or "w" in text for text in said), said
        assert all("has other numbers" in text or "have other numbers" in text for text in said), said
        assert all("sf.pmean" in text and "ByRank" in text for text in said), said
        assert left == []
        assert kept
        assert "that of 2 ranks, each its own" in wrong
    assert verify(tmp_path / "each").damage == verify(tmp_path / "also").damage == []


def moved_islands(root: str, phase: str, shard: int) -> Any:
    mesh = mesh_of(island=2, shard=shard)
    params = sf.shard(WEIGHTS, mesh, sf.full_shard("shard"))
    params = optree.tree_map(lambda x: x * (mesh.get_local_rank("island") + 1), params)
    if phase == "save":
        return checkpoint.save(Path(root) / "x", {"p": checkpoint.ByRank(params)})
    like = checkpoint.ByRank(optree.tree_map(torch.zeros_like, params))
    back = checkpoint.load(Path(root) / "x", {"p": like})["p"].value
    return same(sf.unshard(back), optree.tree_map(lambda x: x * (mesh.get_local_rank("island") + 1), WEIGHTS))


def test_islands_come_back_on_other_numbers_of_ranks_in_each(tmp_path: Path) -> None:
    world(4).run(moved_islands, str(tmp_path), "save", 2)
    assert world(2).run(moved_islands, str(tmp_path), "load", 1) == [True] * 2
    assert world(4).run(moved_islands, str(tmp_path), "load", 2) == [True] * 4


def saved_by_interop(root: str) -> list[str]:
    mesh = mesh_of(island=2, shard=1)
    model = interop.functional(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), min_stage_params=1)

    adapters = sf.shard(lora.init(model, r".*0", 2), mesh, sf.ddp("island"))
    params, adapters = optree.tree_map(lambda x: x + mesh.get_rank(), (model.shard(mesh, sf.ddp("island")), adapters))
    path = Path(root) / "x"
    calls = (lambda: interop.save_pretrained(path, model, params), lambda: lora.save_pretrained(path, model, adapters))
    return [refused(call) for call in calls]


@pytest.mark.world(2)
def test_pretrained_files_of_replicas_that_differ_are_an_error(world: World, tmp_path: Path) -> None:
    for said in world.run(saved_by_interop, str(tmp_path)):
        assert all("have other numbers on some ranks" in text and "0." in text for text in said), said
    assert list(tmp_path.iterdir()) == []
