"""The collectives of a training step and the bytes they send, for every strategy and format, compared with formulas.

    python -m benchmarks.wire

A fake world of 4 ranks, `replica=2, shard=2`, and the ledger of a step on stages of two matrices. The formulas are
those of docs/reference/strategies.md and docs/reference/few-bits.md: a gather or scatter of B bytes along k ranks sends
B (k - 1) / k bytes, an all-reduce twice that; a number in a format takes its bits and its part of a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.few_bits_training import FORMATS
from benchmarks.model import perceptron
from benchmarks.report import Goal, parser, publish
from benchmarks.strategies import STRATEGIES
from shardfn import quant
from shardfn.testing import World

RANKS, LAYERS, WIDTH = 4, 4, 64
ONCE, AGAIN = LAYERS, LAYERS - 2  # the last two stages are still gathered when backward begins
STAGE = 2 * WIDTH * 2 * WIDTH + RANKS * 16  # numbers: parameters, and 64 bytes at the end of each piece
DATA, PAIR, PART = 3 / 4, 1 / 2, 1 / 4  # parts of a stage: over both axes; over one; over the other, of a half
SCALE = 4.0  # bytes

# The collectives of a step: how many stages have one, and the part of a stage that a rank sends.
FORMULAS: dict[str, list[tuple[int, float]]] = {
    "ddp": [(ONCE, 2 * DATA)],
    "zero1": [(ONCE, DATA), (ONCE, DATA)],
    "shard_grad_op": [(ONCE, DATA), (ONCE, DATA)],
    "full_shard": [(ONCE, DATA), (AGAIN, DATA), (ONCE, DATA)],
    "hybrid_shard": [(ONCE, PAIR), (AGAIN, PAIR), (ONCE, PAIR), (ONCE, 2 * PART)],
    "hybrid_shard_zero2": [(ONCE, PAIR), (ONCE, PAIR), (ONCE, 2 * PART)],
    "hfsdp": [(ONCE, PAIR), (AGAIN, PAIR), (ONCE, PAIR), (ONCE, PART), (ONCE, PART)],
    "hpz": [(ONCE, DATA), (AGAIN, PAIR), (ONCE, DATA)],
    "mics": [(ONCE, PART), (ONCE, PAIR), (AGAIN, PART), (AGAIN, PAIR), (ONCE, DATA)],
}


@dataclass(frozen=True)
class Sent:
    """The calls of collectives, and the bytes that a rank sends, in a step."""

    calls: int
    bytes: float


def rate(format: quant.Format) -> float:
    """Bytes per number, with scales; scales in 8 bits have one float for each 256 scales."""
    bits = 8 if "8" in format.name else 4
    return bits / 8 + (1 + SCALE / 256 if format.double else SCALE) / format.block


def by_formula(name: str, gather: float = 4.0, reduce: float = 4.0) -> Sent:
    """The formula of a strategy, for these bytes per number; sums in few bits run over one axis after the other."""
    *gathers, (times, part) = FORMULAS[name]
    sums = [(times, part)] if reduce == 4 else [(times, PAIR), (times, PART)]
    numbers = sum(n * part * gather for n, part in gathers) + sum(n * part * reduce for n, part in sums)
    return Sent(sum(n for n, _ in (*gathers, *sums)), numbers * STAGE)


def ledger_of(strategy: Any, **wire: Any) -> Sent:
    """The ledger's count of the second step."""
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    layers = [{"up": torch.ones(WIDTH, 2 * WIDTH), "down": torch.ones(2 * WIDTH, WIDTH)} for _ in range(LAYERS)]
    params, block = sf.shard(layers, mesh, strategy), sf.stage(perceptron, **wire)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params):
            x = block(p, x)
        return x.square().sum()

    gradient = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=...)
    optimizer = so.adamw(1e-3)
    state = optimizer.init(params)
    for _ in range(2):
        with sf.collectives.ledger() as log:
            _, grads = gradient(params, torch.ones(8, WIDTH))
            params, state = optimizer.step(params, grads, state)
    return Sent(log.count(), log.bytes())


def measured() -> dict[str, tuple[Sent, Sent]]:
    """The counts of the ledger and of the formula."""
    full = STRATEGIES["full_shard"]
    found = {name: (ledger_of(strategy), by_formula(name)) for name, strategy in STRATEGIES.items()}
    for format in FORMATS:
        found[f"gather_format={format}"] = (
            ledger_of(full, gather_format=format),
            by_formula("full_shard", gather=rate(format)),
        )
        found[f"reduce_format={format}"] = (
            ledger_of(full, reduce_format=format),
            by_formula("full_shard", reduce=rate(format)),
        )
    few = by_formula("hpz", rate(quant.int8(256)), rate(quant.int4(64)))
    return found | {"zeropp": (ledger_of(sf.strategies.zeropp(shard="shard", replica="replica")), few)}


def main() -> None:
    args = parser("What a training step sends, with every strategy and format, compared with formulas.").parse_args()
    (found,) = World(RANKS, kind="fake", deadline=120).run(measured)
    rows, goals = [], []
    for name, (sent, formula) in found.items():
        more = sent.bytes - formula.bytes
        rows.append(
            {
                "by": name,
                "calls": sent.calls,
                "MB": sent.bytes / 1e6,
                "formula's": formula.bytes / 1e6,
                "bytes more": more,
            }
        )
        goals.append(Goal(f"{name}: collectives of a step", sent.calls, formula.calls))
        goals.append(Goal(f"{name}: bytes of a step, off the formula", abs(more), 0))
    publish(f"what a rank sends in a step, {LAYERS} stages of {STAGE:,} numbers", rows, goals, args.json)


if __name__ == "__main__":
    main()
