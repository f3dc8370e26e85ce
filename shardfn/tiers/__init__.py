"""Storage for tensors that have no room on the device: the host's memory, or disk.

It imports `compat` and `mesh`. The code that places parameters, gathers them, reduces gradients and steps uses it.
"""
