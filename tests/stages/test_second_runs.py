"""A stage's function that runs again in backward: whatever it does, gradients are those without a second run.

A second run that ended as soon as it has what the gradient needs would be faster, but not right for all of these.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.compat import autograd
from shardfn.testing import World
from tests.models import distance, normal, variables
from tests.reference import worst

WIDTH, ROWS, LAYERS, STEPS = 6, 5, 3, 3
Function = Callable[[Any, Tensor], Tensor]


class Notes(threading.local):
    """What functions note of where they are; ranks may be threads."""

    def __init__(self) -> None:
        self.seen: list[str] = []


notes = Notes()


def whole() -> Any:
    shapes = {"up": (WIDTH, 8), "down": (8, WIDTH), "scale": (WIDTH,)}
    return {"layers": [{name: normal(*shape, seed=9 * i + len(name)) / 2 for name, shape in shapes.items()}
                       for i in range(LAYERS)]}  # fmt: skip


def rows(rank: int, step: int = 0) -> Tensor:
    return normal(ROWS, WIDTH, seed=70 + 10 * step + rank)


# --- functions, by what is special about them ---


def plain(p: Any, x: Tensor) -> Tensor:
    notes.seen.append("begin")
    y = x + torch.tanh(x @ p["up"]) @ p["down"]
    notes.seen.append("end")
    return y


class Doubled(torch.autograd.Function):
    """Keeps a tensor as an attribute, and asks for what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.kept, ctx.weight = x.cos(), w
        return x.sin() * w

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        (x, w), again = ctx.saved_tensors, ctx.saved_tensors
        assert all(a is b or torch.equal(a, b) for a, b in zip((x, w), again, strict=True))
        return ct * ctx.kept * ctx.weight, (ct * x.sin()).sum(0)


def with_attributes(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(Doubled.apply(x, p["scale"]) @ p["up"]) @ p["down"]


def with_noise(p: Any, x: Tensor) -> Tensor:
    y = F.dropout(torch.tanh(x @ p["up"]), 0.3) @ p["down"]
    return x + y * torch.rand_like(y)  # drawn after everything is saved


def with_dead_ends(p: Any, x: Tensor) -> Tensor:
    seen = torch.exp(x @ p["up"]).sum()  # nothing depends on it
    h = torch.tanh(x @ p["up"])
    y = h @ p["down"]
    (y * y).sin()
    return x + y + 0 * seen.detach()


def differentiating(p: Any, x: Tensor) -> Tensor:
    """An energy and its force, by a gradient of its own."""
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        energy = (torch.tanh(at @ p["up"]) @ p["down"]).square().sum()
        (force,) = torch.autograd.grad(energy, at, create_graph=True)
    return x + 0.1 * force.sin() * p["scale"]


def transforming(p: Any, x: Tensor) -> Tensor:
    x = F.dropout(x, 0.3)
    force = torch.func.grad(lambda x: (torch.tanh(x @ p["up"]) @ p["down"]).square().sum())(x)
    return x + 0.1 * force.sin()


def checkpointing(p: Any, x: Tensor) -> Tensor:
    inner = checkpoint(lambda x: torch.tanh(x @ p["up"]).sin(), x, use_reentrant=False)
    return x + (inner @ p["down"]).cos()


def on_the_host(p: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        h = torch.tanh(x @ p["up"])
    return x + (h @ p["down"]).cos()


def suspicious(p: Any, x: Tensor) -> Any:
    """Handles whatever happens."""
    try:
        h = torch.tanh(x @ p["up"])
        y = h @ p["down"]
    except BaseException:
        return x, "failed"
    return x + y, "fine"


def explaining(p: Any, x: Tensor) -> Tensor:
    try:
        return x + torch.tanh(x @ p["up"]) @ p["down"]
    except BaseException as error:
        raise ValueError("the layer failed") from error


def linear(p: Any, x: Tensor) -> Tensor:
    return x + p["scale"]  # saves nothing


def written_late(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p["up"])
    y = h @ p["down"]
    return x + y.mul_(2).add_(1)


def with_views(p: Any, x: Tensor) -> Tensor:
    parts = (x @ p["up"]).chunk(2, -1)
    y = torch.cat([F.silu(parts[0]), parts[1].sigmoid()], -1)
    y[:, 0] = y[:, 1]
    return x + y @ p["down"]


def hooked(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p["up"])
    h.register_hook(lambda g: 2 * g)
    p["down"].register_hook(lambda g: 3 * g)
    return x + h @ p["down"]


class Mode:
    doubles = False


def with_a_mode_for_a_while(p: Any, x: Tensor) -> Tensor:
    assert not Mode.doubles, "nobody has ended a run half-way"
    h = torch.tanh(x @ p["up"])
    Mode.doubles = True
    y = (2 if Mode.doubles else 1) * h @ p["down"]
    Mode.doubles = False
    return x + y


def with_a_fallback(p: Any, x: Tensor) -> Tensor:
    try:
        force = torch.func.grad(lambda x: (torch.tanh(x @ p["up"]) @ p["down"]).square().sum())(x)
    except RuntimeError:
        force = torch.zeros_like(x)
    return x + 0.1 * force.sin()


EACH = [plain, with_attributes, with_noise, with_dead_ends, differentiating, transforming, checkpointing, on_the_host]
EACH += [suspicious, explaining, linear, written_late, with_views]
EACH += [with_a_mode_for_a_while, with_a_fallback]
FUNCTIONS: dict[str, Function] = {f.__name__: f for f in EACH}


def loss_of(layer: Function, params: Any, x: Tensor) -> Tensor:
    for p in sf.layers(params["layers"]):
        x = layer(p, x)
        x = x[0] if isinstance(x, tuple) else x
    return x.square().mean()


@sf.debug(memory=False)
def told(name: str, strategy: str, options: dict[str, Any]) -> list[Any]:
    """In each step, how far the gradients by backward, once and twice, are from those without remat."""
    mesh = sf.make_mesh(data=-1, device="cpu")
    placement = sf.full_shard("data") if strategy == "full_shard" else sf.ddp("data")
    flat, function = sf.shard(whole(), mesh, placement), FUNCTIONS[name]
    again, once = sf.stage(function, remat=True, **options), sf.stage(function)
    off = []
    for step in range(STEPS):
        x = rows(mesh.get_rank(), step).requires_grad_()
        for count in (1, 2) if step == 0 else (1,):
            results = []
            for layer in (once, again):
                torch.manual_seed(step)
                leaves = variables(flat)
                loss = loss_of(layer, leaves, x)
                for i in range(count if layer is again else 1):
                    state = torch.get_rng_state()
                    gradients = torch.autograd.grad(
                        loss, [*optree.tree_leaves(leaves), x], retain_graph=i + 1 < count, allow_unused=True
                    )
                    assert torch.equal(state, torch.get_rng_state()), "backward draws no other numbers"
                results.append([torch.zeros(()) if g is None else g for g in gradients])
            off.append(worst(float((a - b).norm() / a.norm().clamp(1)) for a, b in zip(*results, strict=True)))
    return off


@pytest.mark.world(2, "processes")
@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
def test_gradients_are_those_without_remat(world: World, strategy: str) -> None:
    for name in FUNCTIONS:
        for off in world.run(told, name, strategy, {}):
            assert worst(off) < 1e-14, (name, off)


@pytest.mark.world(2, "processes")
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"reshard": False}, {"gather_dtype": torch.float64}], ids=str)
def test_gradients_are_those_without_remat_with_other_options(world: World, options: dict[str, Any]) -> None:
    for name in ("plain", "with_attributes", "differentiating"):
        for off in world.run(told, name, "full_shard", options):
            assert worst(off) < 1e-14, (name, off)


# --- what ranks meet in is run again by all of them, or by none ---


def of_torch(p: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x @ p["up"]) @ p["down"]
    y.register_hook(lambda g: None)
    total = y.detach().sum()
    dist.all_reduce(total)
    notes.seen.append("met")
    return x + (y.sin() if dist.get_rank() == 0 else y) + 0 * total


def of_torch_later(p: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x @ p["up"]) @ p["down"]
    total = y.detach().sum()
    if x.shape[0] > ROWS:
        dist.all_reduce(total)
    notes.seen.append("met")
    return x + (y.sin() if dist.get_rank() == 0 else y) + 0 * total


def of_shardfn(p: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x @ p["up"]) @ p["down"]
    total = sf.psum(y.detach().sum(), "data")
    notes.seen.append("met")
    return x + (y.sin() if dist.get_rank() == 0 else y) + 0 * total


@sf.debug(memory=False)
def met(function: Function) -> list[list[str]]:
    mesh = sf.make_mesh(data=-1, device="cpu")
    flat, layer, seen = sf.shard(whole(), mesh, sf.full_shard("data")), sf.stage(function, remat=True), []

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(flat: Any, x: Tensor) -> Any:
        return sf.grad(lambda p: sf.pmean(loss_of(layer, p, x), "data"))(flat)

    for i in range(STEPS):
        notes.seen.clear()
        step(flat, rows(mesh.get_rank(), i).repeat(1 + i // 2, 1))
        seen.append(list(notes.seen))
    return seen


CASES = [
    ((2, "processes"), of_torch),
    ((2, "processes"), of_torch_later),
    ((2, "processes"), of_shardfn),
    ((2, "threads"), of_shardfn),
]


@pytest.mark.parametrize(
    ("world", "function"), CASES, indirect=["world"], ids=lambda x: x.__name__ if callable(x) else x[-1]
)
def test_ranks_meet_in_a_second_run_whatever_each_needs_of_it(world: World, function: Function) -> None:
    for seen in world.run(met, function):
        assert seen == [["met"] * 2 * LAYERS] * STEPS


# --- memory, hooks, writes ---


@sf.debug(memory=False)
def alone(function: Function, step: Callable[[Any, Any, Tensor], Any], steps: int = STEPS) -> list[Any]:
    mesh = sf.make_mesh(data=1, device="cpu")
    flat, layer = sf.shard(whole(), mesh, sf.full_shard("data")), sf.stage(function, remat=True)
    return [step(layer, flat, rows(0, i)) for i in range(steps)]


def test_between_the_runs_nothing_is_kept() -> None:
    memories: list[Any] = []

    def noting(p: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ p["up"])
        memories.append(autograd.weak_storage(h))
        return x + (h @ p["down"]).sin()

    def step(layer: Function, flat: Any, x: Tensor) -> tuple[list[bool], list[bool]]:
        memories.clear()
        leaves = variables(flat)
        loss = loss_of(layer, leaves, x)
        before = [memory.expired() for memory in memories]
        loss.backward()
        return before, [memory.expired() for memory in memories]

    for before, after in alone(noting, step):
        assert before == [True] * LAYERS
        assert after == [True] * 2 * LAYERS


def test_a_call_without_backward_is_freed() -> None:
    kept: list[Any] = []

    def keeping(p: Any, x: Tensor) -> Tensor:
        kept.append(weakref.ref(h := torch.tanh(x @ p["up"])))
        return x + Doubled.apply(h @ p["down"], p["scale"])

    def step(layer: Function, flat: Any, x: Tensor) -> list[bool]:
        kept.clear()
        loss_of(layer, variables(flat), x)
        return [x() is None for x in kept]

    assert alone(keeping, step) == [[True] * LAYERS] * STEPS


def test_hooks_run_once() -> None:
    def step(layer: Function, flat: Any, x: Tensor) -> float:
        want = torch.func.grad(lambda p: loss_of(plain, p, x))(whole())
        got = sf.unshard(sf.grad(lambda p: loss_of(layer, p, x))(flat))
        last_want, last_got = want["layers"][-1], got["layers"][-1]
        assert distance(last_got["up"], 2 * last_want["up"]) < 1e-14
        return distance(last_got["down"], 3 * last_want["down"])

    assert worst(alone(hooked, step)) < 1e-14
