"""What all examples share: the text and its batches, the loop, checkpoints, arguments, progress and pictures."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import resource
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
import shardfn.optim as so
from shardfn import P, checkpoint

Params = dict[str, Any]
Loss = Callable[[Params, int], Tensor]  # of parameters and a step's number, whose batch is drawn inside
Report = Callable[[int, float], None]  # of a step's number and its loss


# --- the text ---


def corpus() -> tuple[Tensor, Tensor]:
    """The standard library's sources as bytes, for training and, one file in sixteen, for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept: dict[bool, list[bytes]] = {True: [], False: []}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if not {"site-packages", "test", "tests"} & set(name.parts):
            kept[hashlib.blake2b(str(name).encode()).digest()[0] < 16].append(file.read_bytes())
    held_out, training = (
        torch.frombuffer(bytearray(b"\n".join(kept[side])), dtype=torch.uint8) for side in (True, False)
    )
    return training, held_out


def draw(
    data: Tensor, rows: int | tuple[int, ...], context: int, generator: torch.Generator, axis: sf.AxisName
) -> Tensor:
    """This rank's rows, `[..., rows, context + 1]`, of a batch that `axis` cuts; all ranks draw the same places."""
    shape = (rows,) if isinstance(rows, int) else rows
    starts = torch.randint(len(data) - context, shape, generator=generator, device=data.device)
    own = sf.local_slice(starts, axis, dim=-1)
    return data[own[..., None] + torch.arange(context + 1, device=data.device)].long()


# --- the loop ---


def silent(step: int, loss: float) -> None:
    pass


def descend(
    loss: Loss, params: Params, mesh: DeviceMesh, optimizer: so.Optimizer, steps: int, report: Report
) -> tuple[list[float], sf.Ledger]:
    """Trains by the loss of a step's batch; the losses, and what the last step moved."""

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P()), out_specs=(..., ..., P()))
    def train_step(params: Params, state: Params, step: int) -> tuple[Params, Params, Tensor]:
        value, grads = sf.value_and_grad(loss)(params, step)
        return *optimizer.step(params, grads, state), value

    state, losses = optimizer.init(params), []
    for step in range(steps):
        with sf.ledger() as log:
            params, state, value = train_step(params, state, step)
        losses.append(value.item())
        report(step, losses[-1])
    return losses, log


@dataclass(frozen=True)
class Run:
    """What a training run leaves behind."""

    params: Params  # whole
    losses: list[float]  # in nats, one for each step
    validation: float  # in nats, at the end
    log: sf.Ledger  # of the last step
    expected: dict[str, tuple[int, ...]]  # bytes that a rank sends for each stage in a step: see `moved`


@dataclass(frozen=True)
class Saves:
    """Where checkpoints go, how often, and whether to go on from one."""

    folder: Path
    every: int  # steps
    resume: bool = False

    def newest(self, start: Params) -> Params:
        """The newest checkpoint's state, or the start where there is none or it is not wanted."""
        found = checkpoint.latest(self.folder) if self.resume else None
        if found is None:
            return start
        state: Params = checkpoint.load(found, start)
        if state["seed"] != start["seed"]:
            raise ValueError(f"{found} is of a run with --seed {state['seed']}, not {start['seed']}")
        return state

    def keep(self, state: Params) -> None:
        """Writes the state in the background, after every so many steps."""
        if state["step"] % self.every == 0:
            checkpoint.save_async(self.folder / f"step-{state['step']:06d}", state, keep=2, overwrite=True)


# --- what is seen of it ---


@contextlib.contextmanager
def watched(mesh: DeviceMesh, steps: int, tokens: int = 0) -> Iterator[Report]:
    """A progress bar on the first rank, and the function that passes it a step's loss; `tokens` are those of a step."""
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, disable=mesh.get_rank() != 0, refresh_per_second=4) as bar:
        task, began, done = bar.add_task("starting", total=steps), time.perf_counter(), 0

        def report(step: int, loss: float) -> None:
            nonlocal done
            done += 1
            shown = [f"loss {loss:.3f}", f"{loss / math.log(2):.3f} bits/byte"]
            if tokens:
                shown.append(f"{done * tokens / (time.perf_counter() - began) / 1e3:.1f}k tokens/s")
            bar.update(task, completed=step + 1, description="  ".join([*shown, memory(mesh.device_type)]))

        yield report


def memory(device: str) -> str:
    """The most memory that this process has used."""
    if device == "cuda":
        return f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MB"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, whose first column holds words and the others numbers."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    Console().print(made)


def moved(log: sf.Ledger, stage: str) -> tuple[int, ...]:
    """Bytes sent for a stage's parameters, for these again in backward, and for gradients."""
    parameters = (log.bytes(stage=stage, op="all_gather", backward=way) for way in (False, True))
    return *parameters, sum(log.bytes(stage=stage, op=op) for op in ("reduce_scatter", "all_reduce"))


def compare(log: sf.Ledger, expected: dict[str, tuple[int, ...]]) -> None:
    """Prints a step's ledger, and for each stage what was sent next to what the formula says."""
    rows = []
    for stage, wanted in expected.items():
        both = zip(moved(log, stage), wanted, strict=True)
        rows.append([stage, *(f"{n / 1e3:.1f} / {m / 1e3:.1f}" for n, m in both)])
    print(log)
    columns = ("stage", "parameters", "again in backward", "gradients")
    table("kB that a rank sent in the last step / by the formula", columns, rows)


def leave(run: Run, logits: Callable[[Tensor], Tensor], folder: Path, seed: int) -> None:
    """Plots the loss curve, and prints the loss on held-out files and a text that the model writes."""
    plot(run.losses, run.validation, folder / "loss.png")
    text = complete(logits, b"def main(", 300, seed, run.params["head"]["out"].device)
    print(f"held-out files: {run.validation / math.log(2):.3f} bits per byte")
    print(f"loss curve: {folder / 'loss.png'}\n\n{text.decode(errors='replace')}")


def complete(logits: Callable[[Tensor], Tensor], prompt: bytes, length: int, seed: int, device: torch.device) -> bytes:
    """Continues a prompt, a byte at a time."""
    generator = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)
    with torch.no_grad():
        for _ in range(length):
            chosen = torch.multinomial((logits(text)[0, -1] / 0.8).softmax(-1), 1, generator=generator)
            text = torch.cat([text, chosen[None]], 1)
    return bytes(text[0].tolist())


def plot(losses: list[float], validation: float, file: Path) -> None:
    """The loss curve, in bits per byte, as a picture."""
    from matplotlib.figure import Figure  # which takes a second to load

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot([loss / math.log(2) for loss in losses], linewidth=0.8, label="training batch")
    axes.axhline(validation / math.log(2), color="black", linestyle=":", label="held-out files, at the end")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, bbox_inches="tight")


# --- arguments ---


def options(description: str, steps: int) -> argparse.ArgumentParser:
    """Those that every run has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", help="cpu or cuda; default: CUDA where there is some")
    return parser


def hybrid_arguments(description: str, axes: tuple[str, ...], out: str, steps: int) -> argparse.Namespace:
    """Those of a run by any strategy, with checkpoints: `mesh`, `strategy`, `out` and `saves` besides."""
    parser = options(description, steps)
    parser.add_argument(
        "--mesh", type=sizes_of(*axes), default="shard=-1",
        help="replica=R,shard=S; one may be -1 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--strategy", type=strategy_of, default="hybrid_shard",
        help="ddp, FULL_SHARD, zero1, hpz, ... (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path(out),
        help="folder for checkpoints and the loss curve (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    args = parser.parse_args()
    every = args.save_every or (args.steps if args.resume else 0)
    args.saves = Saves(args.out / "checkpoints", every, args.resume) if every else None
    return args


def sizes_of(*axes: str) -> Callable[[str], dict[str, int]]:
    """What reads a mesh of these axes, as in `replica=2,shard=2`; an axis that is not named has one rank."""

    def read(text: str) -> dict[str, int]:
        pairs = dict(pair.split("=") for pair in text.split(","))
        if not set(pairs) <= set(axes):
            example = ",".join(f"{axis}=2" for axis in axes[:2])
            raise argparse.ArgumentTypeError(f"axes are {', '.join(axes)}, as in {example}; got {text}")
        return {name: int(pairs.get(name, 1)) for name in axes}

    return read


def strategy_of(name: str) -> sf.Placement:
    """A strategy by its name, over `shard` and `replica`."""
    try:
        return sf.strategy(name, shard="shard", replica="replica")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def ranks(most: int) -> int:
    """Of those that torchrun has started as many as can stand along one axis, up to `most`."""
    return math.gcd(most, int(os.environ.get("WORLD_SIZE", "1")))
