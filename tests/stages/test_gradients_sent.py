"""The memory from which gradients are sent belongs to who sends them, also after an error and in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.stages.reduction import PendingReduction, Reductions
from shardfn.testing import simulated, world
from tests.models import DATA, STRATEGIES, drawn

HIDDEN = (16, 48, 32, 16, 64)  # of layers, so that memories change their sizes


class Setting:
    """A model of layers of different sizes on a simulated device."""

    def __init__(self, device: Any) -> None:
        draw = drawn(0, 0.5)
        blocks = [{"up": draw(16, n), "down": draw(n, 16)} for n in HIDDEN]
        self.mesh = sf.make_mesh(replica=2, shard=2, device=device.name)
        self.params = sf.shard({"blocks": blocks}, self.mesh, STRATEGIES["full_shard"])
        self.layer = sf.stage(lambda p, x: x + torch.tanh(x @ p["up"]) @ p["down"])
        self.x = torch.ones(3, 16, dtype=torch.float64).to(device.name)
        self.run = sf.shard_map(sf.value_and_grad(self.loss), mesh=self.mesh, in_specs=..., out_specs=..., check=False)
        self.loss_of = sf.shard_map(self.loss, mesh=self.mesh, in_specs=..., out_specs=..., check=False)

    def loss(self, params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = self.layer(p, x)
        return sf.pmean(x.square().mean(), DATA)


@sf.debug(memory=False)
def run(program: Callable[..., Any], *args: Any) -> Any:
    with simulated(4) as device:
        return program(device, *args)


def on_device(program: Callable[..., Any], *args: Any) -> Any:
    return world(1, "alone").within(60).run(run, program, *args)[0]


def cut_short(device: Any) -> list[str]:
    """Races of a step whose gradients are not all waited for, as something fails meanwhile, and of the next."""
    s = Setting(device)
    for _ in range(2):
        s.run(s.params, s.x)
    device.forget()
    drain = Reductions.drain

    def failing(self: Reductions) -> None:
        if not self.in_flight:  # the first time, some are
            return drain(self)
        with mock.patch.object(PendingReduction, "advance", side_effect=torch.OutOfMemoryError("no memory")):
            return drain(self)

    failed = pytest.raises((RuntimeError, torch.OutOfMemoryError), match="no memory")
    with mock.patch.object(Reductions, "drain", failing), failed:
        s.run(s.params, s.x)
    s.run(s.params, s.x)
    found: list[str] = device.races
    return found


def test_what_is_on_its_way_after_an_error_keeps_its_memory() -> None:
    assert on_device(cut_short) == []


def graphed(device: Any) -> Any:
    """A graph of a step that differentiates by itself, and whose last layer has no part in the loss."""
    s = Setting(device)

    @sf.shard_map(mesh=s.mesh, in_specs=..., out_specs=..., check=False)
    def step(params: Any, x: Tensor) -> Any:
        leaves, tree = optree.tree_flatten(params)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        *first, last = optree.tree_unflatten(tree, leaves)["blocks"]
        for p in first:
            x = s.layer(p, x)
        s.layer(last, x)
        grads = torch.autograd.grad(x.square().mean(), leaves, allow_unused=True)
        pairs = zip(leaves, grads, strict=True)
        return optree.tree_unflatten(tree, [x.detach() if g is None else (x - 0.1 * g).detach() for x, g in pairs])

    graph, params = sf.graphed(step), s.params
    for _ in range(6):
        params = graph(params, s.x)
    return device.operations["replay"], device.races


def test_a_graph_without_a_step_of_its_own_leaves_none() -> None:
    replays, races = on_device(graphed)
    assert replays > 1
    assert races == []
