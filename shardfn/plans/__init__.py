"""Plans what a step computes, sends and holds, and shows what the ranks of a mesh hold.

It imports `stages`, `optim`, `tiers`, `shards`, `simulated`, `collectives`, `quant`, `mesh` and `compat`.
"""
