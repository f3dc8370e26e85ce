"""Programs with streams of their own, failures and several lanes, on a simulated device that finds races."""

from __future__ import annotations

import collections
import gc
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import quant
from shardfn.collectives import compressed
from shardfn.collectives.late_checks import LateChecks
from shardfn.mesh.groups import world_of_thread
from shardfn.stages import gather
from shardfn.testing import simulated, world

WIDTH = 8
Step = Callable[..., Any]


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def simulating(ranks: int, program: Callable[..., Any], *args: Any) -> Any:
    """Runs a program of one of these ranks, with its device, mesh and input."""
    with simulated(ranks) as device, sf.debug(memory=False):
        mesh = sf.make_mesh(shard=ranks, device=device.name)
        return program(device, mesh, torch.ones(4, WIDTH, device=device.name), *args)


def on_device(ranks: int, program: Callable[..., Any], *args: Any) -> Any:
    return world(1, "alone").with_deadline(60).run(simulating, ranks, program, *args)[0]


def stepping(mesh: Any, loss: Callable[..., Tensor]) -> Step:
    return sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=..., check=False)


def in_turn(staged: Step) -> Callable[..., Tensor]:
    """The loss of layers that run one after another."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in params:
            x = staged(p, x)
        return sf.pmean(x.square().mean(), "shard")

    return loss


def races_of_a_steady_step(device: Any, step: Step, *args: Any) -> list[Any]:
    for _ in range(2):
        step(*args)
    device.reset_counts()
    step(*args)
    return list(device.races)


class OnAnotherStream(torch.autograd.Function):
    """A product that runs on a stream of its own, forward and backward, ordered as autograd's engine orders streams."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, streams: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.streams = streams
        module, current = streams["module"], streams["module"].current_stream()
        streams["side"].wait_stream(current)
        with module.stream(streams["side"]):
            y = x @ w
        current.wait_stream(streams["side"])
        y.record_stream(current)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        streams = ctx.streams
        current = streams["module"].current_stream()
        streams["side"].wait_stream(current)
        with streams["module"].stream(streams["side"]):
            x, w = ctx.saved_tensors
            gradients = g @ w.mT, x.mT @ g
        for read in (g, x):
            read.record_stream(streams["side"])
        for gradient in gradients:
            gradient.record_stream(current)
        streams["done"] = streams["side"].record_event()
        return *gradients, None


class Joined(torch.autograd.Function):
    """Waits in backward for the stream that computed the gradient, as the engine does before its consumer runs."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, streams: Any) -> Tensor:
        ctx.streams = streams
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.streams["done"].wait(ctx.streams["module"].current_stream())
        return g, None


def with_streams(device: Any, mesh: Any, x: Tensor, remat: bool, packed: bool) -> list[Any]:
    module = torch.get_device_module(device.name)
    streams: dict[str, Any] = {"module": module, "side": module.Stream()}

    def function(p: Any, x: Tensor) -> Tensor:
        joined = Joined.apply(x, streams), Joined.apply(p["w"], streams)
        y = x @ p["w"]  # in backward after the other product, whose stream has waited for the gather, before the joins
        return y + OnAnotherStream.apply(*joined, streams)

    layers: Any = [{"w": torch.ones(WIDTH, WIDTH), "b": torch.ones(WIDTH)} for _ in range(6)]
    if packed:
        layers = quant.quantize(layers, quant.int8(8), lambda path, shape: len(shape) > 1)
    params = sf.shard(layers, mesh, sf.full_shard("shard"))
    staged = sf.stage(lambda p, x: function(p, x) + p["b"], remat=remat)
    return races_of_a_steady_step(device, stepping(mesh, in_turn(staged)), params, x)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_stage_may_compute_on_streams_of_its_own(remat: bool, packed: bool) -> None:
    assert on_device(4, with_streams, remat, packed) == []


def called_on_two_streams(device: Any, mesh: Any, x: Tensor) -> list[Any]:
    module = torch.get_device_module(device.name)
    side, staged = module.Stream(), sf.stage(layer)

    def loss(p: Any, x: Tensor) -> Tensor:
        current = module.current_stream()
        side.wait_stream(current)
        a = staged(p, x)
        with module.stream(side):
            b = staged(p, x)
        current.wait_stream(side)
        b.record_stream(current)
        return sf.pmean((a + b).square().mean(), "shard")

    params = sf.shard({"w": torch.ones(WIDTH, WIDTH)}, mesh, sf.full_shard("shard"))
    return races_of_a_steady_step(device, stepping(mesh, loss), params, x)


def test_a_stage_may_be_called_on_two_streams() -> None:
    assert on_device(4, called_on_two_streams) == []


def failing(function: Step, at: int) -> Step:
    """The function, whose call of this number raises an error after its work has been enqueued."""
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = function(*args, **kwargs)
        if calls == at:
            raise torch.OutOfMemoryError("no memory")
        return result

    return wrapper


def races_after_a_failure(device: Any, owner: Any, name: str, at: int, step: Step, *args: Any) -> list[Any]:
    """Races of a step in which that call fails, and of the next one."""
    assert not races_of_a_steady_step(device, step, *args)
    with mock.patch.object(owner, name, failing(getattr(owner, name), at)), pytest.raises(torch.OutOfMemoryError):
        step(*args)
    gc.collect()  # nothing holds the frames of the error, and so their memory
    step(*args)
    gc.collect()
    return list(device.races)


def encoding_fails(device: Any, mesh: Any, x: Tensor) -> list[Any]:
    params = sf.shard([{"w": torch.ones(WIDTH, WIDTH)} for _ in range(3)], mesh, sf.full_shard("shard"))
    step = stepping(mesh, in_turn(sf.stage(layer, reduce_format=quant.int8(16))))
    return races_after_a_failure(device, compressed.Wire, "write", 1, step, params, x)


def test_gradients_that_fail_to_be_encoded_keep_their_memory() -> None:
    assert on_device(4, encoding_fails) == []


def a_gather_from_the_host_fails(device: Any, mesh: Any, x: Tensor) -> list[Any]:
    def function(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"]) + p["b"].to(x.dtype)

    tree = {"w": torch.ones(WIDTH, WIDTH), "b": torch.ones(WIDTH, dtype=torch.bfloat16)}
    params = sf.shard(tree, mesh, sf.full_shard("shard").with_tiers(params="host"))
    run = sf.shard_map(sf.stage(function), mesh=mesh, in_specs=..., out_specs=..., check=False)
    with torch.no_grad():
        return races_after_a_failure(device, gather.Gathered, "_start_one", 1, run, params, x)


def test_a_gather_that_fails_keeps_the_memory_that_copies_from_the_host_write() -> None:
    assert on_device(1, a_gather_from_the_host_fails) == []


def lanes_of_checks(device: Any, mesh: Any, x: Tensor) -> dict[str, int]:
    """The lanes that checked gathers while a thread of its own trained."""
    lanes: collections.Counter[str] = collections.Counter()
    errors: list[BaseException] = []
    add = LateChecks.add

    def noted(self: LateChecks, *args: Any) -> None:
        lanes[next(name for name, checks in world_of_thread().agreed.items() if checks is self)] += 1
        add(self, *args)

    params = sf.shard([{"w": torch.ones(WIDTH, WIDTH)} for _ in range(5)], mesh, sf.full_shard("shard"))
    step = stepping(mesh, in_turn(sf.stage(lambda p, x: torch.tanh(x @ p["w"]) @ p["w"])))

    def work() -> None:
        try:
            for _ in range(2):
                step(params, x)
        except BaseException as error:
            errors.append(error)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
    def outer(x: Tensor) -> Tensor:
        thread = threading.Thread(target=work, name="B")
        thread.start()
        thread.join()
        return x

    with mock.patch.object(LateChecks, "add", noted):
        outer(x)
    assert not errors, errors
    return dict(lanes)


def test_gathers_in_backward_are_checked_in_the_lane_that_asked_for_them() -> None:
    (lane,) = on_device(4, lanes_of_checks)
    assert "B" in lane


def test_two_threads_may_free_what_gathers_have_left() -> None:
    class TakenMeanwhile(collections.deque[Any]):
        def __bool__(self) -> bool:
            return True  # another thread takes the last one after this

    with mock.patch.object(gather, "_left", TakenMeanwhile()):
        gather.free_left()
