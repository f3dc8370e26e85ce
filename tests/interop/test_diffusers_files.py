"""Models of diffusers are written under its names of files, with its configuration. The package is not needed."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import shardfn as sf
from shardfn import interop
from shardfn.testing import World


class ModelMixin(nn.Module):
    """In place of the class of this name in diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def save_config(self, folder: str) -> None:
        Path(folder, "config.json").write_text(json.dumps({"_class_name": "Net"}))


def written(folder: Path) -> Any:
    package: Any = types.ModuleType("diffusers.models.modeling_utils")
    package.ModelMixin = ModelMixin
    sys.modules[package.__name__] = package
    try:
        torch.manual_seed(0)
        net, mesh, found = ModelMixin(), sf.make_mesh(data=-1, device="cpu"), []
        whole = {name: x.clone() for name, x in net.state_dict().items()}
        model = interop.functional(net, min_stage_params=16)
        params = model.shard(mesh, sf.full_shard("data"))
        for most in (2**30, 400):
            interop.save_pretrained(folder, model, params, max_shard_bytes=most)
            dist.barrier()
            files = sorted(path.name for path in folder.iterdir())
            tensors: dict[str, torch.Tensor] = {}
            for file in files:
                tensors |= safetensors.torch.load_file(folder / file) if file.endswith(".safetensors") else {}
            read = model.state_dict(interop.load(folder, model, mesh, sf.full_shard("data")))
            same = all(whole[name].equal(x) and read[name].equal(x) for name, x in tensors.items())
            found.append((files, same and tensors.keys() == whole.keys()))
            dist.barrier()
        return found
    finally:
        del sys.modules[package.__name__]


@pytest.mark.world(2)
def test_names_of_files_and_the_configuration(world: World, tmp_path: Path) -> None:
    name = "diffusion_pytorch_model"
    several = [f"{name}-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    for one, many in world.run(written, tmp_path):
        assert one == (["config.json", f"{name}.safetensors"], True)
        assert many == (["config.json", *several, f"{name}.safetensors.index.json"], True)
