"""The bytes that a step on disk reads and writes, and its time, compared with ZeRO-Infinity's formula.

    OMP_NUM_THREADS=1 python -m benchmarks.tiers --only peer

The formula is that of Rajbhandari et al., ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning
(2021), section 4.1. With activation checkpointing, parameters are loaded three times (in forward, for recomputation and
in backward), and gradients are stored once. Optimizer states, which here include gradients, parameters and both moments
in float32, are read once and written once. In float32, that is 4 numbers and 2 x 4 numbers of 4 bytes per parameter.
The least time is these bytes divided by the disk's bandwidth, with nothing else in a step.

With `--deepspeed PYTHON`, DeepSpeed trains the same model on the same disk, after ours. PYTHON must have DeepSpeed and
be able to build its operator `async_io`, which requires a compiler and libaio's headers. DeepSpeed's bytes are not
measured, but taken from the formula. Without the option, the formula's row says that it was not run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.crew import Crew
from benchmarks.model import Config
from benchmarks.on_disk import ENVIRONMENT, GB, RANKS, TINY, bare, built
from benchmarks.report import Goal

MODEL = Config(vocabulary=8192, width=768, layers=12, heads=12, hidden=2048, batch=1)
TOKENS = 64  # so few that the disk limits a step


def formula(parameters: float) -> float:
    """Bytes that ZeRO-Infinity reads and writes in a step in float32."""
    return 4 * parameters * (3 + 1 + 2 * 4)


def run(python: str, folder: str, config: Config, steps: int) -> dict[str, Any]:
    """The results of `benchmarks/infinity_rank.py`, which runs DeepSpeed on as many ranks."""
    sizes = config.vocabulary, config.width, config.layers, config.heads, config.hidden
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    rank = str(Path(__file__).with_name("infinity_rank.py"))
    arguments = [rank, folder, *map(str, (steps, TOKENS, *sizes))]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"  # where DeepSpeed looks for ninja
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, env=environment, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        raise RuntimeError(f"DeepSpeed did not train: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def peer(folder: str, tiny: bool, rounds: int, deepspeed: str | None = None) -> tuple[list[dict[str, Any]], list[Goal]]:
    """The rows of both systems, and the goals."""
    config = replace(TINY, layers=4) if tiny else MODEL
    with ExitStack() as stack:
        ours = stack.enter_context(Crew(RANKS, built, config, folder, None, environment=ENVIRONMENT))
        disk = stack.enter_context(Crew(RANKS, bare, folder, 2**25 if tiny else 2**28, environment=ENVIRONMENT))
        ways = ours.turn("formula")[0]
        parameters = sum(ours.turn("kept")) * 1e6 / 16
        ours.turn("train", TOKENS, 1)  # warm-up
        seconds, speeds, moved = [], [], []
        for _ in range(rounds):
            speeds.append(RANKS * min(disk.turn("bandwidth", *ways)))
            found = ours.turn("train", TOKENS, 1)
            seconds.append(max(each["seconds"][0] for each in found))
            moved.append(sum(sum(each["moved"]) for each in found))
    speed, ours_moved, theirs = statistics.median(speeds), statistics.median(moved), formula(parameters)
    rows = [
        row("shardfn, measured", parameters, ours_moved, ours_moved / speed, statistics.median(seconds)),
        row("ZeRO-Infinity, by its formula", parameters, theirs, theirs / speed, None),
    ]
    if deepspeed is None:
        return rows, goals(statistics.median(seconds), ours_moved, theirs, speed)
    said = run(deepspeed, folder, config, rounds)
    took = statistics.median(said["seconds"])
    rows.append(row("DeepSpeed's step, measured", parameters, theirs, theirs / speed, took))
    rows[-1]["resident MB"] = said["peak"] / 1e6
    ratio = statistics.median(seconds) / took
    return rows, [*goals(statistics.median(seconds), ours_moved, theirs, speed), Goal("step / DeepSpeed's", ratio, 1)]


def goals(seconds: float, ours_moved: float, theirs: float, speed: float) -> list[Goal]:
    """The goals that compare ours with the formula."""
    return [
        Goal("bytes moved / ZeRO-Infinity's formula", ours_moved / theirs, 1),
        Goal("step / the least of ZeRO-Infinity's formula", seconds * speed / theirs, 1.15),
    ]


def row(name: str, parameters: float, moved: float, least: float, seconds: float | None) -> dict[str, Any]:
    return {
        "system": name,
        "parameters, millions": parameters / 1e6,
        "moved GB": moved / GB,
        "bytes a parameter": moved / parameters,
        "by the disk alone s": least,
        "step s": "not run" if seconds is None else f"{seconds:.2f}",
    }
