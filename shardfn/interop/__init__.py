"""Modules of torch and models of Hugging Face as pure functions of sharded parameters, and their files.

Imports `checkpoint`, `stages`, `shards`, `collectives`, `mesh` and `compat`.
"""

from shardfn.interop.functional import Functional, functional
from shardfn.interop.loading import load
from shardfn.interop.meta import meta
from shardfn.interop.saving import save_pretrained

__all__ = ["Functional", "functional", "meta", "load", "save_pretrained"]
