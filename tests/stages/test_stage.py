"""Stages in free-form programs: whatever plain Python calls them in, values and gradients are the plain function's."""

from __future__ import annotations

import functools
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.testing import World
from tests.models import DATA, ENGINES, STRATEGIES, WIDTH, block, copied, distance, embed, head, params, plainly
from tests.reference import worst
from tests.stages.setting import (
    OPTIONS,
    Program,
    apart,
    everywhere,
    loops,
    on_threads,
    rows_of,
    staged,
    straight,
    tokens_of,
    wanted,
)

pytestmark = pytest.mark.usefixtures("threads_on_one_core")


@functools.cache
def own_loss(program: Program, rank: int, depth: int = 4) -> Tensor:
    return program(plainly, params(depth), rank)


def differences(program: Program, options: dict[str, Any], engines: Any = tuple(ENGINES), depth: int = 4) -> Any:
    """How far a program over shards is from the same over whole parameters, by each way to its gradient; twice."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    n, rank = mesh.size(), mesh.get_rank()
    want, total = wanted(program, n, depth=depth)
    own = own_loss(program, rank, depth)
    flat = sf.shard(params(depth), mesh, sf.full_shard("shard"))
    stages: dict[Any, Any] = {}

    def stage(f: Any, **more: Any) -> Any:
        return stages.setdefault(f, staged(f, **{**options, **more}))

    # Copies, so that each is compared as it was when its run was over.
    runs = {
        (engine.__name__, again): copied(engine(lambda ps: program(stage, ps, rank), flat))
        for engine in engines
        for again in (1, 2)
    }
    gradients = apart({name: gradient for name, (_, gradient) in runs.items()}, want)
    return {
        name: worst([(value - own).abs().item(), gradients[name] / (1 + total.abs().item())])
        for name, (value, _) in runs.items()
    }


def assert_equal(world: World, program: Program, options: dict[str, Any], **more: Any) -> None:
    for found in world.run(differences, program, options, **more):
        for run, off in found.items():
            assert off < 1e-12, run


# --- programs ---


def without_announcing(stage: Any, ps: Any, rank: int) -> Tensor:
    x = stage(embed)(ps["embed"], tokens_of(rank))
    for p in ps["blocks"]:
        x = stage(block)(p, x)
    return stage(head)(ps["head"], x).square().sum()


def the_same_layer_again_and_again(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for _ in range(4):
        x = stage(block)(ps["blocks"][1], x)
    return x.square().sum()


def weight_tying(stage: Any, ps: Any, rank: int) -> Tensor:
    def tied(p: Any, x: Tensor) -> Tensor:
        return x @ p["e"].T

    x = stage(embed)(ps["embed"], tokens_of(rank))
    for p in sf.layers(ps["blocks"]):
        x = stage(block)(p, x)
    unembed = stage(tied) if stage is plainly else sf.stage(tied)
    return unembed(ps["embed"], x).logsumexp(-1).sum()


def two_networks(stage: Any, ps: Any, rank: int) -> Tensor:
    return straight(stage, ps, rank) * loops(stage, ps, rank + 1).sqrt()


def announced_and_not_used(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for i, p in enumerate(sf.layers(ps["blocks"])):
        if i == 2:
            break
        x = stage(block)(p, x)
    return stage(head)(ps["head"], stage(block)(ps["blocks"][3], x)).square().sum()


def announced_and_used_otherwise(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for p, other in zip(sf.layers(ps["blocks"]), reversed(ps["blocks"]), strict=True):
        x = stage(block)(p, x)
        x = stage(block)(other, x)
    return x.square().sum()


def layers_in_layers(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for p in sf.layers(ps["blocks"][:2]):
        for q in sf.layers(ps["blocks"]):
            x = stage(block)(q, x)
        x = stage(block)(p, x)
    return x.square().sum()


def several_shards_in_a_call(stage: Any, ps: Any, rank: int) -> Tensor:
    x = stage(both)(ps["blocks"][0], x=rows_of(rank), q=ps["blocks"][1])
    x = stage(nested)({"a": [ps["blocks"][2], ps["head"]]}, (x, 2))
    return stage(both)(ps["blocks"][0], ps["blocks"][0], x).square().sum()


def both(p: Any, q: Any, x: Tensor) -> Tensor:
    return block(q, block(p, x)) * p["b"].sum()


def nested(p: Any, pair: Any) -> Tensor:
    first, last = p["a"]
    x, k = pair
    return block(first, x) * head(last, x).sum() * k


def outputs_of_all_kinds(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for p in sf.layers(ps["blocks"]):
        out = stage(many)(p, x, k=3, word="tanh", none=None)
        assert out["k"] == 3
        assert out["none"] is None
        assert out["argmax"].dtype == torch.int64
        assert not out["argmax"].requires_grad
        x = out["x"][0] * out["mask"] + out["detached"]
    return x.square().sum()


def many(p: Any, x: Tensor, *, k: int, word: str, none: Any) -> dict[str, Any]:
    y = getattr(torch, word)(block(p, x) * k)
    return {
        "x": (y, y * 2),
        "k": k,
        "none": none,
        "argmax": y.argmax(-1),
        "mask": y > 0,
        "detached": y.detach(),
        "constant": torch.ones(2),
    }


def outputs_that_nobody_uses(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for i, p in enumerate(sf.layers(ps["blocks"])):
        left, right = stage(two)(p, x)
        x = right if i % 2 else left
    stage(block)(ps["blocks"][0], x)
    return x.square().sum()


def two(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return block(p, x), torch.sin(x @ p["w"]) @ p["v"]


def inputs_that_pass_through(stage: Any, ps: Any, rank: int) -> Tensor:
    x = first = rows_of(rank)
    for p in sf.layers(ps["blocks"]):
        same, x, also = stage(passing)(p, x, first)
        x = x * same + also
    return x.square().mean()


def passing(p: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, block(p, x), y.view(-1).view(y.shape)


def views_of_an_input(stage: Any, ps: Any, rank: int) -> Tensor:
    x = stage(block)(ps["blocks"][0], rows_of(rank))
    left, right = stage(halves)(ps["blocks"][1], x)
    return stage(block)(ps["blocks"][2], torch.cat([right, left], -1)).square().sum()


def halves(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, : WIDTH // 2], x[:, WIDTH // 2 :] * p["b"].sum()


def parameters_that_are_not_used(stage: Any, ps: Any, rank: int) -> Tensor:
    x = stage(partly)(ps["blocks"][0], rows_of(rank))
    return stage(not_at_all)(ps["blocks"][1], x).square().sum()


def partly(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"]) @ p["w"].T


def not_at_all(p: Any, x: Tensor) -> Tensor:
    return x.sin()


def no_tensor_but_parameters(stage: Any, ps: Any, rank: int) -> Tensor:
    return stage(norm)(ps["blocks"][0], 2.0 + rank) * stage(norm)(ps["head"], 3)


def norm(p: Any, k: float) -> Tensor:
    return torch.stack([x.abs().pow(k).sum() for x in optree.tree_leaves(p)]).sum()


def branches_by_depth(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    kept = []
    for i, p in enumerate(ps["blocks"]):
        x = stage(block, remat=i == 1)(p, x) if i != 2 else stage(two)(p, x)[1]
        kept.append(x)
    return torch.stack(kept).square().sum()


def gradients_of_inputs_only(stage: Any, ps: Any, rank: int) -> Tensor:
    """A loss of a gradient with respect to activations, first order in each."""
    x = rows_of(rank)
    y = stage(block)(ps["blocks"][0], x)
    z = stage(block)(ps["blocks"][1], y.detach() + 0 * x)
    return (y * z).sum()


def transforms_inside(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for p in sf.layers(ps["blocks"]):
        x = stage(inner)(p, x)
    return x.square().sum()


def inner(p: Any, x: Tensor) -> Tensor:
    def energy(row: Tensor) -> Tensor:
        return torch.tanh(row @ p["w"] + p["b"]).square().sum()

    return torch.func.vmap(torch.func.grad(energy))(x) + torch.func.vmap(lambda row: block(p, row))(x)


def a_module_inside(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for p in sf.layers(ps["blocks"]):
        x = x + stage(linear)(p, x)
    return x.square().sum()


def linear(p: Any, x: Tensor) -> Tensor:
    weights = {"0.weight": p["w"].T, "0.bias": p["b"], "2.weight": p["v"].T}
    module = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 5, device="meta"), torch.nn.Tanh(), torch.nn.Linear(5, WIDTH, bias=False, device="meta")
    )
    return torch.func.functional_call(module, weights, (x,))


def writes_to_an_output(stage: Any, ps: Any, rank: int) -> Tensor:
    x = stage(embed)(ps["embed"], tokens_of(rank))
    for p in sf.layers(ps["blocks"]):
        x = stage(block)(p, x)
        x.mul_(2)
        x[0] += 1
    return x.square().sum()


PROGRAMS = [
    straight,
    without_announcing,
    loops,
    the_same_layer_again_and_again,
    weight_tying,
    two_networks,
    announced_and_not_used,
    announced_and_used_otherwise,
    layers_in_layers,
    several_shards_in_a_call,
    outputs_of_all_kinds,
    outputs_that_nobody_uses,
    inputs_that_pass_through,
    views_of_an_input,
    parameters_that_are_not_used,
    no_tensor_but_parameters,
    branches_by_depth,
    gradients_of_inputs_only,
    transforms_inside,
    a_module_inside,
    writes_to_an_output,
]


@everywhere
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program(world: World, program: Program) -> None:
    assert_equal(world, program, {})


def each_option(program: Program) -> Any:
    return {str(options): worst(differences(program, options).values()) for options in OPTIONS[1:]}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@on_threads
def test_a_program_with_each_option(world: World, program: Program) -> None:
    for found in world.run(each_option, program):
        for options, off in found.items():
            assert off < 1e-12, options


PLACEMENTS = {
    **{name: STRATEGIES[name] for name in ("hybrid_shard", "hybrid_shard_zero2", "full_shard", "shard_grad_op", "ddp")},
    "full_shard, turned": sf.full_shard(DATA[::-1]),
    "ddp, turned": sf.ddp(DATA[::-1]),
}


def on_placements(program: Program, sizes: dict[str, int]) -> Any:
    mesh = sf.make_mesh(**sizes, device="cpu")
    n, rank = mesh.size(), mesh.get_rank()
    want, found = wanted(program, n)[0], {}
    for name, placement in PLACEMENTS.items():
        flat = sf.shard(params(), mesh, placement)
        gradients = {f.__name__: copied(f(lambda ps: program(sf.stage, ps, rank), flat)[1]) for f in ENGINES}
        found[name] = apart(gradients, want)
    return found


@pytest.mark.parametrize("sizes", [{"replica": 2, "shard": 2}, {"shard": 4, "replica": 1}, {"replica": 4, "shard": 1}])
@pytest.mark.parametrize("world", [(4, "processes"), (4, "threads")], indirect=True, ids=["4", "4-threads"])
def test_a_placement_changes_no_gradient(world: World, sizes: dict[str, int]) -> None:
    for found in world.run(on_placements, straight, sizes):
        for placement, engines in found.items():
            for engine, off in engines.items():
                assert off < 1e-12, (placement, engine)


def on_one_rank() -> Any:
    mesh = sf.make_mesh(shard=1, replica=1, device="cpu")
    plain = params()
    found = {}
    for strategy in (sf.full_shard("shard"), sf.ddp("replica"), sf.hybrid_shard(shard="shard", replica="replica")):
        for engine in ENGINES:
            flat = sf.shard(plain, mesh, strategy)
            with sf.collectives.ledger() as log:
                got = engine(lambda ps: straight(sf.stage, ps, 0), flat)[1]
            assert not log.records
            want = torch.func.grad(lambda ps: straight(plainly, ps, 0))(plain)
            found[str(strategy), engine.__name__] = distance(sf.unshard(got), want)
    return found


@pytest.mark.world(1, "threads")
def test_on_one_rank_nothing_moves(world: World) -> None:
    assert worst(world.run(on_one_rank)[0].values()) < 1e-12


def test_whole_parameters_need_no_process_group() -> None:
    assert not dist.is_initialized()
    plain = params()
    for options in OPTIONS:
        value, gradient = sf.value_and_grad(lambda ps: straight(lambda f: staged(f, **options), ps, 0))(plain)  # noqa: B023
        want, by_autograd = sf.value_and_grad(lambda ps: straight(plainly, ps, 0))(plain)
        assert torch.equal(value, want)
        assert distance(gradient, by_autograd) == 0
    assert sf.stage(straight)(plainly, plain, 0) == straight(plainly, plain, 0)


def test_a_stage_keeps_the_name_of_its_function_and_is_a_decorator() -> None:
    @sf.stage(remat=True)
    def one(p: Any) -> Any:
        """The first."""
        return p

    @sf.stage
    def other(p: Any) -> Any:
        return p

    assert (one.__name__, one.__doc__, other.__name__) == ("one", "The first.", "other")
    assert one(3) == other(3) == 3
