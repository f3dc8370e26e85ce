"""What a checked call logs once about a program that is right."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfn as sf
from shardfn import P, interop
from shardfn.mesh import start
from shardfn.testing import world
from tests.models import normal


def heard(program: Any, *args: Any) -> list[str]:
    """What the first rank logs in two calls."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardfn")
    first = dist.get_rank() == 0
    if first:
        logger.addHandler(handler)
    try:
        for _ in range(2):
            program(*args)
    finally:
        logger.removeHandler(handler)
    return found


def step_of(unused: bool, local: bool) -> Any:
    mesh = sf.make_mesh(data=-1, device="cpu")
    whole = {"a": {"w": normal(4, 4, seed=1)}, "b": {"w": normal(4, 4, seed=2)}}
    if unused:
        whole |= {"c": {"u": normal(2, seed=3)}}
        whole["a"]["extra"] = normal(3, seed=4)
    params, layer = sf.shard(whole, mesh, sf.full_shard("data")), sf.stage(lambda p, x: torch.tanh(x @ p["w"]))
    x = normal(8, 4, seed=5).chunk(mesh.size())[mesh.get_rank()]

    @sf.shard_map(mesh=mesh, in_specs=(..., P("data")), out_specs=...)
    def step(params: Any, x: torch.Tensor) -> Any:
        def loss(params: Any) -> Any:
            y = layer(params["b"], layer(params["a"], x))
            return sf.psum(y.square().sum(), "data"), y.mean() if local else sf.pmean(y.mean(), "data")

        (value, mean), grads = sf.value_and_grad(loss, has_aux=True)(params)
        return grads, {"loss": value, "mean": mean}

    return heard(step, params, x)


@pytest.mark.parametrize(("unused", "local"), [(False, False), (True, False), (False, True), (True, True)])
def test_unused_parameters_and_local_metrics_are_told_once(unused: bool, local: bool) -> None:
    for found in world(2).run(step_of, unused, local)[:1]:
        assert [line.split(": ", 1)[1].split(",")[0][:12] for line in found] == [
            *["no loss uses"] * unused,
            *["result[1]['m"] * local,
        ]
        assert not unused or "params['c'], a.extra" in found[0]
        assert not local or "along 'data'" in found[-1]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)


class First(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        return x[0]


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    return module


USING: dict[str, Callable[[], nn.Module]] = {
    "a custom Function": lambda: nn.Sequential(nn.Linear(4, 4), Doubling()),
    "a hook": hooked,
    "an LSTM": lambda: nn.Sequential(nn.LSTM(4, 4), First()),
    "a GRU": lambda: nn.Sequential(nn.GRU(4, 4), First()),
}


def of_a_module(name: str) -> list[str]:
    mesh = sf.make_mesh(data=-1, device="cpu")
    torch.manual_seed(0)
    model = interop.functional(USING[name]().double())
    params = model.shard(mesh, sf.full_shard("data"))
    step = sf.shard_map(
        sf.grad(lambda p, x: sf.pmean(model(p, x).square().mean(), "data")),
        mesh=mesh, in_specs=(..., P("data")), out_specs=...,
    )  # fmt: skip
    return heard(step, params, normal(4, 4, seed=5).chunk(mesh.size())[mesh.get_rank()].requires_grad_())


def to_a_collective() -> list[str]:
    """The result of a custom Function goes to ranks as it is."""
    mesh = sf.make_mesh(data=-1, device="cpu")
    params = sf.shard({"w": normal(4, 4, seed=1)}, mesh, sf.full_shard("data"))
    layer = sf.stage(lambda p, x: sf.all_to_all(Doubled.apply(x @ p["w"]), "data", split_dim=0, concat_dim=1))
    step = sf.shard_map(
        sf.grad(lambda p, x: sf.psum(layer(p, x).square().sum(), "data")),
        mesh=mesh, in_specs=(..., P("data")), out_specs=...,
    )  # fmt: skip
    return heard(step, params, normal(4, 4, seed=5).chunk(mesh.size())[mesh.get_rank()])


def test_nothing_is_told_where_ranks_get_what_the_record_does_not_follow() -> None:
    assert world(2).run(to_a_collective)[0] == []


@pytest.mark.parametrize("name", USING)
def test_nothing_is_told_where_the_record_does_not_follow_autograd(name: str) -> None:
    assert world(2).run(of_a_module, name)[0] == []


def test_devices_without_a_rank_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_module", lambda _: types.SimpleNamespace(device_count=lambda: 4))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    counts = [start.idle_devices("cuda", hosts) for hosts in ((), ("a", "a", "b"), ("a",) * 4, ("a",) * 5)]
    assert counts == [3, 2, 0, 0]


def product() -> list[str]:
    mesh = sf.make_mesh(data=-1, device="cpu")
    params = sf.shard([{"w": normal(4, 4, seed=k)} for k in (1, 2)], mesh, sf.full_shard("data"))
    layer, x = sf.stage(lambda p, x: torch.tanh(x @ p["w"])), normal(8, 4, seed=5)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return sf.psum(layer(params[1], layer(params[0], x)).square().sum(), "data")

    @sf.shard_map(mesh=mesh, in_specs=(..., P("data")), out_specs=...)
    def step(params: Any, x: torch.Tensor) -> Any:
        return sf.jvp(lambda p: sf.grad(loss)(p, x), (params,), (params,))[1]

    return heard(step, params, x.chunk(mesh.size())[mesh.get_rank()])


def test_nothing_is_told_of_a_product_with_a_hessian() -> None:
    assert world(2).run(product)[0] == []
