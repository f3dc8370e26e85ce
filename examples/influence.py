"""Trains a small language model on files of the standard library, and asks which of them made it predict a text.

    torchrun --standalone --nproc-per-node 2 -m examples.influence --text "def copytree(src, dst, symlinks=False, "

Influence functions answer: the score of a file says by how much the loss of the text would fall if the file weighed
more. EK-FAC approximates the Fisher matrix that they invert. Some stretches of each file are held out, and the picture
in `runs/influence/influence.png` has the scores of all files for each file's held-out stretches, with EK-FAC and with
products of gradients alone. It takes about a minute on two free cores, and prints what it does.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from examples.run import Params, end, fit, hybrid_options, joined, stretches
from examples.train_lm import DATA, Config, init, loss_fn, model, optimizer
from shardfn import curvature as sc

SMALL = Config(width=64, layers=2, hidden=176, context=64, batch=32)
NETWORK = ("ftplib", "imaplib", "smtplib", "webbrowser")
NUMBERS = ("calendar", "fractions", "random", "statistics", "uuid")
FILES = (*NETWORK, *NUMBERS, "base64", "csv", "dis", "heapq", "plistlib", "shutil", "threading")
STRETCHES, HELD_OUT, DAMPING = 128, 8, 1e-4  # of each file; every so many is held out
SCORED = 32  # about so many of each file have their scores taken
Rows = dict[str, Tensor]


def sources(config: Config) -> tuple[Rows, Rows]:
    """Stretches of each file `[rows, context + 1]`, for training and held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = {name: joined([(folder / f"{name}.py").read_bytes()]) for name in FILES}
    rows = {name: stretches(text, config.context + 1)[:STRETCHES].long() for name, text in texts.items()}
    kept = {name: torch.arange(len(each)) % HELD_OUT > 0 for name, each in rows.items()}
    return {name: x[kept[name]] for name, x in rows.items()}, {name: x[~kept[name]] for name, x in rows.items()}


def losses(params: Params, rows: Tensor, config: Config) -> Tensor:
    """The mean loss of each row."""
    logits, targets = model(params, rows[:, :-1], config), rows[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def trained(
    config: Config, mesh: DeviceMesh, files: Rows, steps: int, strategy: sf.Strategy, report: Any = ()
) -> tuple[Params, sf.run.Run]:
    params = sf.shard(init(config, 0), mesh, strategy)
    batches = sf.run.batches(torch.cat([*files.values()]), mesh, DATA, config.batch, seed=0)

    def loss(params: Params, rows: Tensor) -> Tensor:
        return loss_fn(params, rows, config)

    params, run, _ = fit(loss, params, mesh, optimizer(config, steps), batches, steps, report)
    return params, run


def scores(config: Config, mesh: DeviceMesh, params: Params, files: Rows, queries: Rows) -> dict[str, Tensor]:
    """For each query the mean scores of the rows of each file `[queries, files]`, by EK-FAC and by gradients alone."""
    rows, some = torch.cat([*files.values()]), [x[:: max(1, len(x) // SCORED)] for x in files.values()]
    of = torch.arange(len(files)).repeat_interleave(torch.tensor([len(x) for x in some]))
    place, ranks, began = mesh.get_rank(), mesh.size(), time.perf_counter()

    def own(x: Tensor) -> list[Tensor]:
        return [part.tensor_split(ranks)[place] for part in x.split(64)]

    batches, scored = ([(x,) for x in own(given)] for given in (rows, torch.cat(some)))
    mine = torch.cat(own(of))

    def each(params: Params, rows: Tensor) -> Tensor:
        return losses(params, rows, config)

    def now(phase: str) -> None:
        if place == 0:
            print(f"{time.perf_counter() - began:4.0f} s  {phase}", flush=True)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def found(params: Params) -> dict[str, Tensor]:
        now(f"gradients of {len(queries)} queries")
        gradients = [
            sf.grad(lambda p, q=q: each(p, q).mean() / ranks)(params) for q in queries.values()
        ]  # of all ranks
        now(f"EK-FAC: two passes over {len(rows):,} stretches")
        fisher = sc.ekfac(each, params, batches, diagonal=["embed.places"])
        ways: dict[str, Callable[[Any], Any]] = {"EK-FAC": lambda q: fisher.solve(q, DAMPING), "gradients": lambda q: q}
        sums = {}
        for name, inverse in ways.items():
            now(f"scores by {name}: a pass for each query")
            mine_of = sc.influence(inverse, gradients, each, params, scored)
            sums[name] = sf.psum(mine_of.new_zeros(len(queries), len(files)).index_add_(1, mine, mine_of), DATA)
        return sums

    return {name: total / of.bincount() for name, total in found(params).items()}


def draw(found: Mapping[str, Tensor], names: Sequence[str], file: Path) -> None:
    """Draws the scores of all files for each file's held-out rows."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(9.2, 4.6), layout="constrained")
    for axes, (way, values) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        scaled = values / values.abs().amax(1, keepdim=True)
        shown = axes.imshow(scaled.tolist(), cmap="RdBu", vmin=-1, vmax=1)
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        first = int((values.argmax(1) == torch.arange(len(names))).sum())
        axes.set(title=f"{way}: {first} of {len(names)} find their own file first", xlabel="file that was trained on")
    figure.axes[0].set(ylabel="held-out stretches of")
    figure.colorbar(shown, ax=figure.axes, label="score, relative to the row's largest", shrink=0.8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def main() -> None:
    options = hybrid_options("Find the files that made a prediction.", DATA, "runs/influence", steps=300)
    options.add_argument("--text", default="def copytree(src, dst, symlinks=False, ", help="default: %(default)r")
    args = options.parse_args()
    mesh, (files, held_out) = sf.make_mesh(device=args.device, **args.mesh), sources(SMALL)
    params, run = trained(SMALL, mesh, files, args.steps, args.strategy, (sf.run.progress(),))
    end(run)
    text = torch.tensor([list(args.text.encode()[: SMALL.context + 1])])
    found = scores(SMALL, mesh, params, files, held_out | {"the text": text})
    if mesh.get_rank() == 0:
        draw({way: values[:-1] for way, values in found.items()}, FILES, args.out / "influence.png")
        ranked = found["EK-FAC"][-1].sort(descending=True)
        print(f"{args.text!r} was learned from:")
        for value, i in [*zip(ranked.values.tolist(), ranked.indices.tolist(), strict=True)][:5]:
            print(f"  {FILES[i]}.py  {value:+.2e}")
        print(f"scores of all files: {args.out / 'influence.png'}")


if __name__ == "__main__":
    main()
