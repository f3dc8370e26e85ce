"""What overwrites its arguments is refused where they are differentiated, and what does not is exact there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so

X = torch.arange(1.0, 4.0, dtype=torch.float64)
CHOSEN = ["a"]
OPTIMIZERS: dict[str, Callable[..., so.Optimizer]] = {
    "sgd": lambda **o: so.sgd(0.1, momentum=0.9, **o),
    "adam": lambda **o: so.adam(0.1, **o),
    "lion": lambda **o: so.lion(0.1, **o),
    "adafactor": lambda **o: so.adafactor(0.1, **o),
    "lamb": lambda **o: so.lamb(0.1, **o),
    "muon": lambda **o: so.masked(
        so.muon(0.1, dtype=None, **o), lambda path, shape: len(shape) == 2, so.adam(0.1, **o)
    ),
    "masked": lambda **o: so.masked(so.sgd(0.1, **o), CHOSEN, so.adam(0.1, **o)),
    "clipped": lambda **o: so.chain(so.clip_by_global_norm(0.5, **o), so.sgd(0.1, donate=False)),
    "clamped": lambda **o: so.chain(so.clip_by_value(0.5, **o), so.sgd(0.1, donate=False)),
    "ema": lambda **o: so.ema(so.sgd(0.1, donate=False), 0.9, **o),
    "master": lambda **o: so.fp32_master_weights(so.sgd(0.1, donate=False), **o),
    "dynamic_loss_scale": lambda **o: so.dynamic_loss_scale(so.sgd(0.1, donate=False), scale=2.0, **o),
    "accumulate": lambda **o: so.multi_steps(so.adam(0.1, **o), 1),
}
WAYS: dict[str, Callable[..., Any]] = {
    "sf.grad": lambda f, p: sf.grad(f)(p),
    "torch.func.grad": lambda f, p: torch.func.grad(f)(p),
    "jvp": lambda f, p: torch.func.jvp(f, (p,), (optree.tree_map(torch.ones_like, p),)),
}


def parameters() -> dict[str, Tensor]:
    return {"a": torch.full((2, 3), 0.3, dtype=torch.float64), "b": 0.1 * X}


def loss(p: Any) -> Tensor:
    return ((p["a"] * X).sin() ** 2).sum() + (p["b"] ** 3).sum()


def stepped(opt: so.Optimizer, p: Any, steps: int = 2) -> Any:
    state = opt.init(p)
    for _ in range(steps):
        p, state = opt.step(p, sf.grad(loss)(p), state)
    return p, state


def outer(opt: so.Optimizer) -> Callable[[Any], Tensor]:
    def run(p: Any) -> Tensor:
        p, state = stepped(opt, p)
        average = state["average"]["a"].sum() if "average" in state else 0.0
        return loss(p) + average

    return run


def by_state(which: str, donate: bool) -> Callable[[Any], Tensor]:
    """The loss after two steps, by the learning rate or by the first momentum."""

    def run(x: Any) -> Tensor:
        opt, p = so.sgd(0.1, momentum=0.9, donate=donate), parameters()
        state = opt.init(p)
        if which == "numbers.lr":
            state["numbers"]["lr"] = x["x"]
        else:
            state["momentum"] = optree.tree_map(lambda m: m + x["x"], state["momentum"])
        for _ in range(2):
            p, state = opt.step(p, sf.grad(loss)(p), state)
        return loss(p)

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", ["numbers.lr", "momentum.a"])
def test_what_is_in_the_state_is_differentiated_or_refused(which: str, way: str) -> None:
    x = {"x": torch.tensor(0.1, dtype=torch.float64)}
    with pytest.raises(RuntimeError, match=f"sgd overwrites what it is given, and {which} may be differentiated"):
        WAYS[way](by_state(which, True), x)
    got, f, h = WAYS[way](by_state(which, False), x), by_state(which, False), 1e-5
    want = (f({"x": x["x"] + h}) - f({"x": x["x"] - h})) / (2 * h)
    assert abs((got[1] if way == "jvp" else got["x"]) - want) < 1e-7


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_overwrites_is_refused_where_it_is_differentiated(name: str, way: str) -> None:
    p = parameters()
    with pytest.raises(RuntimeError, match=r"overwrites what it is given.* pass donate=False"):
        WAYS[way](outer(OPTIMIZERS[name](donate=True)), p)
    for x, y in zip(p.values(), parameters().values(), strict=True):
        assert torch.equal(x, y)


# The derivative of lion's sign is zero almost everywhere, and muon iterates beyond what a difference resolves.
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("lion", "muon")])
def test_what_does_not_overwrite_is_exact_there(name: str) -> None:
    f, p = outer(OPTIMIZERS[name](donate=False)), parameters()
    along = {"a": torch.tensor([[1.0, -0.5, 0.2], [0.3, 0.7, -1.0]], dtype=torch.float64), "b": 0.3 * X.flip(0)}

    def moved(h: float) -> Tensor:
        return f({key: p[key] + h * along[key] for key in p})

    h = 1e-4
    want = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
    tangent = torch.func.jvp(f, (p,), (along,))[1]
    assert abs(tangent - want) < 1e-7 * (1 + abs(want))
    for grad in (sf.grad(f)(p), torch.func.grad(f)(p)):
        assert abs(sum((grad[key] * along[key]).sum() for key in p) - tangent) < 1e-10 * (1 + abs(want))
    if name == "dynamic_loss_scale":
        return  # the host reads whether gradients are finite
    many = torch.func.vmap(f)({key: torch.stack([x, 2 * x]) for key, x in p.items()})
    assert torch.allclose(many, torch.stack([f(p), f({key: 2 * x for key, x in p.items()})]), rtol=1e-12)


def test_parameters_of_the_users_own_backward_are_overwritten() -> None:
    p = {key: x.requires_grad_() for key, x in parameters().items()}
    loss(p).backward()
    opt = so.chain(so.clip_by_global_norm(0.5), so.adam(0.1))
    new, _ = opt.step(p, {key: x.grad for key, x in p.items()}, opt.init(p))
    want, _ = stepped(opt, parameters(), 1)
    for key, x in p.items():
        assert new[key] is x
        assert torch.equal(x, want[key])


def test_what_is_detached_may_be_overwritten_in_a_loss() -> None:
    def f(scale: Tensor) -> Tensor:
        inner, _ = stepped(so.sgd(0.1), optree.tree_map(torch.clone, parameters()))
        return loss(inner).detach() * scale

    assert torch.equal(sf.grad(f)(torch.ones((), dtype=torch.float64)), loss(stepped(so.sgd(0.1), parameters())[0]))


def test_models_in_a_batch_are_overwritten_each() -> None:
    stacked = {key: torch.stack([x, 2 * x]) for key, x in parameters().items()}
    opt = so.ema(so.chain(so.clip_by_global_norm(0.5), so.sgd(0.1, donate=False)), 0.9)

    def averaged(p: Any) -> Any:
        return stepped(opt, optree.tree_map(torch.clone, p))[1]["average"]

    got = torch.func.vmap(averaged)(stacked)
    for i in (0, 1):
        want = averaged({key: x[i] for key, x in stacked.items()})
        for key in want:
            assert torch.allclose(got[key][i], want[key], rtol=1e-12)
