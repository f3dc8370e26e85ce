"""Low-rank adapters, on functions and on modules: made, used, merged, and exchanged with peft.

Imports `interop`, `checkpoint`, `quant`, `shards`, `mesh` and `compat`.
"""

from shardfn.lora.adapters import Adapted, Adapter, Recipe, adapted
from shardfn.lora.files import load, save_pretrained
from shardfn.lora.init import init
from shardfn.lora.merging import merge, unmerge

__all__ = ["Adapted", "Adapter", "Recipe", "adapted", "init", "load", "merge", "save_pretrained", "unmerge"]
