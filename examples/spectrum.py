"""Watches how the loss of a language model curves while it trains: its sharpness, and all eigenvalues of its Hessian.

    torchrun --standalone --nproc-per-node 2 -m examples.spectrum

The model, its text and its optimizer are those of `examples.train_lm`, smaller. Every few steps the run evaluates the
Hessian of one batch's loss, whose products run on the shards as a training step does. At the end it draws, in
`runs/spectrum/spectrum.png`, the densities of eigenvalues at some steps; and the largest eigenvalue, raw and as AdamW
preconditions it, beside the value from which on AdamW with this learning rate would be unstable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from examples.run import Params, Reports, corpus, end, hybrid_options, stretches
from examples.train_lm import DATA, Config, init, loss_fn, optimizer
from shardfn import P
from shardfn import curvature as sc

SMALL = Config(width=64, layers=2, hidden=176, context=64, rate=3e-3)
FIGURES = ("raw", "preconditioned", "critical")


@dataclass
class Watched:
    """What a run has seen of its curvature.

    Attributes:
        run: with the figures of `FIGURES`, as `eval/...`.
        densities: of the eigenvalues, by step.
    """

    run: sf.run.Run
    densities: dict[int, sc.Spectrum] = field(default_factory=dict)


def watch(
    config: Config, mesh: DeviceMesh, text: Tensor, steps: int, every: int, strategy: sf.Strategy, report: Reports = ()
) -> Watched:
    """Trains, and looks at the curvature after `every` steps, on one batch that stays the same."""
    opt = optimizer(config, steps)
    batches = sf.run.batches(stretches(text, config.context + 1), mesh, DATA, config.batch, seed=0)
    densities: list[sc.Spectrum] = []

    def loss(params: Params, rows: Tensor) -> Tensor:
        return loss_fn(params, rows.long(), config)

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=(..., P()))
    def step(state: Params, rows: Tensor) -> tuple[Params, dict[str, Tensor]]:
        value, grads = sf.value_and_grad(loss)(state["model"], rows)
        params, remembered = opt.step(state["model"], grads, state["optimizer"])
        return {"model": params, "optimizer": remembered}, {"loss": value}

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=...)
    def curvature(state: Params, rows: Tensor) -> dict[str, Any]:
        params, H = state["model"], sc.hvp(loss, state["model"], [rows])
        gradient = sf.grad(loss)(params, rows)
        return {
            "spectrum": sc.spectrum(H, 40),
            "raw": sc.top_eig(H, which="LA", tolerance=1e-2).values[0],
            "preconditioned": sc.sharpness(loss, params, [rows], state=state["optimizer"]),
            "critical": sc.critical_sharpness(loss, params, gradient, [rows]).sharpness,
        }

    rows = next(batches(0))

    def evaluate(state: Params) -> dict[str, Any]:
        seen = curvature(state, rows)
        densities.append(seen.pop("spectrum"))
        return seen

    params = sf.shard(init(config, 0), mesh, strategy)
    state = {"model": params, "optimizer": opt.init(params)}
    _, run = sf.run.loop(step, state, batches, steps=steps, evaluate=(evaluate, every), report=report)
    return Watched(run, dict(zip(run.metrics["eval/raw"], densities, strict=True)))


def draw(watched: Watched, config: Config, shown: Sequence[int], file: Path) -> None:
    """Draws the densities at some steps, and the curves of the largest eigenvalues."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    most = max(float(watched.densities[step].values.max()) for step in shown)
    least = min(float(watched.densities[step].values.min()) for step in shown)
    width = (most - least) / 100
    points = torch.linspace(least - 5 * width, most + 5 * width, 600, dtype=torch.float64)
    for step in shown:
        left.semilogy(points, watched.densities[step].density(points, width), label=f"step {step}", linewidth=1)
    left.set(xlabel="eigenvalue of the Hessian", ylabel="density", ylim=(1e-7, 1e2))
    left.legend()
    for name in FIGURES:
        curve = watched.run.metrics[f"eval/{name}"]
        right.semilogy(list(curve), list(curve.values()), marker="o", markersize=3, linewidth=1, label=name)
    right.axhline(38 / config.rate, color="black", linestyle=":", label="38 / learning rate")
    right.set(xlabel="step", ylabel="largest eigenvalue")
    right.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def main() -> None:
    options = hybrid_options("Watch the curvature of a language model's loss.", DATA, "runs/spectrum", steps=200)
    options.add_argument("--every", type=int, default=20, help="steps between two looks (default: %(default)s)")
    args = options.parse_args()
    mesh = sf.make_mesh(device=args.device, **args.mesh)
    watched = watch(SMALL, mesh, corpus()[0], args.steps, args.every, args.strategy, (sf.run.progress(),))
    end(watched.run)
    if mesh.get_rank() == 0:
        seen = list(watched.densities)
        draw(watched, SMALL, sorted({seen[0], seen[len(seen) // 2], seen[-1]}), args.out / "spectrum.png")
        print(f"densities and sharpness: {args.out / 'spectrum.png'}")


if __name__ == "__main__":
    main()
