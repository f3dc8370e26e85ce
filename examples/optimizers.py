"""Trains a small language model with several optimizers, and draws their losses by steps and by seconds.

    torchrun --standalone --nproc-per-node 2 -m examples.optimizers

The model, its text and its schedule are those of `examples.train_lm`, smaller. Shampoo, SOAP, KL-Shampoo and K-FAC
decompose a matrix on the rank that owns it; Sophia and K-FAC are told of the loss's curvature by `shardfn.curvature`
every ten steps, which their seconds include. The picture is in `runs/optimizers/optimizers.png`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
import shardfn.optim as so
from examples.run import Params, corpus, hybrid_options, stretches
from examples.train_lm import DATA, Config, init, loss_fn, model
from shardfn import P
from shardfn import curvature as sc

SMALL = Config(width=64, layers=2, hidden=176, context=64)
EVERY, MATRICES = 10, r"blocks\..*\.(qkv|out|up|down)|head\.out"  # those that products use
Estimate = Callable[[Params, Any, Tensor, int], Any]
Curves = dict[str, list[tuple[float, float]]]  # seconds of training, and the loss, of each step


def optimizers(config: Config, steps: int) -> dict[str, tuple[so.Optimizer, Estimate | None]]:
    """Each optimizer, and what refreshes what it knows of the curvature, in its state."""

    def rate(peak: float) -> so.hyperparameters.Schedule:
        return so.warmup_cosine(peak, warmup=min(config.warmup, steps), steps=steps, end=peak / 10)

    sophia = so.sophia(rate(1e-3), gamma=0.02)
    kfac = so.kfac(rate(0.1), damping=1e-2, which=MATRICES, fallback=so.adamw(rate(6e-3), b2=0.98))

    def diagonal(params: Params, state: Any, rows: Tensor, step: int) -> Any:
        hessian = sc.hvp(lambda p, rows: loss_fn(p, rows, config), params, [rows])
        return sophia.estimate(params, sc.diag(hessian, 1, seed=step), state)

    def moments(params: Params, state: Any, rows: Tensor, step: int) -> Any:
        def losses(params: Params, rows: Tensor) -> Tensor:
            logits, targets = model(params, rows[:, :-1], config), rows[:, 1:]
            return (
                F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)
            )

        return kfac.estimate(sc.second_moments(losses, params, [rows], outputs=True), state)

    muon = so.masked(so.muon(rate(0.02)), MATRICES, so.adamw(rate(6e-3), b2=0.98))
    return {
        "adamw": (so.adamw(rate(6e-3), b2=0.98), None),
        "sophia": (sophia, diagonal),
        "muon": (muon, None),
        "shampoo": (so.shampoo(rate(6e-3), b2=0.98, every=EVERY), None),
        "kl_shampoo": (so.kl_shampoo(rate(6e-3), every=EVERY), None),
        "soap": (so.soap(rate(6e-3), every=EVERY), None),
        "kfac": (kfac, moments),
    }


def compare(
    config: Config, mesh: DeviceMesh, text: Tensor, steps: int, strategy: sf.Strategy, names: Sequence[str] = ()
) -> Curves:
    """Trains with each optimizer, on the same batches from the same parameters."""
    found: Curves = {}
    for name, (optimizer, estimate) in optimizers(config, steps).items():
        if names and name not in names:
            continue

        @sf.shard_map(mesh=mesh, in_specs=(..., ..., P(DATA), P()), out_specs=(..., ..., P()))
        def step(
            params: Params, state: Any, rows: Tensor, number: int, optimizer: Any = optimizer, estimate: Any = estimate
        ) -> Any:
            loss, grads = sf.value_and_grad(lambda p: loss_fn(p, rows, config))(params)
            if estimate is not None and number % EVERY == 0:
                state = estimate(params, state, rows, number)
            return *optimizer.step(params, grads, state), loss

        params = sf.shard(init(config, 0), mesh, strategy)
        state, seconds, found[name] = optimizer.init(params), 0.0, []
        batches = sf.run.batches(stretches(text, config.context + 1), mesh, DATA, config.batch, seed=0)(0)
        for number in range(steps):
            rows, began = next(batches).long(), time.perf_counter()
            params, state, loss = step(params, state, rows, number)
            value = float(loss)
            seconds += time.perf_counter() - began if number else 0.0  # the first step makes plans and checks
            found[name].append((seconds, value))
    return found


def draw(curves: Curves, file: Path) -> None:
    """Draws the losses, averaged over about ten steps, by steps and by seconds."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        seconds, losses = torch.tensor(curve, dtype=torch.float64).unbind(1)
        mean = losses.unfold(0, min(10, len(losses)), 1).mean(1)
        by_step.plot(range(len(losses) - len(mean), len(losses)), mean, linewidth=1, label=name)
        by_second.plot(seconds[-len(mean) :], mean, linewidth=1, label=name)
    by_step.set(xlabel="step", ylabel="loss of training batches, nats")
    by_second.set(xlabel="seconds of training")
    by_step.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def main() -> None:
    args = hybrid_options("Compare optimizers.", DATA, "runs/optimizers", steps=200).parse_args()
    mesh = sf.make_mesh(device=args.device, **args.mesh)
    curves = compare(SMALL, mesh, corpus()[0], args.steps, args.strategy)
    if mesh.get_rank() == 0:
        draw(curves, args.out / "optimizers.png")
        for name, curve in curves.items():
            print(f"{name:10} {sum(loss for _, loss in curve[-10:]) / 10:.3f} nats, {curve[-1][0]:.1f} s")


if __name__ == "__main__":
    main()
