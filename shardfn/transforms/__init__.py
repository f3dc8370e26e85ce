"""What a function and its gradient mean on a mesh: `shard_map`, `value_and_grad`, custom derivatives.

Imports `shards` and what is below.
"""
