"""Sharded parameters: placements, layouts and flat shards, and functions that shard, initialize and gather trees.

Imports `collectives` and what is below.
"""

from shardfn.mesh.spec import global_shape, local_shape
from shardfn.shards.layout import FlatShard, Layout, local_parameters
from shardfn.shards.partition import combine, flatten_by_path, partition
from shardfn.shards.putting import to_tier
from shardfn.shards.replicated import assert_replicated
from shardfn.shards.sharding import shard_named

__all__ = [
    "FlatShard",
    "Layout",
    "assert_replicated",
    "combine",
    "flatten_by_path",
    "global_shape",
    "local_parameters",
    "local_shape",
    "partition",
    "shard_named",
    "to_tier",
]
