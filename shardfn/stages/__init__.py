"""Calls of stages: the schedule of their gathers and reductions, and the buffers that they borrow.

Imports `transforms` and what is below.
"""
