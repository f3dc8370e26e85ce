"""Collectives: the differentiable functions, the ops under them, and transfers into given buffers.

Imports `check`, `mesh` and `compat`.
"""
