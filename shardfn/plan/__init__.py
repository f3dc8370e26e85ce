"""What a step will take, before anything of it is there, and what the ranks of a mesh hold.

It imports `stages`, `optim`, `tiers`, `shards`, `quant`, `mesh` and `compat`.
"""
