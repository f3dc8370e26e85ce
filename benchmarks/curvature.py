"""Products with derivatives on the schedule of stages, beside a gradient and beside products of composed stages.

    OMP_NUM_THREADS=1 python -m benchmarks.curvature

Two ranks, float32: 24 perceptrons with 50 million parameters and few rows, and a transformer with 6 million and 512
tokens a rank, whose memory is activations. Memory is the peak that the operating system gave to a rank
above what it had with the shards of parameters and direction; results, such as a gradient, are a part of it. The C
library returns large blocks at once, so that the system's figure is the memory in use. Time is a rank's processor's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # which torch loads in its first use of forward mode
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfn as sf
from benchmarks.crew import Crew, Usage
from benchmarks.report import Goal, parser, publish
from shardfn import curvature as sc

RANKS = 2
KINDS = {
    "perceptrons": ("gradient", "jvp", "torch.func.jvp", "hvp", "hvp, remat", "hvp by torch.func", "ggn"),
    "transformer": ("gradient", "gradient, remat", "hvp", "hvp, remat", "hvp by torch.func", "ggn"),
}


def perceptron(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def attending(p: Any, x: Tensor) -> Tensor:
    h = F.rms_norm(x, x.shape[-1:], p["norm"])
    q, k, v = (h @ p["qkv"]).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]
    return x + F.silu(x @ p["up"]) @ p["down"]


BLOCKS = {"perceptrons": perceptron, "transformer": attending}


def layer(net: str, width: int) -> Callable[[torch.Generator], Any]:
    shapes: dict[str, tuple[int, ...]] = {"up": (width, 4 * width), "down": (4 * width, width)}
    if net == "transformer":
        shapes |= {"norm": (width,), "qkv": (width, 3 * width), "out": (width, width)}
    return lambda g: {name: torch.randn(shape, generator=g) / width**0.5 for name, shape in shapes.items()}


def program(net: str, kind: str, width: int, layers: int) -> Callable[[], Any]:
    mesh = sf.make_mesh(data=RANKS, device="cpu")
    params, v = (sf.init_sharded([layer(net, width)] * layers, seed, mesh, sf.full_shard("data")) for seed in (0, 1))
    x = torch.ones(32, width) if net == "perceptrons" else torch.linspace(-1, 1, 512 * width).view(2, 256, width).sin()
    staged = sf.stage(BLOCKS[net], remat="remat" in kind)

    def outputs(params: Any) -> Tensor:
        y = x
        for p in sf.layers(params):
            y = staged(p, y)
        return y

    def curve(y: Tensor) -> Tensor:
        return sf.psum(y.square().sum(), "data")

    def loss(params: Any) -> Tensor:
        return curve(outputs(params))

    def run(params: Any, v: Any) -> Any:
        if "gradient" in kind:
            return sf.grad(loss)(params)
        if kind == "hvp by torch.func":
            with sdpa_kernel(SDPBackend.MATH):
                return torch.func.jvp(sf.grad(loss), (params,), (v,))
        if "jvp" in kind:
            return (torch.func.jvp if "torch" in kind else sf.jvp)(loss, (params,), (v,))
        return (sc.ggn(outputs, curve, params) if kind == "ggn" else sc.hvp(loss, params)) @ v

    mapped = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)
    return lambda: mapped(params, v)


def built(usage: Usage, net: str, kind: str, width: int, layers: int, rounds: int) -> dict[str, Callable[..., Any]]:
    program(net, kind, 8, 2)()  # memory of torch's first use does not count
    step = program(net, kind, width, layers)
    usage.base = usage.again()

    return {"measured": lambda: usage.of(step, rounds)}


def main() -> None:
    options = parser("Memory and time of jvp and Hessian-vector products, beside a gradient's.")
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    sizes = {"perceptrons": (args.width, args.layers), "transformer": (args.width // 2, args.layers // 3)}
    found: dict[tuple[str, str], tuple[float, ...]] = {}
    rows = []
    for net, kinds in KINDS.items():
        for kind in kinds:
            given = net, kind, *sizes[net], args.rounds
            with Crew(RANKS, built, *given, environment={"MALLOC_MMAP_THRESHOLD_": "100000"}) as crew:
                found[net, kind] = tuple(max(each) for each in zip(*crew.turn("measured"), strict=True))
            (peak, took), base = found[net, kind], found[net, "gradient"]
            rows.append(
                {
                    "": f"{net}: {kind}",
                    "MB above shards": peak,
                    "of the gradient's": peak / base[0],
                    "CPU ms": took,
                    "of its": took / base[1],
                }
            )

    def ratio(net: str, kind: str, what: int, under: str = "gradient") -> float:
        return found[net, kind][what] / found[net, under][what]

    goals = [
        Goal("memory of a Hessian-vector product / the gradient's", ratio("perceptrons", "hvp", 0), 2),
        Goal("time of a Hessian-vector product / the gradient's", ratio("perceptrons", "hvp", 1), 2.5),
        Goal("memory of a Gauss-Newton product / the gradient's", ratio("perceptrons", "ggn", 0), 2),
        Goal("time of a Gauss-Newton product / the gradient's", ratio("perceptrons", "ggn", 1), 2.5),
        Goal("memory of a forward's jvp / the gradient's", ratio("perceptrons", "jvp", 0), 1),
        Goal("transformer: memory of a Hessian-vector product / the gradient's", ratio("transformer", "hvp", 0), 2),
        Goal("transformer: the same, both with remat", ratio("transformer", "hvp, remat", 0, "gradient, remat"), 2),
        Goal("transformer: memory of a Gauss-Newton product / the gradient's", ratio("transformer", "ggn", 0), 2),
        Goal("transformer: time of a Hessian-vector product / the gradient's", ratio("transformer", "hvp", 1), 2.5),
    ]
    publish(f"derivatives of a loss, {RANKS} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
