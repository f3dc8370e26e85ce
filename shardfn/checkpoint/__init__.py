"""Saves and loads training state atomically, from any mesh to any other, in formats that other systems read.

Imports `shards`, `collectives`, `mesh` and `compat`.
"""

from shardfn.checkpoint.contents import ByRank
from shardfn.checkpoint.huggingface import export, import_
from shardfn.checkpoint.loading import latest, load
from shardfn.checkpoint.matching import Differences
from shardfn.checkpoint.saving import Pending, finish, save, save_async
from shardfn.checkpoint.team import CheckpointError
from shardfn.checkpoint.torch_optimizer import load_torch_optimizer, torch_optimizer
from shardfn.checkpoint.verifying import Damage, Verdict, verify

__all__ = [
    "ByRank",
    "CheckpointError",
    "Damage",
    "Differences",
    "Pending",
    "Verdict",
    "export",
    "finish",
    "import_",
    "latest",
    "load",
    "load_torch_optimizer",
    "save",
    "save_async",
    "torch_optimizer",
    "verify",
]
