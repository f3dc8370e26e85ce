"""Checkpoints of shardfn are read by torch's own loaders, and theirs by shardfn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardfn as sf
import shardfn.optim as so
from shardfn import checkpoint
from shardfn.testing import World, world
from tests.models import mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
load, save = state_dict_loader.load, state_dict_saver.save
SHAPES = {"0": {"weight": (16, 8), "bias": (16,)}, "2": {"weight": (5, 16), "bias": (5,)}}


def params(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        layer: {name: torch.randn(shape, generator=g) for name, shape in own.items()} for layer, own in SHAPES.items()
    }


def module(seed: int) -> nn.Module:
    made = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    made.load_state_dict({f"{layer}.{name}": x for layer, own in params(seed).items() for name, x in own.items()})
    return made


def ours(path: str, saving: bool) -> Any:
    """Our state to a checkpoint, or from one, on this world's mesh."""
    mesh = mesh_of(shard=-1)
    placed = sf.shard(params(1 if saving else 0), mesh, sf.full_shard("shard"))
    state = {
        "model": placed,
        "optim": so.adamw(1e-3).init(placed),
        "step": 7 if saving else 0,
        "name": "x" if saving else "",
    }
    if saving:
        checkpoint.save(path, state)
        return None
    state.pop("optim")
    found = checkpoint.load(path, state, ignore=[r"optim\..*"])
    return sf.unshard(found["model"]), found["step"], found["name"]


def theirs(path: str, saving: bool) -> Any:
    """The same by FSDP2 and torch.distributed.checkpoint."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shard",))
    model = module(1 if saving else 0)
    fully_shard(model, mesh=mesh)
    if saving:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-30)
        model(torch.zeros(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        set_model_state_dict(model, module(1).state_dict(), options=_whole())
        weights, moments = get_state_dict(model, optimizer)
        save({"model": weights, "optim": moments, "step": 7, "name": "x"}, checkpoint_id=path)
        return None
    state: dict[str, Any] = {"model": model.state_dict(), "step": 0, "name": ""}
    load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    whole = {name: x.full_tensor() for name, x in model.state_dict().items()}
    nested = {layer: {name: whole[f"{layer}.{name}"] for name in own} for layer, own in SHAPES.items()}
    return nested, state["step"], state["name"]


def _whole() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True)


def as_saved(found: Any) -> bool:
    model, step, name = found
    same = all(torch.equal(model[layer][key], x) for layer, own in params(1).items() for key, x in own.items())
    return same and (step, name) == (7, "x")


@pytest.mark.parametrize(("writers", "readers"), [(3, 2), (2, 2), (2, 4), (1, 2)])
def test_fsdp2_reads_what_shardfn_writes(writers: int, readers: int, tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    world(writers).run(ours, path, True)
    assert all(map(as_saved, world(readers).run(theirs, path, False)))


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (2, 2), (4, 1)])
def test_shardfn_reads_what_fsdp2_writes(writers: int, readers: int, tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    world(writers).run(theirs, path, True)
    assert all(map(as_saved, world(readers).run(ours, path, False)))


@pytest.mark.world(3)
def test_plain_torch_reads_what_shardfn_writes_on_one_process(world: World, tmp_path: Path) -> None:
    path = tmp_path / "one"
    world.run(ours, str(path), True)
    model = module(0)
    state: dict[str, Any] = {"model": model.state_dict(), "step": 0, "name": ""}
    load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state["model"])
    nested = {layer: {name: model.state_dict()[f"{layer}.{name}"] for name in own} for layer, own in SHAPES.items()}
    assert as_saved((nested, state["step"], state["name"]))
    dcp_to_torch_save(path, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert as_saved((found["model"], found["step"], found["name"]))
    assert found["optim"]["mean"]["0"]["weight"].shape == (16, 8)


@pytest.mark.world(2)
def test_what_is_missing_in_a_checkpoint_of_torchs_is_told(world: World, tmp_path: Path) -> None:
    world.run(theirs, str(tmp_path / "one"), True)

    def run() -> str:
        placed = sf.shard({**params(0), "3": {"w": torch.zeros(4)}}, mesh_of(shard=2), sf.full_shard("shard"))
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.load(tmp_path / "one", {"model": placed})
        return str(caught.value)

    for error in world.run(run):
        assert "missing in the checkpoint: model.3.w" in error
        assert "not in the tree: optim.state.0.weight.exp_avg" in error
        (whole,) = re.findall(r"and 14 more \(all of it in (\S+)\)", error)
        assert "optim.state.0.weight.step" in Path(whole).read_text().splitlines()


def test_a_damaged_checkpoint_of_torchs_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save({"x": torch.arange(100.0), "step": 1}, checkpoint_id=path, no_dist=True)
    for name in (".metadata", "__0_0.distcp"):
        content = (path / name).read_bytes()
        for end in range(0, len(content), 50):
            (path / name).write_bytes(content[:end])
            with pytest.raises(checkpoint.CheckpointError):
                checkpoint.load(path, {"x": torch.zeros(100), "step": 0})
        (path / name).write_bytes(content)
    assert checkpoint.load(path, {"x": torch.zeros(100), "step": 0})["x"][99] == 99


def test_a_changed_bit_among_the_elements_of_torchs_is_an_error(tmp_path: Path) -> None:
    """torch.load compares no checksums, though items have them; here of a contiguous and of a transposed tensor."""
    tree: dict[str, Any] = {"w": torch.randn(30, 40), "turned": torch.randn(20, 30).T, "step": 3}
    save(tree, checkpoint_id=tmp_path / "one")
    file = next((tmp_path / "one").glob("*.distcp"))
    content = file.read_bytes()
    places = [content.index(x.numpy().tobytes()[:64]) for x in (tree["w"], tree["turned"].T)]
    for at in (place + step for place in places for step in (0, 1001, 2399)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        like = {"w": torch.zeros(30, 40), "turned": torch.zeros(30, 20), "step": 0}
        with pytest.raises(checkpoint.CheckpointError, match=r"its (own )?checksum does not fit"):
            checkpoint.load(tmp_path / "one", like)
    file.write_bytes(content)
    found = checkpoint.load(tmp_path / "one", {"w": torch.zeros(30, 40), "turned": torch.zeros(30, 20), "step": 0})
    assert found["step"] == 3
    assert all(torch.equal(found[name], tree[name]) for name in ("w", "turned"))
