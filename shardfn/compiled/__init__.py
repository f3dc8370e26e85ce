"""Whole steps as one program: compiled by inductor, or captured as a graph of the device.

Imports `stages` and what is below.
"""
