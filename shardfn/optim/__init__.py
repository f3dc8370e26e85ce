"""Optimizers on local shards, schedules and norms: pure functions whose state is a pytree like the parameters.

Imports `shards`, `collectives`, `quant`, `mesh` and `compat`.
"""

from shardfn.optim.adafactor import adafactor
from shardfn.optim.elementwise import Sophia, adam, adamw, adamw8bit, lion, lion8bit, sgd, sophia
from shardfn.optim.hyperparameters import linear, warmup_cosine, wsd
from shardfn.optim.kfac import Kfac, kfac
from shardfn.optim.lamb import lamb
from shardfn.optim.muon import muon
from shardfn.optim.norms import Norms, clip_by_global_norm, clip_by_value, global_norm, norms, vdot
from shardfn.optim.optimizer import Optimizer, Transform, chain, map_trained, shard_state
from shardfn.optim.precision import loss_scaled, master, stochastic_rounding
from shardfn.optim.shampoo import kl_shampoo, shampoo, soap
from shardfn.optim.torch import from_torch
from shardfn.optim.wrappers import accumulate, ema, finite, masked, skip_nonfinite
from shardfn.shards.pieces import Piece

multi_steps = accumulate
warmup_linear = linear

__all__ = [
    "Kfac",
    "Norms",
    "Optimizer",
    "Piece",
    "Sophia",
    "Transform",
    "accumulate",
    "adafactor",
    "adam",
    "adamw",
    "adamw8bit",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "ema",
    "finite",
    "from_torch",
    "global_norm",
    "kfac",
    "kl_shampoo",
    "lamb",
    "linear",
    "lion",
    "lion8bit",
    "loss_scaled",
    "map_trained",
    "masked",
    "master",
    "multi_steps",
    "muon",
    "norms",
    "sgd",
    "shampoo",
    "shard_state",
    "skip_nonfinite",
    "soap",
    "sophia",
    "stochastic_rounding",
    "vdot",
    "warmup_cosine",
    "warmup_linear",
    "wsd",
]
