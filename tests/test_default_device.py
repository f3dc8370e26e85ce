"""`torch.set_default_device` may be anything: what the library makes is where it says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import world
from tests.models import layer as block
from tests.optimizers import optimizers_named

WIDTH = 6
OPTIMIZERS = {
    "adamw": lambda: so.chain(so.clip_by_global_norm(0.1), so.adamw(1e-2)),
    **optimizers_named("adamw8bit, muon, soap, adafactor"),
}


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> Tensor:
        g = torch.Generator().manual_seed(row)
        return torch.randn(WIDTH, generator=g, dtype=torch.float64, device="cpu")


def trained(default: str, name: str, tiers: dict[str, Any], folder: str) -> list[Tensor]:
    """What is trained in two runs of a loop, the second of which resumes from the first's checkpoint."""
    with torch.device(default) if default else contextlib.nullcontext():
        mesh = sf.make_mesh(device="cpu", shard=2, scratch=folder)
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64, device="cpu") / 2

        whole = {"blocks": [{"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)} for _ in range(2)]}
        params = sf.shard(whole, mesh, sf.full_shard("shard").with_tiers(**tiers))
        layer, opt = sf.stage(block), OPTIMIZERS[name]()

        def loss(params: Any, x: Tensor) -> Tensor:
            for p in sf.layers(params["blocks"]):
                x = layer(p, x)
            return sf.pmean(x.square().mean(), "shard")

        run = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=...)

        def step(state: Any, rows: Any) -> Any:
            value, grads = run(state["params"], rows)
            params, moments = opt.step(state["params"], grads, state["moments"])
            return {"params": params, "moments": moments}, {"loss": value}

        state = {"params": params, "moments": opt.init(params)}
        for steps in (2, 4):
            batches = sf.run.batches(Rows(), mesh, "shard", 8, 0)
            state, _ = sf.run.loop(step, state, batches, steps=steps, save=f"{folder}/run", save_every=2)
        read = sf.checkpoint.load(f"{folder}/run/step-00000004", state, part="state")
        whole = sf.unshard(read["params"])
    return [x.cpu() for block in whole["blocks"] for x in block.values()]


@pytest.mark.parametrize("tiers", [{}, {"params": "disk", "grads": "disk", "state": "disk"}], ids=["memory", "disk"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_default_device_changes_nothing(tmp_path: Path, name: str, tiers: dict[str, Any]) -> None:
    found = []
    for default in ("", "meta"):
        (tmp_path / default).mkdir(exist_ok=True)
        found.append(world(2).run(trained, default, name, tiers, str(tmp_path / f"with {default}"))[0])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
