"""A training step with every strategy, on 4 ranks: time, memory and bytes, as a table and a plot.

    OMP_NUM_THREADS=1 python -m benchmarks.strategies --picture strategies.png

A GPT with 21 million parameters, replica=2 x shard=2, AdamW on the shards; only the strategy differs. Each strategy has
its own processes; all are alive at once and take turns. For comparison, the table has the figures of Lightning's guide
to FSDP, for a model of a billion parameters on two A100. Our figures are relative to our DDP, theirs to their DDP. How
much memory a strategy saves depends on the activations, which no strategy shards; their DDP also keeps gradients twice.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import shardfn as sf
from benchmarks.crew import Crew, Usage, in_turns
from benchmarks.model import Config
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import KEEPS_MEMORY, Step, shardfn_step, timed

RANKS = 4
DATA = ("replica", "shard")
STRATEGIES = {
    name: sf.strategies.from_name(name, shard="shard", replica="replica")
    for name in ("ddp", "zero1", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")
} | {"mics": sf.strategies.mics(("shard", "replica"))}
# MB and steps per second: DDP, and FSDP's NO_SHARD, SHARD_GRAD_OP and FULL_SHARD.
DDP = (23125, 4.31)
PUBLISHED = {"NO_SHARD": (19296, 3.04), "shard_grad_op": (11772, 3.61), "full_shard": (9627, 3.19)}


def built(usage: Usage, strategy: sf.Placement, config: Config) -> dict[str, Any]:
    step, _ = shardfn_step(config, sf.make_mesh(replica=2, shard=2, device="cpu"), strategy)
    return {"train": functools.partial(timed, step), "moved": lambda: moved(step), "peak": lambda: usage.peak() / 1e6}


def moved(step: Step) -> float:
    """The MB that this rank sends in a step."""
    with sf.collectives.ledger() as log:
        step()
    return log.bytes(scheduled=True) / 1e6


def measured(crews: dict[str, Crew], rounds: int, steps: int) -> list[dict[str, Any]]:
    took, losses = in_turns(
        {name: functools.partial(crew.turn, "train", steps) for name, crew in crews.items()}, rounds
    )
    peaks = {name: max(crew.turn("peak")) for name, crew in crews.items()}
    rows = []
    for name, crew in crews.items():
        mb, speed = PUBLISHED.get(name, (0, 0))
        rows.append(
            {
                "strategy": name,
                "step ms": took[name],
                "peak MB": peaks[name],
                "MB sent a step": max(crew.turn("moved")),
                "time / ddp": took[name] / took["ddp"],
                "published time": f"{DDP[1] / speed:.2f}" if speed else "",
                "memory / ddp": peaks[name] / peaks["ddp"],
                "published memory": f"{mb / DDP[0]:.2f}" if mb else "",
                "first loss": f"{losses[name][0]:.7f}",
            }
        )
    return rows


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Plots memory against time, relative to DDP."""
    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    ours = {row["strategy"]: (row["memory / ddp"], row["time / ddp"]) for row in rows}
    theirs = {name: (mb / DDP[0], DDP[1] / speed) for name, (mb, speed) in PUBLISHED.items()}
    for label, points, marker in (("shardfn, 4 CPU ranks", ours, "o"), ("FSDP, published, 2 GPUs", theirs, "x")):
        axes.scatter(*zip(*points.values(), strict=True), marker=marker, label=label)
        for name, point in points.items():
            axes.annotate(name, point, xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="peak memory / DDP", ylabel="step time / DDP", xlim=(0, 1.15))
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def goals_of(rows: list[dict[str, Any]], config: Config) -> list[Goal]:
    by_name = {row["strategy"]: row for row in rows}
    goals = []
    for name, (_, speed) in PUBLISHED.items():
        if name in by_name:
            goals.append(Goal(f"{name}: time / ddp, at most as published", by_name[name]["time / ddp"], DDP[1] / speed))
    # The rest of the memory is activations, as with ddp, and buffers for two stages.
    rest = {name: row["peak MB"] - held(name, config) for name, row in by_name.items()}
    buffers = 6 * config.vocabulary * config.width * 4 / 1e6
    most = max(rest[name] for name in rest)
    goals.append(
        Goal("memory not in parameters, gradients, state / ddp's and buffers", most / (rest["ddp"] + buffers), 1.0)
    )
    losses = [float(row["first loss"]) for row in rows]
    return [*goals, Goal("first loss, relative difference between all", max(losses) / min(losses) - 1, 1e-6)]


def held(name: str, config: Config) -> float:
    """MB of parameters, copies kept for backward, gradients and AdamW's state."""
    whole = 4 * (config.numel + config.width * config.vocabulary) / 1e6
    placement = STRATEGIES[name]
    near = whole / 2 ** len(placement.keep) if isinstance(placement.keep, tuple) else whole * bool(placement.keep)
    return whole / 2 ** len(placement.axes) + near + 3 * whole / 2 ** len(placement.gradients)


def main() -> None:
    options = parser("A training step with every strategy, on 4 ranks.")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=3, help="steps per turn")
    options.add_argument("--picture", type=Path, default=Path("runs/strategies.png"), help="default: %(default)s")
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    args = options.parse_args()
    config = (
        Config(vocabulary=64, width=32, layers=2, heads=2, hidden=48, context=8)
        if args.tiny
        else Config(width=384, hidden=1056)
    )
    with ExitStack() as stack:
        crews = {
            name: stack.enter_context(Crew(RANKS, built, strategy, config, environment=KEEPS_MEMORY))
            for name, strategy in STRATEGIES.items()
        }
        rows = measured(crews, args.rounds, args.steps)
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, args.picture)
    publish(f"one training step with each strategy, {RANKS} ranks", rows, goals_of(rows, config), args.json)
    print(f"memory against time: {args.picture}")


if __name__ == "__main__":
    main()
