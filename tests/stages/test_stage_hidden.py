"""What a stage's function keeps, hands out or closes over behind the engine's back: right, or an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.testing import World
from tests.models import STRATEGIES, data_mesh, distance, gradients, normal, squares, variables
from tests.models import layer as plain
from tests.reference import worst

DEPTH, ROWS, D = 5, 3, 4
Layer = Callable[[Any, Tensor], Tensor]


def rows(rank: int) -> Tensor:
    return normal(ROWS, D, seed=100 + rank)


def net(layer: Layer, blocks: Any, x: Tensor) -> Tensor:
    for p in blocks:
        x = layer(p, x)
    return x.square().sum()


@functools.cache
def everyone(layer: Layer, n: int, frozen: bool) -> Any:
    """The gradient of the sum of all ranks' losses, by plain autograd on one process."""
    whole = variables(squares(DEPTH))
    for p in whole if frozen else []:
        p["w"].requires_grad_(False)
    torch.stack([net(layer, whole, rows(k)) for k in range(n)]).sum().backward()
    return gradients(whole)


# --- backward reads parameters that nobody saw saved ---


class KeepsOnContext(torch.autograd.Function):
    """As bitsandbytes' `MatMul4Bit` does: the weight is an attribute, not a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g @ ctx.w.T, None


class KeepsAView(KeepsOnContext):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w.T.contiguous().T if w.shape[0] == 1 else w.T.T
        return x @ w


def keeps_on_context(p: Any, x: Tensor) -> Tensor:
    return KeepsOnContext.apply(x, p["w"].detach()) + p["b"] * x


def keeps_a_view(p: Any, x: Tensor) -> Tensor:
    return KeepsAView.apply(x, p["w"].detach()) + p["b"] * x


def checkpointed(p: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: plain(p, x), x, use_reentrant=False)


def under_hooks(p: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return plain(p, x)


def under_low_level_hooks(p: Any, x: Tensor) -> Tensor:
    torch._C._autograd._push_saved_tensors_default_hooks(lambda t: [t], lambda kept: kept[0])
    try:
        return plain(p, x)
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def on_cpu(p: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return plain(p, x)


def hooked(p: Any, x: Tensor) -> Tensor:
    y = x + p["b"]
    y.register_hook(lambda g: g @ p["w"].detach())
    return y


def hooked_at_a_node(p: Any, x: Tensor) -> Tensor:
    y = x * 1 + p["b"]
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda given, _: tuple(None if g is None else g * p["b"].detach().sum() for g in given))
    return y


def hooked_near_a_parameter(p: Any, x: Tensor) -> Tensor:
    b = p["b"] + 0
    if b.requires_grad:
        b.register_hook(lambda g: g * p["w"].detach().sum())
    return x + b


def differentiated_inside(p: Any, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda z: plain(p, z).square().sum())(x)


def pulled_back_inside(p: Any, x: Tensor) -> Tensor:
    y, pull = torch.func.vjp(lambda w: torch.tanh(x @ w), p["w"])[:2]
    return y @ pull(y)[0] + p["b"]


def cyclic(p: Any, x: Tensor) -> Tensor:
    cycle: list[Any] = [p["w"]]
    cycle.append(cycle)  # nobody frees it before the garbage collector comes
    return x + p["b"]


READING: dict[str, Layer] = {
    f.__name__: f
    for f in (
        plain, keeps_on_context, keeps_a_view, checkpointed, under_hooks, under_low_level_hooks,
        on_cpu, hooked, hooked_at_a_node, hooked_near_a_parameter, differentiated_inside,
        pulled_back_inside, cyclic,
    )
}  # fmt: skip


def _goes_by_func(name: str, frozen: bool) -> bool:
    """torch.func takes neither hooks of saved tensors nor Functions of the old kind, and knows of no frozen leaf."""
    refused = ("keeps_on_context", "keeps_a_view", "checkpointed", "under_hooks", "under_low_level_hooks", "on_cpu")
    return not frozen and name not in refused


def read(strategy: str, options: dict[str, Any]) -> dict[str, float]:
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = data_mesh(n)
    found: dict[str, float] = {}
    for name, function in READING.items():
        for frozen in (False, True):
            want = everyone(function, n, frozen)
            flat = sf.shard(squares(DEPTH), mesh, STRATEGIES[strategy], frozen=[r"\d+\.w"] if frozen else [])
            staged = sf.stage(function, **options)

            def loss(blocks: Any, staged: Any = staged) -> Tensor:
                return net(staged, sf.layers(blocks), rows(rank))

            got = [sf.unshard(sf.grad(loss)(flat)) for _ in range(2)]
            got.append(sf.unshard(torch.func.grad(loss)(flat)) if _goes_by_func(name, frozen) else got[0])
            leaves = variables(flat)
            loss(leaves).backward()
            got.append(sf.unshard(optree.tree_map(lambda v: v.grad, leaves)) if not frozen else got[0])
            for one in got:
                for g, w in zip(one, want, strict=True):
                    pairs = [(g[k], w[k]) for k in w if not (frozen and k == "w")]
                    off = worst((a - b).abs().max().item() for a, b in pairs)
                    found[f"{name} {frozen}"] = max(found.get(f"{name} {frozen}", 0.0), off)
    return found


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"prefetch": 0}], ids=str)
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        ((2, "processes"), "full_shard"),
        ((2, "processes"), "shard_grad_op"),
        ((4, "threads"), "hybrid_shard"),
        ((4, "threads"), "hpz"),
    ],
    indirect=["world"],
    ids=["full_shard", "shard_grad_op", "hybrid_shard", "hpz"],
)
def test_backward_reads_parameters_wherever_the_function_keeps_them(
    world: World, strategy: str, options: dict[str, Any]
) -> None:
    for found in world.run(read, strategy, options):
        assert worst(found.values()) < 1e-12, {name: off for name, off in found.items() if not off < 1e-12}


@sf.debug(memory=False)  # where each call has memory, and so views, of its own
def evaluated_between() -> float:
    """Views that a forward in inference mode makes of a slot are none that autograd could save later."""
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = sf.shard(squares(DEPTH), sf.make_mesh(shard=n, device="cpu"), sf.full_shard("shard"), frozen=[r"\d+\.w"])
    staged = sf.stage(plain)

    def loss(blocks: Any) -> Tensor:
        return net(staged, blocks, rows(rank))

    want = [p["b"] for p in everyone(plain, n, True)]
    found = []
    for _ in range(3):
        with torch.inference_mode():
            loss(flat)
        found.append(distance([p["b"] for p in sf.unshard(sf.grad(loss)(flat))], want))
    return worst(found)


@pytest.mark.world(2, "threads")
def test_evaluation_in_inference_mode_between_steps(world: World) -> None:
    assert worst(world.run(evaluated_between)) < 1e-12


def hook_that_calls() -> dict[str, float]:
    """A hook inside a stage calls another stage, while backward of the first still reads its own parameters."""
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = sf.shard(squares(DEPTH), sf.make_mesh(shard=n, device="cpu"), sf.full_shard("shard"))

    def through(stage: Any, blocks: Any, rank: int) -> Tensor:
        other = stage(plain)

        def hooked(p: Any, x: Tensor) -> Tensor:
            y = torch.tanh(x @ p["w"])
            if y.requires_grad:
                y.register_hook(lambda g: g * other(blocks[-1], x.detach()).detach())
            return torch.tanh(y @ p["w"] + p["b"])

        return net(stage(hooked), blocks[:-1], rows(rank))

    whole = variables(squares(DEPTH))
    torch.stack([through(lambda f: f, whole, k) for k in range(n)]).sum().backward()
    want = [p["w"].grad for p in whole[:-1]]
    found = {}
    for memory in (False, True):
        for options in ({}, {"prefetch": 0}, {"prefetch": 2}, {"remat": True}, {"remat": True, "prefetch": 0}):
            with sf.debug(memory=memory):
                of_flat = sf.grad(lambda blocks, o=options: through(functools.partial(sf.stage, **o), blocks, rank))
                got = sf.unshard(of_flat(flat))
            found[f"{memory}, {options}"] = distance([p["w"] for p in got[:-1]], want)
    return found


@pytest.mark.world(2)
def test_a_stage_that_runs_keeps_its_parameters_when_a_hook_calls_another(world: World) -> None:
    for found in world.run(hook_that_calls):
        assert not {how: off for how, off in found.items() if not off < 1e-12}


# --- activations that leave by another door ---


class Keeper:
    """A function with a memory: what it computed last can be had past its outputs."""

    def __init__(self, how: str) -> None:
        self.how, self.kept = how, torch.zeros(())

    def __call__(self, p: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x @ p["w"])
        if self.how == "hook":
            y = torch.nn.Identity()(y)
        self.kept = y
        return y + p["b"]


def looked_at(options: dict[str, Any]) -> float:
    """To keep an activation is no sin; only a loss may not depend on it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = sf.shard(squares(DEPTH), sf.make_mesh(shard=n, device="cpu"), sf.full_shard("shard"))
    keeper = Keeper("attribute")
    staged = sf.stage(keeper, **options)

    def loss(blocks: Any) -> Tensor:
        return net(staged, blocks, rows(rank)) + 0 * keeper.kept.detach().sum()

    got = sf.unshard(sf.grad(loss)(flat))
    assert keeper.kept.shape == (ROWS, D)
    return distance(got, everyone(Keeper("attribute"), n, False))


@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@pytest.mark.world(2, "threads")
def test_an_activation_may_be_looked_at(world: World, options: dict[str, Any]) -> None:
    assert worst(world.run(looked_at, options)) < 1e-12


# --- outputs that share memory ---


def same_twice(p: Any, x: Tensor) -> Any:
    y = x @ p["w"] + p["b"]
    return y, y


def with_view(p: Any, x: Tensor) -> Any:
    y = x @ p["w"] + p["b"]
    return y, y.view(-1)[:D]


def chunks(p: Any, x: Tensor) -> Any:
    return (x @ p["w"] + p["b"]).chunk(2, -1)


def with_detached(p: Any, x: Tensor) -> Any:
    y = x @ p["w"] + p["b"]
    return y, y.detach()


def with_input(p: Any, x: Tensor) -> Any:
    return x, x @ p["w"] + p["b"]


def with_part_of_input(p: Any, x: Tensor) -> Any:
    return x[:, :2], x @ p["w"] + p["b"]


class Reversed(torch.autograd.Function):
    """Hands its input through, with a derivative that is not the identity's."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def reversed_input(p: Any, x: Tensor) -> Any:
    return Reversed.apply(x), x @ p["w"] + p["b"]


def input_alone(p: Any, x: Tensor) -> Any:
    return x, p["b"] * 2


SHARING = [same_twice, with_view, chunks, with_detached, with_input, with_part_of_input, reversed_input, input_alone]


def shared(options: dict[str, Any]) -> dict[str, float | str]:
    """Each function with nothing, the first and the second output written to by the caller, in each way of asking."""
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = sf.shard(squares(DEPTH)[:1], sf.make_mesh(shard=n, device="cpu"), sf.full_shard("shard"))

    def program(f: Any, p: Any, x: Tensor, write: int | None) -> Tensor:
        x = x * 1
        outputs = f(p, x)
        if write is not None:
            outputs[write].mul_(3)
        return torch.stack([(y * y).sum() * (i + 1) for i, y in enumerate(outputs)]).sum() + x.sum()

    def reference(f: Any, write: int | None) -> Any:
        whole = variables(squares(DEPTH)[:1])
        inputs = [rows(k).requires_grad_() for k in range(n)]
        values = [program(f, whole[0], x, write) for x in inputs]
        torch.stack(values).sum().backward()
        return values[rank].detach(), [whole[0]["w"].grad, whole[0]["b"].grad], inputs[rank].grad

    def reference_by_func(f: Any, write: int | None) -> Any:
        def everything(ps: Any, xs: Any) -> Any:
            values = [program(f, ps[0], x, write) for x in xs]
            return torch.stack(values).sum(), values[rank]

        inputs = [rows(k) for k in range(n)]
        (gs, gx), value = torch.func.grad(everything, argnums=(0, 1), has_aux=True)(squares(DEPTH)[:1], inputs)
        return value, [gs[0]["w"], gs[0]["b"]], gx[rank]

    def by_value_and_grad(f: Any, write: int | None) -> Any:
        value, (gs, gx) = sf.value_and_grad(lambda ps, x: program(f, ps[0], x, write), argnums=(0, 1))(flat, rows(rank))
        return value, gs, gx

    def by_backward(f: Any, write: int | None) -> Any:
        leaves, x = variables(flat), rows(rank).requires_grad_()
        value = program(f, leaves[0], x, write)
        value.backward()
        return value.detach(), optree.tree_map(lambda v: v.grad, leaves), x.grad

    def by_func(f: Any, write: int | None) -> Any:
        found = torch.func.grad_and_value(lambda ps, x: program(f, ps[0], x, write), argnums=(0, 1))(flat, rows(rank))
        return found[1], *found[0]

    def without_gradients(f: Any, write: int | None) -> Any:
        with torch.no_grad():
            return program(f, flat[0], rows(rank), write), None, None

    found: dict[str, float | str] = {}
    for function in SHARING:
        staged = sf.stage(function, **options)
        for write in (None, 0, 1):
            for ask in (by_value_and_grad, by_backward, by_func, without_gradients):
                name = f"{function.__name__}, {write}, {ask.__name__}"
                try:
                    value, gs, gx = ask(staged, write)
                except RuntimeError as error:
                    found[name] = str(error)
                    continue
                try:
                    wanted, (w, b), x = (reference_by_func if ask is by_func else reference)(function, write)
                except RuntimeError:  # torch refuses to write into one of several views, where it takes gradients
                    assert ask is without_gradients, name
                    continue
                off = [(value - wanted).abs().max().item()]
                if gs is not None:
                    whole = sf.unshard(gs)[0]
                    for got, want in ((whole["w"], w), (whole["b"], b), (gx, x)):
                        off.append((got - (0 if want is None else want)).abs().max().item())
                found[name] = worst(off)
    return found


@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@pytest.mark.world(2, "threads")
def test_outputs_that_share_memory_are_right_or_refuse_to_be_written(world: World, options: dict[str, Any]) -> None:
    for found in world.run(shared, options):
        for name, off in found.items():
            if isinstance(off, str):
                assert ", None, " not in name, (name, off)
                assert "inplace" in off, (name, off)
            else:
                assert off < 1e-12, (name, off)
        refused = [name for name, off in found.items() if isinstance(off, str)]
        assert not any("without_gradients" in name or name.startswith("same_twice") for name in refused), refused


# --- generators, and gradients that are memory of parameters ---


def drawing(how: str, options: dict[str, Any]) -> float:
    """A generator of the function's own goes on from where it was when the function runs again."""
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = sf.shard(squares(DEPTH), sf.make_mesh(shard=n, device="cpu"), sf.full_shard("shard"))

    def loss(make: Any, blocks: Any, k: int) -> Tensor:
        generator = torch.Generator().manual_seed(k)

        def closing(p: Any, x: Tensor) -> Tensor:
            return plain(p, x) * torch.rand(x.shape, generator=generator, dtype=x.dtype)

        def given(p: Any, x: Tensor, g: torch.Generator) -> Tensor:
            return plain(p, x) * torch.rand(x.shape, generator=g, dtype=x.dtype)

        layer = make(closing) if how == "closure" else functools.partial(_with, make(given), generator)
        return net(layer, blocks, rows(k))

    want = torch.func.grad(lambda ps: torch.stack([loss(lambda f: f, ps, k) for k in range(n)]).sum())(squares(DEPTH))
    return distance(sf.unshard(sf.grad(lambda ps: loss(lambda f: sf.stage(f, **options), ps, rank))(flat)), want)


def _with(layer: Any, generator: torch.Generator, p: Any, x: Tensor) -> Tensor:
    return layer(p, x, generator)


@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@pytest.mark.parametrize("how", ["closure", "argument"])
@pytest.mark.world(2, "threads")
def test_a_generator_draws_the_same_numbers_again(world: World, how: str, options: Any) -> None:
    assert worst(world.run(drawing, how, options)) < 1e-12


class Inner(torch.autograd.Function):
    """The inner product, whose backward returns what it keeps where the cotangent is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x * w).sum()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (w, x) if cotangents[0] == 1 else (cotangents[0] * w, cotangents[0] * x)


def handed_out(strategy: str, options: dict[str, Any]) -> float:
    mesh = data_mesh(dist.get_world_size())
    whole = squares(DEPTH)
    flat = sf.shard(whole, mesh, STRATEGIES[strategy])
    stage = sf.stage(lambda p, x: Inner.apply(x, p["w"]), **options)
    xs = [normal(*p["w"].shape, seed=10 * dist.get_rank() + i) for i, p in enumerate(whole)]

    def loss(both: Any) -> Tensor:
        return torch.stack([stage(p, x) for p, x in zip(both["ps"], both["xs"], strict=True)]).sum()

    got = sf.grad(loss)({"ps": flat, "xs": xs})
    # What the next stages use is written to again, also in the next step.
    sf.grad(loss)({"ps": optree.tree_map(lambda x: x * 0, flat), "xs": xs})
    sums = [
        sum(normal(*p["w"].shape, seed=10 * r + i) for r in range(dist.get_world_size())) for i, p in enumerate(whole)
    ]
    inputs = worst(distance(g, p["w"]) for g, p in zip(got["xs"], whole, strict=True))
    return max(inputs, worst(distance(g["w"], s) for g, s in zip(sf.unshard(got["ps"]), sums, strict=True)))


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"reshard": False}, {"prefetch": 0}], ids=str)
@pytest.mark.parametrize("strategy", ["full_shard", "ddp", "hybrid_shard"])
@pytest.mark.world(4)
def test_a_gradient_that_is_a_parameters_memory_is_copied(world: World, strategy: str, options: dict[str, Any]) -> None:
    assert worst(world.run(handed_out, strategy, options)) < 1e-12
