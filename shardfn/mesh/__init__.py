"""Which ranks there are: meshes, axes, process groups, specs, and who waits for whom.

Imports `compat` alone.
"""
