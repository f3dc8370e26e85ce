"""Modules for tests beside other libraries, their numbers and rows, and a mesh of four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn import P
from tests.models import DATA, drawn

ROWS, WIDTH = 16, 6


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in float64, with numbers that do not come from torch's own generator, which threads share."""
    draw = drawn(seed, 0.5)
    for p in module.double().parameters():
        p.data = draw(*p.shape)
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
        return {"code": times * self.used(x)}


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
    module.get_submodule("0").requires_grad_(False)
    module.get_parameter("1.up.bias").requires_grad_(False)
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


VALUE_AND_TREE = (P(), ...)


def mapped(f: Any, mesh: Any, out: Any = VALUE_AND_TREE) -> Any:
    """A function of a tree and of this rank's rows, on the mesh."""
    return sf.shard_map(f, mesh=mesh, in_specs=(..., P(DATA)), out_specs=out)
