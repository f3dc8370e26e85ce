"""Behaviors that optax's tests check, on shards: each update beside its formula on whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import world
from tests.models import distance, drawn
from tests.reference import worst

LR, STEPS = 0.05, 5
Rule = Callable[[Tensor, list[Tensor]], Tensor]


def params() -> dict[str, Any]:
    draw = drawn(0)
    return {"a": {"w": draw(5, 3), "b": draw(3)}, "c": {"w": draw(3, 4), "scale": draw(1)}}


def gradients(steps: int = STEPS) -> list[Any]:
    draw = drawn(1)
    return [optree.tree_map(lambda x: draw(*x.shape), params()) for _ in range(steps)]


# --- formulas, of one parameter and its gradients at each step ---


def gradient_descent(p: Tensor, gs: list[Tensor], decay: float = 0.0) -> Tensor:
    for g in gs:
        p = p - LR * (g + decay * p)
    return p


def heavy_ball(p: Tensor, gs: list[Tensor], nesterov: bool = False) -> Tensor:
    m = torch.zeros_like(p)
    for g in gs:
        m = 0.9 * m + g
        p = p - LR * (g + 0.9 * m if nesterov else m)
    return p


def adam(
    p: Tensor, gs: list[Tensor], l2: float = 0.0, decay: float = 0.0, b1: float = 0.9, b2: float = 0.999,
    eps: float = 1e-8, rate: Callable[[int], float] = lambda t: LR,
) -> Tensor:  # fmt: skip
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(gs, 1):
        g = g + l2 * p
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        move = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps) + decay * p
        p = p - rate(t) * move
    return p


def lion(p: Tensor, gs: list[Tensor]) -> Tensor:
    m = torch.zeros_like(p)
    for g in gs:
        p = p - LR * ((0.9 * m + 0.1 * g).sign() + 0.1 * p)
        m = 0.99 * m + 0.01 * g
    return p


def adagrad(p: Tensor, gs: list[Tensor]) -> Tensor:
    total = torch.zeros_like(p)
    for g in gs:
        total = total + g * g
        p = p - LR * g / (total.sqrt() + 1e-10)
    return p


def rmsprop(p: Tensor, gs: list[Tensor]) -> Tensor:
    v = torch.zeros_like(p)
    for g in gs:
        v = 0.99 * v + 0.01 * g * g
        p = p - LR * g / (v.sqrt() + 1e-8)
    return p


def adamax(p: Tensor, gs: list[Tensor]) -> Tensor:
    m, u = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(gs, 1):
        m, u = 0.9 * m + 0.1 * g, torch.maximum(0.999 * u, g.abs() + 1e-8)
        p = p - LR / (1 - 0.9**t) * m / u
    return p


def lamb(p: Tensor, gs: list[Tensor], decay: float = 0.1, most: float = math.inf) -> Tensor:
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(gs, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        move = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + decay * p
        p = p - LR * min((p.norm() / move.norm()).item(), most) * move
    return p


def sophia(p: Tensor, gs: list[Tensor]) -> Tensor:
    """Where the Hessian's diagonal is not known yet, so that moves are bounded by the rate."""
    m = torch.zeros_like(p)
    for g in gs:
        m = 0.965 * m + 0.035 * g
        p = p - LR * (m / 1e-12).clamp(-1, 1)
    return p


def adafactor(p: Tensor, gs: list[Tensor]) -> Tensor:
    v = torch.zeros_like(p)
    rows, columns = (torch.zeros(p.shape[i]).double() for i in (0, -1))
    for t, g in enumerate(gs, 1):
        old = 1 - t**-0.8
        if p.dim() > 1:
            rows = old * rows + (1 - old) * g.square().mean(1)
            columns = old * columns + (1 - old) * g.square().mean(0)
            v = torch.outer(rows, columns) / rows.mean()
        else:
            v = old * v + (1 - old) * g * g
        move = g / v.sqrt()
        size = max(1e-3, p.square().mean().sqrt().item()) * min(LR, t**-0.5)
        p = p - size * move / max(1.0, move.square().mean().sqrt().item())
    return p


def muon(p: Tensor, gs: list[Tensor]) -> Tensor:
    m = torch.zeros_like(p)
    for g in gs:
        m = 0.95 * m + 0.05 * g
        x = 0.05 * g + 0.95 * m
        x = (x / x.norm()).T if p.shape[0] > p.shape[1] else x / x.norm()
        for _ in range(5):
            s = x @ x.T
            x = 3.4445 * x - 4.7750 * s @ x + 2.0315 * s @ s @ x
        x = x.T if p.shape[0] > p.shape[1] else x
        p = p - LR * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * x
    return p


def cosine(t: int) -> float:
    return LR * t / 2 if t < 2 else LR * (1 + math.cos(math.pi * (t - 2) / 4)) / 2


def falling(t: int) -> float:
    return LR * t / 2 if t < 2 else LR * (6 - t) / 4


def stable(t: int) -> float:
    return LR * t / 2 if t < 2 else LR if t <= 4 else LR * (6 - t) / 2


def piecewise(t: int) -> float:
    return LR if t <= 3 else LR / 10


# --- formulas of a whole tree ---


def each(rule: Rule, **options: Any) -> Callable[[Any, list[Any]], Any]:
    return lambda ps, gs: optree.tree_map(lambda p, *g: rule(p, list(g), **options), ps, *gs)


def norm(tree: Any) -> Tensor:
    return torch.stack([x.square().sum() for x in optree.tree_leaves(tree)]).sum().sqrt()


def after(change: Callable[[Any], Any], rule: Rule) -> Callable[[Any, list[Any]], Any]:
    """A rule of changed gradients."""
    return lambda ps, gs: each(rule)(ps, [change(g) for g in gs])


def clipped(tree: Any, limit: float = 0.5) -> Any:
    return optree.tree_map(lambda x: x * min(1.0, limit / norm(tree).item()), tree)


def clamped(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.clamp(-0.3, 0.3), tree)


def by_shape(matrices: Rule, others: Rule) -> Rule:
    return lambda p, gs: matrices(p, gs) if p.dim() == 2 else others(p, gs)


def unchanged(p: Tensor, gs: list[Tensor]) -> Tensor:
    return p


def of_sums(p: Tensor, gs: list[Tensor]) -> Tensor:
    """Every second step, of two gradients; the last one waits."""
    return adam(p, [gs[0] + gs[1], gs[2] + gs[3]])


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


DECAYED = by_shape(lambda p, gs: adam(p, gs, decay=0.1), adam)
UPDATES: dict[str, tuple[Callable[[], so.Optimizer], Callable[[Any, list[Any]], Any]]] = {
    "sgd": (lambda: so.sgd(LR), each(gradient_descent)),
    "sgd with added decay": (lambda: so.sgd(LR, weight_decay=0.1), each(gradient_descent, decay=0.1)),
    "momentum": (lambda: so.sgd(LR, momentum=0.9), each(heavy_ball)),
    "nesterov": (lambda: so.sgd(LR, momentum=0.9, nesterov=True), each(heavy_ball, nesterov=True)),
    "adam": (lambda: so.adam(LR), each(adam)),
    "adam with L2": (lambda: so.adam(LR, weight_decay=0.1), each(adam, l2=0.1)),
    "adam by other numbers": (
        lambda: so.adam(LR, b1=0.5, b2=0.9, eps=0.1), each(adam, b1=0.5, b2=0.9, eps=0.1)
    ),
    "adamw": (lambda: so.adamw(LR, weight_decay=0.1), each(adam, decay=0.1)),
    "adamw that decays matrices": (
        lambda: so.adamw(LR, weight_decay=lambda path, shape: 0.1 * (len(shape) == 2)), each(DECAYED)
    ),
    "lion": (lambda: so.lion(LR, weight_decay=0.1), each(lion)),
    "lamb": (lambda: so.lamb(LR, weight_decay=0.1), each(lamb)),
    "lamb with a bound": (lambda: so.lamb(LR, max_trust_ratio=0.4), each(lamb, decay=0.0, most=0.4)),
    "adafactor": (lambda: so.adafactor(LR), each(adafactor)),
    "sophia without an estimate": (lambda: so.sophia(LR), each(sophia)),
    "adagrad": (lambda: so.from_torch(torch.optim.Adagrad, lr=LR), each(adagrad)),
    "rmsprop": (lambda: so.from_torch(torch.optim.RMSprop, lr=LR), each(rmsprop)),
    "adamax": (lambda: so.from_torch(torch.optim.Adamax, lr=LR), each(adamax)),
    "muon for matrices, adam for the rest": (
        lambda: so.masked(so.muon(LR, weight_decay=0.0, dtype=None), is_matrix, so.adam(LR)),
        each(by_shape(muon, adam)),
    ),
    "masked": (lambda: so.masked(so.adam(LR), is_matrix), each(by_shape(adam, unchanged))),
    "a mask by names": (lambda: so.masked(so.adam(LR), [r"a\.w", r"c\.w"]), each(by_shape(adam, unchanged))),
    "partition into two": (lambda: so.masked(so.adam(LR), is_matrix, so.lion(LR, weight_decay=0.1)),
                           each(by_shape(adam, lion))),
    "clip by global norm": (lambda: so.chain(so.clip_by_global_norm(0.5), so.adam(LR)), after(clipped, adam)),
    "clip of what is below": (lambda: so.chain(so.clip_by_global_norm(1e9), so.sgd(LR)), each(gradient_descent)),
    "clip by value": (lambda: so.chain(so.clip_by_value(0.3), so.sgd(LR)), after(clamped, gradient_descent)),
    "a chain is in order": (
        lambda: so.chain(so.clip_by_value(0.3), so.clip_by_global_norm(0.5), so.sgd(LR)),
        after(lambda g: clipped(clamped(g)), gradient_descent),
    ),
    "warmup_cosine": (lambda: so.adam(so.warmup_cosine(LR, warmup=2, steps=6)), each(adam, rate=cosine)),
    "linear": (lambda: so.adam(so.warmup_linear(LR, warmup=2, steps=6)), each(adam, rate=falling)),
    "wsd": (lambda: so.adam(so.wsd(LR, warmup=2, decay=2, steps=6)), each(adam, rate=stable)),
    "a schedule of one's own": (lambda: so.adamw(piecewise, weight_decay=0.1), each(adam, rate=piecewise, decay=0.1)),
    "multi_steps": (lambda: so.multi_steps(so.adam(LR), 2), each(of_sums)),
    "ema leaves the update as it is": (lambda: so.ema(so.adam(LR), 0.9), each(adam)),
    "skip_nonfinite of finite gradients": (lambda: so.skip_nonfinite(so.adam(LR)), each(adam)),
    "state on more axes": (lambda: so.shard_state(so.adam(LR), "replica"), each(adam)),
}  # fmt: skip


def mesh_and_strategy() -> tuple[Any, Any]:
    mesh = sf.make_mesh(device="cpu", replica=2, shard=2)
    return mesh, sf.hybrid_shard(shard="shard", replica="replica")


def stepped(optimizer: so.Optimizer, grads: list[Any], start: Any = None) -> tuple[Any, Any]:
    """Whole parameters after some steps on shards, and the state."""
    mesh, strategy = mesh_and_strategy()
    ps = sf.shard(params() if start is None else start, mesh, strategy)
    state = optimizer.init(ps)
    for g in grads:
        ps, state = optimizer.step(ps, sf.shard(g, mesh, strategy), state)
    return sf.unshard(ps), state


def updated(name: str) -> float:
    optimizer, formula = UPDATES[name]
    return distance(stepped(optimizer(), gradients())[0], formula(params(), gradients()))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", UPDATES)
def test_an_update_on_shards_is_its_formula_on_whole_tensors(name: str) -> None:
    assert worst(world(4, "threads").run(updated, name)) < 1e-12


# --- behaviors that are more than an update ---


def an_average_is_kept() -> None:
    _, state = stepped(so.ema(so.adam(LR), 0.9), gradients())
    average = params()
    for t in range(1, STEPS + 1):
        now = each(adam)(params(), gradients()[:t])
        average = optree.tree_map(lambda a, p: 0.9 * a + 0.1 * p, average, now)
    assert distance(sf.unshard(state["average"]), average) < 1e-12


def a_step_with_a_nonfinite_gradient_changes_nothing() -> None:
    grads = gradients()
    grads[2]["c"]["scale"][0] = math.inf
    got, state = stepped(so.skip_nonfinite(so.adam(LR)), grads)
    assert distance(got, each(adam)(params(), [*grads[:2], *grads[3:]])) < 1e-12
    assert state["skipped"] == 1


def a_learning_rate_in_the_state_can_be_changed() -> None:
    mesh, strategy = mesh_and_strategy()
    ps, optimizer = sf.shard(params(), mesh, strategy), so.sgd(LR)
    state = optimizer.init(ps)
    for t, g in enumerate(gradients()):
        state["numbers"]["lr"] = LR / (1 + t)
        ps, state = optimizer.step(ps, sf.shard(g, mesh, strategy), state)
    want = optree.tree_map(lambda p, *gs: p - sum(LR / (1 + t) * g for t, g in enumerate(gs)), params(), *gradients())
    assert distance(sf.unshard(ps), want) < 1e-12


def sophia_divides_by_the_estimate() -> None:
    mesh, strategy = mesh_and_strategy()
    ps, optimizer = sf.shard(params(), mesh, strategy), so.sophia(LR, b1=0.9, b2=0.5, gamma=0.1)
    diagonal = optree.tree_map(lambda x: x.abs() + 1, gradients()[4])
    state = optimizer.estimate(ps, sf.shard(diagonal, mesh, strategy), optimizer.init(ps))
    ps, state = optimizer.step(ps, sf.shard(gradients()[0], mesh, strategy), state)
    want = optree.tree_map(
        lambda p, g, h: p - LR * (0.1 * g / (0.1 * 0.5 * h)).clamp(-1, 1), params(), gradients()[0], diagonal
    )
    assert distance(sf.unshard(ps), want) < 1e-12


def shampoo_and_soap_are_the_same_on_any_mesh() -> None:
    for make in (so.shampoo, so.kl_shampoo, so.soap):
        alone = params()
        optimizer = make(LR, every=2)
        state = optimizer.init(alone)
        for g in gradients():
            alone, state = optimizer.step(alone, g, state)
        assert distance(stepped(make(LR, every=2), gradients())[0], alone) < 1e-11, make


def a_gradient_of_none_changes_nothing() -> None:
    mesh, strategy = mesh_and_strategy()
    ps, optimizer = sf.shard(params(), mesh, strategy), so.adamw(LR, weight_decay=0.1)
    state = optimizer.init(ps)
    for g in gradients():
        ps, state = optimizer.step(ps, sf.shard(g, mesh, strategy) | {"c": None}, state)
    want = each(adam, decay=0.1)(params(), gradients())
    assert distance(sf.unshard(ps), {"a": want["a"], "c": params()["c"]}) < 1e-12


def steps_without_donation_leave_their_arguments() -> None:
    mesh, strategy = mesh_and_strategy()
    ps, g = sf.shard(params(), mesh, strategy), sf.shard(gradients()[0], mesh, strategy)
    for optimizer in (so.adamw(LR, donate=False), so.lamb(LR, donate=False), so.adafactor(LR, donate=False)):
        optimizer.step(ps, g, optimizer.init(ps))
        assert distance(sf.unshard(ps), params()) == distance(sf.unshard(g), gradients()[0]) == 0


def a_meta_gradient_passes_through_a_step() -> None:
    mesh, strategy = mesh_and_strategy()
    ps, grads = sf.shard(params(), mesh, strategy), sf.shard(gradients()[0], mesh, strategy)
    optimizer = so.sgd(LR, weight_decay=0.1, donate=False)

    def loss(p: Any) -> Tensor:
        return so.vdot(*[optimizer.step(p, grads, optimizer.init(p))[0]] * 2)

    want = optree.tree_map(lambda p, g: 2 * (1 - 0.1 * LR) * (p - LR * (g + 0.1 * p)), params(), gradients()[0])
    assert distance(sf.unshard(sf.grad(loss)(ps)), want) < 1e-12


def a_global_norm_counts_every_element_once() -> None:
    mesh, strategy = mesh_and_strategy()
    for tree in gradients():
        shards = sf.shard(tree, mesh, strategy)
        assert abs(so.global_norm(shards) - norm(tree)) < 1e-12
        assert abs(so.norms(shards).parameters["a.w"] - tree["a"]["w"].norm()) < 1e-12
        assert abs(so.vdot(shards, shards) - norm(tree) ** 2) < 1e-11


def parameters_and_state_keep_their_dtypes() -> None:
    start = params()
    start["a"]["b"] = start["a"]["b"].float()
    grads = [optree.tree_map(lambda g, p: g.to(p.dtype), g, start) for g in gradients()]
    got, state = stepped(so.adamw(LR), grads, start)
    assert got["a"]["b"].dtype == torch.float32
    assert got["a"]["w"].dtype == torch.float64
    assert {x.dtype for x in optree.tree_leaves(sf.unshard(state["mean"]))} == {torch.float32, torch.float64}


def complex_parameters_are_pairs_of_real_ones() -> None:
    draw = drawn(3)
    start, *grads = ([draw(4, 2) for _ in "ri"] for _ in range(STEPS + 1))
    got, _ = stepped(so.sgd(LR, momentum=0.9), [{"z": torch.complex(*g)} for g in grads],
                     {"z": torch.complex(*start)})  # fmt: skip
    want = torch.complex(*(heavy_ball(start[i], [g[i] for g in grads]) for i in (0, 1)))
    assert distance(got["z"].real, want.real) + distance(got["z"].imag, want.imag) < 1e-12


def a_state_of_other_parameters_is_refused() -> None:
    mesh, strategy = mesh_and_strategy()
    ps, optimizer = sf.shard(params(), mesh, strategy), so.adam(LR)
    other = optimizer.init(sf.shard({"a": params()["a"]}, mesh, strategy))
    with pytest.raises((ValueError, TypeError)):
        optimizer.step(ps, sf.shard(gradients()[0], mesh, strategy), other)


BEHAVIORS = [
    an_average_is_kept, a_step_with_a_nonfinite_gradient_changes_nothing, a_learning_rate_in_the_state_can_be_changed,
    sophia_divides_by_the_estimate, shampoo_and_soap_are_the_same_on_any_mesh, a_gradient_of_none_changes_nothing,
    steps_without_donation_leave_their_arguments,
    a_meta_gradient_passes_through_a_step, a_global_norm_counts_every_element_once,
    parameters_and_state_keep_their_dtypes, complex_parameters_are_pairs_of_real_ones,
    a_state_of_other_parameters_is_refused,
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda f: f.__name__)
def test_behavior_of_optax(behavior: Callable[[], None]) -> None:
    world(4, "threads").run(behavior)
