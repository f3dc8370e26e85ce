"""What a function and its gradient mean on a mesh: `shard_map`, `value_and_grad`, custom derivatives.

It may import `shards` and what is below.
"""
