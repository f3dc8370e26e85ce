"""Transformers as pure functions of stages' parameters, with optional tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn import parallel
from shardfn.collectives.functional import axis_size, local_slice, psum, pvary
from shardfn.mesh.grid import AxisName
from shardfn.mesh.spec import P, by_path
from shardfn.shapes.sizes import Shape
from shardfn.stages.stage import layers, stage

Params = dict[str, Any]

SPECS = by_path(
    [
        (r".*\.(q|k|v|gate|up|q_bias|k_bias|v_bias|up_bias)$", P(None, "tensor")),
        (r".*\.(o|down)$|embed\.table|head\.table", P("tensor")),
    ],
    strict=False,
)


def tree(shape: Shape, dtype: torch.dtype) -> Params:
    """Returns all parameters, whole, without memory."""

    def empty_params(**sizes: Sequence[int]) -> Params:
        return {name: torch.empty(*size, dtype=dtype, device="meta") for name, size in sizes.items()}

    d, f, q, k = shape.width, shape.hidden, shape.heads * shape.head, shape.groups * shape.head
    attention: dict[str, Sequence[int]] = {"q": (d, q), "k": (d, k), "v": (d, k), "o": (q, d)}
    first, last = {"table": (shape.vocabulary, d)}, {"norm": (d,)}
    if shape.gpt:
        biases = {"q_bias": (1, q), "k_bias": (1, k), "v_bias": (1, k), "o_bias": (d,)}
        norms = dict.fromkeys(("norm1", "shift1", "norm2", "shift2"), (d,))
        block = attention | biases | norms | {"up": (d, f), "up_bias": (1, f), "down": (f, d), "down_bias": (d,)}
        first, last = first | {"places": (shape.context, d)}, last | {"shift": (d,)}
    else:
        e = (shape.experts,) if shape.experts else ()
        parts: dict[str, Sequence[int]] = {"gate": (*e, d, f), "up": (*e, d, f), "down": (*e, f, d)}
        block = attention | {"norm1": (d,), "norm2": (d,)}
        block |= {"router": (d, shape.experts)} if e else parts
    head = last if shape.tied else last | {"table": (shape.vocabulary, d)}

    def layer() -> Params:
        return empty_params(**block) | ({"experts": empty_params(**parts)} if shape.experts else {})

    return {
        "embed": empty_params(**first),
        "blocks": [layer() for _ in range(shape.layers)],
        "head": empty_params(**head),
    }


def loss_of(shape: Shape, tensor: AxisName = (), data: AxisName = (), **options: Any) -> Callable[..., Tensor]:
    """Returns the loss `(params, tokens [b, t], targets [b, t]) -> []`, a sum over all tokens of all ranks.

    Args:
        shape: of the model.
        tensor: the axis that cuts matrices, and sequences between layers.
        data: the axes that shard the batch.
        **options: of the blocks' stage, and, except for `remat`, of the others.

    Raises:
        ValueError: the model cannot be sharded over `tensor`.
    """
    if tensor and shape.experts:
        raise ValueError(f"{shape.name} has experts, which are not sharded over {tensor!r} here: leave that axis out")
    others = {name: value for name, value in options.items() if name != "remat"}
    first, last = stage(_embed(shape, tensor), **others), stage(_head(shape, tensor), **others)
    block = stage(_block(shape, tensor), **options)

    def loss(params: Params, tokens: Tensor, targets: Tensor) -> Tensor:
        x = first(params["embed"], tokens)
        turns = None if shape.gpt else _turns(tokens.shape[1], shape.head, x.dtype, x.device)
        for p in layers(params["blocks"]):
            x = block(p, x, turns)
        table = params["embed"] if shape.tied else None
        return psum(last(params["head"], table, x, targets), data)

    return loss


def _embed(shape: Shape, tensor: AxisName) -> Callable[..., Tensor]:
    sequence = 1 if tensor else None

    def embed(p: Params, tokens: Tensor) -> Tensor:
        x = parallel.embedding(tokens, p["table"], tensor, sequence=sequence)
        if not shape.gpt:
            return x
        places = p["places"][: tokens.shape[1]]
        return x + (local_slice(places, tensor, dim=0) if tensor else places)

    return embed


def _head(shape: Shape, tensor: AxisName) -> Callable[..., Tensor]:
    def head(p: Params, table: Params | None, x: Tensor, targets: Tensor) -> Tensor:
        x = _normed(shape, x, pvary(p["norm"], tensor), pvary(p["shift"], tensor) if shape.gpt else None)
        matrix = (p if table is None else table)["table"].mT
        return parallel.cross_entropy(x, matrix, targets, tensor, sequence=1 if tensor else None).sum()

    return head


def _normed(shape: Shape, x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    return F.layer_norm(x, (shape.width,), weight, shift) if shape.gpt else F.rms_norm(x, (shape.width,), weight, 1e-5)


def _block(shape: Shape, tensor: AxisName) -> Callable[..., Tensor]:
    sequence = 1 if tensor else None

    def attended(p: Params, h: Tensor, turns: Tensor | None) -> Tensor:
        def heads(name: str, number: int) -> Tensor:
            y = h @ p[name] + p[f"{name}_bias"] if shape.gpt else h @ p[name]
            return y.unflatten(-1, (number // axis_size(tensor), shape.head)).transpose(1, 2)

        q, k, v = heads("q", shape.heads), heads("k", shape.groups), heads("v", shape.groups)
        if turns is not None:
            q, k = _turned(q, turns), _turned(k, turns)
        return parallel.attention(q, k, v).transpose(1, 2).flatten(2) @ p["o"]

    def block(p: Params, x: Tensor, turns: Tensor | None) -> Tensor:
        norms = [pvary(p[name], tensor) if name in p else None for name in ("norm1", "shift1", "norm2", "shift2")]
        h = parallel.to_parallel(_normed(shape, x, *norms[:2]), tensor, sequence=sequence)  # type: ignore[arg-type]
        y = parallel.from_parallel(attended(p, h, turns), tensor, sequence=sequence)
        x = x + (y + pvary(p["o_bias"], tensor) if shape.gpt else y)
        h = _normed(shape, x, *norms[2:])  # type: ignore[arg-type]
        if shape.experts:
            return x + _mixture(shape, p, h)
        h = parallel.to_parallel(h, tensor, sequence=sequence)
        y = parallel.from_parallel(_fed(shape, p, h), tensor, sequence=sequence)
        return x + (y + pvary(p["down_bias"], tensor) if shape.gpt else y)

    return block


def _fed(shape: Shape, p: Params, h: Tensor) -> Tensor:
    if shape.gpt:
        return F.gelu(h @ p["up"] + p["up_bias"]) @ p["down"]
    return (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def _mixture(shape: Shape, p: Params, h: Tensor) -> Tensor:
    """A mixture whose experts all get equally many tokens, as a balanced router gives them."""
    tokens = h.flatten(0, 1)[None]
    routing = parallel.route(tokens, p["router"], shape.chosen)
    capacity = -(-tokens.shape[1] * shape.chosen // shape.experts)
    mixed = parallel.mixture_of_experts(
        lambda q, x: _fed(shape, q, x), p["experts"], tokens, routing, capacity=capacity
    )
    return mixed.view_as(h)


def _turns(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and sines of rotary positions: `[2, t, width / 2]`."""
    rates = 500000.0 ** (torch.arange(width // 2, device=device) / (-width // 2))
    angles = torch.outer(torch.arange(length, device=device), rates)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * turns[0] - b * turns[1], a * turns[1] + b * turns[0]), -1)
