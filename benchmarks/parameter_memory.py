"""The peak memory of parameters in addition to the shards: it is the same for 64 layers as for 4.

    OMP_NUM_THREADS=1 python -m benchmarks.parameter_memory

Two ranks, large weights, one row of data. Measured is the peak memory that the operating system gave to a rank, counted
from before the first parameter: once with the gradient of the input only, so that all memory in addition to the shards
is gathered parameters, and once with the gradients of the parameters too. The C library returns large blocks at once,
so that the system's figure is the memory in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

import shardfn as sf
from benchmarks.crew import Crew, Usage
from benchmarks.model import Params, perceptron
from benchmarks.report import Goal, parser, publish

RANKS = 2
SLOTS = 2  # buffers in the ring, with the default prefetch


def layer(width: int) -> Callable[[torch.Generator], Params]:
    return lambda g: {name: torch.randn(width, width, generator=g).div_(width) for name in ("up", "down")}


def model(width: int, layers: int) -> tuple[Any, Callable[..., Any]]:
    mesh = sf.make_mesh(data=RANKS, device="cpu")
    params = sf.init_sharded({"blocks": [layer(width)] * layers}, 0, mesh, sf.full_shard("data"))
    staged = sf.stage(perceptron)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = staged(p, x)
        return x.square().sum()

    def differentiated(params: Any, x: Tensor, argnums: int) -> Any:
        return sf.shard_map(sf.value_and_grad(loss, argnums), mesh=mesh, in_specs=(..., ...), out_specs=...)(params, x)

    return params, differentiated


def built(usage: Usage, width: int, layers: int) -> dict[str, Callable[..., Any]]:
    params, differentiated = model(width // 8, 2)  # memory of torch's first use does not count
    for argnums in (1, 0):
        differentiated(params, torch.ones(1, width // 8), argnums)
    del params, differentiated
    usage.base = usage.again()

    params, differentiated = model(width, layers)
    x = torch.ones(1, width)
    shards = [leaf.nbytes for leaf in optree.tree_leaves(params)]
    peaks = {"init": usage.peak()}
    for name, argnums in (("gather", 1), ("train", 0)):
        usage.again()
        for _ in range(3):
            differentiated(params, x, argnums)
        peaks[name] = usage.peak()
    return {"peaks": lambda: peaks | {"shards": sum(shards), "largest": max(shards) * RANKS}}


def measured(width: int, layers: int) -> dict[str, Any]:
    """Megabytes on the rank that takes most; memory "on top of" something is in units of the largest stage."""
    with Crew(RANKS, built, width, layers, environment={"MALLOC_MMAP_THRESHOLD_": "1000000"}) as crew:
        most = {name: max(peaks[name] for peaks in crew.turn("peaks")) / 1e6 for name in crew.turn("peaks")[0]}
    shards, largest = most["shards"], most["largest"]
    return {
        "layers": layers,
        "shards MB": shards,
        "largest stage MB": largest,
        "init MB": most["init"],
        "init, on top of shards": (most["init"] - shards) / largest,
        "step MB": most["gather"],
        "step, on top of shards": (most["gather"] - shards) / largest,
        "with gradients MB": most["train"],
        "step, on top of both": (most["train"] - 2 * shards) / largest,
    }


def main() -> None:
    options = parser("Peak memory of parameters on 2 ranks, compared with shards and two buffers of the largest stage.")
    options.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    options.add_argument("--width", type=int, default=2048)
    args = options.parse_args()
    rows = [measured(args.width, layers) for layers in args.layers]
    goals = [
        *(
            Goal(f"{row['layers']} layers: init on top of shards / largest stage", row["init, on top of shards"], 1.1)
            for row in rows
        ),
        *(
            Goal(
                f"{row['layers']} layers: gathered / {SLOTS} x largest stage",
                row["step, on top of shards"] / SLOTS,
                1.1,
            )
            for row in rows
        ),
        Goal(
            "gathered, the deepest / the least deep",
            rows[-1]["step, on top of shards"] / rows[0]["step, on top of shards"],
            1.05,
        ),
    ]
    last = [row["step, on top of both"] for row in rows]
    goals.append(Goal("with gradients, the deepest / the least deep", last[-1] / last[0], 1.05))
    publish(f"memory of parameters, {RANKS} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
