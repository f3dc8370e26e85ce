"""Steps as graphs of a simulated device: the numbers of one process, and an error for whatever would be frozen."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import parallel
from shardfn.testing import simulated, world
from tests import refusals
from tests.models import DATA, STRATEGIES, Halved, distance, drawn
from tests.optimizers import optimizers_named
from tests.reference import worst
from tests.transforms import steps
from tests.transforms.steps import LAYERS, WIDTH, block, data, spoiled, whole

ROWS, STEPS, WARM_UP = 3, 8, 3
PLACEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full_shard": ("full_shard", {}),
    "hybrid_shard": ("hybrid_shard", {}),
    "kept for the step": ("full_shard", {"reshard": "step"}),
    "replicated": ("ddp", {}),
    "zero1": ("zero1", {}),
    "hpz": ("hpz", {}),
    "remat": ("full_shard", {"remat": True}),
}
OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "sgd": lambda: so.sgd(0.1, momentum=0.9),
    "adamw, cosine": lambda: so.adamw(so.warmup_cosine(1e-2, warmup=5, steps=7)),
    "adamw, clipped": lambda: so.chain(so.clip_by_global_norm(0.1), so.adamw(1e-2)),
}
OTHERS: dict[str, Callable[[], so.Optimizer]] = {
    "sgd, linear": lambda: so.sgd(so.warmup_linear(0.1, warmup=2, steps=7)),
    "adam, pure": lambda: so.adam(so.wsd(1e-2, warmup=3, decay=3, steps=8), donate=False),
    "lion, own schedule": lambda: so.lion(lambda step: 1e-2 / step),
    **optimizers_named("adamw8bit, muon, averaged"),
    "shard_state": lambda: so.shard_state(so.adamw(1e-2), "replica"),
    "skips steps": lambda: so.chain(spoiled(0, 1, 4, 6), so.skip_nonfinite(so.adamw(1e-2))),
    "scaled": lambda: so.chain(
        spoiled(0, 5), so.dynamic_loss_scale(so.sgd(0.1, momentum=0.9), scale=4.0, growth_interval=2)
    ),
}
PROGRAMS = {
    **{f"{p}, {o}": (p, o) for p in list(PLACEMENTS)[:4] for o in OPTIMIZERS},
    **{f"{p}, adamw, cosine": (p, "adamw, cosine") for p in ("zero1", "hpz", "remat")},
    **{f"hybrid_shard, {o}": ("hybrid_shard", o) for o in OTHERS},
}  # fmt: skip


plainly = sf.debug(memory=False)  # graphs refuse the debug mode in which tests run


def batches(ranks: int, rows: Callable[[int], int] = lambda i: ROWS, steps: int = STEPS) -> list[Tensor]:
    draw = drawn(1)
    return [draw(ranks, rows(i), WIDTH) for i in range(steps)]


def loss_of(layer: Callable[..., Tensor], layers: int = LAYERS) -> Callable[[Any, Tensor], Tensor]:
    def loss(params: Any, x: Tensor) -> Tensor:
        for i, p in enumerate(sf.layers(params["blocks"]), 1):
            x = layer(p, x)
            if i == layers:
                break
        return x.square().mean()

    return loss


def step_of(mesh: Any, optimizer: so.Optimizer, layer: Callable[..., Tensor]) -> Callable[..., Any]:
    """A whole step, `(params, state, x) -> (params, state, loss)`."""
    own = loss_of(layer)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(params: Any, state: Any, x: Tensor) -> Any:
        value, grads = sf.value_and_grad(lambda params, x: sf.pmean(own(params, x), DATA))(params, x)
        params, state = optimizer.step(params, grads, state)
        return params, state, value

    return step


def numbers(losses: list[Tensor], params: Any) -> list[Tensor]:
    return [x.detach().cpu() for x in (*losses, *optree.tree_leaves(params))]


def alone(optimizer: so.Optimizer) -> list[Tensor]:
    """The numbers of one process with the whole batch."""
    params, losses = whole(), []
    state = optimizer.init(params)
    for x in batches(4):
        value, grads = sf.value_and_grad(loss_of(block))(params, x)
        params, state = optimizer.step(params, grads, state)
        losses += [value, loss_of(block)(params, x), loss_of(block, 1)(params, x)]
    return numbers(losses, params)


@plainly
def trained(device: str, placement: str, optimizer: so.Optimizer, ranks: tuple[int, int]) -> list[Tensor]:
    """The numbers of a graphed step, and of losses that run as they are after each step, in the same buffers.

    The first is differentiated, too, which frees the memory from which gradients are sent.

    The second loss ends early, when the next layer's gather may have started.
    """
    strategy, options = PLACEMENTS[placement]
    mesh = sf.make_mesh(replica=ranks[0], shard=ranks[1], device=device)
    params, losses = sf.shard(whole(), mesh, STRATEGIES[strategy]), []
    layer = sf.stage(block, **options)
    state, step = optimizer.init(params), sf.cuda_graph(step_of(mesh, optimizer, layer))

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def evaluated(params: Any, x: Tensor) -> Tensor:
        value, _ = sf.value_and_grad(lambda params: sf.pmean(loss_of(layer)(params, x), DATA))(params)
        return torch.stack([value, sf.pmean(loss_of(layer, 1)(params, x), DATA)])

    for x in batches(4):
        own = (x[dist.get_rank()] if mesh.size() > 1 else x).to(device)
        params, state, value = step(params, state, own)
        losses += [value, *evaluated(params, own)]
    return numbers(losses, sf.unshard(params))


# --- the numbers of one process ---


@plainly
def on_the_device(store: str, name: str) -> Any:
    """The numbers of a program, its races, how often a graph ran, and the collectives of each group."""
    met = dist.FileStore(store, 4)  # type: ignore[attr-defined]
    placement, optimizer = PROGRAMS[name]
    with simulated(4, met.add("ranks", 1) - 1, store=met) as device:
        got = trained(device.name, placement, (OPTIMIZERS | OTHERS)[optimizer](), (2, 2))
        return got, device.races, device.operations["replay"], dict(device.collectives)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_on_four_ranks_gives_the_numbers_of_one_process(tmp_path: Path, name: str) -> None:
    want = alone((OPTIMIZERS | OTHERS)[PROGRAMS[name][1]]() if "shard_state" not in name else so.adamw(1e-2))
    ranks = world(4, "alone").with_deadline(100).run(on_the_device, str(tmp_path / "store"), name)
    for got, races, replays, collectives in ranks:
        assert (races, replays) == ([], STEPS - WARM_UP)
        assert distance(got, want, 1.0) < 1e-12
        for group, order in collectives.items():
            assert all(others.get(group, order) == order for *_, others in ranks)


@pytest.mark.parametrize("name", ["full_shard, adamw, cosine", "remat, adamw, cosine", "hybrid_shard, adam, pure"])
def test_on_several_cpus_a_graphed_step_gives_the_numbers_of_one(name: str) -> None:
    placement, optimizer = PROGRAMS[name]
    make = (OPTIMIZERS | OTHERS)[optimizer]
    for got in world(4).with_deadline(60).run(trained, "cpu", placement, make(), (2, 2)):
        assert distance(got, alone(make()), 1.0) < 1e-12


@pytest.mark.parametrize("name", OPTIMIZERS | OTHERS)
def test_on_the_cpu_a_graphed_step_runs_as_it_is(name: str) -> None:
    optimizer = (OPTIMIZERS | OTHERS)[name]
    got = world(1).with_deadline(60).run(trained, "cpu", "full_shard", optimizer(), (1, 1))[0]
    assert distance(got, alone(optimizer() if name != "shard_state" else so.adamw(1e-2)), 1.0) < 1e-12


# --- one rank: what a graph does with arguments and results ---

Run = Callable[[str], Any]
toy, repeated = functools.partial(steps.toy, sf.cuda_graph), functools.partial(steps.repeated, sf.cuda_graph)
counter, alternating, powers, used_again = (
    functools.partial(f, sf.cuda_graph) for f in (steps.counter, steps.alternating, steps.powers, steps.used_again)
)


def listed(device: str) -> Any:
    kept: list[Tensor] = []
    return repeated(device, lambda w, x: kept.append(w * 2) or 0)  # type: ignore[func-returns-value]


def growing(device: str) -> Any:
    def step(state: Tensor) -> Tensor:
        return torch.cat([state, state[:1]]) if next(calls) > 2 else state + 1

    calls = itertools.count(1)
    run, state = sf.cuda_graph(step, mesh=sf.make_mesh(shard=1, device=device)), data(device=device)
    for _ in range(5):
        state = run(state)


def in_inference_mode(device: str) -> Any:
    with torch.inference_mode():
        return repeated(device, lambda w, x: 0)


def remembered(device: str) -> Any:
    params = {"w": data(device=device)}

    def step(params: Any, x: Tensor) -> Any:
        params["w"].add_(x)
        return params["w"].sum()

    run = sf.cuda_graph(step, mesh=sf.make_mesh(shard=1, device=device))
    for i in range(6):
        run(params, data(i, device=device))


def staged(layer: Callable[..., Tensor], device: str, **options: Any) -> Any:
    mesh = sf.make_mesh(replica=1, shard=1, device=device)
    params = sf.shard(whole(), mesh, sf.full_shard("shard").with_tiers(**options.pop("tiers", {})))
    optimizer = so.sgd(0.1)
    state, step = optimizer.init(params), sf.cuda_graph(step_of(mesh, optimizer, sf.stage(layer, **options)))
    for x in batches(1):
        params, state, _ = step(params, state, x[0].to(device))


def dropped(p: Any, x: Tensor) -> Tensor:
    return F.dropout(block(p, x), 0.5)


def folded(w: Tensor, x: Tensor) -> Tensor:
    keep = torch.rand(w.shape, generator=sf.fold_in(0), dtype=w.dtype, device=w.device)
    return (w * keep).sum()


def under_debug(device: str) -> Any:
    with sf.debug(nan=True):
        return repeated(device, lambda w, x: 0)


def with_auto(device: str) -> Any:
    def more(w: Tensor, x: Tensor) -> Any:
        return sf.accumulate(lambda p, x: (p * x).sum(), x[None], micro="auto")(w)[0]

    return repeated(device, more)


def required(device: str) -> Any:
    step, params, state = toy(device)
    return step(params, state, data(device=device).requires_grad_())


def in_a_transform(device: str) -> Any:
    step, params, state = toy(device)
    return torch.func.grad(lambda x: step(params, state, x)[2])(data(device=device))


def many_shapes(device: str) -> Any:
    run = sf.cuda_graph(lambda x: x * 2, mesh=sf.make_mesh(shard=1, device=device))
    for rows in range(1, 12):
        run(data(rows=rows, device=device))


def passed_again(device: str) -> Any:
    step, params, state = toy(device, optimizer=so.sgd(0.1, momentum=0.9))
    for i in range(4):
        old = params
        params, state, _ = step(params, state, data(i, device=device))
    step(old, state, data(device=device))


REFUSED: dict[str, tuple[Run, str]] = {
    "a number is read": (
        lambda d: repeated(d, lambda w, x: w.sum().item()),
        r"cuda_graph\(step\): the host reads a result, by aten::_local_scalar_dense, at .*test_graphed.py:\d+",
    ),
    "a branch on a number": (lambda d: repeated(d, lambda w, x: 1 if w.sum() > 0 else 0), "the host reads a result"),
    "a size that depends on numbers": (lambda d: repeated(d, lambda w, x: w[w > 0].sum()), "the host reads a result"),
    "the optimizer counts on the host": (
        lambda d: repeated(d, lambda w, x: 0, optimizer=so.multi_steps(so.sgd(0.1), 2)),
        "state.optimizer.step is 1, and was 0: .* The step returned it as it was, at first",
    ),
    "a schedule by the math module": (
        lambda d: repeated(d, lambda w, x: 0, optimizer=so.sgd(lambda step: math.exp(-step))),
        "the schedule was given the step number as a tensor, and returned a float: compute the number by operations",
    ),
    "a schedule with a branch": (
        lambda d: repeated(d, lambda w, x: 0, optimizer=so.sgd(lambda step: 0.1 / step if step < 9 else step * 0)),
        "the host reads a result",
    ),
    "a schedule that ignores the step": (
        lambda d: repeated(d, lambda w, x: 0, optimizer=so.sgd(lambda step: 0.1)),
        "the schedule was given the step number as a tensor",
    ),
    "a power of a count": (powers, r"aten::pow.Scalar at .*:\d+ raises an integer to a power that has become a tensor"),
    "a number from outside": (counter, r"aten::mul.Tensor at .*steps.py:\d+ gets the number 0.4\d*, and .* 0.3"),
    "another operation than before": (alternating, r"the step runs aten::\w+, and at the last call aten::\w+"),
    "a changed number": (
        lambda d: repeated(d, lambda w, x, rate: rate * w.sum(), lambda i: (0.1 * i,)),
        r"rest.*is 0.1, and was 0.0: a program keeps numbers as constants. Pass it as a 0-d tensor",
    ),
    "a generator": (lambda d: repeated(d, folded), "draws from a torch.Generator, such as fold_in makes"),
    "dropout in a stage that runs again": (lambda d: staged(dropped, d, remat=True), "in a stage that runs again"),
    "parts as they fit": (with_auto, "a captured step cannot try how many parts fit"),
    "an argument with a gradient": (required, "x requires a gradient, and a program cannot be differentiated"),
    "a transform": (in_a_transform, "it cannot be part of a transform"),
    "too many shapes": (many_shapes, "there are 8 programs already"),
    "a result that is not passed back": (remembered, "the step overwrites params.w"),
    "a tensor that is kept": (listed, r"a tensor of shape \[8\], made by aten::mul.Tensor at .*test_graphed.py:\d+"),
    "inference mode": (in_inference_mode, "use no_grad, not inference_mode"),
    "a state that grows": (growing, r"for state, torch.float64 \[\d+\] on \w+(:0)?, the step returns torch.float64"),
    "use of a donated tensor": (used_again, "add of a tensor that was given to a step"),
    "a donated argument": (passed_again, "params.w was given to an earlier call"),
}
ONLY_ON_DEVICES: dict[str, tuple[Run, str]] = {
    "a debug mode": (under_debug, r"debug\(nan=True\) checks each call on the host"),
    "an argument on the host": (
        lambda d: repeated(d, lambda w, x, y: 0, lambda i: (torch.ones(2),)),
        r"is on the CPU, and the graph on sim",
    ),
    "a copy from the host": (
        lambda d: repeated(d, lambda w, x: (w * torch.ones(WIDTH).to(d)).sum()),
        r"the step copies between cpu and sim at .*test_graphed.py:\d+",
    ),
    "a copy to the host": (
        lambda d: repeated(d, lambda w, x: (w.to("cpu", non_blocking=True), 0)[1]),
        "the step copies between cpu and sim",
    ),
    "parameters on the host": (
        lambda d: staged(block, d, tiers={"params": "host"}),
        "on the CPU, and the graph on sim",
    ),
    "activations on the host": (lambda d: staged(block, d, remat=sf.offload(above=0)), "copies between|pins memory"),
}


@plainly
def told(run: Run, device: str) -> str:
    return refusals.told(lambda: run(device))


def told_on_the_device() -> dict[str, str]:
    with simulated(values=True) as device:
        return {name: told(run, device.name) for name, (run, _) in (REFUSED | ONLY_ON_DEVICES).items()}


@pytest.fixture(scope="module")
def heard() -> dict[str, str]:
    return world(1, "alone").with_deadline(200).run(told_on_the_device)[0]


@pytest.mark.parametrize("name", REFUSED | ONLY_ON_DEVICES)
def test_what_a_graph_cannot_do_is_an_error(heard: dict[str, str], name: str) -> None:
    pattern = (REFUSED | ONLY_ON_DEVICES)[name][1]
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(heard[name])
    assert len(heard[name]) < 1000


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_shows_its_errors_on_the_cpu(name: str) -> None:
    found = world(1).with_deadline(100).run(told, REFUSED[name][0], "cpu")[0]
    with pytest.raises(AssertionError, match=REFUSED[name][1]):
        raise AssertionError(found)


# --- what is new in each run ---


def dropped_out(device: str) -> list[list[float]]:
    torch.manual_seed(0)
    run = sf.cuda_graph(lambda x: F.dropout(x, 0.5), mesh=sf.make_mesh(shard=1, device=device))
    x = torch.ones(64, dtype=torch.float64).to(device)
    return [run(x).cpu().tolist() for _ in range(6)]


@plainly
def drops_on_the_device() -> list[list[float]]:
    with simulated(values=True) as device:
        return dropped_out(device.name)


def test_dropout_draws_new_numbers_in_each_run() -> None:
    got = world(1, "alone").with_deadline(60).run(drops_on_the_device)[0]
    torch.manual_seed(0)
    x = torch.ones(64, dtype=torch.float64)
    assert got == [F.dropout(x, 0.5).tolist() for _ in range(6)]
    assert len(set(map(tuple, got))) == 6


def of_two_lengths(device: str) -> tuple[Any, Any]:
    """The numbers of steps whose batches have one length or another, and of the same steps without graphs."""
    found = []
    for graph in (True, False):
        mesh, optimizer = (
            sf.make_mesh(replica=1, shard=1, device=device),
            so.adamw(so.warmup_linear(1e-2, warmup=3, steps=20)),
        )
        params, losses = sf.shard(whole(), mesh, sf.full_shard("shard")), []
        state, step = optimizer.init(params), step_of(mesh, optimizer, sf.stage(block))
        step = sf.cuda_graph(step) if graph else step
        for x in batches(1, lambda i: ROWS + i % 2, 14):
            params, state, value = step(params, state, x[0].to(device))
            losses.append(value)
        found.append(numbers(losses, sf.unshard(params)))
    return found[0], found[1]


@plainly
def lengths_on_the_device() -> Any:
    with simulated(values=True) as device:
        found = of_two_lengths(device.name)
        return found, device.operations["replay"], device.races


def test_a_new_shape_gets_a_graph_of_its_own() -> None:
    (got, want), replays, races = world(1, "alone").with_deadline(60).run(lengths_on_the_device)[0]
    assert (replays, races) == (14 - 2 * WARM_UP, [])
    assert distance(got, want, 1.0) < 1e-14


@plainly
def restored(device: str) -> tuple[list[float], list[float]]:
    """The losses of steps 2 to 6, and again from the parameters and the state of step 2, whose count is a number."""
    step, params, state = toy(device, optimizer=so.adam(so.warmup_linear(0.1, warmup=3, steps=9)))
    found: list[list[float]] = []
    for i in range(2):
        params, state, _ = step(params, state, data(i, device=device))
    saved = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (params, state))
    for _ in range(2):
        losses = []
        for i in range(2, 7):
            params, state, value = step(params, state, data(i, device=device))
            losses.append(value)
        found.append([x.item() for x in losses])
        params, state = saved
        state = state | {"step": 2}
    return found[0], found[1]


def restored_on_the_device() -> Any:
    with simulated(values=True) as device:
        return restored(device.name)


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_a_state_from_elsewhere_is_copied_in_and_its_numbers_too(kind: str) -> None:
    run = world(1).with_deadline(60).run(restored, "cpu") if kind == "cpu" else None
    first, again = (run or world(1, "alone").with_deadline(60).run(restored_on_the_device))[0]
    assert first == again


def swapped(device: str) -> list[float]:
    """Two arguments that a step returns in each other's place, as the program passes them back."""
    a, b = data(device=device), data(5, device=device)
    run = sf.cuda_graph(lambda a, b: (b + 1, a * 2), mesh=sf.make_mesh(shard=1, device=device))
    for i in range(8):
        x, y = run(a, b)
        a, b = (y, x) if i > 3 else (x, y)
    return [*a.cpu().tolist(), *b.cpu().tolist()]


@plainly
def swapped_on_the_device() -> list[float]:
    with simulated(values=True) as device:
        return swapped(device.name)


def test_arguments_in_the_memory_of_others_are_read_before_they_are_overwritten() -> None:
    a, b = data(), data(5)
    for i in range(8):
        x, y = b + 1, a * 2
        a, b = (y, x) if i > 3 else (x, y)
    assert world(1, "alone").with_deadline(60).run(swapped_on_the_device)[0] == [*a.tolist(), *b.tolist()]


@plainly
def beside_eager_calls(reshard: Any) -> Any:
    """Gradients of eager losses, between whose forward and backward a graph runs in the same buffers; and races."""
    with simulated(values=True) as device:
        mesh = sf.make_mesh(shard=1, device=device.name)
        params, others = (sf.shard(whole(), mesh, sf.full_shard("shard")) for _ in range(2))
        layer, x = sf.stage(block, gather_dtype=torch.float32, reshard=reshard), batches(1)[0][0].float()
        loss, x = loss_of(layer), x.to(device.name)
        graph = sf.cuda_graph(sf.shard_map(loss, mesh=mesh, in_specs=..., out_specs=...))
        others = optree.tree_map(lambda x: x + 1, others)

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
        def pulled(params: Any, x: Tensor) -> Any:
            result: Any = torch.func.vjp(loss, params, x)
            value, pull = result
            graph(others, x)
            return pull(torch.ones_like(value))

        found = [numbers([], pulled(params, x)) for _ in range(STEPS)]
        return found, device.operations["replay"], device.races


@pytest.mark.parametrize("reshard", [None, False, "step"])
def test_a_graph_may_run_between_forward_and_backward_of_an_eager_call(reshard: Any) -> None:
    found, replays, races = world(1, "alone").with_deadline(60).run(beside_eager_calls, reshard)[0]
    assert (replays, races) == (STEPS - WARM_UP, [])
    assert all(torch.equal(x, y) for other in found for x, y in zip(found[0], other, strict=True))


@plainly
def looked_up() -> str:
    """The error of a run with a token that the table does not have."""
    with simulated(values=True) as device:
        mesh = sf.make_mesh(tensor=1, device=device.name)
        table = torch.ones(4, 2, dtype=torch.float64).to(device.name)

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
        def sums(table: Tensor, tokens: Tensor) -> Tensor:
            return parallel.embedding(tokens, table, "tensor").sum()

        run = sf.cuda_graph(sums, mesh=mesh)
        for i in range(6):
            run(table, torch.tensor([0, 9 if i == 5 else 3]).to(device.name))
        torch.get_device_module(device.name).synchronize()
        return told(lambda _: run(table, torch.tensor([0, 1]).to(device.name)), device.name)


def test_what_a_graph_computes_is_checked_later() -> None:
    found = world(1, "alone").with_deadline(60).run(looked_up)[0]
    assert found.startswith("RuntimeError: embedding: tokens are from 0 to 9; they are from 0 to 3")


def products(device: str) -> list[float]:
    """How far products with a Hessian by a graph are from those as they are, with a Function between stages."""
    mesh = sf.make_mesh(shard=1, device=device)
    made = [[{"w": drawn(seed)(WIDTH, WIDTH)} for _ in range(2)] for seed in (2, 3)]
    params, v = (sf.shard(tree, mesh, sf.full_shard("shard")) for tree in made)
    layer, x = sf.stage(lambda p, x: torch.tanh(x @ p["w"])), drawn(4)(ROWS, WIDTH).to(device)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def product(params: Any, v: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            return layer(params[1], Halved.apply(layer(params[0], x))).square().sum()

        return sf.jvp(sf.grad(loss), (params,), (v,))[1]

    run, want = sf.cuda_graph(product, mesh=mesh), product(params, v, x)
    return [distance(*(sf.unshard(each) for each in (run(params, v, x), want))) for _ in range(6)]


@plainly
def products_on(kind: str) -> list[float]:
    with simulated(values=True) if kind == "sim" else contextlib.nullcontext():
        return products(kind)


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "processes"), ("sim", "alone")])
def test_a_product_with_a_hessian_has_a_graph_whatever_functions_make_of_nothing(kind: str, backend: Any) -> None:
    (off,) = world(1, backend).with_deadline(60).run(products_on, kind)
    assert worst(off) < 1e-12


# --- several ranks ---


@plainly
def failing(store: str, how: str) -> str:
    """What a rank hears of a step that fails on rank 1 when it is captured, or is called alike on all ranks."""
    met = dist.FileStore(store, 2)  # type: ignore[attr-defined]
    rank = met.add("ranks", 1) - 1
    with simulated(2, rank, store=met) as device:
        mesh = sf.make_mesh(replica=1, shard=2, device=device.name)
        optimizer, calls = so.sgd(0.1), []

        def layer(p: Any, x: Tensor) -> Tensor:
            calls.append(1)
            if how == "fails" and rank == 1 and len(calls) > 2 * LAYERS * WARM_UP // 2:
                raise ValueError("no more today")
            return block(p, x)

        params = sf.shard(whole(), mesh, sf.full_shard("shard"))
        state, inner = optimizer.init(params), step_of(mesh, optimizer, sf.stage(layer))
        step = sf.cuda_graph(lambda params, state, x, flag: inner(params, state, x))
        flag = "left" if rank and how == "differs" else "right"
        try:
            for x in batches(2):
                params, state, _ = step(params, state, x[rank].to(device.name), flag)
        except Exception as error:
            return f"{rank} {type(error).__name__}: {error}"
        return f"{rank} no error"


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Any) -> None:
    first, second = sorted(world(2, "alone").with_deadline(100).run(failing, str(tmp_path / "store"), "fails"))
    assert "rank 1 failed: no more today" in first
    assert second.startswith("1 ValueError: no more today")


def test_ranks_that_would_capture_different_steps_are_told(tmp_path: Any) -> None:
    for found in world(2, "alone").with_deadline(100).run(failing, str(tmp_path / "store"), "differs"):
        assert "ValueError: cuda_graph(<lambda>): the arguments differ between ranks" in found
        assert "'left'" in found
        assert "'right'" in found


@plainly
def counted_collectives(graph: bool) -> Any:
    with simulated(4) as device:
        mesh = sf.make_mesh(replica=1, shard=4, device=device.name)
        optimizer = so.sgd(0.1)
        params = sf.shard(whole(), mesh, sf.full_shard("shard"))
        state, step = optimizer.init(params), step_of(mesh, optimizer, sf.stage(block))
        step = sf.cuda_graph(step) if graph else step
        counts, waits = [], []
        for x in batches(4):
            own = x[0].to(device.name)
            device.reset_counts()
            with sf.collectives.ledger() as log:
                params, state, _ = step(params, state, own)
            counts.append((log.count(op="all_gather"), log.count(op="reduce_scatter"), log.bytes()))
            waits.append(len(device.synchronizations))
        return counts, waits


def test_a_ledger_has_the_collectives_of_each_run_and_no_run_waits() -> None:
    counts, waits = world(1, "alone").with_deadline(60).run(counted_collectives, True)[0]
    assert counts[-1][1] == LAYERS
    eagerly, _ = world(1, "alone").with_deadline(60).run(counted_collectives, False)[0]
    alike = [i for i in range(STEPS) if i not in (0, 1, WARM_UP)]  # in these calls ranks compare
    assert [counts[i] for i in alike] == [eagerly[i] for i in alike]
    assert counts[WARM_UP][1] == LAYERS
    assert waits[WARM_UP + 1 :] == [0] * (STEPS - WARM_UP - 1)
