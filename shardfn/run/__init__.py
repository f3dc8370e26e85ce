"""What is around a step: which rows each rank reads, the loop, its checkpoints, and what is seen of it.

Imports `checkpoint`, `stages`, `shards`, `collectives` and `mesh`.
"""

from shardfn.run.history import Run
from shardfn.run.logs import jsonl, tensorboard
from shardfn.run.looping import loop
from shardfn.run.progress import progress

__all__ = ["Run", "jsonl", "loop", "progress", "tensorboard"]
