"""Where numbers are that have no room on the device: in the host's memory, or on disk.

It imports `compat` and `mesh`. Those who place parameters, gather them, reduce gradients and step ask it.
"""
