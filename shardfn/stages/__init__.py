"""Calls of stages: the schedule of their gathers and reductions, and the pooled buffers for these.

Imports `transforms` and what is below.
"""
