"""Programs in which stages under torch's own autograd could go wrong: each is right, or an error on every rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfn as sf
from shardfn.check import recording
from shardfn.compat import functorch
from shardfn.mesh import watchdog
from shardfn.mesh.scope import current_mesh, scope
from shardfn.stages.gather import Gathered
from shardfn.stages.saved import GatheredView
from shardfn.stages.schedule import schedule_of
from shardfn.testing import World, WorldError, world
from shardfn.transforms.autodiff import differentiating
from tests.models import distance, normal, variables
from tests.reference import worst
from tests.stages.test_forward_mode import LAYERS, off_of_torch

DEPTH, ROWS, D = 3, 4, 8
Layer = Callable[[Any, Tensor, int], Tensor]


def tree(extra: int = 0) -> list[dict[str, Tensor]]:
    shapes = {"w": (D, D), "b": (D,), **{f"e{i}": (D, D) for i in range(extra)}}
    return [
        {name: normal(*shape, seed=20 * k + i) for i, (name, shape) in enumerate(shapes.items())} for k in range(DEPTH)
    ]


def rows(rank: int) -> Tensor:
    return normal(ROWS, D, seed=50 + rank)


def mesh() -> Any:
    return sf.make_mesh(shard=-1, device="cpu")


def sharded(plain: Any) -> Any:
    return sf.shard(plain, mesh(), sf.full_shard("shard"))


def directions() -> list[dict[str, Tensor]]:
    return [
        {name: normal(*x.shape, seed=100 + 10 * k + i) for i, (name, x) in enumerate(p.items())}
        for k, p in enumerate(tree())
    ]


def net(layer: Callable[[Any, Tensor], Tensor], blocks: Any, x: Tensor) -> Tensor:
    for p in sf.layers(blocks):
        x = layer(p, x)
    return x.square().sum()


def wanted(layer: Layer, plain: Any) -> Any:
    """The gradient of all ranks' losses together, in one process."""
    xs = variables(plain)
    total = torch.stack(
        [
            functools.reduce(lambda x, p, k=k: layer(p, x, k), xs, rows(k)).square().sum()  # type: ignore[misc]
            for k in range(dist.get_world_size())
        ]
    ).sum()
    leaves, structure = optree.tree_flatten(xs)
    found: Any = [None] * len(leaves)
    if total.requires_grad:
        found = torch.autograd.grad(total, leaves, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return optree.tree_unflatten(structure, zeros)


def linear(p: Any, x: Tensor, rank: int = 0) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


# --- ranks do different things with what all of them gather ---


def branch_by_rank(p: Any, x: Tensor, rank: int) -> Tensor:
    return torch.tanh(x @ p["w"]) if rank == 0 else x * 2


def branch_without_parameters(p: Any, x: Tensor, rank: int) -> Tensor:
    return torch.tanh(x @ p["w"]) if rank == 1 else x.sin()


def handed_through(p: Any, x: Tensor, rank: int) -> Tensor:
    return linear(p, x) if rank == 0 else x


def experts(p: Any, x: Tensor, rank: int) -> Tensor:
    chosen = int(x.sum() > 0) + 2 * (rank == 1)
    return torch.tanh(x @ p[f"e{chosen}"] + p["b"])


def unused(p: Any, x: Tensor, rank: int) -> Tensor:
    return torch.tanh(x + p["b"])


def func_on_one_rank(p: Any, x: Tensor, rank: int) -> Tensor:
    return torch.func.grad(lambda y: torch.tanh(y @ p["w"]).sum())(x) if rank == 0 else linear(p, x)


def sums_on_the_way(p: Any, x: Tensor, rank: int) -> Tensor:
    """Saves something on one rank alone; all take part in a collective, wherever the function runs."""
    count = sf.psum(torch.ones(()), "shard") if current_mesh() is not None else torch.tensor(1.0)
    return (torch.tanh(x @ p["w"]) if rank == 0 else x + p["b"]) + 0 * count


# --- functions that save, write and return in other ways ---


def tuples_saved(p: Any, x: Tensor, rank: int) -> Tensor:
    """Hooks of a user may save anything, also what looks like something of ours."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, t._version), lambda pair: pair[0]):
        return linear(p, x)


def in_place(p: Any, x: Tensor, rank: int) -> Tensor:
    y = x @ p["w"]
    y += p["b"]
    return y.tanh_() * p["b"]


def mapped(p: Any, x: Tensor, rank: int) -> Tensor:
    return torch.func.vmap(lambda r: torch.tanh(r @ p["w"]) * p["b"])(x)


def two_outputs_of_one_memory(p: Any, x: Tensor, rank: int) -> Tensor:
    y = x @ p["w"]
    return y + y.T[:ROWS, :1]


RIGHT: list[Layer] = [
    linear, branch_by_rank, branch_without_parameters, handed_through, unused, func_on_one_rank, tuples_saved, in_place,
    mapped, two_outputs_of_one_memory, sums_on_the_way,
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"remat": True}, {"reshard": False}, {"reshard": "step"}, {"prefetch": 0}, {"prefetch": 3}
]  # fmt: skip


def gradients(layer: Layer, extra: int = 0) -> dict[str, float]:
    rank, plain = dist.get_rank(), tree(extra)
    flat, want, found = sharded(plain), wanted(layer, plain), {}
    for options in OPTIONS:
        staged = sf.stage(lambda p, x: layer(p, x, rank), **options)
        loss = lambda ps, staged=staged: net(staged, ps, rows(rank))  # noqa: E731
        got = [sf.grad(loss)(flat) for _ in range(2)]
        if layer in (linear, unused, in_place, mapped):  # as FSDP2 asks
            leaves = variables(flat)
            loss(leaves).backward()
            got.append(optree.tree_map(lambda x: x.grad, leaves))
        found[str(options)] = worst(distance(sf.unshard(one), want) for one in got)
    return found


@pytest.mark.parametrize("layer", [*RIGHT, experts], ids=lambda f: f.__name__)
@pytest.mark.parametrize("world", [(1, "processes"), (2, "processes"), (4, "threads")], indirect=True, ids=str)
def test_gradients_are_those_of_one_process(world: World, layer: Layer) -> None:
    for found in world.run(gradients, layer, 4 if layer is experts else 0):
        assert not {options: off for options, off in found.items() if not off < 1e-12}


def only_later() -> float:
    """Nobody saved a parameter in the first call; in later ones one rank does, and keeps what was gathered."""
    rank, plain, late = dist.get_rank(), tree(), [False]

    def layer(p: Any, x: Tensor, k: int) -> Tensor:
        return torch.tanh(x @ p["w"]) if k == 1 and late[0] else x + p["b"]

    staged, flat = sf.stage(lambda p, x: layer(p, x, rank)), sharded(plain)
    for now in (False, True, True):
        late[0] = now
        got = sf.grad(lambda ps: net(staged, ps, rows(rank)))(flat)
    return distance(sf.unshard(got), wanted(layer, plain))


@pytest.mark.world(2)
def test_a_parameter_that_is_read_only_in_a_later_step(world: World) -> None:
    assert worst(world.run(only_later)) < 1e-12


def empty() -> tuple[float, list[int]]:
    """Nobody saves a parameter, and one rank saves tensors without elements, whose address is 0."""
    rank, plain = dist.get_rank(), tree()

    def layer(p: Any, x: Tensor, k: int) -> Tensor:
        y = x + p["b"]
        return y + torch.tanh(y[:0]).sum() if k == 1 else y

    staged, flat, counts = sf.stage(lambda p, x: layer(p, x, rank)), sharded(plain), []
    for _ in range(3):
        with sf.collectives.ledger() as log:
            got = sf.grad(lambda ps: net(staged, ps, rows(rank)))(flat)
        counts.append(log.count(op="all_gather", backward=True))
    return distance(sf.unshard(got), wanted(layer, plain)), counts


@pytest.mark.world(2)
def test_a_tensor_without_elements_is_no_place(world: World) -> None:
    for off, counts in world.run(empty):
        assert off < 1e-12
        assert counts == [0, 0, 0]


def made_anew() -> list[int]:
    """Collectives of steps whose stages are made anew each time."""
    flat, counts = sharded(tree()), []
    for _ in range(3):
        with sf.collectives.ledger() as log:
            sf.grad(lambda ps: net(sf.stage(lambda p, x: linear(p, x)), ps, rows(dist.get_rank())))(flat)
        counts.append(len(log.records))
    return counts


@pytest.mark.world(2)
def test_a_stage_that_is_made_anew_agrees_once(world: World) -> None:
    for counts in world.run(made_anew):
        assert counts[1] == counts[2] == 3 * DEPTH - 3  # not gathered again: the first, the last two


# --- parts of the loss, and of the graph ---


def in_the_middle() -> tuple[float, float]:
    """A gradient with respect to shards, inside of a loss of which a gradient is taken."""
    rank, plain, inner = dist.get_rank(), tree(), list[Any]()
    staged, flat = sf.stage(linear), sharded(plain)

    def loss(ps: Any) -> Tensor:
        value = net(staged, ps, rows(rank))
        leaves = optree.tree_leaves(ps)
        inner[:] = torch.autograd.grad(value, leaves, retain_graph=True)
        return value

    outer, want = sf.grad(loss)(flat), wanted(linear, plain)
    given = optree.tree_unflatten(optree.tree_structure(flat), inner)
    return distance(sf.unshard(given), want), distance(sf.unshard(outer), want)


@pytest.mark.world(2)
def test_a_gradient_in_the_middle_of_a_loss(world: World) -> None:
    assert worst(off for pair in world.run(in_the_middle) for off in pair) < 1e-12


def of_inputs() -> list[float]:
    """Gradients of inputs alone, and of inputs and parameters: a penalty by a gradient, as of a critic."""
    rank, plain, flat = dist.get_rank(), tree(), sharded(tree())
    staged = sf.stage(linear)

    def penalty(layer: Any, ps: Any, k: int) -> Tensor:
        x = rows(k).requires_grad_()
        (g,) = torch.autograd.grad(net(layer, ps, x), [x], create_graph=True)
        return (g.norm() - 1).square()

    x = rows(rank).requires_grad_()
    whole = tree()
    (alone,) = torch.autograd.grad(net(staged, flat, x), [x])
    y = rows(rank).requires_grad_()
    (want,) = torch.autograd.grad(net(linear, whole, y), [y])
    offs = [distance(alone, want)]
    got = sf.grad(lambda ps: penalty(staged, ps, rank))(flat)
    xs = variables(plain)
    torch.stack([penalty(linear, xs, k) for k in range(dist.get_world_size())]).sum().backward()
    return [*offs, distance(sf.unshard(got), optree.tree_map(lambda x: x.grad, xs))]


@pytest.mark.parametrize("world", [(1, "processes"), (2, "processes"), (4, "threads")], indirect=True, ids=str)
def test_gradients_of_inputs_and_of_those(world: World) -> None:
    for offs in world.run(of_inputs):
        assert worst(offs) < 1e-12


def twice() -> float:
    """The derivative of a derivative by `create_graph`, where ranks use parameters differently."""
    rank, plain, flat = dist.get_rank(), tree(), sharded(tree())

    def second(layer: Any, ps: Any, k: int) -> Any:
        leaves = optree.tree_leaves(ps)
        value = net(layer, ps, rows(k))
        first = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
        return torch.stack([g.square().sum() for g in first if g is not None]).sum()

    def layer(p: Any, x: Tensor, k: int) -> Tensor:
        return linear(p, x) if k == 0 else torch.sin(x * p["b"])

    leaves = variables(flat)
    staged = sf.stage(lambda p, x: layer(p, x, rank))
    # The sum over ranks of squares of pieces of the summed gradient.
    second(staged, leaves, rank).backward()
    got = sf.unshard(optree.tree_map(lambda x: x.grad, leaves))
    xs = variables(plain)
    flat_xs = optree.tree_leaves(xs)
    n = dist.get_world_size()
    value = torch.stack([net(functools.partial(layer, k=k), xs, rows(k)) for k in range(n)]).sum()
    first = torch.autograd.grad(value, flat_xs, create_graph=True, allow_unused=True)
    torch.stack([g.square().sum() for g in first if g is not None]).sum().backward()
    return distance(got, optree.tree_map(lambda x: x.grad, xs))


@pytest.mark.parametrize("world", [(1, "processes"), (2, "processes"), (4, "threads")], indirect=True, ids=str)
def test_a_derivative_of_a_derivative(world: World) -> None:
    assert worst(world.run(twice)) < 1e-11


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.world(2, "processes")
def test_a_product_with_a_hessian(world: World, name: str) -> None:
    for options in ({}, {"remat": True}, {"reshard": False}):
        for off in world.run(off_of_torch, name, "full_shard", options):
            assert worst(off) < 1e-13, (options, off)


def held_by_a_product(unread: bool) -> tuple[int, int]:
    """How many stages' gathered parameters and tangents are alive after a forward pass of duals, and of how many."""
    flat, direction, alive = sharded(tree()), sharded(tree()), list[Any]()

    def layer(p: Any, x: Tensor) -> Tensor:
        with functorch.outside_transforms():
            parts = [part for leaf in optree.tree_leaves(p) for part in functorch.unpacked(functorch.unwrapped(leaf))]
        alive.extend(StorageWeakRef(part.untyped_storage()) for part in parts if part is not None)
        return torch.tanh(F.layer_norm(x @ p["w"], (D,), p["b"]))

    staged, counts = sf.stage(layer), list[int]()

    def loss(params: Any) -> Tensor:
        x = rows(dist.get_rank())
        alive.clear()
        for p in params:
            x = staged(p, x)
        counts.append(sum(not storage.expired() for storage in alive))
        return x.square().sum()

    for _ in range(2):  # ranks agree in the first call on what backward needs
        sf.jvp(differentiating(loss, unread=unread), (flat,), (direction,))
    return counts[-1], len(alive)


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.world(2, "processes")
def test_a_product_with_a_hessian_keeps_no_parameters(world: World, unread: bool) -> None:
    for held, of in world.run(held_by_a_product, unread):
        assert held <= of // DEPTH, (held, of)  # those of the last stage


def counted() -> tuple[float, int, float]:
    """A function that draws random numbers around torch.func runs once, and draws what it would outside of a stage."""
    count, found = [0], []

    def layer(p: Any, x: Tensor) -> Tensor:
        count[0] += 1
        mask = torch.rand(ROWS, D, dtype=torch.float64)
        return torch.func.grad(lambda y: (torch.tanh(y @ p["w"]) * mask).sum())(x)

    whole = variables(tree())
    for f, ps in ((sf.stage(layer), sharded(tree())), (layer, whole)):
        torch.manual_seed(dist.get_rank())
        found.append(sf.value_and_grad(lambda ps, f=f: net(f, ps, rows(dist.get_rank())))(ps)[0].item())
    return found[0], count[0], found[1]


@pytest.mark.world(2)
def test_a_function_with_torch_func_inside_runs_once(world: World) -> None:
    for staged, count, plain in world.run(counted):
        assert (staged, count) == (plain, 2 * DEPTH)


# --- a second run ---


def generator_rewound() -> float:
    rank, flat = dist.get_rank(), sharded(tree())
    grads = []
    for remat in (False, True):
        generator = torch.Generator().manual_seed(rank)

        def layer(p: Any, x: Tensor, generator: torch.Generator) -> Tensor:
            return linear(p, x) * (torch.rand(x.shape, generator=generator, dtype=x.dtype) > 0.3)

        staged = sf.stage(layer, remat=remat)
        loss = lambda ps: net(lambda p, x: staged(p, x, generator), ps, rows(rank))  # noqa: B023, E731
        grads.append((sf.grad(loss)(flat), generator.get_state()))
    assert torch.equal(grads[0][1], grads[1][1])
    return distance(grads[0][0], grads[1][0])


@pytest.mark.world(2)
def test_a_generator_among_the_arguments_is_rewound(world: World) -> None:
    assert worst(world.run(generator_rewound)) == 0


def probed_once(product: bool) -> float:
    """The first run makes a graph more than later ones, which is dropped before it ends."""
    seen: list[int] = []

    def layer(p: Any, x: Tensor) -> Tensor:
        if not seen:
            seen.append(int((x @ p["w"].sin()).cos().sum().isfinite()))
        return linear(p, x)

    plain = tree()

    def of(staged: Any, params: Any) -> Any:
        gradient = sf.grad(lambda ps: net(staged, ps, rows(0)))
        return sf.jvp(gradient, (params,), (params,))[1] if product else gradient(params)

    found = sf.unshard(of(sf.stage(layer, remat=True), sharded(plain)))
    size = float(dist.get_world_size())
    return distance(found, optree.tree_map(lambda g: size * g, of(linear, plain)))


@pytest.mark.parametrize("product", [False, True])
@pytest.mark.world(2)
def test_a_first_run_may_try_something(world: World, product: bool) -> None:
    assert worst(world.run(probed_once, product)) < 1e-12


def reordered() -> str:
    """Saves as many tensors of the same shapes in its second run, of operations in another order."""
    runs = [0]

    def layer(p: Any, x: Tensor) -> Tensor:
        runs[0] += 1
        a, b, c = x.T @ x, p["w"].tanh(), p["w"].sin()
        return x + x @ (((a @ b) @ c) if runs[0] % 2 else (a @ (b @ c)))

    def loss(ps: Any) -> Tensor:
        return sf.stage(layer, remat=True)(ps[0], rows(0)).square().sum()

    try:
        sf.grad(loss)(sharded(tree()))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.world(2)
def test_a_second_run_of_other_operations_is_an_error(world: World) -> None:
    for told in world.run(reordered):
        assert "ran again for its gradient and returned something else: first operation 2, MmBackward0 of" in told


def closed_over() -> float:
    """A recomputed function that closes over an activation and over a leaf, which need gradients."""
    x, rank = rows(dist.get_rank()), dist.get_rank()
    flat, w = sharded(tree()), normal(D, D, seed=77).requires_grad_()

    def value(layer: Any, ps: Any) -> Tensor:
        h = torch.tanh(x @ w)
        return net(layer(lambda p, x: linear(p, x, rank) * h + x @ w), ps, x)

    found = torch.autograd.grad(value(lambda f: sf.stage(f, remat=True), flat), w)[0]
    return float((found - torch.autograd.grad(value(lambda f: f, tree()), w)[0]).abs().max())


@pytest.mark.world(2)
def test_a_second_run_reads_what_the_function_closes_over(world: World) -> None:
    assert worst(world.run(closed_over)) < 1e-12


def attends(p: Any, x: Tensor, rank: int = 0) -> Tensor:
    h = (x @ p["w"]).view(1, 1, ROWS, D)
    return x + F.scaled_dot_product_attention(h, h, h).view(ROWS, D) + p["b"]


def with_kernels() -> float:
    """The kernel of attention is chosen around forward alone, as by a program that calls backward later."""
    staged, flat = sf.stage(attends, remat=True), sharded(tree())

    def loss(ps: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return net(staged, ps, rows(dist.get_rank()))

    found = sf.unshard(sf.grad(loss)(flat))
    with sdpa_kernel(SDPBackend.MATH):
        return distance(found, wanted(attends, tree()))


@pytest.mark.world(2)
def test_a_second_run_uses_the_kernels_of_the_first(world: World) -> None:
    assert worst(world.run(with_kernels)) < 1e-12


def with_nested_tensors(remat: bool) -> float:
    def layer(p: Any, x: Tensor) -> Tensor:
        with warnings.catch_warnings(action="ignore"):  # of a prototype
            rows_apart = torch.nested.as_nested_tensor([x[:1] @ p["w"], x[1:] @ p["w"]])
        return torch.nested.to_padded_tensor(rows_apart, 0.0).flatten(0, 1)[:ROWS].tanh() + p["b"]

    flat, plain = sharded(tree()), tree()
    got = sf.grad(lambda ps: net(sf.stage(layer, remat=remat), ps, rows(dist.get_rank())))(flat)
    return distance(sf.unshard(got), wanted(lambda p, x, k: layer(p, x), plain))


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.world(2)
def test_tensors_that_have_no_shape(world: World, remat: bool) -> None:
    assert worst(world.run(with_nested_tensors, remat)) < 1e-12


def counts_calls(product: bool) -> str:
    """A function of more than its arguments, in a stage that runs again."""
    count = [0]

    def layer(p: Any, x: Tensor) -> Tensor:
        count[0] += 1
        return linear(p, x) * count[0]

    gradient, params = sf.grad(lambda ps: net(sf.stage(layer, remat=True), ps, rows(0))), sharded(tree())
    try:
        sf.jvp(gradient, (params,), (params,)) if product else gradient(params)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("product", [False, True])
@pytest.mark.world(2)
def test_a_second_run_that_gives_something_else_is_an_error(world: World, product: bool) -> None:
    for told in world.run(counts_calls, product):
        assert "ran again for its gradient and returned" in told


def modified(remat: bool) -> str:
    """What backward needs is written into after the stage."""

    def loss(ps: Any) -> Tensor:
        x = sf.stage(linear, remat=remat)(ps[0], rows(0))
        y = sf.stage(linear, remat=remat)(ps[1], x)
        with torch.no_grad():
            (x if remat else y).mul_(2)
        return y.sum()

    try:
        sf.grad(loss)(sharded(tree()))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.world(2)
def test_a_saved_tensor_that_is_written_into_is_an_error(world: World, remat: bool) -> None:
    for told in world.run(modified, remat):
        assert "modified by an inplace operation" in told


# --- parameters that are kept, returned, or written into ---


def returned(options: dict[str, Any], strategy: str) -> tuple[float, float, bool]:
    """A returned parameter is the caller's own, who may write into it."""
    place = sf.full_shard("shard") if strategy == "full_shard" else sf.ddp("shard")
    flat = sf.shard(tree(), mesh(), place)
    before = optree.tree_map(torch.clone, flat)
    get = sf.stage(lambda p: (p["w"], p["w"].T[0], p["b"]), **options)
    staged = sf.stage(linear, **options)

    def loss(ps: Any, writes: bool) -> Tensor:
        w, column, b = get(ps[0])
        total = w.sum() + (column * column).sum() + b.prod()
        if writes:
            with torch.no_grad():
                w.mul_(2)
                b.add_(1)
        return staged(ps[0], rows(dist.get_rank())).square().sum() + total

    values = [sf.value_and_grad(lambda ps, w=w: loss(ps, w))(flat) for w in (False, False)]
    with torch.no_grad():
        plain = get(flat[0])
        plain[0].mul_(3)
        again = get(flat[0])
    off = distance(again[0], tree()[0]["w"])
    total = lambda p: (  # noqa: E731
        dist.get_world_size() * (p[0]["w"].sum() + p[0]["w"].T[0].square().sum() + p[0]["b"].prod())
        + torch.stack([linear(p[0], rows(k)).square().sum() for k in range(dist.get_world_size())]).sum()
    )
    want = torch.func.grad(total)(tree())
    got = distance(sf.unshard(values[1][1]), want)
    return got, off, distance(flat, before) == 0


@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
@pytest.mark.parametrize("options", [{}, {"reshard": False}, {"reshard": "step"}, {"remat": True}], ids=str)
@pytest.mark.parametrize("world", [(1, "processes"), (2, "processes")], indirect=True, ids=str)
def test_returned_parameters_are_the_callers_own(world: World, options: dict[str, Any], strategy: str) -> None:
    for off, again, same in world.run(returned, options, strategy):
        assert off < 1e-12
        assert again == 0
        assert same


def writes(how: str, strategy: str) -> dict[str, str]:
    place = sf.full_shard("shard") if strategy == "full_shard" else sf.ddp("shard")

    def layer(p: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            if how == "whole":
                p["w"].mul_(2)
            elif how == "view":
                p["w"][0].zero_()
            elif how == "detached":
                p["w"].detach().T.add_(1)
            elif how == "data":
                p["w"].data[0] += 1
            else:
                p["w"].data = p["w"].data * 2
        return linear(p, x)

    flat = sf.shard(tree(), mesh(), place)
    loss = lambda ps: net(sf.stage(layer), ps, rows(0))  # noqa: E731
    ways: dict[str, Callable[[], Any]] = {
        "alone": lambda: loss(flat),
        "grad": lambda: sf.grad(loss)(flat),
        "torch.func": lambda: torch.func.grad(loss)(flat),
        "vmap": lambda: torch.func.vmap(lambda x: net(sf.stage(layer), flat, x))(rows(0)[None]),
        "jvp": lambda: torch.func.jvp(loss, (flat,), (flat,)),
        "product": lambda: sf.jvp(sf.grad(loss), (flat,), (flat,)),
    }
    if how == "other data":  # it gets pairs that are its own
        del ways["product"]
    found = {}
    for way, take in ways.items():
        found[way] = "nothing"
        try:
            take()
        except RuntimeError as error:
            found[way] = str(error)
    return found


@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
@pytest.mark.parametrize("how", ["whole", "view", "detached", "data", "other data"])
@pytest.mark.world(2)
def test_writing_into_a_parameter_is_an_error(world: World, how: str, strategy: str) -> None:
    for told in world.run(writes, how, strategy):
        for way, said in told.items():
            own = r"writes into its parameters|writes into '\d.w'|something else into \.data of '\d.w'"
            assert re.search(own + "|mutating directly with `.data`", said), (way, said)


def in_each_other(stage: Any, options: Any, ps: Any, k: int, drops: bool = False) -> Tensor:
    """A stage in a stage, whose result some ranks may drop, and one that closes over an activation."""
    inner = stage(linear, **options)
    outer = stage(lambda p, x: linear(p, inner(ps[1], x @ p["w"])) + inner(ps[1], x), **options)
    dropping = stage(lambda p, x: (inner(ps[0], x) + linear(p, x), linear(p, x))[drops and k % 2 == 0], **options)
    h = outer(ps[0], outer(ps[2], rows(k)))
    closing = stage(lambda p, x: h * torch.sigmoid(x @ p["w"]))
    return closing(ps[2], dropping(ps[1], h)).square().sum()


NESTS: dict[str, dict[str, Any]] = {
    "kept": {},
    "remat": {"remat": True},
    "policy": {"remat": [torch.ops.aten.mm.default]},
    "no reshard": {"reshard": False},
}


def stage_in_stage(kind: str) -> dict[str, float]:
    rank, plain, n, options = dist.get_rank(), tree(), dist.get_world_size(), NESTS[kind]
    flat, along, whole = sharded(plain), sharded(directions()), directions()
    plainly: Any = lambda f, **_: f  # noqa: E731

    def loss(ps: Any, drops: bool = False) -> Tensor:
        return in_each_other(sf.stage, options, ps, rank, drops)

    def total(ps: Any, drops: bool = False) -> Tensor:
        return torch.stack([in_each_other(plainly, {}, ps, k, drops) for k in range(n)]).sum()

    found = {}
    for drops in (False, True):
        gradient = sf.grad(lambda ps, drops=drops: loss(ps, drops))
        want = torch.func.grad(lambda ps, drops=drops: total(ps, drops))(plain)
        found[f"grad, {drops}"] = distance(sf.unshard(gradient(flat)), want)
        with sf.collectives.ledger() as log:
            gradient(flat)
        found[f"calls, {drops}"] = log.count(op="reduce_scatter")
    leaves, want = variables(flat), torch.func.grad(total)(plain)
    loss(leaves).backward()
    found["backward"] = distance(sf.unshard(optree.tree_map(lambda x: x.grad, leaves)), want)
    found["torch.func"] = distance(sf.unshard(torch.func.grad(loss)(flat)), want)
    tangent = torch.func.jvp(lambda ps: in_each_other(plainly, {}, ps, rank), (plain,), (whole,))[1]
    found["jvp"] = float((torch.func.jvp(loss, (flat,), (along,))[1] - tangent).abs())
    if not options:
        product = torch.func.jvp(torch.func.grad(total), (plain,), (whole,))[1]
        found["product"] = distance(sf.unshard(sf.jvp(sf.grad(loss), (flat,), (along,))[1]), product)
    return found


@pytest.mark.parametrize("options", NESTS)
@pytest.mark.parametrize("world", [(n, "processes") for n in (1, 2, 4)], indirect=True, ids=str)
def test_stages_in_each_other(world: World, options: str) -> None:
    for found in world.run(stage_in_stage, options):
        calls = [found.pop(f"calls, {drops}") for drops in (False, True)]
        assert calls == ([9, 9] if world.size > 1 else [0, 0])
        assert worst(found.values()) < 1e-11, found


def closes_over_with_remat() -> str:
    """A product with a Hessian of a function that runs again, and closes over what has a gradient."""
    flat = sharded(tree())

    def loss(ps: Any) -> Tensor:
        h = sf.stage(linear)(ps[0], rows(0))
        return sf.stage(lambda p, x: h * linear(p, x), remat=True)(ps[1], rows(0)).sum()

    try:
        sf.jvp(sf.grad(loss), (flat,), (flat,))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.world(2)
def test_what_a_function_that_runs_again_closes_over_is_told_in_a_product(world: World) -> None:
    for told in world.run(closes_over_with_remat):
        assert "with remat, its function uses a tensor that needs a gradient" in told


class Marked(Tensor):
    """A subclass without anything of its own."""


def odd_tensors(kind: str) -> dict[str, float]:
    """Sparse gradients and results, and inputs of a subclass."""
    rank, n, plain = dist.get_rank(), dist.get_world_size(), tree()
    at = [torch.tensor([1, 2, k, 2]) for k in range(n)]
    layers: dict[str, Layer] = {
        "sparse gradient": lambda p, x, k: x + F.embedding(at[k], p["w"], sparse=True),
        "sparse result": lambda p, x, k: linear(p, x).relu().to_sparse(),
        "subclass": lambda p, x, k: linear(p, x),
    }
    found = {}
    for name, layer in layers.items():
        dense = lambda p, x, k, layer=layer: layer(p, x, k).to_dense()  # noqa: E731
        given: Any = (lambda x: x.as_subclass(Marked)) if name == "subclass" else lambda x: x
        staged = sf.stage(lambda p, x, layer=layer: layer(p, x, rank), **NESTS[kind])
        got = sf.grad(
            lambda ps, f=staged, given=given: net(
                lambda p, x: f(p, given(x)).to_dense().as_subclass(Tensor), ps, rows(rank)
            )
        )
        found[name] = distance(sf.unshard(got(sharded(plain))), wanted(dense, plain))
    return found


@pytest.mark.parametrize("options", NESTS)
@pytest.mark.world(2, "processes")
def test_sparse_tensors_and_subclasses(world: World, options: str) -> None:
    for found in world.run(odd_tensors, options):
        assert worst(found.values()) < 1e-12, found


# --- what is left behind ---


def left_behind() -> tuple[list[int], list[int], float]:
    """After each backward without a step, and after each step, nothing is open, kept, or on a tape."""
    rank, flat = dist.get_rank(), sharded(tree())
    staged, schedule = sf.stage(linear), schedule_of(flat[0].layout.grid.mesh())
    loose, stepped = [], []

    def held() -> int:
        return len(schedule.tape.runs) + len(schedule.buffers) + len(schedule.open) + len(schedule.kept)

    for _ in range(3):
        leaves = variables(flat)
        net(staged, leaves, rows(rank)).backward()
        loose.append(held())
        sf.grad(lambda ps: net(staged, ps, rows(rank)))(flat)
        stepped.append(held())
    return loose, stepped, distance(sf.unshard(optree.tree_map(lambda x: x.grad, leaves)), wanted(linear, tree()))


@pytest.mark.world(2)
def test_nothing_is_left_behind(world: World) -> None:
    for loose, stepped, off in world.run(left_behind):
        assert loose == stepped == [0, 0, 0]
        assert off < 1e-12


def kept() -> list[int]:
    """How many parameters calls keep for backward, once ranks have agreed on it: of functions that save them or not."""
    flat, found = sharded(tree()), []
    schedule = schedule_of(flat[0].layout.grid.mesh())
    for layer in (lambda p, x: linear(p, x), lambda p, x: unused(p, x, 0)):
        staged = sf.stage(layer, reshard=False)
        for _ in range(2):
            y = net(staged, variables(flat), rows(0))
            count = len(schedule.tape.held)
            y.backward()
        found.append(count)
    return found


@pytest.mark.world(2)
def test_what_backward_does_not_ask_for_is_not_kept(world: World) -> None:
    for counts in world.run(kept):
        assert counts == [DEPTH - 1, 0]  # nobody asks for the gradient of the first one's argument


def attributed() -> tuple[str, bool]:
    """To what a collective after a step is attributed whose frozen stages have no entry in backward."""
    flat, staged = sharded(tree()), sf.stage(linear)

    def loss(ps: Any, x: Tensor) -> Tensor:
        for p, trains in zip(ps, (True, False, True, False), strict=True):
            x = staged(p if trains else optree.tree_map(torch.detach, p), x)
        return x.square().sum()

    with sf.collectives.ledger() as log:
        sf.grad(loss)([*flat, flat[0]], rows(dist.get_rank()))
        with scope(mesh()):
            sf.psum(torch.ones(3), "shard")
    last = log.records[-1]
    return last.stage, last.backward


@pytest.mark.world(2)
def test_what_follows_a_step_is_not_attributed_to_its_stages(world: World) -> None:
    for found in world.run(attributed):
        assert found == ("", False)


def freed_without_the_collector() -> list[int]:
    """Whole parameters that are in memory after a step, with Python's garbage collector off."""
    flat, found = sharded(tree()), []
    pool = schedule_of(flat[0].layout.grid.mesh()).gathering.pool
    gc.collect()
    gc.disable()
    try:
        for options in OPTIONS[:3]:
            staged = sf.stage(linear, **options)
            for _ in range(3):
                sf.grad(lambda ps, staged=staged: net(staged, ps, rows(0)))(flat)
            found.append(len(pool.buffers))
    finally:
        gc.enable()
    return found


@pytest.mark.world(2)
def test_a_step_leaves_no_cycles_that_hold_memory(world: World) -> None:
    for counts in world.run(freed_without_the_collector):
        assert max(counts) <= DEPTH
        assert counts[0] <= 2


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise ValueError("on purpose")


def interrupted(where: str) -> tuple[str, float]:
    """A step after an error on all ranks, in the middle of forward or backward."""
    rank, flat, calls = dist.get_rank(), sharded(tree()), [0]

    def layer(p: Any, x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            if where == "forward":
                raise ValueError("on purpose")
            return Fails.apply(linear(p, x))
        return linear(p, x)

    staged, told = sf.stage(layer), ""
    try:
        sf.grad(lambda ps: net(staged, ps, rows(rank)))(flat)
    except ValueError as error:
        told = str(error)
    return told, distance(sf.unshard(sf.grad(lambda ps: net(staged, ps, rows(rank)))(flat)), wanted(linear, tree()))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.world(2)
def test_a_step_after_an_error(world: World, where: str) -> None:
    for told, off in world.run(interrupted, where):
        assert told == "on purpose"
        assert off < 1e-12


# --- memory that is used again ---


@sf.debug(memory=False)
def in_a_graph() -> list[float]:
    """Evaluations by a graph beside those without one; what the pool has does not matter to the graph."""
    flat, staged = sharded(tree()), sf.stage(linear)

    @sf.cuda_graph
    def step(params: Any, x: Tensor) -> Any:
        with torch.no_grad():
            for p in sf.layers(params):
                x = staged(p, x)
        return params, x

    off = []
    for i in range(6):
        flat, y = step(flat, rows(i))
        off.append(distance(y, functools.reduce(lambda x, p: linear(p, x), tree(), rows(i))))
    return off


def test_an_evaluation_has_a_graph_whatever_was_gathered_before() -> None:
    with World(2, deadline=60) as fresh:  # whose buffers have no views yet
        assert worst(fresh.run(in_a_graph)) < 1e-12


class Wrapping(torch.utils._python_dispatch.TorchDispatchMode):
    """What operations make is of a class of its own."""

    class Wrapped(Tensor):
        pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.as_subclass(self.Wrapped) if type(found) is Tensor else found


def under_a_mode() -> list[str]:
    """The kinds of parameters that a stage gets after a call under a mode."""
    flat, kinds = sharded(tree()), []

    def noting(p: Any, x: Tensor) -> Tensor:
        kinds.append(type(p["w"]).__name__)
        return linear(p, x)

    staged = sf.stage(noting)
    with Wrapping(), torch.no_grad():
        net(staged, flat, rows(0))
    kinds.clear()
    sf.grad(lambda ps: net(staged, ps, rows(0)))(flat)
    return kinds


@pytest.mark.world(2)
def test_a_mode_leaves_nothing_in_buffers(world: World) -> None:
    for kinds in world.run(under_a_mode):
        assert set(kinds) == {"Tensor"}


def backward_in_a_transform(cold: bool) -> float:
    """A graph from outside, which torch.func differentiates around."""
    flat, x, ones = sharded(tree()), rows(0).requires_grad_(), torch.ones(ROWS, D, dtype=torch.float64)
    leaves, staged = variables(flat), sf.stage(linear)
    y = x
    for p in leaves:
        y = staged(p, y)
    if cold:
        schedule = schedule_of(flat[0].layout.grid.mesh())
        schedule._drop_buffers()
        schedule.gathering.pool.trim(all=True)

    def gradient() -> Tensor:
        return torch.autograd.grad(y, x, ones, retain_graph=True)[0]

    inside = torch.func.grad(lambda t: (gradient() * t).sum())(torch.ones((), dtype=torch.float64))
    return distance(inside, gradient().sum())


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.world(2)
def test_a_backward_pass_inside_of_a_transform(world: World, cold: bool) -> None:
    assert worst(world.run(backward_in_a_transform, cold)) < 1e-12


class _Failing:
    def wait(self) -> None:
        raise RuntimeError("a rank is gone")


def failed_gather() -> tuple[list[str], bool, int]:
    """What two waits for a gather that fails say, whether their frames are freed at once, and what the pool keeps."""
    flat = sharded(tree())
    schedule = schedule_of(flat[0].layout.grid.mesh())
    sf.stage(linear)(flat[0], rows(0))
    plan, _ = schedule.last[(flat[0].layout,)]
    gathered = Gathered(plan, [flat[0].values], schedule.gathering, again=False)
    gathered.works.append(_Failing())

    def waited(gathered: Gathered) -> tuple[str, Any]:
        kept = torch.ones(())
        try:
            gathered.wait()
        except RuntimeError as error:
            return str(error), weakref.ref(kept)
        raise AssertionError("it does not fail")

    gc.disable()
    try:
        said, alive = zip(*[waited(gathered) for _ in range(2)], strict=True)
        freed = all(kept() is None for kept in alive)
    finally:
        gc.enable()
    del gathered
    schedule.gathering.pool.trim()
    return list(said), freed, len(schedule.gathering.pool.buffers)


@pytest.mark.world(2)
def test_a_gather_that_failed_says_so_again_and_keeps_nothing(world: World) -> None:
    for said, freed, kept in world.run(failed_gather):
        assert all("gathering its parameters failed on this rank: a rank is gone" in text for text in said)
        assert len(said) == 2
        assert freed
        assert kept <= 1


# --- checked calls ---


def uncut(p: Any, x: Tensor, axis: Any = ()) -> Tensor:
    h = sf.parallel.to_parallel(F.rms_norm(x, (D,), p["n"]), axis)
    return x + sf.parallel.from_parallel(torch.tanh(h @ p["up"]) @ p["down"], axis) + p["b"]


def checked(remat: bool, product: bool) -> float:
    """A derivative of a tensor-parallel model, in a call whose gradients are judged."""
    shapes = {"n": (D,), "b": (D,), "up": (D, 2 * D), "down": (2 * D, D)}
    plain = [{name: normal(*s, seed=9 * k + len(s)) for name, s in shapes.items()} for k in range(DEPTH)]
    specs = sf.by_path([(r".*up", sf.P(None, "tensor")), (r".*down", sf.P("tensor")), (r".*", sf.P())])
    grid = sf.make_mesh(shard=2, tensor=2, device="cpu")
    flat, staged = sf.shard(plain, grid, sf.full_shard("shard"), specs=specs), sf.stage(uncut, remat=remat)

    @sf.shard_map(mesh=grid, in_specs=(..., sf.P("shard")), out_specs=...)
    def found(flat: Any, x: Tensor) -> Any:
        return of(sf.grad(lambda ps: sf.psum(net(lambda p, x: staged(p, x, "tensor"), ps, x), "shard")), flat)

    def of(gradient: Any, at: Any) -> Any:
        return sf.jvp(gradient, (at,), (at,))[1] if product else gradient(at)

    result = sf.unshard(found(flat, rows(grid.get_local_rank("shard"))))
    return distance(result, of(sf.grad(lambda ps: net(uncut, ps, torch.cat([rows(0), rows(1)]))), plain))


@pytest.mark.world(4)
@pytest.mark.parametrize("product", [False, True], ids=["gradient", "product with a Hessian"])
@pytest.mark.parametrize("remat", [False, True], ids=["", "recomputed"])
def test_a_saved_weight_is_known_to_be_the_same_on_ranks(world: World, remat: bool, product: bool) -> None:
    """What backward finds in a buffer again varies along the axes of its parameter, not along those of the buffer."""
    assert worst(world.run(checked, remat, product)) < 1e-12


def known_of_places() -> list[bool]:
    """Whether a checked call knows of each weight that backward finds again what it knew of the parameter."""
    specs = sf.by_path([(r".*w", sf.P(None, "tensor")), (r".*", sf.P())])
    grid = sf.make_mesh(shard=2, tensor=2, device="cpu")
    flat = sf.shard(tree(), grid, sf.full_shard("shard"), specs=specs)
    staged, same, plain = (
        sf.stage(lambda p, x: torch.tanh(x @ p["w"]) @ p["w"].mT + x * p["b"]),
        [],
        GatheredView.rebuilt_view,
    )

    def found(place: GatheredView) -> Tensor:
        x = plain(place)
        recorder = recording.current()
        assert recorder is not None
        assert place.noted is not None
        known, was = (recorder.trace.nodes[n] for n in (recorder.values.node_of(x), place.noted[1]))
        same.append((known.axes, known.effect) == (was.axes, was.effect))
        return x

    @sf.shard_map(mesh=grid, in_specs=(..., sf.P("shard")), out_specs=...)
    def step(flat: Any, x: Tensor) -> Any:
        return sf.grad(lambda ps: sf.psum(net(staged, ps, x), ("shard", "tensor")))(flat)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(sf.check.VaryingError):
        patch.setattr(GatheredView, "rebuilt_view", found)
        step(flat, rows(grid.get_local_rank("shard")))
    return same


@pytest.mark.world(4)
def test_a_saved_weight_is_known_to_vary_along_its_own_axes(world: World) -> None:
    for same in world.run(known_of_places):
        assert len(same) >= 2 * DEPTH
        assert all(same)


# --- ranks that run different stages ---


def different(how: str) -> None:
    watchdog.PATIENCE, watchdog.TICK = 0.3, 0.05
    plain = tree()
    if how == "other sizes":
        plain[1] = {"w": torch.cat([plain[1]["w"]] * 3, 1), "b": plain[1]["b"]}
    flat, staged, rank = sharded(plain), sf.stage(lambda p, x: torch.tanh(x @ p["w"][:, :D])), dist.get_rank()
    for k in range(DEPTH):  # so that each is known
        sf.grad(lambda ps, k=k: staged(ps[k], rows(0)).sum())(flat)
    if how == "forward and backward":
        if rank == 0:
            sf.grad(lambda x: staged(flat[2], staged(flat[1], staged(flat[0], x))).sum())(rows(0))
        for k in (0, 1, 2, 0):
            staged(flat[k], rows(0))
    else:
        sf.grad(lambda ps: staged(ps[rank], staged(ps[2], rows(0))).square().sum())(flat)


@pytest.mark.parametrize("how", ["same size", "other sizes", "forward and backward"])
def test_ranks_that_run_different_stages_are_told_on_each(how: str) -> None:
    words = ("'0'", "'1'") if how != "forward and backward" else ("second all_gather of '0'", "for all_gather of '0'")
    with World(2, kind="processes", deadline=60) as world, pytest.raises(WorldError) as caught:
        world.run(different, how)
    assert len(caught.value.failures) == 2
    for failure in caught.value.failures.values():
        assert failure.how == "raised", failure
        assert all(word in failure.message for word in words), failure.message


def hooked_and_unused() -> list[float]:
    """Gradients where a hook sits on what a stage returns beside what the loss uses, and what such hooks get."""
    flat, off = sharded([{"unused": torch.ones(D, dtype=torch.float64), **p} for p in tree()]), []

    def both(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, h = linear(p, x), x @ p["w"]
        for unused in (h, p["unused"]):
            unused.register_hook(lambda g: off.append(float(g.abs().max())))
        return y, h

    for remat in (False, True):
        staged = sf.stage(both, remat=remat)
        found = sf.grad(lambda ps, f=staged: net(lambda p, x: f(p, x)[0], ps, rows(0)))(flat)
        want = sf.grad(lambda ps: net(sf.stage(linear), ps, rows(0)))(flat)
        off += [distance(a.values, b.values) for a, b in zip(found, want, strict=True)]
    return off


@pytest.mark.world(2)
def test_a_hook_on_a_result_that_no_loss_uses(world: World) -> None:
    assert worst(world.run(hooked_and_unused)) == 0


def in_a_hook() -> float:
    """A gradient of stages that a hook asks for while another one is computed, against the same outside."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params = sf.shard([{"w": normal(4, 4, seed=i)} for i in range(3)], mesh, sf.full_shard("shard"))
    layer, x, found = sf.stage(lambda p, x: torch.tanh(x @ p["w"])), normal(2, 4, seed=9), []

    def loss(params: Any, x: Tensor, hook: Any = None) -> Tensor:
        for i, p in enumerate(sf.layers(params)):
            x = layer(p, x)
            if i == 1 and hook is not None:
                x.register_hook(hook)
        return x.square().sum()

    def hook(g: Tensor) -> None:
        with torch.enable_grad():
            found.append(sf.grad(lambda p: loss(p, x * 2))(params))

    outer = sf.grad(lambda p: loss(p, x, hook))(params)
    pairs = (outer, sf.grad(lambda p: loss(p, x))(params)), (found[0], sf.grad(lambda p: loss(p, x * 2))(params))
    return worst(distance(sf.unshard(one), sf.unshard(other)) for one, other in pairs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_in_a_hook_of_another(ranks: int) -> None:
    assert worst(world(ranks).with_deadline(60).run(in_a_hook)) < 1e-12
