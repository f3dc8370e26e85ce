"""When it happens: the calls of stages, the schedule of their gathers and sums, the buffers they borrow.

Imports `transforms` and what is below.
"""
