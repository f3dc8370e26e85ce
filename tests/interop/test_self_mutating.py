"""Modules that change themselves in forward, past autograd too: what they are alone over three steps, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfn as sf
from shardfn.interop import functional
from shardfn.testing import World
from tests.interop.modules import WIDTH, Stack, linear, mapped, meshed, of_module, off, seeded
from tests.refusals import told


class Writes(nn.Module):
    """Writes into a buffer or a parameter of its own, before it uses it."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.w, self.gain = linear(), nn.Parameter(torch.ones(WIDTH))
        self.write = write
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x)
        self.write(self, y.detach().mean(0))
        mean: Any = self.mean
        found: Tensor = y * self.gain - mean
        return found


def in_place(m: Any, x: Tensor) -> None:
    m.mean.mul_(0.9).add_(x)


def assigned(m: Any, x: Tensor) -> None:
    m.mean = m.mean * 0.9 + x


def by_data(m: Any, x: Tensor) -> None:
    m.mean.data = m.mean.data * 0.9 + x


def parameter_by_data(m: Any, x: Tensor) -> None:
    m.gain.data = x


def parameter_past_autograd(m: Any, x: Tensor) -> None:
    m.gain.data.copy_(x)


def weight_past_autograd(m: Any, x: Tensor) -> None:
    m.w.weight.data.clamp_(-0.1, 0.1)


BUFFERS = {one.__name__: one for one in (in_place, assigned, by_data)}
PARAMETERS = {one.__name__: one for one in (parameter_by_data, parameter_past_autograd, weight_past_autograd)}
LOOSE: dict[str, Any] = {"stages": lambda path, m: False, "min_stage_params": 2**62}
HOW: dict[str, dict[str, Any]] = {
    "loose": LOOSE,
    "stage": {"min_stage_params": 0},
    "again": {"min_stage_params": 0, "remat": True},
}


def rows(turn: int) -> Tensor:
    draw = torch.Generator().manual_seed(2 * turn + dist.get_rank())
    return torch.randn(6, WIDTH, generator=draw, dtype=torch.float64)


def steps(write: Any, options: dict[str, Any], strategy: Any, train: bool) -> float:
    """How far three steps of gradient descent are from the module's."""
    alone = seeded(lambda: Stack(Writes(write))).train(train)
    model = functional(seeded(lambda: Stack(Writes(write))).train(train), mutable_buffers=".*mean", **options)
    params, buffers, mesh, worst = model.shard(meshed(), strategy), model.buffers, meshed(), 0.0
    for turn in range(3):
        x = rows(turn)

        def loss(p: Any, b: Any, x: Tensor = x) -> Any:
            out, b = model(p, x, buffers=b)
            return out.square().sum(), b

        (value, buffers), grads = mapped(sf.value_and_grad(loss, has_aux=True), mesh)(params, buffers)
        want, gradient = of_module(alone, lambda call, x=x: call(x).square().sum())  # type: ignore[misc]
        named = model.state_dict(grads)
        worst = max(worst, abs(float(value - want)), off({k: named[k] for k in gradient}, gradient))
        with torch.no_grad():
            for name, p in alone.named_parameters():
                p.sub_(0.01 * gradient[name])
        params = torch.utils._pytree.tree_map(lambda p, g: p - 0.01 * g, params, grads)
    return worst


def all_steps(kind: str) -> dict[str, float]:
    strategies = {"cut": sf.full_shard("shard"), "replicated": sf.ddp("shard")}
    return {
        f"{how}, {strategy}, train={train}": steps(BUFFERS[kind], options, strategies[strategy], train)
        for how, options in HOW.items()
        for strategy in strategies
        for train in (True, False)
    }


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.world(2, "processes")
def test_buffers_that_are_mutable_are_those_of_the_module(world: World, kind: str) -> None:
    for found in world.with_deadline(150).run(all_steps, kind):
        assert {case: x for case, x in found.items() if not x < 1e-12} == {}


def refused(train: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, write in {**BUFFERS, **PARAMETERS}.items():
        for how, options in HOW.items():
            model = functional(seeded(lambda write=write: Stack(Writes(write))).train(train), **options)  # type: ignore[misc]
            params = model.shard(meshed(), sf.full_shard("shard"))
            call = mapped(sf.grad(lambda p, m=model: m(p, rows(0)).square().sum()), meshed())
            found[f"{name}, {how}"] = told(lambda call=call, params=params: call(params))
    return found


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.world(2, "processes")
def test_what_would_be_lost_is_an_error_however_it_is_written(world: World, train: bool) -> None:
    parameter = ("writes into its parameter layers.0.", "into 'layers.0.", "into .data of 'layers.0.")
    words = {
        **dict.fromkeys(BUFFERS, ("writes into its buffer layers.0.mean",)),
        **dict.fromkeys(PARAMETERS, parameter),
    }
    for found in world.with_deadline(150).run(refused, train):
        for case, said in found.items():
            assert any(one in said for one in words[case.partition(",")[0]]), (case, said)
