"""Predicts the memory that a step will take, and shows what the ranks of a mesh hold.

It imports `stages`, `optim`, `tiers`, `shards`, `quant`, `mesh` and `compat`.
"""
