"""Gradients through training: those of all its steps as one graph on one process."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import curvature as sc
from shardfn.testing import World
from tests.curvature.test_operators import DATA, ROWS, flat, grid, net, rows, whole
from tests.models import STRATEGIES, plainly
from tests.reference import worst

STEPS = 5
OPTIMIZERS = {
    "sgd": lambda: so.sgd(0.1, momentum=0.9, nesterov=True, donate=False),
    "adamw": lambda: so.adamw(torch.tensor(0.05, dtype=torch.float64), weight_decay=0.1, eps=1e-3, donate=False),
    "clipped": lambda: so.chain(so.clip_by_global_norm(0.3, donate=False), so.adam(0.05, eps=1e-3, donate=False)),
    "average": lambda: so.ema(so.sgd(0.2, donate=False), decay=0.9, donate=False),
}


def hyper() -> dict[str, Tensor]:
    return {"weights": torch.tensor([1.0, 0.5, 2.0]).double(), "heat": torch.tensor(1.5).double(), "n": torch.arange(3)}


def losses(stage: Any, psum: Any, pvary: Any) -> tuple[Any, Any]:
    def loss(p: Any, h: Any, x: Tensor, y: Tensor) -> Tensor:
        weights, heat = pvary(h["weights"]), pvary(h["heat"])
        z = F.dropout(net(stage, p, x), 0.0) * heat
        return psum((F.cross_entropy(z, y, reduction="none") * weights[y]).sum()) / ROWS

    def outer(p: Any, h: Any, x: Tensor, y: Tensor) -> Tensor:
        return psum(F.cross_entropy(net(stage, p, x), y, reduction="sum")) / ROWS + 0.1 * h["heat"].square()

    return loss, outer


def batches(n: int, k: int) -> tuple[list[Any], Any]:
    *inner, last = [tuple(x.chunk(n)[k] for x in rows(10 + i)) for i in range(STEPS + 1)]
    return inner, last


def in_one_graph(name: str) -> tuple[Tensor, list[Tensor]]:
    loss, outer = losses(plainly, lambda x: x, lambda x: x)
    inner, last = batches(1, 0)
    optimizer = OPTIMIZERS[name]()

    def trained(p: Any, state: Any, h: Any) -> Tensor:
        for batch in inner:
            g = sf.grad(lambda p, batch=batch: loss(p, h, *batch))(p)
            p, state = optimizer.step(p, g, state)
        return outer(p, h, *last)

    params = whole()
    value, slopes = sf.value_and_grad(trained, (0, 1, 2))(params, optimizer.init(params), hyper())
    return value, [flat(x) for x in slopes]


def unrolled(name: str, strategy: str, segment: int | None) -> tuple[Tensor, list[Tensor]]:
    mesh = grid()
    params = sf.shard(whole(), mesh, STRATEGIES[strategy])
    loss, outer = losses(sf.stage, lambda x: sf.psum(x, DATA), lambda x: sf.pvary(x, DATA))
    optimizer = OPTIMIZERS[name]()

    def run(params: Any, h: Any, inner: Any, last: Any) -> Any:
        f = sc.unroll(loss, optimizer, lambda p, h: outer(p, h, *last), segment=segment)
        return f(params, optimizer.init(params), h, inner)

    mapped = sf.shard_map(run, mesh=mesh, in_specs=(..., sf.P(), sf.P(DATA), sf.P(DATA)), out_specs=...)
    value, slopes = mapped(params, hyper(), *batches(mesh.size(), mesh.get_rank()))
    first, state, h = slopes
    return value, [flat(sf.unshard(first)), flat(sf.unshard(state)), flat(h)]


def off(got: Any, want: Any) -> float:
    value, slopes = got
    wanted, others = want
    return worst(
        [
            float(value - wanted),
            *(float((a - b).norm() / b.norm().clamp(1e-3)) for a, b in zip(slopes, others, strict=True)),
        ]
    )


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.world(n, "processes")) for n in (1, 2, 4)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_through_training_are_those_of_one_graph(world: World, name: str, ranks: int) -> None:
    want = in_one_graph(name)
    for segment in (None, 1, 4) if ranks == 2 else (None,):
        assert worst([off(got, want) for got in world.run(unrolled, name, "full_shard", segment)]) < 1e-12


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_through_training_with_each_strategy(world: World, strategy: str) -> None:
    want = in_one_graph("clipped")
    assert worst([off(got, want) for got in world.run(unrolled, "clipped", strategy, None)]) < 1e-12


def scheduled() -> list[str]:
    mesh = grid()
    params = sf.shard(whole(), mesh, STRATEGIES["full_shard"])
    loss, outer = losses(sf.stage, lambda x: sf.psum(x, DATA), lambda x: sf.pvary(x, DATA))
    optimizer = OPTIMIZERS["sgd"]()
    inner, last = batches(mesh.size(), mesh.get_rank())

    def run(params: Any, h: Any) -> Any:
        f = sc.unroll(loss, optimizer, lambda p, h: outer(p, h, *last))
        return f(params, optimizer.init(params), h, inner)

    mapped = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)
    mapped(params, hyper())
    with sf.collectives.ledger() as log:
        mapped(params, hyper())
    return [f"{r.op} of {r.stage}" for r in log.records if r.stage and not r.scheduled]


@pytest.mark.world(2, "processes")
def test_all_stages_run_on_the_schedule(world: World) -> None:
    assert world.run(scheduled) == [[], []]


def noisy() -> list[Tensor]:
    """With dropout, a step that is made again must draw the same numbers."""

    def loss(p: Any, h: Tensor, x: Tensor) -> Tensor:
        return (F.dropout(x @ p, 0.5) * h).square().sum()

    optimizer, x = so.sgd(0.05, donate=False), torch.linspace(-1, 1, 12).double().view(3, 4)

    def outer(p: Tensor, h: Tensor) -> Tensor:
        return (p * h).square().sum()

    p, h = torch.linspace(0, 1, 4).double(), torch.tensor(0.7).double()

    def trained(p: Tensor, h: Tensor) -> Tensor:
        state = optimizer.init(p)
        for _ in range(7):
            p, state = optimizer.step(p, sf.grad(lambda p: loss(p, h, x))(p), state)
        return outer(p, h)

    torch.manual_seed(0)
    want, after = sf.grad(trained, (0, 1))(p, h), torch.get_rng_state()
    torch.manual_seed(0)
    _, got = sc.unroll(loss, optimizer, outer)(p, optimizer.init(p), h, [[x]] * 7)
    assert torch.equal(after, torch.get_rng_state())
    return [want[0] - got[0], want[1] - got[2]]


def test_steps_that_are_made_again_draw_the_same_numbers() -> None:
    assert worst([float(x.abs().max()) for x in noisy()]) < 1e-13


def test_the_rate_of_learning_has_a_gradient() -> None:
    def value(rate: Tensor) -> Any:
        optimizer = so.sgd(rate, donate=False)
        p = torch.tensor(2.0).double()
        f = sc.unroll(lambda p, h, x: (p - x) ** 2, optimizer, lambda p, h: p**2)
        return f(p, optimizer.init(p), (), [torch.tensor(1.0).double()] * 3)

    rate = torch.tensor(0.1).double()
    found, (_, slope, _) = value(rate)
    numbers = [x for x in optree.tree_leaves(slope) if isinstance(x, Tensor)]
    p = 1 + (1 - 2 * rate) ** 3
    assert abs(found - p**2) < 1e-14
    assert abs(numbers[0] - 2 * p * 3 * (1 - 2 * rate) ** 2 * -2) < 1e-13


# --- at a minimum ---


def at_minimum(strategy: str) -> tuple[Tensor, Tensor, bool]:
    """Ridge regression, whose minimum is known: the derivative of a validation loss by the penalty."""
    mesh = grid()
    draw = torch.Generator().manual_seed(5)
    X, y, V, u = (torch.randn(shape, generator=draw).double() for shape in ((16, 6), (16,), (8, 6), (8,)))
    log_penalty = torch.tensor(0.3).double()

    def best(log_penalty: Tensor) -> Tensor:
        return torch.linalg.solve(X.T @ X + log_penalty.exp() * torch.eye(6).double(), X.T @ y)

    want = torch.func.grad(lambda a: (V @ best(a) - u).square().sum())(log_penalty)
    params = sf.shard({"w": {"w": best(log_penalty)}}, mesh, STRATEGIES[strategy])
    stage = sf.stage(lambda p, x: x @ p["w"])
    n, k = mesh.size(), mesh.get_rank()

    def loss(p: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
        fit = sf.psum((stage(p["w"], x) - y).square().sum(), DATA)
        return fit + h.exp() * so.vdot(p, p)

    def outer(p: Any, h: Tensor) -> Tensor:
        return sf.psum((stage(p["w"], V.chunk(n)[k]) - u.chunk(n)[k]).square().sum(), DATA)

    mapped = sf.shard_map(
        lambda p, h, b: sc.implicit(loss, outer, p, h, b, tolerance=1e-13),
        mesh=mesh, in_specs=(..., sf.P(), sf.P(DATA)), out_specs=...)  # fmt: skip
    slope, solution = mapped(params, log_penalty, [(X.chunk(n)[k], y.chunk(n)[k])])
    return slope, want, solution.converged


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "hybrid_shard"])
def test_hypergradients_at_a_minimum(world: World, strategy: str) -> None:
    for slope, want, converged in world.run(at_minimum, strategy):
        assert converged
        assert abs(slope - want) < 1e-10 * abs(want)


# --- errors ---


def test_bad_input_to_unroll() -> None:
    p = torch.ones(3)
    loss, outer = (lambda p, h, x: (p * x).square().sum()), (lambda p, h: p.sum())

    def run(optimizer: so.Optimizer, batches: Any) -> Any:
        return sc.unroll(loss, optimizer, outer)(p, optimizer.init(p), (), batches)

    with pytest.raises(RuntimeError, match="donate=False"):
        run(so.sgd(0.1), [(p,)])
    assert torch.equal(p, torch.ones(3))
    pure = so.sgd(0.1, donate=False)
    with pytest.raises(ValueError, match="there are no batches"):
        run(pure, [])
    with pytest.raises(TypeError, match=r"batches must be a list, .* got generator"):
        run(pure, (b for b in [(p,)]))
    with pytest.raises(RuntimeError, match="a derivative through"):
        sf.grad(lambda p: sc.unroll(loss, pure, outer)(p, pure.init(p), (), [(torch.ones(3),)])[0])(p)


def test_random_numbers_are_left_as_they_were() -> None:
    p, h = torch.ones(3).double(), torch.tensor(2.0).double()

    def loss(p: Any, h: Tensor, x: Tensor) -> Tensor:
        return (F.dropout(p * x, 0.5) * h).square().sum() + p.square().sum()

    before = torch.get_rng_state()
    sc.implicit(loss, lambda p, h: p.sum(), p, h, [(p,)])
    assert torch.equal(before, torch.get_rng_state())
