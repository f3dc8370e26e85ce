"""Norms of single examples' gradients in programs as people write them, against vmap of grad on one process.

Each program is run twice: whole, on one process, and cut into stages on two. One that uses what vmap cannot map runs
only where a stage may call it row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import interop
from shardfn.curvature.per_example import per_example
from shardfn.testing import World
from tests.models import STRATEGIES, data_mesh, gradients, normal, variables
from tests.reference import worst

ROWS, C, S, T, V = 3, 4, 6, 5, 12
Program = Callable[[], tuple[Any, Callable[..., Tensor], tuple[Any, ...]]]
PROGRAMS: dict[str, Program] = {}
IN_STAGES_ONLY: set[str] = set()
two = pytest.mark.world(2, "processes")


def program(stages_only: bool = False) -> Callable[[Program], Program]:
    def note(f: Program) -> Program:
        PROGRAMS[f.__name__] = f
        if stages_only:
            IN_STAGES_ONLY.add(f.__name__)
        return f

    return note


def drawn(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: normal(*shape, seed=k + 7 * len(name)) for k, (name, shape) in enumerate(shapes.items())}


def images(*shape: int) -> Tensor:
    return normal(2 * ROWS, *shape, seed=3)


def words(length: int = T) -> Tensor:
    return torch.randint(1, V, (2 * ROWS, length), generator=torch.Generator().manual_seed(4))


def labels(classes: int) -> Tensor:
    return torch.arange(2 * ROWS) % classes


def each_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def token_losses(logits: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), t, reduction="none").mean(1)


def of_one_stage(f: Callable[..., Tensor], params: Any) -> Any:
    """A program whose losses are squares of what one stage makes of rows."""

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        return stage(f)(params["f"], x).square().sum(1)

    return params, losses, (images(6),)


# --- language models ---


@program()
def gpt() -> Any:
    """Learned positions, fused attention weights with biases, tied head, a mask made by hand."""
    params = {
        "embed": drawn(wte=(V, 8), wpe=(T, 8)),
        "blocks": [
            drawn(ln=(8,), lnb=(8,), qkv=(24, 8), qb=(24,), o=(8, 8), ob=(8,), f=(32, 8), fb=(32,), g=(8, 32))
            for _ in range(2)
        ],
    }

    def block(p: Any, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = F.linear(F.layer_norm(x, (d,), 1 + p["ln"], p["lnb"]), p["qkv"], p["qb"]).split(d, dim=2)
        q, k, v = (y.view(b, t, 2, d // 2).transpose(1, 2) for y in (q, k, v))
        a = (q @ k.transpose(-2, -1)) / math.sqrt(d // 2)
        a = a.masked_fill(torch.tril(torch.ones(t, t)) == 0, float("-inf")).softmax(-1)
        x = x + F.linear((a @ v).transpose(1, 2).contiguous().view(b, t, d), p["o"], p["ob"])
        return x + F.gelu(F.linear(x, p["f"], p["fb"])) @ p["g"].t()

    def losses(stage: Any, params: Any, t: Tensor) -> Tensor:
        x = stage(lambda p, t: p["wte"][t] + p["wpe"][: t.size(1)])(params["embed"], t)
        for p in sf.layers(params["blocks"]):
            x = stage(block)(p, x)
        logits = stage(lambda p, x: x @ p["wte"].T)(params["embed"], x)
        return token_losses(logits[:, :-1], t[:, 1:])

    return params, losses, (words(),)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@program()
def llama() -> Any:
    """Rotary positions from a stage, grouped queries, a gated perceptron, norms in float32."""
    params = {"embed": drawn(e=(V, 8)), "rope": drawn(base=(2,)), "head": drawn(w=(V, 8), n=(8,)),
              "blocks": [drawn(n1=(8,), n2=(8,), q=(8, 8), k=(8, 4), v=(8, 4), o=(8, 8), gate=(8, 12), up=(8, 12),
                               down=(12, 8))]}  # fmt: skip

    def norm(x: Tensor, w: Tensor) -> Tensor:
        y = x.to(torch.float64)
        return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def block(p: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = norm(x, p["n1"])
        q = rotated((h @ p["q"]).view(b, t, 2, 4).transpose(1, 2), cos, sin)
        k, v = ((h @ p[n]).view(b, t, 1, 4).transpose(1, 2) for n in "kv")
        k = rotated(k, cos, sin).repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, k, v.repeat_interleave(2, 1), is_causal=True)
        x = x + y.transpose(1, 2).reshape(b, t, -1) @ p["o"]
        h = norm(x, p["n2"])
        return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def losses(stage: Any, params: Any, t: Tensor) -> Tensor:
        def rope(p: Any) -> Any:
            angles = torch.outer(torch.arange(T, dtype=torch.float64), p["base"].exp())
            both = torch.cat((angles, angles), -1)
            return both.cos(), both.sin()

        cos, sin = stage(rope)(params["rope"])
        x = stage(lambda p, t: F.embedding(t, p["e"], padding_idx=1))(params["embed"], t)
        for p in params["blocks"]:
            x = stage(block)(p, x, cos, sin)
        logits = stage(lambda p, x: F.linear(norm(x, p["n"]), p["w"]))(params["head"], x)
        return token_losses(logits, t)

    return params, losses, (words(),)


@program()
def bert() -> Any:
    """Three embeddings, a padding mask per row, a pooled first token and two heads."""
    params = {"embed": drawn(w=(V, 8), p=(T, 8), s=(2, 8), n=(8,), m=(8,)),
              "layer": drawn(q=(8, 8), qb=(8,), k=(8, 8), v=(8, 8), o=(8, 8), n=(8,), m=(8,)),
              "head": drawn(pool=(8, 8), pb=(8,), c=(3, 8), mlm=(8, 8), bias=(V,))}  # fmt: skip

    def embed(p: Any, t: Tensor, segments: Tensor) -> Tensor:
        x = F.embedding(t, p["w"]) + F.embedding(torch.arange(T).expand(t.shape), p["p"]) + p["s"][segments]
        return F.layer_norm(x, (8,), p["n"], p["m"])

    def layer(p: Any, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (F.linear(x, p[n]).unflatten(-1, (2, 4)).transpose(1, 2) for n in "qkv")
        y = F.scaled_dot_product_attention(q + p["qb"].view(1, 2, 1, 4), k, v, attn_mask=mask)
        return F.layer_norm(x + y.transpose(1, 2).flatten(2) @ p["o"], (8,), p["n"], p["m"])

    def losses(stage: Any, params: Any, t: Tensor, segments: Tensor, y: Tensor) -> Tensor:
        mask = (t != 1)[:, None, None, :]
        x = stage(layer)(params["layer"], stage(embed)(params["embed"], t, segments), mask)

        def head(p: Any, x: Tensor, table: Tensor) -> Any:
            pooled = torch.tanh(F.linear(x[:, 0], p["pool"], p["pb"]))
            return F.linear(pooled, p["c"]), F.gelu(x @ p["mlm"]) @ table.T + p["bias"]

        table = stage(lambda p: p["w"].clone())(params["embed"])
        first, second = stage(head)(params["head"], x, table)
        return each_of(first, y) + token_losses(second, t)

    return params, losses, (words(), words() % 2, labels(3))


@program()
def t5() -> Any:
    """An encoder and a decoder that attends to it, relative biases from one table shared by layers."""
    params = {"e": drawn(w=(V, 8)), "bias": drawn(b=(5, 2)), "enc": drawn(qkv=(8, 24), o=(8, 8)),
              "dec": drawn(qkv=(8, 24), o=(8, 8), q=(8, 8), kv=(8, 16))}  # fmt: skip
    near = (torch.arange(T)[:, None] - torch.arange(T)).clamp(-2, 2) + 2

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any = 0) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v))
        return ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def encoder(p: Any, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (x @ p["qkv"]).chunk(3, -1)
        return x + attend(q, k, v, bias) @ p["o"]

    def decoder(p: Any, x: Tensor, other: Tensor, bias: Tensor) -> Tensor:
        x = encoder(p, x, bias)
        k, v = (other @ p["kv"]).chunk(2, -1)
        return x + attend(x @ p["q"], k, v)

    def losses(stage: Any, params: Any, s: Tensor, t: Tensor) -> Tensor:
        table = stage(lambda p: p["b"][near].permute(2, 0, 1)[None].contiguous())(params["bias"])
        embed = stage(lambda p, t: p["w"][t])
        x = stage(encoder)(params["enc"], embed(params["e"], s), table)
        y = stage(decoder)(params["dec"], embed(params["e"], t), x, table)
        return token_losses(stage(lambda p, y: y @ p["w"].T * 8**-0.5)(params["e"], y), t)

    return params, losses, (words(), words().flip(0))


@program()
def bag_of_words() -> Any:
    params = {"e": drawn(w=(V, 6)), "h": drawn(a=(6, 3), b=(3,))}

    def losses(stage: Any, params: Any, t: Tensor, y: Tensor) -> Tensor:
        x = stage(lambda p, t: F.one_hot(t, V).to(p["w"].dtype) @ p["w"])(params["e"], t).sum(1)
        return each_of(stage(lambda p, x: torch.addmm(p["b"], x, p["a"]))(params["h"], x), y)

    return params, losses, (words(), labels(3))


@program()
def bilinear_scores() -> Any:
    """Word vectors: rows of two tables, negative samples, `bmm` of rows alone."""
    params = {"in": drawn(w=(V, 6)), "out": drawn(w=(V, 6), b=(V,))}

    def losses(stage: Any, params: Any, t: Tensor) -> Tensor:
        x = stage(lambda p, t: torch.index_select(p["w"], 0, t.reshape(-1)).view(*t.shape, -1))(params["in"], t[:, :1])

        def scores(p: Any, x: Tensor, t: Tensor) -> Tensor:
            return torch.bmm(F.embedding(t, p["w"]), x.transpose(1, 2)).squeeze(2) + p["b"][t]

        z = stage(scores)(params["out"], x, t[:, 1:])
        return -F.logsigmoid(z[:, 0]) - F.logsigmoid(-z[:, 1:]).sum(1)

    return params, losses, (words(),)


@program()
def state_space() -> Any:
    """A diagonal recurrence with an elementwise gate, a loop over time, a short causal convolution."""
    params = {"e": drawn(w=(V, 6)), "s": drawn(a=(6, 2), b=(6, 2), c=(6, 2), d=(6,), dt=(6, 6), conv=(6, 1, 3)),
              "h": drawn(w=(6, V))}  # fmt: skip

    def scan(p: Any, x: Tensor) -> Tensor:
        u = F.conv1d(F.pad(x.mT, (2, 0)), p["conv"], groups=6).mT
        dt = F.softplus(u @ p["dt"])
        h, ys = x.new_zeros(x.shape[0], 6, 2), []
        for t in range(x.shape[1]):
            h = torch.exp(-p["a"].exp() * dt[:, t, :, None]) * h + dt[:, t, :, None] * p["b"] * u[:, t, :, None]
            ys.append((h * p["c"]).sum(-1) + p["d"] * u[:, t])
        return torch.stack(ys, 1)

    def losses(stage: Any, params: Any, t: Tensor) -> Tensor:
        x = stage(scan)(params["s"], stage(lambda p, t: p["w"][t])(params["e"], t))
        return token_losses(stage(lambda p, x: x @ p["w"])(params["h"], x), t)

    return params, losses, (words(),)


@program()
def linear_attention() -> Any:
    params = {"e": drawn(w=(V, 6)), "l": drawn(q=(6, 6), k=(6, 6), v=(6, 6), decay=(6,))}

    def layer(p: Any, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bti,ij->btj", x, p[n]) for n in "qkv")
        steps = torch.arange(x.shape[1], dtype=x.dtype)
        weights = torch.tril(torch.exp(-(steps[:, None] - steps).clamp(min=0)[..., None] * p["decay"].exp()).mean(-1))
        return x + torch.einsum("bti,bsi,bsj,ts->btj", q.sigmoid(), k.sigmoid(), v, weights)

    def losses(stage: Any, params: Any, t: Tensor) -> Tensor:
        x = stage(layer)(params["l"], stage(lambda p, t: p["w"][t])(params["e"], t))
        return token_losses(stage(lambda p, x: F.linear(x, p["w"]))(params["e"], x), t)

    return params, losses, (words(),)


@program(stages_only=True)
def mixture_of_experts() -> Any:
    """Tokens are sent to the best two experts by boolean masks."""
    params = {"e": drawn(w=(V, 6)), "moe": drawn(gate=(6, 3), up=(3, 6, 8), down=(3, 8, 6))}

    def moe(p: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        weights, which = (flat @ p["gate"]).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for i in range(3):
            rows, k = (which == i).nonzero(as_tuple=True)
            y[rows] += weights[rows, k, None] * (F.relu(flat[rows] @ p["up"][i]) @ p["down"][i])
        return x + y.view_as(x)

    def losses(stage: Any, params: Any, t: Tensor) -> Tensor:
        x = stage(moe)(params["moe"], stage(lambda p, t: p["w"][t])(params["e"], t))
        return token_losses(stage(lambda p, x: x @ p["w"].T)(params["e"], x), t)

    return params, losses, (words(),)


@program()
def dense_experts() -> Any:
    """All experts compute, by batched products with one weight of three dimensions."""
    params = {"moe": drawn(gate=(6, 3), up=(3, 6, 8), down=(3, 8, 6)), "h": drawn(w=(6, 2))}

    def moe(p: Any, x: Tensor) -> Tensor:
        h = torch.einsum("bd,edf->bef", x, p["up"]).relu()
        each = (h.transpose(0, 1) @ p["down"]).transpose(0, 1)
        return x + torch.einsum("be,bed->bd", (x @ p["gate"]).softmax(-1), each)

    def losses(stage: Any, params: Any, x: Tensor, y: Tensor) -> Tensor:
        return each_of(stage(lambda p, x: x @ p["w"])(params["h"], stage(moe)(params["moe"], x)), y)

    return params, losses, (images(6), labels(2))


# --- images ---


@program()
def small_resnet() -> Any:
    """Strided convolutions, group norms, a projected shortcut, pooling."""
    params = {"stem": drawn(w=(C, 3, 3, 3), b=(C,)),
              "block": drawn(a=(2 * C, C, 3, 3), b=(2 * C, 2 * C, 3, 3), s=(2 * C, C, 1, 1), g=(2 * C,), h=(2 * C,)),
              "head": drawn(w=(3, 2 * C), b=(3,))}  # fmt: skip

    def block(p: Any, x: Tensor) -> Tensor:
        y = F.relu(F.group_norm(F.conv2d(x, p["a"], stride=2, padding=1), 2, 1 + p["g"], p["h"]))
        return F.relu(F.conv2d(y, p["b"], padding=(1, 1)) + F.conv2d(x, p["s"], stride=2))

    def losses(stage: Any, params: Any, x: Tensor, y: Tensor) -> Tensor:
        x = stage(lambda p, x: F.max_pool2d(F.conv2d(x, p["w"], p["b"], 1, 1), 2))(params["stem"], x)
        x = stage(block)(params["block"], x).mean((2, 3))
        return each_of(stage(lambda p, x: F.linear(x, p["w"], p["b"]))(params["head"], x), y)

    return params, losses, (images(3, 8, 8), labels(3))


@program()
def vision_transformer() -> Any:
    """Patches by a convolution, a class token, resized positions, layer scale."""
    params = {"patch": drawn(w=(8, 3, 2, 2), b=(8,), cls=(1, 1, 8), pos=(1, 5, 8)),
              "l": drawn(qkv=(24, 8), o=(8, 8), gamma=(8,), n=(8,), m=(8,)),
              "head": drawn(w=(3, 8))}  # fmt: skip

    def embed(p: Any, x: Tensor) -> Tensor:
        x = F.conv2d(x, p["w"], p["b"], stride=2).flatten(2).transpose(1, 2)
        grid = p["pos"][:, 1:].reshape(1, 2, 2, 8).permute(0, 3, 1, 2)
        pos = F.interpolate(grid, size=(3, 3), mode="bilinear").permute(0, 2, 3, 1).reshape(1, 9, 8)
        x = torch.cat((p["cls"].expand(x.shape[0], -1, -1), x), dim=1)
        return x + torch.cat((p["pos"][:, :1], pos), dim=1)

    def layer(p: Any, x: Tensor) -> Tensor:
        q, k, v = (
            F.linear(F.layer_norm(x, (8,), p["n"], p["m"]), p["qkv"])
            .reshape(len(x), -1, 3, 2, 4)
            .permute(2, 0, 3, 1, 4)
        )
        return x + p["gamma"] * F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), p["o"])

    def losses(stage: Any, params: Any, x: Tensor, y: Tensor) -> Tensor:
        x = stage(layer)(params["l"], stage(embed)(params["patch"], x))
        return each_of(stage(lambda p, x: F.linear(x[:, 0], p["w"]))(params["head"], x), y)

    return params, losses, (images(3, 6, 6), labels(3))


@program()
def convnext() -> Any:
    """Depthwise 7x7, channels last, a perceptron of the channels."""
    params = {"stem": drawn(w=(C, 3, 2, 2)),
              "b": drawn(dw=(C, 1, 7, 7), db=(C,), n=(C,), m=(C,), up=(C, 4 * C), ub=(4 * C,), down=(4 * C, C),
                         g=(C, 1, 1)),
              "head": drawn(w=(C, 2))}  # fmt: skip

    def block(p: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, p["dw"], p["db"], padding=3, groups=C).permute(0, 2, 3, 1)
        y = F.gelu(F.layer_norm(y, (C,), p["n"], p["m"], eps=1e-6) @ p["up"] + p["ub"]) @ p["down"]
        return x + p["g"] * y.permute(0, 3, 1, 2)

    def losses(stage: Any, params: Any, x: Tensor, y: Tensor) -> Tensor:
        x = stage(block)(params["b"], stage(lambda p, x: F.conv2d(x, p["w"], stride=2))(params["stem"], x))
        return each_of(stage(lambda p, x: x.mean((2, 3)) @ p["w"])(params["head"], x), y)

    return params, losses, (images(3, 8, 8), labels(2))


@program()
def unet() -> Any:
    """A transposed convolution, a skip between stages, a residual to the input."""
    params = {
        "down": drawn(w=(C, 1, 3, 3)),
        "mid": drawn(w=(C, C, 3, 3), b=(C,)),
        "up": drawn(t=(C, C, 2, 2), w=(1, 2 * C, 1, 1)),
    }

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        skip = stage(lambda p, x: F.relu(F.conv2d(x, p["w"], padding=1)))(params["down"], x)
        y = stage(lambda p, x: F.conv2d(F.avg_pool2d(x, 2), p["w"], p["b"], padding="same"))(params["mid"], skip)
        up = stage(lambda p, y, s: F.conv2d(torch.cat([F.conv_transpose2d(y, p["t"], stride=2), s], 1), p["w"]))
        return (up(params["up"], y, skip) - x).square().flatten(1).mean(1)

    return params, losses, (images(1, 6, 6),)


@program()
def diffusion() -> Any:
    """A step per row, sinusoids of it, a scale and a shift of a norm."""
    params = {"t": drawn(a=(8, 8), b=(8,), c=(8, 12)), "n": drawn(i=(6, 6), o=(6, 6))}

    def embed(p: Any, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(4, dtype=torch.float64))
        return F.silu(torch.cat([angles.sin(), angles.cos()], 1) @ p["a"] + p["b"]) @ p["c"]

    def net(p: Any, x: Tensor, e: Tensor) -> Tensor:
        scale, shift = e.chunk(2, dim=1)
        return F.silu(F.layer_norm(x @ p["i"], (6,)) * (1 + scale) + shift) @ p["o"]

    def losses(stage: Any, params: Any, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        a = torch.cos(t)[:, None]
        e = stage(embed)(params["t"], t)
        return F.mse_loss(stage(net)(params["n"], a * x + (1 - a**2).sqrt() * noise, e), noise, reduction="none").mean(
            1
        )

    return params, losses, (images(6), torch.linspace(0, 1, 2 * ROWS, dtype=torch.float64), images(6).cos())


@program()
def autoencoder() -> Any:
    """Noise among the rows, tied weights within a stage and between two."""
    params = {"w": drawn(w=(6, 3), b=(3,), c=(6,))}

    def losses(stage: Any, params: Any, x: Tensor, noise: Tensor) -> Tensor:
        mean = stage(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))(params["w"], x)
        z = mean + 0.1 * noise
        y = stage(lambda p, z: torch.sigmoid(z @ p["w"].T + p["c"]) @ p["w"] @ p["w"].T)(params["w"], z)
        return (x - y).pow(2).sum(-1) + mean.square().sum(-1)

    return params, losses, (images(6), images(3).sin())


@program()
def hypernetwork() -> Any:
    """Weights that one stage makes for another, of all rows and of each."""
    params = {"hyper": drawn(z=(3,), w=(3, 36), r=(6, 36)), "main": drawn(o=(6, 2))}

    def losses(stage: Any, params: Any, x: Tensor, y: Tensor) -> Tensor:
        made = stage(lambda p: (p["z"] @ p["w"]).view(6, 6))(params["hyper"])
        own = stage(lambda p, x: (x @ p["r"]).view(-1, 6, 6))(params["hyper"], x)
        h = torch.tanh(x @ made + torch.bmm(x[:, None], own).squeeze(1))
        return each_of(stage(lambda p, h, w: (h @ w) @ p["o"])(params["main"], h, made), y)

    return params, losses, (images(6), labels(2))


@program()
def low_rank_adapters() -> Any:
    """A product of two small matrices beside a constant one, with a scale."""
    params = {"a": drawn(a=(6, 2), b=(2, 6), alpha=())}
    frozen = normal(6, 6, seed=77)

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        f = stage(lambda p, x: x @ frozen + (x @ p["a"] @ p["b"]) * p["alpha"] + x @ (p["a"] @ p["b"]))
        return f(params["a"], torch.tanh(f(params["a"], x))).square().sum(1)

    return params, losses, (images(6),)


# --- what people do to weights ---


@program()
def spectral_norm() -> Any:
    params = {"w": drawn(w=(6, 6), u=(6,))}

    def f(p: Any, x: Tensor) -> Tensor:
        u = F.normalize(p["w"] @ F.normalize(p["u"], dim=0), dim=0)
        return x @ (p["w"] / (u @ p["w"] @ p["w"].T @ u).sqrt())

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        return stage(f)(params["w"], x).tanh().sum(1).exp()

    return params, losses, (images(6),)


@program()
def straight_through_quantization() -> Any:
    params = {"w": drawn(w=(6, 6), s=(6,))}

    def f(p: Any, x: Tensor) -> Tensor:
        q = p["w"] + ((p["w"] / 0.1).round() * 0.1 - p["w"]).detach()
        return (x @ (q * p["s"])).clamp(-1, 1) + x * p["s"].clamp(-0.2, 0.2)

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        return stage(f)(params["w"], x).square().sum(1)

    return params, losses, (images(6),)


@program()
def orthogonal() -> Any:
    params = {"w": drawn(w=(6, 6), d=(6,))}

    def f(p: Any, x: Tensor) -> Tensor:
        skew = p["w"].triu(1) - p["w"].triu(1).T
        q = torch.linalg.solve(torch.eye(6, dtype=skew.dtype) + skew, torch.eye(6, dtype=skew.dtype) - skew)
        return (
            (x @ q) * p["d"]
            + x @ torch.diag_embed(p["d"])
            + F.linear(x, torch.block_diag(p["w"][:3, :3], p["w"][3:, 3:]))
        )

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        return stage(f)(params["w"], x).sin().sum(1)

    return params, losses, (images(6),)


@program()
def fourier() -> Any:
    params = {"f": drawn(re=(4, 6), im=(4, 6))}

    def f(p: Any, x: Tensor) -> Tensor:
        weights = torch.complex(p["re"], p["im"])
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * weights, n=x.shape[1], dim=1) + x

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        return stage(f)(params["f"], x).square().sum((1, 2))

    return params, losses, (images(6, 6),)


class Reversed(torch.autograd.Function):
    """The identity, with a reversed and scaled gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.scale * g, None


@program()
def gradient_reversal() -> Any:
    """A Function on rows, and one on a weight, of which the result is a view."""
    params = {"f": drawn(w=(6, 6)), "d": drawn(w=(6, 2), v=(6, 2))}

    def losses(stage: Any, params: Any, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(stage(lambda p, x: x @ Reversed.apply(p["w"], 3.0))(params["f"], x))
        a = stage(lambda p, h: h @ p["w"])(params["d"], h)
        b = stage(lambda p, h: Reversed.apply(h, 0.5) @ p["v"])(params["d"], h)
        return each_of(a, y) + each_of(b, 1 - y)

    return params, losses, (images(6), labels(2))


@program()
def hooked() -> Any:
    """A hook that scales the gradient of a weight's view."""
    params = {"f": drawn(w=(6, 6))}

    def f(p: Any, x: Tensor) -> Tensor:
        w = p["w"].T
        if w.requires_grad:
            w.register_hook(lambda g: 0.5 * g)
        return x @ w

    return of_one_stage(f, params)


@program()
def power_of_a_weight() -> Any:
    params = {"f": drawn(w=(6, 6), n=(3,))}

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        f = stage(lambda p, x: torch.linalg.multi_dot([x, p["w"], p["w"], p["w"].T]) + F.pad(p["n"], (1, 2)) * x)
        return f(params["f"], x).sum(1).cos()

    return params, losses, (images(6),)


@program()
def indices_of_all_kinds() -> Any:
    params = {"f": drawn(w=(6, 6), t=(4, 3, 6), b=(V, 2))}

    def f(p: Any, x: Tensor, t: Tensor) -> Tensor:
        a = p["t"][t[:, 0] % 4, t[:, 1] % 3]
        b = p["t"][:, t[:, 2] % 3].sum(0)
        c = p["w"].expand(len(t), 6, 6).gather(2, (t[:, :1, None] % 6).expand(-1, 6, 1)).sum((1, 2))[:, None]
        d = torch.take_along_dim(p["b"], t[:, :1] % V, 0).sum(1, keepdim=True) + p["b"][-t % V].sum((1, 2))[:, None]
        return x * a + b + c + d + p["w"][[0, 2]].sum(0) + p["w"][..., 1] + p["w"].diagonal() * x + x @ p["w"].flip(0)

    def losses(stage: Any, params: Any, x: Tensor, t: Tensor) -> Tensor:
        return stage(f)(params["f"], x, t).square().sum(1)

    return params, losses, (images(6), words())


@program()
def written_in_place() -> Any:
    """Buffers that are made anew and filled by slices, and operators that assign."""
    params = {"f": drawn(w=(6, 6), b=(6,), s=(3,))}

    def f(p: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:, :3] = x[:, 3:] * p["s"]
        out[:, 3:] = (x @ p["w"])[:, :3]
        out += p["b"]
        out.mul_(p["w"][0]).add_(x, alpha=2)
        out[:, 0] = p["b"][0]
        return torch.relu_(out).clone()

    return of_one_stage(f, params)


@program(stages_only=True)
def filled_buffer() -> Any:
    """A buffer whose shape does not come from a row, which vmap cannot fill."""
    params = {"f": drawn(w=(6, 6))}

    def f(p: Any, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], 12, dtype=x.dtype)
        out[:, :6] = x @ p["w"]
        out[:, 6:] = x
        return out

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        return stage(f)(params["f"], x).sin().sum(1)

    return params, losses, (images(6),)


@program()
def checkpoints_inside() -> Any:
    params = {"f": drawn(w=(6, 6), v=(6, 6))}

    def f(p: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(x @ p["w"]) @ p["v"], x, use_reentrant=False)

    return of_one_stage(f, params)


# --- transforms inside ---


@program()
def energy_and_force() -> Any:
    """The loss has a gradient with respect to positions in it, through parameters."""
    params = {"f": drawn(w=(6, 8), v=(8,))}

    def f(p: Any, x: Tensor) -> Any:
        def energy(x: Tensor) -> Tensor:
            return torch.tanh(x @ p["w"]) @ p["v"]

        return energy(x), -torch.func.grad(lambda x: energy(x).sum())(x)

    def losses(stage: Any, params: Any, x: Tensor, e: Tensor) -> Tensor:
        energy, force = stage(f)(params["f"], x)
        return (energy - e).square() + force.square().sum(1)

    return params, losses, (images(6), torch.linspace(-1, 1, 2 * ROWS, dtype=torch.float64))


@program()
def force_by_autograd() -> Any:
    params = {"f": drawn(w=(6, 8), v=(8,))}

    def f(p: Any, x: Tensor) -> Tensor:
        z = torch.tanh(x @ p["w"])
        return ((1 - z * z) * p["v"]) @ p["w"].T

    return of_one_stage(f, params)


@program()
def laplacian() -> Any:
    params = {"f": drawn(w=(3, 8), v=(8,))}

    def f(p: Any, x: Tensor) -> Tensor:
        def u(x: Tensor) -> Tensor:
            return torch.tanh(x @ p["w"]) @ p["v"]

        return torch.func.vmap(lambda x: torch.func.hessian(u)(x).diagonal().sum() + u(x))(x)

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        return stage(f)(params["f"], x).square()

    return params, losses, (images(3),)


@program()
def one_step_of_learning() -> Any:
    """Parameters are changed by a gradient of the same row, then used: model-agnostic meta-learning."""
    params = {"f": drawn(w=(4, 4), b=(4,))}

    def f(p: Any, x: Tensor, y: Tensor) -> Tensor:
        def inner(q: Any, x: Tensor) -> Tensor:
            return torch.tanh(x @ q["w"] + q["b"]).square().sum()

        def one(x: Tensor, y: Tensor) -> Tensor:
            g = torch.func.grad(inner)(p, x)
            return inner({k: p[k] - 0.1 * g[k] for k in p}, y)

        return torch.func.vmap(one)(x, y)

    def losses(stage: Any, params: Any, x: Tensor, y: Tensor) -> Tensor:
        return stage(f)(params["f"], x, y)

    return params, losses, (images(4), images(4).cos())


# --- contrast, structure, several inputs ---


@program()
def siamese() -> Any:
    params = {"f": drawn(w=(6, 6), b=(6,))}

    def losses(stage: Any, params: Any, a: Any) -> Tensor:
        f = stage(lambda p, x: F.normalize(torch.tanh(x @ p["w"] + p["b"]), dim=-1))
        u, v, w = (f(params["f"], a[k]) for k in ("anchor", "good", "bad"))
        return F.relu(0.5 + (u * w).sum(1) - (u * v).sum(1)) + F.triplet_margin_loss(u, v, w, reduction="none")

    return params, losses, ({"anchor": images(6), "good": images(6).sin(), "bad": images(6).flip(0)},)


@program()
def graph_network() -> Any:
    """Messages along the edges of each row's own graph, by its adjacency."""
    params = {"f": drawn(msg=(8, 4), upd=(8, 4), out=(4,))}

    def f(p: Any, x: Tensor, adjacency: Tensor) -> Tensor:
        n = x.shape[1]
        pairs = torch.cat([x[:, :, None].expand(-1, -1, n, -1), x[:, None].expand(-1, n, -1, -1)], -1)
        messages = torch.relu(pairs @ p["msg"]) * adjacency[..., None]
        return torch.tanh(torch.cat([x, messages.sum(2)], -1) @ p["upd"])

    def losses(stage: Any, params: Any, x: Tensor, adjacency: Tensor) -> Tensor:
        for _ in range(2):
            x = stage(f)(params["f"], x, adjacency)
        return stage(lambda p, x: x.mean(1) @ p["out"])(params["f"], x).square()

    return params, losses, (images(5, 4), (images(5, 5) > 0).double())


@program()
def conditional_flow() -> Any:
    """Coupling layers with a log-determinant beside the result."""
    params = {"l": [drawn(w=(3, 6), b=(6,), p=(6, 6)) for _ in range(2)]}

    def layer(p: Any, x: Tensor, total: Tensor) -> Any:
        a, b = (x @ torch.linalg.qr(p["p"])[0]).split(3, 1)
        scale, shift = (a @ p["w"] + p["b"]).chunk(2, 1)
        return torch.cat([a, b * torch.exp(scale.tanh()) + shift], 1), total + scale.tanh().sum(1)

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0])
        for p in sf.layers(params["l"]):
            x, total = stage(layer)(p, x, total)
        return 0.5 * x.square().sum(1) - total

    return params, losses, (images(6),)


@program()
def survival() -> Any:
    """Scalars, a softplus of one, `where`, and a loss that some rows' parameters do not reach."""
    params = {"f": drawn(w=(6,), scale=(), late=(6,))}

    def losses(stage: Any, params: Any, x: Tensor, time: Tensor, seen: Tensor) -> Tensor:
        def hazard(p: Any, x: Tensor, time: Tensor) -> Any:
            rate = F.softplus(p["scale"]) * torch.exp(x @ p["w"])
            return torch.where(time > 0.5, rate * torch.exp(x @ p["late"]), rate)

        rate = stage(hazard)(params["f"], x, time)
        return rate * time - torch.where(seen, rate.log(), torch.zeros_like(rate))

    return params, losses, (images(6), torch.linspace(0.1, 1, 2 * ROWS, dtype=torch.float64), labels(2) == 1)


@program()
def unused_and_frozen() -> Any:
    """Parameters that the loss does not use, that are detached, and that some rows alone use."""
    params = {"f": drawn(used=(6, 6), detached=(6, 6), unused=(6, 6)), "never": drawn(w=(3,))}

    def f(p: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = x @ p["used"]
        return (x @ p["used"] - target.flip(1)) * (x[:, :1] > 0) + (x @ p["detached"].detach())

    return of_one_stage(f, params)


@program()
def deep_sets_and_pairs() -> Any:
    """A cumulative sum, a sort, a pairwise distance, a bilinear form, a Kronecker product."""
    params = {"f": drawn(a=(4, 4), b=(3, 4, 4), k=(2, 2))}

    def f(p: Any, x: Tensor) -> Tensor:
        y = torch.cumsum(x @ p["a"], 1).sort(1).values
        z = F.bilinear(y, x, p["b"])
        d = torch.cdist(y, x @ torch.kron(p["k"], p["k"]) + 3)
        return z.square().sum((1, 2)) + d.sum((1, 2)) + torch.tensordot(x, p["a"], dims=([2], [1])).sum((1, 2)).sin()

    def losses(stage: Any, params: Any, x: Tensor) -> Tensor:
        return stage(f)(params["f"], x)

    return params, losses, (images(5, 4),)


def difference(name: str, stages: bool) -> list[float]:
    """How far losses and norms are from one process; at the first call, and later."""
    whole, losses, batch = PROGRAMS[name]()
    params, plainly, rank = whole, lambda f, **_: f, 0
    stage: Any = plainly
    if stages:
        mesh = data_mesh(2)
        params, stage, rank = sf.shard(whole, mesh, STRATEGIES["full_shard"]), sf.stage, mesh.get_rank()
    own = optree.tree_map(lambda x: x[ROWS * rank : ROWS * (rank + 1)], batch)

    leaves, values, norms = [variables(whole) for _ in range(ROWS)], [], []
    for i in range(ROWS):
        value = losses(plainly, leaves[i], *optree.tree_map(lambda x, i=i: x[i : i + 1], own))[0]
        value.backward()
        values.append(value.detach())
        norms.append(torch.stack([g.square().sum() for g in optree.tree_leaves(gradients(leaves[i]))]).sum().sqrt())
    off = []
    for _ in range(2):
        found = per_example(lambda params, *batch: losses(stage, params, *batch), params, *own)
        pairs = ((found.values, torch.stack(values)), (found.norms, torch.stack(norms)))
        off += [float(((got - want).abs() / want.abs().clamp(1)).max()) for got, want in pairs]
    return off


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in IN_STAGES_ONLY])
def test_whole(name: str) -> None:
    assert worst(difference(name, False)) < 1e-12


@two
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_stages(world: World, name: str) -> None:
    for off in world.run(difference, name, True):
        assert worst(off) < 1e-12, off


# --- modules ---


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, C, 3, padding=1), nn.GroupNorm(2, C), nn.ReLU(), nn.Conv2d(C, C, 3, groups=2, bias=False),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, 3),
        )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn, self.out = kind(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Attentive(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend, self.norm, self.out = nn.MultiheadAttention(6, 2, **options), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.attend.batch_first else x.transpose(0, 1)
        y = self.norm(y + self.attend(y, y, y, need_weights=False)[0])
        return self.out(y.mean(1 if self.attend.batch_first else 0))


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x)[:, 0])


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.second, self.third = nn.Bilinear(6, 6, 3), nn.PReLU(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.third(self.first(x).mT).mT
        return self.second(h, x).mean(1)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutional": (Convolutional, (3, 6, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM), (T, 6)),
    "gru": (lambda: Recurrent(nn.GRU), (T, 6)),
    "attentive": (lambda: Attentive(batch_first=True), (T, 6)),
    "attentive, by length": (lambda: Attentive(add_bias_kv=True), (T, 6)),
    "encoding": (Encoding, (T, 6)),
    "parametrized": (Parametrized, (T, 6)),
}


def difference_of_module(name: str) -> list[float]:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    mesh = data_mesh(2)
    rank = mesh.get_rank()
    x, y = images(*shape)[ROWS * rank :][:ROWS], labels(3)[ROWS * rank :][:ROWS]
    norms = []
    for i in range(ROWS):
        each_of(module(x[i : i + 1]), y[i : i + 1]).sum().backward()
        norms.append(
            torch.stack([p.grad.square().sum() for p in module.parameters() if p.grad is not None]).sum().sqrt()
        )
        module.zero_grad()
    # Outside of stages vmap can run neither LSTM nor GRU.
    forward = interop.functional(module, stages={name.upper()} if name in ("lstm", "gru") else None)
    params = forward.shard(mesh, STRATEGIES["full_shard"])
    found = [per_example(lambda p, x, y: each_of(forward(p, x), y), params, x, y).norms for _ in range(2)]
    return [float((got / torch.stack(norms) - 1).abs().max()) for got in found]


@two
@pytest.mark.parametrize("name", MODULES)
def test_modules(world: World, name: str) -> None:
    for off in world.run(difference_of_module, name):
        assert worst(off) < 1e-11, off
