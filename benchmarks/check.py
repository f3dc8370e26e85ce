"""The cost of `shard_map`'s checker: in the first call, which it checks, and in later calls, which it does not.

    OMP_NUM_THREADS=1 python -m benchmarks.check

A training step of a GPT with 34 million parameters in float32: `full_shard`, AdamW on the shards, gloo, on two and on
four ranks. The same processes alternate between `check=True` and `check=False`: first one step of a newly mapped
function, then steps of a function that has run before. Times are medians over the rounds, and ratios are medians of the
rounds' ratios. The benchmark also measures the peak memory of a first call, counts the Python calls in a later step,
and compares the trained numbers bit for bit.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage
from benchmarks.model import SEED, Config, Params, makers, staged, tokens
from benchmarks.report import Goal, parser, publish
from shardfn import P

RANKS = (2, 4)
MODES = {"check=True": True, "check=False": False}
FOLDER = Path(sf.__file__).parent
WATCHED = (
    f"{FOLDER / 'check'}",
    f"{FOLDER / 'transforms' / 'checking.py'}",
    f"{FOLDER / 'transforms' / 'shard_map.py'}",
)


def built(usage: Usage, config: Config) -> dict[str, Callable[..., Any]]:
    """Functions by name; their argument `check` selects the checked or the unchecked step."""
    mesh = sf.make_mesh(shard=dist.get_world_size(), device="cpu")
    optimizer, rows, local_loss = so.adamw(1e-3), tokens(config, dist.get_rank()), staged(config)

    def loss_fn(params: Params, rows: Tensor) -> Tensor:
        return sf.pmean(local_loss(params, rows), "shard")

    def trained(params: Params, moments: Any, rows: Tensor) -> Any:
        loss, grads = sf.value_and_grad(loss_fn)(params, rows)
        return *optimizer.step(params, grads, moments), loss

    def mapped(check: bool) -> Callable[..., Any]:
        return sf.shard_map(trained, mesh=mesh, in_specs=(..., ..., P("shard")), out_specs=(..., ..., P()), check=check)

    def fresh() -> tuple[Any, Any]:
        params = sf.init_sharded(makers(config), SEED, mesh, sf.full_shard("shard"))
        return params, optimizer.init(params)

    def stepped(step: Callable[..., Any]) -> float:
        dist.barrier()
        began = time.perf_counter()
        *kept[:], _ = step(*kept, rows)
        return time.perf_counter() - began

    def first(check: bool) -> float:
        return stepped(mapped(check))

    def peak(check: bool) -> float:
        usage.again()
        first(check)
        return usage.peak()

    def later(check: bool, count: int) -> list[float]:
        return [stepped(known[check]) for _ in range(count)]

    def calls(check: bool) -> int:
        return counted(lambda: stepped(known[check]))

    def bits(check: bool) -> list[Tensor]:
        """The bytes of parameters and moments after two steps from the same initial values."""
        step, state = mapped(check), fresh()
        for _ in range(2):
            *state, loss = step(*state, rows)
        tensors = (leaf for leaf in optree.tree_leaves((state, loss)) if isinstance(leaf, Tensor))
        return [leaf.reshape(-1).view(torch.uint8) for leaf in tensors]

    def apart() -> int:
        """The number of bytes that differ between the two results."""
        return sum(int((a != b).sum()) for a, b in zip(bits(True), bits(False), strict=True))

    kept: list[Any] = [*fresh()]
    known = {check: mapped(check) for check in MODES.values()}
    for step in known.values():
        stepped(step)
    return {"first": first, "peak": peak, "later": later, "calls": calls, "apart": apart}


def counted(run: Callable[[], Any]) -> int:
    """The number of calls of Python functions of the checker and `shard_map` on this thread."""
    found = 0

    def called(frame: Any, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(WATCHED)

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def measured(crew: Crew, rounds: int, steps: int) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Median seconds of each kind of step, and median ratios of checked to unchecked steps."""
    times: dict[str, dict[str, list[float]]] = {kind: {mode: [] for mode in MODES} for kind in ("first", "later")}
    for number in range(rounds):
        order = list(MODES) if number % 2 else list(MODES)[::-1]
        for mode in order:
            times["first"][mode].append(max(crew.turn("first", MODES[mode])))
        for mode in order:
            slowest = [max(each) for each in zip(*crew.turn("later", MODES[mode], steps), strict=True)]
            times["later"][mode].append(statistics.median(slowest))
    medians = {kind: {mode: statistics.median(found) for mode, found in modes.items()} for kind, modes in times.items()}
    ratios = {
        kind: statistics.median(a / b for a, b in zip(*modes.values(), strict=True)) for kind, modes in times.items()
    }
    return medians, ratios


def peaks_in_turn(crew: Crew, rounds: int) -> dict[str, float]:
    """The peak memory of a first call, on the rank that takes most: the median over the rounds."""
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in list(MODES)[:: 1 if number % 2 else -1]:
            found[mode].append(max(crew.turn("peak", MODES[mode])))
    return {mode: statistics.median(some) for mode, some in found.items()}


def of_ranks(ranks: int, config: Config, rounds: int, steps: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """The rows and goals for one number of ranks."""
    with Crew(ranks, built, config) as crew:
        medians, ratios = measured(crew, rounds, steps)
        peaks = peaks_in_turn(crew, rounds)
        calls = {mode: max(crew.turn("calls", check)) for mode, check in MODES.items()}
        differ = sum(crew.turn("apart"))  # last: its two models stay in memory for a while
    more = peaks["check=True"] / peaks["check=False"]
    rows = [
        {
            "ranks": ranks,
            "step": mode,
            "first call ms": medians["first"][mode] * 1e3,
            "first call peak MB": peaks[mode] / 1e6,
            "later calls ms": medians["later"][mode] * 1e3,
            "Python calls of a later one": calls[mode],
        }
        for mode in MODES
    ]
    return rows, [
        Goal(f"first call, checked / not, {ranks} ranks", ratios["first"], 3.0),
        Goal(f"later call, checked / not, {ranks} ranks", ratios["later"], 1.01),
        Goal(f"first call, peak memory, checked / not, {ranks} ranks", more, 1.03),
        Goal(f"Python calls of a later one, more, {ranks} ranks", calls["check=True"] - calls["check=False"], 0),
        Goal(f"bytes that differ after two steps, {ranks} ranks", differ, 0),
    ]


def main() -> None:
    options = parser("What the checker costs: the first call, and all others.")
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--steps", type=int, default=4, help="later calls per turn")
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    args = options.parse_args()
    config = Config()
    if args.tiny:
        config = Config(vocabulary=64, width=32, layers=2, heads=2, hidden=48, context=8)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for ranks in RANKS:
        more, ends = of_ranks(ranks, config, args.rounds, args.steps)
        rows, goals = rows + more, goals + ends
    publish("a training step, checked and unchecked", rows, goals, args.json)


if __name__ == "__main__":
    main()
