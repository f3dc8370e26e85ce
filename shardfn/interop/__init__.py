"""Modules of torch and models of Hugging Face as pure functions of sharded parameters, and their files.

Imports `checkpoint`, `stages`, `parallel`, `shards`, `collectives`, `mesh` and `compat`.
"""

from shardfn.interop.functional import Functional, functional
from shardfn.interop.tensor_plan import GPT2, LLAMA

__all__ = ["GPT2", "LLAMA", "Functional", "functional"]
