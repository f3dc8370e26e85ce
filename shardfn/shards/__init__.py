"""Where parameters live: placements, layouts, flat shards, and how trees are cut, drawn and put together.

It may import `collectives` and what is below.
"""
