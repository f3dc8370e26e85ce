"""Transforms of functions on a mesh: `shard_map`, `value_and_grad`, custom derivatives.

Imports `shards` and what is below.
"""
