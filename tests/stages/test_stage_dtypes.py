"""Several dtypes in one stage, lower precision, autocast, and random numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import shardfn as sf
from shardfn.testing import World
from tests.models import ENGINES, WIDTH, block, blocks, by_backward, distance, drawn, everyone, variables
from tests.reference import worst
from tests.stages.setting import OPTIONS, Setting, on_threads, rows_of, staged

pytestmark = pytest.mark.usefixtures("threads_on_one_core")

# --- shards of several kinds in one stage ---


def mixed_params() -> Any:
    normal, generator = drawn(5, 0.5), torch.Generator().manual_seed(6)
    return [
        {
            "w": normal(WIDTH, WIDTH),
            "scale": normal(WIDTH).float(),
            "base": normal(WIDTH, WIDTH),
            "ids": torch.randperm(WIDTH, generator=generator),
            "phase": torch.complex(normal(WIDTH), normal(WIDTH)),
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
    with sf.collectives.ledger() as log:
        if how == "value_and_grad":
            gradient = sf.grad(lambda ps: net(f, ps, rank))(flat)
        else:
            leaves = [
                {
                    k: sf.shards.FlatShard(v.values.clone().requires_grad_(v.layout.trainable), v.layout)
                    for k, v in p.items()
                }
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
        lambda g, p: p if g.values is None else g, gradient, flat, is_leaf=lambda x: isinstance(x, sf.shards.FlatShard)
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
    leaves = variables(flat)
    value, (flats, tree) = loss(leaves), optree.tree_flatten(leaves)
    gradient = torch.autograd.grad(value, flats, create_graph=True)
    return value.detach(), optree.tree_unflatten(tree, [x.detach() for x in gradient])


def autocast(where: str, options: dict[str, Any]) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    n, rank = mesh.size(), mesh.get_rank()
    plain = optree.tree_map(Tensor.float, blocks(4))
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
    plain = optree.tree_map(Tensor.float, blocks(4))
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
    plain = blocks(4)
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
@pytest.mark.world(2)
def test_what_runs_again_for_a_second_derivative_meets_the_autocast_of_forward(
    world: World, where: str, dtype: Any
) -> None:
    for runs, met, off in world.run(penalized_under_autocast, where, {"remat": True}):
        assert runs > 1
        assert met == {dtype}
        assert off < 1e-12


def lower(gather: Any, reduce: Any, options: dict[str, Any]) -> Any:
    """Against an emulation: parameters rounded, gradients of each rank rounded to the wire's dtype, then summed."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    n, rank = mesh.size(), mesh.get_rank()
    plain = optree.tree_map(Tensor.float, blocks(4))
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
    for engine in ENGINES[:2]:  # torch.func's gathers are in the wider dtype
        engine(lambda ps: net(f, ps, rows_of(rank, torch.float32)), flat)
        with sf.collectives.ledger() as log:
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
