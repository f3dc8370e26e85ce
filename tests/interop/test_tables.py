"""Whatever a table of tensor parallelism says, the module computes and differentiates as it does whole, or refuses."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import shardfn as sf
from shardfn.interop import functional, output_capturing
from shardfn.testing import World
from tests.interop.modules import mapped, meshed, off
from tests.reference import worst

WIDTH, HEAD, ROWS = 8, 4, 10


class Product(torch.autograd.Function):
    """Of a code of one's own, into which nothing sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).flatten(0, -2).sum(0).sum_to_size(w.shape)


class Scale(nn.Module):
    def __init__(self, n: int, own: bool) -> None:
        super().__init__()
        self.weight, self.own = nn.Parameter(torch.rand(n) + 0.5), own

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Product.apply(x, self.weight) if self.own else x * self.weight
        return found


class Attention(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.head_dim, self.norm = HEAD, Scale(HEAD, own)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = torch.softmax(self.norm(q) @ self.norm(k).mT, -1) @ v
        found: Tensor = self.o(y.transpose(1, 2).flatten(-2))
        return found


class Gated(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.scale = Scale(1, own)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.scale(torch.tanh(self.gate(x)) * self.up(x)))
        return found


class Block(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.attention, self.mlp = Scale(WIDTH, own), Attention(own), Gated(own)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        found: Tensor = x + self.mlp(x)
        return found


class Net(nn.Module):
    def __init__(self, own: bool, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.layers = nn.ModuleList([Block(own)])
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


NORM = "replicated_with_grad_allreduce"
RIGHT = {
    **{f"attention.{name}": "colwise" for name in "qkv"}, "attention.o": "rowwise", "attention.norm": NORM,
    "mlp.up": "colwise", "mlp.gate": "colwise", "mlp.scale": NORM, "mlp.down": "rowwise",
}  # fmt: skip
LAYERS = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "packed_colwise", "replicate")
WORDS = {
    **{name: LAYERS for name in RIGHT if RIGHT[name] != NORM}, "head": LAYERS[2:4], "embed": ("embedding_rowwise",),
    "attention.norm": (NORM, "replicate"), "mlp.scale": (NORM, "replicate"), "first": (NORM,),
}  # fmt: skip
Table = dict[str, str]
Drawn = tuple[Table, bool, bool, dict[str, Any]]


def drawn(seed: int) -> Drawn:
    """A table that is right but for a few entries; how the module is built, and cut into stages."""
    draw = random.Random(seed)
    table = dict(RIGHT)
    for name in draw.sample(list(WORDS), draw.choice((0, 1, 1, 2))):
        if draw.random() < 0.4:
            table.pop(name, None)
        else:
            table[name] = draw.choice(WORDS[name])
    stages = draw.choice(("Block", ["Attention", "Gated"]))
    return table, draw.random() < 0.5, draw.random() < 0.3, {"stages": stages, "remat": draw.random() < 0.3}


def without(name: str) -> Drawn:
    return {k: word for k, word in RIGHT.items() if k != name}, True, False, {"stages": "Block"}


REFUSED: dict[str, Drawn] = {
    "the gradient of attention.norm.weight differs": without("attention.norm"),
    "the gradient of mlp.scale.weight differs": without("mlp.scale"),
    "the gradient of first.weight differs": ({**RIGHT, "first": NORM}, True, False, {"stages": "Block"}),
}


def tried(case: Drawn) -> float | str:
    """How far value and gradient are from those of one process, or what was said."""
    table, own, tied, options = case
    torch.manual_seed(0)
    module = Net(own, tied).double()
    tokens = torch.arange(12).view(3, 4) % ROWS
    whole = {k: p.detach().clone().requires_grad_() for k, p in module.named_parameters()}
    value = functional_call(module, whole, (tokens,), tie_weights=True).square().sum()
    want = dict(zip(whole, torch.autograd.grad(value, list(whole.values())), strict=True))
    try:
        model = functional(module, min_stage_params=10, tensor=table, **options)
        params = sf.shard(model.tree, meshed(2), sf.full_shard("shard"), specs=model.specs)
        step = mapped(sf.value_and_grad(lambda p: model(p, tokens).square().sum()), meshed(2))
        for _ in range(2):
            got, grads = step(params)
    except (ValueError, RuntimeError) as error:
        return str(error)
    named = model.state_dict(grads)
    return max(abs(float(got / value.detach()) - 1), off({k: named[k] for k in want}, want))


def results(cases: list[Drawn]) -> list[float | str]:
    return [tried(case) for case in cases]


@pytest.mark.world(2, "processes")
def test_any_table_is_right_or_refused_on_all_ranks(world: World) -> None:
    cases = [drawn(seed) for seed in range(20)]
    ranks = world.run(results, [*cases, *REFUSED.values()])
    for found in ranks:
        away = [one for one in found if isinstance(one, float)]
        assert len(away) > 4
        assert worst(away) < 1e-12
        for part, said in zip(REFUSED, found[len(cases) :], strict=True):
            assert part in str(said)
    assert [isinstance(one, str) for one in ranks[0]] == [isinstance(one, str) for one in ranks[1]]


def test_nothing_is_recorded_where_transformers_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, output_capturing.HOOKS, raising=False)
    with output_capturing.recording(("attentions",)) as found:
        assert output_capturing.requested_names() == ()
    assert found == {"attentions": []}
