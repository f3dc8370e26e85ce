"""Turns torch modules and Hugging Face models into pure functions of sharded parameters; loads and saves their files.

Imports `checkpoint`, `stages`, `parallel`, `shards`, `collectives`, `mesh` and `compat`.
"""

from shardfn.interop.deferred_init import meta
from shardfn.interop.functional import Functional, functional
from shardfn.interop.loading import load
from shardfn.interop.saving import save_pretrained
from shardfn.interop.tensor_plan import GPT2, LLAMA

__all__ = ["GPT2", "LLAMA", "Functional", "functional", "load", "meta", "save_pretrained"]
