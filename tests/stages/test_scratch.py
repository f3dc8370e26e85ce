"""The memory from which gradients are sent comes and goes on an accelerator, and nothing uses it when it is gone."""

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
from shardfn.stages.schedule import schedule_of
from shardfn.stages.scratch import Scratch
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

    @property
    def scratch(self) -> Scratch:
        found: Scratch = schedule_of(self.mesh).reductions.scratch
        return found


@sf.debug(memory=False)
def run(program: Callable[..., Any], *args: Any) -> Any:
    with simulated(4) as device:
        return program(device, *args)


def on_device(program: Callable[..., Any], *args: Any) -> Any:
    return world(1, "alone").within(60).run(run, program, *args)[0]


def between_steps(device: Any) -> Any:
    s = Setting(device)
    for _ in range(2):
        s.run(s.params, s.x)
    after_step = [x.untyped_storage().nbytes() for x in s.scratch.memories.values()]
    params = optree.tree_map(lambda x: x.detach().requires_grad_(), s.params)
    s.loss_of(params, s.x).backward()
    after_backward = [x.untyped_storage().nbytes() for x in s.scratch.memories.values()]
    return after_step, after_backward, device.races


def test_between_steps_there_is_none() -> None:
    after_step, after_backward, races = on_device(between_steps)
    assert after_step
    assert not any(after_step + after_backward)
    assert races == []


def out_of_memory(device: Any, failing: int) -> Any:
    """A step after one in which memory could not be allocated; the most of it that was handed out and was not there."""
    s = Setting(device)
    for _ in range(2):
        s.run(s.params, s.x)
    resize, count = torch.UntypedStorage.resize_, 0

    def fails(storage: Any, nbytes: int) -> Any:
        nonlocal count
        count += nbytes > 0
        if count == failing and nbytes:
            raise torch.OutOfMemoryError("no memory")
        return resize(storage, nbytes)

    failed = pytest.raises((RuntimeError, torch.OutOfMemoryError), match="no memory")
    with mock.patch.object(torch.UntypedStorage, "resize_", fails), failed:
        s.run(s.params, s.x)
    view, missing = Scratch.view, 0

    def looked_at(self: Scratch, name: Any, numel: int, dtype: torch.dtype) -> Tensor:
        nonlocal missing
        x = view(self, name, numel, dtype)
        missing = max(missing, numel * dtype.itemsize - x.untyped_storage().nbytes())
        return x

    with mock.patch.object(Scratch, "view", looked_at):
        s.run(s.params, s.x)
    return missing, device.races


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_after_a_failed_allocation_none_is_handed_out_that_is_not_there(failing: int) -> None:
    assert on_device(out_of_memory, failing) == (0, [])


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


def on_two_streams(device: Any) -> list[str]:
    module, scratch = torch.get_device_module(device.name), Scratch(torch.device(device.name, 0))
    one, other = (module.Stream(device=torch.device(device.name, 0)) for _ in range(2))
    with module.stream(one):
        scratch.view("gradient", 100, torch.float32).zero_()
    other.wait_stream(one)
    with module.stream(other):
        scratch.view("gradient", 100, torch.float32).fill_(1)
        scratch.view("gradient", 50, torch.float32).fill_(1)
        scratch.free()
    found: list[str] = device.races
    return found


def test_the_stream_that_allocated_it_waits_for_the_one_that_frees_it() -> None:
    assert on_device(on_two_streams) == []


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
