"""`sf.debug(nan=True)` names the first stage that makes what is not finite, on all ranks."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.testing import World
from tests.refusals import told


def messages() -> list[str]:
    """Of a model whose numbers go wrong in different places, on one rank."""
    size = dist.get_world_size()
    mesh = sf.make_mesh(device="cpu", shard=size)
    params = {name: {"w": torch.full((3, 3), 0.5), "b": torch.zeros(3)} for name in ("one", "two", "three")}

    @sf.stage
    def layer(p: Any, x: Tensor, scale: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"] + p["b"]) / scale

    remat = sf.stage(lambda p, x, scale: torch.tanh(x @ p["w"] + p["b"]) / scale, remat=True)

    def run(where: str, stage: Any = layer, strategy: Any = None, backward: bool = True) -> str:
        sharded = sf.shard(params, mesh, strategy or sf.full_shard("shard"))
        if where == "parameters":
            sharded["two"] = sf.shard({"two": {"w": torch.full((3, 3), torch.nan), "b": torch.zeros(3)}}, mesh,
                                      sf.full_shard("shard"))["two"]  # fmt: skip
        mine = dist.get_rank() == size - 1
        wrong, good = torch.tensor(0.0 if mine else 1.0), torch.tensor(1.0)

        def loss(p: Any, rows: Tensor) -> Tensor:
            x = stage(p["one"], rows, good)
            if where == "between" and mine:
                x = x * torch.nan
            x = stage(p["two"], x, wrong if where == "forward" else good)
            x = stage(p["three"], x, good)
            if where == "backward" and mine:
                x = torch.where(x > 100, x, (x - x.detach()).sqrt())
            return sf.psum(x.sum(), "shard")

        @sf.shard_map(mesh=mesh, in_specs=(..., ...), out_specs=...)
        def step(p: Any, rows: Tensor) -> Any:
            return sf.grad(loss)(p, rows) if backward else loss(p, rows)

        with sf.debug(nan=True):
            return told(lambda: step(sharded, torch.ones(2, 3)))

    return [
        run("nowhere"), run("forward"), run("between"), run("parameters"), run("backward"),
        run("forward", remat), run("forward", strategy=sf.ddp("shard")), run("forward", backward=False),
        run("backward", remat), run("nowhere", remat),
    ]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 4], indirect=True)
def test_the_stage_the_rank_and_the_direction_are_named(world: World) -> None:
    every = world.run(messages)
    assert every == [every[0]] * world.size
    found, rank = every[0], world.size - 1
    assert found[0] == found[9] == "it was done"
    made = "the forward made inf in float32[2, 3], of finite inputs and parameters"
    assert found[1] == f"FloatingPointError: stage layer ('two'), on rank {rank}: {made}"
    assert "stage layer ('two')" in found[2]
    assert "of inputs that were not finite (nan in float32[2, 3])" in found[2]
    assert "stage layer ('two'), on rank 0" in found[3]
    assert "of parameters that were not finite before it ran: two.w: the last update made them" in found[3]
    assert f"stage layer ('three'), on rank {rank}: the backward made gradients of three.b, three.w" in found[4]
    assert "a gradient that was not finite when it came in" in found[4]
    assert found[5].endswith(f"('two'), on rank {rank}: {made}")
    assert found[6] == found[7] == found[1]
    assert "the backward made gradients of three.b, three.w" in found[8]


def exchanges() -> list[int]:
    mesh = sf.make_mesh(device="cpu", shard=2)
    params = sf.shard({"a": torch.ones(4)}, mesh, sf.full_shard("shard"))
    stage = sf.stage(lambda p, x: (p * x).sum())
    loss = sf.grad(lambda p: stage(p["a"], torch.ones(4)) / 2)
    grads = sf.shard_map(loss, mesh=mesh, in_specs=(...,), out_specs=...)
    grads(params)
    calls: list[int] = []
    nonfinite: Any = importlib.import_module("shardfn.stages.nonfinite")
    before = nonfinite.gathered

    def counting(*args: Any) -> Any:
        calls.append(1)
        return before(*args)

    nonfinite.gathered = counting
    try:
        grads(params)
        off = len(calls)
        with sf.debug(nan=True):
            grads(params)
    finally:
        nonfinite.gathered = before
    return [off, len(calls)]


@pytest.mark.world(2)
def test_it_costs_nothing_while_it_is_off(world: World) -> None:
    assert world.run(exchanges) == [[0, 2]] * 2
