"""Modules that call a layer with other weights than its own, as hypernetworks, inner loops and weight noise do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import shardfn as sf
from shardfn.interop import functional
from shardfn.testing import World
from tests.interop.modules import mapped, meshed, off, seeded
from tests.refusals import told

WIDTH = 4
Weights = dict[str, Tensor]


def first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


class Hyper(nn.Module):
    """A target whose weights another layer makes."""

    def __init__(self, target: nn.Module, only: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(3))
        self.target = target
        named = dict(target.named_parameters())
        self.shapes = {name: p.shape for name, p in named.items() if not only or name in only}
        self.made = nn.Linear(3, sum(shape.numel() for shape in self.shapes.values()))

    def weights(self) -> Weights:
        parts = self.made(self.z).split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = first(functional_call(self.target, self.weights(), (x,))) + first(self.target(x))
        return found


class InnerLoop(Hyper):
    """One inner step by autograd, and its result's second derivatives in backward."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights()
        loss = functional_call(self.target, weights, (x,)).square().sum()
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - 0.01 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        found: Tensor = functional_call(self.target, weights, (x,))
        return found


class Nested(Hyper):
    """Weights for a module that holds stages."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


class Assigned(Hyper):
    def forward(self, x: Tensor) -> Tensor:
        own = self.target.weight
        self.target.weight = nn.Parameter(torch.eye(WIDTH, dtype=x.dtype))
        found: Tensor = self.target(x)
        self.target.weight = own
        return found


class OfAnother(Hyper):
    """With the weight of another layer."""

    def __init__(self) -> None:
        super().__init__(linear())
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = functional_call(self.target, {"weight": self.other.weight}, (x,)) + self.other(x)
        return found


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p + 0.5 for name, p in self.layer.named_parameters()}
        found: Tensor = functional_call(self.layer, weights, (x,)) + self.layer(x)
        return found


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "all weights": (lambda: Hyper(linear()), {}),
    "computed again": (lambda: Hyper(linear()), {"remat": True}),
    "some weights": (lambda: Hyper(linear(), ("weight",)), {}),
    "inner loop": (lambda: InnerLoop(linear()), {}),
    "of stages inside": (Nested, {}),
    "recurrent": (lambda: Hyper(nn.GRU(WIDTH, WIDTH)), {}),
    "tied": (lambda: Hyper(Tied()), {"stages": {"Tied"}}),
    "tied stages": (lambda: Hyper(Tied()), {}),
    "assigned": (lambda: Assigned(linear()), {}),
    "of another": (OfAnother, {}),
    "noise": (Noise, {}),
    "loose noise": (Noise, {"unstaged": [r"layer\..*"]}),
    "noise on one that is loose": (Noise, {"unstaged": ["layer.weight", "layer.bias"]}),
}  # fmt: skip


def right() -> dict[str, float]:
    mesh, found = meshed(), {}
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    for name, (make, options) in RIGHT.items():
        reference, model = seeded(make), functional(seeded(make), min_stage_params=1, **options)
        params = model.shard(mesh, sf.full_shard("shard"))

        def loss(p: Any, model: Any = model) -> Tensor:
            return sf.psum(model(p, mine).square().sum(), "shard")

        value, grads = mapped(sf.value_and_grad(loss), mesh)(params)
        want = torch.stack([reference(rows).square().sum() for rows in x.chunk(dist.get_world_size())]).sum()
        want.backward()
        named = {k: g.detach() for k, g in model.state_dict(grads).items()}
        wanted = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in reference.named_parameters()}
        found[name] = max(abs(float(value.detach() / want.detach()) - 1), off({k: named[k] for k in wanted}, wanted))
    return found


@pytest.mark.parametrize("world", [(1, "processes"), (2, "processes")], indirect=True)
def test_layers_called_with_other_weights_use_them(world: World) -> None:
    for found in world.run(right):
        assert {case: value for case, value in found.items() if not value < 1e-12} == {}


# --- errors ---


def deleted(m: Any, x: Tensor) -> Tensor:
    del m.target.weight
    m.target.weight = m.weights()["weight"]
    found: Tensor = m.target(x)
    return found


def by_data(m: Any, x: Tensor) -> Tensor:
    m.target.weight.data = torch.eye(WIDTH, dtype=x.dtype)
    found: Tensor = m.target(x)
    return found


def loaded(m: Any, x: Tensor) -> Tensor:
    m.target.load_state_dict({k: torch.ones(s, dtype=x.dtype) for k, s in m.shapes.items()})
    found: Tensor = m.target(x)
    return found


def assigned_and_left(m: Any, x: Tensor) -> Tensor:
    m.target.load_state_dict({k: torch.ones(s, dtype=x.dtype) for k, s in m.shapes.items()}, assign=True)
    found: Tensor = m.target(x)
    return found


def left_there(m: Any, x: Tensor) -> Tensor:
    m.target.weight = nn.Parameter(torch.eye(WIDTH, dtype=x.dtype))
    found: Tensor = m.target(x)
    return found


class Does(Hyper):
    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(linear())
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def of_autograd(module: Any, x: Tensor) -> Tensor:
    slope = torch.autograd.grad(module.target(x).sum(), module.target.weight, allow_unused=True)[0]
    return x if slope is None else x @ slope


ERRORS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "deleted": (deleted, "RuntimeError: target (Linear) has lost its parameter 'weight' in forward"),
    "a gradient": (of_autograd, "target.weight is read outside of stage 'target', by grad"),
    "by .data": (by_data, "target.weight is read outside of stage 'target'"),
    "loaded": (loaded, "load_state_dict: the parameters of this Linear were taken out of it"),
    "assigned by loading": (assigned_and_left, "load_state_dict: the parameters of this Linear were taken out of it"),
    "assigned and left": (left_there, "target got other parameters or modules after functional()"),
}  # fmt: skip


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found: Tensor = 2 * gradient * ctx.saved_tensors[0]
        return found


def by_gradient(w: Tensor, x: Tensor) -> Tensor:
    return x @ torch.func.grad(lambda w: w.sin().sum())(w)


def by_vjp(w: Tensor, x: Tensor) -> Tensor:
    value, back, *_ = torch.func.vjp(torch.sin, w)
    found: Tensor = x @ value @ back(value)[0]
    return found


def by_jacobian(w: Tensor, x: Tensor) -> Tensor:
    found: Tensor = x @ torch.func.jacrev(lambda w: w.sin().cumsum(0).sum(0))(w).sum(0)
    return found


def by_vmap(w: Tensor, x: Tensor) -> Tensor:
    return x @ torch.func.vmap(lambda row: row.sin())(w)


def by_function(w: Tensor, x: Tensor) -> Tensor:
    found: Tensor = x @ Squared.apply(w)
    return found


class ReadBy(nn.Module):
    """Gives another layer's weight to what hides it from torch's overrides."""

    def __init__(self, does: Callable[[Tensor, Tensor], Tensor], copies: bool) -> None:
        super().__init__()
        self.layers, self.does, self.copies = nn.ModuleList(linear() for _ in range(2)), does, copies

    def forward(self, x: Tensor) -> Tensor:
        w: Any = self.layers[0].weight
        found: Tensor = self.layers[1](self.does(w.clone() if self.copies else w, x))
        return found


def inner_steps(module: Any, x: Tensor) -> Tensor:
    """One step of MAML from the target's own weights."""
    weights = {name: p.clone() for name, p in module.target.named_parameters()}
    grads = torch.func.grad(lambda w: functional_call(module.target, w, (x[:1],)).square().sum())(weights)
    moved = {name: w - 0.1 * grads[name] for name, w in weights.items()}
    found: Tensor = functional_call(module.target, moved, (x,))
    return found


HIDDEN = (by_gradient, by_vjp, by_jacobian, by_vmap, by_function)
GRADIENT_OF = "layers.0.weight is given to a transform of torch.func, or to a torch.autograd.Function"


def hidden() -> tuple[dict[str, float], dict[str, list[str]]]:
    """Errors of each way without a copy, in `shard_map` and outside; with one, distances to the module's gradients."""
    mesh, off_by, errors = meshed(), dict[str, float](), dict[str, list[str]]()
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(make: Callable[[], nn.Module]) -> Any:
        model = functional(seeded(make), min_stage_params=1)
        params = model.shard(mesh, sf.full_shard("shard"))
        loss = sf.grad(lambda p: sf.pmean(model(p, x).square().sum(), "shard"))
        alone = sf.grad(lambda p: model(p, x).square().sum())
        return model, partial(mapped(loss, mesh), params), partial(alone, params)

    makes: dict[str, Callable[[], nn.Module]] = {does.__name__: partial(ReadBy, does, True) for does in HIDDEN}
    makes["maml"] = partial(Does, inner_steps)
    for name, make in makes.items():
        model, inside, _ = gradients(make)
        module = seeded(make)
        module(x).square().sum().backward()
        by_autograd = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in module.named_parameters()}
        off_by[name] = off(model.state_dict(inside()), by_autograd)
    for does in HIDDEN:
        _, inside, outside = gradients(partial(ReadBy, does, False))
        errors[does.__name__] = [told(inside), told(outside)]
    return off_by, errors


@pytest.mark.world(2, "processes")
def test_weights_given_to_transforms_in_forward_are_copies_or_errors(world: World) -> None:
    for off_by, errors in world.run(hidden):
        assert {k: e for k, e in off_by.items() if not e < 1e-12} == {}
        assert {k: e for k, e in errors.items() if not all(GRADIENT_OF in message for message in e)} == {}


def errors() -> dict[str, str]:
    mesh, found = meshed(), {}
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for name, (does, _) in ERRORS.items():
        model = functional(seeded(partial(Does, does)), min_stage_params=1)
        params = model.shard(mesh, sf.full_shard("shard"))
        call = mapped(lambda p, model=model: [model(p, x), model(p, x)], mesh)
        found[name] = told(partial(call, params))
    return found


@pytest.mark.world(2, "processes")
def test_other_ways_to_exchange_weights_in_forward_are_errors(world: World) -> None:
    for found in world.run(errors):
        assert {k: found[k] for k, (_, message) in ERRORS.items() if message not in found[k]} == {}
