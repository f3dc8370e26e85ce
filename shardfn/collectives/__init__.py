"""How values move between ranks: the differentiable functions, the ops under them, and moves into given buffers.

Imports `mesh` and `compat`.
"""
