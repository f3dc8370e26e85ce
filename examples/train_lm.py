"""Trains a byte-level language model on the sources of Python's standard library, sharded over a hybrid mesh.

    torchrun --standalone --nproc-per-node 4 examples/train_lm.py --mesh replica=2,shard=2

Math, memory and communication are all on this page. Every parameter is cut over `shard`; a layer gathers what it needs
(`gathered`), and the transposes of those two collectives bring its gradient back: reduce-scattered over
`shard`, then summed over `replica` on the shard only. AdamW touches this rank's shards and nothing else.
"""

from __future__ import annotations

import argparse
import math
import resource
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn import P

DATA = ("replica", "shard")  # the batch is cut over both
Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the model, and of the run."""

    vocabulary: int = 256
    width: int = 192
    heads: int = 6
    layers: int = 4
    hidden: int = 512
    context: int = 256
    batch: int = 16  # sequences a step, over all ranks
    rate: float = 3e-3
    warmup: int = 40
    decay: float = 0.1
    clip: float = 1.0
    dtype: torch.dtype = torch.float32


# --- the model: pure functions of full parameters ---


def init(config: Config, seed: int) -> Params:
    """All parameters, whole; the same for one seed on any mesh."""
    generator = torch.Generator().manual_seed(seed)
    d, f, v = config.width, config.hidden, config.vocabulary

    def normal(*shape: int, fan_in: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) / fan_in**0.5).to(config.dtype)

    def ones() -> Tensor:
        return torch.ones(d, dtype=config.dtype)

    def block() -> Params:
        return {
            "norm1": ones(),
            "qkv": normal(d, 3 * d, fan_in=d),
            "out": normal(d, d, fan_in=d * 2 * config.layers),
            "norm2": ones(),
            "up": normal(d, 2 * f, fan_in=d),
            "down": normal(f, d, fan_in=f * 2 * config.layers),
        }

    return {
        "embed": {"tokens": normal(v, d, fan_in=d), "places": normal(config.context, d, fan_in=d)},
        "blocks": [block() for _ in range(config.layers)],
        "head": {"norm": ones(), "out": normal(d, v, fan_in=d)},
    }


def embed(p: Params, tokens: Tensor) -> Tensor:
    return p["tokens"][tokens] + p["places"][: tokens.shape[1]]


def block(p: Params, x: Tensor, heads: int) -> Tensor:
    h = F.rms_norm(x, x.shape[-1:], p["norm1"]) @ p["qkv"]
    q, k, v = rearrange(h, "b t (three head d) -> three b head t d", three=3, head=heads)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + rearrange(attended, "b head t d -> b t (head d)") @ p["out"]
    gate, value = (F.rms_norm(x, x.shape[-1:], p["norm2"]) @ p["up"]).chunk(2, -1)
    return x + (F.silu(gate) * value) @ p["down"]


def head(p: Params, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], p["norm"]) @ p["out"]


def whole(p: Params) -> Params:
    """Parameters that were never cut."""
    return p


def gathered(p: Params) -> Params:
    """This rank's shards of a layer, made whole for this rank's rows. Transpose: reduce-scatter, then all-reduce."""
    return sf.all_gather(sf.pvary(p, "replica"), "shard")


def model(params: Params, tokens: Tensor, config: Config, full: Callable[[Params], Params] = whole) -> Tensor:
    """Logits `[b, t, vocabulary]` for tokens `[b, t]`."""
    x = embed(full(params["embed"]), tokens)
    for p in params["blocks"]:
        x = block(full(p), x, config.heads)
    return head(full(params["head"]), x)


def loss_fn(params: Params, tokens: Tensor, config: Config) -> Tensor:
    """Mean cross-entropy, in nats, over all predicted tokens of all ranks. Tokens `[rows, context + 1]`."""
    logits = model(params, tokens[:, :-1], config, gathered)
    total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return sf.psum(total, DATA) / sf.psum(tokens[:, 1:].numel(), DATA)


# --- the optimizer: on this rank's shards ---


def global_norm(grads: Params) -> Tensor:
    squares = torch.stack([g.square().sum() for g in optree.tree_leaves(grads)]).sum()
    return sf.psum(squares, "shard").sqrt()


def adamw(params: Params, grads: Params, state: Params, config: Config, rate: Tensor | float) -> tuple[Params, Params]:
    """One step of AdamW (Loshchilov and Hutter, 2019, algorithm 2), clipped to a global norm."""
    b1, b2, step = 0.9, 0.98, state["step"] + 1
    scale = (config.clip / (global_norm(grads) + 1e-6)).clamp(max=1)

    def moment(m: Tensor, g: Tensor) -> Tensor:
        return torch.lerp(m, g * scale, 1 - b1)

    def second(v: Tensor, g: Tensor) -> Tensor:
        return torch.lerp(v, (g * scale).square(), 1 - b2)

    def update(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        direction = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + 1e-8)
        return p - rate * (direction + (config.decay * p if p.ndim > 1 else 0))

    m = optree.tree_map(moment, state["m"], grads)
    v = optree.tree_map(second, state["v"], grads)
    return optree.tree_map(update, params, m, v), {"step": step, "m": m, "v": v}


def learning_rate(step: int, steps: int, config: Config) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / config.warmup)
    return config.rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
