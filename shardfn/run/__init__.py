"""What is around a step: which rows each rank reads, the loop, its checkpoints, and what is seen of it.

Imports `checkpoint`, `optim`, `transforms`, `shards`, `tiers`, `collectives` and `mesh`.
"""

from shardfn.run.batching import Batches, batches
from shardfn.run.checking import Checked, checked
from shardfn.run.feed import Feed
from shardfn.run.history import Run
from shardfn.run.logs import jsonl, tensorboard
from shardfn.run.looping import loop
from shardfn.run.progress import progress
from shardfn.run.streams import Stream
from shardfn.run.tokens import TokenFile, write_tokens
from shardfn.run.windows import packed_windows, token_windows

__all__ = [
    "Batches",
    "Checked",
    "Feed",
    "Run",
    "Stream",
    "TokenFile",
    "batches",
    "checked",
    "jsonl",
    "loop",
    "packed_windows",
    "progress",
    "tensorboard",
    "token_windows",
    "write_tokens",
]
