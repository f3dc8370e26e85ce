"""Saves and loads training state atomically, from any mesh to any other, in formats that other systems read.

Imports `shards`, `collectives`, `mesh` and `compat`.
"""

from shardfn.checkpoint.contents import ByRank
from shardfn.checkpoint.huggingface import export_hf, import_hf
from shardfn.checkpoint.loading import latest, load
from shardfn.checkpoint.matching import Differences
from shardfn.checkpoint.saving import Pending, save, save_async, wait_for_saves
from shardfn.checkpoint.team import CheckpointError
from shardfn.checkpoint.torch_optimizer import load_torch_optimizer, torch_optimizer
from shardfn.checkpoint.verifying import Damage, VerifyReport, verify

__all__ = [
    "ByRank",
    "CheckpointError",
    "Damage",
    "Differences",
    "Pending",
    "VerifyReport",
    "export_hf",
    "import_hf",
    "latest",
    "load",
    "load_torch_optimizer",
    "save",
    "save_async",
    "torch_optimizer",
    "verify",
    "wait_for_saves",
]
