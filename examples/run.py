"""Code that all examples share: the text and its batches, the loop, checkpoints, arguments, progress and plots."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import resource
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
import shardfn.optim as so
from shardfn import P

Params = dict[str, Any]
Metrics = dict[str, Tensor]
Step = Callable[[Params, Any], tuple[Params, Metrics]]
Reports = tuple[Callable[[int, dict[str, float]], Any], ...]


# --- the text ---


def files(root: Path, pattern: str, but: Iterable[str] = ()) -> tuple[list[bytes], list[bytes]]:
    """Files in a folder, for training and for validation: one in sixteen, chosen by the hash of its name.

    Subfolders that `but` names are left out.
    """
    kept: dict[bool, list[bytes]] = {True: [], False: []}
    for file in sorted(root.rglob(pattern)):
        name = file.relative_to(root)
        if not {*but} & {*name.parts}:
            kept[hashlib.blake2b(str(name).encode()).digest()[0] < 16].append(file.read_bytes())
    return kept[False], kept[True]


def sources() -> tuple[list[bytes], list[bytes]]:
    """The files of the standard library."""
    return files(Path(sysconfig.get_paths()["stdlib"]), "*.py", but=("site-packages", "test", "tests"))


def joined(files: Iterable[bytes]) -> Tensor:
    """Files as one tensor of bytes."""
    return torch.frombuffer(bytearray(b"\n".join(files)), dtype=torch.uint8)


def corpus() -> tuple[Tensor, Tensor]:
    """The sources of the standard library as bytes, for training and for validation."""
    training, held_out = map(joined, sources())
    return training, held_out


def bytes_tokenizer() -> Any:
    """A tokenizer of `transformers` whose tokens are single bytes, plus one for the start and one for the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]  # one letter for each byte
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def stretches(text: Tensor, length: int) -> Tensor:
    """Splits a text into rows `[rows, length]`; each begins with the last byte of the previous row."""
    return text.unfold(0, length, length - 1)


# --- the training ---


def adamw(rate: float, warmup: int, steps: int, decay: float, clip: float) -> so.Optimizer:
    """AdamW with clipping; linear warm-up, then a cosine. Only matrices have weight decay."""

    def decays(path: str, shape: tuple[int, ...]) -> float:
        return decay if len(shape) > 1 else 0.0

    rates = so.warmup_cosine(rate, warmup=min(warmup, steps), steps=steps, end=rate / 10)
    return so.chain(so.clip_by_global_norm(clip), so.adamw(rates, weight_decay=decays))


class Counted:
    """A step that records the ledger of its last call."""

    def __init__(self, step: Step) -> None:
        self.step, self.log = step, sf.collectives.Ledger()

    def __call__(self, state: Params, batch: Any) -> tuple[Params, Metrics]:
        with sf.collectives.ledger() as self.log:  # costs almost nothing
            return self.step(state, batch)


def fit(
    loss: Callable[[Params, Any], Tensor],
    params: Params,
    mesh: DeviceMesh,
    optimizer: so.Optimizer,
    batches: sf.run.Batches,
    steps: int,
    report: Reports = (),
    evaluate: tuple[Callable[[Params], Metrics], int] | None = None,
) -> tuple[Params, sf.run.Run, sf.collectives.Ledger]:
    """Trains with the loss of a batch; returns the parameters, the run, and the ledger of the last step.

    `evaluate` is a function of the parameters, and the number of steps between its calls.
    """

    @sf.shard_map(mesh=mesh, in_specs=(..., ...), out_specs=(..., P()))
    def step(state: Params, batch: Any) -> tuple[Params, Metrics]:
        value, grads = sf.value_and_grad(loss)(state["model"], batch)
        params, remembered = optimizer.step(state["model"], grads, state["optimizer"])
        return {"model": params, "optimizer": remembered}, {"loss": value}

    if evaluate is not None:
        function, interval = evaluate
        evaluate = (lambda state: function(state["model"])), interval
    counted, state = Counted(step), {"model": params, "optimizer": optimizer.init(params)}
    state, run = sf.run.loop(counted, state, batches, steps=steps, evaluate=evaluate, report=report)
    return state["model"], run, counted.log


def end(run: sf.run.Run) -> None:
    """Exits with EX_TEMPFAIL if the run was interrupted, so that torchrun or a scheduler restarts it."""
    if run.ended != "finished":
        sys.exit(os.EX_TEMPFAIL)


def curve(run: sf.run.Run, name: str = "loss") -> list[float]:
    """The values of a metric, one per step."""
    return list(run.metrics[name].values())


# --- the output ---


def memory(device: str) -> str:
    """The peak memory of this process."""
    if device == "cuda":
        return f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MB"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; its first column is text, the others are numbers."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    Console().print(made)


def moved(log: sf.collectives.Ledger, stage: str) -> tuple[int, ...]:
    """Bytes sent to gather a stage's parameters, to gather them again in backward, and to reduce gradients."""
    parameters = (log.bytes(stage=stage, op="all_gather", backward=way) for way in (False, True))
    return *parameters, sum(log.bytes(stage=stage, op=op) for op in ("reduce_scatter", "all_reduce"))


def compare(log: sf.collectives.Ledger, expected: dict[str, tuple[int, ...]]) -> None:
    """Prints a step's ledger, and for each stage, the bytes sent next to those of the formula."""
    rows = []
    for stage, wanted in expected.items():
        both = zip(moved(log, stage), wanted, strict=True)
        rows.append([stage, *(f"{n / 1e3:.1f} / {m / 1e3:.1f}" for n, m in both)])
    print(log)
    columns = ("stage", "parameters", "again in backward", "gradients")
    table("kB that a rank sent in the last step / by the formula", columns, rows)


def leave(metrics: Path, validation: float, logits: Callable[[Tensor], Tensor], folder: Path, seed: int) -> None:
    """Plots the loss curve in a file, and prints the loss on held-out files and a text generated by the model."""
    lines = map(json.loads, metrics.read_text().splitlines())
    plot([line["loss"] for line in lines if "loss" in line], validation, folder / "loss.png")
    text = complete(logits, b"def main(", 300, seed)
    print(f"held-out files: {validation / math.log(2):.3f} bits per byte")
    print(f"loss curve: {folder / 'loss.png'}\n\n{text.decode(errors='replace')}")


def complete(logits: Callable[[Tensor], Tensor], prompt: bytes, length: int, seed: int) -> bytes:
    """Continues a prompt, one byte at a time."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(length):
            chosen = torch.multinomial((logits(text)[0, -1].cpu() / 0.8).softmax(-1), 1, generator=generator)
            text = torch.cat([text, chosen[None]], 1)
    return bytes(text[0].tolist())


def plot(losses: list[float], validation: float, file: Path) -> None:
    """Plots the loss curve, in bits per byte."""
    levels = {"held-out files, at the end": validation / math.log(2)}
    picture({"training batch": [loss / math.log(2) for loss in losses]}, "bits per byte", file, levels)


def picture(
    curves: Mapping[str, Sequence[float]],
    label: str,
    file: Path,
    levels: Mapping[str, float] | None = None,
    steps: Sequence[int] | None = None,
) -> None:
    """Plots curves over the steps, whose numbers are `steps`, and dotted lines at `levels`."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(steps or range(len(curve)), curve, linewidth=0.8, label=name, marker="o" if steps else "")
    for name, level in (levels or {}).items():
        axes.axhline(level, color="black", linestyle=":", label=name)
    axes.set(xlabel="step", ylabel=label, ylim=(0, None))
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, bbox_inches="tight")


# --- arguments ---


def options(description: str, steps: int) -> argparse.ArgumentParser:
    """The options of every example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", help="cpu or cuda; default: cuda if available")
    return parser


def hybrid_options(description: str, axes: tuple[str, ...], out: str, steps: int) -> argparse.ArgumentParser:
    """The options of a run with any strategy: also `mesh`, `strategy` and `out`."""
    parser = options(description, steps)
    parser.add_argument(
        "--mesh", type=sizes_of(*axes), default="shard=-1",
        help="replica=R,shard=S; one size may be -1 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--strategy", type=strategy_of, default="hybrid_shard",
        help="ddp, FULL_SHARD, zero1, hpz, ... (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path(out),
        help="folder for all files that the run writes (default: %(default)s)",
    )  # fmt: skip
    return parser


def hybrid_arguments(description: str, axes: tuple[str, ...], out: str, steps: int) -> argparse.Namespace:
    """The arguments of a run with any strategy and checkpoints: also `saves`, keyword arguments of `sf.run.loop`."""
    parser = hybrid_options(description, axes, out, steps)
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (default: none)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    parser.add_argument("--exact", type=int, default=0, metavar="PARTS", help="the same bits on up to PARTS ranks")
    args = parser.parse_args()
    args.strategy, args.saves = args.strategy.with_exact(args.exact), {}
    if args.save_every or args.resume:
        every = args.save_every or args.steps
        args.saves = {"save": args.out / "checkpoints", "save_every": every, "keep_last": 2, "resume": args.resume}
    return args


def sizes_of(*axes: str) -> Callable[[str], dict[str, int]]:
    """A parser for the sizes of these mesh axes, such as `replica=2,shard=2`; an axis not named has one rank."""

    def read(text: str) -> dict[str, int]:
        with contextlib.suppress(ValueError):
            found = {name: int(size) for name, size in (pair.split("=") for pair in text.split(","))}
            if set(found) <= set(axes):
                return {name: found.get(name, 1) for name in axes}
        example = ",".join(f"{axis}=2" for axis in axes[:2])
        raise argparse.ArgumentTypeError(f"axes are {', '.join(axes)}, as in {example}; got {text}")

    return read


def folder_of(text: str) -> Path:
    """The path of an existing folder; `transformers` would take any other path for a name on the Hub."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def strategy_of(name: str) -> sf.Placement:
    """The strategy of this name, over `shard` and `replica`."""
    try:
        return sf.strategies.from_name(name, shard="shard", replica="replica")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def ranks(most: int) -> int:
    """The size of a mesh axis that fits the number of processes: a common divisor of it and `most`."""
    return math.gcd(most, int(os.environ.get("WORLD_SIZE", "1")))
