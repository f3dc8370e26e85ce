"""Strategies other than `ddp`, `zero2`, `full_shard` and `hybrid_shard`, which are names of shardfn itself."""

from shardfn.shards.placement import (
    from_name,
    hfsdp,
    hpz,
    hybrid_shard_zero2,
    mics,
    replicate_small,
    shard_grad_op,
    zero1,
    zeropp,
)

__all__ = [
    "from_name",
    "hfsdp",
    "hpz",
    "hybrid_shard_zero2",
    "mics",
    "replicate_small",
    "shard_grad_op",
    "zero1",
    "zeropp",
]
