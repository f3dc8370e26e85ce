"""Sharded parameters: placements, layouts and flat shards, and functions that shard, initialize and gather trees.

Imports `collectives` and what is below.
"""
