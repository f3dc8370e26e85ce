"""Ranks that take part in a stage without computing it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import interop
from shardfn.testing import World, WorldError
from tests.models import STRATEGIES, by_backward, data_mesh, distance, everyone, layer, normal, squares
from tests.reference import worst

D, DEPTH = 4, 3

both_sizes = pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])


def params(depth: int = DEPTH) -> dict[str, Any]:
    ps = squares(2 * depth + 1)
    return {"images": ps[:depth], "texts": ps[depth:-1], "head": ps[-1]}


def texts(rank: int) -> Tensor:
    return normal(3, D, seed=80 + rank)


def images(rank: int, step: int) -> Tensor:
    return normal(3, D, seed=90 + 10 * step + rank)


def users(n: int, step: int) -> set[int]:
    """The ranks that have images at a step."""
    return [set(), {0}, set(range(n)), {n - 1}, set(range(0, n, 2))][step % 5]


def program(stage: Any, ps: Any, rank: int, step: int, n: int, used: str = "", skip: Any = None) -> Tensor:
    """Texts, with images on ranks that have some; the zero that others have is used in place of these, or added."""
    f, uses = stage(layer), rank in users(n, step)
    y = images(rank, step)
    if uses or skip is not None:
        run = f if uses else functools.partial(skip, f)
        for p in sf.layers(ps["images"]):
            y = run(p, y)
    x = texts(rank)
    for p in sf.layers(ps["texts"]):
        x = f(p, x)
    if uses or used == "in place":
        x = x + y
    x = f(ps["head"], x).square().sum()
    return x + y if not uses and used == "added" else x


@functools.cache
def wanted(n: int, step: int) -> Any:
    return torch.func.grad(everyone(lambda ps, k: program(lambda f: f, ps, k, step, n), n))(params())


WAYS: dict[str, Any] = {
    "value_and_grad": lambda loss, flat: sf.value_and_grad(lambda ps: loss(ps, ""))(flat)[1],
    "value_and_grad, added": lambda loss, flat: sf.value_and_grad(lambda ps: loss(ps, "added"))(flat)[1],
    "accumulate": lambda loss, flat: sf.accumulate(lambda ps, b: loss(ps, b) / 2, ["", "in place"])(flat)[1],
    "accumulate, all put off": lambda loss, flat: sf.accumulate(loss, [""], defer="all")(flat)[1],
    "backward": lambda loss, flat: by_backward(lambda ps: loss(ps, "added"), flat)[1],
    "backward, in place": lambda loss, flat: by_backward(lambda ps: loss(ps, "in place"), flat)[1],
    "torch.func.grad": lambda loss, flat: torch.func.grad(lambda ps: loss(ps, "added"))(flat),
}
OPTIONS: list[dict[str, Any]] = [
    {"remat": remat, "prefetch": prefetch} for remat, prefetch in itertools.product((False, True), (0, 1))
]
MORE: list[dict[str, Any]] = [
    {"reshard": False},
    {"remat": "offload"},
    {"remat": [torch.ops.aten.mm.default]},
    {"reshard": "step"},
    {"reshard": False, "remat": True},
    {"prefetch": 2},
]
SIX = ["full_shard", "hybrid_shard", "hpz", "zero1", "shard_grad_op", "ddp"]


def trained(strategy: str) -> dict[str, float]:
    """How far gradients are off, step by step, each with other ranks that skip."""
    n, rank = dist.get_world_size(), dist.get_rank()
    flat = sf.shard(params(), data_mesh(n), STRATEGIES[strategy])
    number, found = SIX.index(strategy), dict[str, Any]()
    ways = itertools.islice(itertools.cycle(WAYS.items()), number, None)
    for options in [*OPTIONS, MORE[number]]:
        stage = functools.cache(functools.partial(sf.stage, **options))
        for name, way in itertools.islice(ways, 2):
            step = len(found)

            def loss(ps: Any, used: str, step: int = step, stage: Any = stage) -> Tensor:
                return program(stage, ps, rank, step, n, used, sf.skip)

            found[f"{name}, {options}"] = distance(sf.unshard(way(loss, flat)), wanted(n, step))
    return found


@pytest.mark.parametrize("strategy", SIX)
@both_sizes
def test_ranks_skip_a_tower_that_they_have_no_use_for(world: World, strategy: str) -> None:
    for found in world.with_deadline(60).run(trained, strategy):
        assert not {how: off for how, off in found.items() if not off < 1e-12}


def transformed() -> dict[str, float]:
    """Derivatives that run what a stage means."""
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh, placement, stage = data_mesh(n), STRATEGIES["full_shard"], functools.cache(sf.stage)
    plain = params()
    v = optree.tree_map(torch.ones_like, plain)
    flat, v_flat = (sf.shard(tree, mesh, placement) for tree in (plain, v))
    found: dict[Any, Any] = {}
    for step in (1, 3):

        def of_rank(ps: Any, k: int, step: int = step) -> Tensor:
            return program(lambda f: f, ps, k, step, n)

        whole = everyone(of_rank, n)

        def loss(ps: Any, step: int = step) -> Tensor:
            return program(stage, ps, rank, step, n, "in place", sf.skip)

        def squares_of(f: Any) -> Any:
            return lambda ps: torch.stack([g.square().sum() for g in optree.tree_leaves(sf.grad(f)(ps))]).sum()

        want, got = torch.func.jvp(sf.grad(whole), (plain,), (v,)), torch.func.jvp(sf.grad(loss), (flat,), (v_flat,))
        found |= {f"{k} of jvp, {step}": distance(sf.unshard(got[k]), want[k]) for k in range(2)}
        twice = sf.grad(squares_of(loss))(flat)
        found[f"grad of grad, {step}"] = distance(sf.unshard(twice), sf.grad(squares_of(whole))(plain))
    return found


@both_sizes
def test_further_derivatives_go_through_what_is_skipped(world: World) -> None:
    for found in world.with_deadline(30).run(transformed):
        assert not {how: off for how, off in found.items() if not off < 1e-12}


def frozen_between(how: str, adapted: bool) -> list[float]:
    """A frozen tower, whose first layer some ranks' images reach through one that is trained."""
    n, rank = dist.get_world_size(), dist.get_rank()
    flat = sf.shard(params(), data_mesh(n), STRATEGIES["full_shard"], frozen=["images.*"])
    stage = functools.cache(sf.stage)

    def loss(f: Any, ps: Any, k: int, step: int, skip: Any) -> Tensor:
        uses, y = k in users(n, step), images(k, step)
        if uses or skip is not None:
            run = f if uses else functools.partial(skip, f)
            for p in [ps["head"]] * adapted + list(sf.layers(ps["images"])) + [ps["texts"][0]]:
                y = run(p, y)
        x = texts(k)
        for p in sf.layers(ps["texts"]):
            x = f(p, x)
        if uses:
            return (x + y).square().sum()
        return x.square().sum() + (y if how == "backward" and skip is not None else 0)

    found = []
    for step in range(5):

        def of_rank(ps: Any, k: int, step: int = step) -> Tensor:
            return loss(layer, ps, k, step, None)

        want = torch.func.grad(everyone(of_rank, n))(params())
        want["images"] = optree.tree_map(lambda _: None, want["images"])
        mine = functools.partial(loss, stage(layer), k=rank, step=step, skip=sf.skip)
        got = by_backward(mine, flat)[1] if how == "backward" else sf.grad(mine)(flat)
        pairs = [(got[name], want[name]) for name in ("texts", "head") if adapted or name == "texts"]
        found += [distance(sf.unshard(one), other) for one, other in pairs]
    return found


@pytest.mark.parametrize("how", ["grad", "backward"])
@pytest.mark.world(2, "processes")
def test_a_frozen_tower_is_skipped(world: World, how: str) -> None:
    for adapted in (False, True):
        assert (
            worst(off for found in world.with_deadline(30).run(frozen_between, how, adapted) for off in found) < 1e-12
        )


def skipped_at_first() -> tuple[int, int]:
    """What backward gathers after a step in which every rank skipped, and where none ever did."""
    n, rank = dist.get_world_size(), dist.get_rank()
    counts = []
    for first in (0, 2):
        flat, f = sf.shard(params(6), data_mesh(n), STRATEGIES["full_shard"]), sf.stage(layer)
        for step in (first, 2):
            with sf.collectives.ledger() as log:
                sf.grad(lambda ps, step=step, f=f: program(lambda _: f, ps, rank, step, n, skip=sf.skip))(flat)
        counts.append(log.count(op="all_gather", backward=True))
    return counts[0], counts[1]


@pytest.mark.world(2, "threads")
def test_what_all_ranks_skip_at_first_is_gathered_as_ever_later(world: World) -> None:
    for after, ever in world.run(skipped_at_first):
        assert after == ever > 0


def infinite() -> list[bool]:
    """Parameters of no finite value make nothing of what is skipped."""
    flat = sf.shard([{"w": torch.full((D, D), torch.inf)}], data_mesh(dist.get_world_size()), STRATEGIES["full_shard"])
    f = sf.stage(lambda p, x: x @ p["w"])
    values = []
    for way in (sf.value_and_grad, lambda loss: torch.func.grad_and_value(loss)):
        one, other = way(lambda ps: sf.skip(f, ps[0]).float())(flat)
        values += [one, other]
    return [bool((x == 0).all()) for x in optree.tree_leaves(values)]


@pytest.mark.world(2, "threads")
def test_a_skipped_stage_is_zero_whatever_its_parameters_are(world: World) -> None:
    for found in world.run(infinite):
        assert all(found)


def neither(at: int) -> None:
    """On the last rank, at one of two steps, a stage is neither called nor skipped."""
    n, rank = dist.get_world_size(), dist.get_rank()
    flat = sf.shard(params(), data_mesh(n), STRATEGIES["full_shard"])
    stage = functools.cache(sf.stage)
    for number in range(2):
        skip = None if rank == n - 1 and number == at else sf.skip
        sf.grad(lambda ps, skip=skip: program(stage, ps, rank, 1, n, skip=skip))(flat)


@pytest.mark.world(2, "processes")
def test_a_rank_that_neither_calls_nor_skips_a_stage_is_told(world: World) -> None:
    with pytest.raises(WorldError, match=r"run the same stages|ranks run different stages|in vain for all_gather"):
        world.with_deadline(30).run(neither, 0)
    with pytest.raises(WorldError, match=r"ranks run different stages|in vain for all_gather"):
        world.with_deadline(30).run(neither, 1)


def test_a_model_without_a_mesh_skips_to_zero() -> None:
    f = sf.stage(layer)
    p = {"w": torch.ones(D, D, requires_grad=True), "b": torch.tensor(1.0, requires_grad=True)}
    zero = sf.skip(f, p, torch.ones(3, D))
    assert (zero.shape, zero.item(), zero.requires_grad) == ((), 0.0, True)
    assert (torch.zeros((), dtype=torch.bfloat16) + zero).dtype == torch.bfloat16


class Skips(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(D, D), torch.nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y + sf.skip(self.second, y)


def test_a_module_that_skips_a_layer_runs_as_plain_torch() -> None:
    module, x = Skips(), torch.ones(3, D)
    assert module(x).equal(module.first(x))
    module(x).sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    assert grads["second.weight"] is not None
    assert not grads["second.weight"].any()
    want = module(x).detach()
    model = interop.functional(module, min_stage_params=2**62)  # loose
    assert model(model.tree, x).equal(want)


def test_only_a_stage_can_be_skipped() -> None:
    f = sf.stage(layer)

    @functools.wraps(f)
    def around(p: Any, x: Tensor) -> Any:
        return f(p, f(p, x))

    wrong: list[Any] = [layer, around, None]
    for one in wrong:
        with pytest.raises(TypeError, match="is not a stage"):
            sf.skip(one, squares(1)[0])
