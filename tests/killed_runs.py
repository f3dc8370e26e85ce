"""Kills runs of `sf.run.loop` at random moments, and continues from the newest whole checkpoint.

    python -m tests.killed_runs --kills 100

Each life is a few processes, which train with noise and save in the background until one or all of them get SIGKILL.
The final parameters and the file of metrics must equal those of a run without kills: bit for bit, if all lives have the
same number of ranks, or exact parts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardfn as sf
from tests.run.toy import Rows, begin, mesh_here, step_of, whole

DEADLINE = 120.0  # if a rank is killed while groups are made, each group waits for it until its timeout of 30 s


def live(rank: int, size: int, folder: str, number: int, steps: int, noise: float, parts: int) -> None:
    """One process of a life."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    root = Path(folder)
    os.dup2(os.open(root / f"log{number}.{rank}", os.O_WRONLY | os.O_CREAT), 2)  # for messages of surviving processes
    store = (root / f"store{number}").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    mesh = mesh_here()
    (root / f"trains{number}.{rank}").touch()
    state, run = sf.run.loop(
        step_of(mesh, noise), begin(mesh, parts=parts), Rows(mesh), steps=steps, save=root / "run", save_every=2,
        keep_last=2, report=sf.run.jsonl(root / "metrics.jsonl"),
    )  # fmt: skip
    parameters = whole(state)
    if rank == 0:
        torch.save([run.step, parameters], root / "result")
    dist.barrier()
    dist.destroy_process_group()


def kill(kills: int, sizes: list[int], seed: int, folder: Path, steps: int, noise: float, parts: int = 0) -> list[int]:
    """Runs and kills so many lives, then runs one life that trains all steps.

    Returns:
        The steps from which the lives continued.

    Raises:
        AssertionError: a life hangs, or ends by itself.
    """
    draw = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardfn.optim", "torch.distributed.device_mesh"])
    begun = []
    for number in range(kills + 1):
        last, size = number == kills, draw.choice(sizes)
        begun.append(_newest(folder))
        end = steps if last else 10**6
        processes = [
            context.Process(target=live, args=(rank, size, str(folder), number, end, noise, parts), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        until = time.monotonic() + DEADLINE
        if not last:
            while not all((folder / f"trains{number}.{rank}").exists() for rank in range(size)):
                assert time.monotonic() < until, f"life {number} does not begin: {_log(folder, number)}"
                time.sleep(0.002)
            while number % 2 and _newest(folder) == begun[-1]:  # every second life gets as far as a checkpoint
                assert time.monotonic() < until, f"life {number} saves nothing: {_log(folder, number)}"
                time.sleep(0.002)
            time.sleep(draw.random() * 1.5)
            assert all(process.is_alive() for process in processes), f"life {number} ended: {_log(folder, number)}"
            for process in processes if draw.random() < 0.3 else [draw.choice(processes)]:
                process.kill()
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            assert process.exitcode is not None, f"life {number}: a rank hangs: {_log(folder, number)}"
        assert not last or all(process.exitcode == 0 for process in processes), _log(folder, number)
        steps = max(steps, _newest(folder) + 3)
    return begun


def _newest(folder: Path) -> int:
    newest = sf.checkpoint.latest(folder / "run")
    return 0 if newest is None else int(newest.name.removeprefix("step-"))


def _log(folder: Path, number: int) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob(f"log{number}.*")))


def difference(folder: Path, size: int, noise: float, parts: int = 0) -> tuple[float, bool]:
    """The difference of parameters from a run without kills, and whether the losses are equal, with each step once."""
    step, killed = torch.load(folder / "result")
    apart = folder / "apart"
    apart.mkdir()
    kill(0, [size], 0, apart, step, noise, parts)
    _, wanted = torch.load(apart / "result")
    far = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(killed, wanted, strict=True))
    return far, _losses(folder) == _losses(apart)


def _losses(folder: Path) -> list[tuple[int, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill runs of sf.run.loop, and continue.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for sizes, parts in (([1], 0), ([2], 0), ([4], 0), ([1, 2, 4], 0), ([4, 2, 1], 8)):
        same_bits = len(sizes) == 1 or parts > 0
        noise = 0.2 if same_bits else 0.0
        with tempfile.TemporaryDirectory() as name:
            begun = kill(args.kills, sizes, args.seed, Path(name), 10, noise, parts)
            far, same = difference(Path(name), 1 if parts else sizes[0], noise, parts)
        print(f"ranks {sizes}, {parts} parts: {args.kills} kills, went on from {begun}")
        print(f"difference {far:.1e}, same losses: {same}")
        if (far, same) != (0, True) if same_bits else far >= 1e-12:
            raise SystemExit("the parameters or losses differ from those of a run without kills")


if __name__ == "__main__":
    main()
