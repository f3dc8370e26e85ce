"""What is around a step: which rows each rank reads, the loop, its checkpoints, and what is seen of it.

Imports `checkpoint`, `stages`, `shards`, `collectives` and `mesh`.
"""
