"""A small staged model that loops train: with noise by torch's own generators, and rows by the step's number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import P
from tests.models import layer as block

WIDTH, ROWS, DEPTH = 6, 8, 3
OPTIMIZER = sf.optim.adamw(1e-2)


def mesh_here() -> Any:
    """All ranks along one axis."""
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    return sf.make_mesh(device="cpu", shard=size)


def begin(mesh: Any, width: int = WIDTH, parts: int = 0) -> dict[str, Any]:
    """The state before the first step; with exact parts, if so many are given."""
    g = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(width, width, generator=g, dtype=torch.float64) / 2,
               "b": torch.zeros(width, dtype=torch.float64)} for _ in range(DEPTH)]  # fmt: skip
    params = sf.shard({"blocks": blocks}, mesh, sf.full_shard("shard").with_exact(parts))
    return {"params": params, "moments": OPTIMIZER.init(params), "seen": 0}


@dataclass(frozen=True)
class Rows:
    """Step `n` has the same rows on any number of ranks, of which each gets its part; `at` does something at a step."""

    mesh: Any
    end: int = 10**9
    seed: int = 3
    at: Callable[[int], None] = lambda n: None
    axes: str = "shard"
    identity: dict[str, Any] = field(default_factory=lambda: {"rows": ROWS})

    def __call__(self, start: int) -> Iterator[Tensor]:
        size, rank = self.mesh.size(), self.mesh.get_rank() if self.mesh.size() > 1 else 0
        for n in range(start, self.end):
            self.at(n)
            g = torch.Generator().manual_seed(1000 * self.seed + n)
            yield torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64).chunk(size)[rank]


def step_of(mesh: Any, noise: float = 0.0, stage: Callable[..., Any] = block) -> Callable[[Any, Any], Any]:
    """A step: the mean square of the outputs, and AdamW."""
    layer = sf.stage(stage)

    def total(params: Any, rows: Tensor) -> Tensor:
        x = rows
        for p in sf.layers(params["blocks"]):
            x = layer(p, x)
        kept = x if noise == 0 else x * (torch.rand(x.shape, dtype=x.dtype) > noise)
        return (kept - 0.5).square().sum()

    def by_parts(params: Any, rows: Tensor) -> Any:
        return sf.accumulate(lambda p, x: (total(p, x), len(x)), rows, micro="exact")(params)

    def by_ranks(params: Any, rows: Tensor) -> Any:
        return sf.value_and_grad(lambda p: sf.psum(total(p, rows), "shard") / ROWS)(params)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P("shard")), out_specs=...)
    def trained(params: Any, moments: Any, rows: Tensor) -> Any:
        exact = params["blocks"][0].layout.placement.exact
        value, grads = (by_parts if exact else by_ranks)(params, rows)
        return *OPTIMIZER.step(params, grads, moments), value

    def step(state: Any, rows: Tensor) -> Any:
        params, moments, loss = trained(state["params"], state["moments"], rows)
        return {"params": params, "moments": moments, "seen": state["seen"] + ROWS}, {"loss": loss, "rows": ROWS}

    return step


def whole(state: Any) -> list[Tensor]:
    """All parameters, on every rank."""
    params = sf.unshard(state["params"])
    return [x for p in params["blocks"] for x in (p["w"], p["b"])]
