"""The training loop and what surrounds a step: batches, checkpoints, resuming, and reports.

Imports `checkpoint`, `optim`, `transforms`, `shards`, `tiers`, `collectives` and `mesh`.
"""

from shardfn.run.batch_consistency import CheckedLoader, check_loader
from shardfn.run.batching import Batches, Feed, batches
from shardfn.run.looping import Run, loop
from shardfn.run.reports import jsonl, progress, tensorboard
from shardfn.run.streams import Stream
from shardfn.run.tokens import TokenFile, packed_windows, token_windows, write_tokens

__all__ = [
    "Batches",
    "CheckedLoader",
    "Feed",
    "Run",
    "Stream",
    "TokenFile",
    "batches",
    "check_loader",
    "jsonl",
    "loop",
    "packed_windows",
    "progress",
    "tensorboard",
    "token_windows",
    "write_tokens",
]
