"""Runs that have the same bits on any mesh: digests after some steps, and what such a step costs.

    OMP_NUM_THREADS=1 python -m benchmarks.exact

First, a small GPT is trained on 1, 2 and 4 ranks, with every strategy and some optimizers, on the same 8 parts of each
batch. The figure is the number of different digests of all parameters and losses of an optimizer; the same runs without
exact sums are counted beside it.

Then a GPT with 34 million parameters takes exact steps, and steps that accumulate as many micro-batches, whose
gradients are reduced one by one (`defer="nothing"`). They take turns, in processes of their own. Times are medians, and
ratios those of medians; bytes are those that a rank sends, by the ledger. They differ by what the buffers are padded.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage
from benchmarks.model import SEED, Config, makers, staged
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import KEEPS_MEMORY
from shardfn import P

PARTS, ROWS = 8, 16
SMALL = Config(vocabulary=512, width=64, layers=2, heads=4, hidden=176, context=32)
AXES = ("replica", "shard")
STRATEGIES: dict[str, sf.Placement] = {
    "ddp": sf.ddp(AXES),
    "zero1": sf.strategies.zero1(AXES),
    "full_shard": sf.full_shard(AXES),
    "hybrid_shard": sf.hybrid_shard(shard="shard", replica="replica"),
    "hfsdp": sf.strategies.hfsdp(shard="shard", replica="replica"),
    "hpz": sf.strategies.hpz(shard="shard", replica="replica"),
}
OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "adamw, clipped": lambda: so.chain(so.clip_by_global_norm(0.5), so.adamw(1e-3)),
    "muon, adamw8bit for the rest": lambda: so.masked(
        so.muon(0.01, dtype=None), lambda path, shape: len(shape) == 2 and "blocks" in path, so.adamw8bit(1e-3)
    ),
    "adafactor": lambda: so.adafactor(1e-3),
}
FEW = ("full_shard", "hybrid_shard")  # of the optimizers after the first


def digest(tree: Any) -> str:
    leaves = [x.detach().contiguous().reshape(-1) for x in optree.tree_leaves(sf.unshard(tree))]
    return hashlib.sha256(b"".join(x.view(torch.uint8).numpy().tobytes() for x in leaves)).hexdigest()[:16]


def mesh() -> Any:
    n = dist.get_world_size()
    return sf.make_mesh(replica=2 if n == 4 else 1, shard=n // 2 if n == 4 else n, device="cpu")


def rows_of(config: Config, number: int, rows: int) -> Tensor:
    """This rank's share of the rows of a batch."""
    draw = torch.Generator().manual_seed(number)
    every = torch.randint(0, config.vocabulary, (rows, config.context + 1), generator=draw)
    return every.chunk(dist.get_world_size())[dist.get_rank()]


def step_of(config: Config, on: Any, optimizer: so.Optimizer, parts: int) -> Callable[..., Any]:
    """A step `(params, state, rows) -> (params, state, loss)`, exact or with as many micro-batches."""
    mean = staged(config)
    micro: Any = "exact" if parts else PARTS // dist.get_world_size()

    def loss(p: Any, rows: Tensor) -> Any:
        total, count = mean(p, rows) * len(rows), len(rows)
        return (total, count) if parts else (sf.psum(total, AXES), sf.psum(count, AXES))

    @sf.shard_map(mesh=on, in_specs=(..., ..., P(AXES)), out_specs=...)
    def step(params: Any, state: Any, rows: Tensor) -> Any:
        value, grads = sf.accumulate(loss, rows, micro=micro, defer="nothing")(params)
        return *optimizer.step(params, grads, state), value

    return step


def trained(strategy: str, name: str, parts: int, steps: int) -> str:
    """A digest of parameters and losses."""
    on, optimizer = mesh(), OPTIMIZERS[name]()
    params = sf.init_sharded(makers(SMALL), SEED, on, STRATEGIES[strategy].with_exact(parts))
    state, values, step = optimizer.init(params), [], step_of(SMALL, on, optimizer, parts)
    for number in range(steps):
        params, state, value = step(params, state, rows_of(SMALL, number, ROWS))
        values.append(value)
    return digest([params, torch.stack(values)])


def digests(usage: Usage) -> dict[str, Callable[..., Any]]:
    del usage
    return {"trained": trained}


def steps_of(usage: Usage, parts: int) -> dict[str, Callable[..., Any]]:
    """Steps of the larger model, which has 8 rows."""
    config, on, optimizer = Config(), mesh(), so.adamw(1e-4)
    params = sf.init_sharded(makers(config), SEED, on, STRATEGIES["full_shard"].with_exact(parts))
    step, state, rows = step_of(config, on, optimizer, parts), optimizer.init(params), rows_of(config, 0, 8)

    def run() -> float:
        nonlocal params, state
        dist.barrier()
        began = time.perf_counter()
        params, state, _ = step(params, state, rows)
        return time.perf_counter() - began

    def sent() -> int:
        with sf.collectives.ledger() as log:
            run()
        return log.bytes(op="reduce_scatter") + log.bytes(op="all_gather")

    return {"run": run, "sent": sent, "peak": lambda: usage.peak() / 1e6}


def counted(steps: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """How many different digests there are, with exact sums and without."""
    found: dict[tuple[str, int], set[str]] = {}
    runs = dict.fromkeys(OPTIMIZERS, 0)
    for ranks in (1, 2, 4):
        with Crew(ranks, digests, environment=KEEPS_MEMORY) as crew:
            for i, name in enumerate(OPTIMIZERS):
                for strategy in FEW if i else STRATEGIES:
                    runs[name] += 1
                    for parts in (PARTS, 0):
                        found.setdefault((name, parts), set()).update(
                            crew.turn("trained", strategy, name, parts, steps)
                        )
    rows = [
        {"optimizer": name, "runs": n, "digests": len(found[name, PARTS]), "not exact": len(found[name, 0])}
        for name, n in runs.items()
    ]
    goals = [Goal(f"{name}: different digests", len(found[name, PARTS]), 1) for name in OPTIMIZERS]
    return rows, goals


def measured(ranks: int, rounds: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Time, memory and bytes of an exact step beside those of one that is not."""
    crews = {parts: Crew(ranks, steps_of, parts, environment=KEEPS_MEMORY) for parts in (PARTS, 0)}
    seconds: dict[int, list[float]] = {parts: [] for parts in crews}
    for number in range(rounds + 1):
        for parts, crew in crews.items():
            slowest = max(crew.turn("run"))
            seconds[parts] += [slowest] if number else []  # the first is a warm-up
    facts = {parts: (crew.turn("peak"), crew.turn("sent")) for parts, crew in crews.items()}
    for crew in crews.values():
        crew.__exit__(None, None, None)
    rows = [
        {
            "ranks": ranks,
            "step": f"exact, {PARTS} parts" if parts else f"{PARTS // ranks} micro-batches",
            "ms": statistics.median(seconds[parts]) * 1e3,
            "peak MB": max(facts[parts][0]),
            "MB sent": max(facts[parts][1]) / 1e6,
        }
        for parts in crews
    ]
    exact, usual = rows
    goals = [
        Goal(f"{ranks} ranks: step / micro-batches", exact["ms"] / usual["ms"], 1.10),
        Goal(f"{ranks} ranks: bytes / micro-batches", exact["MB sent"] / usual["MB sent"], 1.001),
    ]
    if ranks * 2 >= PARTS:
        goals.append(Goal(f"{ranks} ranks: peak memory / micro-batches", exact["peak MB"] / usual["peak MB"], 1.05))
    return rows, goals


def main() -> None:
    options = parser("Digests of exact runs on several meshes, and the cost of an exact step.")
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--rounds", type=int, default=9)
    args = options.parse_args()
    rows, goals = counted(args.steps)
    for ranks in (2, 4):
        more, limits = measured(ranks, args.rounds)
        rows, goals = [*rows, *more], [*goals, *limits]
    publish(f"the same bits on 1, 2 and 4 ranks, {args.steps} steps", rows, goals, args.json)


if __name__ == "__main__":
    main()
