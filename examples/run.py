"""What the runs of several examples have in common: batches, the loop, the progress bar and its options."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterator

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
import shardfn.optim as so
from examples.train_lm import Config, Params, memory
from shardfn import P

Loss = Callable[[Params, int], Tensor]  # of parameters and a step's number, whose batch is drawn inside
Report = Callable[[float], None]  # of a step's loss


def draw(data: Tensor, config: Config, generator: torch.Generator, axis: sf.AxisName) -> Tensor:
    """This rank's rows, `[rows, context + 1]`, of one batch that `axis` cuts; along others ranks have the same."""
    starts = torch.randint(len(data) - config.context, (config.batch,), generator=generator, device=data.device)
    own = sf.local_slice(starts, axis)
    return data[own[:, None] + torch.arange(config.context + 1, device=data.device)].long()


def silent(loss: float) -> None:
    pass


def descend(
    loss: Loss, params: Params, mesh: DeviceMesh, optimizer: so.Optimizer, steps: int, report: Report
) -> tuple[list[float], sf.Ledger]:
    """Trains by the loss of a step's batch."""

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P()), out_specs=(..., ..., P()))
    def train_step(params: Params, state: Params, step: int) -> tuple[Params, Params, Tensor]:
        value, grads = sf.value_and_grad(loss)(params, step)
        return *optimizer.step(params, grads, state), value

    state, losses = optimizer.init(params), []
    for step in range(steps):
        with sf.ledger() as log:
            params, state, value = train_step(params, state, step)
        losses.append(value.item())
        report(losses[-1])
    return losses, log


@contextlib.contextmanager
def watched(mesh: DeviceMesh, steps: int) -> Iterator[Report]:
    """A progress bar on the first rank, and the function that tells it a step's loss."""
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, disable=mesh.get_rank() != 0, refresh_per_second=4) as bar:
        task = bar.add_task("starting", total=steps)

        def report(loss: float) -> None:
            told = f"loss {loss:.3f}  {loss / math.log(2):.3f} bits/byte  {memory(mesh.device_type)}"
            bar.update(task, advance=1, description=told)

        yield report


def options(description: str, steps: int) -> argparse.ArgumentParser:
    """Those that every run has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", help="cpu or cuda; default: CUDA where there is some")
    return parser


def ranks(most: int) -> int:
    """Of those that torchrun has started as many as can stand along one axis, up to `most`."""
    return math.gcd(most, int(os.environ.get("WORLD_SIZE", "1")))
