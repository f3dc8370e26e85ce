"""What a step will take, said before anything of it is there.

It imports `stages`, `optim`, `tiers`, `shards`, `quant`, `mesh` and `compat`.
"""
