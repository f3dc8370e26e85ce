"""The configurations of other systems, as the lines of shardfn that do the same.

Imports `shards`.
"""
