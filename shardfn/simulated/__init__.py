"""A pretended accelerator: what programs launch on it, what memory they hold, and where the host waits for it.

It imports `collectives`, `mesh` and `compat`.
"""
