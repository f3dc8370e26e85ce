"""Kills processes that train and save at random moments, and continues from the newest checkpoint.

    python -m tests.crash --kills 200             # with --scratch FOLDER: parameters, gradients and state on disk

Each life is a few processes on a randomly chosen mesh. They train a small model and save after every step, alternately
in the foreground and in the background, until one or all of them get SIGKILL. Then the newest checkpoint must be
intact, and at least as new as the last save that had returned; the next life continues from it. The final parameters
must equal those of a run without kills: bit for bit if the mesh is the same in all lives, otherwise up to rounding.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, checkpoint
from shardfn.checkpoint.verifying import verify

MESHES: list[dict[str, int]] = [{"shard": 2}, {"shard": 3}, {"replica": 2, "shard": 1}, {"shard": 1}]
KEEP, DEADLINE = 2, 40.0
LIFE = 1.0  # most seconds from the start of training until a process is killed


@dataclass
class Tally:
    """The counts of a test.

    Attributes:
        ends: the number of lives that ended in each way.
        torn: folders of saves that a kill interrupted.
        saved: after each life, the newest step whose save had returned.
        steps: the step of the newest checkpoint.
    """

    ends: Counter[str] = field(default_factory=Counter)
    torn: int = 0
    saved: list[int] = field(default_factory=list)
    steps: int = 0


def initial(mesh: Any, tiers: dict[str, Any]) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    params = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}
    replicas = ("replica",) if "replica" in mesh.mesh_dim_names else ()
    strategy = sf.hybrid_shard(shard="shard", replica=replicas) if replicas else sf.full_shard("shard")
    placed = sf.shard(params, mesh, strategy.with_tiers(**tiers))
    return {"model": placed, "optimizer": OPTIMIZER.init(placed), "step": 0, "noise": torch.Generator().manual_seed(1)}


SHAPES = {"a": (64, 33), "b": (7,), "c": (128, 64)}
OPTIMIZER = so.adamw(1e-2)


def trained(state: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """The state after one step; the step's number determines its data, and the generator in the state its noise."""
    axes = tuple(mesh.mesh_dim_names)

    @sf.stage
    def energy(p: Any, x: Tensor) -> Tensor:
        return ((x @ p - 1) ** 2).sum() if p.ndim == 2 else (p**2).sum()

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P()), out_specs=...)
    def step(params: Any, moments: Any, noise: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for name, p in params.items():
                rows = torch.randn(6, SHAPES[name][0], generator=sf.fold_in(0, state["step"]), dtype=torch.float64)
                own = sf.pvary(rows + noise, axes)
                total = total + energy(p, own) / sf.axis_size(axes)
            return sf.psum(total, axes)

        grads = sf.grad(loss)(params)
        return OPTIMIZER.step(params, grads, moments)

    noise = torch.randn((), generator=state["noise"], dtype=torch.float64)
    model, moments = step(state["model"], state["optimizer"], noise)
    return {**state, "model": model, "optimizer": moments, "step": state["step"] + 1}


ON_DISK = {"params": "disk", "grads": "disk", "state": "disk"}


def live(rank: int, sizes: dict[str, int], folder: str, number: int, steps: int, scratch: str = "") -> None:
    """One process of a life; with parameters, gradients and state in a scratch folder, if there is one."""
    os.environ["SHARDFN_SCRATCH"] = scratch
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    root, size = Path(folder), math.prod(sizes.values())
    os.dup2(os.open(root / f"log{number}.{rank}", os.O_WRONLY | os.O_CREAT), 2)  # for messages of surviving processes
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = (root / f"store{number}").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    mesh = sf.make_mesh(device="cpu", **sizes)
    state = initial(mesh, ON_DISK if scratch else {})
    newest = checkpoint.latest(root / "run")
    if newest is not None:
        state = checkpoint.load(newest, state)
    (root / f"trains{number}.{rank}").touch()
    log = os.open(root / f"saved{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while state["step"] < steps:
        state = trained(state, mesh)
        path = root / "run" / f"step-{state['step']:05d}"
        if path.exists():  # an earlier life has saved this step
            raise AssertionError(f"{path} was not the newest")
        if state["step"] % 2:
            checkpoint.save(path, state, keep=KEEP)
            if rank == 0:
                os.write(log, f"{state['step']}\n".encode())
        else:
            checkpoint.save_async(path, state, keep=KEEP)
    checkpoint.wait_for_saves()
    if rank == 0:
        os.write(log, f"{state['step']}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


def crash(
    kills: int, steps: int, seed: int, meshes: list[dict[str, int]], folder: Path, scratch: Path | None = None
) -> tuple[Tally, float]:
    """Runs and kills so many lives, then one life that trains all steps.

    Returns:
        The counts, and the relative difference of the parameters from a run without kills.

    Raises:
        AssertionError: something was lost, or hangs.
    """
    draw, tally, number = random.Random(seed), Tally(), 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardfn.optim", "torch.distributed.device_mesh"])
    while True:
        last = number >= kills
        sizes = draw.choice(meshes)
        size = math.prod(sizes.values())
        place = "" if scratch is None else str(scratch)
        given = [(rank, sizes, str(folder), number, steps if last else 10**6, place) for rank in range(size)]
        if last:
            newest = checkpoint.latest(folder / "run")
            done = int(newest.name.split("-")[1]) if newest else 0
            given = [(*one[:4], max(steps, done + 3), place) for one in given]
        processes = [context.Process(target=live, args=args, daemon=True) for args in given]
        for process in processes:
            process.start()
        end = time.monotonic() + DEADLINE
        while not last and not all((folder / f"trains{number}.{rank}").exists() for rank in range(size)):
            assert time.monotonic() < end, f"life {number} does not begin"
            alive = all(process.is_alive() for process in processes)
            assert alive, f"life {number} did not come to train: {(folder / f'log{number}.0').read_text()}"
            time.sleep(0.002)
        if not last:
            time.sleep(draw.random() * LIFE)
            victims = processes if draw.random() < 0.3 else [draw.choice(processes)]
            assert all(process.is_alive() for process in processes), f"life {number} ended by itself"
            for process in victims:
                process.kill()
            tally.ends["all killed" if len(victims) == size else "one killed"] += 1
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            assert process.exitcode is not None, (
                f"life {number}: a rank hangs after another was killed: {where(process)}"
            )
        tally.torn += len(list((folder / "run").glob(".*.writing")))
        check(folder, number, tally)
        left = [] if scratch is None else os.listdir(scratch)
        assert not left, f"life {number} left {left}"
        if last:
            assert all(process.exitcode == 0 for process in processes), (folder / f"log{number}.0").read_text()
            break
        number += 1
    return tally, difference(folder, meshes[0])


def where(process: Any) -> str:
    """The end of a process's log, after it has written the stacks of its threads there."""
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)
    return Path(f"/proc/{process.pid}/fd/2").read_text()[-4000:]


def check(folder: Path, number: int, tally: Tally) -> None:
    """Asserts that the newest checkpoint is intact, and not older than the last save that returned in any life."""
    log = folder / f"saved{number}"
    saved = [int(line) for line in log.read_text().split()] if log.exists() else []
    floor = max([*saved, *tally.saved], default=0)
    tally.saved.append(floor)
    newest = checkpoint.latest(folder / "run")
    step = int(newest.name.split("-")[1]) if newest else 0
    assert step >= floor, f"life {number}: a save of step {floor} had returned, but the newest is {newest}"
    if newest is not None:
        damage = verify(newest).damage
        assert not damage, f"life {number}: {newest} is damaged: {damage}"
    tally.steps = step


def difference(folder: Path, sizes: dict[str, int]) -> float:
    """The relative difference from a run without kills, on the mesh `sizes`, at the step of the newest checkpoint."""
    newest = checkpoint.latest(folder / "run")
    assert newest is not None
    apart = folder / "reference"
    apart.mkdir()
    size = math.prod(sizes.values())
    context = multiprocessing.get_context("forkserver")
    steps = int(newest.name.split("-")[1])
    processes = [context.Process(target=live, args=(rank, sizes, str(apart), 0, steps)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    wanted = checkpoint.latest(apart / "run")
    assert wanted is not None
    assert wanted.name == newest.name
    found = [whole(one) for one in (newest, wanted)]
    assert found[0][1] == found[1][1], "numbers differ"
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-300)).item()
        for a, b in zip(*(optree.tree_leaves(tree) for tree, _ in found), strict=True)
    )


def whole(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors and numbers in a checkpoint."""
    from shardfn.checkpoint.folders import source_of

    source = source_of(path)
    like: dict[str, Any] = {name: torch.empty(kind.shape, dtype=kind.dtype) for name, kind in source.tensors.items()}
    like |= source.numbers
    found = checkpoint.load(path, like)
    return {name: found[name] for name in source.tensors}, {name: found[name] for name in source.numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill processes that train and save, and continue.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20, help="least number of steps; lives may train more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, help="folder for parameters, gradients and state")
    parser.add_argument("--one-mesh", action="store_true", help="the same mesh in every life: equal bit for bit")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        meshes = MESHES[:1] if args.one_mesh else MESHES
        tally, worst = crash(args.kills, args.steps, args.seed, meshes, folder, args.scratch)
    finally:
        shutil.rmtree(folder)
    print(f"kills: {dict(tally.ends)}; saves cut short: {tally.torn}; steps: {tally.steps}")
    print(f"lost saves: 0; damaged checkpoints: 0; hangs: 0; difference from a run without kills: {worst:.1e}")
    if worst != 0 if args.one_mesh else worst >= 1e-12:
        raise SystemExit("the parameters differ from those of a run without kills")


if __name__ == "__main__":
    main()
