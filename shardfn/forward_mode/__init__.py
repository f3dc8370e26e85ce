"""Derivatives along directions: `jvp`, stages of pairs of values and tangents, and Jacobians.

Imports `stages` and what is below.
"""
