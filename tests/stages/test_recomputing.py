"""With remat=True, the second run of a stage's function ends once it has computed what the gradient needs."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
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
from shardfn.stages import saved_tensors
from shardfn.testing import World
from tests.models import distance, everyone, normal, variables

WIDTH, ROWS, LAYERS, STEPS = 6, 5, 3, 3
Function = Callable[[Any, Tensor], Tensor]


class Notes(threading.local):
    """What functions note of where they are; ranks may be threads."""

    def __init__(self) -> None:
        self.seen: list[str] = []


notes = Notes()


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Second runs of small stages end early too, and also in tests, whose debug mode compares their results."""
    small, saved_tensors.SMALL = saved_tensors.SMALL, 0
    try:
        with sf.debug(memory=False):
            yield
    finally:
        saved_tensors.SMALL = small


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


workspace: dict[str, Tensor] = {}


class Static(torch.autograd.Function):
    """Reads memory in backward that its forward fills, as captured graphs do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        workspace[threading.current_thread().name] = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * workspace[threading.current_thread().name]


def with_static_memory(p: Any, x: Tensor) -> Tensor:
    return x + Static.apply(torch.tanh(x @ p["up"]) @ p["down"])


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


def in_place(p: Any, x: Tensor) -> Tensor:
    h = x @ p["up"]
    h.tanh_().mul_(2)  # tanh would need its result
    return x + h @ p["down"]


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


def of_a_sum(p: Any, x: Tensor) -> Tensor:
    y = sf.psum(torch.tanh(x @ p["up"]) @ p["down"], "data")
    return x + y.sin()


def frozen_inside(p: Any, x: Tensor) -> Tensor:
    p["up"].requires_grad_(False)
    return x + torch.tanh(x @ p["up"]) @ p["down"]


EACH = [plain, with_attributes, with_noise, with_dead_ends, differentiating, transforming, checkpointing, on_the_host]
EACH += [suspicious, explaining, linear, written_late, with_views, with_static_memory]
FUNCTIONS: dict[str, Function] = {f.__name__: f for f in EACH}
REFERENCES: dict[str, Function] = {"with_static_memory": lambda p, x: x + (torch.tanh(x @ p["up"]) @ p["down"]).sin()}
SHORT = {plain, with_noise, with_dead_ends, checkpointing, on_the_host, suspicious, explaining, linear, written_late}


def loss_of(layer: Function, params: Any, x: Tensor) -> Tensor:
    for p in sf.layers(params["layers"]):
        x = layer(p, x)
        x = x[0] if isinstance(x, tuple) else x
    return x.square().mean()


@shortened()
def told(name: str, strategy: str, options: dict[str, Any]) -> list[Any]:
    """In each step, how far the gradients by backward, once and twice, are from those without remat."""
    mesh = sf.make_mesh(data=-1, device="cpu")
    placement = sf.full_shard("data") if strategy == "full_shard" else sf.ddp("data")
    flat, function = sf.shard(whole(), mesh, placement), FUNCTIONS[name]
    again, once = sf.stage(function, remat=True, **options), sf.stage(REFERENCES.get(name, function))
    off = []
    for step in range(STEPS):
        x = rows(mesh.get_rank(), step).requires_grad_()
        for count in (1, 2):
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
            off.append(max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(*results, strict=True)))
    return off


@pytest.mark.world(2, "processes")
@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
def test_gradients_are_those_without_remat(world: World, strategy: str) -> None:
    for name in FUNCTIONS:
        for off in world.run(told, name, strategy, {}):
            assert max(off) < 1e-14, (name, off)


@pytest.mark.world(2, "processes")
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"reshard": False}, {"gather_dtype": torch.float64}], ids=str)
def test_gradients_are_those_without_remat_with_other_options(world: World, options: dict[str, Any]) -> None:
    for name in ("plain", "with_attributes", "differentiating"):
        for off in world.run(told, name, "full_shard", options):
            assert max(off) < 1e-14, (name, off)


@shortened()
def one_process() -> tuple[list[float], list[list[str]]]:
    mesh = sf.make_mesh(data=-1, device="cpu")
    flat, layer = sf.shard(whole(), mesh, sf.full_shard("data")), sf.stage(plain, remat=True)
    want = torch.func.grad(everyone(lambda p, k: loss_of(plain, p, rows(k)), mesh.size()))(whole())
    off, seen = [], []
    for _ in range(STEPS):
        notes.seen.clear()
        gradients = sf.grad(lambda p: loss_of(layer, p, rows(mesh.get_rank())))(flat)
        seen.append(list(notes.seen))
        off.append(distance(sf.unshard(gradients), want))
    return off, seen


@pytest.mark.world(2, "processes")
def test_after_the_first_step_a_second_run_ends_early(world: World) -> None:
    for off, seen in world.run(one_process):
        assert max(off) < 1e-14
        assert seen[0] == ["begin", "end"] * 2 * LAYERS, "in the first step the results of both runs are compared"
        assert seen[1] == seen[2] == ["begin", "end"] * LAYERS + ["begin"] * LAYERS


@pytest.mark.parametrize("function", EACH)
def test_a_second_run_ends_early_if_torch_saves_all_that_backward_reads(function: Function) -> None:
    runs: list[str] = []

    def noting(p: Any, x: Tensor) -> Tensor:
        runs.append("begin")
        y = function(p, x)
        if function is suspicious and y[1] == "failed":
            return y
        runs.append("end")
        return y

    def step(layer: Function, flat: Any, x: Tensor) -> list[str]:
        runs.clear()
        sf.grad(lambda p: loss_of(layer, p, x.requires_grad_()))(flat)
        return list(runs)

    early = ["begin", "end"] * LAYERS + ["begin"] * LAYERS * (function is not linear)
    seen = alone(noting, step)
    assert seen[0][-2 * LAYERS :] == ["begin", "end"] * LAYERS
    assert (seen[1:] == [early] * (STEPS - 1)) is (function in SHORT)


def test_a_run_that_fails_keeps_nothing() -> None:
    memories: list[Any] = []
    fails = False

    def failing(p: Any, x: Tensor) -> Tensor:
        h = torch.exp(x @ p["up"])
        memories.append(autograd.weak_storage(h))
        y = h @ p["down"]
        if fails:
            raise MemoryError
        return x + y

    def step(layer: Function, flat: Any, x: Tensor) -> bool:
        nonlocal fails
        fails = False
        sf.grad(lambda p: loss_of(layer, p, x))(flat)
        fails = True
        memories.clear()
        with pytest.raises(MemoryError):
            sf.grad(lambda p: loss_of(layer, p, x))(flat)
        gc.collect()
        return all(memory.expired() for memory in memories)

    assert alone(failing, step) == [True] * STEPS


# --- what ranks meet in is run again by all of them, or by none ---


def of_torch(p: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x @ p["up"]) @ p["down"]
    y.register_hook(lambda g: None)
    total = y.detach().sum()
    dist.all_reduce(total)
    notes.seen.append("met")
    return x + (y.sin() if dist.get_rank() == 0 else y) + 0 * total


def of_shardfn(p: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x @ p["up"]) @ p["down"]
    total = sf.psum(y.detach().sum(), "data")
    notes.seen.append("met")
    return x + (y.sin() if dist.get_rank() == 0 else y) + 0 * total


@shortened()
def met(function: Function) -> list[list[str]]:
    mesh = sf.make_mesh(data=-1, device="cpu")
    flat, layer, seen = sf.shard(whole(), mesh, sf.full_shard("data")), sf.stage(function, remat=True), []

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(flat: Any, x: Tensor) -> Any:
        return sf.grad(lambda p: sf.pmean(loss_of(layer, p, x), "data"))(flat)

    for i in range(STEPS):
        notes.seen.clear()
        step(flat, rows(mesh.get_rank(), i))
        seen.append(list(notes.seen))
    return seen


CASES = [((2, "processes"), of_torch), ((2, "processes"), of_shardfn), ((2, "threads"), of_shardfn)]


@pytest.mark.parametrize(
    ("world", "function"), CASES, indirect=["world"], ids=lambda x: x.__name__ if callable(x) else x[-1]
)
def test_ranks_meet_in_a_second_run_whatever_each_needs_of_it(world: World, function: Function) -> None:
    for seen in world.run(met, function):
        assert seen == [["met"] * 2 * LAYERS] * STEPS


# --- memory, hooks, writes ---


@shortened()
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


def test_backward_frees_what_it_has_used() -> None:
    seen: list[bool] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, memory: list[Any]) -> Tensor:
            ctx.memory = memory
            return x.clone()

        @staticmethod
        def backward(ctx: Any, ct: Tensor) -> Any:
            seen.append(all(memory.expired() for memory in latest))
            return ct, None

    latest: list[Any] = []

    def watched(p: Any, x: Tensor) -> Tensor:
        x = Watch.apply(x, latest)
        h = torch.tanh(x @ p["up"])
        latest[:] = [autograd.weak_storage(h)]
        return x + h @ p["down"]

    def step(layer: Function, flat: Any, x: Tensor) -> None:
        sf.grad(lambda p: loss_of(layer, p, x.requires_grad_()))(flat)

    alone(watched, step)
    assert seen == [True] * STEPS * LAYERS


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


def test_a_loss_of_what_escaped_is_refused() -> None:
    kept: list[Tensor] = []

    def keeping(p: Any, x: Tensor) -> Tensor:
        kept.append(torch.tanh(x @ p["up"]))
        return x + kept[-1] @ p["down"]

    def step(layer: Function, flat: Any, x: Tensor) -> list[str]:
        kept.clear()
        leaves = variables(flat)
        loss = loss_of(layer, leaves, x)
        told = []
        for at in (kept[0].square().sum(), loss + kept[-1].sum(), loss + kept[0].square().sum()):
            with pytest.raises(RuntimeError) as refused:
                at.backward(retain_graph=True)
            told.append(str(refused.value))
        return told

    for told in alone(keeping, step):
        assert all("computed but did not return" in message for message in told), told


def test_hooks_run_once() -> None:
    def step(layer: Function, flat: Any, x: Tensor) -> float:
        want = torch.func.grad(lambda p: loss_of(plain, p, x))(whole())
        got = sf.unshard(sf.grad(lambda p: loss_of(layer, p, x))(flat))
        last_want, last_got = want["layers"][-1], got["layers"][-1]
        assert distance(last_got["up"], 2 * last_want["up"]) < 1e-14
        return distance(last_got["down"], 3 * last_want["down"])

    assert max(alone(hooked, step)) < 1e-14


def test_a_saved_tensor_that_is_written_into_is_told() -> None:
    def step(layer: Function, flat: Any, x: Tensor) -> str:
        try:
            sf.grad(lambda p: loss_of(layer, p, x))(flat)
        except RuntimeError as error:
            return str(error)
        return "nothing"

    def later(p: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ p["up"])
        if written:
            h.mul_(2)
        return x + h @ p["down"] + (x @ p["up"]).sin() @ p["down"]

    written = False
    assert alone(in_place, step, 1)[0] != "nothing"
    mesh = sf.make_mesh(data=1, device="cpu")
    flat, layer = sf.shard(whole(), mesh, sf.full_shard("data")), sf.stage(later, remat=True)
    assert [step(layer, flat, rows(0)) for _ in range(2)] == ["nothing"] * 2
    written = True
    assert "modified by an inplace operation" in step(layer, flat, rows(0))
    written = False
    assert step(layer, flat, rows(0)) == "nothing"


def test_a_parameter_that_the_function_freezes_gets_no_gradient() -> None:
    def step(layer: Function, flat: Any, x: Tensor) -> tuple[float, float]:
        got = sf.unshard(sf.grad(lambda p: loss_of(layer, p, x))(flat))["layers"]
        want = torch.func.grad(lambda p: loss_of(plain, p, x))(whole())["layers"]
        return max(float(p["up"].abs().max()) for p in got), distance(got[-1]["down"], want[-1]["down"])

    for frozen, off in alone(frozen_inside, step):
        assert frozen == 0
        assert off < 1e-14


# --- a second run that differs from the first goes to its end, and is judged by its result ---


@shortened()
def off_or_told(how: str) -> list[Any]:
    runs = 0

    def changing(p: Any, x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        h = torch.tanh(x @ p["up"])
        if runs == 2 * STEPS:  # the second run of the last step
            h = torch.cat([h, h])[: len(h) if how == "more operations" else None]
        y = h.sin() @ p["down"]
        return y[:ROWS] if how == "another path" else y

    def loss(layer: Function, p: Any) -> Tensor:
        return layer(p["layer"], rows(0)).square().mean()

    params, mesh = {"layer": whole()["layers"][0]}, sf.make_mesh(data=1, device="cpu")
    flat, layer = sf.shard(params, mesh, sf.full_shard("data")), sf.stage(changing, remat=True)
    found: list[Any] = []
    for _ in range(STEPS):
        try:
            found.append(distance(sf.unshard(sf.grad(lambda p: loss(layer, p))(flat)), want(loss, params)))
        except RuntimeError as error:
            found.append(str(error))
    return found


def want(loss: Any, params: Any) -> Any:
    return torch.func.grad(lambda p: loss(lambda p, x: torch.tanh(x @ p["up"]).sin() @ p["down"], p))(params)


@pytest.mark.parametrize("how", ["more operations", "another path"])
def test_a_second_run_with_other_operations_is_taken_whole(how: str) -> None:
    assert max(off_or_told(how)) < 1e-14


def test_a_second_run_with_another_result_is_told() -> None:
    *before, last = off_or_told("another result")
    assert max(before) < 1e-14
    assert "ran again for its gradient and returned something else" in last


def compiled(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def test_a_compiled_function_is_compiled_once() -> None:
    torch._dynamo.reset()
    frames: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        frames.append(1)
        return graph.forward

    function = torch.compile(compiled, backend=backend, dynamic=False)

    def step(layer: Function, flat: Any, x: Tensor) -> float:
        want = torch.func.grad(lambda p: loss_of(compiled, p, x))(whole())
        return distance(sf.unshard(sf.grad(lambda p: loss_of(layer, p, x.requires_grad_()))(flat)), want)

    assert max(alone(function, step)) < 1e-14
    assert len(frames) == 1
