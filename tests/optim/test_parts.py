"""Plain tensors that specs shard: what needs whole ones refuses them, and all else is as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import shardfn as sf
import shardfn.optim as so
from shardfn import P
from shardfn.testing import world
from tests.models import distance
from tests.reference import worst

WHOLE: dict[str, Callable[[], so.Optimizer]] = {
    "clip_by_global_norm": lambda: so.chain(so.clip_by_global_norm(1.0), so.sgd(0.1)),
    "lamb": lambda: so.lamb(0.1),
    "lamb, pure": lambda: so.lamb(0.1, donate=False),
    "adafactor": lambda: so.adafactor(0.1),
    "muon": lambda: so.masked(so.muon(0.1), ".*w", so.sgd(0.1)),
    "shampoo": lambda: so.shampoo(0.1),
    "soap": lambda: so.soap(0.1),
    "kl_shampoo": lambda: so.kl_shampoo(0.1),
    "finite": lambda: so.skip_nonfinite(so.sgd(0.1)),
    "finite, scaled": lambda: so.dynamic_loss_scale(so.sgd(0.1), scale=1.0),
}
ELEMENTWISE: dict[str, Callable[[], so.Optimizer]] = {
    "sgd": lambda: so.sgd(0.1, momentum=0.9),
    "adamw": lambda: so.adamw(0.1),
    "adamw, pure": lambda: so.adamw(0.1, donate=False),
    "clip_by_value": lambda: so.chain(so.clip_by_value(0.5), so.lion(0.1)),
    "ema": lambda: so.ema(so.adam(0.1), 0.9),
    "multi_steps": lambda: so.multi_steps(so.sgd(0.1), 2),
}
SPECS = {"w": P("shard"), "b": P()}


def whole() -> Any:
    draw = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(8, 4, generator=draw, dtype=torch.float64),
        "b": torch.randn(4, generator=draw, dtype=torch.float64),
    }


def local(tree: Any, specs: Any = None) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    part = {"w": tree["w"].chunk(mesh.size())[mesh.get_rank()].clone(), "b": tree["b"].clone()}
    return part if specs is None else sf.shard(tree, mesh, sf.full_shard("shard"))


def mapped(mesh: Any) -> Callable[..., Any]:
    def loss(p: Any) -> Any:
        return sf.psum((p["w"] - sf.pvary(p["b"], "shard")).sin().sum(), "shard")

    return sf.shard_map(loss, mesh=mesh, in_specs=(SPECS,), out_specs=P())


def trained(name: str, way: str) -> str:
    """The error of two steps, or "" if there is none; and then whether they are those of one process."""
    optimizers = WHOLE | ELEMENTWISE
    mesh, optimizer = sf.make_mesh(shard=-1, device="cpu"), optimizers[name]()
    loss = mapped(mesh)
    params = local(whole())
    try:
        if way == "inside":
            params = inside(mesh, optimizer, params)
        else:
            if way == "made by shard_map":
                place = sf.shard_map(lambda p: p, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS, inputs="global")
                params = place(whole())
            if way == "seen before":
                sf.grad(loss)(local(whole()))
            state = optimizer.init(params)
            for _ in range(2):
                params, state = optimizer.step(params, sf.grad(loss)(params), state)
    except ValueError as error:
        assert distance(params, local(whole())) == 0.0, "parameters have moved"
        return str(error)
    alone, state = whole(), optimizers[name]().init(whole())
    for _ in range(2):
        grads = sf.grad(lambda p: (p["w"] - p["b"]).sin().sum())(alone)
        alone, state = optimizer.step(alone, grads, state)
    assert distance(params, local(alone)) < 1e-13
    return ""


def inside(mesh: Any, optimizer: so.Optimizer, params: Any) -> Any:
    @sf.shard_map(mesh=mesh, in_specs=(SPECS,), out_specs=SPECS)
    def steps(params: Any) -> Any:
        def loss(p: Any) -> Any:
            return sf.psum((p["w"] - sf.pvary(p["b"], "shard")).sin().sum(), "shard")

        state = optimizer.init(params)
        for _ in range(2):
            params, state = optimizer.step(params, sf.grad(loss)(params), state)
        return params

    return steps(params)


WAYS = ["outside", "inside", "made by shard_map", "seen before"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_whole_tensors_refuses_parts(name: str, way: str) -> None:
    for message in world(2).run(trained, name, way):
        assert f"w must be a flat shard or the same on every rank, got this rank's part, by {P('shard')}" in message
        assert "sf.shard(params, mesh, strategy, specs=...)" in message
    assert world(1).run(trained, name, way) == [""]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_steps_on_parts_are_those_of_one_process(name: str, way: str) -> None:
    for ranks in (1, 2, 4):
        assert world(ranks).run(trained, name, way) == [""] * ranks


def measured() -> list[str]:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params = local(whole())
    grads = sf.grad(mapped(mesh))(params)
    messages = []
    for measure in (so.global_norm, so.norms, lambda tree: so.vdot(tree, tree), so.all_finite):
        for tree in (params, grads):
            try:
                measure(tree)
                messages.append("no error")
            except ValueError as error:
                messages.append(str(error).partition(":")[0])
    return messages


def test_norms_of_parts_are_refused() -> None:
    assert world(2).run(measured) == [[x for x in ("global_norm", "norms", "vdot", "all_finite") for _ in range(2)]] * 2
    assert world(1).run(measured) == [["no error"] * 8]


def apart(one_rank: bool) -> float:
    """Each rank trains by itself, with other numbers, beside a mesh; or one of them alone does."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    if one_rank and mesh.get_rank() > 0:
        return 0.0
    params = optree.tree_map(lambda x: x + mesh.get_rank(), whole())
    optimizer = so.chain(so.clip_by_global_norm(0.1), so.lamb(0.1))
    before, state = so.global_norm(params), optimizer.init(params)
    params, state = optimizer.step(params, optree.tree_map(torch.sin, params), state)
    want = sum(x.square().sum() for x in optree.tree_map(lambda x: x + mesh.get_rank(), whole()).values()) ** 0.5
    return float((before - want).abs())


@pytest.mark.parametrize("one_rank", [False, True])
def test_ranks_that_train_by_themselves_are_left_alone(one_rank: bool) -> None:
    assert worst(world(2).run(apart, one_rank)) < 1e-12
