"""Behaviors that DeepSpeed's tests check: ZeRO's stages beside one process, offload, loss scales, configurations."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import checkpoint, interop
from shardfn.testing import world
from shardfn.translate import translate
from tests.models import DATA, distance
from tests.peers.modules import Scaled, Tied, Unused, filled, frozen, mapped, nested, residuals, rows, setting, uneven
from tests.peers.training import Optimizers, trained

# --- ZeRO's stages, beside one process ---


def zero(stage: str) -> sf.Placement:
    return sf.strategies.from_name(stage, shard="shard", replica="replica")


NESTEROV: Optimizers = (so.sgd(0.1, momentum=0.9, nesterov=True),
                    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True))  # fmt: skip
STAGES = ("zero:0", "zero:1", "zero:2", "zero:3")
PARTITIONED: dict[str, dict[str, Any]] = {
    **{f"stage {name[-1]}": {"strategy": zero(name)} for name in STAGES},
    **{f"stage {name[-1]}, clipped": {"strategy": zero(name), "optimizers": NESTEROV, "limit": (0.1, 2.0)}
       for name in STAGES},
    **{f"stage {name[-1]}, unused parameters": {"strategy": zero(name), "build": Unused} for name in STAGES},
    **{f"stage {name[-1]}, frozen parameters": {"strategy": zero(name), "build": frozen} for name in STAGES[1:]},
    "stage 3, shapes that do not divide": {"strategy": zero("zero:3"), "build": uneven},
    "stage 3, an external parameter": {"strategy": zero("zero:3"), "build": Tied, "unstaged": [r"embed\.weight"]},
    "stage 3, a scalar": {"strategy": zero("zero:3"), "build": Scaled},
    "stage 3, small parameters persist": {"strategy": sf.strategies.replicate_small(zero("zero:3"), below=100)},
    "stage 3, a leaf module": {"strategy": zero("zero:3"), "build": nested, "stages": "0"},
    "stage 3, activation checkpoints": {"strategy": zero("zero:3"), "remat": True},
    "hpZ": {"strategy": sf.strategies.hpz(shard="shard", replica="replica")},
    "MiCS": {"strategy": sf.strategies.mics("shard", replica="replica")},
    "MiCS, gathered in turn": {"strategy": sf.strategies.mics(("shard", "replica"))},
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PARTITIONED)
def test_a_stage_of_zero_trains_as_one_process(name: str) -> None:
    world(4, "threads").run(trained, **PARTITIONED[name])


# --- loss scales ---


def scales_of_deepspeed(overflows: str, scale: float, window: int) -> tuple[list[float], int]:
    """The dynamic scaler with a hysteresis of 1: the scale after each step, and the number of skipped ones."""
    found, good = [], 0
    for step in overflows:
        good = 0 if step == "x" else good + 1
        if step == "x":
            scale /= 2
        elif good == window:
            scale, good = scale * 2, 0
        found.append(scale)
    return found, overflows.count("x")


SCALES: dict[str, tuple[str, float, int]] = {  # steps, of which x overflow; the first scale; the window
    "it grows after a window": ("......", 4.0, 2),
    "it shrinks at an overflow": ("x", 4.0, 2),
    "it shrinks again and again": ("xxxx", 256.0, 2),
    "an overflow begins a new window": (".x..x...", 16.0, 2),
    "a window of one": (".x.x..", 8.0, 1),
    "a long window": ("....x" * 2, 8.0, 5),
}


def scaled(overflows: str, scale: float, window: int) -> tuple[list[float], int, float]:
    """The scales, the number of skipped steps, and how far parameters are from those without a scale."""
    mesh, _ = setting()
    whole = {"a": {"w": torch.ones(3, 2).double()}}
    ps = sf.shard(whole, mesh, sf.full_shard(DATA))
    optimizer, plain = so.dynamic_loss_scale(so.adam(0.1), scale=scale, growth_interval=window), so.adam(0.1)
    state, other = optimizer.init(ps), {"a": {"w": whole["a"]["w"].clone()}}
    others, found = plain.init(other), []
    for step, kind in enumerate(overflows):
        slope = torch.full((3, 2), math.sin(step + 1)).double()
        bad = torch.where(torch.arange(6).view(3, 2) == 4, math.inf, slope) if kind == "x" else slope
        ps, state = optimizer.step(ps, sf.shard({"a": {"w": bad * state["scale"]}}, mesh, sf.full_shard(DATA)), state)
        if kind != "x":
            other, others = plain.step(other, {"a": {"w": slope}}, others)
        found.append(state["scale"])
    return found, state["skipped"], distance(sf.unshard(ps), other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCALES)
def test_a_loss_scale_moves_as_deepspeeds(name: str) -> None:
    scales, skipped = scales_of_deepspeed(*SCALES[name])
    for found, count, off in world(4, "threads").run(scaled, *SCALES[name]):
        assert (found, count) == (scales, skipped)
        assert off < 1e-12


# --- configurations ---

CONFIGS: dict[str, tuple[dict[str, Any], list[str], bool]] = {  # what is in the program, and whether it is complete
    "stage 1": ({"zero_optimization": {"stage": 1}}, ["sf.strategies.zero1("], True),
    "stage 2": ({"zero_optimization": {"stage": 2}}, ["sf.zero2("], True),
    "stage 3": ({"zero_optimization": {"stage": 3}}, ["sf.full_shard("], True),
    "offload to disk": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
                               "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}}},
        ['params="disk"', 'state="disk"'], True,
    ),
    "offloaded optimizer": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, ['state="host"'], True
    ),
    "clipping": ({"gradient_clipping": 0.5}, ["so.clip_by_global_norm(0.5)"], True),
    "a dynamic scale, which has a least value there": (
        {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 7, "hysteresis": 1}},
        ["so.dynamic_loss_scale(", "scale=4096.0", "growth_interval=7"], False,
    ),
    "bfloat16": ({"bf16": {"enabled": True}}, ["gather_dtype=torch.bfloat16"], True),
    "AdamW": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.9], "weight_decay": 0.1}}},
        ["so.adamw(", "b1=0.8", "b2=0.9", "weight_decay=0.1"], True,
    ),
    "a key that nobody knows": ({"zero_optimization": {"stage": 3, "no_such_key": 1}}, [], False),
    "one-bit Adam": ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, [], False),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_becomes_these_lines(name: str, tmp_path: Path) -> None:
    given, lines, complete = CONFIGS[name]
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1} | given))
    found = translate(file)
    assert found.complete is complete, found.rows
    assert all(line in found.program for line in lines), found.program
    compile(found.program, name, "exec")


# --- behaviors that are more than a step ---


def adam(strategy: Any, folder: Path | None = None, steps: int = 3) -> Any:
    """A model, its parameters and state after some steps of Adam, and those of one process."""
    mesh = sf.make_mesh(device="cpu", replica=1, shard=-1, scratch=folder)
    module, mine = filled(residuals()), lambda x: x.chunk(mesh.size())[mesh.get_rank()]
    plain = copy.deepcopy(module)
    model, optimizer = interop.functional(module, min_stage_params=8), so.adam(0.05)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.05)
    params = model.shard(mesh, strategy)
    state = optimizer.init(params)
    slope = mapped(sf.grad(lambda ps, x: sf.psum(model(ps, x).square().sum(), DATA) / 96), mesh, out=...)
    for number in range(steps):
        params, state = optimizer.step(params, slope(params, mine(rows(number))), state)
        theirs.zero_grad()
        (plain(rows(number)).square().sum() / 96).backward()
        theirs.step()
    return model, params, state, plain, theirs


def offloaded_training_is_bit_for_bit_the_same(folder: Path) -> None:
    model, params, *_ = adam(sf.full_shard("shard"), folder)
    want = model.state_dict(params)
    both: dict[str, Any] = {"grads": "disk", "state": "disk"}
    host: dict[str, Any] = {"params": "host", "state": "host"}
    for tiers in (both, {"state": "disk"}, {"params": "disk"}, both | {"params": "disk"}, host):
        model, params, *_ = adam(sf.full_shard("shard").with_tiers(**tiers), folder)
        got = model.state_dict(params)
        assert all(torch.equal(got[name], x) for name, x in want.items()), tiers


def whole_parameters_gradients_and_moments_can_be_read(folder: Path) -> None:
    model, params, state, plain, theirs = adam(sf.full_shard("shard"))
    assert distance(model.state_dict(params), {n: p.detach() for n, p in plain.named_parameters()}) < 1e-12
    for ours, name in (("mean", "exp_avg"), ("square", "exp_avg_sq")):
        want = {n: theirs.state[p][name] for n, p in plain.named_parameters()}
        assert distance(model.state_dict(state[ours]), want) < 1e-12


def gathered_parameters_are_changed_and_cut_again(folder: Path) -> None:
    model, params, *_ = adam(sf.full_shard("shard"), steps=0)
    layer = sf.unshard(params["1"])
    layer["up.bias"].fill_(3)
    mesh = sf.make_mesh(device="cpu", shard=-1)
    new = params | {"1": sf.shard({"1": layer}, mesh, sf.full_shard("shard"))["1"]}
    want = model.state_dict(params)
    want["1.up.bias"].fill_(3)
    assert distance(model.state_dict(new), want) == 0


def a_checkpoint_is_universal(folder: Path) -> None:
    """Of stage 3, it continues with stages 0 to 3."""
    model, params, state, *_ = adam(sf.full_shard("shard"))
    checkpoint.save(folder / "one", {"model": params, "optim": state})
    for stage in STAGES:
        other, like, moments, *_ = adam(zero(stage), steps=0)
        now = checkpoint.load(folder / "one", {"model": like, "optim": moments})
        assert distance(other.state_dict(now["model"]), model.state_dict(params)) == 0, stage
        assert distance(other.state_dict(now["optim"]["mean"]), model.state_dict(state["mean"])) == 0, stage
        assert now["optim"]["step"] == 3


def master_weights_follow_float32(folder: Path) -> None:
    """Parameters in 16 bits are the rounded ones of a run in float32."""
    mesh = sf.make_mesh(device="cpu", shard=-1)
    for dtype in (torch.bfloat16, torch.float16):
        start = {"a": {"w": torch.linspace(-1, 1, 24).view(6, 4).to(dtype)}}
        ps, optimizer, plain = (
            sf.shard(start, mesh, sf.full_shard("shard")),
            so.fp32_master_weights(so.adam(0.01)),
            so.adam(0.01),
        )
        single = optree.tree_map(torch.Tensor.float, start)
        state, other = optimizer.init(ps), plain.init(single)
        for number in range(5):
            slope = {"a": {"w": torch.sin(torch.arange(24.0) + number).view(6, 4).to(dtype)}}
            ps, state = optimizer.step(ps, sf.shard(slope, mesh, sf.full_shard("shard")), state)
            single, other = plain.step(single, optree.tree_map(torch.Tensor.float, slope), other)
        assert torch.equal(sf.unshard(ps)["a"]["w"], single["a"]["w"].to(dtype))


def a_rank_holds_what_its_stage_leaves(folder: Path) -> None:
    """Elements of parameters and of a moment, up to padding."""
    size = dist.get_world_size()
    for stage, own, moments in (("zero:0", 1, 1), ("zero:1", 1, size), ("zero:2", 1, size), ("zero:3", size, size)):
        _, params, state, plain, _ = adam(zero(stage), steps=0)
        total, slack = sum(p.numel() for p in plain.parameters()), 64 * 3
        for tree, parts in ((params, own), (state["mean"], moments)):
            held = sum(x.numel() for x in optree.tree_leaves(tree))
            assert total / parts <= held <= (total + slack) / parts + slack, (stage, held)


def a_batch_is_that_of_all_ranks_and_micro_batches(folder: Path) -> None:
    mesh = sf.make_mesh(device="cpu", replica=1, shard=-1)
    module = filled(residuals())
    plain, model = copy.deepcopy(module), interop.functional(module, min_stage_params=8)
    params, mine = model.shard(mesh, sf.full_shard("shard")), rows().chunk(mesh.size())[mesh.get_rank()]

    def loss(ps: Any, x: Tensor) -> Tensor:
        return sf.psum(model(ps, x).square().sum(), DATA) / 96

    plain(rows()).square().mean().backward()
    for micro in (1, 2, 4):
        got = mapped(lambda ps, x, micro=micro: sf.accumulate(loss, x, micro=micro)(ps), mesh)(params, mine)
        assert distance(model.state_dict(got[1]), {n: p.grad for n, p in plain.named_parameters()}) < 1e-12


BEHAVIORS = [
    whole_parameters_gradients_and_moments_can_be_read, master_weights_follow_float32,
    offloaded_training_is_bit_for_bit_the_same, a_checkpoint_is_universal,
    gathered_parameters_are_changed_and_cut_again, a_rank_holds_what_its_stage_leaves,
    a_batch_is_that_of_all_ranks_and_micro_batches,
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda f: f.__name__)
def test_behavior_of_deepspeed(behavior: Callable[[Path], None], tmp_path: Path) -> None:
    world(2).run(behavior, tmp_path)
