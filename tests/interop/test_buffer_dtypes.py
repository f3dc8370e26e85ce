"""Buffers keep their dtype, whatever parameters are gathered in and arguments are cast to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
from shardfn.interop import functional
from shardfn.testing import World

LOW = torch.bfloat16


class Angles(nn.Module):
    """A layer with a constant that few bits cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))
        self.register_buffer("frequencies", torch.arange(1.0, 7.0) / 3)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.frequencies, Tensor)
        return x * self.w * (1000 * self.frequencies).cos().to(x.dtype)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), Angles())


def by_hand(m: nn.Sequential, x: Tensor) -> Tensor:
    """Parameters and activations in few bits, statistics and constants in their own."""
    linear, norm, angles = m
    assert isinstance(linear, nn.Linear)
    assert isinstance(norm, nn.BatchNorm1d)
    assert isinstance(angles, Angles)
    y = F.linear(x.to(LOW), linear.weight.to(LOW), linear.bias.to(LOW))
    weight, bias = (p.to(LOW).float() for p in (norm.weight, norm.bias))
    y = F.batch_norm(y, norm.running_mean, norm.running_var, weight, bias, norm.training)
    assert isinstance(angles.frequencies, Tensor)
    return y * angles.w.to(LOW) * (1000 * angles.frequencies).cos().to(LOW)


def of_low_precision(small: int, options: dict[str, Any]) -> list[bool]:
    mesh, module = sf.make_mesh(shard=2, device="cpu"), network()
    model = functional(
        network(), stages=["0", "1", "2"] if not small else lambda path, m: False, min_stage_params=small, **options
    )
    params, buffers = sf.shard(model.tree, mesh, sf.full_shard("shard")), model.buffers
    same = []
    for step in range(6):
        training = step < 3
        module.train(training)
        model.module.train(training)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(LOW)
        y, buffers = model(params, x, buffers=buffers)
        want = by_hand(module, x)
        same.append(torch.equal(y.float(), want.float()))
        same += [torch.equal(b, buffers[name]) for name, b in module.named_buffers() if "batches" not in name]
    gradient = sf.grad(lambda p: model(p, x, buffers=buffers)[0].float().square().sum())(params)
    by_hand(module, x).float().square().sum().backward()
    got = model.state_dict(gradient)
    for name, p in module.named_parameters():
        assert p.grad is not None
        same.append(torch.allclose(got[name] / 2, p.grad, rtol=2e-2, atol=1e-3))  # both ranks have all rows
    return same


CASES: list[tuple[int, dict[str, Any]]] = [
    (0, {"gather_dtype": LOW, "input_dtype": LOW}),
    (0, {"gather_dtype": LOW, "input_dtype": LOW, "output_dtype": LOW, "remat": True}),
    (0, {"gather_dtype": LOW, "output_dtype": torch.float64, "input_dtype": LOW}),
    (2**20, {"gather_dtype": LOW}),
]


@pytest.mark.world(2, "processes")
def test_buffers_keep_their_dtype(world: World) -> None:
    for small, options in CASES:
        for found in world.run(of_low_precision, small, options):
            assert all(found), (options, found)
