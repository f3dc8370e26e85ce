"""Products with derivatives on the schedule of stages, beside a gradient and beside products of composed stages.

    OMP_NUM_THREADS=1 python -m benchmarks.curvature

Two ranks, 24 layers with 50 million float32 parameters. Memory is the peak that the operating system gave to a rank
above what it had with the shards of parameters and direction; results, such as a gradient, are a part of it. The C
library returns large blocks at once, so that the system's figure is the memory in use. Time is a rank's processor's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # which torch loads in its first use of forward mode
from torch import Tensor

import shardfn as sf
from benchmarks.crew import Crew, Usage
from benchmarks.report import Goal, parser, publish
from shardfn import curvature as sc

RANKS = 2
KINDS = ("gradient", "jvp", "torch.func.jvp", "hvp", "hvp, remat", "hvp by torch.func", "ggn")


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def layer(width: int) -> Callable[[torch.Generator], Any]:
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    return lambda g: {name: torch.randn(shape, generator=g) / width**0.5 for name, shape in shapes.items()}


def program(kind: str, width: int, layers: int) -> Callable[[], Any]:
    mesh = sf.make_mesh(data=RANKS, device="cpu")
    params, v = (sf.init_sharded([layer(width)] * layers, seed, mesh, sf.full_shard("data")) for seed in (0, 1))
    x = torch.ones(32, width)
    staged = sf.stage(block, remat="remat" in kind)

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
        if kind == "gradient":
            return sf.grad(loss)(params)
        if "jvp" in kind or "torch" in kind:
            by = torch.func.jvp if "torch" in kind else sf.jvp
            return by(sf.grad(loss) if "hvp" in kind else loss, (params,), (v,))
        return (sc.ggn(outputs, curve, params) if kind == "ggn" else sc.hvp(loss, params)) @ v

    mapped = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)
    return lambda: mapped(params, v)


def built(usage: Usage, kind: str, width: int, layers: int, rounds: int) -> dict[str, Callable[..., Any]]:
    program(kind, 8, 2)()  # memory of torch's first use does not count
    step = program(kind, width, layers)
    usage.base = usage.again()

    return {"measured": lambda: usage.of(step, rounds)}


def main() -> None:
    options = parser("Memory and time of jvp and Hessian-vector products, beside a gradient's.")
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    found = {}
    for kind in KINDS:
        given = kind, args.width, args.layers, args.rounds
        with Crew(RANKS, built, *given, environment={"MALLOC_MMAP_THRESHOLD_": "1000000"}) as crew:
            found[kind] = tuple(max(each) for each in zip(*crew.turn("measured"), strict=True))
    base = found["gradient"]
    rows = [
        {
            "": kind,
            "MB above shards": peak,
            "of the gradient's": peak / base[0],
            "CPU ms": took,
            "of its": took / base[1],
        }
        for kind, (peak, took) in found.items()
    ]
    goals = [
        Goal("memory of a Hessian-vector product / the gradient's", found["hvp"][0] / base[0], 2),
        Goal("time of a Hessian-vector product / the gradient's", found["hvp"][1] / base[1], 2.5),
        Goal("memory of a Gauss-Newton product / the gradient's", found["ggn"][0] / base[0], 2),
        Goal("time of a Gauss-Newton product / the gradient's", found["ggn"][1] / base[1], 2.5),
        Goal("memory of a forward's jvp / the gradient's", found["jvp"][0] / base[0], 1),
    ]
    publish(f"derivatives of a loss, {RANKS} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
