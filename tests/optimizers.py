"""Optimizers by name, for tests that try many of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

import shardfn.optim as so

OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "adam": lambda: so.adam(1e-2),
    "adamw": lambda: so.adamw(1e-2),
    "pure": lambda: so.adamw(1e-2, donate=False),
    "adamw in bfloat16": lambda: so.adamw(1e-2, state_dtype=torch.bfloat16),
    "adamw8bit": lambda: so.adamw8bit(1e-2),
    "lion": lambda: so.lion(1e-3),
    "lion8bit": lambda: so.lion8bit(1e-3),
    "adafactor": lambda: so.adafactor(1e-2),
    "lamb": lambda: so.lamb(1e-2),
    "muon": lambda: so.masked(so.muon(0.02), lambda path, shape: len(shape) == 2, so.adamw(1e-2)),
    "shampoo": lambda: so.shampoo(1e-2, ridge=1e-6, every=2, block=5),
    "kl_shampoo": lambda: so.kl_shampoo(1e-2, ridge=1e-6, every=2, block=5),
    "soap": lambda: so.soap(1e-2, every=2, block=5),
    "sophia": lambda: so.sophia(1e-2),
    "averaged": lambda: so.ema(so.adamw(1e-2), 0.9),
}


def optimizers_named(names: str) -> dict[str, Callable[[], so.Optimizer]]:
    """Some of them, by names with commas between."""
    return {name: OPTIMIZERS[name] for name in names.split(", ")}
