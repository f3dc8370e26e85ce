"""Sophia: its paper's steps, and estimates of a Hessian's diagonal on any number of ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.curvature as sc
import shardfn.optim as so
from shardfn.testing import world
from tests.models import STRATEGIES, copied, data_mesh, distance, normal, plainly, scaled
from tests.models import scaled_loss as model
from tests.models import token_rows as tokens
from tests.refusals import refused

RATE, B1, B2, GAMMA, EPS, DECAY = 0.03, 0.9, 0.8, 0.3, 1e-3, 0.1
STEPS, EVERY = 6, 2


def sophia(**more: Any) -> so.Sophia:
    return so.sophia(RATE, b1=B1, b2=B2, gamma=GAMMA, eps=EPS, weight_decay=DECAY, **more)


def gradient(p: Tensor, t: int) -> Tensor:
    return torch.sin(p * (3 + t))


def curve(p: Tensor, t: int) -> Tensor:
    """Of both signs, and zero somewhere."""
    return (torch.cos(p * (2 + t)) * 3).round()


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
def test_steps_are_the_papers(donate: bool) -> None:
    start, optimizer = normal(50, 7, seed=1), sophia(donate=donate)
    ps = {"w": start.clone()}
    state = optimizer.init(ps)
    p, m, h, clipped = start.clone(), torch.zeros_like(start), torch.zeros_like(start), []
    for t in range(STEPS):
        g, x = gradient(p, t), curve(p, t)
        if t % EVERY == 0:
            before = ps["w"].clone()
            state = optimizer.estimate(ps, {"w": curve(ps["w"], t)}, state)
            assert torch.equal(ps["w"], before)
            assert state["step"] == t
            h = B2 * h + (1 - B2) * x
        ps, state = optimizer.step(ps, {"w": gradient(ps["w"], t)}, state)
        m = B1 * m + (1 - B1) * g
        p = p - RATE * DECAY * p
        move = m / torch.maximum(GAMMA * h, torch.tensor(EPS, dtype=torch.float64))
        clipped.append(float((move.abs() > 1).double().mean()))
        p = p - RATE * torch.clip(move, -1, 1)
    assert 0.1 < min(clipped) < max(clipped) < 0.95
    assert (ps["w"] - p).abs().max() < 1e-13


def test_estimates_with_a_schedule() -> None:
    """The rate is no part of an estimate."""
    rates = so.warmup_cosine(RATE, warmup=2, steps=9)
    found = {}
    for name, lr in dict[str, Any](schedule=rates, number=RATE).items():
        ps, optimizer = {"w": normal(9, seed=1)}, so.sophia(lr)
        found[name] = optimizer.estimate(ps, {"w": normal(9, seed=2)}, optimizer.init(ps))
    assert torch.equal(found["schedule"]["diagonal"]["w"], found["number"]["diagonal"]["w"])
    assert found["schedule"]["diagonal"]["w"].abs().max() > 0


def test_before_an_estimate_a_step_is_of_the_sign() -> None:
    ps, g = {"w": normal(9, seed=1)}, normal(9, seed=2)
    optimizer = so.sophia(0.1, donate=False)
    new, _ = optimizer.step(ps, {"w": g}, optimizer.init(ps))
    assert torch.equal(new["w"], ps["w"] - 0.1 * g.sign())


def test_a_step_can_be_differentiated() -> None:
    p, g, h = (normal(5, seed=seed) for seed in range(3))
    optimizer = so.sophia(0.1, gamma=4.0, donate=False)

    def moved(p: Tensor, g: Tensor, h: Tensor) -> Tensor:
        state = optimizer.estimate({"w": p}, {"w": h}, optimizer.init({"w": p}))
        return optimizer.step({"w": p}, {"w": g}, state)[0]["w"]

    args = tuple(x.detach().requires_grad_() for x in (p, g * 0.01, h.abs() + 1))
    assert torch.autograd.gradcheck(moved, args)


def hutchinson(wrap: Any, ps: Any, rows: Tensor, whole: int, t: int, axes: Any) -> tuple[Any, Any]:
    """The gradient, and an estimate of the diagonal by signs that depend on the step alone."""

    def loss(p: Any, rows: Tensor) -> Tensor:
        return sf.psum(model(wrap, p, rows), axes) / whole if axes else model(wrap, p, rows) / whole

    return sf.grad(loss)(ps, rows), sc.diag(sc.hvp(loss, ps, [rows]), 1, seed=t)


def trained(wrap: Any, ps: Any, rows: Tensor, whole: int, axes: Any) -> Any:
    optimizer = so.sophia(0.02, gamma=0.5)
    state = optimizer.init(ps)
    for t in range(4):
        grads, diagonal = hutchinson(wrap, ps, rows, whole, t, axes)
        if t % EVERY == 0:
            state = optimizer.estimate(ps, diagonal, state)
        ps, state = optimizer.step(ps, grads, state)
    return ps


def by_ranks(strategy: str, n: int) -> Any:
    mesh, rows = data_mesh(n), tokens(8)
    flat = sf.shard(scaled(), mesh, STRATEGIES[strategy])
    mine = rows.chunk(n)[mesh.get_rank()]
    run = sf.shard_map(
        lambda ps: trained(sf.stage, ps, mine, rows.numel(), tuple(mesh.mesh_dim_names or ())),
        mesh=mesh, in_specs=..., out_specs=..., check=False,
    )  # fmt: skip
    return sf.unshard(run(flat))


def test_with_hutchinsons_estimate_any_number_of_ranks_trains_alike() -> None:
    rows = tokens(8)
    wanted = trained(plainly, copied(scaled()), rows, rows.numel(), ())
    assert distance(wanted, scaled()) > 1e-3
    for n, strategy in ((1, "full_shard"), (2, "full_shard"), (4, "hybrid_shard"), (4, "zero1"), (4, "hfsdp")):
        for got in world(n).with_deadline(60).run(by_ranks, strategy, n):
            assert distance(got, wanted) < 1e-10, (n, strategy)


def test_a_diagonal_of_another_shape_is_refused() -> None:
    optimizer, ps = so.sophia(0.1), {"w": normal(3, seed=1)}
    state = optimizer.init(ps)
    said = refused(lambda: optimizer.estimate(ps, {"w": normal(4, seed=1)}, state), ValueError)
    assert "w" in said
    assert optree.tree_leaves(optimizer.estimate(ps, {"w": normal(3, seed=1)}, state))
