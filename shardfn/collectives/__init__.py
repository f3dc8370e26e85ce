"""Collectives: the differentiable functions, the ops under them, and transfers into given buffers.

Imports `mesh` and `compat`.
"""
