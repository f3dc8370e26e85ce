"""Behaviors that FSDP2's tests check: modules trained on shards, beside the same module on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop
from shardfn.testing import world
from tests.models import DATA, STRATEGIES, distance, drawn

ROWS, WIDTH = 16, 6


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in float64, with numbers that do not come from torch's own generator, which threads share."""
    draw = drawn(seed, 0.5)
    for p in module.parameters():
        p.data = draw(*p.shape).to(torch.float32 if p.dtype == torch.bfloat16 else torch.float64)
    return module


def rows(seed: int = 9) -> Tensor:
    return drawn(seed)(ROWS, WIDTH)


# --- modules ---


class Residual(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Scaled(nn.Module):
    """A 0-d parameter and one that is read by the outermost module alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x + self.shift


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, 5), nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embed(x))) * self.head(x)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Residual(), Residual()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)

    def encode(self, x: Tensor, *, times: int) -> dict[str, Tensor]:
        return {"code": times * self.used.up(x)}


class Again(nn.Module):
    """A layer that is called three times, in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1, 1, 0, 0):
            x = torch.tanh(self.layers[i](x))
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)[:, None] * torch.linspace(0.5, 1, 3).double()[:, None]
        return x + self.attention(h, h, h, need_weights=False)[0].sum(1)


def residuals() -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(3)))


def uneven() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 3))


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(Residual(), nn.Sequential(Residual(), nn.Tanh())), Residual(), nn.Identity())


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(48, 2)
    )


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def frozen() -> nn.Module:
    module = residuals()
    module[0].requires_grad_(False)
    module[1].up.bias.requires_grad_(False)  # type: ignore[union-attr]
    return module


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x, self.cell(x.flip(1)))

    return Last()


# --- steps on shards, and on one process ---


def mean_square(out: Tensor, axes: Any) -> Tensor:
    error = (out - out.detach().cos()).square()
    return sf.psum(error.sum(), axes) / sf.psum(error.numel(), axes) if axes else error.mean()


def setting() -> tuple[Any, Callable[[Tensor], Tensor]]:
    """A mesh of four ranks, and what takes this rank's rows."""
    mesh = sf.make_mesh(device="cpu", replica=2, shard=2)
    return mesh, lambda x: x.chunk(4)[mesh.get_rank()]


def mapped(f: Any, mesh: Any, batches: int = 1, out: Any = (P(), ...)) -> Any:
    return sf.shard_map(f, mesh=mesh, in_specs=(..., *[P(DATA)] * batches), out_specs=out)


Optimizers = tuple[so.Optimizer, Callable[[Any], torch.optim.Optimizer]]
ADAMW: Optimizers = (so.adamw(0.05), lambda ps: torch.optim.AdamW(ps, lr=0.05))


def trained(
    build: Callable[[], nn.Module] = residuals,
    strategy: sf.Strategy = STRATEGIES["hybrid_shard"],
    optimizers: Optimizers = ADAMW,
    limit: tuple[float, float] | None = None,
    decays_unused: bool = False,
    **options: Any,
) -> None:
    """Three steps; `limit` is a norm and its order, by which gradients are clipped."""
    module, (mesh, mine) = filled(build()), setting()
    plain = copy.deepcopy(module)
    ours, theirs = optimizers[0], optimizers[1]([p for p in plain.parameters() if p.requires_grad])
    ours = ours if limit is None else so.chain(so.clip_by_global_norm(limit[0], order=limit[1]), ours)
    model = interop.functional(module, **{"small": 8} | options)
    params = model.shard(mesh, strategy)
    state = ours.init(params)
    buffers: Any = {name: b.clone() for name, b in model.buffers.items()}

    def loss(ps: Any, x: Tensor) -> Any:
        return mean_square(model(ps, x, buffers=buffers)[0], DATA)

    for number in range(3):
        x = rows(number)
        value, gradient = mapped(sf.value_and_grad(loss), mesh)(params, mine(x))
        params, state = ours.step(params, gradient, state)
        theirs.zero_grad()
        wanted = mean_square(plain(x), ())
        wanted.backward()
        for p in plain.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        if limit is not None:
            grads = [p.grad for p in plain.parameters() if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(
                [p for p in plain.parameters() if p.grad is not None], limit[0],
                torch.nn.utils.get_total_norm(grads, limit[1]),
            )  # fmt: skip
        theirs.step()
        assert abs(value - wanted.detach()) < 1e-12
    slack = 1e-12 if limit is None else 1e-5  # torch adds 1e-6 to the norm
    assert distance(model.state_dict(params), dict(plain.named_parameters(remove_duplicate=False))) < slack


def decayed_by_shape(ps: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in ps if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in ps if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.05)


MOMENTUM: Optimizers = (so.sgd(0.1, momentum=0.9), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
GROUPS: Optimizers = (so.adamw(0.05, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1)), decayed_by_shape)
ADAM: Optimizers = (so.adam(0.05), lambda ps: torch.optim.Adam(ps, lr=0.05))
TRAINED: dict[str, dict[str, Any]] = {
    "HSDP": {},
    "modules inside modules": {"build": nested},
    "an uneven first dimension": {"build": uneven},
    "a scalar parameter": {"build": Scaled},
    "shared parameters": {"build": Tied},
    "unused parameters": {"build": Unused},
    "frozen parameters": {"build": frozen},
    "a layer that is called again": {"build": Again},
    "attention and layer norm": {"build": Attention},
    "convolutions and group norm": {"build": images},
    "a recurrent cell": {"build": recurrent},
    "a batch norm of all rows": {"build": normed, "sync_batch_norm": DATA},
    "no reshard after forward": {"reshard": False},
    "reshard after forward": {"reshard": True},
    "no prefetch": {"prefetch": 0},
    "a long prefetch": {"prefetch": 3},
    "activation checkpoints": {"remat": True},
    "activation checkpoints of called again": {"build": Again, "remat": True},
    "activations on the host": {"remat": "offload"},
    "units by class": {"stages": {"Residual"}, "build": nested},
    "units by pattern": {"stages": r"0|1"},
    "units of a size": {"min_num_params": 70},
    "one unit": {"stages": lambda path, m: False, "small": 2**62},
    "every layer a unit": {"stages": {nn.Linear}},
    "parameters that other modules read": {"build": Tied, "loose": [r"embed\.weight"]},
    "Adam": {"optimizers": ADAM},
    "momentum": {"optimizers": MOMENTUM},
    "groups of an optimizer": {"optimizers": GROUPS},
    "clipped by the norm": {"optimizers": MOMENTUM, "limit": (0.1, 2.0)},
    "clipped by the sum": {"optimizers": MOMENTUM, "limit": (0.3, 1.0)},
    "clipped by the largest": {"optimizers": MOMENTUM, "limit": (0.01, float("inf"))},
    "gathered once a step": {"strategy": sf.full_shard(DATA).resharding("step")},
    "small parameters whole": {"strategy": sf.uncut(sf.full_shard(DATA), below=20)},
    "strategies by path": {"strategy": lambda path, shape: sf.full_shard(DATA) if "weight" in path else sf.ddp(DATA)},
    **{f"strategy {name}": {"strategy": one} for name, one in STRATEGIES.items() if name != "hybrid_shard"},
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", TRAINED)
def test_a_module_on_shards_trains_as_on_one_process(name: str) -> None:
    world(4, "threads").run(trained, **TRAINED[name])
