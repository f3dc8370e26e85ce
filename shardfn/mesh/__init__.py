"""Meshes, axes, process groups and partition specs, and the watch over ranks that wait for each other.

This package moves no tensors. It may import `compat` alone.
"""
