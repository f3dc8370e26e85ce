"""Stages in free-form programs: whatever plain Python calls them in, values and gradients are the plain function's."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import shardfn as sf
from shardfn.testing import World
from tests.reference import worst

D = 4
ROWS = 3
Program = Callable[[Any, Any, Any], Tensor]

everywhere = pytest.mark.parametrize("world", [(2, "processes"), (4, "threads")], indirect=True, ids=["2", "4-threads"])
on_threads = pytest.mark.world(2, "threads")


@pytest.fixture(autouse=True)
def threads_on_one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that are threads take turns anyway; on several cores, waking each other costs as much as what they do."""
    if "world" not in request.fixturenames or request.getfixturevalue("world").kind != "threads":
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


# --- a model, its data, and what all ranks' losses together have as their gradient ---


def embed(p: Any, tokens: Tensor) -> Tensor:
    return p["e"][tokens]


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"]) @ p["v"]


def head(p: Any, x: Tensor) -> Tensor:
    return x @ p["o"]


def params(depth: int = 4, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) / 2).to(dtype)

    return {
        "embed": {"e": normal(7, D)},
        "blocks": [{"w": normal(D, 5), "b": normal(5), "v": normal(5, D)} for _ in range(depth)],
        "head": {"o": normal(D, 3)},
    }


def tokens_of(rank: int) -> Tensor:
    return torch.randint(0, 7, (ROWS,), generator=torch.Generator().manual_seed(100 + rank))


def rows_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(200 + rank)
    return torch.randn(ROWS, D, generator=generator, dtype=torch.float64).to(dtype)


def everyone(f: Callable[[Any, int], Tensor], n: int) -> Callable[[Any], Tensor]:
    """The sum of all ranks' losses, of which sharded parameters get the gradient."""
    return lambda ps: torch.stack([f(ps, rank) for rank in range(n)]).sum()


def distance(got: Any, want: Any) -> float:
    """The largest difference between two trees of one structure."""
    (a, one), (b, other) = optree.tree_flatten(got), optree.tree_flatten(want)
    assert one == other, (one, other)
    assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in zip(a, b, strict=True))
    return worst([0.0, *((x - y).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel())])


def copied(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def apart(found: dict[Any, Any], want: Any) -> dict[Any, float]:
    """How far gradients, as shards, are from one over whole parameters: the first by itself, the others through it."""
    first = next(iter(found.values()))
    off = distance(sf.unshard(first), want)
    return {name: off + distance(gradient, first) for name, gradient in found.items()}


def by_value_and_grad(loss: Any, flat: Any) -> Any:
    return sf.value_and_grad(loss)(flat)


def by_backward(loss: Any, flat: Any) -> Any:
    leaves = optree.tree_map(lambda x: x.clone().requires_grad_(), flat)
    value = loss(leaves)
    value.backward()
    zero = torch.zeros_like
    return value.detach(), optree.tree_map(lambda x: zero(x) if x.grad is None else x.grad, leaves)


def by_torch_func(loss: Any, flat: Any) -> Any:
    gradient, value = torch.func.grad_and_value(loss)(flat)
    return value, gradient


ENGINES = [by_value_and_grad, by_backward, by_torch_func]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"remat": True},
    {"remat": "mm"},
    {"remat": "offload"},
    {"reshard": False},
    {"prefetch": 0},
    {"prefetch": 3, "remat": True},
    {"reshard": False, "remat": True},
]


def plainly(f: Any = None, **_: Any) -> Any:
    return f


def staged(f: Any, **options: Any) -> Any:
    """`sf.stage`; operators, which cannot be pickled, by their name."""
    if options.get("remat") == "mm":
        options["remat"] = [torch.ops.aten.mm.default]
    return sf.stage(f, **options)


@functools.cache
def wanted(program: Program, n: int, shifts: tuple[int, ...] = (0,), depth: int = 4) -> tuple[Any, Tensor]:
    """The gradient of all ranks' losses together, each with the data of these shifts, and what they add up to."""
    total = everyone(lambda ps, k: torch.stack([program(plainly, ps, k + shift) for shift in shifts]).sum(), n)
    gradient, value = torch.func.grad_and_value(total)(params(depth))
    return gradient, value


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


def straight(stage: Any, ps: Any, rank: int) -> Tensor:
    x = stage(embed)(ps["embed"], tokens_of(rank))
    for p in sf.layers(ps["blocks"]):
        x = stage(block)(p, x)
    return stage(head)(ps["head"], x).square().sum()


def without_announcing(stage: Any, ps: Any, rank: int) -> Tensor:
    x = stage(embed)(ps["embed"], tokens_of(rank))
    for p in ps["blocks"]:
        x = stage(block)(p, x)
    return stage(head)(ps["head"], x).square().sum()


def loops(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for _ in range(3):
        for p in sf.layers(ps["blocks"]):
            x = stage(block)(p, x)
    return x.square().sum()


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
    return x[:, : D // 2], x[:, D // 2 :] * p["b"].sum()


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
        torch.nn.Linear(D, 5, device="meta"), torch.nn.Tanh(), torch.nn.Linear(5, D, bias=False, device="meta")
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


def placements(mesh: Any) -> list[Any]:
    whole = ("replica", "shard")
    return [
        sf.hybrid_shard("shard", "replica"),
        sf.hybrid_shard_zero2("shard", "replica"),
        sf.full_shard(whole),
        sf.full_shard(whole[::-1]),
        sf.shard_grad_op(whole),
        sf.ddp(whole),
        sf.ddp(whole[::-1]),
    ]


def on_placements(program: Program, sizes: dict[str, int]) -> Any:
    mesh = sf.make_mesh(**sizes, device="cpu")
    n, rank = mesh.size(), mesh.get_rank()
    want, found = wanted(program, n)[0], {}
    for placement in placements(mesh):
        flat = sf.shard(params(), mesh, placement)
        gradients = {f.__name__: copied(f(lambda ps: program(sf.stage, ps, rank), flat)[1]) for f in ENGINES}
        found[str(placement)] = apart(gradients, want)
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
    for strategy in (sf.full_shard("shard"), sf.ddp("replica"), sf.hybrid_shard("shard", "replica")):
        for engine in ENGINES:
            flat = sf.shard(plain, mesh, strategy)
            with sf.ledger() as log:
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


# --- forward and backward in other orders ---


class Setting:
    """Shards as leaves on this rank, and what the whole parameters give."""

    def __init__(self, depth: int = 4, **options: Any) -> None:
        self.mesh = sf.make_mesh(shard=-1, device="cpu")
        self.n, self.rank = self.mesh.size(), self.mesh.get_rank()
        self.depth, self.plain = depth, params(depth)
        self.flat = sf.shard(self.plain, self.mesh, sf.full_shard("shard"))
        self.leaves = optree.tree_map(lambda x: x.clone().requires_grad_(), self.flat)
        self.stages: dict[Any, Any] = {}
        self.options = options

    def stage(self, f: Any) -> Any:
        return self.stages.setdefault(f, staged(f, **self.options))

    def want(self, program: Any, *numbers: int) -> Any:
        """The gradient of the sum of a program's losses on each of these shifts of the ranks' data."""
        return wanted(program, self.n, numbers or (0,), self.depth)[0]

    def left(self) -> Any:
        """What `backward` left on the leaves, which it takes away."""
        found = optree.tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, self.leaves)
        for leaf in optree.tree_leaves(self.leaves):
            leaf.grad = None
        return found

    def collected(self) -> Any:
        """The same, whole."""
        return sf.unshard(self.left())

    def clean_step(self) -> float:
        """How far a step from here on is off."""
        _, gradient = sf.value_and_grad(lambda ps: straight(self.stage, ps, self.rank))(self.flat)
        straight(self.stage, self.leaves, self.rank).backward()
        return worst(apart({"value_and_grad": gradient, "backward": self.left()}, self.want(straight)).values())


def two_forwards(order: tuple[int, ...], options: dict[str, Any]) -> Any:
    s = Setting(**options)
    losses = [straight(s.stage, s.leaves, s.rank + k) for k in range(len(order))]
    found: dict[Any, float] = {}
    for k in order:
        losses[k].backward()
        found[k] = distance(s.collected(), s.want(straight, k))
    found["clean"] = s.clean_step()
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_threads
def test_forwards_before_backwards_in_any_order(world: World, order: Any, options: Any) -> None:
    for found in world.run(two_forwards, order, options):
        assert worst(found.values()) < 1e-12, found


def interleaved() -> Any:
    s = Setting()
    first = straight(s.stage, s.leaves, s.rank)
    second = straight(s.stage, s.leaves, s.rank + 1)
    second.backward()
    third = straight(s.stage, s.leaves, s.rank + 2)
    first.backward()
    with torch.no_grad():
        straight(s.stage, s.leaves, s.rank + 3)
    third.backward()
    return distance(s.collected(), s.want(straight, 0, 1, 2))


@everywhere
def test_forwards_and_backwards_interleave(world: World) -> None:
    assert worst(world.run(interleaved)) < 1e-12


def half_backward() -> Any:
    """Backward of a part of the calls, and of the rest later."""
    s = Setting()
    ps, stage = s.leaves, s.stage
    x = stage(embed)(ps["embed"], tokens_of(s.rank))
    cut = stage(block)(ps["blocks"][0], x)
    middle = cut.detach().requires_grad_()
    y = middle
    for p in sf.layers(ps["blocks"][1:]):
        y = stage(block)(p, y)
    stage(head)(ps["head"], y).square().sum().backward()
    again = straight(stage, s.leaves, s.rank + 1)
    cut.backward(middle.grad)
    again.backward()
    return distance(s.collected(), s.want(straight, 0, 1))


@everywhere
def test_a_backward_in_pieces(world: World) -> None:
    assert worst(world.run(half_backward)) < 1e-12


def forward_alone(context: str, options: dict[str, Any]) -> Any:
    s = Setting(**options)
    own = straight(plainly, s.plain, s.rank)
    contexts: dict[str, Any] = {"nothing": torch.enable_grad, "no_grad": torch.no_grad}
    found = []
    for leaves in (s.flat, s.leaves):
        for _ in range(2):
            with contexts.get(context, torch.inference_mode)():
                loss = straight(s.stage, leaves, s.rank)
                assert loss.is_inference() == (context == "inference_mode")
                assert loss.requires_grad == (context == "nothing" and leaves is s.leaves)
                found.append((loss - own).abs().item())
            del loss
        found.append(s.clean_step())
    return worst(found)


@pytest.mark.parametrize("context", ["nothing", "no_grad", "inference_mode"])
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@on_threads
def test_a_forward_without_backward_disturbs_nothing(world: World, context: str, options: Any) -> None:
    assert worst(world.run(forward_alone, context, options)) < 1e-12


def made_in_inference_mode() -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    plain = params()
    with torch.inference_mode():
        flat = sf.shard(plain, mesh, sf.full_shard("shard"))
        losses = [straight(sf.stage, flat, mesh.get_rank()) for _ in range(2)]
        for leaf in optree.tree_leaves(flat):
            leaf.mul_(2)
        losses.append(straight(sf.stage, flat, mesh.get_rank()))
    twice = straight(plainly, optree.tree_map(lambda x: 2 * x, plain), mesh.get_rank())
    own = straight(plainly, plain, mesh.get_rank())
    return [(a - b).abs().item() for a, b in zip(losses, [own, own, twice], strict=True)]


@everywhere
def test_shards_made_in_inference_mode(world: World) -> None:
    assert worst(one for found in world.run(made_in_inference_mode) for one in found) < 1e-12


def parameters_change(options: dict[str, Any], how: str) -> Any:
    """Steps of gradient descent; the shards are written in place, or are other tensors each time."""
    s = Setting(**options)
    leaves, plain = s.flat, s.plain
    found = []
    for _ in range(4):
        _, gradient = sf.value_and_grad(lambda ps: straight(s.stage, ps, s.rank))(leaves)
        want = torch.func.grad(everyone(lambda ps, k: straight(plainly, ps, k), s.n))(plain)
        found.append(distance(sf.unshard(gradient), want))
        plain = optree.tree_map(lambda p, g: p - 0.01 * g, plain, want)
        if how == "in place":
            optree.tree_map_(lambda p, g: p.sub_(0.01 * g), leaves, gradient)
        elif how == "through data":
            optree.tree_map_(lambda p, g: p.data.copy_(p - 0.01 * g), leaves, gradient)
        else:
            leaves = optree.tree_map(lambda p, g: p - 0.01 * g, leaves, gradient)
    with torch.no_grad():
        found.append((straight(s.stage, leaves, s.rank) - straight(plainly, plain, s.rank)).abs().item())
    return worst(found)


@pytest.mark.parametrize("how", ["in place", "through data", "out of place"])
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@on_threads
def test_parameters_that_change_between_steps_are_gathered_anew(world: World, how: str, options: Any) -> None:
    assert worst(world.run(parameters_change, options, how)) < 1e-11


def changed_between_forwards() -> Any:
    s = Setting()
    found = []
    with torch.no_grad():
        for k in range(3):
            factor = 1.0 + k
            flat = optree.tree_map(lambda x: x * factor, s.flat)  # noqa: B023
            plain = optree.tree_map(lambda x: x * factor, s.plain)  # noqa: B023
            found.append((straight(s.stage, flat, s.rank) - straight(plainly, plain, s.rank)).abs().item())
            optree.tree_map_(lambda x: x.neg_(), flat)
            negative = optree.tree_map(lambda x: -x, plain)
            found.append((straight(s.stage, flat, s.rank) - straight(plainly, negative, s.rank)).abs().item())
            del flat
    return worst(found)


@everywhere
def test_forwards_see_the_parameters_of_the_moment(world: World) -> None:
    assert worst(world.run(changed_between_forwards)) < 1e-12


def retained(options: dict[str, Any]) -> Any:
    s = Setting(**options)
    loss = straight(s.stage, s.leaves, s.rank)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    other = loops(s.stage, s.leaves, s.rank)
    loss.backward()
    other.backward()
    once = s.want(straight)
    also = s.want(loops)
    return distance(s.collected(), optree.tree_map(lambda a, b: 3 * a + b, once, also))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_threads
def test_a_retained_graph_goes_backward_again(world: World, options: Any) -> None:
    assert worst(world.run(retained, options)) < 1e-11


def freed_graph() -> Any:
    s = Setting()
    loss = straight(s.stage, s.leaves, s.rank)
    loss.backward()
    loss.backward()


@on_threads
def test_a_graph_that_is_gone_says_so_as_torch_does(world: World) -> None:
    for error in world.errors(freed_graph):
        assert "retain_graph" in str(error)


def some_gradients(options: dict[str, Any]) -> Any:
    """Only those asked for: of one layer, of the input, of a layer twice."""
    s = Setting(**options)
    x = rows_of(s.rank).requires_grad_()

    def net(stage: Any, blocks: Any, x: Tensor) -> Tensor:
        for p in sf.layers(blocks):
            x = stage(block)(p, x)
        return x.square().sum()

    loss = net(s.stage, s.leaves["blocks"], x)
    chosen = s.leaves["blocks"][2]
    g, gx = torch.autograd.grad(loss, [chosen.values, x])

    def joint(p: Any) -> Tensor:
        blocks = [*s.plain["blocks"][:2], p, *s.plain["blocks"][3:]]
        return torch.stack([net(plainly, blocks, rows_of(k)) for k in range(s.n)]).sum()

    want = torch.func.grad(joint)(s.plain["blocks"][2])
    wanted = torch.func.grad(lambda x: net(plainly, s.plain["blocks"], x))(x.detach())
    only = torch.func.grad(lambda x: net(s.stage, s.flat["blocks"], x))(x.detach())
    own = sf.grad(lambda ps, x: net(s.stage, ps, x), argnums=1)(s.flat["blocks"], x.detach())
    return worst(
        [
            distance(sf.unshard(sf.FlatShard(g, chosen.layout)), want),
            *(distance(one, wanted) for one in (gx, only, own)),
        ]
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_threads
def test_only_the_gradients_that_are_asked_for(world: World, options: Any) -> None:
    assert worst(world.run(some_gradients, options)) < 1e-12


def one_leaf_of_many() -> Any:
    """Only some leaves need gradients; the other shards are data."""
    s = Setting()
    mixed = {**s.flat, "head": s.leaves["head"], "blocks": [s.leaves["blocks"][0], *s.flat["blocks"][1:]]}
    with sf.ledger() as log:
        straight(s.stage, mixed, s.rank).backward()
    want = s.want(straight)
    blank = optree.tree_map(torch.zeros_like, want)
    want = {**blank, "head": want["head"], "blocks": [want["blocks"][0], *blank["blocks"][1:]]}
    return distance(s.collected(), want), log.count(op="reduce_scatter")


@everywhere
def test_shards_that_need_no_gradient_send_none(world: World) -> None:
    for off, scattered in world.run(one_leaf_of_many):
        assert off < 1e-12
        assert scattered == 2


# --- exceptions ---


class Interrupted(Exception):
    pass


def interrupted(where: str, options: dict[str, Any]) -> Any:
    s = Setting(**options)

    def failing(p: Any, x: Tensor) -> Tensor:
        y = block(p, x)
        if where == "in a stage" or (where == "when recomputed" and count["calls"]):
            raise Interrupted
        count["calls"] += 1
        return Fragile.apply(y) if where == "in backward" else y

    count = {"calls": 0}
    bad = sf.stage(failing, **options)

    def program(ps: Any) -> Tensor:
        x = s.stage(embed)(ps["embed"], tokens_of(s.rank))
        for i, p in enumerate(sf.layers(ps["blocks"])):
            if i == 2 and where == "between stages":
                raise Interrupted
            x = (bad if i == 2 else s.stage(block))(p, x)
        return s.stage(head)(ps["head"], x).square().sum()

    found = []
    for engine in ENGINES:
        for _ in range(2):
            count["calls"] = 0
            try:
                engine(program, s.flat)
            except Interrupted:
                found.append(s.clean_step())
    return found


class Fragile(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise Interrupted


@pytest.mark.parametrize("where", ["in a stage", "between stages", "in backward", "when recomputed"])
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"reshard": False}, {"prefetch": 2}], ids=str)
@on_threads
def test_after_an_exception_the_next_step_is_clean(world: World, where: str, options: Any) -> None:
    if where == "when recomputed" and not options.get("remat"):
        options = {**options, "remat": True}
    for found in world.run(interrupted, where, options):
        assert len(found) == 2 * len(ENGINES)
        assert worst(found) < 1e-12


@pytest.mark.world(2)
@pytest.mark.parametrize("where", ["in a stage", "between stages", "in backward"])
def test_after_an_exception_the_next_step_is_clean_on_processes(world: World, where: str) -> None:
    for found in world.run(interrupted, where, {}):
        assert worst(found) < 1e-12


# --- refusals ---

W = torch.ones(D, 5, dtype=torch.float64)


def outer_stage(p: Any, x: Tensor) -> Tensor:
    return sf.stage(block)(p, x)


def writing(p: Any, x: Tensor) -> Tensor:
    p["b"].add_(1)
    return x @ p["w"]


def writing_under_no_grad(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        p["b"].add_(1)
    return x @ p["w"]


REFUSED: dict[str, tuple[Any, str]] = {
    "the parameter": (lambda p, x: p["w"], "returns a parameter, or a view of one"),
    "a view": (lambda p, x: (x, {"y": p["w"].T[0]}), "returns a parameter, or a view of one"),
    "an expanded view": (lambda p, x: p["b"].expand(3, 5), "returns a parameter, or a view of one"),
    "a detached view": (lambda p, x: (x * 1, p["b"].detach()), "returns a parameter, or a view of one"),
    "a write": (writing, "writes into its parameters"),
    "a write under no_grad": (writing_under_no_grad, "writes into its parameters"),
    "an out argument": (
        lambda p, x: torch.add(x[:1, :1], torch.ones(5), out=p["b"].detach()[None]),
        "writes into its parameters",
    ),
}


def refused(name: str, needs: bool, options: dict[str, Any]) -> Any:
    s = Setting(**options)
    p = (s.leaves if needs else s.flat)["blocks"][0]
    f = REFUSED[name][0]
    try:
        sf.stage(f, **options)(p, rows_of(s.rank))
    except RuntimeError as error:
        return str(error), s.clean_step()
    return "nothing", s.clean_step()


@pytest.mark.parametrize("needs", [True, False], ids=["leaves", "values"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@pytest.mark.parametrize("world", [(1, "threads"), (2, "threads")], indirect=True, ids=["1", "2"])
def test_what_a_stage_must_not_do_is_refused(world: World, name: str, needs: bool, options: Any) -> None:
    for message, off in world.run(refused, name, needs, options):
        assert REFUSED[name][1] in message
        assert "blocks.0" in message
        # On one rank the shard is the parameters, and what was written stays.
        assert off < 1e-12 or (world.size == 1 and "writes" in message)


def nested_stage() -> Any:
    s = Setting()
    found = []
    for p in (s.flat["blocks"][0], s.leaves["blocks"][0]):
        for f in (outer_stage, lambda p, x, q=s.flat["blocks"][1]: sf.stage(block)(q, block(p, x))):
            try:
                sf.stage(f)(p, rows_of(s.rank))
            except RuntimeError as error:
                found.append(str(error))
    # the stage inside meets whole parameters in the first case: it is a plain function there
    return found, s.clean_step()


@on_threads
def test_a_stage_inside_a_stage_is_refused(world: World) -> None:
    for messages, off in world.run(nested_stage):
        assert len(messages) == 2
        assert all("inside stage" in message for message in messages)
        assert off < 1e-12


CLOSED_OVER = [
    "a leaf", "an activation", "returned", "torch.func", "nothing else needs one", "value_and_grad",
    "an outer gradient",
]  # fmt: skip


def closing_over(how: str, options: dict[str, Any]) -> Any:
    s = Setting(**options)
    p, x = s.leaves["blocks"][0], rows_of(s.rank)
    if how == "a leaf":
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        sf.stage(lambda p, x: block(p, x) * scale, **options)(p, x).sum().backward()
    elif how == "an activation":
        scale = sf.stage(block)(p, x)
        sf.stage(lambda p, x: block(p, x) * scale, **options)(p, x).sum().backward()
    elif how == "returned":
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        sf.stage(lambda p, x: (block(p, x), scale), **options)(p, x)[0].sum().backward()
    elif how == "torch.func":

        def loss(scale: Tensor) -> Tensor:
            return sf.stage(lambda p, x: block(p, x) * scale, **options)(s.flat["blocks"][0], x).sum()

        torch.func.grad(loss)(torch.ones((), dtype=torch.float64))
    elif how == "nothing else needs one":
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        sf.stage(lambda p, x: block(p, x) * scale, **options)(s.flat["blocks"][0], x)
    elif how == "value_and_grad":

        def of_scale(scale: Tensor) -> Tensor:
            return sf.stage(lambda p, x: block(p, x) * scale, **options)(s.flat["blocks"][0], x).sum()

        sf.grad(of_scale)(torch.ones((), dtype=torch.float64))
    elif how == "an outer gradient":

        def outer(scale: Tensor) -> Tensor:
            def inner(p: Any) -> Tensor:
                two = torch.tensor(2.0) * scale  # a constant here, and not outside
                return sf.stage(lambda p, x: block(p, x) * two, **options)(p, x).sum()

            return optree.tree_leaves(torch.func.grad(inner)(s.flat["blocks"][0]))[0].sum()

        torch.func.grad(outer)(torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("how", [*CLOSED_OVER])
@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@on_threads
def test_a_tensor_closed_over_that_needs_a_gradient_is_refused(world: World, how: str, options: Any) -> None:
    for error in world.errors(closing_over, how, options):
        assert "not among its arguments" in str(error)


CONSTANTS: dict[str, Callable[[Any], Tensor]] = {
    "computed": lambda p: torch.arange(D).double() * 2,
    "detached": lambda p: optree.tree_leaves(p)[0].detach().new_ones(D) * 3,
    "made without gradients": torch.no_grad()(lambda p: torch.ones(D).double().sin()),
    "written to": lambda p: torch.zeros(D).double().add_(1.5),
}


def constants(options: dict[str, Any]) -> list[float]:
    """A stage closes over numbers that the loss computed inside the transform."""
    s = Setting(**options)
    p, x, off = s.flat["blocks"][0], rows_of(0), []
    plain = {name: value.clone() for name, value in s.plain["blocks"][0].items()}
    for made in CONSTANTS.values():

        def loss(p: Any, stage: Any = sf.stage, made: Any = made) -> Tensor:
            c = made(p)
            return stage(lambda p, x: block(p, x) * c)(p, x).square().sum()

        got = sf.unshard(torch.func.grad(loss)(p))
        want = torch.func.grad(lambda p, loss=loss: s.n * loss(p, lambda f: f))(plain)
        off.append(worst((got[name] - want[name]).abs().max().item() for name in plain))
    return off


@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@on_threads
def test_a_constant_of_a_transform_may_be_closed_over(world: World, options: Any) -> None:
    for off in world.run(constants, options):
        assert worst(off) < 1e-12


def misuse(how: str) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    plain = params()
    flat = sf.shard(plain, mesh, sf.full_shard("shard"), frozen=["blocks.0.w"])
    f, x = sf.stage(block), rows_of(0)
    p = flat["blocks"][1]
    match how:
        case "shape":
            return f(sf.FlatShard(p.values[:-1], p.layout), x)
        case "stack":
            return f(sf.FlatShard(torch.stack([p.values] * 2), p.layout), x)
        case "no tensor":
            return f(sf.FlatShard(3, p.layout), x)  # type: ignore[arg-type]
        case "one of two":
            return f(next(iter(flat["blocks"][0].values())), x)
        case "another mesh":
            other = sf.make_mesh(data=-1, device="cpu")
            q = sf.shard(plain, other, sf.full_shard("data"))["blocks"][0]
            return sf.stage(both)(p, q, x)
        case "sparse input":
            return f(p, x.to_sparse())
        case "sparse output":
            return sf.stage(lambda p, x: (x, (x @ p["w"]).to_sparse()))(p, x)
    raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("shape", ValueError, "blocks.1.*holds shape.*but its piece is"),
        ("stack", ValueError, "torch.func.vmap"),
        ("no tensor", TypeError, "blocks.1.*holds int, not a tensor"),
        ("one of two", ValueError, "blocks.0.*came alone"),
        ("another mesh", ValueError, "different meshes.*blocks.1.*blocks.0"),
        ("sparse input", TypeError, r"blocks.1.*shape \(3, 4\).*sparse.*to_dense"),
        ("sparse output", TypeError, "blocks.1.*returns a sparse tensor.*output.*to_dense"),
    ],
)
@on_threads
def test_arguments_that_make_no_sense_are_refused(world: World, how: str, kind: type, message: str) -> None:
    for error in world.errors(misuse, how):
        with pytest.raises(kind, match=message):
            raise error or AssertionError("nothing")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"remat": "everything"}, TypeError),
        ({"remat": None}, TypeError),
        ({"remat": []}, TypeError),
        ({"remat": 1}, TypeError),
        ({"prefetch": -1}, ValueError),
        ({"prefetch": 1.5}, ValueError),
        ({"prefetch": True}, ValueError),
        ({"gather_dtype": torch.int32}, TypeError),
        ({"reduce_dtype": "bfloat16"}, TypeError),
        ({"input_dtype": 16}, TypeError),
        ({"output_dtype": torch.bool}, TypeError),
        ({"gather_dtype": torch.float8_e4m3fn}, ValueError),
        ({"reduce_dtype": torch.float8_e5m2}, ValueError),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: Any, kind: type) -> None:
    with pytest.raises(kind, match=next(iter(options))):
        sf.stage(block, **options)


# --- shards of several kinds in one stage ---


def mixed_params() -> Any:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2

    return [
        {
            "w": normal(D, D),
            "scale": normal(D).float(),
            "base": normal(D, D),
            "ids": torch.randperm(D, generator=generator),
            "phase": torch.complex(normal(D), normal(D)),
            "flag": torch.tensor([True, False, True, True]),
        }
        for _ in range(3)
    ]


def mixed_layer(p: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x[:, p["ids"]] @ (p["w"] + p["base"])) * p["scale"].double()
    return torch.where(p["flag"], y, (x * p["phase"]).abs())


def mixed_kinds(options: dict[str, Any], how: str) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    n, rank = mesh.size(), mesh.get_rank()
    plain = mixed_params()
    flat = sf.shard(plain, mesh, sf.full_shard("shard"), frozen=[".*base"])
    assert set(flat[0]) == {"float64", "float32", "complex128", "float64 frozen", "int64 frozen", "bool frozen"}
    f = staged(mixed_layer, **options)

    def net(f: Any, ps: Any, k: int) -> Tensor:
        x = rows_of(k)
        for p in sf.layers(ps):
            x = f(p, x)
        return x.square().sum()

    chosen = ["w", "scale", "phase"]

    def joint(trained: Any) -> Tensor:
        ps = [{**p, **t} for p, t in zip(plain, trained, strict=True)]
        return everyone(lambda ps, k: net(mixed_layer, ps, k), n)(ps)

    want = sf.grad(joint)([{name: p[name] for name in chosen} for p in plain])
    with sf.ledger() as log:
        if how == "value_and_grad":
            gradient = sf.grad(lambda ps: net(f, ps, rank))(flat)
        else:
            leaves = [
                {k: sf.FlatShard(v.values.clone().requires_grad_(v.layout.trainable), v.layout) for k, v in p.items()}
                for p in flat
            ]
            net(f, leaves, rank).backward()
            gradient = optree.tree_map(lambda x: x.grad, leaves)
    assert all(g[key].values is None for g in gradient for key in g if "frozen" in key)
    got = sf.unshard([{key: g[key] for key in g if "frozen" not in key} for g in whole_again(gradient, flat)])
    loose = worst((g["scale"] - w["scale"]).abs().max().item() for g, w in zip(got, want, strict=True))
    tight = worst((g[k] - w[k]).abs().max().item() for g, w in zip(got, want, strict=True) for k in ("w", "phase"))
    scattered = Counter(one.dtype for one in log.select(op="reduce_scatter"))
    return tight, loose, scattered, sum(1 for one in log.select(op="reduce_scatter") if not one.scheduled)


def whole_again(gradient: Any, flat: Any) -> Any:
    """With the shards themselves where there is no gradient, so that all of a stage is there."""
    return optree.tree_map(
        lambda g, p: p if g.values is None else g, gradient, flat, is_leaf=lambda x: isinstance(x, sf.FlatShard)
    )


@pytest.mark.parametrize("how", ["value_and_grad", "backward"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_threads
def test_a_stage_of_several_dtypes_with_frozen_parameters(world: World, options: Any, how: str) -> None:
    for tight, loose, scattered, others in world.run(mixed_kinds, options, how):
        assert tight < 1e-12
        assert loose < 1e-5
        assert sum(scattered.values()) == 9
        assert others == 0


# --- random numbers ---


def noisy(p: Any, x: Tensor) -> Tensor:
    x = F.dropout(block(p, x), 0.5)
    return x + 0.1 * torch.randn(x.shape, dtype=x.dtype) * p["b"].sum()


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def with_noise(options: dict[str, Any], policy: bool = False) -> Any:
    s = Setting()
    more = {**options, "remat": keep_products} if policy else options
    f = staged(noisy, **more)

    def net(f: Any, ps: Any, x: Tensor) -> Tensor:
        for p in sf.layers(ps):
            x = f(p, x)
        return x.square().sum()

    def joint(ps: Any) -> Tensor:
        losses = []
        for k in range(s.n):
            torch.manual_seed(k)
            losses.append(net(noisy, ps, rows_of(k)))
        return torch.stack(losses).sum()

    want = sf.grad(joint)(s.plain["blocks"])
    found = []
    for engine in ENGINES:
        torch.manual_seed(s.rank)
        gradient = engine(lambda ps: net(f, ps, rows_of(s.rank)), s.flat["blocks"])[1]
        after = torch.get_rng_state()
        torch.manual_seed(s.rank)
        net(noisy, s.plain["blocks"], rows_of(s.rank))
        assert torch.equal(torch.get_rng_state(), after), "as many random numbers as the plain function draws"
        found.append(distance(sf.unshard(gradient), want))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.world(2)
def test_random_numbers_are_those_of_the_plain_function(world: World, options: Any) -> None:
    for found in world.run(with_noise, options):
        assert worst(found) < 1e-12


@pytest.mark.world(2)
def test_a_policy_says_what_is_kept_and_random_numbers_agree(world: World) -> None:
    for found in world.run(with_noise, {}, policy=True):
        assert worst(found) < 1e-12


def recomputed(remat: Any) -> Any:
    """How often the function and its products run in forward and backward."""
    s = Setting()
    counts: Counter = Counter()

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    def f(p: Any, x: Tensor) -> Tensor:
        counts["calls"] += 1
        return torch.tanh(x @ p["w"]) @ p["v"]

    g = staged(f, remat=remat)
    x = rows_of(s.rank).requires_grad_()
    with Products():
        y = g(s.leaves["blocks"][0], x).sum()
        forward = (counts["calls"], counts["aten.mm.default"], counts["aten.tanh.default"])
        counts.clear()
        y.backward()
    return forward, (counts["calls"], counts["aten.mm.default"] - 4, counts["aten.tanh.default"])


@pytest.mark.parametrize(
    ("remat", "again"), [(False, (0, 0, 0)), ("offload", (0, 0, 0)), (True, (1, 2, 1)), ("mm", (1, 0, 1))], ids=str
)
@pytest.mark.world(2, "threads")
def test_what_is_computed_again_in_backward(world: World, remat: Any, again: Any) -> None:
    for forward, backward in world.run(recomputed, remat):
        assert forward == (1, 2, 1)
        assert backward == again


# --- precision ---


def by_second_order(loss: Any, flat: Any) -> Any:
    """A gradient that could be differentiated again."""
    leaves = optree.tree_map(lambda x: x.clone().requires_grad_(), flat)
    value, (flats, tree) = loss(leaves), optree.tree_flatten(leaves)
    gradient = torch.autograd.grad(value, flats, create_graph=True)
    return value.detach(), optree.tree_unflatten(tree, [x.detach() for x in gradient])


def autocast(where: str, options: dict[str, Any]) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    n, rank = mesh.size(), mesh.get_rank()
    plain = params(dtype=torch.float32)["blocks"]
    flat = sf.shard(plain, mesh, sf.full_shard("shard"))
    met = set()

    def inner(p: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "inside"):
            y = x @ p["w"]
        met.add(y.dtype)
        return x + torch.tanh(y.float() + p["b"]) @ p["v"]

    f = staged(inner if where == "inside" else block, **options)
    g = inner if where == "inside" else block

    def net(f: Any, ps: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
            for p in sf.layers(ps):
                x = f(p, x)
            met.add(torch.is_autocast_enabled("cpu"))
            return x.float().square().sum()

    # Around backward alone, it is torch's derivatives that it changes, and nothing that runs again for them.
    outside = torch.autocast("cpu", torch.bfloat16, enabled=where == "around backward")
    with outside:
        gradients = [sf.grad(lambda ps, k=k: net(g, ps, rows_of(k, torch.float32)))(plain) for k in range(n)]
        own = net(g, plain, rows_of(rank, torch.float32))
    want = optree.tree_map(lambda *each: torch.stack(each).sum(0), *gradients)
    scale = max(x.abs().max().item() for x in optree.tree_leaves(want))
    found = {}
    for engine in (*ENGINES, by_second_order):
        for again in range(2):
            with outside:
                value, gradient = engine(lambda ps: net(f, ps, rows_of(rank, torch.float32)), flat)
            assert value.item() == own.item()
            found[engine.__name__, again] = distance(sf.unshard(gradient), want) / scale
    assert torch.bfloat16 in met or where != "inside"
    return found


@pytest.mark.parametrize("where", ["inside", "around", "around backward"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.world(2)
def test_autocast_inside_a_stage_and_around_it(world: World, where: str, options: Any) -> None:
    for found in world.run(autocast, where, options):
        assert not {how: off for how, off in found.items() if not off < 1e-5}


@sf.debug(memory=False)  # where calls have memory of their own, they have leaves of their own
def autocast_around_all(options: dict[str, Any]) -> list[float]:
    """Two sets of parameters in turn, in one block, whose cache goes by tensors."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    x, f = rows_of(mesh.get_rank(), torch.float32), staged(block, **options)
    plain = params(dtype=torch.float32)["blocks"]
    sets = [plain, optree.tree_map(torch.neg, plain)]
    flats = [sf.shard(one, mesh, sf.full_shard("shard")) for one in sets]

    def net(f: Any, ps: Any) -> Tensor:
        y = x
        for p in sf.layers(ps):
            y = f(p, y)
        return y.float().square().sum()

    found = []
    with torch.autocast("cpu", torch.bfloat16):
        want = [net(block, one).item() for one in sets]
        for _ in range(3):
            found += [by_backward(lambda ps: net(f, ps), flat)[0].item() for flat in flats]
    return [got - sure for got, sure in zip(found, want * 3, strict=True)]


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"reshard": False}], ids=str)
@pytest.mark.world(2)
def test_autocast_around_steps_remembers_no_parameters(world: World, options: Any) -> None:
    for found in world.run(autocast_around_all, options):
        assert not any(found), found


def penalized_under_autocast(where: str, options: dict[str, Any]) -> tuple[int, set[Any], float]:
    """How often a function runs for a second derivative, the autocast that it meets, and how far the gradient is off.

    In float64, which autocast leaves alone: in bfloat16 sums round in another order than one process's.
    """
    mesh = sf.make_mesh(shard=-1, device="cpu")
    plain = params()["blocks"]
    met: list[Any] = []

    def noting(p: Any, x: Tensor) -> Tensor:
        met.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return block(p, x)

    def penalty(f: Any, ps: Any, rank: int) -> Tensor:
        x = rows_of(rank).requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=where == "forward"):
            y = x
            for p in ps:
                y = f(p, y)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return slope.square().sum()

    want = by_backward(everyone(lambda ps, k: penalty(block, ps, k), mesh.size()), plain)[1]
    flat = sf.shard(plain, mesh, sf.full_shard("shard"))
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "backward"):
        got = by_backward(lambda ps: penalty(staged(noting, **options), ps, mesh.get_rank()), flat)[1]
    return len(met) // len(plain), set(met), distance(sf.unshard(got), want)


@pytest.mark.parametrize(("where", "dtype"), [("forward", torch.float16), ("backward", False)])
@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@pytest.mark.world(2)
def test_what_runs_again_for_a_second_derivative_meets_the_autocast_of_forward(
    world: World, options: Any, where: str, dtype: Any
) -> None:
    for runs, met, off in world.run(penalized_under_autocast, where, options):
        assert runs > 1
        assert met == {dtype}
        assert off < 1e-12


def lower(gather: Any, reduce: Any, options: dict[str, Any]) -> Any:
    """Against an emulation: parameters rounded, gradients of each rank rounded to the wire's dtype, then summed."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    n, rank = mesh.size(), mesh.get_rank()
    plain = params(dtype=torch.float32)["blocks"]
    flat = sf.shard(plain, mesh, sf.full_shard("shard"))
    f = staged(block, gather_dtype=gather, reduce_dtype=reduce, input_dtype=gather, **options)

    def net(f: Any, ps: Any, x: Tensor) -> Tensor:
        for p in sf.layers(ps):
            x = f(p, x)
        return x.float().square().sum()

    low = optree.tree_map(lambda x: x.to(gather or x.dtype), plain)
    wire = reduce or torch.float32
    gradients = [
        optree.tree_map(
            lambda g: g.to(wire).float(),
            sf.grad(lambda ps, k=k: net(block, ps, rows_of(k, torch.float32).to(gather or torch.float32)))(low),
        )
        for k in range(n)
    ]
    want = optree.tree_map(lambda *each: torch.stack(each).sum(0), *gradients)
    found = []
    for engine in ENGINES:
        engine(lambda ps: net(f, ps, rows_of(rank, torch.float32)), flat)
        with sf.ledger() as log:
            gradient = engine(lambda ps: net(f, ps, rows_of(rank, torch.float32)), flat)[1]
        assert {one.dtype for one in log.select(op="all_gather")} == {gather or torch.float32}
        assert {one.dtype for one in log.select(op="reduce_scatter")} == {wire}
        assert all(x.dtype == torch.float32 for x in optree.tree_leaves(gradient))
        found.append(distance(sf.unshard(gradient), want))
    return found, max(x.abs().max().item() for x in optree.tree_leaves(want))


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@pytest.mark.parametrize("gather", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", [None, torch.bfloat16], ids=str)
@pytest.mark.world(2)
def test_dtypes_on_the_wire(world: World, gather: Any, reduce: Any, options: Any) -> None:
    for found, scale in world.run(lower, gather, reduce, options):
        assert worst(found) < 1e-6 * scale


def casts() -> None:
    s = Setting()
    met = []

    def f(p: Any, x: Tensor, ids: Tensor, k: float) -> Any:
        met.append((p["w"].dtype, x.dtype, ids.dtype, type(k)))
        return x @ p["w"].to(x.dtype), ids, k

    g = sf.stage(f, input_dtype=torch.float32, output_dtype=torch.bfloat16)
    x = rows_of(s.rank).requires_grad_()
    for p in (s.flat["blocks"][0], s.leaves["blocks"][0]):
        y, ids, k = g(p, x, torch.arange(3), 2.0)
        assert (y.dtype, ids.dtype, k) == (torch.bfloat16, torch.int64, 2.0)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == torch.float64
    assert set(met) == {(torch.float64, torch.float32, torch.int64, float)}
    assert s.leaves["blocks"][0].values.grad.dtype == torch.float64
    for value in (s.flat["blocks"][0], s.plain["blocks"][0]):
        low = sf.stage(lambda p, x: (p["w"], p["w"].dtype)[1], gather_dtype=torch.bfloat16)(value, x)
        assert low == (torch.bfloat16 if value is s.flat["blocks"][0] else torch.float64)


@on_threads
def test_inputs_and_outputs_are_cast(world: World) -> None:
    world.run(casts)


# --- torch.compile ---


def compiled(options: dict[str, Any]) -> Any:
    s = Setting(**options)
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    fast = staged(torch.compile(block, backend=counting, fullgraph=True), **options)

    def net(f: Any, ps: Any, rank: int) -> Tensor:
        x = stage_input(rank)
        for p in sf.layers(ps):
            x = f(p, x)
        return x.square().sum()

    def stage_input(rank: int) -> Tensor:
        return rows_of(rank)

    want = torch.func.grad(everyone(lambda ps, k: net(block, ps, k), s.n))(s.plain["blocks"])
    x = [sf.grad(lambda ps: net(fast, ps, s.rank))(s.flat["blocks"]) for _ in range(3)]
    return worst(distance(sf.unshard(one), want) for one in x), len(graphs)


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"reshard": False}], ids=str)
@pytest.mark.world(2)
def test_a_compiled_block_is_compiled_once_for_all_layers(world: World, options: Any) -> None:
    for off, graphs in world.run(compiled, options):
        assert off < 1e-12
        # The first layer's input needs no gradient, the others' do; under no_grad it is a graph of its own.
        assert graphs <= 2 + bool(options.get("remat"))


# --- in place ---


def overwritten_input() -> Any:
    """Writing into a tensor that a stage's backward needs is an error, as in plain torch, or does no harm."""
    s = Setting()
    found = []
    for options in ({}, {"remat": True}):
        f = staged(block, **options)
        x = rows_of(s.rank).requires_grad_() * 1
        try:
            y = f(s.leaves["blocks"][0], x)
            x.mul_(3)
            y.square().sum().backward()
        except RuntimeError as error:
            found.append("modified by an inplace operation" in str(error))
        else:
            found.append(distance(s.collected()["blocks"][0], one_block(s)) < 1e-12)
        found.append(s.clean_step() < 1e-12)
    return found


def one_block(s: Setting) -> Any:
    joint = everyone(lambda p, k: block(p, rows_of(k)).square().sum(), s.n)
    return torch.func.grad(joint)(s.plain["blocks"][0])


@on_threads
def test_an_input_that_is_overwritten_before_backward(world: World) -> None:
    for found in world.run(overwritten_input):
        assert all(found), found


def overwritten_shard() -> Any:
    """So is writing into a shard between forward and backward."""
    s = Setting()
    found = []
    for options in ({}, {"remat": True}, {"reshard": False}, {"prefetch": 0}):
        loss = straight(lambda f: staged(f, **options), s.leaves, s.rank)  # noqa: B023
        with torch.no_grad():
            s.leaves["blocks"][0].values.mul_(2)
        try:
            loss.backward()
        except RuntimeError as error:
            found.append("modified by an inplace operation" in str(error))
        else:
            found.append(False)
        with torch.no_grad():
            s.leaves["blocks"][0].values.div_(2)
        s.collected()
        found.append(s.clean_step() < 1e-12)
    return found


@on_threads
def test_a_shard_that_is_overwritten_before_backward_is_an_error(world: World) -> None:
    for found in world.run(overwritten_shard):
        assert all(found), found


def overwritten_output() -> Any:
    """Of a stage whose backward needs its output, as tanh does."""
    s = Setting()
    found = []
    for options in ({}, {"remat": True}):
        f = staged(lambda p, x: torch.tanh(x @ p["w"]), **options)
        y = f(s.leaves["blocks"][0], rows_of(s.rank))
        try:
            y.mul_(3)
            y.square().sum().backward()
        except RuntimeError as error:
            found.append("modified by an inplace operation" in str(error))
        else:
            joint = everyone(lambda p, k: (3 * torch.tanh(rows_of(k) @ p["w"])).square().sum(), s.n)
            found.append(distance(s.collected()["blocks"][0], torch.func.grad(joint)(s.plain["blocks"][0])) < 1e-12)
        s.collected()
        found.append(s.clean_step() < 1e-12)
    return found


@on_threads
def test_an_output_that_is_overwritten(world: World) -> None:
    for found in world.run(overwritten_output):
        assert all(found), found


# --- at the end, since after it a world of processes starts anew ---


def other_stages(how: str) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    first = mesh.get_rank() == 0
    flat = sf.shard(params(), mesh, sf.ddp("shard") if how == "nothing is gathered" else sf.full_shard("shard"))
    blocks, x = flat["blocks"], rows_of(0)
    if how == "known":  # both have run before
        sf.stage(block)(blocks[0], x)
        sf.stage(block)(blocks[1], x)
    if how == "another size":
        return (sf.stage(block)(blocks[0], x) if first else sf.stage(head)(flat["head"], x)).sum()
    if how == "another dtype":
        return sf.stage(block, gather_dtype=torch.bfloat16 if first else torch.float16)(blocks[0], x)
    if how == "another function":
        return (sf.stage(block) if first else sf.stage(lambda p, x: x - block(p, x)))(blocks[0], x)
    return sf.stage(block)(blocks[0 if first else 1], x)


@pytest.mark.world(2)
def test_ranks_that_run_different_stages_are_told(world: World) -> None:
    found = [error for error in world.errors(other_stages, "known") if error is not None]
    assert found
    assert all("same way on every rank" in str(error) for error in found)


@pytest.mark.parametrize("how", ["another", "another size", "another dtype", "another function", "nothing is gathered"])
@pytest.mark.world(2)
def test_stages_that_are_new_are_compared_before_anything_moves(world: World, how: str) -> None:
    for error in world.errors(other_stages, how):
        assert isinstance(error, ValueError)
        assert re.search("the stages differ between ranks: rank 0 has .*; rank 1 has .*same way on every", str(error))
