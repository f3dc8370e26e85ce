"""Models of known shapes, to be planned: their sizes, their functions, and how a step trains them.

It imports `plan`, `parallel`, `interop`, `optim`, `stages`, `shards` and `mesh`.
"""
