"""Which ranks there are, and what is said by their names: meshes, axes, process groups, specs, who waits for whom.

Nothing here moves numbers. It may import `compat` alone.
"""
