"""A rank of the run that `benchmarks.elastic` interrupts: it continues from the newest checkpoint, on one or two hosts.

The model is that of `examples/train_lm.py`, small and in float64. The mesh is `replica=-1, shard=2`, so that a host of
two ranks is one replica. A batch has 16 sequences on every mesh, so with fewer ranks, each has more rows. The step's
number determines the rows, by `sf.run.batches`, and the learning rate.
"""

from __future__ import annotations

import json
import os
import signal
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from examples.run import end, files, joined, stretches
from examples.train_lm import DATA, Config, init, loss_fn, optimizer
from shardfn import P

CONFIG = Config(width=16, heads=2, layers=2, hidden=24, context=16, dtype=torch.float64)
SCHEDULE = 2000  # steps of the learning rate's cosine; the run ends before
EVERY = 10  # steps between checkpoints


def train(folder: Path, until: int, pace: float = 0.0, shard: int = 2) -> sf.run.Run:
    """Trains until a file `stop` exists, or until step `until`; rank 0 logs a line for each step.

    When the file is found, it is renamed to `stopped`.
    """
    torch.set_num_threads(1)
    mesh = sf.make_mesh(replica=-1, shard=shard, device="cpu")
    text = stretches(joined(files(Path(json.__file__).parent, "*.py")[0]), CONFIG.context + 1)
    batches = sf.run.batches(text, mesh, DATA, CONFIG.batch, seed=0)
    opt = optimizer(CONFIG, SCHEDULE)
    stop, log = folder / "stop", os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=(..., P()))
    def trained(state: Any, rows: Tensor) -> Any:
        loss, grads = sf.value_and_grad(loss_fn)(state["model"], rows.long(), CONFIG)
        params, remembered = opt.step(state["model"], grads, state["optimizer"])
        return {"model": params, "optimizer": remembered}, {"loss": loss}

    def step(state: Any, rows: Tensor) -> Any:
        if stop.exists() and mesh.get_rank() == 0:
            stop.rename(folder / "stopped")
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(pace)
        return trained(state, rows)

    def report(step: int, metrics: dict[str, float]) -> None:
        row = {"time": time.time(), "step": step - 1, "ranks": mesh.size(), "loss": metrics["loss"]}
        os.write(log, (json.dumps(row) + "\n").encode())

    params = sf.shard(init(CONFIG, 0), mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    state = {"model": params, "optimizer": opt.init(params)}
    saves: dict[str, Any] = {"save": folder / "checkpoints", "save_every": EVERY, "keep_last": 2}
    return sf.run.loop(step, state, batches, steps=until, report=[report], **saves)[1]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The steps that rank 0 has logged, including repeated ones: time, step, ranks and loss."""
    file = folder / "steps"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = ArgumentParser(description="One rank of an elastic run; torchrun starts it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, default=SCHEDULE)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait before each step")
    parser.add_argument("--shard", type=int, default=2, help="ranks along this axis (default: %(default)s)")
    args = parser.parse_args()
    run = train(args.folder, args.until, args.pace, args.shard)
    if not (args.folder / "stopped").exists():
        end(run)


if __name__ == "__main__":
    main()
