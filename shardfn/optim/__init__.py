"""Optimizers on local shards, schedules and norms: pure functions whose state is a pytree like the parameters.

Imports `shards`, `collectives`, `quant`, `mesh` and `compat`.
"""

from shardfn.optim.adafactor import adafactor
from shardfn.optim.elementwise import Sophia, adam, adamw, adamw8bit, lion, lion8bit, sgd, sophia
from shardfn.optim.hyperparameters import warmup_cosine, warmup_linear, wsd
from shardfn.optim.kfac import Kfac, kfac
from shardfn.optim.lamb import lamb
from shardfn.optim.muon import muon
from shardfn.optim.norms import Norms, clip_by_global_norm, clip_by_value, global_norm, norms, vdot
from shardfn.optim.optimizer import Optimizer, Transform, chain, map_trained, shard_state
from shardfn.optim.param_groups import param_groups_from_rules, rules_from_param_groups
from shardfn.optim.precision import dynamic_loss_scale, fp32_master_weights, stochastic_rounding
from shardfn.optim.shampoo import kl_shampoo, shampoo, soap
from shardfn.optim.torch import from_torch
from shardfn.optim.wrappers import all_finite, ema, masked, multi_steps, skip_nonfinite
from shardfn.shards.pieces import Piece

__all__ = [
    "Kfac",
    "Norms",
    "Optimizer",
    "Piece",
    "Sophia",
    "Transform",
    "adafactor",
    "adam",
    "adamw",
    "adamw8bit",
    "all_finite",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "dynamic_loss_scale",
    "ema",
    "fp32_master_weights",
    "from_torch",
    "global_norm",
    "kfac",
    "kl_shampoo",
    "lamb",
    "lion",
    "lion8bit",
    "map_trained",
    "masked",
    "multi_steps",
    "muon",
    "norms",
    "param_groups_from_rules",
    "rules_from_param_groups",
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
