"""A script's optimizer, data and scaler beside its calls of FSDP are read, with torch's defaults."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfn.translate import Translation, translate
from shardfn.translate import fsdp as of_fsdp

HEAD = "import torch\nfrom torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy\n"


def translated(folder: Path, text: str) -> tuple[Translation, dict[str, str]]:
    file = folder / "train.py"
    file.write_text(f"{HEAD}{text}\n")
    found = translate(file)
    return found, {row.key: row.status for row in found.rows}


LINES = {
    "torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)": (
        "so.adamw(0.0003, b1=0.9, b2=0.95, eps=1e-08, weight_decay=0.01)"
    ),
    "torch.optim.AdamW(model.parameters())": "so.adamw(0.001, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.01)",
    "optim.Adam(params, 2e-4, amsgrad=False)": "so.adam(0.0002, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0)",
    "torch.optim.SGD(p, lr=0.1, momentum=0.9)": "so.sgd(0.1, momentum=0.9, weight_decay=0.0, nesterov=False)",
    "torch.optim.NAdam(p, foreach=True)": "so.from_torch(torch.optim.NAdam, lr=0.002)",
}


@pytest.mark.parametrize("call", LINES)
def test_an_optimizer_of_torch_is_read(call: str, tmp_path: Path) -> None:
    found, statuses = translated(tmp_path, f"fully_shard(model)\noptimizer = {call}")
    assert f"optimizer = {LINES[call]}" in found.program
    assert found.complete, statuses


def defaults(name: str) -> dict[str, Any]:
    return {key: x.default for key, x in inspect.signature(getattr(torch.optim, name)).parameters.items()}


@pytest.mark.parametrize("name", of_fsdp.OPTIMIZERS)
def test_defaults_are_those_of_torch(name: str) -> None:
    for key, value in of_fsdp.OPTIMIZERS[name].defaults.items():
        assert defaults(name)[key] == value


def test_the_data_are_yours_and_say_which_argument_to_write(tmp_path: Path) -> None:
    text = (
        "fully_shard(model)\nsampler = DistributedSampler(data, shuffle=True, seed=1)\n"
        "batches = DataLoader(data, batch_size=8, sampler=sampler, num_workers=4, collate_fn=f, pin_memory=True)"
    )
    found, statuses = translated(tmp_path, text)
    assert found.complete, statuses
    texts = {row.key: row.text for row in found.rows}
    for key, argument in {"batch_size": "batch=", "num_workers": "workers=", "collate_fn": "collate="}.items():
        assert texts[f"DataLoader.{key}"].startswith(f"{argument} of sf.run.batches")


def test_every_argument_of_a_loader_and_a_scaler_has_a_meaning() -> None:
    loaders = torch.utils.data.DataLoader, torch.utils.data.distributed.DistributedSampler
    for kind in loaders:
        assert set(inspect.signature(kind).parameters) <= set(of_fsdp._LOADER)
    assert set(inspect.signature(torch.amp.GradScaler).parameters) <= set(of_fsdp._SCALER)


def test_a_scaler_scales_unless_it_is_off(tmp_path: Path) -> None:
    text = "fully_shard(model)\nscaler = torch.amp.GradScaler({})"
    found, statuses = translated(tmp_path, text.format("'cuda', growth_interval=100"))
    assert "so.dynamic_loss_scale(optimizer, growth_interval=100)" in found.program
    assert statuses["GradScaler"] == "becomes"
    assert "dynamic_loss_scale" not in translated(tmp_path, text.format("enabled=False"))[0].program


def test_groups_of_an_optimizer_are_open_and_a_second_one_is_missing(tmp_path: Path) -> None:
    text = (
        "fully_shard(model)\na = torch.optim.AdamW([{'params': x}, {'params': y, 'lr': 1e-3}], lr=1e-4)\n"
        "b = torch.optim.SGD(z, lr=0.1)"
    )
    found, statuses = translated(tmp_path, text)
    assert (statuses["AdamW.params"], statuses["SGD"]) == ("open", "missing")
    assert "so.adamw(0.0001" in found.program


def test_policies_that_are_written_out_twice_are_alike(tmp_path: Path) -> None:
    policy = "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
    found, _ = translated(
        tmp_path, f"for layer in layers:\n    fully_shard(layer, {policy})\nfully_shard(model, {policy})"
    )
    assert "gather_dtype=torch.bfloat16" in found.program
