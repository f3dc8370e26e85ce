"""The cost of `sf.run.loop`: a step in it, compared with the same step in a bare loop.

    OMP_NUM_THREADS=1 python -m benchmarks.loop

A GPT with 11 million parameters in float32, on two ranks, with gloo and AdamW on the shards. The same processes run the
step in a bare loop, which reads no loss, in `sf.run.loop` with a file of metrics, and in `sf.run.loop` that also saves
in the background. The three take turns of a few steps, in alternating order. Times are medians of all steps except the
first few of each turn. For checkpoints, the mean is given too, since it includes what saving takes of the two cores.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage
from benchmarks.model import SEED, Config, Params, makers, staged, tokens
from benchmarks.report import Goal, parser, publish
from shardfn import P

RANKS, WARM = 2, 3
SYSTEMS = ("bare loop", "sf.run.loop", "sf.run.loop, saving")


def built(_: Usage, config: Config, folder: str) -> dict[str, Callable[..., Any]]:
    """Functions by name, which train a number of steps and return the seconds of all except the first few."""
    mesh = sf.make_mesh(shard=dist.get_world_size(), device="cpu")
    optimizer, rows, local_loss = so.adamw(1e-3), tokens(config, dist.get_rank()), staged(config)

    def loss_fn(params: Params, rows: Tensor) -> Tensor:
        return sf.pmean(local_loss(params, rows), "shard")

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P("shard")), out_specs=...)
    def trained(params: Params, moments: Any, rows: Tensor) -> Any:
        loss, grads = sf.value_and_grad(loss_fn)(params, rows)
        return *optimizer.step(params, grads, moments), loss

    def step(state: Any, rows: Tensor) -> Any:
        params, moments, loss = trained(state[0], state[1], rows)
        return (params, moments), {"loss": loss}

    params = sf.init_sharded(makers(config), SEED, mesh, sf.full_shard("shard"))
    kept: list[Any] = [(params, optimizer.init(params))]

    def clocked(times: list[float], steps: int) -> Iterator[Tensor]:
        for _ in range(steps):
            times.append(time.perf_counter())
            yield rows

    def bare(steps: int) -> list[float]:
        times: list[float] = []
        for batch in clocked(times, steps):
            kept[0], _ = step(kept[0], batch)
        return between(times)

    def looped(steps: int, **save: Any) -> list[float]:
        times: list[float] = []
        report = [sf.run.jsonl(Path(folder, "metrics.jsonl"))]
        batches = clocked(times, steps)
        kept[0], _ = sf.run.loop(step, kept[0], lambda start: batches, steps=steps, report=report, **save)
        return between(times)

    def saving(steps: int) -> list[float]:
        found = looped(steps, save=Path(folder, "run"), save_every=max(2, steps // 2), keep_last=1)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(Path(folder, "run"))
        dist.barrier()
        return found

    return dict(zip(SYSTEMS, (bare, looped, saving), strict=True))


def between(times: list[float]) -> list[float]:
    """Seconds from one step to the next, after the first few."""
    return [b - a for a, b in zip(times[WARM:-1], times[WARM + 1 :], strict=True)]


def rows_of(crew: Crew, rounds: int, steps: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for each system, and its ratio to the bare loop: median steps, and the median over the rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    ratios: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for number in range(rounds + 1):
        order = SYSTEMS if number % 2 else SYSTEMS[::-1]
        found = {name: crew.turn(name, steps)[0] for name in order}
        for name in SYSTEMS if number else ():  # the first round warms up
            seconds[name] += found[name]
            ratios[name].append(statistics.median(found[name]) / statistics.median(found["bare loop"]))
    rows = [
        {
            "system": name,
            "step ms, median": statistics.median(each) * 1e3,
            "mean": statistics.mean(each) * 1e3,
            "steps": len(each),
        }
        for name, each in seconds.items()
    ]
    return rows, {name: statistics.median(each) for name, each in ratios.items()}


def main() -> None:
    options = parser("A step in sf.run.loop, compared with one in a bare loop.")
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--steps", type=int, default=24, help="steps per turn")
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    args = options.parse_args()
    config = Config(width=256, hidden=704)
    if args.tiny:
        config = Config(vocabulary=64, width=32, layers=2, heads=2, hidden=48, context=8)
    with tempfile.TemporaryDirectory() as folder, Crew(RANKS, built, config, folder) as crew:
        rows, ratios = rows_of(crew, args.rounds, args.steps)
    goals = [Goal("step in the loop / bare", ratios["sf.run.loop"], 1.01)]
    publish(f"a training step, {RANKS} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
