"""Plans beside what runs, on two hosts with a slow link between them: bytes over the link, and which step is faster.

    python -m benchmarks.plan_hosts

The hosts are those of `benchmarks.hosts`: two network namespaces with two ranks each, here with 250 Mbit/s between
them. The same program is planned, as each of the four ranks, in a process without ranks, and run by them. Strategies
take turns, so that a change of the machine's speed affects all.

Bytes that cross are told by three: the plan (works whose ranks span nodes), the ledger of a step that ran, and the
kernel's counters on the link without the packets' headers. Plan and ledger must be equal. The counters also have gloo's
header of each message and the traffic of torchrun's agents; they are held to 2 % of the plan.

The times that the plan predicts come from `measure_links` on the mesh and from `measure_chip` on all ranks at once, as
four ranks share this machine's cores. Two strategies are a tie unless the same one is faster in all rounds but one;
with eleven rounds, chance makes that of two that are equally fast in 1.2 % of all cases. Of those that are no tie, the
plan must say that the faster one is faster. Times themselves are shown, but have no goal: here ranks share cores with
each other and with what they send, of which a plan knows nothing.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from benchmarks.hosts import crossing, expected
from benchmarks.model import Config, training
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import timed
from benchmarks.two_hosts import crossed, hosts, launch
from shardfn.plan.machines import Chip, Links
from shardfn.plan.timeline import Timeline
from shardfn.testing import World

BOTH, RANKS, PER_NODE, MEGABITS = ("replica", "shard"), 4, 2, 250
SIZES = tuple(2**k for k in range(12, 23, 2))  # 4 KiB to 4 MiB
STRATEGIES = {
    "ddp": sf.ddp(BOTH),
    "shard_grad_op": sf.strategies.shard_grad_op(BOTH),
    "full_shard": sf.full_shard(BOTH),
    "hybrid_shard": sf.hybrid_shard(shard="shard", replica="replica"),
    "hfsdp": sf.strategies.hfsdp(shard="shard", replica="replica"),
}


def program(strategy: sf.Strategy, tiny: bool) -> tuple[Any, tuple[Any, ...]]:
    """A training step and its arguments."""
    config = Config(vocabulary=1024, width=256, layers=4, heads=4, hidden=704, batch=1)
    if tiny:
        config = Config(vocabulary=64, width=32, layers=2, heads=2, hidden=48, context=8)
    return training(config, sf.make_mesh(replica=2, shard=2), strategy)


# --- on each rank ---


class Running:
    """A program that trains a step each time it is called."""

    def __init__(self, strategy: sf.Strategy, tiny: bool) -> None:
        self.step, (self.params, self.state, self.rows) = program(strategy, tiny)

    def __call__(self) -> Tensor:
        self.params, self.state, loss = self.step(self.params, self.state, self.rows)
        return loss


def ranks(folder: Path, tiny: bool, rounds: int) -> None:
    torch.set_num_threads(1)
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    links = sf.plan.measure_links(mesh, sent=SIZES)
    dist.barrier()
    chip = sf.plan.measure_chip()
    running = {name: Running(strategy, tiny) for name, strategy in STRATEGIES.items()}
    ledgers = {name: ledger_of(one) for name, one in running.items()}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    over = dict.fromkeys(running, 0.0)
    for _ in range(rounds):
        for name, one in running.items():
            before = counted()
            seconds[name] += timed(one, 1)[0]
            over[name] += counted() - before
    if dist.get_rank() == 0:
        links.save(folder / "links.json")
        chip.save(folder / "chip.json")
        over = {name: whole / rounds for name, whole in over.items()}
        (folder / "told.json").write_text(json.dumps([seconds, ledgers, over]))
    dist.barrier()
    dist.destroy_process_group()


def ledger_of(running: Running) -> float:
    """Bytes that all ranks' collectives send to the other host in the third step."""
    timed(running, 2)
    with sf.collectives.ledger() as log:
        running()
    meant = torch.tensor(expected(log), dtype=torch.float64)
    dist.all_reduce(meant)
    return meant.item()


def counted() -> int:
    """Bytes over this host's end of the link so far, without headers, when no rank sends."""
    dist.barrier()
    return crossed()[1]


# --- planned ---


def planned(rank: int, tiny: bool) -> dict[str, sf.plan.StepPlan]:
    plans = {}
    for name, strategy in STRATEGIES.items():
        with sf.plan.mode(RANKS, rank, per_node=PER_NODE):
            step, args = program(strategy, tiny)
            plans[name] = sf.plan.step(step, *args)
    return plans


def crosses(plan: sf.plan.StepPlan) -> float:
    """Bytes that this rank sends to the other host."""
    return sum(work.sent * crossing(work.kind, work.axis) for work in plan.collectives if work.nodes > 1)


# --- compared ---


def told_apart(measured: dict[str, list[float]]) -> list[tuple[str, str]]:
    """Pairs of which the first is faster in all rounds but one, or in all; others are ties."""
    return [(a, b) for a, b in itertools.permutations(measured, 2) if _slower(measured[a], measured[b]) <= 1]


def _slower(a: list[float], b: list[float]) -> int:
    """The number of rounds in which the first is not faster."""
    return sum(x >= y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Ran:
    """What the ranks measured: by strategy, the seconds of each step, and the bytes to the other host in a step."""

    seconds: dict[str, list[float]]
    by_ledger: dict[str, float]
    over_link: dict[str, float]
    links: Links
    chip: Chip


def run(tiny: bool, rounds: int) -> Ran:
    with tempfile.TemporaryDirectory() as folder, hosts("benchmarks.plan_hosts", MEGABITS):
        more = ["--tiny"] if tiny else []
        launch("benchmarks.plan_hosts", "--ranks", folder, "--rounds", str(rounds), *more)
        seconds, by_ledger, over_link = json.loads(Path(folder, "told.json").read_text())
        return Ran(
            seconds, by_ledger, over_link, Links.load(Path(folder, "links.json")), Chip.load(Path(folder, "chip.json"))
        )


def row_of(name: str, plans: list[sf.plan.StepPlan], times: Timeline, ran: Ran) -> dict[str, Any]:
    meant, took = sum(map(crosses, plans)), statistics.median(ran.seconds[name])
    low, _, high = (f"{1e3 * quartile:.0f}" for quartile in statistics.quantiles(ran.seconds[name], n=4))
    return {
        "strategy": name,
        "MB planned": meant / 1e6,
        "MB by the ledger": ran.by_ledger[name] / 1e6,
        "MB over the link": ran.over_link[name] / 1e6,
        "link / planned": ran.over_link[name] / meant,
        "step ms": took * 1e3,
        "middle half": f"{low}-{high}",
        "predicted ms": times.seconds * 1e3,
        "exposed ms": times.exposed * 1e3,
        "predicted / step": times.seconds / took,
    }


def goals_of(rows: list[dict[str, Any]], times: dict[str, Timeline], ran: Ran) -> list[Goal]:
    certain = told_apart(ran.seconds)
    wrong = [(faster, slower) for faster, slower in certain if times[faster].seconds >= times[slower].seconds]
    for faster, slower in wrong:
        print(f"{faster} is faster than {slower}, and not predicted to be")
    off = max(abs(row["MB planned"] - row["MB by the ledger"]) for row in rows)
    ratios = [max(row["link / planned"], 1 / row["link / planned"]) for row in rows]
    return [
        Goal("MB that cross by the plan, off the ledger, largest", off, 0),
        Goal("bytes over the link and by the plan, largest ratio", max(ratios), 1.02),
        Goal("pairs of strategies in inverted order", len(wrong), 0),
        Goal("pairs of strategies that are no ties, of 10", len(certain), 5, "at least", tolerance=0.5),
    ]


def main() -> None:
    options = parser("Plans beside what runs, on two emulated hosts with 250 Mbit/s between them.")
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    options.add_argument("--ranks", type=Path, metavar="FOLDER", help="run as one of the ranks, and write files there")
    args = options.parse_args()
    if args.ranks:
        ranks(args.ranks, args.tiny, args.rounds)
        return
    ran = run(args.tiny, args.rounds)
    with World(1, kind="alone", deadline=300) as alone:
        plans = [alone.run(planned, rank, args.tiny)[0] for rank in range(RANKS)]
    times = {name: plan.timed(ran.links, ran.chip) for name, plan in plans[0].items()}
    rows = [row_of(name, [of_rank[name] for of_rank in plans], times[name], ran) for name in STRATEGIES]
    title = "planned and run: a step on two hosts of two ranks, 250 Mbit/s between them"
    publish(title, rows, goals_of(rows, times, ran), args.json)


if __name__ == "__main__":
    main()
