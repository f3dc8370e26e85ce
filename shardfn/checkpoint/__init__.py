"""Training state on disk: whole or absent, from any mesh to any other, in a format that other systems read.

`save` and `load` for a pytree of flat shards, tensors, numbers and generators; `save_async` while training goes on;
`latest` for what to resume from. `verify` reads every byte. `export` and `import_` are for Hugging Face's safetensors.
"""

from shardfn.checkpoint.contents import ByRank
from shardfn.checkpoint.huggingface import export, import_
from shardfn.checkpoint.loading import Differences, latest, load
from shardfn.checkpoint.saving import Pending, finish, save, save_async
from shardfn.checkpoint.team import CheckpointError
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
    "save",
    "save_async",
    "verify",
]
