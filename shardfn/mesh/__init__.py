"""Meshes, axes, process groups and partition specs, and a watchdog for ranks that wait for each other.

This package moves no tensors. It may import `compat` alone.
"""
