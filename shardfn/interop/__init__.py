"""Modules of torch and models of Hugging Face as pure functions of sharded parameters, and their files.

Imports `checkpoint`, `stages`, `shards`, `collectives`, `mesh` and `compat`.
"""

from shardfn.interop.functional import Functional, functional

__all__ = ["Functional", "functional"]
