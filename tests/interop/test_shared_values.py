"""Layers that hand out their parameters, or use values other than their arguments: as they are, or with `unstaged=`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
from shardfn import lora
from shardfn.interop import functional
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import linear, mapped, meshed, off, seeded
from tests.reference import worst
from tests.refusals import told

WIDTH = 4


class Positions(nn.Module):
    """A table of which rows are returned, as by Perceiver."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[:, : x.shape[1]]


class Queries(nn.Module):
    """Tokens that are returned for each row, with the parameter itself beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return {"each": self.tokens.expand(len(x), -1, -1), "all": [self.tokens]}


class Rows(nn.Embedding):
    """The first rows of an embedding's weight."""

    def __init__(self) -> None:
        super().__init__(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[: x.shape[1]]


class Adds(nn.Module):
    def __init__(self, table: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.table, self.layers = table(), nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor) -> Tensor:
        made = self.table(x)
        x = x + (made if isinstance(made, Tensor) else made["each"].mean(1, keepdim=True) * made["all"][0][0])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = linear()
        self.scale: list[Tensor] = []

    def project(self, x: Tensor) -> Tensor:
        return torch.tanh(self.w(x))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.w(x) * (self.scale.pop() if self.scale else 1.0)
        return found


class OtherMethod(nn.Module):
    """Calls a method of a layer other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layers = Inner(), nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner.project(self.layers[0](x)) + self.inner(self.layers[1](x))
        return found


class Closure(OtherMethod):
    """Leaves a computed value where a layer finds it."""

    def forward(self, x: Tensor) -> Tensor:
        self.inner.scale.append(self.layers[0](x))
        found: Tensor = self.layers[1](self.inner(x))
        return found


class Reads(nn.Module):
    """Reads the parameters of its layers, with and without a gradient, and as an argument of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear()])
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        first, second = layers
        with torch.no_grad():
            size = first.weight.norm() + second.weight.data.norm()
        x = F.linear(second(x), first.weight, first.bias / size) * first.weight.detach().sum()
        found: Tensor = self.bilinear(x, second.bias.expand_as(x)) + torch.cat((first.weight, second.weight)).sum()
        return found


class Writes(Reads):
    """Writes into a parameter of a layer, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.layers[0].weight
        with torch.no_grad():
            if self.way == "data":
                weight.data.clamp_(max=0.1)
            elif self.way == "detached":
                weight.detach().mul_(2.0)
            elif self.way == "assigned":
                weight.data = weight * 2.0
            elif self.way == "initialized":
                nn.init.zeros_(weight)
        if self.way == "hook":
            weight.register_hook(lambda g: g * 2.0)
        return super().forward(x)


class Centered(nn.Module):
    """Subtracts the mean over the rows of all ranks: a collective inside of a layer."""

    def __init__(self, ranks: bool) -> None:
        super().__init__()
        self.w, self.ranks = linear(), ranks

    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x)
        total = sf.pvary(sf.psum(y.sum(0), "shard"), "shard") if self.ranks else y.sum(0)
        found: Tensor = y - total / 4
        return found


class Centers(nn.Module):
    def __init__(self, ranks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Centered(ranks), Centered(ranks)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Relative(nn.Module):
    """DeBERTa, whose encoder reads the weight of an embedding and passes it to layers."""

    def __init__(self) -> None:
        super().__init__()
        more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.model = zoo.made("DebertaV2", "Model", **{**zoo._TEXT, **more, **dropouts, "position_biased_input": False})

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x[..., 0].abs().mul(10).long().clamp(max=zoo.VOCABULARY - 1)).last_hidden_state
        return found


INNER = {"unstaged": [r"inner\..*"]}
RELATIVE = {"unstaged": [r"model\.encoder\.rel_embeddings.*"]}
Make = Callable[[], nn.Module]
CASES: dict[str, tuple[Make, Make, dict[str, Any]]] = {
    name: (make, make, options)
    for name, make, options in (
        ("a view", lambda: Adds(Positions), {}),
        ("a view, computed again", lambda: Adds(Positions), {"remat": True}),
        ("expanded, and itself", lambda: Adds(Queries), {}),
        ("rows of a weight", lambda: Adds(Rows), {}),
        ("another method", OtherMethod, {}),
        ("another method, loose", OtherMethod, INNER),
        ("read", Reads, {}),
        ("read, computed again", Reads, {"remat": True}),
        ("a closure", Closure, {}),
        ("a closure, loose", Closure, INNER),
        ("relative embeddings", Relative, {}),
        ("relative embeddings, loose", Relative, RELATIVE),
    )
} | {
    "a collective": (lambda: Centers(True), Centers, {}),
    "a collective, computed again": (lambda: Centers(True), Centers, {"remat": True}),
}  # fmt: skip


def right() -> dict[str, float]:
    mesh, found = meshed(), {}
    x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    for name, (make, reference, options) in CASES.items():
        module, model = seeded(reference), functional(seeded(make), min_stage_params=1, **options)
        params = model.shard(mesh, sf.full_shard("shard"))

        def loss(p: Any, model: Any = model) -> Tensor:
            return sf.psum(model(p, mine).square().sum(), "shard")

        value, grads = mapped(sf.value_and_grad(loss), mesh)(params)
        want = module(x).square().sum()
        want.backward()
        wanted = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
        got = model.state_dict(grads)
        found[name] = max(abs(float(value / want.detach()) - 1), off({k: got[k] for k in wanted}, wanted))
    return found


@pytest.mark.parametrize("world", [(1, "processes"), (2, "processes")], indirect=True)
def test_layers_that_share_their_values_are_right_as_they_are_or_loose(world: World) -> None:
    for found in world.with_deadline(100).run(right):
        assert {case: value for case, value in found.items() if not value < 1e-12} == {}


class Returns(nn.Module):
    """Returns parameters of its layers beside its result, the first one tied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        for layer in self.layers:
            x = layer(x)
        return x, {"tied": self.layers[2].weight, "others": [self.layers[1].bias, None, "text"]}


def penalized(result: Any) -> Tensor:
    y, returned = result
    bias, *others = returned["others"]
    assert others == [None, "text"]
    return y.square().sum() + 3 * returned["tied"].square().sum() + bias.exp().sum()


def returning(remat: bool) -> float:
    mesh = meshed()
    module, model = seeded(Returns), functional(seeded(Returns), min_stage_params=1, remat=remat)
    params = model.shard(mesh, sf.full_shard("shard"))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = mapped(sf.grad(lambda p: sf.pmean(penalized(model(p, x)), "shard")), mesh)(params)
    penalized(module(x)).backward()
    wanted = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    got = model.state_dict(grads)
    return off({name: got[name] for name in wanted}, wanted)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.world(2, "processes")
def test_a_module_may_return_parameters_of_its_layers(world: World, remat: bool) -> None:
    assert worst(world.run(returning, remat)) < 1e-12


WAYS = ("data", "detached", "assigned", "initialized", "hook")


def refusals() -> dict[str, str]:
    mesh, found = meshed(), {}
    x = torch.ones(2, 5, WIDTH, dtype=torch.float64)
    makes: dict[str, Make] = {way: partial(Writes, way) for way in WAYS}
    for name, make in makes.items():
        model = functional(seeded(make), min_stage_params=1)
        params = model.shard(mesh, sf.full_shard("shard"))
        step = mapped(sf.grad(lambda p, model=model: model(p, x).sum()), mesh)
        found[name] = told(partial(step, params))
    model = functional(seeded(Reads), min_stage_params=1)
    params = model.shard(mesh, sf.full_shard("shard"))
    adapters = lora.init(model, ["layers.0"], rank=2)
    found["adapters"] = told(lambda: mapped(lambda p: model(p, x, adapters=adapters), mesh)(params))
    return found


@pytest.mark.world(2, "processes")
def test_what_would_be_lost_of_values_of_other_layers_is_an_error(world: World) -> None:
    for found in world.run(refusals):
        for way in ("data", "detached", "initialized"):
            assert "the module writes into its parameter weight, which would be lost" in found.pop(way), way
        for way in ("assigned", "hook"):
            assert "layers.0.weight is read outside of stage 'layers.0'" in found.pop(way), way
        assert "layers.0.weight is read outside of stage" in found.pop("adapters")
        assert not found


class LastLevels(nn.Module):
    """Appends to the list that it is given, as the last blocks of a feature pyramid do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, results: list[Tensor], scale: float) -> list[Tensor]:
        results.append(self.first(results[-1]) * scale)
        results.append(self.second(torch.tanh(results[-1])))
        return results


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList([linear(), linear()]), LastLevels()

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for layer in self.layers:
            results.append(torch.tanh(layer(results[-1])))
        self.last(results, 2.0)
        return torch.stack(results)


def test_modules_that_take_lists_are_no_stages_unless_they_are_chosen() -> None:
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    model, alone = functional(seeded(Pyramid), min_stage_params=1), seeded(Pyramid)
    assert model.stages == ("layers.0", "layers.1", "last.first", "last.second")
    assert model(model.tree, x).equal(alone(x))
    chosen = functional(seeded(Pyramid), stages=LastLevels, min_stage_params=1)
    assert "writes into a list" in told(lambda: chosen(chosen.tree, x))
