"""Training under messages that come late: the numbers of one process, whatever the timing.

`python -m tests.stages.test_chaos --seeds 100` runs more seeds, by hand.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import checkpoint, parallel
from shardfn.collectives import into_buffers
from shardfn.stages.schedule import schedule_of
from shardfn.testing import World
from shardfn.testing import world as shared_world
from shardfn.testing.chaos import Chaos, chaos
from tests import models
from tests.models import DATA, block, blocks, by_backward, distance, normal
from tests.reference import worst

D, DEPTH, STEPS, ROWS = 6, 4, 3, 6
STRATEGIES: dict[str, sf.Strategy] = {
    **{
        name: models.STRATEGIES[name]
        for name in ("full_shard", "shard_grad_op", "hybrid_shard", "hfsdp", "hpz", "mics")
    },
    "step": sf.full_shard(DATA).with_reshard("step"),
    "uncut": sf.strategies.replicate_small(sf.hybrid_shard(shard="shard", replica="replica"), below=20),
}
OPTIONS: list[dict[str, Any]] = [
    {}, {"remat": True}, {"reshard": False}, {"prefetch": 0}, {"prefetch": 2}, {"remat": True, "prefetch": 2},
    {"remat": True, "prefetch": 0},
]  # fmt: skip
WAYS = ["value_and_grad", "backward", "nothing", "replicas", "all"]


def head(p: Any, x: Tensor) -> Tensor:
    return torch.sin(x * p["scale"]) @ p["o"]


def params(depth: int = DEPTH) -> Any:
    return {"blocks": blocks(depth, D), "head": {"scale": normal(D, seed=90), "o": normal(D, 4, seed=91)}}


def loss(f: Any, g: Any, ps: Any, x: Tensor) -> Tensor:
    for i, p in enumerate(sf.layers(ps["blocks"])):
        x = (f[i % len(f)] if isinstance(f, list) else f)(p, x)
    return g(ps["head"], x).square().sum()


def batch(step: int, n: int) -> Tensor:
    """Of each rank: `[n, ROWS, D]`."""
    return normal(n, ROWS, D, seed=1000 + step)


def gradient(how: str, f: Any, g: Any, flat: Any, x: Tensor) -> Any:
    if how == "value_and_grad":
        return sf.value_and_grad(lambda p: loss(f, g, p, x))(flat)[1]
    if how == "backward":
        return by_backward(lambda p: loss(f, g, p, x), flat)[1]
    defer: Any = how
    return sf.accumulate(lambda p, x: loss(f, g, p, x), x.split([1, 3, 2]), defer=defer)(flat)[1]


def optimizer() -> so.Optimizer:
    return so.chain(so.clip_by_global_norm(3.0), so.adamw(0.01, eps=1e-3))


def alone(n: int) -> list[Any]:
    """The gradients of one process at the start, and the parameters after each step."""
    ps, opt = params(), optimizer()
    state = opt.init(ps)
    found: list[Any] = []
    for step in range(STEPS):
        rows = batch(step, n).flatten(0, 1)
        grads = torch.func.grad(lambda p, rows=rows: loss(block, head, p, rows))(ps)
        found += [] if found else [optree.tree_map(torch.clone, grads)]  # a step may overwrite them
        ps, state = opt.step(ps, grads, state)
        found.append(optree.tree_map(torch.clone, ps))
    return found


def steps(mesh: Any, want: list[Any], strategy: str, how: str, options: Any, folder: Path | None) -> float:
    """How far training by a strategy is from one process, at every step; a checkpoint is written meanwhile."""
    n, rank = mesh.size(), mesh.get_rank()
    opt, flat = optimizer(), sf.shard(params(), mesh, STRATEGIES[strategy])
    # Layers that look ahead by different counts take their slots out of turn.
    f, g = [sf.stage(block, **options | more) for more in ({}, {"prefetch": 1})], sf.stage(head, **options)
    if how == "backward":
        return distance(sf.unshard(gradient(how, f, g, flat, batch(0, n)[rank])), want[0])
    state, pending, far = opt.init(flat), None, []
    for step in range(STEPS):
        flat, state = opt.step(flat, gradient(how, f, g, flat, batch(step, n)[rank]), state)
        if step == 0 and folder:
            pending = checkpoint.save_async(folder / f"{strategy} {how} {options}".replace("'", ""), {"p": flat})
        else:
            far.append(distance(sf.unshard(flat), want[1 + step]))
    if pending is not None:
        pending.wait()
        far.append(distance(sf.unshard(checkpoint.load(pending.path, {"p": flat})["p"]), want[1]))
    return worst(far)


def narrow(mesh: Any, seed: int) -> float:
    """In other dtypes on the wire there is rounding, but the same at any time: bits are compared, where two are summed.

    Gathers in float32, sums in float32 of shards in float64.
    """
    flat = sf.shard(params(), mesh, sf.full_shard(DATA))
    f, g = (sf.stage(one, gather_dtype=torch.float32, reduce_dtype=torch.float32) for one in (block, head))
    x = batch(0, mesh.size())[mesh.get_rank()].float()

    def now() -> Any:
        return sf.unshard(sf.grad(lambda p: loss(f, g, p, x))(flat))

    with into_buffers.transports(mesh, all_gather="native", reduce_scatter="native"):
        before = now()
    with chaos(mesh, seed):
        return distance(now(), before)


def pipelined(mesh: Any, f: Any, hold: Chaos) -> float:
    """Two parts of a model, each cut over the rest of the ranks."""

    def at(path: str, shape: tuple[int, ...]) -> sf.Placement:
        name, number, *_ = path.split(".")
        return sf.full_shard("shard").only_on(pipe=int(name == "head" or int(number) >= DEPTH // 2))

    index, rows = mesh["pipe"].get_local_rank(), batch(0, mesh["shard"].size())
    half = slice(0, DEPTH // 2) if index == 0 else slice(DEPTH // 2, DEPTH)
    g = sf.stage(head)

    def part(ps: Any, x: Any, rows: Tensor) -> Tensor:
        hold.pause()
        x = rows if x is None else x
        for p in ps["blocks"][half]:
            x = f(p, x)
        return x if index == 0 else sf.psum(g(ps["head"], x).square().sum(), "shard")

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def run(flat: Any) -> Any:
        mine = rows[sf.axis_index("shard")]
        return sf.grad(lambda p: parallel.pipeline(part, p, list(mine.split(2)), "pipe"))(flat)

    want = torch.func.grad(lambda p: loss(block, head, p, rows.flatten(0, 1)))(params())
    return distance(sf.unshard(run(sf.shard(params(), mesh, at)), mesh), want)


def programs(seed: int, folder: str, count: int) -> Any:
    """A number of programs drawn by the seed: how far each is from one process."""
    n, dice = dist.get_world_size(), random.Random(seed)
    mesh = sf.make_mesh(device="cpu", replica=2, shard=n // 2)
    want: list[Any] = alone(n)
    found: dict[str, float] = {}
    root = Path(folder) / f"{n} {seed}"
    drawn = [(s, how, options) for s in STRATEGIES for how in WAYS for options in OPTIONS]
    dice.shuffle(drawn)
    firsts = {strategy: (strategy, how, options) for strategy, how, options in drawn}  # each at least once
    chosen = [*firsts.values(), *drawn][:count]
    # Where lent memory is filled with nan, calls have memory of their own: half of the seeds share it.
    with sf.debug(memory=seed % 2 == 0):
        with chaos(mesh, seed) as hold:
            for k, (strategy, how, options) in enumerate(chosen):
                at = root if k % 4 == 1 else None
                found[f"{strategy}, {how}, {options}"] = steps(mesh, want, strategy, how, options, at)
            assert hold.launched
            assert not hold.left
        if n == 2:
            found["narrow"] = narrow(mesh, seed)
        pipe = sf.make_mesh(device="cpu", pipe=2, shard=n // 2)
        with chaos(pipe, seed) as hold:
            found["pipeline"] = pipelined(pipe, sf.stage(block, **dice.choice(OPTIONS)), hold)
    return found


def check(found: list[dict[str, float]], count: int) -> None:
    for one in found:
        assert len(one) >= count
        assert not {name: far for name, far in one.items() if not far < 1e-12}


@pytest.mark.parametrize(("size", "seed", "count"), [(2, 0, 12), (2, 1, 12), (4, 0, 8), (4, 1, 8)])
def test_training_is_that_of_one_process_whatever_the_timing(size: int, seed: int, count: int, tmp_path: Path) -> None:
    check(shared_world(size).run(programs, seed, str(tmp_path), count), count)


def out_of_turn(count: int) -> dict[str, float]:
    """Layers that look ahead by counts of their own: the next slot in turn may be the one in use."""
    mesh, depth = sf.make_mesh(device="cpu", shard=-1), 8
    n, rank, dice = mesh.size(), mesh.get_rank(), random.Random(0)
    flat, found = sf.shard(params(depth), mesh, sf.full_shard("shard")), {}
    want = torch.func.grad(lambda p: loss(block, head, p, batch(0, n).flatten(0, 1)))(params(depth))
    with chaos(mesh):
        for k in range(count):
            # The first is the shortest that needs care: 0, 1, 2, then slot 3 % 2, then 4 % 3.
            ahead = [2, 1, 1, 2, *[2] * 4] if k < 2 else dice.choices(range(4), k=depth)
            f = [sf.stage(block, prefetch=one, remat=dice.choice([True, False])) for one in ahead]
            with sf.debug(memory=k % 2 == 0):
                got = sf.grad(lambda p, f=f: loss(f, sf.stage(head), p, batch(0, n)[rank]))(flat)
            found[f"{k}: {ahead}"] = distance(sf.unshard(got), want)
    return found


@pytest.mark.world(2)
def test_layers_that_look_ahead_by_counts_of_their_own(world: World) -> None:
    check(world.run(out_of_turn, 16), 16)


def switched() -> tuple[int, int]:
    """Buffers that are kept, and messages nobody waited for, after steps that keep parameters or not."""
    mesh = sf.make_mesh(device="cpu", shard=-1)
    flat = sf.shard(params(), mesh, sf.full_shard("shard"))
    with chaos(mesh) as hold:
        options: Any
        for options in ({"reshard": False}, {}, {"reshard": False}, {"remat": True}):
            f, g = sf.stage(block, **options), sf.stage(head, **options)
            sf.grad(lambda p, f=f, g=g: loss(f, g, p, batch(0, 1)[0]))(flat)
        return len(schedule_of(mesh).buffers), len(hold.left)


@pytest.mark.world(2)
def test_what_is_gathered_ahead_for_calls_that_never_come_is_given_back(world: World) -> None:
    assert world.run(switched) == [(0, 0)] * 2


def outgrown() -> bool:
    """A layer is gathered ahead, and larger stages take its slot before it comes."""
    mesh = sf.make_mesh(device="cpu", shard=-1)
    place = sf.full_shard("shard")
    flat = sf.shard(params(), mesh, place)
    f, x = sf.stage(block), batch(0, 1)[0]
    with chaos(mesh), torch.no_grad():
        for p in flat["blocks"]:
            f(p, x)
        order = iter(sf.layers(flat["blocks"]))
        f(next(order), x)
        for large in sf.shard([normal(40, 40, seed=i) for i in range(2)], mesh, place):
            x = sf.stage(lambda p, x: x + p.sum())(large, x)
    return bool(x.isfinite().all())


@pytest.mark.world(2)
def test_what_comes_into_a_slot_that_is_outgrown_is_waited_for(world: World) -> None:
    assert world.run(outgrown) == [True] * 2


def changed_ahead() -> float:
    """A layer's parameters change when they have been gathered already."""
    mesh = sf.make_mesh(device="cpu", shard=-1)
    flat, plain, x = sf.shard(params(), mesh, sf.full_shard("shard")), params(), batch(0, 1)[0]
    f, far = sf.stage(block), []
    with chaos(mesh), torch.no_grad():
        for _ in range(2):
            before: Any = None
            for p, q in zip(sf.layers(flat["blocks"]), plain["blocks"], strict=True):
                if before is not None:
                    optree.tree_map_(lambda t: t.mul_(2), (p, q))
                before = p
                far.append(distance(f(p, x), block(q, x)))
    return worst(far)


@pytest.mark.world(2)
def test_parameters_that_change_when_they_are_gathered_already(world: World) -> None:
    assert worst(world.run(changed_ahead)) < 1e-12


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=24)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for number in range(args.first, args.first + args.seeds):
            for ranks in args.ranks:
                check(shared_world(ranks).with_deadline(300).run(programs, number, place, args.programs), args.programs)
            print(f"seed {number}: right", flush=True)
