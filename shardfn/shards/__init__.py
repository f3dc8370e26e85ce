"""Where parameters live: placements, layouts and flat shards, and how trees are sharded, initialised and gathered.

Imports `collectives` and what is below.
"""
