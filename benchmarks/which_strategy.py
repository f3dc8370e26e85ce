"""Which strategy is the cheapest that fits, by plans; and what plans predict beside what others have published.

    python -m benchmarks.which_strategy

Both tables are made of plans alone, on one CPU, of a model's shallow depths (`shapes.extrapolating`). Devices are H100
with 80 GiB, eight on a node, unless a row says otherwise; see `plan.presets` for the sources of their speeds. In the
first table each cell is the cheapest of the strategies tried, with sequences of 8,192 tokens, one for each rank or set
of ranks that share matrices, in bfloat16 with parameters and AdamW's state in float32.

The second table has runs whose setting is published as far as a plan needs it. Their kernels are not ours: the figure
to look at is how far a plan's speed is off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import Goal, parser, publish
from shardfn.plan import presets
from shardfn.shapes.extrapolating import extrapolated
from shardfn.shapes.searching import search
from shardfn.shapes.settings import Setting
from shardfn.shapes.sizes import SHAPES

MODELS, RANKS = ("llama-1b", "llama-8b", "llama-70b", "llama-405b"), (8, 64, 512, 4096)
MEMORY, LENGTH = "80GiB", 8192
# torchtitan's H100s: HBM2e with 2.4 TB/s.
TITAN = replace(presets.chip("h100"), name="h100, HBM2e", bandwidth=2.4e12)
# source, model, chip, links, setting, and tokens a second on each rank
PUBLISHED: list[tuple[str, str, Any, str, Setting, float]] = [
    ("torchtitan 2024-12, table 1", "llama-8b", TITAN, "h100", Setting({"shard": 8}, remat="on", batch=2), 6667),
    ("torchtitan 2024-12, table 3", "llama-8b", TITAN, "h100", Setting({"shard": 128}, remat="on", batch=2), 6514),
    ("torchtitan 2024-07", "llama-8b", "a100", "a100", Setting({"shard": 64}, remat="on"), 2904),
    ("torchtitan 2024-07", "llama-70b", "a100", "a100", Setting({"shard": 64}, remat="on"), 331),
    ("lightning-thunder 2144", "llama-8b", "h100", "h100", Setting({"shard": 8}, strategy="shard_grad_op"), 10219),
    ("KempnerForge 2026", "llama-7b", "h200", "h200", Setting({"shard": 1}, remat="on", sequence=4096), 10471),
]


def cells(models: list[str], ranks: list[int]) -> Iterator[dict[str, Any]]:
    for name in models:
        for number in ranks:
            base = Setting({"shard": number}, sequence=LENGTH)
            found = search(SHAPES[name], number, MEMORY, base, "h100", "h100", batches=(1,))
            best = found[0]
            if not best.fits:
                nearest = max(found, key=lambda each: each.spare)
                text, more = f"none; {-nearest.spare / 2**30:.0f} GiB are missing in {nearest.setting.strategy}", {}
            else:
                assert best.figures is not None, "what fits was planned"
                axes = ", ".join(f"{axis}={size}" for axis, size in best.setting.mesh.items())
                text = f"{best.setting.strategy}, {axes}"
                text += ", remat" if best.setting.remat == "on" else ""
                text += "".join(f", {kind} on the {tier}" for kind, tier in best.setting.tiers.items())
                more = {
                    "needs GiB": best.figures.needed / 2**30,
                    "MFU %": 100 * best.figures.utilization,
                    "exposed %": 100 * best.figures.exposed / best.figures.seconds,
                    "tokens/s a rank": best.tokens / number,
                }
            nothing = dict.fromkeys(("needs GiB", "MFU %", "exposed %", "tokens/s a rank"), math.nan)
            yield {"model": name, "ranks": number, "cheapest that fits": text} | nothing | more


def beside() -> Iterator[dict[str, Any]]:
    for source, name, chip, links, setting, tokens in PUBLISHED:
        figures = extrapolated(SHAPES[name], setting, links, chip)
        predicted = setting.batch * (setting.sequence or SHAPES[name].context) / figures.seconds
        yield {
            "source": source,
            "model": name,
            "setting": f"{setting}, {chip if isinstance(chip, str) else chip.name}",
            "published tokens/s": tokens,
            "predicted": predicted,
            "predicted / published": predicted / tokens,
        }


def main() -> None:
    options = parser("Which strategy is the cheapest that fits, and predictions beside published runs, by plans.")
    options.add_argument("--models", nargs="*", default=list(MODELS))
    options.add_argument("--ranks", nargs="*", type=int, default=list(RANKS))
    options.add_argument("--cells", type=Path, metavar="FILE", help="append each cell to FILE as it is known")
    args = options.parse_args()
    compared = list(beside())
    off = max(abs(math.log(row["predicted / published"])) for row in compared)
    goals = [Goal("predicted tokens/s beside published, largest factor", math.exp(off), 1.6)]
    rows = []
    for row in cells(args.models, args.ranks):
        rows.append(row)
        if args.cells:
            with args.cells.open("a") as out:
                out.write(json.dumps(row) + "\n")
    publish("which strategy, and predictions beside published runs", [*rows, *compared], goals, args.json)


if __name__ == "__main__":
    main()
