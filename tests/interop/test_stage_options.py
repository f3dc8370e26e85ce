"""Options by layer: what each stage of a module gets, and that gradients stay those of the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn import P
from shardfn.interop import Functional, functional
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import data_mesh, off
from tests.interop.test_functional import Reference, loss_of, rows
from tests.models import DATA, STRATEGIES
from tests.reference import worst

LAYERS = r"model\.layers\.\d+"
EVEN = r"model\.layers\.\d*[02468]"


def options_of(model: Functional) -> dict[str, Any]:
    return {path: dict(unit.options) for path, unit in model._units.items()}


def llama(stages: Any = None, **options: Any) -> Functional:
    return functional(zoo.build("llama_tied"), stages, min_stage_params=512, **options)


def test_the_first_item_that_matches_counts() -> None:
    model = llama({EVEN: {"remat": True}, "LlamaDecoderLayer": {"reshard": False}}, prefetch=2)
    found = options_of(model)
    assert found["model.layers.0"] == {"prefetch": 2, "remat": True}
    assert found["model.layers.1"] == {"prefetch": 2, "reshard": False}
    assert all(other == {"prefetch": 2} for path, other in found.items() if "layers" not in path)


def test_stages_are_those_of_the_default_where_nothing_matches() -> None:
    assert llama({r"model\.layers\.0": {"remat": True}}).stages == llama().stages


def test_what_matches_inside_a_layer_is_a_stage_in_its_place() -> None:
    model = llama({r"model\.layers\.0\.mlp": {"remat": True}})
    assert "model.layers.0.mlp" in model.stages
    assert "model.layers.0" not in model.stages
    assert "model.layers.1" in model.stages


class Listing(nn.Linear):
    """Takes a list, to which it might append."""

    def forward(self, xs: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(xs[0])


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Listing(4, 4)])


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, 1),
        ({"min_num_params": 20}, 1),
        ({"stages": {"Listing"}}, 2),
        ({"stages": {"layers.0": {}}}, 1),
        ({"stages": {"Listing": {}}}, 2),
    ],
)
def test_a_module_that_takes_a_list_is_a_stage_if_it_is_asked_for(options: Any, found: int) -> None:
    assert len(functional(Taking(), min_stage_params=1, **options).stages) == found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_module_of_two_names_is_found_by_each() -> None:
    net = Net()
    net.first = net.layers[0]
    found = options_of(functional(net, {r"layers\.\d": {"remat": True}}, min_stage_params=1))
    assert len(found) == 3
    assert all(options == {"remat": True} for options in found.values())


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": ({"layers\\.9": {}}, ValueError, "nothing is or matches"),
    "after another": ({"Linear": {}, "layers\\.1": {}}, ValueError, "no stage gets the options of 'layers"),
    "no options": ({"Linear": True}, TypeError, "the options of 'Linear' must be a dict, got True"),
    "unknown": ({"Linear": {"rematerialize": True}}, TypeError, "unknown option rematerialize"),
    "wrong": ({"Linear": {"remat": 3}}, TypeError, "remat must be"),
    "a list for layers": ({"Linear": {"remat": [True, False]}}, TypeError, "remat must be one value"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_items_are_errors_before_the_module_is_taken_apart(name: str) -> None:
    stages, kind, message = BAD[name]
    net = Net()
    with pytest.raises(kind, match=message):
        functional(net, stages, min_stage_params=1)
    assert torch.isfinite(net(torch.ones(4))).all()
    functional(net, {"Linear": {"remat": True}}, min_stage_params=1)


MIXED: dict[str, Any] = {
    "recomputed and kept": {EVEN: {"remat": True}, LAYERS: {"reshard": False}},
    "policies": {EVEN: {"remat": [torch.ops.aten.mm.default]}, LAYERS: {"remat": True, "prefetch": 0}},
    "inside": {r"model\.layers\.0\.(mlp|self_attn)": {"remat": True}, r"model\.layers\.[12]": {"reshard": "step"}},
    "head alone": {"Linear": {"remat": True}},
}


def gradients(name: str, strategy: str, mixed: str) -> float:
    reference, stages = Reference(name), MIXED[mixed]
    model = functional(zoo.build(name), stages, min_stage_params=512, **zoo.ZOO[name].options)
    mesh = data_mesh(torch.distributed.get_world_size())
    params = sf.shard(model.tree, mesh, STRATEGIES[strategy], frozen=model.frozen)
    step = sf.shard_map(
        sf.value_and_grad(loss_of(name, model)), mesh=mesh, in_specs=(..., P(DATA)), out_specs=(P(), ...)
    )
    for _ in range(2):
        _, grads = step(params, rows(reference.batch))
    want, got = reference.gradient(), model.state_dict(grads)
    return off({k: got[k] for k in want}, want)


@pytest.mark.central
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hfsdp"])
@pytest.mark.world(4, "processes")
def test_gradients_are_those_of_the_module(world: World, strategy: str) -> None:
    for mixed in MIXED:
        assert worst(world.run(gradients, "llama_tied", strategy, mixed)) < 1e-12, mixed


def dtypes(n: int) -> dict[str, set[torch.dtype]]:
    """The dtypes in which each layer computes."""
    torch.manual_seed(0)
    net, seen, half = Net(), dict[str, set[torch.dtype]](), torch.bfloat16
    casts = {"gather_dtype": half, "input_dtype": half, "output_dtype": torch.float32}
    model = functional(net, {r"layers\.1": casts}, min_stage_params=1)
    mesh = data_mesh(n)
    params = sf.shard(model.tree, mesh, STRATEGIES["full_shard"])
    for path, layer in net.named_modules():
        if isinstance(layer, nn.Linear):
            seen[path] = {layer.weight.dtype}  # what the placeholder says
            layer.register_forward_hook(lambda m, args, out, path=path: seen[path].add(m.weight.dtype))
    model(params, torch.ones(2, 4))
    return seen


@pytest.mark.world(2)
def test_casts_are_those_of_the_layer(world: World) -> None:
    for seen in world.run(dtypes, 2):
        assert seen == {
            "layers.0": {torch.float32},
            "layers.1": {torch.bfloat16},
            "layers.2": {torch.float32},
        }
