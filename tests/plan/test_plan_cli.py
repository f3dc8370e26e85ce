"""`shardfn plan` on steps, configurations and known models; and lists of what fits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardfn.plan.plan import StepPlan
from shardfn.shapes.extrapolating import extrapolated, figures
from shardfn.shapes.searching import search, ways
from shardfn.shapes.settings import Setting, plan_shape
from shardfn.shapes.sizes import SHAPES, Shape
from shardfn.testing import world

SMALL = Shape("small", 1000, 256, 12, 4, 2, 512, 256, 64)
SETTINGS = [
    Setting({"shard": 8}),
    Setting({"replica": 4, "shard": 8}, strategy="hybrid_shard", remat="on", batch=2),
    Setting({"shard": 16}, strategy="zero1", batch=4, micro=2),
    Setting({"shard": 8, "tensor": 2}, batch=2),
    Setting({"shard": 8}, remat="on", tiers={"params": "host", "state": "host", "grads": "host"}),
]
OWN = """
import torch
import shardfn as sf
import shardfn.optim as so


def planned(mesh):
    params = sf.shard({"w": torch.empty(64, 64)}, mesh, sf.full_shard("shard"))
    optimizer = so.adamw(1e-3)
    layer = sf.stage(lambda p, x: x @ p["w"])

    def step(params, state, x):
        value, grads = sf.value_and_grad(lambda p: layer(p, x).sum())(params)
        return value, *optimizer.step(params, grads, state)

    return step, params, optimizer.init(params), torch.empty(4, 64)


def nothing(mesh):
    return None
"""


def ran(*arguments: str, cwd: Path, status: int = 0) -> str:
    done = subprocess.run(
        (sys.executable, "-m", "shardfn", "plan", *arguments), cwd=cwd, check=False, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert not done.stderr.count("Traceback")
    return done.stdout if status < 2 else done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt-124m", 124_439_808), ("gpt-1.5b", 1_557_611_200), ("llama-1b", 1_235_814_400),
        ("llama-7b", 6_738_415_616), ("llama-8b", 8_030_261_248), ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800), ("mixtral-8x7b", 46_702_792_704),
    ],
)  # fmt: skip
def test_known_models_have_as_many_parameters_as_those_that_were_published(name: str, count: int) -> None:
    assert SHAPES[name].parameters == count


def parameters_planned() -> list[tuple[int, int]]:
    found = []
    for name, width in (("gpt-124m", 64), ("llama-1b", 64), ("llama-8b", 64), ("mixtral-8x7b", 64)):
        known = SHAPES[name]
        small = replace(known, vocabulary=96, width=width, layers=2, heads=4, groups=2, head=16, hidden=96, context=32)
        small = replace(small, groups=4) if small.gpt else small
        found.append((plan_shape(small, Setting({"shard": 2})).parameters, small.parameters))
    return found


def test_what_is_planned_has_the_parameters_of_the_shape() -> None:
    (found,) = world(1, "alone").run(parameters_planned)
    assert all(planned == said for planned, said in found)


def both_ways(setting: Setting) -> tuple[Any, Any]:
    plan = plan_shape(SMALL, setting)
    return figures(plan, plan.timed("h100", "h100")), extrapolated(SMALL, setting, "h100", "h100")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_figures_of_a_deep_model_follow_from_shallow_ones(setting: Setting) -> None:
    ((whole, from_shallow),) = world(1, "alone").run(both_ways, setting)
    assert from_shallow.peak == whole.peak
    assert (from_shallow.sent, from_shallow.host) == (whole.sent, whole.host)
    assert from_shallow.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert from_shallow.exposed == pytest.approx(whole.exposed, rel=1e-2, abs=1e-6)


def test_ways_use_all_ranks_and_nodes_first() -> None:
    for name, ranks in (("llama-8b", 8), ("llama-70b", 512), ("llama-405b", 4096)):
        found = list(ways(SHAPES[name], ranks, 8))
        for _, mesh in found:
            assert Setting(mesh).ranks == ranks
        assert len({(strategy, *mesh.items()) for strategy, mesh in found}) == len(found)
        assert ("hybrid_shard", {"replica": ranks // 8, "shard": 8}) in found or ranks == 8


def found_for(memory: str) -> list[tuple[str, bool, float]]:
    shape = replace(SMALL, layers=2)
    base = Setting({"shard": 2}, sequence=64)
    return [
        (str(each.setting), each.fits, each.cost)
        for each in search(shape, 2, memory, base, "h100", "h100", reserve=0, batches=(1, 2))
    ]


def test_what_fits_is_listed_cheapest_first_and_else_what_is_nearest() -> None:
    (many,) = world(1, "alone").run(found_for, "80GiB")
    assert all(fits for _, fits, _ in many)
    costs = [cost for *_, cost in many]
    assert costs == sorted(costs)
    assert {name.split(" on ")[0] for name, *_ in many} == {"ddp", "zero1", "shard_grad_op", "full_shard"}
    (few,) = world(1, "alone").run(found_for, "1MiB")
    assert not any(fits for _, fits, _ in few)
    assert any("params on host" in name for name, *_ in few)


def test_a_known_model_is_planned_with_its_views(tmp_path: Path) -> None:
    out = ran(
        "--model", "gpt-124m", "--mesh", "replica=2,shard=8", "--strategy", "hsdp", "--remat", "on",
        "--sequence", "128", "--fit", "80GiB", "--json", "p.json", "--picture", "p.svg", "--trace", "t.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert "124,439,808 parameters on all ranks" in out
    assert "tokens/s a rank" in out
    assert "it fits: " in out
    assert StepPlan.load(tmp_path / "p.json").mesh == {"replica": 2, "shard": 8}
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert json.loads((tmp_path / "t.json").read_text())
    out = ran("--model", "gpt-124m", "--mesh", "shard=8", "--sequence", "128", "--fit", "1GiB", cwd=tmp_path, status=1)
    assert "it does not fit: " in out
    assert "1.074 GB (1 GiB)" in out  # the one size that was given in the other unit


def test_the_sizes_of_a_list_are_in_one_unit(tmp_path: Path) -> None:
    small = ("--model", "gpt-124m", "--ranks", "2", "--sequence", "64")
    out = ran(*small, "--fit", "16GiB", cwd=tmp_path)
    assert "fit into 17.2 GB, of which 2.1 GB are left free; on h100, h100" in out
    assert "GiB" not in out
    out = ran(*small, "--fit", "10MiB", "--reserve", "1MiB", cwd=tmp_path, status=1)
    assert "fits into 10.5 MB, of which 1.0 MB are left free; nearest: " in out


def test_a_step_of_ones_own_is_planned(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    out = ran("mine:planned", "--mesh", "shard=4", "--json", "plan.json", "--schedule", cwd=tmp_path)
    assert "4,096 parameters on all ranks" in out
    plan = StepPlan.load(tmp_path / "plan.json")
    assert plan.count(kind="all_gather") >= 1
    cells = [line.split() for line in out.splitlines()]
    assert [[*row[:1], row[6]] for row in cells[: len(plan.works) + 3] if row[:1] and row[0].isdigit()] == [
        [str(number), work.kind] for number, work in enumerate(plan.works)
    ]
    error = ran("mine:nothing", "--mesh", "shard=4", cwd=tmp_path, status=2)
    assert "mine:nothing returned NoneType; it returns a tuple" in error
    error = ran("mine:absent", "--mesh", "shard=4", cwd=tmp_path, status=2)
    assert "mine has no function 'absent'" in error
    error = ran("mine.py:planned", "--mesh", "shard=4", cwd=tmp_path, status=2)
    assert "write a module, not its file: mine:planned" in error


def test_a_configuration_is_planned(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    out = ran("model", "--mesh", "shard=2", "--remat", "on", cwd=tmp_path)
    wanted = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64) + 2 * 96 * 64 + 64
    assert f"{wanted:,} parameters on all ranks" in out
    (tmp_path / "no.json").write_text("{}")
    assert "has no model_type" in ran("no.json", "--mesh", "shard=2", cwd=tmp_path, status=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pass one of STEP and --model"),
        (("--model", "llama-8b"), "pass one of --mesh AXES"),
        (("--model", "llama-9b", "--mesh", "shard=8"), "there is no model 'llama-9b'; there are gpt-124m"),
        (("--model", "llama-8b", "--mesh", "shard"), "is not a mesh: write axes and sizes"),
        (("--model", "llama-8b", "--mesh", "pipe=8"), "known models are sharded over 'replica' and 'shard'"),
        (("--model", "llama-8b", "--mesh", "shard=8", "--strategy", "best"), "there is no strategy"),
        (("--model", "llama-8b", "--mesh", "shard=8", "--batch", "3", "--micro", "2"), "cannot be split into 2 equal"),
        (("--model", "llama-8b", "--mesh", "shard=8", "--chip", "tpu"), "there is no 'tpu', only a100"),
        (("--model", "llama-8b", "--mesh", "shard=8,tensor=16"), "groups of heads, which tensor=16 does not divide"),
        (("--model", "gpt-124m", "--mesh", "shard=8", "--sequence", "9000"), "has 1024 places"),
        (("x:y", "--ranks", "8"), "pass --model NAME"),
        (
            ("--model", "llama-8b", "--ranks", "8", "--schedule", "--picture", "a.svg"),
            "--picture: of one plan",
        ),
        (("x:y", "--mesh", "shard=2", "--remat", "on"), "--remat: not supported with your own step"),
        (("--model", "gpt-124m", "--mesh", "shard=8", "--fit", "80Gib"), "'80Gib' is not a memory size"),
        (("--model", "gpt-124m", "--mesh", "shard=8", "--fit", "80"), "'80' has no unit: write 80GiB, or 80GB"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardfn.cli import main

    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_adapters_and_a_quantized_base_of_a_configuration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes).save_pretrained(tmp_path / "llama")
    common = ("llama", "--mesh", "shard=2", "--json", "plan.json")
    plans = {}
    for options in ((), ("--lora", "4"), ("--lora", "4", "--base", "int8"), ("--lora", "4", "--base", "nf4")):
        ran(*common, *options, cwd=tmp_path)
        plans[options] = StepPlan.load(tmp_path / "plan.json")
    full, adapters, eight, four = plans.values()
    params = [plan.peak.kinds["parameters"] for plan in (full, adapters, eight, four)]
    assert params[3] < params[2] < params[0] < params[1]  # adapters come on top
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert params[1] - params[2] == pytest.approx(matrices * 3 / 2, rel=0.05)  # a byte for four, on two ranks
    weights = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 128))  # in two layers, of rank 4
    assert adapters.peak.kinds["optimizer"] == pytest.approx(2 * 4 * weights, rel=0.02)
    assert "lora=" in ran(*common, "--base", "nf4", cwd=tmp_path, status=2)
