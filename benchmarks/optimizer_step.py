"""AdamW on the flat shards of a model, beside the same fused kernel on one tensor with as many elements.

OMP_NUM_THREADS=1 python -m benchmarks.optimizer_step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optree
import torch
from torch import Tensor

import shardfn as sf
from benchmarks.model import SEED, Config, makers
from benchmarks.report import Goal, interleaved, parser, publish
from shardfn.testing import World


def adamw(leaves: Sequence[Tensor]) -> Callable[[], None]:
    for leaf in leaves:
        leaf.grad = torch.full_like(leaf, 1e-3)
    optimizer = torch.optim.AdamW(leaves, lr=1e-3, fused=True)

    def run() -> None:
        optimizer.step()

    return run


def measure(config: Config, repeats: int) -> tuple[int, int, dict[str, float]]:
    torch.set_num_threads(1)
    mesh = sf.make_mesh(data=1, device="cpu")
    flat = optree.tree_leaves(sf.init_sharded(makers(config), SEED, mesh, sf.full_shard("data")))
    numel = sum(leaf.numel() for leaf in flat)
    runs = {"shards": adamw(flat), "one tensor": adamw([torch.cat(flat)])}
    interleaved(runs, repeats=2, inner=1)
    return len(flat), numel, interleaved(runs, repeats=repeats, inner=1)


def main() -> None:
    options = parser("AdamW on flat shards, against the same kernel on one tensor.")
    options.add_argument("--repeats", type=int, default=41)
    args = options.parse_args()
    ((count, numel, took),) = World(1, kind="fake", deadline=600).run(measure, Config(), args.repeats)
    rows = [
        {"AdamW(fused=True) on": f"{count} flat shards", "ms": took["shards"] * 1e3},
        {"AdamW(fused=True) on": "one tensor", "ms": took["one tensor"] * 1e3},
    ]
    goals = [Goal("flat shards / one tensor", took["shards"] / took["one tensor"], 1.05)]
    publish(f"an optimizer step on {numel / 1e6:.1f}M elements, one process", rows, goals, args.json)


if __name__ == "__main__":
    main()
