"""A rank of the run that `benchmarks.elastic` interrupts: it goes on from the newest checkpoint, on one host or two.

The model is that of `examples/train_lm.py`, small and in float64. The mesh is `replica=-1, shard=2`, so that a host of
two ranks is one replica. A batch has 16 sequences on every mesh: a rank has more rows where there are fewer ranks.
Which they are follows from the step's number, and so does the learning rate.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from examples.run import draw, files, joined
from examples.train_lm import DATA, Config, init, loss_fn, optimizer
from shardfn import P, checkpoint

CONFIG = Config(width=16, heads=2, layers=2, hidden=24, context=16, dtype=torch.float64)
SCHEDULE = 2000  # steps of the learning rate's cosine; the run is ended before
EVERY = 10  # steps between checkpoints


def train(folder: Path, until: int, pace: float = 0.0, shard: int = 2) -> None:
    """Steps until there is a file `stop`, or this many were taken; rank 0 writes a line about each."""
    torch.set_num_threads(1)
    mesh = sf.make_mesh(replica=-1, shard=shard, device="cpu")
    text = joined(files(Path(json.__file__).parent, "*.py")[0])
    opt = optimizer(CONFIG, SCHEDULE)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P(), P(DATA)), out_specs=(..., ..., P(), P()))
    def trained(params: Any, state: Any, step: int, stop: Tensor) -> Any:
        tokens = draw(text, CONFIG.batch, CONFIG.context, sf.fold_in(0, step), DATA)
        loss, grads = sf.value_and_grad(loss_fn)(params, tokens, CONFIG)
        return *opt.step(params, grads, state), loss, sf.psum(stop, DATA)

    params = sf.shard(init(CONFIG, 0), mesh, sf.hybrid_shard("shard", "replica"))
    now = {"model": params, "optimizer": opt.init(params), "step": 0}
    newest = checkpoint.latest(folder / "checkpoints")
    now = checkpoint.load(newest, now) if newest else now
    log = os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stopped = False
    while not stopped and now["step"] < until:
        began = time.monotonic()
        stop = torch.full((1,), float((folder / "stop").exists()))
        params, state, loss, stops = trained(now["model"], now["optimizer"], now["step"], stop)
        stopped = bool(stops > 0)
        if mesh.get_rank() == 0:
            row = {"time": time.time(), "step": now["step"], "ranks": mesh.size(), "loss": loss.item()}
            os.write(log, (json.dumps(row) + "\n").encode())
        now = {"model": params, "optimizer": state, "step": now["step"] + 1}
        if now["step"] % EVERY == 0:
            checkpoint.save_async(folder / "checkpoints" / f"step-{now['step']:06d}", now, keep=2, overwrite=True)
        time.sleep(max(0.0, began + pace - time.monotonic()))
    checkpoint.finish()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 has written about the steps of a run, repeated ones too: time, step, ranks and loss."""
    file = folder / "steps"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = ArgumentParser(description="One rank of an elastic run; torchrun starts it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, default=SCHEDULE)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--shard", type=int, default=2, help="ranks along this axis (default: %(default)s)")
    args = parser.parse_args()
    train(args.folder, args.until, args.pace, args.shard)


if __name__ == "__main__":
    main()
