"""With `input_dtype` and `output_dtype`, modules that are no stages of their own cast as stages do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn.interop import functional

LOW = torch.bfloat16
CASTS: dict[str, Any] = {"gather_dtype": LOW, "input_dtype": LOW}


class Scaled(nn.Module):
    """Holds a parameter itself, takes its arguments by name, and hands a list on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, mask: Tensor, seen: list[Any]) -> dict[str, Tensor]:
        seen.append(x.dtype)
        return {"out": self.inner(x @ self.scale.diag()).masked_fill(mask, 0)}


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.seen = Scaled(), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, mask=x > 1, seen=self.seen)["out"]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4)),
    "one layer": lambda: nn.Linear(4, 4),
    "a parameter of its own": Around,
    "attention": Attends,
    "a recurrence": lambda: nn.Sequential(nn.Flatten(0, 0), nn.GRU(4, 4)),
}


def derived(model: Callable[[Any], Any], params: Any) -> tuple[Tensor, Any]:
    """The result, and the gradient of its square."""

    def loss(params: Any) -> tuple[Tensor, Tensor]:
        out = model(params)
        out = out[0] if isinstance(out, tuple) else out
        return out.float().square().sum(), out.detach()

    (_, out), gradient = sf.value_and_grad(loss, has_aux=True)(params)
    return out, gradient


@pytest.mark.parametrize("name", MODULES)
def test_loose_parameters_meet_inputs_in_their_dtype(name: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(2, 3, 4)
    low = {key: p.detach().to(LOW) for key, p in module.named_parameters()}
    want, gradients = derived(lambda p: torch.func.functional_call(module, p, (x.to(LOW),)), low)

    model = functional(module, stages=lambda path, m: False, **CASTS)
    assert not model.stages
    params = model.shard(sf.make_mesh(shard=1, device="cpu"), sf.full_shard("shard"))
    got, found = derived(lambda p: model(p, x), params)
    assert got.dtype == LOW
    assert torch.equal(got, want)
    found = model.state_dict(found)
    for key, gradient in gradients.items():
        assert torch.equal(found[key], gradient.float()), key


def test_a_list_that_is_given_to_a_loose_module_is_the_list_itself() -> None:
    model = functional(Around(), **CASTS)
    params = model.shard(sf.make_mesh(shard=1, device="cpu"), sf.full_shard("shard"))
    model(params, torch.randn(2, 4).to(LOW))
    assert model.module.seen == [LOW]


@pytest.mark.parametrize("small", [0, 2**14])
def test_every_module_returns_the_output_dtype_whether_it_is_a_stage_or_loose(small: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    kinds = list[torch.dtype]()
    layers[2].register_forward_pre_hook(lambda m, args: kinds.append(args[0].dtype))
    model = functional(layers, stages="0", min_stage_params=small, output_dtype=torch.float32, **CASTS)
    params = model.shard(sf.make_mesh(shard=1, device="cpu"), sf.full_shard("shard"))
    assert model(params, torch.randn(2, 4)).dtype == torch.float32
    assert kinds == [torch.float32]
