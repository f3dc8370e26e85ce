"""shardfn.jvp: stages in forward mode on the schedule, alone and around a gradient."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfn as sf
from shardfn import interop
from shardfn.compat import functorch
from shardfn.compat.norms import WrittenOut
from shardfn.compat.scripted import written_in_python
from shardfn.testing import World
from shardfn.transforms.autodiff import differentiating
from tests.curvature.test_per_example import Model
from tests.models import STRATEGIES, Halved, distance, normal, plainly
from tests.reference import worst
from tests.refusals import refused, told

D, WORDS, ROWS = 6, 11, 4
Layer = Callable[[Any, Tensor], Tensor]
one = pytest.mark.world(1, "processes")
two = pytest.mark.world(2, "processes")


def whole(seed: int = 0) -> Any:
    shapes = {"a": (D, 8), "b": (8, D), "s": (D,), "t": (D,)}
    layers = [{name: normal(*shape, seed=100 * seed + 10 * i + k) / 2 for k, (name, shape) in enumerate(shapes.items())}
              for i in range(3)]  # fmt: skip
    return {"embed": {"e": normal(WORDS, D, seed=100 * seed + 91)}, "layers": layers,
            "head": {"w": normal(D, WORDS, seed=100 * seed + 92)}}  # fmt: skip


def pair(part: Callable[[Any], Any] = lambda whole: whole["layers"]) -> tuple[Any, Any, Any]:
    """A mesh of all ranks along one axis, and a part of the parameters, and of tangents, cut over it."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params, v = (sf.shard(part(whole(seed)), mesh, sf.full_shard("shard")) for seed in (0, 1))
    return mesh, params, v


def words(rank: int) -> Tensor:
    return torch.randint(0, WORDS, (ROWS,), generator=torch.Generator().manual_seed(rank))


def loss_of(stage: Any, layer: Layer, params: Any, tokens: Tensor, **options: Any) -> Tensor:
    x = stage(lambda p, t: p["e"][t])(params["embed"], tokens)
    f = stage(layer, **options)
    for p in sf.layers(params["layers"]):
        x = f(p, x)
    y = stage(lambda p, x: x @ p["w"])(params["head"], torch.sin(x))
    return F.cross_entropy(y, tokens)


# --- layers, by what is special about them ---


def mlp(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["a"]) @ p["b"]


def normed(p: Any, x: Tensor) -> Tensor:
    return F.layer_norm(mlp(p, x), (D,), p["s"], p["t"])


def batch_normed(p: Any, x: Tensor) -> Tensor:
    return F.batch_norm(mlp(p, x), None, None, p["s"], p["t"], training=True)


def attending(p: Any, x: Tensor) -> Tensor:
    q, k, v = (x @ p["a"] @ p["b"]).tanh(), x * p["s"], x + p["t"]
    return x + torch.softmax(q @ k.T, -1) @ v


def attending_in_blocks(p: Any, x: Tensor) -> Tensor:
    q, k, v = (h.view(1, 2, len(x), D // 2) for h in (x * p["s"], x + p["t"], mlp(p, x)))
    return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).view(x.shape)


def dropping(p: Any, x: Tensor) -> Tensor:
    return mlp(p, F.dropout(x, 0.4))


def shifting(p: Any, x: Tensor) -> Tensor:
    return x + p["s"]  # whose tangent may be one that is lent


def handing_through(p: Any, x: Tensor) -> Tensor:
    return x if p["a"].sum() > 1e9 else x.view(x.shape) * 1


def of_parameters_alone(p: Any, x: Tensor) -> Tensor:
    return (p["a"] @ p["b"])[: len(x)] + 1


def in_place(p: Any, x: Tensor) -> Tensor:
    h = x @ p["a"]
    h[:, 0] *= 2
    return x.clone().add_(h @ p["b"])


def complexly(p: Any, x: Tensor) -> Tensor:
    z = torch.fft.fft(torch.complex(x, x * p["s"]))
    return (z * torch.complex(p["t"], p["s"])).abs() + x


def solving(p: Any, x: Tensor) -> Tensor:
    m = torch.eye(D) + 0.1 * p["a"] @ p["b"]
    return torch.linalg.solve(m, x.T).T + torch.linalg.det(m) + torch.logsumexp(x, -1, keepdim=True)


LAYERS = {f.__name__: f for f in (
    mlp, normed, batch_normed, attending, attending_in_blocks, dropping, shifting, handing_through,
    of_parameters_alone, in_place, complexly,
    solving,
)}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [{}, {"remat": True}, {"reshard": False}, {"prefetch": 0}, {"remat": "offload"}]


def off_of_torch(name: str, strategy: str, options: dict[str, Any]) -> list[float]:
    """How far a Hessian-vector product and a tangent are from those of stages that are composed."""
    mesh = sf.make_mesh(replica=dist.get_world_size() // 2, shard=2, device="cpu")
    params, v = (sf.shard(whole(seed), mesh, STRATEGIES[strategy]) for seed in (0, 1))
    own, found = words(mesh.get_rank()), []

    def loss(params: Any) -> Tensor:
        torch.manual_seed(3)
        return loss_of(sf.stage, LAYERS[name], params, own, **options)

    for f in (sf.grad(loss), loss):
        with sdpa_kernel(SDPBackend.MATH):
            want = torch.func.jvp(f, (params,), (v,))
        for _ in range(2):  # the first call compares more
            got = sf.jvp(f, (params,), (v,))
            found.append(furthest(got, want))
        if f is not loss:
            unread = sf.jvp(differentiating(loss, unread=True), (params,), (v,))  # as curvature.hvp does
            found.append(furthest(unread[1][1], want[1]))
    return found


def furthest(got: Any, want: Any) -> float:
    pairs = zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True)
    return worst([float((x - y).norm() / y.norm().clamp(1)) for x, y in pairs])


@two
@pytest.mark.parametrize("name", LAYERS)
def test_products_are_those_of_torch(world: World, name: str) -> None:
    for options in OPTIONS[:2]:
        for off in world.run(off_of_torch, name, "full_shard", options):
            assert worst(off) < 1e-13, (options, off)


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_products_are_those_of_torch_with_each_strategy(world: World, strategy: str) -> None:
    for options in OPTIONS[1:]:
        for off in world.run(off_of_torch, "normed", strategy, options):
            assert worst(off) < 1e-13, (options, off)


def alone() -> tuple[float, float, list[Any]]:
    mesh, params, v = pair(lambda whole: whole)

    def everyone(params: Any) -> Tensor:
        return torch.stack([loss_of(plainly, normed, params, words(k)) for k in range(mesh.size())]).sum()

    def gradient(params: Any) -> Any:
        return sf.grad(lambda p: loss_of(sf.stage, normed, p, words(mesh.get_rank()), remat=True))(params)

    want = torch.func.jvp(torch.func.grad(everyone), (whole(0),), (whole(1),))
    got = sf.jvp(gradient, (params,), (v,))
    counts = []
    gradient(params)  # which compares its stages
    for run in (lambda: gradient(params), lambda: sf.jvp(gradient, (params,), (v,))):
        with sf.collectives.ledger() as log:
            run()
        assert all(entry.scheduled for entry in log.records), [e for e in log.records if not e.scheduled]
        counts.append((len(log.records), sum(entry.bytes for entry in log.records)))
    return distance(sf.unshard(got[0]), want[0]), distance(sf.unshard(got[1]), want[1]), counts


@two
def test_a_hessian_vector_product_is_that_of_one_process_by_twice_the_collectives(world: World) -> None:
    for gradient, product, (once, twice) in world.run(alone):
        assert worst([gradient, product]) < 1e-13
        assert twice == (2 * once[0], 2 * once[1])


# --- what has tangents, and what is differentiated ---


class Same(torch.autograd.Function):
    """A copy, with a tangent that is no copy."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent


class Product(torch.autograd.Function):
    """A product under a sum, whose gradients are its arguments."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return w, x

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dw: Tensor) -> Tensor:
        x, w = ctx.saved_tensors
        return dx * w + x * dw


def by_torch(*args: Any, **more: Any) -> Any:
    with WrittenOut():  # torch's derivatives of tangents of a layer norm are wrong
        return torch.func.jvp(*args, **more)


def cases() -> dict[str, Any]:
    """Results, and what torch.func makes of the same."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    strategy, rank = sf.full_shard("shard"), mesh.get_rank()
    params, v = (sf.shard({"only": whole(seed)["layers"][0]}, mesh, strategy)["only"] for seed in (0, 1))
    x, dx = normal(ROWS, D, seed=20 + rank), normal(ROWS, D, seed=30 + rank)
    layer, lean = sf.stage(normed), sf.stage(mlp, remat=True)
    both: list[Any] = [sf.jvp, by_torch]
    found: dict[str, Any] = {}

    def case(name: str, f: Callable[..., Any], primals: Any, tangents: Any, **more: Any) -> None:
        found[name] = [by(f, primals, tangents, **more) for by in both]

    def loss(p: Any, x: Tensor) -> Tensor:
        return lean(p, layer(p, x).sin()).square().sum()

    case("in inputs", lambda x: layer(params, x), (x,), (dx,))
    case("a gradient of parameters, along inputs", lambda x: sf.grad(loss)(params, x), (x,), (dx,))
    case("a gradient of inputs, along parameters", lambda p: sf.grad(loss, 1)(p, x), (params,), (v,))
    case("a gradient of both, along both", sf.grad(loss, (0, 1)), (params, x), (v, dx))
    case("a value and a gradient", sf.value_and_grad(loss), (params, x), (v, dx))
    case("parameters twice", lambda p: sf.grad(lambda p: loss(p, layer(p, x)))(p), (params,), (v,))
    case("a closure over what moves", lambda x: sf.stage(lambda p: mlp(p, x))(params), (x,), (dx,))
    case("a stage without what moves", lambda x: layer(params, normal(ROWS, D, seed=1)) * x, (x,), (dx,))
    three = tuple(sf.shard({"only": whole(k)["layers"][0]}, mesh, strategy)["only"] for k in (2, 3, 4))

    def late(p: Any, q: Any, r: Any) -> Tensor:  # others have the memory of the first by then
        found = sf.stage(lambda p: Same.apply(p["s"]))(p)
        return layer(r, layer(q, x)) * found

    case("a tangent as it is", late, three, three[::-1])

    def under_a_sum(p: Any, q: Any, r: Any) -> Tensor:
        y = layer(r, layer(q, x)).sum(0)
        return sf.stage(lambda p, y: Product.apply(y, p["s"]))(p, y).sum()

    case("a gradient that is a parameter", sf.grad(under_a_sum, (0, 1, 2)), three, three[::-1])
    z = torch.complex(x, dx)
    case(
        "conjugates", lambda z: sf.stage(lambda p, z: (z * p["s"][:3]).imag)(params, z[:, :3].conj()), (z,), (z.sin(),)
    )
    case("a number too", lambda p, x: {"y": layer(p, x), "n": 3.0 * x.sum()}, (params, x), (v, dx))
    case("aux", lambda p: (loss(p, x), layer(p, x).detach()), (params,), (v,), has_aux=True)
    case("a gradient by torch", lambda p: torch.func.grad(loss)(p, x), (params,), (v,))
    case("a product by torch", lambda p: torch.func.jvp(lambda p: loss(p, x), (p,), (v,))[1], (params,), (v,))
    case("a product by jvp", lambda p: sf.jvp(lambda p: loss(p, x), (p,), (v,))[1], (params,), (v,))
    case("a sum over ranks in a stage", lambda p: sf.grad(lambda p: sf.stage(summed)(p, x).sum())(p), (params,), (v,))

    def tangent(by: Any) -> Any:
        return sf.grad(lambda p: by(lambda p: loss(p, x), (p,), (v,))[1])(params)

    found["the gradient of a tangent"] = tangent(sf.jvp), tangent(by_torch)

    def closed_over(by: Any) -> Any:
        return sf.grad(lambda p: by(lambda x: loss(p, x), (x,), (dx,))[1])(params)

    def hypergradient(by: Any) -> Any:
        def product(x: Tensor) -> Tensor:
            moved = by(lambda p: sf.grad(lambda p: loss(p, x))(p), (params,), (v,))[1]
            return torch.stack([y.square().sum() for y in optree.tree_leaves(moved)]).sum()

        return sf.grad(product)(x)

    found["the gradient of a tangent, closed over"] = closed_over(sf.jvp), closed_over(by_torch)
    found["the gradient of a product, closed over"] = hypergradient(sf.jvp), hypergradient(by_torch)
    batch = torch.stack([dx, 2 * dx])
    mapped = [torch.func.vmap(lambda d, by=by: by(lambda x: layer(params, x), (x,), (d,))[1])(batch) for by in both]
    found["a batch"] = mapped[0], mapped[1]
    return found


def summed(p: Any, x: Tensor) -> Tensor:
    return sf.psum(mlp(p, x), "shard").sin()


def off_by_case() -> dict[str, float]:
    off = {}
    for name, (got, want) in cases().items():
        a, b = ([y for y in optree.tree_leaves(each) if isinstance(y, Tensor)] for each in (got, want))
        assert len(a) == len(b) > 0, name
        off[name] = worst([float((x - y).norm() / y.norm().clamp(1)) for x, y in zip(a, b, strict=True)])
    return off


@two
def test_each_order_and_choice_of_derivatives(world: World) -> None:
    for off in world.run(off_by_case):
        assert {name: each for name, each in off.items() if not each < 1e-13} == {}
        assert len(off) == 21


def of_a_module() -> float:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    forward = interop.functional(Model(padding=None), remat=True)
    params = forward.shard(mesh, sf.full_shard("shard"))
    v = optree.tree_map(lambda x: x.cos() if x.is_floating_point() else x, params)
    tokens = words(mesh.get_rank())[None]

    def gradient(params: Any) -> Any:
        return sf.grad(lambda p: F.cross_entropy(forward(p, tokens)[0], tokens[0]))(params)

    got = sf.jvp(gradient, (params,), (v,))[1]
    with sdpa_kernel(SDPBackend.MATH):
        want = torch.func.jvp(gradient, (params,), (v,))[1]
    pairs = zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True)
    return worst([float((x - y).norm() / y.norm().clamp(1)) for x, y in pairs])


@two
def test_a_module(world: World) -> None:
    assert worst(world.run(of_a_module)) < 1e-12


# --- the graph of a stage ---


class Old(torch.autograd.Function):
    """A sine, in the form that torch.func refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * ctx.saved_tensors[0].cos()


class Nested(Old):
    """A sine, of which backward applies Functions to what is saved."""

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * Old.apply(Same.apply(ctx.saved_tensors[0]) + math.pi / 2)


def alone_with(layer: Layer, **options: Any) -> Any:
    """A gradient and a Hessian-vector product on one rank."""
    _, params, v = pair()
    stage = sf.stage(layer, **options)

    def loss(params: Any) -> Tensor:
        torch.manual_seed(3)
        x = normal(ROWS, D, seed=1)
        for p in sf.layers(params):
            x = Seen.apply(stage(p, x))
        return x.square().sum()

    Seen.said.clear()
    return sf.jvp(sf.grad(loss), (params,), (v,))


class Seen(torch.autograd.Function):
    """What it is given; backward notes which of the stages' tensors are alive."""

    alive: ClassVar[list[Any]] = []
    said: ClassVar[list[int]] = []

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        Seen.said.append(sum(not one.expired() for one in Seen.alive))
        return ct

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def noted(p: Any, x: Tensor) -> Tensor:
    h = torch.softmax(F.rms_norm(torch.tanh(x @ p["a"]), (8,)), -1)  # what each returns, it saves
    Seen.alive.append(StorageWeakRef(functorch.unwrapped(h).untyped_storage()))
    return x + torch.exp(h) @ p["b"]


def alive(remat: bool) -> list[int]:
    Seen.alive.clear()
    alone_with(noted, remat=remat)
    return Seen.said


@one
@pytest.mark.parametrize(("remat", "counts"), [(False, [3, 2, 1]), (True, [0, 0, 0])])
def test_what_a_stage_saves_is_let_go_as_in_a_gradient(world: World, remat: bool, counts: list[int]) -> None:
    assert world.run(alive, remat) == [counts]


def off_of_a_function_for_autograd_alone() -> float:
    def by(f: Any) -> Layer:
        return lambda p, x: f(F.dropout(mlp(p, x), 0.4))

    found = []
    for remat in (False, True):
        *ways, wanted = (alone_with(by(f), remat=remat) for f in (Old.apply, Nested.apply, torch.sin))
        found += [distance(way, wanted) for way in ways]
    return worst(found)


@one
def test_what_torch_func_refuses_has_products_too(world: World) -> None:
    assert worst(world.run(off_of_a_function_for_autograd_alone)) < 1e-13


def unused(remat: bool) -> float:
    """The largest number in a product, of a stage whose second output has an infinite slope and is not used."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params, v = (sf.shard({"only": {"w": normal(D, seed=s)}}, mesh, sf.full_shard("shard"))["only"] for s in (0, 1))
    first = sf.stage(lambda p, x: (x + p["w"], (x * 0 * p["w"]).sqrt()), remat=remat)
    second = sf.stage(lambda p, y, z: (y * p["w"]).sin() + len(z), remat=remat)

    def loss(p: Any) -> Tensor:
        return second(p, *first(p, torch.ones(D, dtype=torch.float64))).square().sum()

    found = sf.jvp(sf.grad(loss), (params,), (v,))
    return worst([float(x.abs().max()) for x in optree.tree_leaves(found)])


@one
@pytest.mark.parametrize("remat", [False, True])
def test_what_a_loss_does_not_use_has_no_part_in_its_product(world: World, remat: bool) -> None:
    (largest,) = world.run(unused, remat)
    assert 0 < largest < 100


def writing(where: str, how: str, first: int) -> tuple[str, bool]:
    """What comes of a function that writes from its `first` run on, and whether its parameters are as they were."""
    _, params, v = pair()
    before, runs = optree.tree_map(torch.clone, sf.unshard(params)), []

    def layer(p: Any, x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) > first:
            target = p["s"] if where == "parameter" else x
            WAYS[how](target)
        return mlp(p, x * p["s"])

    stage = sf.stage(layer)

    def loss(params: Any) -> Tensor:
        x = torch.stack([normal(ROWS, D, seed=1)] * 2)[1]
        for p in sf.layers(params):
            x = stage(p, x)
        return x.square().sum()

    told = "nothing"
    for _ in range(3):
        try:
            sf.jvp(sf.grad(loss), (params,), (v,))
        except RuntimeError as error:
            told = str(error)
    return told, all(map(torch.equal, optree.tree_leaves(sf.unshard(params)), optree.tree_leaves(before)))


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "a method": lambda x: x.mul_(2),
    "an operator": lambda x: exec("x *= 2", {"x": x}),
    "an item": lambda x: x.__setitem__(0, 3.0),
    "out": lambda x: torch.mul(x.detach(), 2, out=x),
    "in place": lambda x: F.relu(x, inplace=True),
    "detached": lambda x: x.detach().add_(1),
}


@one
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("where", "first"), [("parameter", 0), ("parameter", 4), ("argument", 0), ("argument", 4)])
def test_what_writes_into_what_it_was_lent_is_refused(world: World, where: str, how: str, first: int) -> None:
    ((told, unchanged),) = world.run(writing, where, how, first)
    assert "writes into its parameters, or into another" in told or "out=... arguments" in told, told
    assert unchanged or how == "detached", told


def written_after(result: str, how: str, remat: bool) -> tuple[str, float]:
    """The error, and how far a product is from one without the write, if a stage's results are written into."""
    _, params, v = pair()
    stage = sf.stage(RESULTS[result], remat=remat)

    def loss(params: Any, writes: bool) -> Tensor:
        x = normal(ROWS, D, seed=1)
        for p in sf.layers(params):
            y, at = stage(p, x)
            x, at = (y, at) if writes else (y.clone(), at.clone())
            AFTER[how](at if how == "an index" else x)
            x = x + at.sum()
        return x.square().sum()

    def product(writes: bool) -> Any:
        return sf.jvp(sf.grad(lambda p: loss(p, writes)), (params,), (v,))[1]

    try:
        found = product(True)
    except RuntimeError as error:
        return str(error), 0.0
    return "", furthest(found, product(False))


def looked_up(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    at = x[:, 0].argsort()
    return (mlp(p, x) * p["s"])[at] + 0.0, at


RESULTS: dict[str, Any] = {
    "unread": lambda p, x: (mlp(p, x) + x, torch.ones(1, dtype=torch.int64)),
    "a view": lambda p, x: ((mlp(p, x) + x).unflatten(1, (2, -1)).flatten(1), torch.ones(1, dtype=torch.int64)),
    "read": lambda p, x: (torch.tanh(mlp(p, x)), torch.ones(1, dtype=torch.int64)),
    "an index": looked_up,
}
AFTER: dict[str, Callable[[Tensor], Any]] = {
    "an operator": lambda x: x.add_(1.5),
    "a slice": lambda x: x[:, :2].mul_(2.0),
    "an activation": lambda x: F.relu(x, inplace=True),
    "an index": lambda at: at.copy_(at.flip(0)),
}


@one
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("how", ["an operator", "a slice", "an activation"])
@pytest.mark.parametrize("result", ["unread", "a view", "read"])
def test_what_a_stage_returned_may_be_written_into_unless_its_gradient_reads_it(
    world: World, result: str, how: str, remat: bool
) -> None:
    ((told, off),) = world.run(written_after, result, how, remat)
    assert ("modified by an inplace operation" in told) == (result == "read" and not remat), told
    assert off < 1e-12


@one
def test_an_index_that_a_stage_returned_is_not_written_into_while_its_gradient_reads_it(world: World) -> None:
    ((told, _),) = world.run(written_after, "an index", "an index", False)
    assert "modified by an inplace operation" in told


def bounded(x: Tensor, most: float) -> Tensor:
    return torch.tanh(x / most) * most


class Bounded(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 2.0) * 2.0


def scripted() -> tuple[list[float], list[str]]:
    _, params, v = pair(lambda whole: whole["layers"][0])
    x = normal(ROWS, D, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # since torch 2.14
        function, method, traced = torch.jit.script(bounded), torch.jit.script(Bounded()), torch.jit.trace(Bounded(), x)

    def product(f: Any, forward: Any = sf.grad) -> Any:
        stage = sf.stage(lambda p, x: f(mlp(p, x)))
        return sf.jvp(forward(lambda p: f(stage(p, x)).square().sum()), (params,), (v,))[1]

    want = product(Bounded())
    off = [furthest(product(lambda x: function(x, 2.0)), want) for _ in range(4)]
    off.append(float((product(method, lambda f: f) - product(Bounded(), lambda f: f)).abs()))
    told = []
    for f in (method, traced):
        try:
            product(f)
        except RuntimeError as error:
            told.append(str(error))
    return off, told


@one
def test_functions_of_torchscript_have_the_derivatives_of_what_was_scripted(world: World) -> None:
    ((off, told),) = world.run(scripted)
    assert worst(off) < 1e-12
    assert ["of TorchScript: torch leaves tangents out" in error for error in told] == [True, True], told


def test_threads_leave_torchscript_as_they_found_it() -> None:
    kind: Any = torch._C.ScriptFunction
    plain, (first, second) = kind.__call__, (written_in_python() for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert kind.__call__ is not plain
    second.__exit__(None, None, None)
    assert kind.__call__ is plain


class Holder:
    def __init__(self, held: Tensor) -> None:
        self.held = held


def only_indices() -> tuple[float, str]:
    """A stage that returns no numbers with derivatives, and one that hides them in an object."""
    _, params, v = pair()
    x = normal(ROWS, D, seed=1)

    def loss(params: Any, order: Any) -> Tensor:
        y = sf.stage(mlp)(params[0], x)
        return (sf.stage(mlp)(params[1], y) * order(params[1], y)).square().sum()

    def product(order: Any) -> Any:
        return sf.jvp(sf.grad(lambda p: loss(p, order)), (params,), (v,))[1]

    off = furthest(
        product(sf.stage(lambda p, y: mlp(p, y).argsort())), product(lambda p, y: mlp(sf.unshard(p), y).argsort())
    )
    return off, refused(lambda: product(sf.stage(lambda p, y: Holder(mlp(p, y)))), TypeError)


@one
def test_a_stage_may_return_indices_alone(world: World) -> None:
    ((off, told),) = world.run(only_indices)
    assert off < 1e-12
    assert "returns a Holder, which is not a pytree node" in told, told


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": lambda x: sf.pvary(sf.psum(x.sum(0), "shard"), "shard"),
    "all_gather": lambda x: sf.all_gather(x, "shard").sum(0),
    "ppermute": lambda x: sf.ppermute(x, "shard", [(0, 1), (1, 0)]),
    "all_to_all": lambda x: sf.all_to_all(x, "shard", split_dim=0, concat_dim=0),
    "detached": lambda x: sf.pvary(sf.psum(x.sum(0), "shard"), "shard").detach(),
    "a Function": lambda x: Halved.apply(x),
}


def between_stages(way: str) -> float:
    mesh, params, v = pair()
    x = normal(ROWS, D, seed=mesh.get_rank())

    def gradient(params: Any) -> Any:
        def loss(params: Any) -> Tensor:
            y = sf.stage(mlp)(params[0], x)
            z = sf.stage(mlp)(params[1], torch.tanh(y) * BETWEEN[way](y))
            return sf.psum(z.square().sum(), "shard")

        return sf.grad(loss)(params)

    def both(params: Any, v: Any) -> tuple[Any, Any]:
        return sf.jvp(gradient, (params,), (v,))[1], torch.func.jvp(gradient, (params,), (v,))[1]

    return furthest(*sf.shard_map(both, mesh=mesh, in_specs=..., out_specs=...)(params, v))


@two
@pytest.mark.parametrize("way", BETWEEN)
def test_collectives_between_stages(world: World, way: str) -> None:
    assert worst(world.run(between_stages, way)) < 1e-12


def short_of_memory() -> tuple[str, int]:
    runs = []

    def layer(p: Any, x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("out of memory: allocating")
        return mlp(p, x)

    return refused(lambda: alone_with(layer), torch.OutOfMemoryError), len(runs)


@one
def test_a_function_that_is_out_of_memory_does_not_run_again(world: World) -> None:
    assert world.run(short_of_memory) == [("out of memory: allocating", 2)]


THROUGH: dict[str, Callable[[Tensor], Any]] = {
    "a Function": Same.apply, "a Function of another form": Old.apply, "a part": lambda y: Product.apply(y, y.detach()),
}  # fmt: skip


def outcome(remat: bool, read: str) -> str:
    """What comes of a loss that reads what stages have computed and not returned."""
    _, params, v = pair()
    kept: list[Tensor] = []

    def layer(p: Any, x: Tensor) -> Tensor:
        y = mlp(p, x)
        kept.append(y)
        return y

    stage = sf.stage(layer, remat=remat)

    def loss(params: Any) -> Tensor:
        kept.clear()
        x = normal(ROWS, D, seed=1)
        for p in sf.layers(params):
            x = stage(p, x)
        if read == "numbers":
            assert float(kept[0].detach().norm()) > 0
            assert kept[0].shape == x.shape
        if read in THROUGH:
            return x.sum() + THROUGH[read](kept[0]).square().sum()
        return x.sum() + (kept[0].square().sum() if read == "a part of the loss" else 0)

    try:
        sf.jvp(sf.grad(loss), (params,), (v,))
    except RuntimeError as error:
        return str(error)
    return "fine"


@one
@pytest.mark.parametrize("remat", [False, True])
def test_what_a_stage_does_not_return_is_no_part_of_the_loss(world: World, remat: bool) -> None:
    for read in ("a part of the loss", *THROUGH):
        (told,) = world.run(outcome, remat, read)
        assert "computed but did not return" in told, read
        assert "stage 'layer (0)'" in told, read
    assert world.run(outcome, remat, "numbers") == ["fine"]


class Once(Same):
    """A sine, whose backward says that it has no derivative, and has none by torch."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return torch.from_numpy((ct * ctx.saved_tensors[0].cos()).detach().numpy())

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * ctx.saved_tensors[0].cos()


class OldOnce(Old):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return torch.from_numpy((ct * ctx.saved_tensors[0].cos()).detach().numpy())


def through_once(kind: str, inside: bool) -> tuple[str, float]:
    """What is said of a gradient in forward mode, and how far a tangent is from that through a sine."""
    applied: Any = {"new": Once.apply, "old": OldOnce.apply}[kind]
    _, params, v = pair()

    def loss(params: Any, f: Any = applied) -> Tensor:
        stage = sf.stage(lambda p, x: f(mlp(p, x)) if inside else mlp(p, x))
        x = normal(ROWS, D, seed=1)
        for p in sf.layers(params):
            x = stage(p, x)
        y: Tensor = f(x) if not inside else x
        return y.square().sum()

    tangents = [sf.jvp(lambda p, f=f: loss(p, f), (params,), (v,))[1] for f in (applied, torch.sin)]
    message = refused(lambda: sf.jvp(sf.grad(loss), (params,), (v,)), RuntimeError)
    return message, float((tangents[0] - tangents[1]).abs())


@one
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", ["new", "old"])
def test_what_can_be_differentiated_once_is_not_differentiated_twice(world: World, kind: str, inside: bool) -> None:
    ((told, off),) = world.run(through_once, kind, inside)
    assert "marked with @once_differentiable" in told
    assert "Once" in told
    assert off < 1e-12


def test_a_function_is_seen_after_a_context_that_came_to_no_forward() -> None:
    own, seen, x = Old.__dict__["forward"], list[Any](), torch.ones(2, requires_grad=True)
    with functorch.applications_seen(lambda function, args: seen.append((function, len(args)))):
        for _ in range(2):
            Old._backward_cls()
        assert torch.equal(Old.apply(x), x.sin())
        Old._backward_cls()
    assert seen == [(Old, 1)]
    assert Old.__dict__["forward"] is own


# --- errors ---


def wrong_calls() -> dict[str, str]:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params, v = (sf.shard({"only": whole(seed)["layers"][0]}, mesh, sf.full_shard("shard"))["only"] for seed in (0, 1))
    x: Any = normal(ROWS, D, seed=1)
    layer = sf.stage(mlp)
    programs: dict[str, Callable[[], Any]] = {
        "structure": lambda: sf.jvp(layer, (params, x), (v,)),
        "no tuple": lambda: sf.jvp(torch.sin, x, x),
        "shape": lambda: sf.jvp(torch.sin, (x,), (x[0],)),
        "dtype": lambda: sf.jvp(torch.sin, (x,), (x.float(),)),
        "a number": lambda: sf.jvp(torch.sin, (x,), (1.0,)),
        "returned": lambda: sf.jvp(sf.stage(written), (params, x), (v, x)),
    }
    return {name: told(program) for name, program in programs.items()}


def written(p: Any, x: Tensor) -> Tensor:
    p["s"].detach().add_(1)
    return x


@two
def test_errors(world: World) -> None:
    for found in world.run(wrong_calls):
        assert "another structure" in found["structure"]
        assert "write (primals,)" in found["no tuple"]
        assert "leaf 0 of the primals of sin has shape (4, 6), torch.float64, and its tangent is (6,)" in found["shape"]
        assert "torch.float32" in found["dtype"]
        assert "its tangent is float" in found["a number"]
        assert "writes into" in found["returned"]


def unpacked() -> list[str]:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params, v = (sf.shard({"only": whole(seed)["layers"][0]}, mesh, sf.full_shard("shard"))["only"] for seed in (0, 1))
    x, found = normal(ROWS, D, seed=1), []
    for remat in (False, True):
        layer = sf.stage(mlp, remat=remat)

        def loss(p: Any, layer: Any = layer) -> Tensor:
            y = layer(p, x)
            return (y * torch.autograd.forward_ad.unpack_dual(y).tangent).sum()

        found.append(told(lambda loss=loss: sf.jvp(sf.grad(loss), (params,), (v,))))
    return found


@two
def test_the_gradient_of_a_tangent_that_is_unpacked_is_refused(world: World) -> None:
    for found in world.run(unpacked):
        assert all("the gradient of a tangent is not supported" in text for text in found)


@pytest.mark.parametrize("activation", [torch.tanh, F.silu, F.gelu])
def test_product_with_a_hessian_goes_through_vmap_of_a_product_with_a_matrix(activation: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    w, v, x = (torch.randn(3, 4, 4, generator=draw, dtype=torch.float64) for _ in range(3))

    def loss(w: Tensor) -> Tensor:
        return torch.func.vmap(lambda w, x: F.linear(activation(x @ w), w))(w, x).square().sum()

    want = torch.func.jvp(torch.func.grad(loss), (w,), (v,))[1]
    torch.testing.assert_close(sf.jvp(sf.grad(loss), (w,), (v,))[1], want, rtol=1e-12, atol=1e-12)


# --- transforms in a stage's function ---

INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": lambda p, x: torch.func.grad(lambda x: (x @ p["w"]).sin().sum())(x),
    "grad of a parameter": lambda p, x: x @ torch.func.grad(lambda w: (x @ w).sin().sum())(p["w"]),
    "vjp": lambda p, x: torch.func.vjp(lambda x: (x @ p["w"]).sin(), x)[1](x)[0],
    "vmap of grad": lambda p, x: torch.func.vmap(torch.func.grad(lambda x: (x @ p["w"]).sin().sum()))(x),
    "sf.grad": lambda p, x: sf.grad(lambda x: (x @ p["w"]).sin().sum())(x),
    "jvp": lambda p, x: torch.func.jvp(lambda x: (x @ p["w"]).sin(), (x,), (x,))[1],
}


def inside(name: str) -> list[float]:
    """Products with transforms in a stage's function, beside those of one process."""
    mesh, off = sf.make_mesh(shard=-1, device="cpu"), []
    plain, along = ([{"w": normal(D, D, seed=seed + k)} for k in range(2)] for seed in (0, 5))
    params, v = (sf.shard(tree, mesh, sf.full_shard("shard")) for tree in (plain, along))
    x = normal(ROWS, D, seed=2)

    def loss(ps: Any, layer: Any) -> Tensor:
        return layer(ps[1], layer(ps[0], x)).square().sum() / mesh.size()

    alone = functools.partial(loss, layer=INSIDE[name])

    def of_all(p: Any) -> Tensor:
        return loss(p, INSIDE[name]) * mesh.size()

    want = torch.func.jvp(torch.func.grad(of_all), (plain,), (along,))
    once = torch.func.jvp(alone, (plain,), (along,))
    for remat in (False, True):
        layer = sf.stage(INSIDE[name], remat=remat)
        found = sf.jvp(sf.grad(functools.partial(loss, layer=layer)), (params,), (v,))
        off += [distance(sf.unshard(a), b, floor=1.0) for a, b in zip(found, want, strict=True)]
        found = sf.jvp(lambda p, f=layer: loss(p, f), (params,), (v,))
        off += [distance(a, b, floor=1.0) for a, b in zip(found, once, strict=True)]
    return off


@two
@pytest.mark.parametrize("name", INSIDE)
def test_a_stage_whose_function_takes_derivatives_has_products(world: World, name: str) -> None:
    assert worst(world.run(inside, name)) < 1e-12


# --- what a stage of pairs returns ---


def returning(kind: str) -> list[float]:
    """Gradients and tangents where a loss writes into what a stage has returned, beside those where it does not."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params, v = (sf.shard([{"w": normal(D, D, seed=seed)}], mesh, sf.full_shard("shard")) for seed in (0, 1))
    x, off = normal(ROWS, D, seed=2), []

    def own(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x @ p["w"]) @ p["w"]
        return y, {"value": p["w"].view(-1), "transposed": p["w"].t(), "tangent": p["w"] + 1}[kind]

    for options in ({}, {"remat": True}, {"reshard": False}):
        layer = sf.stage(own, **options)  # type: ignore[call-overload]

        def product(writes: bool, layer: Any = layer) -> Any:
            def loss(ps: Any) -> Tensor:
                y, z = layer(ps[0], x)
                return y.square().sum() + (z.mul_(3) if writes else z * 3).square().sum()

            return sf.jvp(sf.grad(loss), (params,), (v,))

        off += [distance(a[0].values, b[0].values) for a, b in zip(product(False), product(True), strict=True)]
    return off


@two
@pytest.mark.parametrize("kind", ["value", "transposed", "tangent"])
def test_results_of_pairs_are_no_memory_of_parameters(world: World, kind: str) -> None:
    assert worst(world.run(returning, kind)) < 1e-12
