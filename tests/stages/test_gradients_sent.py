"""The memory from which gradients are sent belongs to who sends them, also after an error and in a graph."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.stages import reduction
from shardfn.stages.reduction import PendingReduction, Reductions
from shardfn.stages.schedule import schedule_of
from shardfn.testing import simulated, world
from tests.models import DATA, STRATEGIES, drawn

HIDDEN = (16, 48, 32, 16, 64)  # of layers, so that memories change their sizes


THREE = ("pod", "replica", "shard")
SPLIT = sf.Placement(axes=("shard",), replicas=("pod", "replica"), gradients=("shard", "replica"))
PLACES: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "full_shard": (STRATEGIES["full_shard"], DATA, {}),
    "hybrid_shard": (STRATEGIES["hybrid_shard"], DATA, {}),
    "three hops": (SPLIT, THREE, {}),
    "in 8 bits": (STRATEGIES["full_shard"], DATA, {"reduce_format": sf.quant.int8(16)}),
}


class Setting:
    """A model of layers of different sizes on a simulated device."""

    def __init__(self, device: Any, place: str = "full_shard") -> None:
        draw = drawn(0, 0.5)
        blocks = [{"up": draw(16, n), "down": draw(n, 16)} for n in HIDDEN]
        strategy, self.axes, options = PLACES[place]
        self.mesh = sf.make_mesh(**dict.fromkeys(self.axes, 2), device=device.name)
        self.params = sf.shard({"blocks": blocks}, self.mesh, strategy)
        self.layer = sf.stage(lambda p, x: x + torch.tanh(x @ p["up"]) @ p["down"], **options)
        self.x = torch.ones(3, 16, dtype=torch.float64).to(device.name)
        self.run = sf.shard_map(sf.value_and_grad(self.loss), mesh=self.mesh, in_specs=..., out_specs=..., check=False)

    def loss(self, params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = self.layer(p, x)
        return sf.pmean(x.square().mean(), self.axes)


@sf.debug(memory=False)
def run(program: Callable[..., Any], place: str, *args: Any) -> Any:
    with simulated(2 ** len(PLACES[place][1])) as device:
        return program(device, place, *args)


def on_device(program: Callable[..., Any], place: str = "full_shard", *args: Any) -> Any:
    return world(1, "alone").with_deadline(60).run(run, program, place, *args)[0]


def deferred(device: Any, place: str, defer: Any) -> list[str]:
    """Races of steps with micro-batches."""
    s = Setting(device, place)

    @sf.shard_map(mesh=s.mesh, in_specs=..., out_specs=..., check=False)
    def step(params: Any, x: Tensor) -> Any:
        return sf.accumulate(s.loss, [x, x * 2], defer=defer)(params)

    for _ in range(3):
        step(s.params, s.x)
    found: list[str] = device.races
    return found


@pytest.mark.parametrize("defer", ["nothing", "replicas", "all"])
@pytest.mark.parametrize("place", PLACES)
def test_memory_stays_until_the_last_hop_has_read_it(place: str, defer: str) -> None:
    assert on_device(deferred, place, defer) == []


def cut_short(device: Any, place: str, where: str) -> tuple[bool, list[str]]:
    """Whether a step failed while gradients were on their way, and races of the next one."""
    s = Setting(device, place)
    for _ in range(2):
        s.run(s.params, s.x)
    device.reset_counts()
    drain, flat, count = Reductions.drain, Reductions._flat, itertools.count()

    def drained(self: Reductions) -> None:
        if not self.in_flight:  # the first time, some are
            return drain(self)
        with mock.patch.object(PendingReduction, "advance", side_effect=torch.OutOfMemoryError("no memory")):
            return drain(self)

    def copied(self: Reductions, *args: Any) -> Any:
        if next(count) == 3:
            raise torch.OutOfMemoryError("no memory")
        return flat(self, *args)

    failing = {"drain": drained, "_flat": copied}[where]
    failed = False
    with mock.patch.object(Reductions, where, failing):
        try:
            s.run(s.params, s.x)
        except (RuntimeError, torch.OutOfMemoryError):
            failed = True
    gc.collect()  # nothing holds the frames of the error, and so their memory
    s.run(s.params, s.x)
    return failed, device.races


@pytest.mark.parametrize("where", ["drain", "_flat"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_on_its_way_after_an_error_keeps_its_memory(place: str, where: str) -> None:
    assert on_device(cut_short, place, where) == (True, [])


def pools() -> Any:
    """Bytes from which gradients are sent, of a large stage before others; and after interrupts without a step."""
    draw, found = drawn(0, 0.1), list[tuple[int, int]]()
    large, layer = sf.stage(lambda p, x: x @ p["w"]), sf.stage(lambda p, x: x + torch.tanh(x @ p["w"]))
    for depth in (4, 5):
        mesh = sf.make_mesh(shard=2, device="cpu")
        params = {"large": {"w": draw(512, 64)}, "blocks": [{"w": draw(64, 64)} for _ in range(depth)]}
        params = sf.shard(params, mesh, sf.full_shard("shard"))

        def loss(params: Any, x: Tensor) -> Tensor:
            x = large(params["large"], x)
            for p in params["blocks"]:
                x = layer(p, x)
            return sf.pmean(x.square().mean(), "shard")

        run = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=..., check=False)
        reductions, x = schedule_of(mesh).reductions, torch.ones(4, 512, dtype=torch.float64)
        with sf.collectives.transports(
            mesh, reduce_scatter="exchange"
        ):  # which copies gradients into one buffer, and receives one
            for _ in range(5):
                run(params, x)
            nbytes = sum(pool.nbytes() for pool in reductions.pools)

            def interrupted(params: Any, x: Tensor) -> Tensor:
                leaves, tree = optree.tree_flatten(params)
                leaves = [leaf.detach().requires_grad_() for leaf in leaves]
                with contextlib.suppress(KeyboardInterrupt):
                    torch.autograd.grad(loss(optree.tree_unflatten(tree, leaves), x), leaves)
                return torch.zeros(())

            plain = sf.shard_map(interrupted, mesh=mesh, in_specs=..., out_specs=..., check=False)
            for _ in range(3):
                with mock.patch.object(reduction, "_copy", side_effect=KeyboardInterrupt):
                    plain(params, x)
            for _ in range(3):
                plain(params, x)
            found.append((nbytes, sum(buffer.under_way for pool in reductions.pools for buffer in pool.buffers)))
    return found


@sf.debug(memory=False)
def test_a_large_stage_does_not_make_all_memory_large_and_interrupts_leave_none() -> None:
    whole, block = 512 * 64 * 8, 64 * 64 * 8
    for found in world(2).with_deadline(60).run(pools):
        for nbytes, under_way in found:
            assert nbytes < 1.01 * 2 * (whole + block)
            assert under_way == 0


def graphed(device: Any, place: str) -> Any:
    """A graph of a step that differentiates by itself, and whose last layer has no part in the loss."""
    s = Setting(device, place)

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

    graph, params = sf.cuda_graph(step), s.params
    for _ in range(6):
        params = graph(params, s.x)
    return device.operations["replay"], device.races


def test_a_graph_without_a_step_of_its_own_leaves_none() -> None:
    replays, races = on_device(graphed)
    assert replays > 1
    assert races == []
