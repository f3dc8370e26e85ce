"""A URL where a path belongs is an error at once, on every rank, and makes no folder called `s3:`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardfn as sf
from shardfn import checkpoint, interop, lora
from shardfn.cli import main
from shardfn.local_paths import local_path
from shardfn.plan.machines import Chip, Links
from shardfn.plan.plan import StepPlan
from shardfn.testing import World
from tests.models import mesh_of
from tests.refusals import told

URLS = ("s3://bucket/x", "memory://x", "gs://b/x", "hf://user/x", "file:///data/x", "simplecache::s3://b/x")


def everywhere(folder: str, url: Any) -> dict[str, str]:
    os.chdir(folder)
    mesh = mesh_of(shard=2)
    strategy = sf.full_shard("shard")
    model = interop.functional(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), min_stage_params=1)
    params, adapters = model.shard(mesh, strategy), sf.shard(lora.init(model, ".*0", 2), mesh, strategy)

    def step(state: Any, batch: Any) -> Any:
        return state, {"loss": 0.0}

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpoint.save(url, params),
        "save_async": lambda: checkpoint.save_async(url, params),
        "load": lambda: checkpoint.load(url, params),
        "latest": lambda: checkpoint.latest(url),
        "verify": lambda: checkpoint.verify(url),
        "export": lambda: checkpoint.export_hf(url, params),
        "import_": lambda: checkpoint.import_hf(url, params),
        "load_torch_optimizer": lambda: checkpoint.load_torch_optimizer(url, sf.optim.adamw(1e-3).init(params)),
        "save_pretrained": lambda: interop.save_pretrained(url, model, params),
        "interop.load": lambda: interop.load(url, model, mesh, strategy),
        "lora.save": lambda: lora.save_pretrained(url, model, adapters),
        "lora.load": lambda: lora.load(url, model, mesh, strategy),
        "loop": lambda: sf.run.loop(step, params, lambda start: range(9), steps=2, save=url, report=[]),
        "jsonl": lambda: sf.run.jsonl(url),
        "tensorboard": lambda: sf.run.tensorboard(url),
        "write_tokens": lambda: sf.run.write_tokens(url, [[1, 2]], dtype="uint16"),
        "TokenFile": lambda: sf.run.TokenFile(url),
        "scratch": lambda: sf.make_mesh(shard=-1, device="cpu", scratch=url),
        "Chip": lambda: Chip.load(url),
        "Links": lambda: Links.load(url),
        "Plan": lambda: StepPlan.load(url),
    }
    return {name: told(call) for name, call in calls.items()} | {"left": str(os.listdir("."))}


@pytest.mark.world(2)
@pytest.mark.parametrize("url", [URLS[0], Path(URLS[0])], ids=["text", "path"])
def test_url_is_refused_wherever_a_path_is_given(url: Any, world: World, tmp_path: Path) -> None:
    for found in world.run(everywhere, str(tmp_path), url):
        assert found.pop("left") == "[]"
        for name, text in found.items():
            assert "must be a local path, got 's3:/" in text, (name, text)


@pytest.mark.parametrize("url", URLS)
def test_local_path_refuses_urls_of_any_scheme(url: str) -> None:
    with pytest.raises(ValueError, match=r"^save: path must be a local path, got '.*'\. Copy the files"):
        local_path(url, "save: path")


@pytest.mark.parametrize("path", ["runs/1", "/data/x", "a:b", "./s3:/x", "~/x", "C:/x", "step-1", Path("x")])
def test_local_path_keeps_paths(path: str | Path) -> None:
    assert local_path(path, "save: path") == Path(path)


@pytest.mark.parametrize(
    "command",
    [
        ["checkpoint", "inspect", URLS[0]],
        ["checkpoint", "consolidate", URLS[0], "x.pt"],
        ["translate", URLS[0]],
        ["plan", URLS[0], "--mesh", "data=2"],
        ["plan", "--model", "gpt2", "--mesh", "data=2", "--json", URLS[0]],
    ],
    ids=" ".join,
)
def test_command_line_refuses_urls(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert "must be a local path, got 's3://bucket/x'" in capsys.readouterr().err
