"""Muon with each matrix assigned to one rank, compared with all ranks orthogonalising all matrices.

    OMP_NUM_THREADS=1 python -m benchmarks.muon

The matrices of 8 transformer layers of width 512 are fully sharded over 4 ranks. The naive way gathers each flat shard,
processes every matrix on every rank, and keeps its own piece. Both take turns in the same processes; times are medians
of all rounds. Their results must agree. The benchmark also reports the balance of work between ranks, for these
matrices and for those of published models: the FLOP of the matrices assigned to each rank, by torch's FLOP counter. For
these matrices, the FLOP are counted while they run.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

import shardfn as sf
from benchmarks.crew import Crew, Usage
from benchmarks.model import ORTHOGONALISES, SEED, Params
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import KEEPS_MEMORY
from shardfn import optim
from shardfn.optim.muon import cost, orthogonalised
from shardfn.optim.owners import assigned
from shardfn.shards.layout import is_flat

RATE, MOMENTUM, DECAY, ITERATIONS, DTYPE = 0.02, 0.95, 0.1, 5, ORTHOGONALISES
LAYERS = 8
Shapes = dict[str, tuple[int, int]]
Step = Callable[[], Any]


def llama(d: int, hidden: int, kv: int) -> Shapes:
    attention = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d)}
    return attention | {"gate": (hidden, d), "up": (hidden, d), "down": (d, hidden)}


LAYER = llama(512, 1408, 512)
GPT2: Shapes = {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072), "down": (3072, 768)}
PUBLISHED = {
    "GPT-2 small": (12, GPT2),
    "Llama 2 7B": (32, llama(4096, 11008, 4096)),
    "Llama 3 8B": (32, llama(4096, 14336, 1024)),
}


# --- both ways ---


def by_assignment(params: Any, grads: Any) -> tuple[Any, Step]:
    optimizer = optim.muon(RATE, momentum=MOMENTUM, weight_decay=DECAY, iterations=ITERATIONS, dtype=DTYPE)
    state = optimizer.init(params)

    def run() -> None:
        nonlocal state
        _, state = optimizer.step(params, grads, state)

    return params, run


def by_everyone(params: Any, grads: Any) -> tuple[Any, Step]:
    flats, gs = optree.tree_leaves(params, is_leaf=is_flat), optree.tree_leaves(grads)
    ms = [torch.zeros_like(g) for g in gs]

    def run() -> None:
        torch._foreach_lerp_(ms, gs, 1 - MOMENTUM)
        updates = torch._foreach_lerp(gs, ms, MOMENTUM)
        torch._foreach_mul_([flat.values for flat in flats], 1 - RATE * DECAY)
        for flat, update in zip(flats, updates, strict=True):
            whole = torch.empty(flat.layout.padded, dtype=DTYPE)
            dist.all_gather_into_tensor(whole, update.to(DTYPE))
            for x in flat.layout.views(whole):
                x.copy_(orthogonalised(x, ITERATIONS, DTYPE))
            add_own(flat, whole)

    return params, run


def add_own(flat: Any, directions: Tensor) -> None:
    """Updates each parameter's elements on this rank."""
    own = flat.layout.views(directions)
    mine = sf.shards.local_parameters(flat)
    paths = {entry.path: number for number, entry in enumerate(flat.layout.entries)}
    for part in flat.layout.ranges(dist.get_rank()):
        rows, columns = part.shape
        o = own[paths[part.path]].reshape(-1)[part.start : part.stop].to(flat.values.dtype)
        mine[part.path].add_(o, alpha=-RATE * max(1.0, rows / columns) ** 0.5)


# --- what the processes do in a turn ---


def built(usage: Usage) -> dict[str, Callable[..., Any]]:
    del usage
    mesh = sf.make_mesh(data=-1, device="cpu")

    def made(seed: int) -> Any:
        return sf.init_sharded({"blocks": [layer] * LAYERS}, seed, mesh, sf.full_shard("data"))

    ways = {name: way(made(SEED), made(SEED + 1)) for name, way in WAYS.items()}
    return {
        "compare": lambda rounds: compare({name: run for name, (_, run) in ways.items()}, rounds),
        "difference": lambda: difference(*(params for params, _ in ways.values())),
        "operations": lambda name: counted(ways[name][1]),
        "sent": lambda: sent(ways["assigned"][1]),
        "gathered": lambda: gathered(ways["everyone"][0], mesh),
    }


WAYS = {"assigned": by_assignment, "everyone": by_everyone}


def layer(g: torch.Generator) -> Params:
    return {name: torch.randn(shape, generator=g) / 20 for name, shape in LAYER.items()}


def compare(runs: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step until all ranks are done."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            if number:  # the first one makes the plan
                seconds[name].append(time.perf_counter() - began)
    return seconds


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of a parameter between both ways."""
    pairs = zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def counted(run: Step) -> int:
    """The FLOP of a step's matrix products on this rank."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def sent(run: Step) -> int:
    with sf.collectives.ledger() as log:
        run()
    return log.bytes()


def gathered(params: Any, mesh: DeviceMesh) -> int:
    """The bytes that a rank sends for all-gathers: its pieces, to each other rank."""
    pieces = sum(flat.layout.piece for flat in optree.tree_leaves(params, is_leaf=is_flat))
    return pieces * DTYPE.itemsize * (mesh.size() - 1)


# --- the balance ---


def imbalance(work: Sequence[float]) -> float:
    """How much more work the busiest rank has than the mean, as a fraction."""
    return max(work) / statistics.fmean(work) - 1


def planned(layers: int, shapes: Shapes, ranks: int) -> list[int]:
    """The FLOP of each rank by the plan, without making any matrix."""
    matrices = layers * list(shapes.values())
    work = [0] * ranks
    for shape, owner in zip(matrices, assigned([*map(cost, matrices)], ranks), strict=True):
        work[owner] += operations(shape)
    return work


@functools.cache
def operations(shape: tuple[int, int]) -> int:
    """The FLOP of one matrix, counted on the meta device."""
    x = torch.empty(shape, device="meta")
    return counted(lambda: orthogonalised(x, ITERATIONS, DTYPE))


def balance_row(name: str, work: Sequence[int]) -> dict[str, Any]:
    return {
        "balance": name,
        "ranks": len(work),
        "least Gflop": min(work) / 1e9,
        "mean Gflop": statistics.fmean(work) / 1e9,
        "most Gflop": max(work) / 1e9,
        "most over mean %": imbalance(work) * 100,
    }


def main() -> None:
    options = parser("Muon with each matrix on one rank, compared with all matrices on every rank.")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--rounds", type=int, default=15)
    args = options.parse_args()
    with Crew(args.ranks, built, environment=KEEPS_MEMORY) as crew:
        by_rank = crew.turn("compare", args.rounds)
        apart = max(crew.turn("difference"))
        work = {name: crew.turn("operations", name) for name in WAYS}
        moved = {"assigned": max(crew.turn("sent")), "everyone": max(crew.turn("gathered"))}
    # A step changes an element by about RATE / sqrt(512), and parameters are stored in float32.
    assert apart < 1e-6, f"both ways differ by {apart}"
    assert work["assigned"] == planned(LAYERS, LAYER, args.ranks), "the work that runs is the planned work"
    times = {name: [max(each) for each in zip(*(found[name] for found in by_rank), strict=True)] for name in WAYS}
    took = {name: statistics.median(each) * 1e3 for name, each in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["assigned"], times["everyone"], strict=True))
    titles = {"assigned": "each on one rank, two all-to-alls", "everyone": "all on every rank, all-gathers"}
    rows: list[dict[str, Any]] = [
        {
            "matrices": titles[name],
            "step ms": took[name],
            "/ naive": took[name] / took["everyone"],
            "most Gflop on a rank": max(work[name]) / 1e9,
            "most MB sent by a rank": moved[name] / 1e6,
        }
        for name in WAYS
    ]
    rows.append(balance_row(f"{LAYERS} layers of 512, as they ran", work["assigned"]))
    for name, (layers, shapes) in PUBLISHED.items():
        rows += [balance_row(f"{name}, {layers} layers", planned(layers, shapes, ranks)) for ranks in (4, 8)]
    goals = [
        Goal("step / naive step", ratio, 1 / 1.5),
        Goal("operations of the busiest rank over the mean", imbalance(work["assigned"]), 0.15),
        Goal("largest difference of a parameter between both ways", apart, 1e-6),
    ]
    publish(f"a step of Muon on {LAYERS * len(LAYER)} matrices, {args.ranks} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
