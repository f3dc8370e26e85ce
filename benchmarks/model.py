"""The language model that the benchmarks train: pure functions, which shardfn and its peers both run.

Peers get them as modules: `Whole` is an nn.Module around the same functions, with the same initial values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
import shardfn.optim as so
from shardfn import P

Params = dict[str, Any]
SEED = 0
# Muon's dtype for orthogonalisation: a CPU without bfloat16 instructions takes about 80 times as long in bfloat16.
ORTHOGONALISES = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


@dataclass(frozen=True)
class Config:
    """Sizes of the model; by default, it has 34 million parameters."""

    vocabulary: int = 8192
    width: int = 512
    layers: int = 8
    heads: int = 8
    hidden: int = 1408
    context: int = 128
    batch: int = 2
    device: str = "cpu"

    @property
    def numel(self) -> int:
        """The number of parameters of blocks and head, which are used once per token."""
        return self.layers * (4 * self.width**2 + 3 * self.width * self.hidden) + self.width * self.vocabulary


def perceptron(p: Params, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def embed(p: Params, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, p["tokens"])


def block(p: Params, x: Tensor, heads: int, rope: Tensor | None = None) -> Tensor:
    b, t, d = x.shape
    h = F.linear(F.rms_norm(x, (d,), p["norm1"], 1e-5), p["qkv"])
    q, k, v = h.view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    if rope is not None:
        q, k = rotated(q, rope), rotated(k, rope)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
    x = x + F.linear(attended, p["out"])
    h = F.rms_norm(x, (d,), p["norm2"], 1e-5)
    return x + F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"])


def head(p: Params, x: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of this rank's tokens."""
    logits = F.linear(F.rms_norm(x, (x.shape[-1],), p["norm"], 1e-5), p["out"])
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary positions; `rope [2, t, head / 2]` holds cosines and sines."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * rope[0] - b * rope[1], a * rope[1] + b * rope[0]), -1)


def rope_table(config: Config, dtype: torch.dtype) -> Tensor:
    half = config.width // config.heads // 2
    rates = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float64), rates)
    return torch.stack((angles.cos(), angles.sin())).to(config.device, dtype)


def makers(config: Config) -> Params:
    """Functions that make each stage's parameters; on a GPU, they are drawn there."""
    d, f, v = config.width, config.hidden, config.vocabulary

    def normal(generator: torch.Generator, *shape: int) -> Tensor:
        own = generator
        if config.device != "cpu":
            own = torch.Generator(config.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
        return torch.empty(shape, device=config.device).normal_(0, 0.02, generator=own)

    def ones() -> Tensor:
        return torch.ones(d, device=config.device)

    def first(g: torch.Generator) -> Params:
        return {"tokens": normal(g, v, d)}

    def layer(g: torch.Generator) -> Params:
        shapes = {"qkv": (3 * d, d), "out": (d, d), "gate": (f, d), "up": (f, d), "down": (d, f)}
        return {name: normal(g, *shape) for name, shape in shapes.items()} | {"norm1": ones(), "norm2": ones()}

    def last(g: torch.Generator) -> Params:
        return {"norm": ones(), "out": normal(g, v, d)}

    return {"embed": first, "blocks": [layer] * config.layers, "head": last}


def tokens(config: Config, rank: int) -> Tensor:
    """One rank's rows."""
    generator = torch.Generator().manual_seed(1 + rank)
    rows = torch.randint(0, config.vocabulary, (config.batch, config.context + 1), generator=generator)
    return rows.to(config.device)


def staged(config: Config, **options: Any) -> Callable[..., Tensor]:
    """A function for the mean loss of this rank's rows, made of stages; `options` are those of the blocks' stage."""
    first, layer, last = sf.stage(embed), sf.stage(block, **options), sf.stage(head)

    def local_loss(params: Params, rows: Tensor, *rope: Tensor) -> Tensor:
        ordered = sf.layers([params["embed"], *params["blocks"], params["head"]])
        x = first(ordered[0], rows[:, :-1])
        for p in ordered[1:-1]:
            x = layer(p, x, config.heads, *rope)
        return last(ordered[-1], x, rows[:, 1:])

    return local_loss


def training(config: Config, mesh: DeviceMesh, strategy: sf.Strategy, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step with AdamW that can be run or planned, and its arguments; `options` are those of the blocks' stage."""
    params = sf.init_sharded(makers(config), SEED, mesh, strategy)
    optimizer, local_loss = so.adamw(1e-3), staged(config, **options)
    data = tuple(mesh.mesh_dim_names or ())

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P(data)), out_specs=...)
    def step(params: Params, state: Any, rows: Tensor) -> Any:
        value, grads = sf.value_and_grad(lambda p: sf.pmean(local_loss(p, rows), data))(params)
        return *optimizer.step(params, grads, state), value

    numbers = torch.arange(config.batch * (config.context + 1), device=mesh.device_type) + dist.get_rank()
    return step, (params, optimizer.init(params), (numbers % config.vocabulary).view(config.batch, -1))


class Stage(nn.Module):
    """A module around a pure function of one stage's parameters."""

    def __init__(self, function: Callable[..., Tensor], params: dict[str, Tensor]) -> None:
        super().__init__()
        self.function, self.names = function, list(params)
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: Any) -> Tensor:
        return self.function({name: getattr(self, name) for name in self.names}, *args)


class Whole(nn.Module):
    """The model as a module for peers: one module per stage, wrapped with `wrap(stage, name)` as soon as it is made."""

    def __init__(
        self,
        config: Config,
        wrap: Callable[[nn.Module, str], nn.Module],
        rope: Tensor | None = None,
        init: Callable[..., Params] = sf.init,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(wrap(stage, name) for name, stage in stages(config, rope, init))

    def forward(self, rows: Tensor) -> Tensor:
        first, *layers, last = self.stages
        x = first(rows[:, :-1])
        for layer in layers:
            x = layer(x)
        return last(x, rows[:, 1:])


def stages(
    config: Config, rope: Tensor | None = None, init: Callable[..., Params] = sf.init
) -> Iterator[tuple[str, nn.Module]]:
    """Each stage's kind and module, made one after another, with the initial values of `sf.init_sharded`."""
    made = makers(config)
    layer = ("blocks", _with(block, config.heads, rope))
    kinds: list[tuple[str, Callable[..., Tensor]]] = [("embed", embed), *[layer] * config.layers, ("head", head)]
    for number, (kind, function) in enumerate(kinds):
        if kind == "blocks":
            (params,) = init({kind: {str(number - 1): made[kind][number - 1]}}, SEED)[kind].values()
        else:
            params = init({kind: made[kind]}, SEED)[kind]
        yield kind, Stage(function, params)


def _with(function: Callable[..., Tensor], *rest: Any) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def called(p: Params, x: Tensor) -> Tensor:
        return function(p, x, *rest)

    return called
