"""Shampoo and SOAP beside Muon and AdamW: time of a step on 1 and 2 ranks, and the balance of work and state.

    OMP_NUM_THREADS=1 python -m benchmarks.shampoo

The matrices of 4 transformer layers of width 256 are fully sharded. The optimizers take turns in the same processes,
10 steps at a time, in which Shampoo and SOAP decompose their matrices once; times are medians of all rounds. Parameters
must be the same on both numbers of ranks. Balance is that of the work and the state that the plan gives to each rank,
for these matrices and for those of published models, as operations are counted by the plan.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist

import shardfn as sf
from benchmarks.crew import Crew, Usage
from benchmarks.model import ORTHOGONALISES, SEED, Params
from benchmarks.muon import PUBLISHED, Shapes, imbalance, llama
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import KEEPS_MEMORY
from shardfn import optim
from shardfn.optim.owners import assigned
from shardfn.optim.shampoo import cost

EVERY, LAYERS, LAYER = 10, 4, llama(256, 704, 256)
OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "adamw": lambda: optim.adamw(1e-3),
    "muon": lambda: optim.muon(1e-3, dtype=ORTHOGONALISES),
    "shampoo": lambda: optim.shampoo(1e-3, every=EVERY),
    "soap": lambda: optim.soap(1e-3, every=EVERY),
}


# --- what the processes do in a turn ---


def built(usage: Usage) -> dict[str, Callable[..., Any]]:
    del usage
    mesh = sf.make_mesh(data=-1, device="cpu")
    runs = {}
    for name, make in OPTIMIZERS.items():
        params = sf.init_sharded({"blocks": [layer] * LAYERS}, SEED, mesh, sf.full_shard("data"))
        optimizer = make()
        runs[name] = [optimizer, params, optimizer.init(params)]
    return {
        "steps": lambda name: steps(runs[name]),
        "held": lambda name: sum(x.nbytes for x in optree.tree_leaves(runs[name][2]) if isinstance(x, torch.Tensor)),
        "norms": lambda name: list(optim.norms(runs[name][1]).parameters.values()),
    }


def layer(g: torch.Generator) -> Params:
    return {name: torch.randn(shape, generator=g) / 20 for name, shape in LAYER.items()}


def steps(run: list[Any]) -> float:
    """Seconds of a step, over as many as there are from one decomposition to the next, until all ranks are done."""
    optimizer, params, state = run
    dist.barrier()
    began = time.perf_counter()
    for _ in range(EVERY):
        params, state = optimizer.step(params, optree.tree_map(torch.sin, params), state)
    dist.barrier()
    run[1:] = params, state
    return (time.perf_counter() - began) / EVERY


# --- the balance ---


def blocks(shapes: Shapes, layers: int, block: int) -> list[tuple[int, ...]]:
    sides = [[[min(block, n - at) for at in range(0, n, block)] for n in shape] for shape in shapes.values()]
    return layers * [tuple(place) for each in sides for place in itertools.product(*each)]


def balance(name: str, cut: Sequence[tuple[int, ...]], ranks: int) -> dict[str, Any]:
    """The excess of the busiest rank over the mean: of operations, of those of decompositions, and of state."""
    work, cubes, state = Counter[int](), Counter[int](), Counter[int]()
    for shape, owner in zip(cut, assigned([*map(cost, cut)], ranks), strict=True):
        work[owner] += cost(shape)
        cubes[owner] += sum(n**3 for n in shape)
        state[owner] += 2 * math.prod(shape) + 2 * sum(n * n for n in shape)
    found = {"work": work, "decompositions": cubes, "state": state}
    return {"balance": name, "ranks": ranks, "blocks": len(cut)} | {
        f"{kind}: most over mean %": 100 * imbalance([each[rank] for rank in range(ranks)])
        for kind, each in found.items()
    }


def main() -> None:
    options = parser("Shampoo and SOAP beside Muon and AdamW, on 1 and 2 ranks.")
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    took: dict[tuple[str, int], float] = {}
    held: dict[tuple[str, int], list[int]] = {}
    norms: dict[tuple[str, int], list[float]] = {}
    for ranks in (1, 2):
        with Crew(ranks, built, environment=KEEPS_MEMORY) as crew:
            rounds = [{name: max(crew.turn("steps", name)) for name in OPTIMIZERS} for _ in range(args.rounds + 1)]
            for name in OPTIMIZERS:
                took[name, ranks] = statistics.median(each[name] for each in rounds[1:]) * 1e3
                held[name, ranks] = crew.turn("held", name)
                norms[name, ranks] = crew.turn("norms", name)[0]
    rows: list[dict[str, Any]] = [
        {
            "optimizer": name,
            "ranks": ranks,
            "step ms": took[name, ranks],
            "/ adamw": took[name, ranks] / took["adamw", ranks],
            "/ muon": took[name, ranks] / took["muon", ranks],
            "/ 1 rank": took[name, ranks] / took[name, 1],
            "most MB of state": max(held[name, ranks]) / 1e6,
            "sum MB": sum(held[name, ranks]) / 1e6,
        }
        for name, ranks in took
    ]
    here = balance(f"{LAYERS} layers of 256", blocks(LAYER, LAYERS, 1024), 2)
    rows.append(here)
    for (name, (layers, shapes)), ranks in itertools.product(PUBLISHED.items(), (8, 64)):
        rows.append(balance(f"{name}, {layers} layers, cut to 1024", blocks(shapes, layers, 1024), ranks))
    apart = max(abs(a / b - 1) for name in OPTIMIZERS for a, b in zip(norms[name, 1], norms[name, 2], strict=True))
    eight = next(row for row in rows if row.get("balance", "").startswith("Llama 3") and row["ranks"] == 8)
    goals = [
        Goal("shampoo: step on 2 ranks / on 1", took["shampoo", 2] / took["shampoo", 1], 0.75),
        Goal("soap: step on 2 ranks / on 1", took["soap", 2] / took["soap", 1], 0.75),
        Goal("operations of the busiest rank over the mean", here["work: most over mean %"] / 100, 0.15),
        Goal("the same, Llama 3 8B on 8 ranks", eight["work: most over mean %"] / 100, 0.01),
        Goal("state of the rank that has most over the mean", here["state: most over mean %"] / 100, 0.15),
        Goal("largest relative difference of a parameter's norm between 1 and 2 ranks", apart, 1e-5),
    ]
    publish(f"a step on {LAYERS * len(LAYER)} matrices of 4 layers", rows, goals, args.json)


if __name__ == "__main__":
    main()
