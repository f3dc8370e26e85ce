"""A language model trained with messages, optimizers and parameters in few bits, compared with a float32 run.

The text is that of `examples/train_lm.py`, bytes of the standard library; so is the model, but smaller by default. All
runs start from the same parameters and use the same batches, on a mesh of `replica=2, shard=2`. Compared are the bits
per byte of files that no run has seen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import optree
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage
from benchmarks.report import Goal
from examples.run import corpus, fit, stretches
from examples.train_lm import DATA, Config, init, loss_fn
from shardfn import P, quant
from shardfn.optim.hyperparameters import Schedule
from shardfn.quant.formats import format_of

FULL = sf.full_shard(DATA)
MODELS = {
    "small": Config(width=64, hidden=176, context=64, batch=32),
    "example": Config(),  # as in examples/train_lm.py
    "tiny": Config(width=32, heads=2, layers=1, hidden=64, context=8, batch=4),
}
FEW, FOUR = 0.5, 2.0  # % more bits per byte than float32: limits for 8 bits, and for gradients in 4 bits
Make = Callable[[Schedule], so.Optimizer]
FORMATS = [
    quant.nf4(), quant.nf4(double=True), quant.fp4(), quant.int4(), quant.int8(), quant.fp8_e4m3(), quant.fp8_e5m2(),
]  # fmt: skip


def decay(path: str, shape: tuple[int, ...]) -> float:
    return 0.1 if len(shape) > 1 else 0.0


def adamw(rate: Schedule, **more: Any) -> so.Optimizer:
    return so.adamw(rate, b2=0.98, weight_decay=decay, **more)


def adamw8bit(rate: Schedule) -> so.Optimizer:
    return so.adamw8bit(rate, b2=0.98, weight_decay=decay)


def slow(rate: Schedule) -> Schedule:
    """A smaller learning rate for Lion, whose steps move every element by the whole rate."""
    return lambda step: rate(step) / 5


@dataclass(frozen=True)
class Recipe:
    """How a run differs from the float32 run, and by how many % its bits per byte may exceed those of `beside`."""

    make: Make = adamw
    strategy: sf.Placement = FULL
    dtype: torch.dtype = torch.float32
    most: float = FEW
    beside: str = "float32"


RECIPES = {
    "float32": Recipe(),
    "float32, lion": Recipe(lambda rate: so.lion(slow(rate), weight_decay=decay), beside="float32, lion"),
    "gather_format=int8(256)": Recipe(strategy=replace(FULL, gather_format=quant.int8(256))),
    "gather_format=fp8_e4m3(128)": Recipe(strategy=replace(FULL, gather_format=quant.fp8_e4m3(128))),
    "reduce_format=int8(256)": Recipe(strategy=replace(FULL, reduce_format=quant.int8(256))),
    "reduce_format=int4(64)": Recipe(strategy=replace(FULL, reduce_format=quant.int4(64)), most=FOUR),
    "zeropp": Recipe(strategy=sf.strategies.zeropp(shard="shard", replica="replica"), most=FOUR),
    "adamw8bit": Recipe(adamw8bit),
    "lion8bit": Recipe(lambda rate: so.lion8bit(slow(rate), weight_decay=decay), beside="float32, lion"),
    "adamw, state_dtype=bfloat16": Recipe(lambda rate: adamw(rate, state_dtype=torch.bfloat16)),
    "bfloat16, master": Recipe(lambda rate: so.fp32_master_weights(adamw(rate)), dtype=torch.bfloat16),
    "bfloat16, stochastic_rounding": Recipe(
        lambda rate: so.stochastic_rounding(adamw(rate, state_dtype=torch.bfloat16)), dtype=torch.bfloat16
    ),
}


# --- on each rank ---


class Training:
    """Training runs on one mesh and one text."""

    def __init__(self, config: Config, steps: int, seed: int) -> None:
        self.config, self.steps, self.seed = config, steps, seed
        self.mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
        self.text, self.held_out = corpus()
        self.evaluate = sf.shard_map(self.nats, mesh=self.mesh, in_specs=(..., P(DATA)), out_specs=P())

    def loss(self, params: Any, tokens: Tensor) -> Tensor:
        return loss_fn(params, tokens.long(), self.config)

    def batches(self, text: Tensor) -> sf.run.Batches:
        config = self.config
        return sf.run.batches(stretches(text, config.context + 1), self.mesh, DATA, config.batch, self.seed)

    def nats(self, params: Any, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return self.loss(params, rows)

    def whole_bits(self, params: Any) -> float:
        """Bits per byte of held-out files with these whole parameters, computed in float32."""
        cut = sf.shard(optree.tree_map(torch.Tensor.float, params), self.mesh, FULL)
        found = [self.evaluate(cut, rows) for rows in islice(self.batches(self.held_out)(0), 64)]
        return torch.stack(found).double().mean().item() / math.log(2)

    def trained(self, recipe: Recipe) -> Any:
        """The whole parameters after a run."""
        rate = so.warmup_cosine(self.config.rate, warmup=min(40, self.steps), steps=self.steps, end=6e-4)
        optimizer = so.chain(so.clip_by_global_norm(self.config.clip), recipe.make(rate))
        params = sf.shard(init(replace(self.config, dtype=recipe.dtype), self.seed), self.mesh, recipe.strategy)

        return sf.unshard(fit(self.loss, params, self.mesh, optimizer, self.batches(self.text), self.steps)[0])

    def run(self, name: str) -> float:
        return self.whole_bits(self.trained(RECIPES[name]))

    @functools.cached_property
    def reference(self) -> Any:
        return self.trained(RECIPES["float32"])

    def kept_in(self, name: str, block: int, double: bool) -> tuple[float, float]:
        """Bits per byte of the float32 model, with its matrices in a format, and unchanged."""
        packed = quant.quantize(self.reference, format_of(name, block, double))
        return self.whole_bits(quant.dequantize(packed)), self.whole_bits(self.reference)


def built(usage: Usage, config: Config, steps: int, seed: int) -> dict[str, Callable[..., Any]]:
    training = Training(config, steps, seed)
    return {"run": training.run, "kept in": training.kept_in}


# --- the tables ---


@contextmanager
def ranks(model: str, steps: int, seed: int = 0) -> Iterator[Crew]:
    with Crew(4, built, MODELS[model], 2 if model == "tiny" else steps, seed) as crew:
        yield crew


def convergence(model: str, steps: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Each recipe's final bits per byte, compared with float32."""
    with ranks(model, steps) as crew:
        bits = {name: crew.turn("run", name)[0] for name in RECIPES}
    more = {name: (bits[name] / bits[recipe.beside] - 1) * 100 for name, recipe in RECIPES.items()}
    rows = [
        {"training": name, "bits per byte": f"{bits[name]:.4f}", "beside": recipe.beside, "% more": more[name]}
        for name, recipe in RECIPES.items()
    ]
    goals = [
        Goal(f"{name}: % more bits per byte than {recipe.beside}", more[name], recipe.most)
        for name, recipe in RECIPES.items()
        if name != recipe.beside
    ]
    return rows, goals


def kept(model: str, steps: int) -> list[dict[str, Any]]:
    """Bits per byte of a trained model with its matrices in each format."""
    with ranks(model, steps) as crew:
        bits = {str(each): crew.turn("kept in", each.name, each.block, each.double)[0] for each in FORMATS}
    return [
        {"a trained model kept in": name, "bits per byte": f"{few:.4f}", "float32's": f"{whole:.4f}",
         "% more": (few / whole - 1) * 100}
        for name, (few, whole) in bits.items()
    ]  # fmt: skip
