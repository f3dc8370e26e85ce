"""Modules with habits: whatever a module does besides computing, the result is the module's own, or an error says why.

Each is compared with the module as it is on the same rank, whose gradients are summed over the ranks.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.interop import functional
from shardfn.testing import World
from tests.interop.modules import (
    WIDTH,
    Call,
    Layer,
    Stack,
    backward,
    linear,
    mapped,
    meshed,
    of_module,
    off,
    rows,
    seeded,
)
from tests.refusals import told

# --- which are right ---


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.w(x))
        return x if depth == 0 else self(x, depth - 1)


class Counts(nn.Module):
    """What it computes depends on how often it was called, and on a switch that its first call turns off."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.calls, self.fresh = linear(), 0, True

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = self.calls * (3 if self.fresh else 1)
        self.fresh = False
        return torch.tanh(self.w(x)) * scale


class Draws(nn.Module):
    """What it computes depends on what it keeps, or draws without torch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.w, self.kind, self._mean = linear(), kind, torch.ones(WIDTH)
        self.seen: list[int] = []
        self.counts: dict[str, int] = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.w(x))
        self.seen.append(1)
        self.counts["calls"] += 1
        if self.kind == "in place":
            self._mean.add_(y.detach().mean(0))
        elif self.kind == "anew":
            self._mean = self._mean + y.detach().mean(0)
        drawn = {"python": random.random, "numpy": np.random.rand}.get(self.kind, float)()
        return y * (self._mean + len(self.seen) * self.counts["calls"] + drawn)


class Diary(nn.Module):
    """What it computes depends on lists in lists, on one that a child has too, and on parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.child, self.v = linear(), Draws("none"), nn.Parameter(torch.ones(WIDTH))
        self.calls = self.child.seen
        self.log: dict[str, Any] = {"rows": [[], []]}
        self.weights = [self.v, self.w.weight]

    def forward(self, x: Tensor) -> Tensor:
        self.log["rows"][0].append(1)
        y = self.child(self.w(x)) * self.v + sum(p.detach().sum() for p in self.weights)
        return y * (len(self.calls) + len(self.log["rows"][0]))


def shared(kind: str) -> nn.Module:
    """Parents that share a layer, which is a stage, or a part of two, or a stage and a part of another."""
    one = Layer()
    if kind == "a stage":
        return nn.Sequential(nn.Sequential(linear(), one), nn.Sequential(one, linear()))
    if kind == "a part":
        return Stack(nn.Sequential(linear(), one), nn.Sequential(one, linear()))
    return Stack(nn.Sequential(linear(), one), one, nn.Sequential(one, linear()), one)


class Rearranged(nn.Module):
    """Puts other modules around its layers when it is first called, as BigBird does for short texts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = Layer()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, Layer):
            self.inner = nn.Sequential(nn.Identity(), self.inner.w, nn.Tanh(), self.inner.v)
        return x + self.inner(x)


class Mode(nn.Module):
    """Which computes something else while it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.w(x)) * (2 if self.training else 1)


def squares(call: Call) -> Tensor:
    random.seed(4)
    np.random.seed(4)
    out: Tensor = call(rows())
    return out.square().sum()


def drawing(kind: str) -> nn.Module:
    return Stack(Draws(kind), Draws(kind))


KINDS = ("in place", "anew", "python", "numpy")
RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "recursive": (lambda: Stack(Recursive(), Recursive()), {}),
    "counting": (lambda: Stack(Counts(), Counts()), {}),
    **{f"keeping {kind}": (functools.partial(drawing, kind), {}) for kind in KINDS},
    "keeping lists in lists": (lambda: Stack(Diary(), Diary()), {}),
    "a shared stage": (lambda: shared("a stage"), {"stages": Layer}),
    "shared items": (lambda: shared("a stage"), {}),
    "a shared part": (lambda: shared("a part"), {}),
    "a shared stage and part": (lambda: shared("both"), {}),
    "one layer again and again": (lambda: Stack(*[Layer()] * 3), {}),
}


def distances() -> dict[str, float]:
    mesh, found = meshed(), {}
    for name, (make, options) in RIGHT.items():
        value, want = of_module(copy.deepcopy(seeded(make)), squares)
        for remat in (False, True):
            for way, transform in (("grad", sf.value_and_grad), ("torch", turned)):
                if (name, way) == ("keeping in place", "torch"):
                    continue  # torch.func refuses to write into what it has not made
                model = functional(seeded(make), min_stage_params=0, remat=remat, **options)
                params = sf.shard(model.tree, mesh, sf.full_shard("shard"))
                got, grads = mapped(transform(lambda p, m=model: squares(partial(m, p))), mesh)(params)
                named = model.state_dict(grads)
                away = max(abs(float(got - value)), off({k: named[k] for k in want}, want))
                found[f"{name}, {way}, remat={remat}"] = away

    model = functional(seeded(lambda: Stack(Mode(), Mode())), min_stage_params=0, remat=True)
    params = sf.shard(model.tree, mesh, sf.full_shard("shard"))
    leaves = torch.utils._pytree.tree_map(lambda x: x.requires_grad_(), params)
    loss = squares(partial(model, leaves))
    model.module.eval()
    loss.backward()
    named = model.state_dict(torch.utils._pytree.tree_map(lambda x: x.grad, leaves))
    want = of_module(seeded(lambda: Stack(Mode(), Mode())), squares)[1]
    found["another mode in backward"] = off({k: named[k] for k in want}, want)
    found["which stays"] = float(any(m.training for m in model.module.modules()))
    return {**found, **several()}


class Experts(nn.Module):
    """Of which each rank uses some, and skips the others."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.experts, self.skips = nn.ModuleList([Layer() for _ in range(4)]), skips

    def forward(self, x: Tensor) -> Tensor:
        for i, expert in enumerate(self.experts):
            if i % 2 == dist.get_rank() or i == 3:
                x = x + expert(x)
            elif self.skips:
                x = x + sf.skip(expert, x)
        return x


def several() -> dict[str, float]:
    """Layers that ranks skip; averages, and parametrised weights of two sets in one cache; roundings."""
    mesh, found = meshed(), {}
    strategy = sf.full_shard("shard")
    want = of_module(seeded(partial(Experts, False)), squares)[1]
    for remat in (False, True):
        model = functional(seeded(partial(Experts, True)), min_stage_params=0, remat=remat)
        params = sf.shard(model.tree, mesh, strategy)
        for _ in range(2):
            named = model.state_dict(mapped(sf.grad(lambda p, m=model: squares(partial(m, p))), mesh)(params))
        found[f"skipped, remat={remat}"] = off({k: named[k] for k in want}, want)

    model = functional(seeded(lambda: Stack(*[normed() for _ in range(2)])), min_stage_params=0)
    params = sf.shard(model.tree, mesh, strategy)
    average = torch.utils._pytree.tree_map(lambda x: x * 0.5, params)
    alone = seeded(lambda: Stack(*[normed() for _ in range(2)]))
    halves = {k: p.detach() / 2 for k, p in alone.named_parameters()}
    with torch.nn.utils.parametrize.cached():
        model(params, rows())
        got = model(average, rows())
        named = model.state_dict(mapped(sf.grad(lambda p: squares(partial(model, p))), mesh)(params))
    found["an average, cached"] = apart(got, torch.func.functional_call(alone, halves, (rows(),)))
    want = of_module(alone, squares)[1]
    found["its gradient, cached"] = off({k: named[k] for k in want}, want)

    for train in (True, False):
        model, alone = functional(seeded(normalized).train(train), min_stage_params=0), seeded(normalized).train(train)
        params = sf.shard(model.tree, mesh, strategy)
        want = of_module(alone, squares)[1]

        def of_call(p: Any, model: Any = model) -> Tensor:
            return squares(lambda x: model(p, x, buffers=model.buffers)[0])

        named = model.state_dict(mapped(torch.func.grad(of_call), mesh, check=False)(params))
        found[f"statistics under torch.func, train={train}"] = off({k: named[k] for k in want}, want)

    low: dict[str, Any] = {"gather_dtype": torch.bfloat16, "input_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = functional(seeded(lambda: Stack(Layer(), Layer())), min_stage_params=0, **low)
    params = sf.shard(model.tree, mesh, strategy)
    value, grads = mapped(sf.value_and_grad(lambda p: squares(partial(model, p)).float()), mesh)(params)
    rounded = seeded(lambda: Stack(Layer(), Layer())).bfloat16()
    loss = rounded(rows().bfloat16()).square().sum().float()
    loss.backward()
    each = {k: p.grad.float() for k, p in rounded.named_parameters() if p.grad is not None}
    for g in each.values():
        dist.all_reduce(g)
    named = model.state_dict(grads)
    found["bfloat16, reduced in float32"] = max(
        abs(float(value - loss.detach())), off({k: named[k] for k in each}, each)
    )
    return found


def normalized() -> nn.Module:
    return Stack(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH)))


def normed() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(linear())


def turned(f: Any) -> Any:
    """torch's own, in the order of ours."""
    return lambda *args: torch.func.grad_and_value(f)(*args)[::-1]


@pytest.mark.world(2, "processes")
def test_shared_recursive_and_counting_layers_are_what_they_are(world: World) -> None:
    for found in world.run(distances):
        assert {case: value for case, value in found.items() if not value < 1e-12} == {}


# --- buffers that others read and write ---


class Siamese(nn.Module):
    """Calls each layer twice, which count what they normalize; one norm belongs to two layers and to their parent."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(linear(), self.norm), nn.Sequential(linear(), self.norm)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x, y = layer(x), layer(y)
        found: Tensor = self.norm(x - y / 2)
        return found


class Scales(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.scale
        found: Tensor = super().forward(x) * scale
        return found


class Scaled(nn.Module):
    """A parent that uses, and may change, a buffer of its child, which uses it too."""

    def __init__(self, writes: bool, again: bool = False) -> None:
        super().__init__()
        self.layers, self.writes, self.again = nn.ModuleList([Scales(), linear()]), writes, again

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        if self.again:
            first.scale = first.scale * 1.5
        elif self.writes:
            first.scale.mul_(1.5)
        found: Tensor = self.layers[1](first(x)) * first.scale
        return found


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


def elsewhere() -> dict[str, Any]:
    mesh, found = meshed(), dict[str, Any]()

    def after(module: nn.Module, inputs: Any, turns: int = 2, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The last value, and the buffers."""
        model = functional(module, min_stage_params=0, **options)
        params, buffers = sf.shard(model.tree, mesh, sf.full_shard("shard")), model.buffers

        def loss(p: Any, b: Any) -> Any:
            out, b = model(p, *inputs, buffers=b)
            return out.square().sum(), b

        for _ in range(turns):
            (value, buffers), _ = mapped(sf.value_and_grad(loss, has_aux=True), mesh)(params, buffers)
        return value, buffers

    def away(make: Callable[[], nn.Module], inputs: Any, **options: Any) -> float:
        alone = seeded(make)
        for _ in range(2):
            want = alone(*inputs).square().sum().detach()
        value, buffers = after(seeded(make), inputs, **options)
        known = dict(alone.named_buffers(remove_duplicate=False))
        assert buffers.keys() == known.keys()
        steps = [float((buffers[k].double() - b.double()).abs().max()) for k, b in known.items()]
        return max(abs(float(value - want)), *steps)

    for remat in (False, True):
        found[f"siamese, remat={remat}"] = away(Siamese, (rows(), rows(9)), remat=remat)
        for again in (False, True):
            make = partial(Scaled, True, again)
            found[f"written, {again}, {remat}"] = away(make, (rows(),), remat=remat, mutable_buffers=".*scale")

    model = functional(seeded(partial(Scaled, False)), min_stage_params=0)
    params = sf.shard(model.tree, mesh, sf.full_shard("shard"))
    alone: Any = seeded(partial(Scaled, False))
    alone.layers[0].scale.fill_(5.0)
    given = {"layers.0.scale": alone.layers[0].scale.clone()}
    found["read, given"] = apart(mapped(lambda p: model(p, rows(), buffers=given)[0], mesh)(params), alone(rows()))
    model.module.layers[0].scale = given["layers.0.scale"]  # type: ignore[index, union-attr]
    found["read, assigned"] = apart(mapped(lambda p: model(p, rows()), mesh)(params), alone(rows()))
    writing = functional(seeded(partial(Scaled, True)), min_stage_params=0)
    cut = sf.shard(writing.tree, mesh, sf.full_shard("shard"))
    found["message"] = told(lambda: mapped(lambda p: writing(p, rows()), mesh)(cut))
    return found


@pytest.mark.world(2, "processes")
def test_buffers_are_those_of_the_call_wherever_they_are_read_and_written(world: World) -> None:
    for found in world.run(elsewhere):
        assert "the module writes into its buffer layers.0.scale" in found.pop("message")
        assert {case: value for case, value in found.items() if not value < 1e-12} == {}


def test_buffers_are_where_the_parameters_are_and_as_they_are_now() -> None:
    model = functional(Stack(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))), min_stage_params=0)
    params = torch.utils._pytree.tree_map(lambda x: x.to("meta"), model.tree)
    x = torch.ones(3, WIDTH, device="meta")
    out, buffers = model(params, x, buffers=model.buffers)
    assert {b.device.type for b in (out, *buffers.values())} == {"meta"}
    assert {b.device.type for b in model.buffers.values()} == {"cpu"}
    assert model(params, x, buffers=buffers)[1].keys() == buffers.keys()
    key, b = next(iter(model.buffers.items()))
    moved = model._copied_buffer(key, b, torch.device("meta"))
    assert model._copied_buffer(key, b, torch.device("meta")) is moved
    b.add_(1)
    assert model._copied_buffer(key, b, torch.device("meta")) is not moved


# --- what is refused while it runs ---


@dataclass
class Held:
    value: Tensor
    total: Any = 0.0


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Writes(nn.Module):
    """Keeps what it computed in what it is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.w, self.kind = linear(), kind

    def forward(self, x: Tensor, to: Any) -> Tensor:
        y = torch.tanh(self.w(x))
        if self.kind == "dict":
            to["total"] = to["total"] + y.sum()
        elif self.kind == "list":
            to.append(y.sum())
        elif self.kind == "nested":
            to[0]["all"].append(y.sum())
        elif self.kind == "dataclass":
            to.total = to.total + y.sum()
        else:
            to.value = y
        return y


GIVEN: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"total": x.sum()},
    "list": lambda x: [x.sum()],
    "nested": lambda x: ({"all": [x.sum()]},),
    "dataclass": Held,
    "object": Box,
}


class Collects(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList([Writes(kind), Writes(kind)])

    def forward(self, x: Tensor) -> Tensor:
        to = GIVEN[self.kind](x * 0)
        for layer in self.layers:
            x = layer(x, to)
        kept = torch.utils._pytree.tree_leaves(
            to.value if isinstance(to, Box) else vars(to) if isinstance(to, Held) else to
        )
        return torch.stack([x.sum(), *(k.sum() for k in kept)])


class Keeps(nn.Module):
    """Keeps what it computed in an attribute, which its parent reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.w, self.kind, self.store = linear(), kind, Box(torch.ones(()))
        self._last: Any = None
        self.box: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.w(x))
        if self.kind == "private":
            self._last = y
        elif self.kind == "dict":
            self.box["nested"] = [y]
        else:
            self.store.value = y
        return y * 2

    def kept(self) -> Tensor:
        return (
            self._last if self.kind == "private" else self.box["nested"][0] if self.kind == "dict" else self.store.value
        )


class Reads(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keeps(kind), Keeps(kind)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.stack([x.sum(), *(layer.kept().sum() for layer in self.layers)])  # type: ignore[operator]


class Before(nn.Module):
    """A hook before a part of a layer keeps what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        parts: list[Any] = [layer.v for layer in self.layers]
        hooks = [part.register_forward_pre_hook(lambda m, args: kept.append(args[0])) for part in parts]
        for layer in self.layers:
            x = layer(x)
        for hook in hooks:
            hook.remove()
        return torch.stack([x.sum(), *(k.sum() for k in kept)])


class Clamps(nn.Module):
    """Writes into its own parameter, which is loose."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.gain, self.kind = nn.ModuleList([linear()]), nn.Parameter(torch.tensor(3.0)), kind

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.kind == "in place":
                self.gain.clamp_(max=1.0)
            else:
                self.gain = nn.Parameter(self.gain.clamp(max=1.0))
        found: Tensor = self.layers[0](x) * self.gain
        return found


class Rebinds(Layer):
    """Puts another parameter into the place of one that a stage has."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.weight = nn.Parameter(self.w.weight * 2)
        return super().forward(x)


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


class Mixed(nn.Module):
    """With a buffer, which keeps its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()
        self.register_buffer("turn", torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        turn: Any = self.turn
        found: Tensor = self.w(x) @ turn
        return found


LOW: dict[str, Any] = {"gather_dtype": torch.bfloat16, "input_dtype": torch.bfloat16}
MIXED = (
    "it has parameters of torch.bfloat16, arguments of torch.bfloat16, buffers of torch.float64, with "
    "gather_dtype=torch.bfloat16, input_dtype=torch.bfloat16"
)
WRITTEN = "writes into a list, dict or dataclass among its arguments"
NUMBERS = "the numbers of the module"
KEPT = "keeps a tensor that it computed"
CHECKPOINT = "as torch.utils.checkpoint"
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, str, str]]] = {
    **{f"written {kind}": (partial(Collects, kind), {}, (WRITTEN,) * 3) for kind in GIVEN if kind != "object"},
    "written object": (partial(Collects, "object"), {}, (NUMBERS, "is given a Box", NUMBERS)),
    **{f"kept, {kind}": (partial(Reads, kind), {}, (NUMBERS, KEPT, NUMBERS)) for kind in ("private", "dict", "object")},
    "hook before": (Before, {}, (NUMBERS, "has a forward hook", NUMBERS)),
    "clamped": (partial(Clamps, "in place"), {}, ("writes into its parameter gain",) * 3),
    "replaced": (partial(Clamps, "again"), {}, ("writes into its parameter gain",) * 3),
    "replaced in a stage": (lambda: Stack(Rebinds()), {}, ("replaces its parameter",) * 3),
    "mixed": (lambda: Stack(Mixed()), LOW, (MIXED,) * 3),
    "checkpoint inside": (lambda: Stack(Checkpoints()), {}, (CHECKPOINT, "", CHECKPOINT)),
    "checkpoint around": (lambda: Stack(Checkpoints()), {"stages": Layer}, (CHECKPOINT, "", CHECKPOINT)),
}


WAYS: dict[str, Any] = {"grad": sf.grad, "torch": torch.func.grad, "backward": backward}


def messages() -> dict[tuple[str, str, bool], str]:
    mesh, found = meshed(), {}
    for name, (make, options, parts) in REFUSED.items():
        want = of_module(seeded(make), lambda call: call(rows()).sum())[1] if NUMBERS in parts else {}
        for remat in (False, True):
            for way, transform in WAYS.items():
                if "checkpoint" in name and way == "torch":
                    continue  # which refuses it by itself
                model = functional(seeded(make), min_stage_params=0 if name != "clamped" else 2, remat=remat, **options)
                params = sf.shard(model.tree, mesh, sf.full_shard("shard"))
                step = mapped(transform(lambda p, m=model: m(p, rows()).sum()), mesh)
                grads: list[Any] = []
                found[name, way, remat] = told(lambda step=step, params=params, into=grads: into.append(step(params)))
                if grads and want:
                    named = model.state_dict(grads[0])
                    distance = off({k: named[k] for k in want}, want)
                    found[name, way, remat] = NUMBERS if distance < 1e-12 else f"numbers off by {distance}"
    return found


@pytest.mark.world(2, "processes")
def test_what_a_stage_would_lose_is_right_or_refused_by_all_ways_to_a_gradient(world: World) -> None:
    for found in world.run(messages):
        wanted = {
            (name, way): part for name, (_, _, parts) in REFUSED.items() for way, part in zip(WAYS, parts, strict=True)
        }
        assert {case: said for case, said in found.items() if wanted[case[:2]] not in said} == {}


# --- what is refused before a module is touched ---


class Paired(nn.Module):
    """Keeps a parameter in one of several ways."""

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.kept = keep(self.a.weight)


def viewed(view: Callable[[Tensor], Tensor]) -> nn.Module:
    one, other = linear(), linear()
    other.weight = nn.Parameter(view(one.weight.data))
    return Stack(one, other)


def hooked(kind: str) -> nn.Module:
    one = linear()
    getattr(one.weight, kind)(lambda x: None)
    return Stack(one)


def with_buffer() -> nn.Module:
    one = linear()
    one.register_buffer("first", one.weight.data[0])
    return Stack(one)


def in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


class Marked(Tensor):
    """Which computes as its class says."""


def of_class(kind: Callable[[Tensor], Any]) -> nn.Module:
    one = linear()
    one.weight = kind(one.weight.data)
    return Stack(one)


class Own(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        return found * 2 if func is F.linear else found


SHARES = "that share memory"
ELSEWHERE = "keeps a parameter in its attribute 'kept'"
UNTOUCHED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "transposed": (lambda: viewed(lambda w: w.t()), SHARES),
    "the same memory": (lambda: viewed(lambda w: w), SHARES),
    "a row": (lambda: viewed(lambda w: w[1].expand(WIDTH, WIDTH)), SHARES),
    "a buffer": (with_buffer, SHARES),
    "an attribute": (lambda: Paired(lambda w: w.data.t()), SHARES),
    "inside a list": (lambda: Paired(lambda w: [{"view": w.detach()}]), SHARES),
    "a list of pairs": (lambda: Paired(lambda w: [(w, 1)]), ELSEWHERE),
    "a dict of lists": (lambda: Paired(lambda w: {"all": [w]}), ELSEWHERE),
    "a closure": (lambda: Paired(lambda w: lambda x: F.linear(x, w)), ELSEWHERE),
    "a partial": (lambda: Paired(lambda w: partial(F.linear, weight=w)), ELSEWHERE),
    "a dataclass": (lambda: Paired(lambda w: Held(w)), ELSEWHERE),
    "a class of tensors": (lambda: of_class(lambda w: nn.Parameter(w.as_subclass(Marked))), "is of class Marked"),
    "a class of parameters": (lambda: of_class(Own), "is of class Own"),
    "a hook": (lambda: hooked("register_hook"), "has a hook on its gradient"),
    "a later hook": (lambda: hooked("register_post_accumulate_grad_hook"), "has a hook on its gradient"),
    "sparse": (lambda: Stack(nn.Embedding(5, WIDTH, sparse=True)), "its gradient is sparse"),
    "compiled": (lambda: Stack(torch.compile(linear())), "is compiled by torch.compile"),  # type: ignore[arg-type]
    "compiled in place": (lambda: in_place(Stack(linear())), "is compiled by torch.compile"),
    "scripted": (lambda: torch.jit.script(linear()), "is TorchScript"),
    "max_norm": (lambda: nn.Embedding(5, WIDTH, max_norm=1.0), "its forward writes into its weight"),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_modules_of_which_training_would_leave_something_behind_are_left_as_they_are(case: str) -> None:
    make, message = UNTOUCHED[case]
    module = make()
    before = dict(module.named_parameters())
    with pytest.raises((ValueError, TypeError), match=message):
        functional(module)
    assert all(p is before[k] for k, p in module.named_parameters())


def test_memory_side_by_side_is_not_shared() -> None:
    both = torch.randn(WIDTH, 2 * WIDTH)
    layers = linear(), linear()
    for layer, part in zip(layers, both.chunk(2, dim=1), strict=True):
        layer.weight = nn.Parameter(part)
    assert functional(Stack(*layers), min_stage_params=0).stages == ("layers.0", "layers.1")


class Said(nn.Module):
    """Reads what somebody said of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()
        self.w.weight.width = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.w(x) * getattr(self.w.weight, "width", 1.0)
        return found


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    "options", [{"min_stage_params": 0}, {"stages": nn.Linear, "min_stage_params": 0}, {"min_stage_params": 2**62}]
)
def test_attributes_of_parameters_are_read_in_forward(options: dict[str, Any], remat: bool) -> None:
    x, alone = torch.ones(2, WIDTH), seeded(Said).float()
    whole = dict(alone.named_parameters())
    want = torch.autograd.grad(alone(x).square().sum(), list(whole.values()))
    model = functional(Stack(seeded(Said).float()), remat=remat, **options)
    named = model.state_dict(sf.grad(lambda p: model(p, x).square().sum())(model.tree))
    assert off({f"layers.0.{k}": g for k, g in zip(whole, want, strict=True)}, named) == 0


# --- the shell afterwards ---


def test_a_shell_that_got_other_parameters_or_modules_says_so() -> None:
    x = torch.ones(2, WIDTH)
    for change in (
        lambda m: setattr(m.layers[0], "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
        lambda m: m.layers[0].register_parameter("more", nn.Parameter(torch.ones(1))),
        lambda m: m.layers.append(linear()),
        lambda m: setattr(m.layers, "1", linear()),
    ):
        model = functional(Stack(linear(), linear()), min_stage_params=0)
        model(model.tree, x)
        change(model.module)
        with pytest.raises(RuntimeError, match="got other parameters or modules after functional"):
            model(model.tree, x)


def test_a_shell_that_lost_a_layer_says_so() -> None:
    for change in (
        lambda m: m.layers.pop(1),
        lambda m: setattr(m, "layers", m.layers[:1]),
        lambda m: setattr(m.layers, "1", nn.Identity()),
    ):
        model = functional(Stack(linear(), linear()), min_stage_params=0)
        model(model.tree, torch.ones(2, WIDTH))
        change(model.module)
        with pytest.raises(RuntimeError, match=r"layers.1.weight was deleted from the module after functional"):
            model(model.tree, torch.ones(2, WIDTH))


def test_a_module_may_put_others_around_its_layers() -> None:
    x, alone = torch.ones(2, WIDTH, dtype=torch.float64), seeded(lambda: Stack(Rearranged(), Rearranged()))
    model = functional(seeded(lambda: Stack(Rearranged(), Rearranged())), min_stage_params=0, remat=True)
    for _ in range(2):
        alone.zero_grad()
        alone(x).square().sum().backward()
        named = model.state_dict(sf.grad(lambda p: model(p, x).square().sum())(model.tree))
        for name, p in alone.named_parameters():
            own = named[name.replace("inner.1", "inner.w").replace("inner.3", "inner.v")]
            assert p.grad is not None
            assert own.equal(p.grad)


def test_two_threads_in_one_shell_are_refused() -> None:
    inside, go = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = linear()

        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            go.wait(10)
            found: Tensor = self.w(x)
            return found

    model = functional(Stack(Waits()), min_stage_params=0)
    other = threading.Thread(target=lambda: model(model.tree, torch.ones(1, WIDTH)))
    other.start()
    try:
        assert inside.wait(10)
        with pytest.raises(RuntimeError, match="by two threads at once"):
            model(model.tree, torch.ones(1, WIDTH))
    finally:
        go.set()
        other.join()
    model(model.tree, torch.ones(1, WIDTH))


class Irreducible(tuple[Any, ...]):
    """A tuple that says how long it is by another name, as representations of groups do."""

    def __len__(self) -> int:
        raise NotImplementedError


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.kinds = {"layerdrop": 0.0, "depth": 2}, Irreducible([1, torch.ones(2)])
        self.scale, self.inner = nn.Parameter(torch.ones(1, WIDTH)), linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) * self.scale
        return found


class Named(nn.Module):
    """Its own parameter, and one of a module inside with the same last name and another shape, belong to no stage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.tower = nn.Parameter(torch.full((2, 3), 0.5)), Tower()

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x) * self.scale.sum()


def of_named(small: int) -> list[float]:
    mesh, module = meshed(), seeded(Named)
    value, want = of_module(module, lambda call: call(rows()).square().sum())
    model = functional(module, min_stage_params=small)
    params = model.shard(mesh, sf.full_shard("shard"))
    found, grads = mapped(sf.value_and_grad(lambda p: model(p, rows()).square().sum()), mesh, check=False)(params)
    wrong = sf.shard({**model.tree, "": {**model.tree[""], "scale": torch.ones(3, 3)}}, mesh, sf.full_shard("shard"))
    with pytest.raises(ValueError, match=r"scale is \[3, 3\] there, and \[2, 3\] in the module"):
        model(wrong, rows())
    return [float((found - value).abs()), off(model.state_dict(grads), want)]


@pytest.mark.world(2, "processes")
def test_names_and_attributes_that_look_like_others_are_told_apart(world: World) -> None:
    assert all(x < 1e-12 for small in (0, 2**62) for found in world.run(of_named, small) for x in found)
