"""Norms and clipped sums of single examples' gradients on the schedule of stages, beside one ordinary gradient.

    OMP_NUM_THREADS=1 python -m benchmarks.per_example

Two ranks, float32: a transformer, and a perceptron whose rows have one token. Memory is the peak that the operating
system gave to a rank above what it had with the shards of parameters; results, such as a gradient, are a part of it.
Time is a rank's processor's. `vmap of grad` has whole parameters, and gradients of one row at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from benchmarks.crew import Crew, Usage
from benchmarks.report import Goal, parser, publish
from shardfn.curvature.per_example import per_example

RANKS = 2
NETS = ("transformer", "perceptron")
KINDS = ("gradient", "norms", "clipped sum", "vmap of grad")
WORDS, HEADS = 4096, 8


def attending(p: Any, x: Tensor) -> Tensor:
    h = F.layer_norm(x, x.shape[-1:], p["gain"], p["shift"])
    q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (h @ p["qkv"]).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ p["out"]
    return x + F.gelu(F.rms_norm(x, x.shape[-1:], p["scale"]) @ p["up"]) @ p["down"]


def perceptron(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(F.linear(x, p["up"], p["bias"])) @ p["down"]


def embed(p: Any, tokens: Tensor) -> Tensor:
    return p["words"][tokens]


def makers(net: str, width: int, layers: int) -> Any:
    shapes: dict[str, tuple[int, ...]] = {"up": (4 * width, width), "bias": (4 * width,), "down": (4 * width, width)}
    if net == "transformer":
        shapes = {
            "gain": (width,), "shift": (width,), "scale": (width,), "qkv": (width, 3 * width), "out": (width, width),
            "up": (width, 4 * width), "down": (4 * width, width),
        }  # fmt: skip

    def layer(g: torch.Generator) -> Any:
        return {name: torch.randn(shape, generator=g) / width**0.5 for name, shape in shapes.items()}

    return {
        "embed": lambda g: {"words": torch.randn(WORDS, width, generator=g)},
        "layers": [layer] * layers,
        "head": lambda g: {"out": torch.randn(width, WORDS, generator=g) / width**0.5},
    }


def losses_of(stage: Any, net: str) -> Callable[..., Tensor]:
    first, middle = stage(embed), stage(attending if net == "transformer" else perceptron)
    last = stage(lambda p, x: x @ p["out"])

    def losses(params: Any, tokens: Tensor) -> Tensor:
        x = first(params["embed"], tokens)
        for p in sf.layers(params["layers"]):
            x = middle(p, x)
        each = F.cross_entropy(last(params["head"], x).flatten(0, 1), tokens.flatten(), reduction="none")
        return each.view(tokens.shape).sum(1)

    return losses


def program(net: str, kind: str, width: int, layers: int, rows: int) -> Callable[[], Any]:
    mesh = sf.make_mesh(data=RANKS, device="cpu")
    params = sf.init_sharded(makers(net, width, layers), 0, mesh, sf.full_shard("data"))
    tokens = torch.randint(0, WORDS, (rows, 64 if net == "transformer" else 1))
    losses, plain = losses_of(sf.stage, net), losses_of(lambda f: f, net)

    def run() -> Any:
        if kind == "gradient":
            return sf.grad(lambda p: losses(p, tokens).sum())(params)
        if kind == "vmap of grad":
            one = torch.func.grad(lambda p, t: plain(p, t[None])[0])
            whole = sf.unshard(params)
            return [sum(g.square().sum() for g in torch.utils._pytree.tree_leaves(one(whole, t))) for t in tokens]
        found = per_example(losses, params, tokens)
        return found.norms if kind == "norms" else found.clipped(float(found.norms.median()))

    return run


def built(
    usage: Usage, net: str, kind: str, width: int, layers: int, rows: int, rounds: int
) -> dict[str, Callable[..., Any]]:
    program(net, kind, 16, 2, 2)()  # memory of torch's first use does not count
    step = program(net, kind, width, layers, rows)
    usage.base = usage.again()

    def measured() -> tuple[float, float]:
        step()  # compares what is new
        usage.again()
        return usage.of(step, rounds)

    return {"measured": measured}


def main() -> None:
    options = parser("Memory and time of single examples' norms and clipped sums, beside a gradient's.")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    rows, goals = [], []
    for net in NETS:
        found = {}
        for kind in KINDS:
            batch = 8 if net == "transformer" else 64
            given = net, kind, args.width, args.layers, batch, args.rounds if kind != "vmap of grad" else 1
            with Crew(RANKS, built, *given, environment={"MALLOC_MMAP_THRESHOLD_": "1000000"}) as crew:
                found[kind] = tuple(max(each) for each in zip(*crew.turn("measured"), strict=True))
        base = found["gradient"]
        for kind, (peak, took) in found.items():
            figures = {"MB above shards": peak, "of the gradient's": peak / base[0], "CPU ms": took}
            rows.append({"": f"{net}: {kind}", **figures, "of its": took / base[1]})
        goals += [
            Goal(f"memory of norms / the gradient's, {net}", found["norms"][0] / base[0], 1.2),
            Goal(f"time of norms / the gradient's, {net}", found["norms"][1] / base[1], 1.3),
            Goal(f"time of a clipped sum / the gradient's, {net}", found["clipped sum"][1] / base[1], 2.3),
        ]
    publish(f"gradients of single examples, {RANKS} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
