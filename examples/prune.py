"""Trains a small language model, prunes three quarters of its blocks' weights in three ways, and compares the losses.

    torchrun --standalone --nproc-per-node 2 -m examples.prune

Two of the ways need second moments of each matrix's inputs, which `curvature.second_moments` sums over the tokens of
all ranks while stages run. The rank that owns a matrix prunes it.
"""

from __future__ import annotations

from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from examples.run import Params, corpus, hybrid_options, stretches
from examples.train_lm import DATA, Config, model, train
from shardfn import P
from shardfn import curvature as sc

SMALL = Config(width=64, layers=2, hidden=176, context=64)
SHARE, TOGETHER = 0.75, 16  # of the weights that go; columns among which they are chosen at once


def least(scores: Tensor) -> Tensor:  # of each row
    return scores.argsort(dim=1).argsort(dim=1) < int(SHARE * scores.shape[1])


def magnitude(weight: Tensor, gram: Tensor) -> Tensor:
    return weight.masked_fill(least(weight.abs()), 0)


def wanda(weight: Tensor, gram: Tensor) -> Tensor:  # what goes has small inputs too
    return weight.masked_fill(least(weight.abs() * gram.diagonal().sqrt()), 0)


def sparse_gpt(weight: Tensor, gram: Tensor) -> Tensor:  # and what is left makes up for it, column after column
    hessian = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    root = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)  # a row is of the inverse without those before
    weight = weight.clone()
    for start in range(0, len(gram), TOGETHER):
        some = slice(start, start + TOGETHER)
        goes = least(weight[:, some].abs() / root.diagonal()[some])
        for i, gone in enumerate(goes.unbind(1), start):
            weight[:, i:] -= torch.outer(weight[:, i] * gone / root[i, i], root[i, i:])
        weight[:, some] = weight[:, some].masked_fill(goes, 0)  # as it is up to rounding
    return weight


def run(config: Config, mesh: DeviceMesh, text: tuple[Tensor, Tensor], steps: int, strategy: sf.Strategy) -> Params:
    """The losses on held-out text: of the trained model, and of the pruned ones."""
    params = sf.shard(train(config, mesh, text, steps, 0, strategy).params, mesh, strategy)
    feeds = [sf.run.batches(stretches(part, config.context + 1), mesh, DATA, config.batch, seed=1) for part in text]
    training, held_out = ([rows.long() for rows in islice(feed(0), 8)] for feed in feeds)

    def losses(params: Params, rows: Tensor) -> Tensor:  # of each row
        logits, targets = model(params, rows[:, :-1], config), rows[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=P())
    def loss(params: Params, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return sf.pmean(losses(params, rows).mean(), DATA)

    grams, found = sc.second_moments(losses, params, training), {"trained": params}
    for prune in (magnitude, wanda, sparse_gpt):
        found[prune.__name__] = grams.replaced(lambda path, *of, f=prune: f(*of) if "blocks" in path else of[0])
    return {name: float(sum(loss(each, rows) for rows in held_out) / len(held_out)) for name, each in found.items()}


if __name__ == "__main__":
    args = hybrid_options("Prune a language model.", DATA, "runs/prune", steps=200).parse_args()
    mesh = sf.make_mesh(device=args.device, **args.mesh)
    for name, loss in run(SMALL, mesh, corpus(), args.steps, args.strategy).items():
        if mesh.get_rank() == 0:
            print(f"{name:10} {loss:.4f} nats")
