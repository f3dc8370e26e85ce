"""On an accelerator, a gather waits for its slot and its shards, and not for the stage before it."""

from __future__ import annotations

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
from shardfn import quant
from shardfn.testing import simulated, world
from tests.models import distance

WIDTH, LAYERS, STEPS = 8, 5, 3


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"]) @ p["w"]


def as_given(p: Any) -> Any:
    return p


def computed(p: Any) -> Any:
    return optree.tree_map(lambda x: x * 2, p)


def rewritten(p: Any) -> Any:
    with torch.no_grad():
        p.values.mul_(0.5)
    return p


def taken_in_turn(p: Any) -> Any:
    """Some as they were given, some computed, some written to."""
    number = int(p.layout.stage.split(".")[-1])
    return (as_given, computed, rewritten)[number % 3](p)


SHARDS: dict[str, Callable[[Any], Any]] = {f.__name__: f for f in (as_given, computed, rewritten, taken_in_turn)}


def looping(shards: str, **options: Any) -> Callable[..., Tensor]:
    """A loss that calls its stages one by one, without `layers`."""
    staged, take = sf.stage(block, **options), SHARDS[shards]

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in params["blocks"]:
            x = staged(take(p), x)
        return sf.pmean(x.square().mean(), "shard")

    return loss


def made(mesh: Any) -> tuple[Any, Tensor]:
    draw = torch.Generator().manual_seed(0)
    whole = [{"w": torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64) / WIDTH} for _ in range(LAYERS)]
    x = torch.randn(4, WIDTH, generator=draw, dtype=torch.float64)
    return sf.shard({"blocks": whole}, mesh, sf.full_shard("shard")), x.to(mesh.device_type)


# --- what a gather waits for ---


def by_the_clocks(run_of: Callable[[], Any], hear: Callable[[Any, int, str], None]) -> Any:
    """Runs a step of a simulated rank twice, and again while `hear(device, stream, operation)` hears of operations."""
    with simulated(4) as device, sf.debug(memory=False):  # which would fill slots on the computing stream
        mesh = sf.make_mesh(shard=4, device=device.name)
        params, x = made(mesh)
        run = sf.shard_map(run_of(), mesh=mesh, in_specs=..., out_specs=...)
        for _ in range(2):
            run(params, x)
        use = device.clocks.use

        def noted(stream: int, what: str, reads: Any, writes: Any) -> None:
            use(stream, what, reads, writes)
            if reads:  # otherwise these are the same operation's results
                hear(device, stream, what)

        device.clocks.use = noted  # type: ignore[method-assign]
        run(params, x)
        assert device.races == []
        return device.stream()


def stages_before_each_gather(shards: str, differentiated: bool, **options: Any) -> list[int]:
    """Of each gather in forward, in order: how many stages must have computed before it, by the device's clocks."""
    computing, before = list[tuple[int, int]](), list[int]()

    def hear(device: Any, stream: int, what: str) -> None:
        clock = device.clocks.launched_until(stream).clock
        if "allgather" in what and len(before) < LAYERS:
            before.append(sum(clock.get(other, 0) >= time for other, time in computing))
        elif what == "aten::tanh":
            computing.append((stream, clock[stream]))

    loss = looping(shards, **options)
    by_the_clocks(lambda: sf.value_and_grad(loss) if differentiated else loss, hear)
    return before


@pytest.mark.parametrize("shards", ["computed", "rewritten"])
def test_a_gather_waits_for_shards_that_the_step_itself_computes(shards: str) -> None:
    assert world(1, "alone").run(stages_before_each_gather, shards, True) == [[0, 1, 2, 3, 4]]


# --- loops that end early ---


# --- what is sent in few bits ---


def beside(**options: Any) -> tuple[int, int, list[int]]:
    """Operations that encode and decode: how many, and how many of them on the stream that computes; and for each stage
    in backward, how many reductions must have been decoded before it.
    """
    on, added, before = list[int](), list[Any](), list[int]()

    def hear(device: Any, stream: int, what: str) -> None:
        clock, line = device.clocks.launched_until(stream).clock, device.clocks.where()
        if what == "aten::tanh_backward":
            before.append(sum(clock.get(other, 0) >= time for other, time in added) // 3)  # from 3 other ranks
        if line.startswith(("shardfn/quant/", "shardfn/collectives/compressed.py")) and "alltoall" not in what:
            on.append(stream)
        if what == "aten::add_.Tensor" and line.startswith("shardfn/collectives/compressed.py"):
            added.append((stream, clock[stream]))

    computing = by_the_clocks(lambda: sf.value_and_grad(looping("as_given", **options)), hear)
    return len(on), on.count(computing), before


def test_few_bits_are_encoded_and_decoded_beside_what_computes() -> None:
    ((many, computing, before),) = world(1, "alone").run(
        beside, gather_format=quant.int8(16), reduce_format=quant.int8(16)
    )
    assert (many > 100, computing) == (True, 0)
    assert before == [0, 0, 0, 1, 2]  # there is scratch memory for two


# --- numbers and races ---


def trained(device: str, shards: str, **options: Any) -> list[Tensor]:
    """The losses, and the parameters after some steps of an optimizer that writes to them."""
    mesh = sf.make_mesh(shard=4, device=device)
    params, x = made(mesh)
    x = x / (dist.get_rank() + 1)
    run = sf.shard_map(
        sf.value_and_grad(looping(shards, **options)), mesh=mesh, in_specs=..., out_specs=..., check=False
    )
    opt = so.adamw(1e-2)
    state, losses = opt.init(params), []
    for _ in range(STEPS):
        value, grads = run(params, x)
        losses.append(value.detach())
        params, state = opt.step(params, grads, state)
    return [y.detach().cpu() for y in (*losses, *optree.tree_leaves(sf.unshard(params)))]


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("as_given", {}),
    ("computed", {}),
    ("rewritten", {}),
    ("taken_in_turn", {"prefetch": 2, "remat": True}),
    ("as_given", {"reshard": False}),
    ("as_given", {"reshard": "step"}),
    ("as_given", {"gather_format": quant.int8(16)}),
    ("taken_in_turn", {"gather_format": quant.fp8_e4m3(16), "remat": True}),
    ("as_given", {"reduce_format": quant.int8(16)}),
    ("computed", {"gather_format": quant.nf4(16), "reduce_format": quant.int4(16)}),
]


def on_the_device(store: str) -> tuple[int, list[Any]]:
    met = dist.FileStore(store, 4)  # type: ignore[attr-defined]
    rank, found = met.add("ranks", 1) - 1, []
    with simulated(4, rank, store=met) as device, sf.debug(memory=False):
        for shards, options in KINDS:
            device.reset_counts()
            found.append((trained(device.name, shards, **options), device.races))
    return rank, found


def on_the_cpu() -> list[Any]:
    return [trained("cpu", shards, **options) for shards, options in KINDS]


def test_gathers_that_start_early_give_the_cpus_numbers_without_a_race(tmp_path: Path) -> None:
    got = world(4, "alone").with_deadline(120).run(on_the_device, str(tmp_path / "store"))
    want = world(4).with_deadline(60).run(on_the_cpu)
    for (_, found), wanted in zip(sorted(got, key=lambda pair: pair[0]), want, strict=True):
        for (numbers, races), others, kind in zip(found, wanted, KINDS, strict=True):
            assert races == [], kind
            assert distance(numbers, others) < 1e-14, kind


# --- what the clocks find if a wait is missing ---


def outgrown() -> list[str]:
    """Races of an evaluation on another stream with one of larger stages, which need larger slots."""
    with simulated(4) as device, torch.no_grad(), sf.debug(memory=False):
        module, mesh = torch.get_device_module(device.name), sf.make_mesh(shard=4, device=device.name)
        small = sf.shard([{"w": torch.ones(8, 8)} for _ in range(2)], mesh, sf.full_shard("shard"))
        layer, side = sf.stage(block), module.Stream()

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
        def evaluated(params: Any, x: Tensor) -> Tensor:
            return layer(params[1], layer(params[0], x))

        xs = [torch.ones(2, n, device=device.name) for n in (8, 64)]
        kept = [evaluated(small, xs[0])]
        side.wait_stream(module.current_stream())
        device.reset_counts()
        with module.stream(side):
            kept.append(evaluated(small, xs[0]))
        large = sf.shard([{"w": torch.ones(64, 64)} for _ in range(2)], mesh, sf.full_shard("shard"))
        kept += [evaluated(large, xs[1]), *(torch.ones(2**n, device=device.name) for n in range(12))]
        return device.races


def test_a_slot_that_is_outgrown_is_used_again_after_its_last_use_on_any_stream() -> None:
    assert world(1, "alone").run(outgrown) == [[]]
